"""What an attention makes of its scores, as objects: which keys a query sees, what becomes of a score, what joins the sum.

    Both(Causal(), Left())                      # a causal window
    Both(Causal(), Capped())                    # tanh of every score
    Both(Seen(lambda b, h, i, j, docs: docs[i] == docs[j]), Biased())

A kernel is made for one such object, and calls its methods where it has a tile of scores. Numbers and arrays that an object
needs come as arguments of the kernel (`given`, a record), so a window of another width is no other code. Scores are Q K^T at
first, in units of the softmax's scale; a Capped score is in units of the cap, what a function of scores gives is in units of 1.
`assembled` says how a call's options become an object, its arguments and the unit that is left."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from numpy import int32

from ops import abs, causal, col_index, exp2, load, maximum, row_index, tanh, triu, where
from tiles import fp32, inlined, rt, static
from tiles.arguments import FLOAT, INT, array

from .online import LOWEST


class At(NamedTuple):
    """Where a warp's rows of scores stand. batch, head: of the queries; a packed sequence is a batch. row: the query of the
    first one. shift: query i and key i + shift stand at the same place. queries, keys: how many there are. given, aux: the
    kernel's arguments that the variant reads, and those that functions in Python do. kept: what the variant reads of memory
    once a tile, `keep(at)`."""

    batch: Any
    head: Any
    row: Any
    shift: Any
    queries: Any
    keys: Any
    given: Any
    aux: Any
    kept: Any


class Keys(NamedTuple):
    """What some rows see: no key outside [first, end), and all of them every key in [inner_first, inner_end)."""

    first: Any
    end: Any
    inner_first: Any
    inner_end: Any


@static
class Variant:
    """Every query sees every key, and scores are what they are."""

    def __str__(self):
        return type(self).__name__.lower()

    @property
    def given(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {}

    @property
    def everything(self) -> bool:
        """Do all queries see all keys?"""
        return True

    @property
    def from_first(self) -> bool:
        """Do all queries see the first key?"""
        return True

    @property
    def rising(self) -> bool:
        """Do later queries see more keys?"""
        return False

    @property
    def scored(self) -> bool:
        """Does it make something of scores, which takes time?"""
        return False

    @property
    def computed(self) -> bool:
        """Which keys are seen, is that computed from places alone?"""
        return True

    @property
    def by_rows(self) -> bool:
        """Is anything to be subtracted from all of a row's scores?"""
        return False

    @property
    def within(self) -> bool:
        """Is a key that a query sees always one of those that there are?"""
        return False

    @property
    def plain(self) -> bool:
        """Do tiles take as long as in plain or causal attention?"""
        return False

    @property
    def draws(self) -> bool:
        """Does it need many registers, to draw random numbers?"""
        return False

    @property
    def prepares(self) -> bool:
        """Does something become of the queries, before the scores?"""
        return False

    @inlined
    def of_queries(self, x, at):
        """What `queries` must know of a tile's whole rows."""
        return None

    @inlined
    def queries(self, x, of_queries, at, col):
        """What becomes of some columns of a tile of queries, from column `col` on."""
        return x

    @inlined
    def keys(self, first, last, at):
        """The Keys of rows `first` to `last`."""
        return Keys(0, at.keys, 0, at.keys)

    @inlined
    def keep(self, at):
        """What is read of memory once a tile, not once a block of keys: at.kept."""
        return 0

    @inlined
    def score(self, s, at, key):
        """What becomes of a tile of scores, whose first key is `key`."""
        return s

    @inlined
    def below(self, s, at, key):
        """What is to be subtracted from all of a row's scores s besides, a vector; None if nothing is."""
        return None

    @inlined
    def mask(self, s, at, key, hidden):
        """`hidden` for those that are not seen."""
        return s

    @inlined
    def drop(self, p, at, key):
        """What is left of a tile of weights, whose first key is `key`, once they are in the sum."""
        return p

    @inlined
    def output(self, o, at):
        """What becomes of their mean of the values."""
        return o

    @inlined
    def lowest(self, at):
        """Where the maximum of scores starts."""
        return LOWEST

    @inlined
    def total(self, l, m, scale, at):
        """The sum of weights exp2(scale (s - m)), and what joins it."""
        return l


