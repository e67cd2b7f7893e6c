"""Where sequences can be cut into segments under the delta rule, where each channel of the keys has a decay: how many chunks
before each segment the recurrence of states needs to have its state there, and how many after it that of their gradients
(parts/recurrent/segment_spans.py; channel_history.py has the bound). A block has one direction and a segment of a head, and
each of its warpgroups a chunk.

In forward, of one direction, the counts also tell the grids that follow whether they have work (launch_conditions.py)."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda

from ops import divmod, grid, warpgroup
from tiles import shared
from tiles.launching.arguments import ENDS, INT, array
from tiles.targets import Target

from ...parts.recurrent import channel_config
from ...parts.recurrent.channel_config import DELTA_KEY_DIMS
from ...parts.recurrent.channel_history import BLOCK_WARPGROUPS, BlockHistory
from ...parts.recurrent.gate_formulas import BetaFormula
from ...parts.recurrent.segment_spans import OverlapCounts
from ...parts.recurrent.tokens import SequenceLayout

DIRECTIONS = 2  # of gOverlaps: 0 forward in time, 1 in reverse


@dataclass(frozen=True)
class Config(channel_config.Config):
    """A kernel's configuration: that of channel_config.py. There are no consumers. directions: how many of DIRECTIONS."""

    directions: int = 1
    threads = warpgroup.THREADS * BLOCK_WARPGROUPS

    def __str__(self):
        return f"cuts of sequences, directions {self.directions}, {super().__str__()}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims. Without `everything`, only those that either read keys or compute gates by a
    formula, of the larger one."""
    sizes = tuple((key_dim, 0) for key_dim in DELTA_KEY_DIMS)
    for config in channel_config.channel_space(Config, sizes, target, everything, BetaFormula(1.0)):
        config = replace(config, consumers=0)
        if everything or (config.key_dim == max(DELTA_KEY_DIMS) and config.l2norm == (config.formula is not None)):
            yield config
            if not (config.varlen or config.formula):
                yield replace(config, directions=DIRECTIONS)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    channel_gates = config.channel_gates
    history = BlockHistory(config.key_dim, config.gates, config.dtype, channel_gates, config.beta, config.l2norm)
    forward = OverlapCounts(history, SequenceLayout(config.varlen))
    reverse = OverlapCounts(history, SequenceLayout(config.varlen, reversed=True))
    COUNTS, FORMULA, CONFIG_DIRECTIONS = forward.params(), channel_gates.params(), config.directions
    smem = shared(sums=history.sums)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def count_overlaps(
        gBeta: array(3), gCuSeqlens: ENDS, length: INT, heads: INT, group: INT, count_args: COUNTS, formula: FORMULA
    ):
        """heads: of keys, each of which `group` value heads share. count_args: see OverlapCounts."""
        grid.release()
        (sums,) = smem.open()
        index, direction = divmod(cuda.blockIdx.x, CONFIG_DIRECTIONS)
        if CONFIG_DIRECTIONS > 1 and direction > 0:
            reverse.store(count_args, formula, gBeta, gCuSeqlens, length, heads, group, index, sums)
        else:
            forward.store(count_args, formula, gBeta, gCuSeqlens, length, heads, group, index, sums)

    return count_overlaps, smem
