"""What rows are divided by where a cache holds fp8, as objects with the same methods: nothing, what is given, or what makes the
greatest element of each token and head 448, which is then written where the row goes."""

from typing import Any, NamedTuple

from ops import abs, load, maximum, product, row_max, store, zeros
from tiles import dtype, fp32, inlined, rt, static
from tiles.arguments import array

HEADS, COLUMNS = 16, 32  # of a tile
X = rt(HEADS, COLUMNS, fp32)
END, LEAST = 448.0, 2.0**-120  # END: of e4m3. LEAST: of scales, for heads that are not there have 0


@inlined
def pairs_of(gX, at, head, col, gCos, gSin, position, norm, of_rows, given):
    """Pairs of columns from `col` on: the first of each pair, the others, cos and sin of their angles at a position. norm: of
    rows, see row_norms.py."""
    cos, sin = load(gCos, X.row_vec, (position, col)), load(gSin, X.row_vec, (position, col))
    x = norm.half(load(gX, X, (at[0], at[1], head, 0, col), 2, 4), X, of_rows, head, 0, col, given)
    y = norm.half(load(gX, X, (at[0], at[1], head, 1, col), 2, 4), X, of_rows, head, 1, col, given)
    return x, y, cos, sin


@inlined
def first_of(x, y, cos, sin):
    """The first of each pair, rotated."""
    return product(x, cos) - product(y, sin)


@inlined
def second_of(x, y, cos, sin):
    """The others."""
    return product(y, cos) + product(x, sin)


class New(NamedTuple):
    """Rows of K and of V, of one token: at (batch, token); K's columns that are rotated as pairs, too; by which tables, and at
    which position. given: what norms read."""

    k: Any
    k_pairs: Any
    v: Any
    at: Any
    cos: Any
    sin: Any
    position: Any
    given: Any


@static
class Unscaled:
    """Rows are rounded to what the cache holds, as they are."""

    to: dtype

    def __str__(self):
        return ""

    @property
    def array(self) -> Any:
        """The kernel's parameter that it reads or writes."""
        return array(2)

    @property
    def whole(self) -> bool:
        """Does it take all columns of a row to know its scale? Then a warp has all of them."""
        return False

    @inlined
    def of(self, gScale, sequence, there, head, of_key, new, norm):
        """What these heads of K or of V are divided by, which go `there`, to a page and a slot. new: see New; norm: of keys."""
        return 1.0

    @inlined
    def held(self, x, scale):
        """As the cache holds it."""
        return self.to(x)


class Given(Unscaled):
    """By gScale[sequence, head]."""

    def __str__(self):
        return ", scaled"

    @inlined
    def of(self, gScale, sequence, there, head, of_key, new, norm):
        return maximum(load(gScale, X.col_vec, (sequence, head)), LEAST)

    @inlined
    def held(self, x, scale):
        return self.to(x / scale)


class Found(Given):
    """By what becomes gScale[page, slot, head]."""

    def __str__(self):
        return ", scales found"

    @property
    def array(self) -> Any:
        return array(3)

    @property
    def whole(self) -> bool:
        return True

    @inlined
    def of(self, gScale, sequence, there, head, of_key, new, norm):
        top, at, pairs = zeros(X.col_vec), new.at, new.cos.shape[1]
        if of_key:
            of_rows = norm.of_rows(new.k, X, (at[0], at[1], head), new.given)
            for col in range(0, pairs, X.cols):
                x, y, cos, sin = pairs_of(new.k_pairs, at, head, col, new.cos, new.sin, new.position, norm, of_rows, new.given)
                top = row_max(abs(second_of(x, y, cos, sin)), row_max(abs(first_of(x, y, cos, sin)), top))
            for col in range(2 * pairs, new.k.shape[3], X.cols):
                x = load(new.k, X, (at[0], at[1], head, col))
                top = row_max(abs(norm.columns(x, X, of_rows, head, col, new.given)), top)
        else:
            for col in range(0, new.v.shape[3], X.cols):
                top = row_max(abs(load(new.v, X, (at[0], at[1], head, col))), top)
        scale = maximum(top / END, LEAST)
        store(gScale, scale, (there[0], there[1], head))
        return scale