@static
class Both(Variant):
    """One and then another: a query sees what both let it see."""

    one: Variant
    other: Variant

    def __str__(self):
        return f"{self.one} {self.other}"

    @property
    def given(self) -> dict[str, Any]:
        """See Variant."""
        return self.one.given | self.other.given

    @property
    def everything(self) -> bool:
        """See Variant."""
        return self.one.everything and self.other.everything

    @property
    def from_first(self) -> bool:
        """See Variant."""
        return self.one.from_first and self.other.from_first

    @property
    def rising(self) -> bool:
        """See Variant."""
        return self.one.rising or self.other.rising

    @property
    def scored(self) -> bool:
        """See Variant."""
        return self.one.scored or self.other.scored

    @property
    def computed(self) -> bool:
        """See Variant."""
        return self.one.computed and self.other.computed

    @property
    def by_rows(self) -> bool:
        """See Variant."""
        return self.one.by_rows or self.other.by_rows

    @property
    def within(self) -> bool:
        """See Variant."""
        return self.one.within or self.other.within

    @property
    def plain(self) -> bool:
        """See Variant."""
        return self.one.plain and self.other.plain

    @property
    def draws(self) -> bool:
        """See Variant."""
        return self.one.draws or self.other.draws

    @property
    def prepares(self) -> bool:
        """See Variant."""
        return self.one.prepares or self.other.prepares

    @inlined
    def of_queries(self, x, at):
        """See Variant. Only one of them prepares queries."""
        if self.one.prepares:
            return self.one.of_queries(x, at)
        else:
            return self.other.of_queries(x, at)

    @inlined
    def queries(self, x, of_queries, at, col):
        """See Variant."""
        if self.one.prepares:
            return self.one.queries(x, of_queries, at, col)
        else:
            return self.other.queries(x, of_queries, at, col)

    @inlined
    def keys(self, first, last, at):
        """See Variant."""
        one, other = self.one.keys(first, last, at), self.other.keys(first, last, at)
        return Keys(
            max(one.first, other.first),
            min(one.end, other.end),
            max(one.inner_first, other.inner_first),
            min(one.inner_end, other.inner_end),
        )

    @inlined
    def keep(self, at):
        """See Variant."""
        return self.one.keep(at), self.other.keep(at)

    @inlined
    def score(self, s, at, key):
        """See Variant."""
        s = self.one.score(s, at._replace(kept=at.kept[0]), key)
        return self.other.score(s, at._replace(kept=at.kept[1]), key)

    @inlined
    def below(self, s, at, key):
        """See Variant. Only one of them has any."""
        if self.one.by_rows:
            return self.one.below(s, at._replace(kept=at.kept[0]), key)
        else:
            return self.other.below(s, at._replace(kept=at.kept[1]), key)

    @inlined
    def mask(self, s, at, key, hidden):
        """See Variant."""
        return self.other.mask(self.one.mask(s, at, key, hidden), at, key, hidden)

    @inlined
    def drop(self, p, at, key):
        """See Variant."""
        p = self.one.drop(p, at._replace(kept=at.kept[0]), key)
        return self.other.drop(p, at._replace(kept=at.kept[1]), key)

    @inlined
    def output(self, o, at):
        """See Variant."""
        return self.other.output(self.one.output(o, at), at)

    @inlined
    def lowest(self, at):
        """See Variant."""
        return maximum(self.one.lowest(at), self.other.lowest(at))

    @inlined
    def total(self, l, m, scale, at):
        """See Variant."""
        return self.other.total(self.one.total(l, m, scale, at), m, scale, at)


# ---- which keys a query sees ---------------------------------------------------------------------------------------
class Full(Variant):
    """All."""

    @property
    def plain(self) -> bool:
        """See Variant."""
        return True


class Causal(Variant):
    """Those up to its own place."""

    @property
    def everything(self) -> bool:
        """See Variant."""
        return False

    @property
    def rising(self) -> bool:
        """See Variant."""
        return True

    @property
    def within(self) -> bool:
        """See Variant. The last query stands at the last key."""
        return True

    @property
    def plain(self) -> bool:
        """See Variant."""
        return True

    @inlined
    def keys(self, first, last, at):
        """See Variant."""
        return Keys(0, min(at.keys, last + at.shift + 1), 0, min(at.keys, first + at.shift + 1))

    @inlined
    def mask(self, s, at, key, hidden):
        """See Variant."""
        return causal(s, at.row + at.shift - key, hidden)


