"""Variants of attention as static objects: which keys a query sees (visibility.py), how a score is changed and what is added
to the row sum (scores.py), how queries and weights are changed (norms.py, weight_dropout.py).

    CombinedVariant(Causal(), WindowLeft())      # a causal window
    CombinedVariant(Causal(), Softcap())         # tanh of every score

A kernel is compiled for one such object, and calls its methods where it has a tile of scores. Numbers and arrays that an object
reads are arguments of the kernel (`params`, a record), so a window of another width is the same code. Scores are Q K^T at
first, in units of the softmax's scale; the score of a Softcap is in units of the cap, and the result of a score function in
units of 1. variant_spec.py builds the object for a call's options, with its arguments and the unit of the final scores."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from numpy import int32

from ops import col_index, load, maximum, row_index
from tiles import dtype, fp32, inlined, rt, static
from tiles.launching.arguments import Record, array, positional_record

from .part import KernelPart


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

    @inlined
    def precompute(self, variant):
        """The context with what the variant reads once a tile."""
        return self._replace(precomputed=variant.precompute(self))

    @inlined
    def one(self):
        """The context for variant `one` of a CombinedVariant."""
        return self._replace(precomputed=self.precomputed[0])

    @inlined
    def other(self):
        """The context for variant `other` of a CombinedVariant."""
        return self._replace(precomputed=self.precomputed[1])

    @inlined
    def rows(self, s):
        """The queries of the rows of scores s, a column vector."""
        return row_index(s.col_vec) + self.row

    @inlined
    def positions(self, s, shift, key):
        """rows(s) + shift - key: where the rows' queries lie among the columns, if query i is aligned with key i + shift."""
        return row_index(s.col_vec) + int32(self.row + shift - key)

    @inlined
    def columns(self, s, key):
        """The keys of the columns of scores s whose first key is `key`, a row vector."""
        return col_index(s.row_vec) + int32(key)

    @inlined
    def load_tile(self, elements, s, key):
        """The elements of an array (batch, head, query, key) for scores of the type of s whose first key is `key`."""
        at = self.batch, self.head, self.row, int32(key)
        return load(elements, rt(s.rows, s.cols, fp32, s.layout), at, 2, 3, aligned=False)


class TokenHeadContext(ScoreContext):
    """The ScoreContext of a tile whose rows belong to several tokens and heads (decoding): head and row are column vectors."""

    @inlined
    def rows(self, s):
        return self.row

    @inlined
    def positions(self, s, shift, key):
        return self.row + int32(shift - key)

    @inlined
    def load_tile(self, elements, s, key):
        return elements[self.batch, self.head, self.row, self.columns(s, key)]


class KeyRange(NamedTuple):
    """The keys that some query rows see: no row sees a key outside [first, end), and every row sees all keys of [inner_first,
    inner_end), where no mask is needed."""

    first: Any
    end: Any
    inner_first: Any
    inner_end: Any


class QueryRange(NamedTuple):
    """The queries that see some keys: no query outside [first, end) sees one of them, and every query of [inner_first,
    inner_end) sees all of them."""

    first: Any
    end: Any
    inner_first: Any
    inner_end: Any


@inlined
def intersect(one, other):
    """The KeyRange or QueryRange of what is in both."""
    return one._replace(
        first=max(one.first, other.first),
        end=min(one.end, other.end),
        inner_first=max(one.inner_first, other.inner_first),
        inner_end=min(one.inner_end, other.inner_end),
    )


def arrays_of(axes: Sequence[int]) -> Record:
    """The kernel's record of the arrays that score_mod and mask_mod functions read (`aux`), which have so many axes."""
    return positional_record(**{f"aux{n}": array(rank) for n, rank in enumerate(axes)})


OVERRIDES: dict[str, dict[str, bool]] = {  # {method: what is true of a variant that has it of its own}
    "mask": {"sees_all_keys": False},
    "score": {"changes_scores": True, "needs_raw_scores": True},
    "score_and_grad": {"nonlinear": True},
    "prepare_queries": {"prepares_queries": True},
    "drop": {"uses_random": True},
}


