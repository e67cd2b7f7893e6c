"""The delta rule and its gradients chunk by chunk where each channel of the keys has a decay (KDA): the equations, and what the
kernels share. On GPUs since Ampere there are four: delta_channel_inverse_ampere.py, delta_walk_ampere.py and
delta_state_gradients_ampere.py, which serve all kinds of decays, and delta_channel_gradients_ampere.py. The first two also
compute outputs. On Hopper three kernels compute gradients: delta_channel_inverse_hopper.py, delta_channel_chains_hopper.py,
which runs forward and in reverse at once, and delta_channel_block_gradients_hopper.py or, for chunks that decay too much and
small tiles, delta_channel_gradients_hopper.py. Where forward stores for them what it can, the first one and
delta_channel_outputs_hopper.py are forward, and delta_channel_state_gradients_hopper.py runs in reverse.

With b the cumulative sum of a chunk's gates in each channel, the equations are those of delta_chunks.py for decayed queries and
keys,

    q~ = scale exp(b) q        k^ = exp(b) k, as it reads S        k~ = exp(b_last - b) k, as it writes to it

    N_ij = sum_c k_ic k_jc exp(b_ic - b_jc) for j < i              P_ij = scale sum_c q_ic k_jc exp(b_ic - b_jc) for j <= i
    Y = V - K^ S        E = (I + N beta)^-1 Y                      S after = exp(b_last) S + K~^T (beta E)
    dU = P^T dO + K~ dS        Z = (I + beta N)^-T dU              dV = beta Z        dbeta = rowsum(Z * E)
    dS before = exp(b_last) dS + Q~^T dO - K^^T dV

so that the walks need no gates, and no factor is greater than 1. N and P are computed by recursive halving
(anchored_scores.py), on Hopper by blocks (two_block_scores.py) where numbers hold a block's decays. There E and Z share one
inverse, L = N (I + beta N)^-1 (delta_chunks.py). With dP = scale tril(dO U^T) and G = -stril(dV U^T),

    dq_i = scale exp(b_i) (S dO_i) + sum_(j <= i) dP_ij exp(b_i - b_j) k_j
    dk_j = exp(b_last - b_j) (dS u_j) + sum_(i >= j) exp(b_i - b_j) (dP_ij q_i + G_ij k_i)            (dk_write)
         - exp(b_j) (S dv_j) + sum_(i < j) G_ji exp(b_j - b_i) k_i                                    (dk_read)

The sums over pairs of tokens are computed by the levels of channel_chunks.py: one product of W = dP + dP^T with X, which is E q
in later halves and E k in earlier ones, and one of G + G^T with E k everywhere, which adds to both parts of dk. The gradient of
a gate is, in each channel,

    dg_t = sum_(i >= t) (q_i dq_i + k_i dk_read_i - k_i dk_write_i)
           + sum_i (k_i dk_write_i, as far as it comes from dS) + exp(b_last) <S, dS>

The terms of a pair of tokens are X W X, with + for the token in the later half and - for the other, for dP and G alike. They
are rounded alike, so that a pair of tokens that both come after t adds nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

from numpy import int32

from ops import load
from tiles import fp32, inlined, rt, static

from ..recurrent.tokens import CHUNK
from .delta_chunks import WARP_COLUMNS, ChunkDecay, DeltaChunkConfig, chunk_fields


@dataclass(frozen=True)
class DeltaWalkConfig(DeltaChunkConfig):
    """The configuration of a kernel that walks over the chunks. by_channel: does each channel of the keys have a decay?"""

    by_channel: bool = False

    @property
    def decay(self):
        """The decays, and how the walk copies its keys."""
        return DecayedKeys(True, self.key_dim) if self.by_channel else ChunkDecay(self.gated)

    def __str__(self):
        return super().__str__() + ", by channel" * self.by_channel


def walk_fields(everything: bool) -> Iterator[tuple]:
    """The fields of the configurations of a kernel that walks."""
    for fields in chunk_fields(everything):
        _, _, gated, *_ = fields
        yield from ((*fields, by_channel) for by_channel in ((False, True) if gated else (False,)))


@static
class DecayedKeys(ChunkDecay):
    """The decays of channels: delta_channel_inverse_ampere.py has stored decayed queries and keys, by chunk and head. A step
    multiplies different keys first and last, which the walk copies one after the other. No further factors of tokens are
    needed. gB is the decay of each channel over the chunk."""

    key_dim: int
    queries_include_decay = True

    @inlined
    def end_row(self, end):
        return CHUNK

    @inlined
    def coord(self, batch, token, key_head, chunk, head):
        return chunk, 0, head, 0

    @inlined
    def tiles(self, chunks):
        return int32(2 * chunks)

    @inlined
    def first_tile(self, j):
        return int32(2 * j)

    @inlined
    def second_tile(self, j):
        return int32(2 * j + 1), j

    @inlined
    def fill_first(self, k, j, gKeys, at, end, vector_bytes):
        k.fill(int32(2 * j), gKeys, at, 1, 3, end, vector_bytes)

    @inlined
    def wait_second(self, k, j, first, newer):
        return k.wait(int32(2 * j + 1), newer)

    @inlined
    def load_cols(self, gB, index, head):
        return 0.0

    @inlined
    def last(self, b):
        return 0.0

    @inlined
    def exp(self, b):
        return 1.0

    @inlined
    def load_state_decay(self, gB, b_last, index, head):
        return load(gB, rt(WARP_COLUMNS, self.key_dim, fp32).row_vec, (index, head, 0))
