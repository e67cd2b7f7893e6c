"""What all members of the linear-attention family ask of their arrays, besides what their schemas say."""

from tiles.arrays import Operand
from tiles.dtypes import bf16, fp16, fp32
from tiles.schema import Problem

from ..options import SCALE_RANGE

DTYPES = {"bfloat16": bf16, "float16": fp16, "float32": fp32}
COLUMNS = 16, 256  # key_dim and value_dim are multiples of the first, up to the second
NAMES = {"K": "key_dim", "V": "value_dim"}


def check(problem: Problem, queries: str = "q", values: str = "v") -> None:
    """ValueError: the kernels do not take these extents. queries, values: the names of a member's arguments that are q and v
    to the kernels."""
    low, high = COLUMNS
    for axis, name in ("K", queries), ("V", values):
        extent = problem.extents[axis]
        if extent % low or not low <= extent <= high:
            raise problem.error(name, f"{NAMES[axis]} must be a multiple of {low}, from {low} to {high}: {extent}", name)
    heads, key_heads = problem("HG")
    if not key_heads:
        raise problem.error(queries, "must have at least one head", queries)
    if heads % key_heads:
        raise problem.error(values, f"heads must be a multiple of {queries}'s", values, queries)
    if problem.extents.get("S", 0) >= 2**31:
        raise problem.error(queries, "sequence must be shorter than 2**31", queries)


def by_channel(problem: Problem) -> bool:
    """Does each channel of the keys have a decay of its own? ValueError: the numbers of one token's channels are not
    contiguous."""
    decay = problem.forms.get("decay")
    if decay is None or "K" not in problem.axes("decay"):
        return False
    if decay.strides[-1] != decay.itemsize and decay.extent:
        raise ValueError(f"decay: last axis must be contiguous: decay.strides={decay.strides} bytes, decay.shape={decay.shape}")
    return True


def scale_of(problem: Problem, scale: float | None) -> float:
    """The scale, Dk^-1/2 by default. ValueError: it is not finite in float32."""
    scale = problem.extents["K"] ** -0.5 if scale is None else scale
    if not abs(scale) <= SCALE_RANGE[1]:
        raise ValueError(f"scale: must be finite in float32: {scale=}")
    return scale


def varlen(problem: Problem) -> bool:
    """Do the sequences follow one another in a single batch (cu_seqlens)?"""
    return "cu_seqlens" in problem


def idle(problem: Problem, return_state: bool) -> bool:
    """Is there nothing to compute? A sequence without tokens has no output, but it still has a state."""
    batch, length, heads, sequences = problem("BSHN")
    return not heads or not ((batch and length) or (return_state and sequences))


def arrays(problem: Problem, return_state: bool) -> dict[str, Operand | None]:
    """{parameter of a kernel: array} of what the kernels of both `linear` and `delta_rule` take."""
    return {
        "gQ": problem["q"],
        "gK": problem["k"],
        "gV": problem["v"],
        "gEnds": problem["cu_seqlens"],
        "gStart": problem["initial_state"],
        "gState": problem["state"] if return_state else None,
    }


def padded(key_dim: int, sizes) -> int:
    """The least of these sizes that is not below key_dim."""
    return min(size for size in sizes if size >= key_dim)
