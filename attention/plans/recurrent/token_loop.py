"""The plan of calls that kernels/recurrent/linear_token_loop.py serves, token by token."""

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.launch import kernel_for

from ...kernels.recurrent import linear_token_loop
from ...kernels.recurrent.linear_token_loop import MAX_GRID_YZ, WARPS, Config
from .raw_inputs import NOT_RAW, RawOptions, formula_arrays
from .recurrent_checks import is_varlen


def check_grid(problem: Problem) -> None:
    """ValueError: there are too many heads or sequences for the second and third axis of a grid."""
    heads, sequences = problem("heads", "sequences")
    if max(heads, sequences) > MAX_GRID_YZ:
        raise ValueError(f"q: must have at most {MAX_GRID_YZ} heads and sequences: {heads=}, {sequences=}")


def decay_kind(decay: Operand | None) -> str:
    """The kind of a decay as configurations name it: "token" (of each token, or of each head), "channel", "" for None."""
    if decay is None:
        return ""
    return "channel" if len(decay.form.shape) == 4 else "token"


def launch(
    problem: Problem,
    arrays: dict[str, Operand | None],
    scale: float,
    normalize: bool = False,
    single: bool = False,
    columns: int = 0,
    raw: RawOptions = NOT_RAW,
) -> Step:
    """The launch for arrays (B, S, H, D), by the names of the kernel's parameters. single: see Config. columns: those of a
    state, if it has more of them than v. raw: the formulas for raw inputs. ValueError: too many heads or sequences for a
    grid."""
    heads, key_heads, key_dim, value_dim, sequences = problem("heads", "heads_k", "key_dim", "value_dim", "sequences")
    length = problem.extents.get("seqlen", 1)
    columns = columns or value_dim
    config = Config(
        key_dim,
        decay_kind(arrays.get("gDecay")),
        arrays.get("gBeta") is not None,
        normalize,
        is_varlen(problem),
        single,
        formula=raw.gate,
        beta=raw.beta,
        l2norm=raw.l2norm,
    )
    check_grid(problem)
    extent = max(key_dim, columns)
    arrays = arrays | {name: _broadcast_gate(arrays.get(name), problem, extent) for name in ("gDecay", "gBeta")}
    arrays |= formula_arrays(problem)
    parts = -(-columns // config.columns)
    blocks = parts if config.splits_rows else -(-parts // WARPS)
    return kernel_for(linear_token_loop, config, problem.device).bind(
        (blocks, heads, sequences),  # the order of states in memory: another order took 6 % longer
        parts=parts,
        group=heads // key_heads,
        length=length,
        scale=scale,
        **arrays,
    )


def _broadcast_gate(gate: Operand | None, problem: Problem, columns: int) -> Operand | None:
    """A decay or beta as (B, S, H, columns): strides of 0 bytes repeat its elements along the axes that it lacks. A decay of
    channels is returned unchanged."""
    if gate is None or len(gate.form.shape) == 4:
        return gate
    if len(gate.form.shape) == 1:
        gate = gate.spread(0, problem.extents.get("seqlen", 1)).spread(0, problem.extents["batch"])
    return gate.spread(3, columns)
