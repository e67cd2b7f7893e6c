"""The gradient of the gates of linear attention, from what the scans of dQ and dK stored (parts/recurrent/gradients.py).

    r_t  = q_t . dq_t - k_t . dk_t        dg_t = sum_(i >= t) r_i + carried + exp(b_last) <S, dS>

over the tokens i of the chunk of t. carried: the sum of the parts of k_i . dk_i that come from dS, the gradient of the state
after the chunk. S: the state before it. A gate below FLOOR, as -inf, has a gradient of 0.

A block's warps have a head each, which are adjacent in memory. If there is one gate for each head, its gradient is the sum over
all tokens, of which a warp sums a part; partial_sums.py adds these parts in a fixed order."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import col_index, divmod, less, load, store, tile_sum, truncate, where, zeros
from tiles.launching.arguments import ENDS, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ..parts.recurrent.gates import ROW_VEC
from ..parts.recurrent.gradients import differentiate_gates, sum_row_dots
from ..parts.recurrent.tokens import SequenceLayout

WARPS = 8  # of a block: as many heads


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. per_head: is there a gate for each head? If not, there is one for each token. varlen: are
    sequences packed (cu_seqlens)?"""

    per_head: bool
    varlen: bool = False
    threads = LANES * WARPS

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
        gQueryDots: array(3), gKeyDots: array(3), gCarriedDots: array(3), gStateDots: array(3), gGates: array(3),
        gGradient: array(3), gPartial: array(2), gCuSeqlens: ENDS, length: INT, splits: INT, heads: INT, groups: INT,
        parts: INT,
    ):  # fmt: skip
        """A block has one of `splits` parts of the chunks of a sequence, for one of `groups` groups of heads. gQueryDots,
        gKeyDots: `parts` of each row sum, for each token and head. gCarriedDots, gStateDots: the parts of `carried` and
        of <S, dS>, for each chunk and head. gPartial: the sum of each split, for each head, if a gate is that of a head."""
        index, group = divmod(cuda.blockIdx.x, groups)
        (sequence, split), total = divmod(index, splits), float32(0)
        head = int32(WARPS * group + cuda.threadIdx.x // LANES)
        if head >= heads:
            return
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        for j in range(split, seq.num_chunks(), splits):
            token = seq.chunk_start(j)
            chunk = seq_layout.chunk_index(token, sequence, length)
            r = sum_row_dots(gQueryDots, seq, token, head, parts) - sum_row_dots(gKeyDots, seq, token, head, parts)
            gates = load(truncate(gGates, 1, seq.end), ROW_VEC, (seq.batch, token, head), cols=1)
            gradient = differentiate_gates(r, gates, gCarriedDots, gStateDots, chunk, head)
            if PER_HEAD:
                total += tile_sum(where(less(col_index(ROW_VEC), float32(seq.remaining(j))), gradient, 0.0))
            else:
                store(truncate(gGradient, 1, seq.end), gradient, (seq.batch, token, head), cols=1)
        if PER_HEAD:
            gPartial[index, head] = total
        else:
            padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
            for j in range(split, padding.num_chunks(), splits):
                store(gGradient, zeros(ROW_VEC), (padding.batch, padding.chunk_start(j), head), cols=1)

    return sum_gates, None
