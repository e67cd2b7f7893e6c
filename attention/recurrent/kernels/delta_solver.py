"""The solver of the delta rule: T = (I + A)^-1 beta of each chunk (the UT transform of its keys; Yang et al. 2024), for which
nobody needs to know the state.

Where keys are alike and beta is above 1, elements of T are as great as beta^2 and alternate in sign, and what they multiply is
nearly the same for all tokens: their sum is small. With T rounded to the dtype of the keys, an error of its digits is most of
that sum. So T is two parts with twice the digits.
"""

from ops import subtile, warpgroup
from ops.for_attention.triangular_inverse import inverse_transposed
from tiles import dtype, fp32, inlined, st, static

from .delta_decay import ROWS, NoDecay
from .tokens import CHUNK, Sequences


@static
class UTTransform:
    """How T lies in shared memory: its digits in two parts of a dtype, one below the other. A warp of the solver has 16 rows of
    T^T, a token each."""

    dtype: dtype

    @property
    def tile(self):
        """The shared tile of both parts."""
        return st(2 * CHUNK, CHUNK, self.dtype)

    @inlined
    def publish(self, t, j, x):
        """Put T of chunk j into its ring; x: the warp's rows of T^T, in fp32."""
        tile, high = t.claim(j), self.dtype(x)
        warpgroup.store(subtile(tile, CHUNK, 0), high)
        warpgroup.store(subtile(tile, CHUNK, 1), self.dtype(x - fp32(high)))
        t.publish(j)

    @inlined
    def times(self, u, t, j):
        """U^T T^T, the values that chunk j writes, and T is given back. u: U^T, what T multiplies, in fp32."""
        tile, u = t.wait(j), self.dtype(u)
        u = warpgroup.mma_AB(warpgroup.mm_AB(u, subtile(tile, CHUNK, 1)), u, subtile(tile, CHUNK, 0))
        u = warpgroup.wait(u)
        t.release(j)
        return u


@static
class Solver:
    """The work of the warpgroup that computes T for each chunk, from its keys, the strengths beta of its tokens and their
    decays. readers: how many warpgroups read the keys; together they clear rows that are another sequence's."""

    sequences: Sequences
    decay: NoDecay
    transform: UTTransform
    readers: int

    @inlined
    def solve(self, j, left, rings, triangles):
        """Compute T of chunk j and put it into its ring. left: how many tokens of the sequence are left."""
        k, t, beta, b, since = rings
        high, low = triangles
        keys = k.wait(j)
        self.sequences.clear(keys, left, self.readers)
        s = warpgroup.wait(warpgroup.mm_ABt(keys, keys))
        k.release(j)
        strength = warpgroup.load(beta.wait(j), ROWS)
        a = self.decay.scores(s, self.decay.wait(since, j), self.decay.wait(b, j)) * strength
        self.decay.release(since, j)
        self.decay.release(b, j)
        x = inverse_transposed(a, high, low)
        self.transform.publish(t, j, x * warpgroup.load(beta.wait(j), ROWS))
        beta.release(j)
