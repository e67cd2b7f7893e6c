"""The numbers by which new rows of K and V are divided before they go to a cache of fp8 or int8 (their descales). The classes
have the same methods: no descales; descales that the caller gives; or one for each token and head, which makes the row's
largest absolute value the greatest number of the cache's dtype, 448 or 127, and is written beside the row."""

from typing import Any, NamedTuple

from ops import abs, load, maximum, product, row_max, store, zeros
from tiles import dtype, fp32, inlined, rt, static
from tiles.launching.arguments import array

from .part import KernelPart

HEADS, COLUMNS = 16, 32  # rows and columns of a tile: a row is a head
X = rt(HEADS, COLUMNS, fp32)
QUANTIZED = "float8_e4m3fn", "int8"  # dtypes of such caches
MIN_DESCALE = 2.0**-120  # a tile's rows beyond the last head are 0, and must not divide by 0


@inlined
def load_pairs(gX, src, head, col, gCos, gSin, position, norm, stats, params):
    """Load pairs of columns from pair `col` on, normalised: (the first column of each pair, the second, cos and sin of their
    angles at `position`). norm, stats: see row_norms.py."""
    cos, sin = load(gCos, X.row_vec, (position, col)), load(gSin, X.row_vec, (position, col))
    x = norm.apply_to_half(load(gX, X, (src[0], src[1], head, 0, col), 2, 4), X, stats, head, 0, col, params)
    y = norm.apply_to_half(load(gX, X, (src[0], src[1], head, 1, col), 2, 4), X, stats, head, 1, col, params)
    return x, y, cos, sin


@inlined
def rotate_first(x, y, cos, sin):
    """x cos - y sin: the first column of each pair, rotated."""
    return product(x, cos) - product(y, sin)


@inlined
def rotate_second(x, y, cos, sin):
    """y cos + x sin: the second column of each pair, rotated."""
    return product(y, cos) + product(x, sin)


class NewToken(NamedTuple):
    """The rows of K and V of one new token. src: its (batch, token) in k and v. k_pairs: K's rotated columns as (batch, token,
    head, 2, pair). cos, sin: the rotary tables. position: the token's row in them. params: the parameters of norms."""

    k: Any
    k_pairs: Any
    v: Any
    src: Any
    cos: Any
    sin: Any
    position: Any
    params: Any


@static
class NoDescales(KernelPart):
    """Rows are rounded to the dtype of the cache, and not divided."""

    cache_dtype: dtype

    @property
    def array(self) -> Any:
        """The type of the kernel's parameters gKDescale and gVDescale."""
        return array(2)

    @property
    def greatest(self) -> float:
        """The greatest number of the cache's dtype."""
        return self.cache_dtype.ends[1]

    @property
    def needs_whole_row(self) -> bool:
        """Does the descale of a row depend on all of its columns? Then one warp reads all of them."""
        return False

    @inlined
    def find(self, gDescale, sequence, dst, head, is_key, token, norm):
        """The descales of a tile of heads of K or V. dst: the (page, slot) where the rows go. token: a NewToken. norm: of
        keys."""
        return 1.0

    @inlined
    def quantize(self, x, descale):
        """x / descale, in the dtype of the cache."""
        return self.cache_dtype(x)


class GivenDescales(NoDescales):
    """Rows are divided by gDescale[sequence, head]."""

    def __str__(self):
        return ", scaled"

    @inlined
    def find(self, gDescale, sequence, dst, head, is_key, token, norm):
        return maximum(load(gDescale, X.col_vec, (sequence, head)), MIN_DESCALE)

    @inlined
    def quantize(self, x, descale):
        return self.cache_dtype(x / descale)


class ComputedDescales(GivenDescales):
    """Rows are divided by their largest absolute value / `greatest`, which is stored at gDescale[page, slot, head]."""

    def __str__(self):
        return ", descales computed"

    @property
    def array(self) -> Any:
        return array(3)

    @property
    def needs_whole_row(self) -> bool:
        return True

    @inlined
    def find(self, gDescale, sequence, dst, head, is_key, token, norm):
        top, src, pairs = zeros(X.col_vec), token.src, token.cos.shape[1]
        if is_key:
            stats = norm.row_stats(token.k, X, (src[0], src[1], head), token.params)
            for col in range(0, pairs, X.cols):
                x, y, cos, sin = load_pairs(
                    token.k_pairs, src, head, col, token.cos, token.sin, token.position, norm, stats, token.params
                )
                top = row_max(abs(rotate_second(x, y, cos, sin)), row_max(abs(rotate_first(x, y, cos, sin)), top))
            for col in range(2 * pairs, token.k.shape[3], X.cols):
                x = load(token.k, X, (src[0], src[1], head, col))
                top = row_max(abs(norm.apply(x, X, stats, head, col, token.params)), top)
        else:
            for col in range(0, token.v.shape[3], X.cols):
                top = row_max(abs(load(token.v, X, (src[0], src[1], head, col))), top)
        descale = maximum(top / self.greatest, MIN_DESCALE)
        store(gDescale, descale, (dst[0], dst[1], head))
        return descale
