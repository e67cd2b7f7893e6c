"""What a walk along a sequence reads of each chunk of the delta rule, beside k~ and P~ (kda_walk_hopper.py has the equations):
queries, keys and vectors of decays, as objects with the same methods. Decays of channels are in the queries and keys. One
number a token is a factor of a row of k S and q S: queries and keys are those of the call, and r is 0."""

from ops import divmod, last_element, load, subtile, warpgroup
from tiles import fp32, inlined, rt, static, sv
from tiles.launching.arguments import INT, record, tiled

from .gates import ROW_VEC
from .tokens import CHUNK

KEYS, QUERIES, DECAYS = range(3)  # the vectors of TokenFactors


@static
class ChannelFactors:
    """Decays of channels: q' and k' lie in memory by chunk and head. Vectors: exp(r) and exp(b_last), a number for each
    channel."""

    key_dim: int

    @property
    def vectors(self):
        """The type of the shared vector that holds a chunk's vectors."""
        return sv(2 * self.key_dim, fp32)

    @property
    def channel_vec(self):
        """The register vector of a number for each channel."""
        return rt(16, self.key_dim, fp32).row_vec

    def keys_argument(self, tile):
        """The type of a kernel's argument whose tiles are queries or keys."""
        return tiled(tile, rows=2)

    def params(self):
        """The further parameters of a kernel, as a record."""
        return record()

    @inlined
    def keys_coord(self, params, seq, j, chunk, head):
        """The coordinates of the queries and keys of a sequence's j-th chunk. chunk: its index in the batch."""
        return chunk, head

    @inlined
    def to_reference(self, s_t, vectors):
        """S' transposed, for a chunk."""
        return s_t * load(subtile(vectors, self.key_dim, 0), self.channel_vec)

    @inlined
    def load_decays(self, vectors, scale):
        """Start to load (the decay of the state, (the factors of k' S', of q' S')) of transposed tiles, and return them."""
        return load(subtile(vectors, self.key_dim, 1), self.channel_vec), (1.0, scale)


@static
class TokenFactors:
    """Decays that are one number a token and head, or none: queries and keys are the call's own. Vectors, of the chunk's
    tokens: exp(b) times the key's inverse norm (l2norm.py), exp(b) times the query's and the scale, exp(b). ChannelFactors says
    what the methods do."""

    @property
    def vectors(self):
        """The type of the shared vector that holds a chunk's vectors."""
        return sv(3 * CHUNK, fp32)

    def keys_argument(self, tile):
        return tiled(tile, unit=1)

    def params(self):
        return record(group=INT)  # value heads that share a key head

    @inlined
    def keys_coord(self, params, seq, j, chunk, head):
        key_head, _ = divmod(head, params.group)
        return seq.batch, seq.chunk_start(j), key_head

    @inlined
    def to_reference(self, s_t, vectors):
        return s_t

    @inlined
    def load_decays(self, vectors, scale):
        decay = last_element(subtile(vectors, CHUNK, DECAYS))
        return decay, (load(subtile(vectors, CHUNK, KEYS), ROW_VEC), load(subtile(vectors, CHUNK, QUERIES), ROW_VEC))

    @inlined
    def store(self, vectors, key_factors, query_factors, decays):
        """A warpgroup stores the vectors of a chunk in shared memory, each warp those of 16 tokens."""
        warpgroup.store(subtile(vectors, CHUNK, KEYS), key_factors)
        warpgroup.store(subtile(vectors, CHUNK, QUERIES), query_factors)
        warpgroup.store(subtile(vectors, CHUNK, DECAYS), decays)