class Right(Variant):
    """Those up to given.right places after its own."""

    @property
    def everything(self) -> bool:
        """See Variant."""
        return False

    @property
    def given(self) -> dict[str, Any]:
        """See Variant."""
        return {"right": INT}

    @property
    def rising(self) -> bool:
        """See Variant."""
        return True

    @inlined
    def keys(self, first, last, at):
        """See Variant."""
        edge = at.shift + at.given.right + 1
        return Keys(0, min(at.keys, last + edge), 0, min(at.keys, first + edge))

    @inlined
    def mask(self, s, at, key, hidden):
        """See Variant."""
        return causal(s, at.row + at.shift + at.given.right - key, hidden)


class Left(Variant):
    """Those from given.left places before its own on."""

    @property
    def everything(self) -> bool:
        """See Variant."""
        return False

    @property
    def given(self) -> dict[str, Any]:
        """See Variant."""
        return {"left": INT}

    @property
    def from_first(self) -> bool:
        """See Variant."""
        return False

    @inlined
    def keys(self, first, last, at):
        """See Variant."""
        edge = at.shift - at.given.left
        return Keys(max(0, first + edge), at.keys, max(0, last + edge), at.keys)

    @inlined
    def mask(self, s, at, key, hidden):
        """See Variant."""
        return triu(s, at.row + at.shift - at.given.left - key, hidden)


@static
class Masked(Variant):
    """Those for which function(b, h, i, j, *aux) holds; i is a vector of queries, j one of keys, both counted from 0."""

    function: Callable

    @property
    def everything(self) -> bool:
        """See Variant."""
        return False

    @property
    def computed(self) -> bool:
        """See Variant."""
        return False

    @property
    def rising(self) -> bool:
        """See Variant. Nobody knows; of most masks it is true."""
        return True

    @inlined
    def keys(self, first, last, at):
        """See Variant: of which keys the function holds nobody knows before it is asked."""
        return Keys(0, at.keys, at.keys, 0)

    @inlined
    def mask(self, s, at, key, hidden):
        """See Variant."""
        i, j = row_index(s.col_vec) + at.row, col_index(s.row_vec) + int32(key)
        return where(self.function(at.batch, at.head, i, j, *at.aux), s, hidden)


# ---- what becomes of a score ---------------------------------------------------------------------------------------
class Capped(Variant):
    """cap tanh(score / cap), in units of the cap."""

    @property
    def scored(self) -> bool:
        """See Variant."""
        return True

    @property
    def given(self) -> dict[str, Any]:
        """See Variant. per_cap: the unit of scores before, divided by the cap."""
        return {"per_cap": FLOAT}

    @inlined
    def score(self, s, at, key):
        """See Variant."""
        return tanh(s * at.given.per_cap)


@static
class Sloped(Variant):
    """score - slope |i + shift - j|, with a slope a head: ALiBi. ordered: no key is seen that comes after the query. last: no
    function follows that wants the score itself. With both, what depends on i is subtracted from all of a row's scores, and an
    addition a score is left where the distance takes more than two."""

    ordered: bool
    last: bool

    @property
    def scored(self) -> bool:
        """See Variant."""
        return True

    @property
    def by_rows(self) -> bool:
        """See Variant."""
        return self.ordered and self.last

    @property
    def given(self) -> dict[str, Any]:
        """See Variant. slopes: (batch, head). per_slope: 1 / the unit of scores."""
        return {"slopes": array(2), "per_slope": FLOAT}

    @inlined
    def score(self, s, at, key):
        """See Variant."""
        if self.by_rows:
            return s + col_index(s.row_vec) * at.kept
        elif self.ordered:
            return s - (self.place(s, at, key) - col_index(s.row_vec)) * at.kept
        else:
            return s - abs(self.place(s, at, key) - col_index(s.row_vec)) * at.kept

    @inlined
    def below(self, s, at, key):
        """See Variant."""
        if self.by_rows:
            return self.place(s, at, key) * at.kept
        else:
            return None

    @inlined
    def keep(self, at):
        """See Variant: the head's slope, in units of scores."""
        return at.given.slopes[at.batch, at.head] * at.given.per_slope

    @inlined
    def place(self, s, at, key):
        """Where the rows' queries stand, counted from `key`."""
        return row_index(s.col_vec) + int32(at.row + at.shift - key)