@static
class Variant(KernelPart):
    """Full attention: every query sees every key, and scores stay as they are. Kernels and planners read the attributes below
    to choose code and configurations."""

    starts_at_zero = True  # do all queries see the first key?
    monotonic = False  # do later queries see more keys, as in causal attention?
    positional = True  # do positions alone say which keys a query sees?
    has_row_offset = False  # is a number subtracted from all scores of a row, in blocks that need no mask (`row_offset`)?
    may_end_early = False  # may the windows of all queries end before the last key?
    ends_at_last_key = False  # does the mask hide what comes after the last key, so that kernels need not?
    cheap_mask = False  # do tiles take as long as in full or causal attention?
    reads_score_matrix = False  # does it load one number for each score, which needs as many registers as scores?
    prefetches_columns = False  # if so, does it load one number for each column only, while wgmma runs (`prefetch`)?
    tma_bias = None  # the dtype of a bias that TMA loads in tiles (bias_tiles.py)
    adds_late = False  # in gradients, is its term added to the exponents of weights, not to scores (`late_term`)?
    allows_low_scores = False  # may scores below -1e30 be more than masked ones (online_softmax.py)?
    # Are there registers for it in the backward ...
    fits_narrow_backward = True  # ... kernel for head dims up to 64 (kernels/softmax/backward_narrow_hopper.py)?
    fits_folded_backward = True  # ... kernel for head dims up to 128 (kernels/softmax/backward_folded_hopper.py)?
    fits_wide_backward = True  # ... kernel for head dims over 128 (kernels/softmax/backward_wide_hopper.py)?
    fits_slope_gradient = False  # ... main kernel that computes the gradient of slopes, too (backward/slope_gradient.py)?

    # These follow from a class's methods (OVERRIDES), unless it says otherwise.
    sees_all_keys = True  # do all queries see all keys?
    changes_scores = False  # does it change scores?
    needs_raw_scores = False  # must fp8 scores be multiplied by their descales before the variant gets them?
    nonlinear = False  # is the derivative of a changed score by the raw score other than 1? (Kernels leave 1 out.)
    prepares_queries = False  # does it change the query tile before the scores?
    uses_random = False  # does it draw random numbers, which need many registers?

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        for method, facts in OVERRIDES.items():
            if method in vars(cls):
                for name in facts.keys() - vars(cls).keys():
                    setattr(cls, name, facts[name])

    def __str__(self):
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(self).__name__).lower()

    @inlined
    def query_stats(self, x, ctx):
        """Statistics of whole rows of a query tile, which `prepare_queries` needs."""
        return None

    @inlined
    def prepare_queries(self, x, stats, ctx, col):
        """The changed columns x of a query tile, from column `col` on."""
        return x

    @inlined
    def prefetch_query_params(self, spec, col, params):
        """What `prepare_queries_by` reads from memory for some columns, a vector of type `spec`. Kernels load it before the
        queries arrive."""
        return 0

    @inlined
    def prepare_queries_by(self, x, stats, prefetched, ctx, col):
        """prepare_queries(x, stats, ctx, col), with what was prefetched."""
        return self.prepare_queries(x, stats, ctx, col)

    @inlined
    def key_range(self, first, last, ctx):
        """The KeyRange of query rows `first` to `last`."""
        return KeyRange(0, ctx.seqlen_k, 0, ctx.seqlen_k)

    @inlined
    def query_range(self, first, last, ctx):
        """The QueryRange of keys `first` to `last`: the transpose of `key_range`."""
        return QueryRange(0, ctx.seqlen_q, 0, ctx.seqlen_q)

    @inlined
    def precompute(self, ctx):
        """What the variant reads from memory once for a query tile, not for each block of keys; it becomes ctx.precomputed."""
        return 0

    @inlined
    def score(self, s, ctx, key):
        """The changed scores s of a tile whose first key is `key`."""
        return s

    @inlined
    def prefetch(self, spec, ctx, key):
        """What `score_by` reads from memory for a tile of scores of type `spec`. Kernels load it while wgmma runs."""
        return 0

    @inlined
    def score_by(self, s, prefetched, ctx, key):
        """score(s, ctx, key), with what was prefetched."""
        return self.score(s, ctx, key)

    @inlined
    def score_in_edge_block(self, s, ctx, key):
        """score(s, ctx, key) in a block that needs the mask; its row offset is `row_offset_in_edge_block`."""
        return self.score(s, ctx, key)

    @inlined
    def score_in_edge_block_by(self, s, prefetched, ctx, key):
        """score_in_edge_block(s, ctx, key), with what was prefetched."""
        return self.score_by(s, prefetched, ctx, key)

    @inlined
    def score_and_grad(self, s, ctx, key):
        """(score(s, ctx, key) without `late_term`, its derivative by s), both in the units of s. As it stands it is that of a
        score to which something is added."""
        return (s if self.adds_late else self.score(s, ctx, key)), 1.0

    @inlined
    def late_term(self, s, ctx, key, scale):
        """What a variant with `adds_late` adds to scores s, times `scale`: a row vector, or a tile. The row offset that belongs
        to it is the one for the key in the middle of the tile."""
        return 0.0

    @inlined
    def row_offset(self, s, ctx, key):
        """What must still be subtracted from all scores of each row of s, as a column vector; None if nothing."""
        return None

    @inlined
    def row_offset_in_edge_block(self, s, ctx, key):
        """`row_offset` in a block that needs the mask."""
        return None

    @inlined
    def mask(self, s, ctx, key, hidden):
        """The scores s, with `hidden` for those that the row's query does not see."""
        return s

    @inlined
    def drop(self, p, ctx, key):
        """The weights p of a tile whose first key is `key`, with 0 for those that dropout drops. The row sum counts all."""
        return p

    @inlined
    def output(self, o, ctx):
        """The output for o, the weighted mean of the values."""
        return o

    @inlined
    def mark_dropped(self, p, ctx, key):
        """For gradients: the weights p of a tile, with a negative sign for those that dropout drops."""
        return p

    @inlined
    def remove_dropped(self, p):
        """Marked weights, with 0 for those that dropout drops."""
        return p

    @inlined
    def score_grad(self, p, dp, delta, ctx):
        """dS = P (dP - delta). p: marked weights; delta: the row sums of dP P."""
        return p * (dp - delta)

    @inlined
    def initial_max(self, ctx, floor):
        """Where a row's maximum starts, at least `floor`."""
        return floor

    @inlined
    def finish_row_sum(self, l, m, scale, ctx):
        """The row sum l of weights exp2(scale (s - m)), with what the variant adds to it."""
        return l


