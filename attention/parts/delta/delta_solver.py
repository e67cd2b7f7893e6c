"""The UT transform of the delta rule (delta_hopper.py, delta_states_hopper.py): T = (I + A)^-1 beta of each chunk, which does
not depend on the state."""

from ops import warpgroup
from ops.for_attention.triangular_inverse import inverse_transposed
from tiles import inlined, static

from ..recurrent.l2norm import L2Norm
from ..recurrent.tokens import SequenceLayout
from .delta_decay import COL_VEC, UngatedDelta


@static
class UTTransform:
    """The work of the solver, the warpgroup that computes T of each chunk from its keys, their beta and their decays. readers:
    how many warpgroups read the keys; together they zero the rows that belong to another sequence."""

    seq_layout: SequenceLayout
    decay: UngatedDelta
    readers: int
    norm: L2Norm

    @inlined
    def solve(self, tiles, norm_rings, j, remaining):
        """This warp's rows of T^T of chunk j. remaining: the number of tokens of the sequence from the chunk's first one on.
        A = tril(beta exp2(b - b^T) * K K^T, -1), where b counts in a strong chunk only. tiles: the kernel's shared memory.
        norm_rings: rings of inverse norms (l2norm.py), the first of them that of keys."""
        k, beta, b, exp_b = tiles.k, tiles.beta, tiles.b, tiles.exp_b
        keys = k.wait(j)
        self.seq_layout.zero_other_rows(keys, remaining, self.readers)
        s = warpgroup.wait(warpgroup.mm_ABt(keys, keys))
        k.release(j)
        inverse_norms = self.norm.invert_squares(warpgroup.diagonal(s) if self.norm.enabled else 0.0)
        self.norm.store_norms(norm_rings, 0, j, inverse_norms)
        factors = warpgroup.load(beta.wait(j), COL_VEC) * inverse_norms * inverse_norms
        a = self.decay.decay_scores(s, self.decay.wait(exp_b, j), self.decay.wait(b, j)) * factors
        self.decay.release(exp_b, j)
        self.decay.release(b, j)
        x = inverse_transposed(a, tiles.high, tiles.low) * (warpgroup.load(beta.wait(j), COL_VEC) * inverse_norms)
        beta.release(j)
        return x
