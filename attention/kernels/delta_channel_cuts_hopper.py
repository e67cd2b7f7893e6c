"""Where sequences can be cut into segments under the delta rule, where each channel of the keys has a decay: how many chunks
before each segment the recurrence of states needs to have its state there, and how many after it that of their gradients
(parts/recurrent/segment_spans.py; channel_history.py has the bound). A block, one warpgroup, has one direction and a segment of
a head."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda

from ops import divmod, warpgroup
from tiles import bf16, dtype, fp16, fp32, shared
from tiles.launching.arguments import INT, array
from tiles.targets import Target

from ..parts.recurrent.channel_gates import choose_channel_gates
from ..parts.recurrent.channel_history import ChannelHistory
from ..parts.recurrent.delta_chunks import KEY_DIMS
from ..parts.recurrent.gate_formulas import PLAIN_BETA
from ..parts.recurrent.segment_spans import OverlapCounts
from ..parts.recurrent.tokens import SequenceLayout

DIRECTIONS = 2  # of gOverlaps: 0 forward in time, 1 in reverse


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. gates: the dtype of the gates; dtype: of keys."""

    key_dim: int
    gates: dtype
    dtype: dtype
    threads = warpgroup.THREADS

    def __str__(self):
        return f"cuts of sequences, Dk {self.key_dim} {self.dtype}, gates {self.gates}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with gates in fp32 and in bf16; fp16 too if `everything`."""
    if target.has_wgmma:
        for input_dtype in (bf16, fp16) if everything else (bf16,):
            yield from (Config(*size, input_dtype) for size in itertools.product(KEY_DIMS, (fp32, input_dtype)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    channel_gates = choose_channel_gates(config.key_dim // warpgroup.WARPGROUP, None, None)
    history = ChannelHistory(config.key_dim, config.gates, config.dtype, channel_gates, PLAIN_BETA, False)
    forward, reverse = OverlapCounts(history, SequenceLayout()), OverlapCounts(history, SequenceLayout(reversed=True))
    COUNTS, FORMULA = forward.params(), channel_gates.params()
    smem = shared(sums=history.sums)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def count_overlaps(gBeta: array(3), length: INT, heads: INT, group: INT, count_args: COUNTS, formula: FORMULA):
        """heads: of keys, each of which `group` value heads share. count_args: see OverlapCounts."""
        (sums,) = smem.open()
        index, direction = divmod(cuda.blockIdx.x, DIRECTIONS)
        if direction == 0:
            forward.store(count_args, formula, gBeta, 0, length, heads, group, index, sums)
        else:
            reverse.store(count_args, formula, gBeta, 0, length, heads, group, index, sums)

    return count_overlaps, smem