@static
class DataDependentMask(Variant):
    """A mask that positions do not determine: kernels must evaluate a function, or read a map of blocks."""

    positional = False
    monotonic = True  # as most masks are

    @inlined
    def key_range(self, first, last, ctx):
        return KeyRange(0, ctx.seqlen_k, ctx.seqlen_k, 0)

    @inlined
    def query_range(self, first, last, ctx):
        return QueryRange(0, ctx.seqlen_q, ctx.seqlen_q, 0)


@static
class CombinedVariant(Variant):
    """Variant `one`, and then `other` on its result. A query sees the keys that both let it see."""

    one: Variant
    other: Variant

    def __str__(self):
        return f"{self.one} {self.other}"

    @property
    def params(self) -> dict[str, Any]:
        return self.one.params | self.other.params

    @property
    def tma_bias(self) -> dtype | None:  # type: ignore[override]
        """The dtype of the one bias that TMA loads."""
        return self.one.tma_bias or self.other.tma_bias

    @property
    def preparing(self) -> Variant:
        """The one part that prepares queries."""
        return self.one if self.one.prepares_queries else self.other

    @property
    def dropping(self) -> Variant:
        """The one part that drops weights."""
        return self.one if self.one.uses_random else self.other

    @inlined
    def query_stats(self, x, ctx):
        return self.preparing.query_stats(x, ctx)

    @inlined
    def prepare_queries(self, x, stats, ctx, col):
        return self.preparing.prepare_queries(x, stats, ctx, col)

    @inlined
    def prefetch_query_params(self, spec, col, params):
        return self.preparing.prefetch_query_params(spec, col, params)

    @inlined
    def prepare_queries_by(self, x, stats, prefetched, ctx, col):
        return self.preparing.prepare_queries_by(x, stats, prefetched, ctx, col)

    @inlined
    def key_range(self, first, last, ctx):
        return intersect(self.one.key_range(first, last, ctx), self.other.key_range(first, last, ctx))

    @inlined
    def query_range(self, first, last, ctx):
        return intersect(self.one.query_range(first, last, ctx), self.other.query_range(first, last, ctx))

    @inlined
    def precompute(self, ctx):
        return self.one.precompute(ctx), self.other.precompute(ctx)

    @inlined
    def score(self, s, ctx, key):
        s = self.one.score(s, ctx.one(), key)
        return self.other.score(s, ctx.other(), key)

    @inlined
    def prefetch(self, spec, ctx, key):
        return self.one.prefetch(spec, ctx, key), self.other.prefetch(spec, ctx, key)

    @inlined
    def score_by(self, s, prefetched, ctx, key):
        s = self.one.score_by(s, prefetched[0], ctx.one(), key)
        return self.other.score_by(s, prefetched[1], ctx.other(), key)

    @inlined
    def score_in_edge_block(self, s, ctx, key):
        s = self.one.score_in_edge_block(s, ctx.one(), key)
        return self.other.score_in_edge_block(s, ctx.other(), key)

    @inlined
    def score_in_edge_block_by(self, s, prefetched, ctx, key):
        s = self.one.score_in_edge_block_by(s, prefetched[0], ctx.one(), key)
        return self.other.score_in_edge_block_by(s, prefetched[1], ctx.other(), key)

    @inlined
    def score_and_grad(self, s, ctx, key):
        s, grad = self.one.score_and_grad(s, ctx.one(), key)
        s, other_grad = self.other.score_and_grad(s, ctx.other(), key)
        if self.one.nonlinear and self.other.nonlinear:
            return s, grad * other_grad
        elif self.one.nonlinear:
            return s, grad
        else:
            return s, other_grad

    @inlined
    def late_term(self, s, ctx, key, scale):
        if self.one.adds_late and self.other.adds_late:
            one = self.one.late_term(s, ctx.one(), key, scale)
            return one + self.other.late_term(s, ctx.other(), key, scale)
        elif self.one.adds_late:
            return self.one.late_term(s, ctx.one(), key, scale)
        else:
            return self.other.late_term(s, ctx.other(), key, scale)

    @inlined
    def row_offset(self, s, ctx, key):
        """The offset of the one part that has any."""
        if self.one.has_row_offset:
            return self.one.row_offset(s, ctx.one(), key)
        else:
            return self.other.row_offset(s, ctx.other(), key)

    @inlined
    def row_offset_in_edge_block(self, s, ctx, key):
        if self.one.has_row_offset:
            return self.one.row_offset_in_edge_block(s, ctx.one(), key)
        else:
            return self.other.row_offset_in_edge_block(s, ctx.other(), key)

    @inlined
    def mask(self, s, ctx, key, hidden):
        return self.other.mask(self.one.mask(s, ctx, key, hidden), ctx, key, hidden)

    @inlined
    def drop(self, p, ctx, key):
        p = self.one.drop(p, ctx.one(), key)
        return self.other.drop(p, ctx.other(), key)

    @inlined
    def output(self, o, ctx):
        return self.other.output(self.one.output(o, ctx), ctx)

    @inlined
    def mark_dropped(self, p, ctx, key):
        p = self.one.mark_dropped(p, ctx.one(), key)
        return self.other.mark_dropped(p, ctx.other(), key)

    @inlined
    def remove_dropped(self, p):
        return self.other.remove_dropped(self.one.remove_dropped(p))

    @inlined
    def score_grad(self, p, dp, delta, ctx):
        return self.dropping.score_grad(p, dp, delta, ctx)

    @inlined
    def initial_max(self, ctx, floor):
        return maximum(self.one.initial_max(ctx, floor), self.other.initial_max(ctx, floor))

    @inlined
    def finish_row_sum(self, l, m, scale, ctx):
        return self.other.finish_row_sum(self.one.finish_row_sum(l, m, scale, ctx), m, scale, ctx)


def _of_both(name: str, fold: Callable[[Any], bool]) -> property:
    """An attribute of CombinedVariant that is true if it is true of `all` of its parts, or of `any`."""
    return property(lambda self: fold((getattr(self.one, name), getattr(self.other, name))))


TRUE_OF_ALL = """sees_all_keys starts_at_zero positional cheap_mask fits_narrow_backward fits_folded_backward
    fits_wide_backward fits_slope_gradient"""
TRUE_OF_ANY = """monotonic changes_scores needs_raw_scores has_row_offset may_end_early ends_at_last_key uses_random
    reads_score_matrix prefetches_columns prepares_queries adds_late allows_low_scores nonlinear"""
for _names, _fold in ((TRUE_OF_ALL, all), (TRUE_OF_ANY, any)):
    for _name in _names.split():
        setattr(CombinedVariant, _name, _of_both(_name, _fold))
if _absent := {name for name in vars(Variant) if not name.startswith("_")} - vars(CombinedVariant).keys():
    raise TypeError(f"CombinedVariant does not say what becomes of {sorted(_absent)} of its two parts")
