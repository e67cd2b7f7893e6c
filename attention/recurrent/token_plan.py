"""The launch of the kernel that goes token by token (kernels/token_loop.py)."""

import sys

from tiles.arrays import Operand
from tiles.launch import kernel_for
from tiles.plan import Step
from tiles.schema import Problem

from .kernels.token_loop import MOST, WARPS, Config
from .rules import varlen


def launch(
    problem: Problem,
    arrays: dict[str, Operand | None],
    scale: float,
    normalize: bool = False,
    single: bool = False,
    columns: int = 0,
) -> Step:
    """The launch for arrays (B, S, H, D), by the names of the kernel's parameters. single: see Config. columns: of a state, if
    it has more than there are values."""
    length, heads, key_heads, key_dim, value_dim, sequences = (problem.extents.get(axis, 1) for axis in "SHGKVN")
    columns = columns or value_dim
    decay = arrays.get("gDecay")
    config = Config(
        key_dim,
        "" if decay is None else "channel" if len(decay.form.shape) == 4 else "token",
        arrays.get("gBeta") is not None,
        normalize,
        varlen(problem),
        single,
    )
    if max(heads, sequences) > MOST:
        raise ValueError(f"q: must have at most {MOST} heads and sequences: {heads}, {sequences}")
    wide = max(key_dim, columns)
    arrays = arrays | {name: _of_tokens(arrays.get(name), problem, wide) for name in ("gDecay", "gBeta")}
    parts = -(-columns // config.columns)
    blocks = parts if config.together else -(-parts // WARPS)
    return kernel_for(sys.modules[__name__], config, problem.device).bind(
        (blocks, heads, sequences),  # in the order in which states lie: others took 6 % longer
        parts=parts,
        group=heads // key_heads,
        length=length,
        scale=scale,
        **arrays,
    )


def _of_tokens(given: Operand | None, problem: Problem, columns: int) -> Operand | None:
    """A decay or beta of each token as (B, S, H, columns): along axes that it lacks, its elements are repeated by steps of 0
    bytes. A decay of channels is returned as it is."""
    if given is None or len(given.form.shape) == 4:
        return given
    if len(given.form.shape) == 1:
        given = given.spread(0, problem.extents.get("S", 1)).spread(0, problem.extents["B"])
    return given.spread(3, columns)
