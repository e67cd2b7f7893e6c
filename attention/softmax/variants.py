"""What an attention makes of its scores, as objects: which keys a query sees (visible_keys.py), what becomes of a score and
what joins their sum (scores.py), what becomes of queries and weights (norms.py, dropped.py).

    Both(Causal(), Left())                      # a causal window
    Both(Causal(), Capped())                    # tanh of every score

A kernel is made for one such object, and calls its methods where it has a tile of scores. Numbers and arrays that an object
needs come as arguments of the kernel (`given`, a record), so a window of another width is no other code. Scores are Q K^T at
first, in units of the softmax's scale; a Capped score is in units of the cap, what a function of scores gives is in units of 1.
assembled.py makes an object of a call's options, with its arguments and the unit that is left."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ops import maximum
from tiles import dtype, inlined, static
from tiles.arguments import Record, array, listed

from .online import LOWEST, LOWEST_FLOAT


class ScoreContext(NamedTuple):
    """Where a warp's rows of scores stand. batch, head: of the queries; a packed sequence is a batch. row: the query of the
    first one. shift: query i and key i + shift stand at the same place. queries, keys: how many there are. given, aux: the
    kernel's arguments that the variant reads, and those that functions in Python do. kept: what the variant reads of memory
    once a tile, `precompute(ctx)`."""

    batch: Any
    head: Any
    row: Any
    shift: Any
    queries: Any
    keys: Any
    params: Any
    aux: Any
    precomputed: Any


class Keys(NamedTuple):
    """What some rows see: no key outside [first, end), and all of them every key in [inner_first, inner_end)."""

    first: Any
    end: Any
    inner_first: Any
    inner_end: Any


class Queries(NamedTuple):
    """Which queries see some keys: none outside [first, end), and every one in [inner_first, inner_end) sees all of them."""

    first: Any
    end: Any
    inner_first: Any
    inner_end: Any


def arrays_of(axes: Sequence[int]) -> Record:
    """What kernels say of the arrays that a variant's functions read, which have so many axes."""
    return listed(**{f"aux{n}": array(rank) for n, rank in enumerate(axes)})


