"""Queries and keys that chunk kernels divide by their L2 norms, x / sqrt(sum(x^2) + 1e-6), instead of a pass before them.

GLA's kernels, whose preparer rewrites the tiles of q and k anyhow, do so in shared memory (`normalize`). Those of the delta
rule leave the tiles as they are and multiply what follows, with l_q and l_k the inverse norms of a chunk's queries and keys:

    A' = tril(beta l_k^2 K K^T, -1)            T' = (I + A')^-1 beta l_k = l_k T
    U' = T' (V - l_k K S) = l_k U              O = l_q (Q S + tril(Q K^T) U')         S' = S + K^T U'

All factors of A' and T' are those of a warp's rows of A'. The solver computes l_k from the diagonal of K K^T, the scorer l_q;
both pass them to consumers through rings (`publish`). Q K^T is rounded before it is multiplied, so this is for bfloat16, which
has float32's range.

Those of KDA have ChannelNorms. kda_transform_hopper.py multiplies rows by their inverse norms where it decays them. In
kda_hopper.py a consumer measures a chunk ahead, and factors are as above, with K' and K* of channel_decay.py for the K that
reads and the K that is read. In fp16 both divide the rows in shared memory, before they are decayed."""

from typing import Any

from numpy import float32

from ops import less, load, mma_ABt, row_index, rsqrt, store, subtile, warpgroup, where, zeros
from tiles import bf16, fp32, inlined, ring, rt, static, sv

from .tokens import CHUNK

L2NORM_EPSILON = 1e-6  # as in flash-linear-attention and transformers
ROWS = 16  # of a warp
COL_VEC, ROW_VEC = rt(ROWS, CHUNK, fp32).col_vec, rt(ROWS, CHUNK, fp32).row_vec
UNUSED = sv(16, fp32)  # stands for a vector that is not used
STAGES = 2  # consumers still read a chunk's norms when the next one's are written


