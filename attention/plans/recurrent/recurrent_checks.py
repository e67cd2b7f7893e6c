"""Checks of the recurrent family's arrays that schemas do not make, and helpers that the family's plans share."""

import math
from typing import Any, NamedTuple

from tiles.calls.schema import Problem
from tiles.dtypes import bf16, fp16, fp32
from tiles.launching.arrays import Operand

from ...families import HOPPER_FAMILY
from ...options import SCALE_RANGE, check_flag, check_number
from ...parts.recurrent.tokens import CHUNK

DTYPES = {"bfloat16": bf16, "float16": fp16, "float32": fp32}
GATES = "decay", "gate"  # the arguments that may be gates: as they are, or before a formula of theirs
DIM_STEP, MAX_DIM = 16, 256  # key_dim and value_dim are multiples of the first, up to the second


class DtOptions(NamedTuple):
    """How Mamba-2 computes its time steps from dt + dt_bias. dt_softplus: is softplus applied? dt_min, dt_max: the limits that
    they are clipped to; dt_max None: no upper limit."""

    dt_softplus: bool = False
    dt_min: float = 0.0
    dt_max: float | None = None

    @property
    def limits(self) -> tuple[float, float]:
        """(low, high), as mamba2 takes them in dt_limit."""
        return self.dt_min, math.inf if self.dt_max is None else self.dt_max


NO_DT_OPTIONS = DtOptions()
MAMBA2_AXES = {"heads_k": ("G", "groups"), "key_dim": ("N", "d_state"), "value_dim": ("P", "headdim")}  # as mamba_ssm has them


def make_dt_options(dt_softplus: Any, dt_limit: Any) -> DtOptions:
    """The DtOptions of these arguments of mamba2. TypeError, ValueError: dt_softplus is no bool, or dt_limit is not a pair of
    numbers 0 <= low <= high."""
    if not isinstance(dt_limit, (tuple, list)) or len(dt_limit) != 2:
        raise TypeError(f"dt_limit: must be a pair of numbers: {dt_limit=}")
    low, high = (check_number("dt_limit", x) for x in dt_limit)
    if low is None or high is None or not 0 <= low <= high or low == math.inf:
        raise ValueError(f"dt_limit: must be two numbers, 0 <= low <= high: {dt_limit=}")
    return DtOptions(check_flag("dt_softplus", dt_softplus), float(low), None if high == math.inf else float(high))


def check_extents(problem: Problem, queries: str = "q", values: str = "v") -> None:
    """ValueError: no kernel takes these extents. queries, values: the arguments of this member that are q and v for kernels."""
    for axis, name in ("key_dim", queries), ("value_dim", values):
        extent = problem.extents[axis]
        if extent % DIM_STEP or not DIM_STEP <= extent <= MAX_DIM:
            limits = f"must be a multiple of {DIM_STEP}, from {DIM_STEP} to {MAX_DIM}"
            has_scale = axis == "key_dim" and not problem.member.startswith("mamba2")
            remedy = ("; pad it with columns of zeros" + ", and pass scale" * has_scale) * (0 < extent < MAX_DIM)
            title = problem.schema.axis_title(axis)
            raise problem.error(name, f"{title} {limits}{remedy}: {title}={extent}", name)
    heads, key_heads = problem("heads", "heads_k")
    if not key_heads:
        raise problem.error(queries, "must have at least one head", queries)
    if heads % key_heads:
        raise problem.error(values, f"heads must be a multiple of {queries}'s", values, queries)
    if problem.extents.get("seqlen", 0) >= 2**31:
        raise problem.error(queries, "sequence must be shorter than 2**31", queries)


def has_channel_decay(problem: Problem) -> bool:
    """Does each channel of the keys have a decay of its own? ValueError: the channels of a decay are not contiguous."""
    for name in GATES:
        gate = problem.forms.get(name)
        if gate is not None and "key_dim" in problem.axes(name):
            if gate.strides[-1] != gate.itemsize and gate.extent:
                values = f"{name}.strides={gate.strides} bytes, {name}.shape={gate.shape}"
                raise ValueError(f"{name}: last axis must be contiguous: {values}")
            return True
    return False


