"""How many chunks of a segment still count at its end (recent_chunks.py), under the delta rule with decays of tokens.

A token multiplies a state by exp(g) (1 - beta k k^T), whose norm is exp(g), or exp(g) |1 - beta |k|^2| if that is more.
delta_transform_hopper.py has |k|^2 on the diagonal of K K^T, and stores the product of these norms over each chunk's
tokens, as an exponent of 2. delta_walk_states_hopper.py reads these exponents as others read sums of gates."""

from numpy import float32

from ops import (
    abs,
    last_element,
    load,
    log2,
    maximum,
    subtile,
    tile_sum,
    warpgroup,
)
from tiles import fp32, inlined, static, sv
from tiles.launching.arguments import array, record

from ..recurrent.gates import CHUNK_COL_VEC
from ..recurrent.recent_chunks import count_recent_chunks
from ..recurrent.tokens import CHUNK
from .delta_chunks import SUM

LEAST_LOG2 = -126.0  # a walk's products with less are flushed to 0: it is below the least normal number of fp32


@static
class EveryChunk:
    """Without decays nothing is forgotten: no exponents are stored, and no chunk is skipped."""

    def params(self):
        """The further parameters of a kernel, as a record."""
        return record()

    def scratch(self):
        """The member of shared memory for what tokens multiply states by, if any."""
        return {}

    @inlined
    def store_growths(self, growths, steps):
        """A warpgroup stores the exponents of max(1, |1 - beta |k|^2|) of a chunk's tokens in shared memory. steps: beta |k|^2
        of the warp's tokens."""

    @inlined
    def store_exponent(self, params, chunk, head, growths, vectors):
        """A warpgroup stores a chunk's exponent, after its warps have met: all growths are there. vectors: the ChunkVectors."""

    @inlined
    def skip_forgotten(self, params, seq, chunk, head):
        """The TokenRange without the chunks at its beginning that are forgotten at its end. chunk: the index of its first
        one."""
        return seq


class RecentChunks(EveryChunk):
    """Chunks before the recent ones are forgotten if there are decays. gExponents: (heads, chunks)."""

    def params(self):
        return record(gExponents=array(2))

    def scratch(self):
        return {"growths": sv(CHUNK, fp32)}

    @inlined
    def store_growths(self, growths, steps):
        warpgroup.store(growths, log2(maximum(abs(steps - 1.0), 1.0)))

    @inlined
    def store_exponent(self, params, chunk, head, growths, vectors):
        if warpgroup.rank() == 0:
            growth = tile_sum(load(growths, CHUNK_COL_VEC))
            params.gExponents[head, chunk] = float32(growth + last_element(subtile(vectors, CHUNK, SUM)))

    @inlined
    def skip_forgotten(self, params, seq, chunk, head):
        """If a chunk's exponent is positive, more chunks may be counted than the last ones that matter, but not fewer."""
        return seq.keep(count_recent_chunks(params.gExponents, head, chunk, seq.num_chunks(), False, LEAST_LOG2))
