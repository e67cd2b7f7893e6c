"""Gradients of linear attention chunk by chunk, with decays of channels: the equations, and what the kernels share
(channel_decayed_keys_ampere.py, channel_states_ampere.py, channel_gradients_ampere.py).

With S the state before a chunk, dS the gradient of the state after it, and in each channel b the cumulative sum of the chunk's
gates, all factors below are at most 1 for any gates:

    q~ = scale exp(b) q                                     k~ = exp(b_last - b) k
    S after = exp(b_last) S + k~^T V                        dS before = exp(b_last) dS + q~^T dO
    P = scale tril(dO V^T)                                  A_ij = scale sum_c q_ic k_jc exp(b_ic - b_jc)    for j <= i
    dq_i = scale exp(b_i) (S dO_i) + sum_(j <= i) P_ij exp(b_i - b_j) k_j
    dk_j = exp(b_last - b_j) (dS v_j) + sum_(i >= j) P_ij exp(b_i - b_j) q_i
    dv_j = dS^T k~_j + sum_(i >= j) A_ij dO_i

The sums over pairs of tokens are computed level by level: groups of 64, 32, .. 2 tokens, each of an earlier and a later half.
With a the first token of the later half, a token has at each level one factor E = exp(-|b - b_a|), and one row X: E q in the
later half, E k in the earlier one. For two tokens of one group that are in different halves, X X^T is A. With W = P + P^T at
such pairs, E W X is added to dq in later halves, to dk in earlier ones. The pair of a token with itself has a factor of 1.

The gradient of a gate is, in each channel,

    dg_t = sum_(i >= t) (q_i dq_i - k_i dk_i) + sum_i (k_i dk_i, as far as it comes from dS) + exp(b_last) <S, dS>

The terms of a pair of tokens are X W X, with + for the token in the later half and - for the other, both rounded alike: so a
pair of tokens that both come after t adds nothing, to the last bits of float32."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from numpy import int32

from ops import block as thread_block
from ops import (
    cumsum_columns,
    equal,
    less,
    load,
    load_row,
    not_equal,
    store,
    subtile,
    truncate,
    warp_index,
    warpgroup,
    where,
)
from tiles import bf16, dtype, fp16, fp32, inlined, rt, st, static
from tiles.cp_async import VECTOR_SIZES
from tiles.layout import LANES, WARPGROUP

from .gates import FLOOR, LOG2_E, clamp_gates
from .tokens import CHUNK

KEY_DIMS, VALUE_DIMS = (64, 128), (64, 128, 256)  # padded sizes
HALVES = 2  # parts of the channels of the keys, one for each warpgroup
ROWS = CHUNK // WARPGROUP  # tokens of a warp; columns of values of a warp that scans states
UNFENCED = False  # neither TMA nor wgmma touches shared memory here: no fence waits for copies that are under way


@inlined
def find_pairs(row, col, inverse):
    """(1 for rows in the later half of their group, else 0; 1 where row and column are in different halves of one group, else
    0), at a level whose groups have 1 / inverse tokens. row, col: the numbers of tokens, as a column and a row vector."""
    row_group, col_group = row * inverse // 1, col * inverse // 1
    row_half, col_half = row * (2.0 * inverse) // 1, col * (2.0 * inverse) // 1
    return row_half - row_group * 2.0, equal(row_group, col_group) & not_equal(row_half, col_half)


@dataclass(frozen=True)
class ChannelChunkConfig:
    """A kernel's configuration. key_dim: the channels of keys, padded. varlen: are sequences packed (cu_seqlens)? vector_bytes:
    how many bytes a cp.async copies; all addresses and strides are multiples of it."""

    key_dim: int
    dtype: dtype
    varlen: bool = False
    vector_bytes: int = VECTOR_SIZES[0]
    label = ""
    threads = LANES * WARPGROUP * HALVES

    def __str__(self):
        flags = ", varlen" * self.varlen + f", by {self.vector_bytes} bytes" * (self.vector_bytes != VECTOR_SIZES[0])
        return f"{self.label}, Dk {self.key_dim} {self.dtype}{flags}"


def chunk_fields(everything: bool) -> Iterator[tuple]:
    """The fields of the configurations of a kernel of this family."""
    for key_dim in KEY_DIMS:
        yield key_dim, bf16, False, VECTOR_SIZES[0]
        if everything:
            yield from ((key_dim, *form) for form in itertools.product((fp16,), (False, True), VECTOR_SIZES[:1]))
            yield key_dim, bf16, True, VECTOR_SIZES[0]
            yield from ((key_dim, bf16, False, vector_bytes) for vector_bytes in VECTOR_SIZES[1:])


@static
class ChunkChannels:
    """A chunk's channels in a block of `groups` warpgroups: each has a part of them, each of its warps 16 tokens."""

    key_dim: int
    groups: int = HALVES

    @property
    def half(self):
        """How many channels a warpgroup has."""
        return self.key_dim // self.groups

    @property
    def rows(self):
        """A warp's tokens and channels, in registers."""
        return rt(ROWS, self.half, fp32)

    @property
    def sums(self):
        """The cumulative sums of a chunk's gates, in shared memory."""
        return st(CHUNK, self.key_dim, fp32, width=min(128, self.half * fp32.itemsize))

    @inlined
    def load_gates(self, gGates, seq, token, head, aligned=None):
        """Load the gates of a warp's tokens and channels. aligned: as in ops.load."""
        at = seq.batch, int32(token + ROWS * warpgroup.rank()), head, int32(self.half * warpgroup.id())
        return load(truncate(gGates, 1, seq.end), self.rows, at, 1, 3, aligned)

    @inlined
    def part(self, tile):
        """A warp's part of a shared tile of a chunk's tokens and channels."""
        return subtile(tile, ROWS, warpgroup.rank(), self.half, warpgroup.id())

    @inlined
    def cumsum_tokens(self, tile, x, least):
        """Write the running sums over a chunk's tokens of the warps' x, or `least` where they are less. All warps of the
        block synchronise."""
        store(self.part(tile), x)
        thread_block.sync(UNFENCED)
        self.cumsum_in_place(tile, least)
        thread_block.sync(UNFENCED)

    @inlined
    def cumsum_in_place(self, tile, least):
        """The running sums over a chunk's tokens in a shared tile, 32 channels by each of some warps, of x in the tile, or
        `least` where it is less."""
        if warp_index() < self.key_dim // LANES:
            part = subtile(tile, CHUNK, 0, LANES, warp_index())
            cumsum_columns(part, part, least)

    @inlined
    def cumsum_gates(self, tile, gates):
        """Write b, in powers of 2. All warps of the block synchronise."""
        self.cumsum_tokens(tile, clamp_gates(gates) * LOG2_E, FLOOR * LOG2_E)

    @inlined
    def store_gates(self, tile, gates):
        """Write the warps' gates, in powers of 2, which `cumsum_stored_gates` reads after a barrier of the block."""
        store(self.part(tile), clamp_gates(gates) * LOG2_E)

    @inlined
    def cumsum_stored_gates(self, tile):
        """Write b in place of what `store_gates` wrote, by some warps."""
        self.cumsum_in_place(tile, FLOOR * LOG2_E)

    @inlined
    def store_gate_gradients(self, gDGates, gGates, b, r, carried, seq, token, head):
        """Write the warps' gradients of gates. b: overwritten by sums. r: each token's term in the gradients of all gates up to
        its own. carried: each warp's terms in the gradients of all gates of the chunk, by channel. All warps of the block
        synchronise."""
        gates = self.load_gates(gGates, seq, token, head)  # while sums are computed
        self.cumsum_tokens(b, r, -math.inf)
        total = self.load_last(b)
        for rank in range(WARPGROUP):
            warp = int32(WARPGROUP * warpgroup.id() + rank)
            total = total + load(subtile(carried, self.half, warp), self.rows.row_vec)
        gradients = total - (load(self.part(b), self.rows, fenced=False) - r)
        below_floor = less(gates, FLOOR)
        at = seq.batch, int32(token + ROWS * warpgroup.rank()), head, int32(self.half * warpgroup.id())
        store(truncate(gDGates, 1, seq.end), where(below_floor, 0.0, gradients), at, 1, 3)

    @inlined
    def load_last(self, tile):
        """The last token's row, in a warp's channels."""
        return load_row(subtile(tile, CHUNK, 0, self.half, warpgroup.id()), self.rows.row_vec, CHUNK - 1, fenced=False)
