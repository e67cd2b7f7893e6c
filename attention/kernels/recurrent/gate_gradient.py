"""The gradient of the gates of linear attention, from what the scans of dQ and dK stored (parts/recurrent/gradients.py).

    r_t  = q_t . dq_t - k_t . dk_t        dg_t = sum_(i >= t) r_i + carried + exp(b_last) <S, dS>

over the tokens i of the chunk of t. carried: the sum of the parts of k_i . dk_i that come from dS, the gradient of the state
after the chunk. S: the state before it. A gate below FLOOR, as -inf, has a gradient of 0.

A warp has a chunk of 16 heads, which are adjacent in memory. If there is one gate for each head, its gradient is the sum over
all tokens, of which a warp sums a part; partial_sums.py adds these parts in a fixed order."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import col_sum, grid, less, load, row_index, store, truncate, where, zeros
from tiles.launching.arguments import ENDS, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.recurrent.gradients import GATES, HEAD_VEC, differentiate_gates, share_of_warp, sum_row_dots
from ...parts.recurrent.tokens import SequenceLayout

WARPS = 4  # of a block


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. per_head: is there a gate for each head? If not, there is one for each token. varlen: are
    sequences packed (cu_seqlens)?"""

    per_head: bool
    varlen: bool = False
    threads, overlaps_previous = LANES * WARPS, True

    def __str__(self):
        return f"gates by {'head' if self.per_head else 'token'}{', varlen' * self.varlen}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    yield from (Config(per_head, varlen) for per_head in (False, True) for varlen in (False, True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    PER_HEAD, seq_layout = config.per_head, SequenceLayout(config.varlen)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def sum_gates(
        gQueryDots: array(4), gKeyDots: array(4), gCarriedDots: array(3), gStateDots: array(3), gGates: array(3),
        gGradient: array(3), gPartial: array(2), gCuSeqlens: ENDS, length: INT, splits: INT, groups: INT, warps: INT,
    ):  # fmt: skip
        """A warp, of `warps`, has one of `splits` parts of the chunks of a sequence, for one of `groups` groups of heads.
        gQueryDots, gKeyDots: parts of each row sum, for each token and head. gCarriedDots, gStateDots: the parts of `carried`
        and of <S, dS>, for each chunk and head. gPartial: the sum of each split, for each head, if a gate is that of a head."""
        grid.follow()
        warp = int32(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES)
        if warp >= warps:
            return
        index, sequence, split, head, seq = share_of_warp(warp, splits, groups, seq_layout, gCuSeqlens, length)
        total = zeros(HEAD_VEC)
        for j in range(split, seq.num_chunks(), splits):
            token = seq.chunk_start(j)
            chunk = seq_layout.chunk_index(token, sequence, length)
            r = sum_row_dots(gQueryDots, seq, token, head) - sum_row_dots(gKeyDots, seq, token, head)
            gates = load(truncate(gGates, 1, seq.end), GATES, (seq.batch, token, head), 1, 2)
            gradient = differentiate_gates(r, gates, gCarriedDots, gStateDots, chunk, head)
            if PER_HEAD:
                total = total + col_sum(where(less(row_index(GATES), float32(seq.remaining(j))), gradient, 0.0))
            else:
                store(truncate(gGradient, 1, seq.end), gradient, (seq.batch, token, head), 1, 2)
        if PER_HEAD:
            store(gPartial, total, (index, head), cols=1)
        else:
            padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
            for j in range(split, padding.num_chunks(), splits):
                store(gGradient, zeros(GATES), (padding.batch, padding.chunk_start(j), head), 1, 2)

    return sum_gates, None