class Biased(Variant):
    """score + bias[b, h, i, j]."""

    @property
    def scored(self) -> bool:
        """See Variant."""
        return True

    @property
    def given(self) -> dict[str, Any]:
        """See Variant. bias: (batch, head, query, key). per_bias: 1 / the unit of scores."""
        return {"bias": array(4), "per_bias": FLOAT}

    @inlined
    def score(self, s, at, key):
        """See Variant."""
        at_bias = at.batch, at.head, at.row, int32(key)
        return s + load(at.given.bias, rt(s.rows, s.cols, fp32), at_bias, 2, 3, aligned=False) * at.given.per_bias


@static
class Scored(Variant):
    """function(score, b, h, i, j, *aux), in units of 1: of a tile of scores, a vector i of queries and one, j, of keys."""

    function: Callable

    @property
    def scored(self) -> bool:
        """See Variant."""
        return True

    @property
    def given(self) -> dict[str, Any]:
        """See Variant. unit: that of scores before."""
        return {"unit": FLOAT}

    @inlined
    def score(self, s, at, key):
        """See Variant."""
        i, j = row_index(s.col_vec) + at.row, col_index(s.row_vec) + int32(key)
        return self.function(s * at.given.unit, at.batch, at.head, i, j, *at.aux)


# ---- what joins the sum --------------------------------------------------------------------------------------------
class Sunk(Variant):
    """exp(sink), a number a head, joins the sum of weights: a key without a value."""

    @property
    def given(self) -> dict[str, Any]:
        """See Variant. sinks: (head). per_sink: 1 / the unit of scores."""
        return {"sinks": array(1), "per_sink": FLOAT}

    @inlined
    def lowest(self, at):
        """See Variant: no lower than the sink, whose weight is then never above 1."""
        return maximum(LOWEST, at.given.sinks[at.head] * at.given.per_sink)

    @inlined
    def total(self, l, m, scale, at):
        """See Variant."""
        return l + exp2((at.given.sinks[at.head] * at.given.per_sink - m) * scale)


FULL, CAUSAL = Full(), Causal()


class Assembled(NamedTuple):
    """A variant, the numbers that its kernel is given, by name, and the unit of its scores: exp(unit s) are the weights. reach:
    how many keys a query sees at most, if a window says so."""

    variant: Variant
    numbers: dict[str, float]
    unit: float
    reach: float


def assembled(
    scale: float,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float | None = None,
    alibi: bool = False,
    bias: bool = False,
    sink: bool = False,
    mask: Callable | None = None,
    score: Callable | None = None,
    more: Sequence[tuple[Variant, dict[str, float]]] = (),
) -> Assembled:
    """The variant of these options, and `more` with their numbers; alibi, bias and sink say whether there is one. Scores are
    capped, then sloped and biased, then a function's; what is masked stays masked."""
    (left, right), unit = window, scale
    parts = [part for part, _ in more]
    numbers = {name: x for _, its in more for name, x in its.items()}
    ordered = causal or right == 0
    if ordered:
        parts.append(CAUSAL)
    elif right is not None:
        parts.append(Right())
        numbers["right"] = right
    if left is not None:
        parts.append(Left())
        numbers["left"] = left
    if mask is not None:
        parts.append(Masked(mask))
    if softcap is not None:
        parts.append(Capped())
        numbers["per_cap"], unit = unit / softcap, softcap
    if alibi:
        parts.append(Sloped(ordered, last=score is None))
        numbers["per_slope"] = 1 / unit
    if bias:
        parts.append(Biased())
        numbers["per_bias"] = 1 / unit
    if score is not None:
        parts.append(Scored(score))
        numbers["unit"], unit = unit, 1.0
    if sink:
        parts.append(Sunk())
        numbers["per_sink"] = 1 / unit
    variant: Variant = parts[0] if parts else FULL
    for part in parts[1:]:
        variant = Both(variant, part)
    end = 0 if ordered else right
    return Assembled(variant, numbers, unit, math.inf if left is None or end is None else left + end + 1)
