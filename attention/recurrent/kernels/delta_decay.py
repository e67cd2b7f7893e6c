"""Decays of the delta rule that are one number for each token and head, as objects with the same methods (delta_hopper.py,
delta_states_hopper.py). What a strong chunk is stands at the head of delta_hopper.py."""

from ops import cumsum, exp2, last_element, load, store, tile_min, transpose, truncate, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt, static

from .gates import DOWN, LOG2_E, floored
from .tokens import CHUNK

LEAST = {bf16: -90, fp16: -1}  # powers of 2: a chunk is strong that decays to less, as 1 / it times a value might overflow
SCORES = rt(16, CHUNK, fp32)
ROWS, ALONG = SCORES.col_vec, SCORES.row_vec


@static
class NoDecay:
    """The gates of a call without decays: no chunk is strong, and the vectors of sums and factors are neither written nor
    read. `Decay` says what a kernel does with gates."""

    dtype: dtype

    @inlined
    def load(self, gGates, span, at):
        """Begin to load the gates of the chunk whose first token is at `at`, and return them."""
        return 0.0

    @inlined
    def sum_up(self, b, since, factor, j, g):
        """Done by one warp, for the j-th chunk with the gates g: write their running sums, in powers of 2, to `b`; exp2 of the
        sums to `since`; and to `factor` what scales the values, or in a strong chunk what the chunk adds to the state."""

    @inlined
    def wait(self, vectors, j):
        """The vector of the j-th chunk in a ring of sums or factors."""
        return 0

    @inlined
    def release(self, vectors, j):
        """Say that the vector of the j-th chunk has been read."""

    @inlined
    def is_strong(self, since):
        """Is the chunk strong: does it decay by more than numbers can hold?"""
        return False

    @inlined
    def scores(self, s, since, b):
        """The scores s of a chunk's tokens with each other. In a strong chunk element (i, j) is multiplied by the decay from
        token j to token i. Elements above the diagonal do not matter."""
        return s

    @inlined
    def begin(self, values, u, o, since, factor, strong):
        """(what is multiplied by T, the outputs' part that comes from the state). values: V^T. u: S^T K^T. o: S^T Q^T."""
        return values - u, o

    @inlined
    def decayed(self, s_t, since, when):
        """The transposed state, decayed by the whole chunk if `when`: a strong chunk's before the chunk is added to it,
        another's afterwards."""
        return s_t

    @inlined
    def remaining(self, u, factor, strong):
        """U^T as it is added to the state: in a strong chunk, what remains of it at the chunk's end."""
        return u

    @inlined
    def end(self, o, since, strong):
        """The outputs, decayed since the chunk began where that has not been done."""
        return o


class Decay(NoDecay):
    """Gates that are one number for each token and head."""

    @property
    def least(self):
        """The decay of a whole chunk below which it is strong."""
        return 2.0 ** LEAST[self.dtype]

    @inlined
    def load(self, gGates, span, at):
        return load(truncate(gGates, 1, span.end), DOWN, at, cols=1)

    @inlined
    def sum_up(self, b, since, factor, j, g):
        sums = cumsum(floored(transpose(g)) * LOG2_E)
        total = tile_min(sums)
        store(b.claim(j), sums)
        b.publish(j)
        store(since.claim(j), exp2(sums))
        since.publish(j)
        store(factor.claim(j), exp2((total if exp2(total) < self.least else 0.0) - sums))
        factor.publish(j)

    @inlined
    def wait(self, vectors, j):
        return vectors.wait(j)

    @inlined
    def release(self, vectors, j):
        vectors.release(j)

    @inlined
    def is_strong(self, since):
        return last_element(since) < self.least

    @inlined
    def scores(self, s, since, b):
        if self.is_strong(since):
            return s * exp2(zeros(SCORES) + warpgroup.load(b, ROWS) - load(b, ALONG))
        else:
            return s

    @inlined
    def begin(self, values, u, o, since, factor, strong):
        if strong:
            before = load(since, ALONG)
            return values - u * before, o * before
        else:
            return values * load(factor, ALONG) - u, o

    @inlined
    def decayed(self, s_t, since, when):
        if when:
            return s_t * last_element(since)
        else:
            return s_t

    @inlined
    def remaining(self, u, factor, strong):
        if strong:
            return u * load(factor, ALONG)
        else:
            return u

    @inlined
    def end(self, o, since, strong):
        if strong:
            return o
        else:
            return o * load(since, ALONG)
