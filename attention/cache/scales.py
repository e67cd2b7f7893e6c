"""The numbers by which rows are divided for an fp8 cache, as objects with the same methods: none; given ones; or, for each
token and head, the number that makes its greatest element 448, which is then written beside the row."""

from typing import Any, NamedTuple

from ops import abs, load, maximum, product, row_max, store, zeros
from tiles import dtype, fp32, inlined, rt, static
from tiles.arguments import array

HEADS, COLUMNS = 16, 32  # rows and columns of a tile
X = rt(HEADS, COLUMNS, fp32)
END, LEAST = 448.0, 2.0**-120  # the end of e4m3; the least scale, for heads that do not exist have elements of 0


@inlined
def pairs_of(gX, at, head, col, gCos, gSin, position, norm, of_rows, params):
    """Pairs of columns from pair `col` on: (the first column of each pair, the second, cos and sin of their angles at a
    position). norm: of the rows, see row_norms.py."""
    cos, sin = load(gCos, X.row_vec, (position, col)), load(gSin, X.row_vec, (position, col))
    x = norm.half(load(gX, X, (at[0], at[1], head, 0, col), 2, 4), X, of_rows, head, 0, col, params)
    y = norm.half(load(gX, X, (at[0], at[1], head, 1, col), 2, 4), X, of_rows, head, 1, col, params)
    return x, y, cos, sin


@inlined
def first_of(x, y, cos, sin):
    """The first column of each pair, rotated."""
    return product(x, cos) - product(y, sin)


@inlined
def second_of(x, y, cos, sin):
    """The second column of each pair, rotated."""
    return product(y, cos) + product(x, sin)


class New(NamedTuple):
    """The rows of K and V of one token, at (batch, token). K's rotated columns are also passed as pairs, with the tables of
    angles and the token's position. given: the arguments of norms."""

    k: Any
    k_pairs: Any
    v: Any
    at: Any
    cos: Any
    sin: Any
    position: Any
    params: Any


@static
class Unscaled:
    """Rows are rounded to the dtype of the cache, and not divided."""

    to: dtype

    def __str__(self):
        return ""

    @property
    def array(self) -> Any:
        """The type of the kernel's parameter that this reads or writes."""
        return array(2)

    @property
    def whole(self) -> bool:
        """Does the scale of a row depend on all of its columns? Then one warp has all of them."""
        return False

    @inlined
    def of(self, gScale, sequence, there, head, of_key, new, norm):
        """The numbers by which some heads of K or V are divided. The rows go `there`, to a page and a slot. new: see New.
        norm: of keys."""
        return 1.0

    @inlined
    def held(self, x, scale):
        """x divided by its scale, in the dtype of the cache."""
        return self.to(x)


class Given(Unscaled):
    """Rows are divided by gScale[sequence, head]."""

    def __str__(self):
        return ", scaled"

    @inlined
    def of(self, gScale, sequence, there, head, of_key, new, norm):
        return maximum(load(gScale, X.col_vec, (sequence, head)), LEAST)

    @inlined
    def held(self, x, scale):
        return self.to(x / scale)


class Found(Given):
    """Rows are divided by numbers that are computed here, and written to gScale[page, slot, head]."""

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
            of_rows = norm.of_rows(new.k, X, (at[0], at[1], head), new.params)
            for col in range(0, pairs, X.cols):
                x, y, cos, sin = pairs_of(new.k_pairs, at, head, col, new.cos, new.sin, new.position, norm, of_rows, new.params)
                top = row_max(abs(second_of(x, y, cos, sin)), row_max(abs(first_of(x, y, cos, sin)), top))
            for col in range(2 * pairs, new.k.shape[3], X.cols):
                x = load(new.k, X, (at[0], at[1], head, col))
                top = row_max(abs(norm.columns(x, X, of_rows, head, col, new.params)), top)
        else:
            for col in range(0, new.v.shape[3], X.cols):
                top = row_max(abs(load(new.v, X, (at[0], at[1], head, col))), top)
        scale = maximum(top / END, LEAST)
        store(gScale, scale, (there[0], there[1], head))
        return scale