@static
class L2Norm:
    """enabled: are queries and keys divided by their L2 norms? key_dim: their channels. columns: of a panel of their tiles,
    which a warp loads at once."""

    enabled: bool
    key_dim: int
    columns: int = 64

    @property
    def panel_tile(self):
        """A register tile of 16 tokens and the channels of a panel."""
        return rt(16, self.columns, fp32)

    def rings(self, stages: int, **readers: int) -> dict:
        """Members of the shared storage: a ring of inverse norms for each of these numbers of warps that read them."""
        if not self.enabled:
            return {}
        return {name: ring(sv(CHUNK, fp32), stages, n, writers=warpgroup.WARPGROUP) for name, n in readers.items()}

    @inlined
    def inverse_norms(self, tile, warp, fenced=True):
        """1 / sqrt(sum(x^2) + 1e-6) of a warp's 16 rows of a chunk's 16-bit tile. The sums are the diagonal of X X^T, by
        mma.sync. fenced: as in ops.load."""
        products = zeros(rt(ROWS, ROWS, fp32))
        for i in range(self.key_dim // self.columns):
            x = load(subtile(tile, ROWS, warp, self.columns, i), rt(ROWS, self.columns, tile.dtype), fenced=fenced)
            products = mma_ABt(products, x, x)
        return rsqrt(warpgroup.diagonal(products) + L2NORM_EPSILON)

    @inlined
    def normalize(self, tile, warp):
        """Divide a chunk's rows by their L2 norms in shared memory, 16 in each warp of a warpgroup, which then synchronises."""
        if self.enabled:
            inverse_norms = self.inverse_norms(tile, warp)
            for i in range(self.key_dim // self.columns):
                part = subtile(tile, ROWS, warp, self.columns, i)
                store(part, load(part, self.panel_tile, fenced=False) * inverse_norms)

    @inlined
    def sync(self):
        """Wait until other warps of the warpgroup may read the rows that `normalize` wrote."""
        if self.enabled:
            warpgroup.sync()

    @inlined
    def publish(self, rings, index, j, tile, scale):
        """Write the inverse norms of a chunk's rows, times the softmax scale, to the j-th slot of rings[index], 16 by each
        warp."""
        if self.enabled:
            self.store_norms(rings, index, j, self.inverse_norms(tile, warpgroup.rank()) * scale)

    @inlined
    def invert_squares(self, squares):
        """The inverse norms of rows whose squares of norms are known; 1 if they are not divided."""
        if self.enabled:
            return rsqrt(squares + L2NORM_EPSILON)
        else:
            return 1.0

    @inlined
    def store_norms(self, rings, index, j, inverse_norms):
        """Write the inverse norms of a chunk's rows to the j-th slot of rings[index], 16 by each warp."""
        if self.enabled:
            store(subtile(rings[index].claim(j), ROWS, warpgroup.rank()), inverse_norms)
            rings[index].publish(j)

    @inlined
    def scale_rows(self, x, inverse_norms):
        """The scores of a warp's rows, times their inverse norms."""
        if self.enabled:
            return x * inverse_norms
        else:
            return x

    @inlined
    def scale_columns(self, x, rings, index, j):
        """What has a column for each token, times their inverse norms in the j-th slot of rings[index]."""
        if self.enabled:
            return x * load(rings[index].wait(j), ROW_VEC)
        else:
            return x

    @inlined
    def scale_outputs(self, o, rings, index, j, scale):
        """The outputs of a chunk, with a column for each token, times the softmax scale and their inverse norms, which
        `publish` wrote to the j-th slot of rings[index]."""
        if self.enabled:
            return self.scale_columns(o, rings, index, j)
        else:
            return o * scale

    @inlined
    def release(self, rings, index, j):
        """Release the j-th slot of rings[index]."""
        if self.enabled:
            rings[index].release(j)


@static
class ChannelNorms:
    """Queries and keys as they are. It has the methods that kernels call."""

    norm: L2Norm
    are_factors = False  # do kernels multiply by inverse norms?

    @property
    def vector(self):
        """The shared vector of inverse norms of a chunk's queries and then keys, if they are factors; else a small one, not
        used."""
        return sv(2 * CHUNK, fp32) if self.are_factors else UNUSED

    @inlined
    def prepare(self, vector, queries, keys, remaining, warp):
        """Write the inverse norms of a chunk's queries and keys to `vector`, or divide by norms. All warps of a warpgroup call
        this, which then synchronises."""

    def make_ring(self, readers: int, warps: int) -> Any:
        """The ring through which a warpgroup of so many warps passes norms on to another one, and to `readers`, the warps of
        all consumers."""
        return ring(UNUSED, 1, warps, writers=warps)

    @inlined
    def measure(self, norms, q, k, j, seq, scale, warp):
        """Compute the inverse norms of the j-th chunk's queries and keys, if there is one. scale: the softmax scale, by
        which those of queries are multiplied. A consumer calls this."""

    @inlined
    def wait(self, norms, j):
        """The inverse norms of the keys of a warp's rows. The preparer calls this before it overwrites queries and keys."""
        return 1.0

    @inlined
    def scale_rows(self, x, inverse_norms):
        """A vector or tile of a warp's rows, times what `wait` returned."""
        return x

    @inlined
    def scale_key_columns(self, x, norms, j):
        """A consumer's tile with a column for each key, times their inverse norms."""
        return x

    @inlined
    def scale_query_columns(self, x, norms, j, scale):
        """A consumer's tile with a column for each query, times the softmax scale and their inverse norms. It releases
        them."""
        return x * scale


class RowDivision(ChannelNorms):
    """Queries and keys are divided in shared memory."""

    @inlined
    def prepare(self, vector, queries, keys, remaining, warp):
        self.norm.normalize(queries, warp)
        self.norm.normalize(keys, warp)
        warpgroup.sync()

    @inlined
    def measure(self, norms, q, k, j, seq, scale, warp):
        if j < seq.num_chunks():
            norms.claim(j)
            self.norm.normalize(q.wait(j), warp)
            self.norm.normalize(k.wait(j), warp)
            norms.publish(j)

    @inlined
    def wait(self, norms, j):
        norms.wait(j)
        norms.release(j)
        return 1.0


@static
class NormFactors(ChannelNorms):
    """Norms are factors of rows and columns. varlen: may rows of another sequence, which have any numbers, follow the last
    one?"""

    varlen: bool
    are_factors = True

    @inlined
    def prepare(self, vector, queries, keys, remaining, warp):
        store(self.rows(vector, 0, warp), self.measure_rows(queries, remaining, warp))
        store(self.rows(vector, 1, warp), self.measure_rows(keys, remaining, warp))
        warpgroup.sync()

    def make_ring(self, readers, warps):
        return ring(self.vector, STAGES, readers + warps, writers=warps)

    @inlined
    def measure(self, norms, q, k, j, seq, scale, warp):
        if j < seq.num_chunks():
            slot, remaining = norms.claim(j), seq.remaining(j)
            store(self.rows(slot, 0, warp), self.measure_rows(q.wait(j), remaining, warp) * scale)
            store(self.rows(slot, 1, warp), self.measure_rows(k.wait(j), remaining, warp))
            norms.publish(j)

    @inlined
    def rows(self, slot, index, warp):
        """Where the norms of a warp's rows of queries (index 0) or keys (1) are."""
        return subtile(slot, ROWS, index * (CHUNK // ROWS) + warp)

    @inlined
    def measure_rows(self, tile, remaining, warp):
        """The inverse norms of a warp's rows; 1 for rows of another sequence."""
        inverse_norms = self.norm.inverse_norms(tile, warp, fenced=False)
        if self.varlen:
            return where(less(row_index(COL_VEC), float32(remaining - ROWS * warp)), inverse_norms, 1.0)
        else:
            return inverse_norms

    @inlined
    def wait(self, norms, j):
        inverse_norms = warpgroup.load(subtile(norms.wait(j), CHUNK, 1), COL_VEC)
        norms.release(j)
        return inverse_norms

    @inlined
    def scale_rows(self, x, inverse_norms):
        return x * inverse_norms

    @inlined
    def scale_key_columns(self, x, norms, j):
        return x * load(subtile(norms.wait(j), CHUNK, 1), ROW_VEC)

    @inlined
    def scale_query_columns(self, x, norms, j, scale):
        x = x * load(subtile(norms.wait(j), CHUNK, 0), ROW_VEC)
        norms.release(j)
        return x


def choose_channel_norms(config: Any) -> ChannelNorms:
    """The norms of a kernel with this configuration (channel_config.py)."""
    norm = L2Norm(config.l2norm, config.key_dim, config.key_dim // warpgroup.WARPGROUP)
    if not config.l2norm:
        return ChannelNorms(norm)
    return NormFactors(norm, config.varlen) if config.dtype is bf16 else RowDivision(norm)
