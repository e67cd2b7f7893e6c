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
    """Which tile of scores a variant gets. batch, head: of the queries; a packed sequence counts as a batch. row: the query of
    the warp's first row. shift: query i is aligned with key i + shift (bottom right). seqlen_q, seqlen_k: of the sequence.
    params, aux: the kernel's arguments that the variant reads, and the arrays that functions in Python read. precomputed: what
    the variant reads from memory once a tile, `precompute(ctx)`."""

    batch: Any
    head: Any
    row: Any
    shift: Any
    seqlen_q: Any
    seqlen_k: Any
    params: Any
    aux: Any
    precomputed: Any


class KeyRange(NamedTuple):
    """What some rows see: no key outside [first, end), and all of them every key in [inner_first, inner_end)."""

    first: Any
    end: Any
    inner_first: Any
    inner_end: Any


class QueryRange(NamedTuple):
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

    sees_all_keys = True  # do all queries see all keys?
    starts_at_zero = True  # do all queries see the first key?
    monotonic = False  # do later queries see more keys?
    changes_scores = False  # does it change scores, which takes time?
    needs_raw_scores = False  # does it take scores in units of the softmax's scale only?
    positional = True  # does which keys are seen follow from positions alone?
    has_row_offset = False  # is anything subtracted from all scores of a row, in blocks of keys that the mask does not cut?
    may_end_early = False  # may all queries' windows end ahead of the last key?
    ends_at_last_key = False  # does a query only see keys that exist, so that no mask is needed behind the last key?
    cheap_mask = False  # do tiles take as long as in plain or causal attention?
    uses_random = False  # does it draw random numbers, which takes many registers?
    fits_narrow_backward = (
        True  # do gradients of narrow heads go the way of plain ones (backward/hopper_narrow.py), which has few registers left?
    )
    reads_score_matrix = False  # does it read a number for each score, which takes as many registers?
    prefetches_columns = False  # if so, does it read only one number for each column, while products run?
    tma_bias = None  # does TMA bring what it reads for each score (bias_tiles.py), and of which dtype?
    prepares_queries = False  # does it change the queries, before the scores?
    adds_late = False  # does it add to scores something that can be added later, when weights are found (`added`)?
    fits_folded_backward = True  # the same of heads of 128 columns (backward/hopper_folded.py)?
    fits_wide_backward = True  # and of wide heads (backward/hopper_wide.py)?
    allows_low_scores = False  # may all scores of a row be very low numbers, and count (online.py)?
    nonlinear = False  # is the derivative of a changed score by the original one other than 1?

    def __str__(self):
        return type(self).__name__.lower()

    @property
    def params(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {}

    @property
    def max_floor(self) -> float:
        """Where the maximum of scores starts at the lowest."""
        return LOWEST_FLOAT if self.allows_low_scores else LOWEST

    @inlined
    def query_stats(self, x, ctx):
        """What `queries` must know of whole rows of a tile of queries."""
        return None

    @inlined
    def prepare_queries(self, x, of_queries, ctx, col):
        """Some columns of a tile of queries, from column `col` on, as the variant changes them."""
        return x

    @inlined
    def prefetch_query_params(self, spec, col, params):
        """What `queries_by` reads from memory for some columns, a vector of type `spec`. It is loaded before the queries
        arrive."""
        return 0

    @inlined
    def prepare_queries_by(self, x, of_queries, ahead, ctx, col):
        """queries(x, of_queries, at, col), with what was loaded ahead."""
        return self.prepare_queries(x, of_queries, ctx, col)

    @inlined
    def key_range(self, first, last, ctx):
        """The Keys of rows `first` to `last`."""
        return KeyRange(0, ctx.seqlen_k, 0, ctx.seqlen_k)

    @inlined
    def query_range(self, first, last, ctx):
        """The Queries of keys `first` to `last`: what `keys` says, asked from the other side."""
        return QueryRange(0, ctx.seqlen_q, 0, ctx.seqlen_q)

    @inlined
    def precompute(self, ctx):
        """What is read from memory once for a tile, and not once for each block of keys; it becomes ctx.precomputed."""
        return 0

    @inlined
    def score(self, s, ctx, key):
        """A tile of scores, whose first key is `key`, as the variant changes them."""
        return s

    @inlined
    def prefetch(self, spec, ctx, key):
        """What `score_by` reads from memory for a tile of scores of type `spec`. It is loaded while products run."""
        return 0

    @inlined
    def score_by(self, s, fetched, ctx, key):
        """score(s, at, key), with what was fetched."""
        return self.score(s, ctx, key)

    @inlined
    def score_in_edge_block(self, s, ctx, key):
        """score(s, at, key) in a block that the mask cuts, where a row's nearest keys may be; what is below is `below_near`."""
        return self.score(s, ctx, key)

    @inlined
    def score_in_edge_block_by(self, s, fetched, ctx, key):
        """score_near(s, at, key), with what was fetched."""
        return self.score_by(s, fetched, ctx, key)

    @inlined
    def score_and_grad(self, s, ctx, key):
        """(score(s, at, key) without what is `added` later, its derivative by s, both in the units of s)."""
        return self.score(s, ctx, key), 1.0

    @inlined
    def late_term(self, s, ctx, key, scale):
        """What a variant that adds later adds to scores s, times `scale`: a number for each key, as a vector, or a tile. With
        it goes what is `below` for the key in the middle of the tile."""
        return 0.0

    @inlined
    def row_offset(self, s, ctx, key):
        """What must also be subtracted from all scores s of a row, as a vector; None if there is nothing."""
        return None

    @inlined
    def row_offset_in_edge_block(self, s, ctx, key):
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
    def mark_dropped(self, p, ctx, key):
        """For gradients: a tile of weights, whose first key is `key`, in which those that are dropped have a negative sign."""
        return p

    @inlined
    def remove_dropped(self, p):
        """Marked weights without those that are dropped."""
        return p

    @inlined
    def score_grad(self, p, dp, delta, ctx):
        """The gradient of scores by that of weights, dp; p: marked weights, delta: the sum of each row's dp p."""
        return p * (dp - delta)

    @inlined
    def initial_max(self, ctx, floor):
        """Where the maximum of scores starts: not below `floor`, where it starts if nothing else is said."""
        return floor

    @inlined
    def finish_row_sum(self, l, m, scale, ctx):
        """The sum of weights exp2(scale (s - m)), and what joins it."""
        return l


@static
class Unforeseen(Variant):
    """Which keys a query sees does not follow from positions: a function or a map must be asked."""

    sees_all_keys = False
    positional = False
    monotonic = True  # it is true of most masks

    @inlined
    def key_range(self, first, last, ctx):
        return KeyRange(0, ctx.seqlen_k, ctx.seqlen_k, 0)

    @inlined
    def query_range(self, first, last, ctx):
        return QueryRange(0, ctx.seqlen_q, ctx.seqlen_q, 0)


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
    def tma_bias(self) -> dtype | None:  # type: ignore[override]
        """See Variant. Only one of them does."""
        return self.one.tma_bias or self.other.tma_bias

    @inlined
    def query_stats(self, x, ctx):
        """See Variant. Only one of them prepares queries."""
        if self.one.prepares_queries:
            return self.one.query_stats(x, ctx)
        else:
            return self.other.query_stats(x, ctx)

    @inlined
    def prepare_queries(self, x, of_queries, ctx, col):
        if self.one.prepares_queries:
            return self.one.prepare_queries(x, of_queries, ctx, col)
        else:
            return self.other.prepare_queries(x, of_queries, ctx, col)

    @inlined
    def prefetch_query_params(self, spec, col, params):
        if self.one.prepares_queries:
            return self.one.prefetch_query_params(spec, col, params)
        else:
            return self.other.prefetch_query_params(spec, col, params)

    @inlined
    def prepare_queries_by(self, x, of_queries, ahead, ctx, col):
        if self.one.prepares_queries:
            return self.one.prepare_queries_by(x, of_queries, ahead, ctx, col)
        else:
            return self.other.prepare_queries_by(x, of_queries, ahead, ctx, col)

    @inlined
    def key_range(self, first, last, ctx):
        one, other = self.one.key_range(first, last, ctx), self.other.key_range(first, last, ctx)
        return KeyRange(
            max(one.first, other.first),
            min(one.end, other.end),
            max(one.inner_first, other.inner_first),
            min(one.inner_end, other.inner_end),
        )

    @inlined
    def query_range(self, first, last, ctx):
        one, other = self.one.query_range(first, last, ctx), self.other.query_range(first, last, ctx)
        return QueryRange(
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
    def prefetch(self, spec, ctx, key):
        return self.one.prefetch(spec, ctx, key), self.other.prefetch(spec, ctx, key)

    @inlined
    def score_by(self, s, fetched, ctx, key):
        s = self.one.score_by(s, fetched[0], ctx._replace(precomputed=ctx.precomputed[0]), key)
        return self.other.score_by(s, fetched[1], ctx._replace(precomputed=ctx.precomputed[1]), key)

    @inlined
    def score_in_edge_block(self, s, ctx, key):
        s = self.one.score_in_edge_block(s, ctx._replace(precomputed=ctx.precomputed[0]), key)
        return self.other.score_in_edge_block(s, ctx._replace(precomputed=ctx.precomputed[1]), key)

    @inlined
    def score_in_edge_block_by(self, s, fetched, ctx, key):
        s = self.one.score_in_edge_block_by(s, fetched[0], ctx._replace(precomputed=ctx.precomputed[0]), key)
        return self.other.score_in_edge_block_by(s, fetched[1], ctx._replace(precomputed=ctx.precomputed[1]), key)

    @inlined
    def score_and_grad(self, s, ctx, key):
        s, first = self.one.score_and_grad(s, ctx._replace(precomputed=ctx.precomputed[0]), key)
        s, then = self.other.score_and_grad(s, ctx._replace(precomputed=ctx.precomputed[1]), key)
        if self.one.nonlinear and self.other.nonlinear:
            return s, first * then
        elif self.one.nonlinear:
            return s, first
        else:
            return s, then

    @inlined
    def late_term(self, s, ctx, key, scale):
        if self.one.adds_late and self.other.adds_late:
            one = self.one.late_term(s, ctx._replace(precomputed=ctx.precomputed[0]), key, scale)
            return one + self.other.late_term(s, ctx._replace(precomputed=ctx.precomputed[1]), key, scale)
        elif self.one.adds_late:
            return self.one.late_term(s, ctx._replace(precomputed=ctx.precomputed[0]), key, scale)
        else:
            return self.other.late_term(s, ctx._replace(precomputed=ctx.precomputed[1]), key, scale)

    @inlined
    def row_offset(self, s, ctx, key):
        """See Variant. Only one of them has any."""
        if self.one.has_row_offset:
            return self.one.row_offset(s, ctx._replace(precomputed=ctx.precomputed[0]), key)
        else:
            return self.other.row_offset(s, ctx._replace(precomputed=ctx.precomputed[1]), key)

    @inlined
    def row_offset_in_edge_block(self, s, ctx, key):
        if self.one.has_row_offset:
            return self.one.row_offset_in_edge_block(s, ctx._replace(precomputed=ctx.precomputed[0]), key)
        else:
            return self.other.row_offset_in_edge_block(s, ctx._replace(precomputed=ctx.precomputed[1]), key)

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
    def mark_dropped(self, p, ctx, key):
        p = self.one.mark_dropped(p, ctx._replace(precomputed=ctx.precomputed[0]), key)
        return self.other.mark_dropped(p, ctx._replace(precomputed=ctx.precomputed[1]), key)

    @inlined
    def remove_dropped(self, p):
        return self.other.remove_dropped(self.one.remove_dropped(p))

    @inlined
    def score_grad(self, p, dp, delta, ctx):
        """See Variant. Only one of them marks weights."""
        if self.one.uses_random:
            return self.one.score_grad(p, dp, delta, ctx)
        else:
            return self.other.score_grad(p, dp, delta, ctx)

    @inlined
    def initial_max(self, ctx, floor):
        return maximum(self.one.initial_max(ctx, floor), self.other.initial_max(ctx, floor))

    @inlined
    def finish_row_sum(self, l, m, scale, ctx):
        return self.other.finish_row_sum(self.one.finish_row_sum(l, m, scale, ctx), m, scale, ctx)


def _of_both(name: str, fold: Callable[[Any], bool]) -> property:
    """An attribute that is true of both parts together if it is true of `all`, or of `any`, of them."""
    return property(lambda self: fold((getattr(self.one, name), getattr(self.other, name))))


TRUE_OF_ALL = """sees_all_keys starts_at_zero positional cheap_mask fits_narrow_backward fits_folded_backward
    fits_wide_backward"""
TRUE_OF_ANY = """monotonic changes_scores needs_raw_scores has_row_offset may_end_early ends_at_last_key uses_random
    reads_score_matrix prefetches_columns prepares_queries adds_late allows_low_scores nonlinear"""
for _names, _fold in ((TRUE_OF_ALL, all), (TRUE_OF_ANY, any)):
    for _name in _names.split():
        setattr(Both, _name, _of_both(_name, _fold))
