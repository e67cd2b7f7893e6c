"""The sum of the gates of each chunk and head, in powers of 2, from which passes over segments see how far back tokens count
(parts/recurrent/recent_chunks.py). A warp has a chunk of 16 heads."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import col_sum, divmod, load, store, truncate
from tiles.launching.arguments import ENDS, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ..parts.recurrent.gates import LOG2_E, clamp_gates
from ..parts.recurrent.gradients import GATES, HEADS
from ..parts.recurrent.tokens import SequenceLayout

WARPS = 4  # of a block


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. varlen: are sequences packed (cu_seqlens)?"""

    varlen: bool = False
    threads = LANES * WARPS

    def __str__(self):
        return "decays of chunks" + ", varlen" * self.varlen


def space(target: Target, everything: bool) -> Iterator[Config]:
    """Both configurations, of GPUs whose chunk kernels cut sequences into long segments."""
    if target.has_wgmma:
        yield from map(Config, (False, True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    seq_layout = SequenceLayout(config.varlen)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def sum_decays(
        gGates: array(3), gChunkDecays: array(2), gCuSeqlens: ENDS, length: INT, splits: INT, groups: INT, warps: INT
    ):
        """A warp, of `warps`, has one of `splits` parts of the chunks of a sequence, for one of `groups` groups of heads.
        gChunkDecays: of each head and chunk."""
        warp = int32(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES)
        if warp >= warps:
            return
        index, group = divmod(warp, groups)
        sequence, split = divmod(index, splits)
        head, seq = int32(HEADS * group), seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        for j in range(split, seq.num_chunks(), splits):
            token = seq.chunk_start(j)
            gates = load(truncate(gGates, 1, seq.end), GATES, (seq.batch, token, head), 1, 2)
            total = col_sum(clamp_gates(gates) * LOG2_E)
            store(gChunkDecays, total, (head, seq_layout.chunk_index(token, sequence, length)), cols=0)

    return sum_decays, None