def check_normalizer(problem: Problem, family: str | None, normalize: bool) -> None:
    """ValueError: kernels for Hopper are asked for where none divides by the sums of keys."""
    batch, length = problem("batch", "seqlen")
    if family == HOPPER_FAMILY and normalize and has_channel_decay(problem) and batch * length:
        raise ValueError(f"family: sm_90 takes decays of channels without normalize=True: {family=}, {normalize=}")


def resolve_scale(problem: Problem, scale: float | None) -> float:
    """The softmax scale, Dk^-1/2 by default. ValueError: it is not finite in float32."""
    scale = problem.extents["key_dim"] ** -0.5 if scale is None else scale
    if not abs(scale) <= SCALE_RANGE[1]:
        raise ValueError(f"scale: must be finite in float32: {scale=}")
    return scale


def is_varlen(problem: Problem) -> bool:
    """Are sequences packed in a single batch (cu_seqlens)?"""
    return "cu_seqlens" in problem


def has_nothing_to_compute(problem: Problem, return_state: bool) -> bool:
    """Are there no outputs and no states? A sequence without tokens has no output, but it has a state."""
    batch, length, heads, sequences = problem("batch", "seqlen", "heads", "sequences")
    return not heads or not ((batch and length) or (return_state and sequences))


def kernel_arrays(problem: Problem, return_state: bool) -> dict[str, Operand | None]:
    """{parameter of a kernel: array} for the arrays that both `linear` and `delta_rule` have."""
    return {
        "gQ": problem["q"],
        "gK": problem["k"],
        "gV": problem["v"],
        "gCuSeqlens": problem["cu_seqlens"],
        "gInitialState": problem["initial_state"],
        "gFinalState": problem["state"] if return_state else None,
    }


def pad_key_dim(key_dim: int, sizes) -> int:
    """The smallest of these sizes that is not below key_dim."""
    return min(size for size in sizes if size >= key_dim)


def split_state(name: str, state: Any, normalize: bool) -> tuple[Any, Any]:
    """(state, z) of the argument `name`. z is None without `normalize`; both are None if the argument is. TypeError: it is a
    pair and must be an array, or the other way round."""
    if state is None or (not normalize and not isinstance(state, tuple)):
        return state, None
    if not normalize:
        raise TypeError(f"{name}: must be an array, not a pair, which is for normalize=True")
    types = tuple(type(x).__name__ for x in state) if isinstance(state, tuple) else type(state).__name__
    if not isinstance(types, tuple) or len(types) != 2 or "NoneType" in types:
        raise TypeError(f"{name}: must be a pair (state, z) with normalize=True, not {types}")
    return state


class SplitStates(NamedTuple):
    """The states of a call of a gradient, each as (state, z). inputs: the initial state, and the gradient of the last one.
    gradients: the results for the gradient of the initial state."""

    inputs: tuple[Any, Any, Any, Any]
    gradients: tuple[Any, Any]


def split_states(normalize: bool, initial_state: Any, dstate: Any, dinitial_state: Any) -> SplitStates:
    """The SplitStates of these arguments; one of a pair dstate may be None. TypeError: as of split_state."""
    initial_parts = split_state("initial_state", initial_state, normalize)
    is_pair = normalize and isinstance(dstate, tuple) and len(dstate) == 2
    dstate_parts = dstate if is_pair else split_state("dstate", dstate, normalize)
    return SplitStates((*initial_parts, *dstate_parts), split_state("dinitial_state", dinitial_state, normalize))


def repeat_head_numbers(x: Operand | None, columns: int = CHUNK) -> Operand | None:
    """An array of heads, as one of heads and columns that are the same. Kernels load rates, biases and gates of heads as
    vectors of up to CHUNK numbers: columns that are not there would be 0."""
    return x.spread(1, columns) if x and len(x.form.shape) == 1 else x