@static
class Variant:
    """Every query sees every key, and scores stay as they are. The attributes below are what kernels and planners ask of a
    variant."""

    everything = True  # do all queries see all keys?
    from_first = True  # do all queries see the first key?
    rising = False  # do later queries see more keys?
    scored = False  # does it change scores, which takes time?
    measures = False  # does it take scores in units of the softmax's scale only?
    computed = True  # does which keys are seen follow from positions alone?
    by_rows = False  # is anything subtracted from all scores of a row, in blocks of keys that the mask does not cut?
    ends_early = False  # may all queries' windows end ahead of the last key?
    within = False  # does a query only see keys that exist, so that no mask is needed behind the last key?
    plain = False  # do tiles take as long as in plain or causal attention?
    draws = False  # does it draw random numbers, which takes many registers?
    lean = (
        True  # do gradients of narrow heads go the way of plain ones (backward/hopper_narrow.py), which has few registers left?
    )
    loads = False  # does it read a number for each score, which takes as many registers?
    fetches = False  # if so, does it read only one number for each column, while products run?
    brings = None  # does TMA bring what it reads for each score (bias_tiles.py), and of which dtype?
    prepares = False  # does it change the queries, before the scores?
    adds = False  # does it add to scores something that can be added later, when weights are found (`added`)?
    folds = True  # the same of heads of 128 columns (backward/hopper_folded.py)?
    light = True  # and of wide heads (backward/hopper_wide.py)?
    deep = False  # may all scores of a row be very low numbers, and count (online.py)?
    bends = False  # is the derivative of a changed score by the original one other than 1?

    def __str__(self):
        return type(self).__name__.lower()

    @property
    def params(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {}

    @property
    def floor(self) -> float:
        """Where the maximum of scores starts at the lowest."""
        return LOWEST_FLOAT if self.deep else LOWEST

    @inlined
    def of_queries(self, x, ctx):
        """What `queries` must know of whole rows of a tile of queries."""
        return None

    @inlined
    def queries(self, x, of_queries, ctx, col):
        """Some columns of a tile of queries, from column `col` on, as the variant changes them."""
        return x

    @inlined
    def ahead(self, spec, col, params):
        """What `queries_by` reads from memory for some columns, a vector of type `spec`. It is loaded before the queries
        arrive."""
        return 0

    @inlined
    def queries_by(self, x, of_queries, ahead, ctx, col):
        """queries(x, of_queries, at, col), with what was loaded ahead."""
        return self.queries(x, of_queries, ctx, col)

    @inlined
    def keys(self, first, last, ctx):
        """The Keys of rows `first` to `last`."""
        return Keys(0, ctx.keys, 0, ctx.keys)

    @inlined
    def seers(self, first, last, ctx):
        """The Queries of keys `first` to `last`: what `keys` says, asked from the other side."""
        return Queries(0, ctx.queries, 0, ctx.queries)

    @inlined
    def precompute(self, ctx):
        """What is read from memory once for a tile, and not once for each block of keys; it becomes ctx.precomputed."""
        return 0

    @inlined
    def score(self, s, ctx, key):
        """A tile of scores, whose first key is `key`, as the variant changes them."""
        return s

    @inlined
    def fetch(self, spec, ctx, key):
        """What `score_by` reads from memory for a tile of scores of type `spec`. It is loaded while products run."""
        return 0

    @inlined
    def score_by(self, s, fetched, ctx, key):
        """score(s, at, key), with what was fetched."""
        return self.score(s, ctx, key)

    @inlined
    def score_near(self, s, ctx, key):
        """score(s, at, key) in a block that the mask cuts, where a row's nearest keys may be; what is below is `below_near`."""
        return self.score(s, ctx, key)

    @inlined
    def score_near_by(self, s, fetched, ctx, key):
        """score_near(s, at, key), with what was fetched."""
        return self.score_by(s, fetched, ctx, key)

    @inlined
    def bent(self, s, ctx, key):
        """(score(s, at, key) without what is `added` later, its derivative by s, both in the units of s)."""
        return self.score(s, ctx, key), 1.0

    @inlined
    def added(self, s, ctx, key, scale):
        """What a variant that adds later adds to scores s, times `scale`: a number for each key, as a vector, or a tile. With
        it goes what is `below` for the key in the middle of the tile."""
        return 0.0

    @inlined
    def below(self, s, ctx, key):
        """What must also be subtracted from all scores s of a row, as a vector; None if there is nothing."""
        return None

    @inlined
    def below_near(self, s, ctx, key):
        """The same in a block that the mask cuts."""
        return None

    @inlined
    def mask(self, s, ctx, key, hidden):
        """The scores, with `hidden` in place of those that are not seen."""
        return s

    @inlined
    def drop(self, p, ctx, key):
        """A tile of weights, whose first key is `key`, without those that are dropped. The sum has counted all of them."""
        return p

    @inlined
    def output(self, o, ctx):
        """The output, given the weighted mean of the values."""
        return o

    @inlined
    def marked(self, p, ctx, key):
        """For gradients: a tile of weights, whose first key is `key`, in which those that are dropped have a negative sign."""
        return p

    @inlined
    def left(self, p):
        """Marked weights without those that are dropped."""
        return p

    @inlined
    def slope(self, p, dp, delta, ctx):
        """The gradient of scores by that of weights, dp; p: marked weights, delta: the sum of each row's dp p."""
        return p * (dp - delta)

    @inlined
    def lowest(self, ctx, floor):
        """Where the maximum of scores starts: not below `floor`, where it starts if nothing else is said."""
        return floor

    @inlined
    def total(self, l, m, scale, ctx):
        """The sum of weights exp2(scale (s - m)), and what joins it."""
        return l


@static
class Unforeseen(Variant):
    """Which keys a query sees does not follow from positions: a function or a map must be asked."""

    everything = False
    computed = False
    rising = True  # it is true of most masks

    @inlined
    def keys(self, first, last, ctx):
        return Keys(0, ctx.keys, ctx.keys, 0)

    @inlined
    def seers(self, first, last, ctx):
        return Queries(0, ctx.queries, ctx.queries, 0)


@static
class Both(Variant):
    """One variant and then another. A query sees the keys that both let it see."""

    one: Variant
    other: Variant

    def __str__(self):
        return f"{self.one} {self.other}"

    @property
    def params(self) -> dict[str, Any]:
        return self.one.params | self.other.params

    @property
    def brings(self) -> dtype | None:  # type: ignore[override]
        """See Variant. Only one of them does."""
        return self.one.brings or self.other.brings

    @inlined
    def of_queries(self, x, ctx):
        """See Variant. Only one of them prepares queries."""
        if self.one.prepares:
            return self.one.of_queries(x, ctx)
        else:
            return self.other.of_queries(x, ctx)

    @inlined
    def queries(self, x, of_queries, ctx, col):
        if self.one.prepares:
            return self.one.queries(x, of_queries, ctx, col)
        else:
            return self.other.queries(x, of_queries, ctx, col)

    @inlined
    def ahead(self, spec, col, params):
        if self.one.prepares:
            return self.one.ahead(spec, col, params)
        else:
            return self.other.ahead(spec, col, params)

    @inlined
    def queries_by(self, x, of_queries, ahead, ctx, col):
        if self.one.prepares:
            return self.one.queries_by(x, of_queries, ahead, ctx, col)
        else:
            return self.other.queries_by(x, of_queries, ahead, ctx, col)

    @inlined
    def keys(self, first, last, ctx):
        one, other = self.one.keys(first, last, ctx), self.other.keys(first, last, ctx)
        return Keys(
            max(one.first, other.first),
            min(one.end, other.end),
            max(one.inner_first, other.inner_first),
            min(one.inner_end, other.inner_end),
        )

    @inlined
    def seers(self, first, last, ctx):
        one, other = self.one.seers(first, last, ctx), self.other.seers(first, last, ctx)
        return Queries(
            max(one.first, other.first),
            min(one.end, other.end),
            max(one.inner_first, other.inner_first),
            min(one.inner_end, other.inner_end),
        )

    @inlined
    def precompute(self, ctx):
        return self.one.precompute(ctx), self.other.precompute(ctx)

    @inlined
    def score(self, s, ctx, key):
        s = self.one.score(s, ctx._replace(precomputed=ctx.precomputed[0]), key)
        return self.other.score(s, ctx._replace(precomputed=ctx.precomputed[1]), key)

    @inlined
    def fetch(self, spec, ctx, key):
        return self.one.fetch(spec, ctx, key), self.other.fetch(spec, ctx, key)

    @inlined
    def score_by(self, s, fetched, ctx, key):
        s = self.one.score_by(s, fetched[0], ctx._replace(precomputed=ctx.precomputed[0]), key)
        return self.other.score_by(s, fetched[1], ctx._replace(precomputed=ctx.precomputed[1]), key)

    @inlined
    def score_near(self, s, ctx, key):
        s = self.one.score_near(s, ctx._replace(precomputed=ctx.precomputed[0]), key)
        return self.other.score_near(s, ctx._replace(precomputed=ctx.precomputed[1]), key)

    @inlined
    def score_near_by(self, s, fetched, ctx, key):
        s = self.one.score_near_by(s, fetched[0], ctx._replace(precomputed=ctx.precomputed[0]), key)
        return self.other.score_near_by(s, fetched[1], ctx._replace(precomputed=ctx.precomputed[1]), key)

    @inlined
    def bent(self, s, ctx, key):
        s, first = self.one.bent(s, ctx._replace(precomputed=ctx.precomputed[0]), key)
        s, then = self.other.bent(s, ctx._replace(precomputed=ctx.precomputed[1]), key)
        if self.one.bends and self.other.bends:
            return s, first * then
        elif self.one.bends:
            return s, first
        else:
            return s, then

    @inlined
    def added(self, s, ctx, key, scale):
        if self.one.adds and self.other.adds:
            one = self.one.added(s, ctx._replace(precomputed=ctx.precomputed[0]), key, scale)
            return one + self.other.added(s, ctx._replace(precomputed=ctx.precomputed[1]), key, scale)
        elif self.one.adds:
            return self.one.added(s, ctx._replace(precomputed=ctx.precomputed[0]), key, scale)
        else:
            return self.other.added(s, ctx._replace(precomputed=ctx.precomputed[1]), key, scale)

    @inlined
    def below(self, s, ctx, key):
        """See Variant. Only one of them has any."""
        if self.one.by_rows:
            return self.one.below(s, ctx._replace(precomputed=ctx.precomputed[0]), key)
        else:
            return self.other.below(s, ctx._replace(precomputed=ctx.precomputed[1]), key)

    @inlined
    def below_near(self, s, ctx, key):
        if self.one.by_rows:
            return self.one.below_near(s, ctx._replace(precomputed=ctx.precomputed[0]), key)
        else:
            return self.other.below_near(s, ctx._replace(precomputed=ctx.precomputed[1]), key)

    @inlined
    def mask(self, s, ctx, key, hidden):
        return self.other.mask(self.one.mask(s, ctx, key, hidden), ctx, key, hidden)

    @inlined
    def drop(self, p, ctx, key):
        p = self.one.drop(p, ctx._replace(precomputed=ctx.precomputed[0]), key)
        return self.other.drop(p, ctx._replace(precomputed=ctx.precomputed[1]), key)

    @inlined
    def output(self, o, ctx):
        return self.other.output(self.one.output(o, ctx), ctx)

    @inlined
    def marked(self, p, ctx, key):
        p = self.one.marked(p, ctx._replace(precomputed=ctx.precomputed[0]), key)
        return self.other.marked(p, ctx._replace(precomputed=ctx.precomputed[1]), key)

    @inlined
    def left(self, p):
        return self.other.left(self.one.left(p))

    @inlined
    def slope(self, p, dp, delta, ctx):
        """See Variant. Only one of them marks weights."""
        if self.one.draws:
            return self.one.slope(p, dp, delta, ctx)
        else:
            return self.other.slope(p, dp, delta, ctx)

    @inlined
    def lowest(self, ctx, floor):
        return maximum(self.one.lowest(ctx, floor), self.other.lowest(ctx, floor))

    @inlined
    def total(self, l, m, scale, ctx):
        return self.other.total(self.one.total(l, m, scale, ctx), m, scale, ctx)


def _of_both(name: str, fold: Callable[[Any], bool]) -> property:
    """An attribute that is true of both parts together if it is true of `all`, or of `any`, of them."""
    return property(lambda self: fold((getattr(self.one, name), getattr(self.other, name))))


for _name in "everything from_first computed plain lean folds light".split():
    setattr(Both, _name, _of_both(_name, all))
for _name in "rising scored measures by_rows ends_early within draws loads fetches prepares adds deep bends".split():
    setattr(Both, _name, _of_both(_name, any))
