"""The solver of the delta rule (delta_hopper.py, delta_states_hopper.py): T = (I + A)^-1 beta of each chunk, for which nobody
needs to know the state."""

from ops import warpgroup
from ops.for_attention.triangular_inverse import inverse_transposed
from tiles import inlined, static

from .delta_decay import ROWS, NoDecay
from .tokens import Sequences


@static
class Solver:
    """The work of the warpgroup that computes T for each chunk, from its keys, the strengths beta of its tokens and their
    decays. readers: how many warpgroups read the keys; together they clear rows that are another sequence's."""

    sequences: Sequences
    decay: NoDecay
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
        warpgroup.store(t.claim(j), x * warpgroup.load(beta.wait(j), ROWS))
        t.publish(j)
        beta.release(j)
