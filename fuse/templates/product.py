"""A product with what stands around it: what the two templates of products have in common.

    y = epilogue(prologue(x) @ w, prologue(x) @ w2, (prologue(x) @ a) @ b, sums of rows of x, ...)

- prologue: maps of x and of vectors along its columns, as x's tile arrives;
- products of one operand with several weights share its loads; each has an accumulator;
- a product with a narrow matrix, which another product follows (LoRA), rides along, too;
- sides: sums of each row of maps of x: they ride the loop along k; maxima come from memory;
- epilogue: maps of all these, of vectors, of tiles of the result's shape, and what each row keeps of its columns (terms.among);
- folds: in place of the result, what a softmax needs to know of each part of its rows (terms.of_parts).

All of them may be of a batch, an axis before rows and columns: a product's matrices are then one for each of it, but for what
lacks that axis.

`Product.matches` finds this in a term. few_rows.py, many_rows.py and since_ampere.py write it down, by product_text.py."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..axes import PART, Axis
from ..evaluate import beyond
from ..functions import CASTS, FP8, MAPS
from ..graph import along, between, inputs, is_tile, walk
from ..module import DTYPES
from ..rules import NARROW
from ..terms import INDEX, Term, viewed

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_PRODUCTS = 2
BESIDES = "input", "matmul", "sum", "max", "flat", "spread"  # what an epilogue reads


class Weight(NamedTuple):
    """A weight as it lies in memory: (k, n), or if it is `turned` (n, k)."""

    array: Term
    turned: bool

    @classmethod
    def of(cls, x: Term) -> Weight:
        return cls(x.of[0], True) if x.operation == "transpose" else cls(x, False)


class Extension(NamedTuple):
    """A product with another left factor that is computed in further steps along k: x @ w + t @ b = [x, t] @ [w; b]. joint:
    the sum of both products. left, weight: the factors of the added one."""

    joint: Term
    left: Term
    weight: Weight

    @property
    def narrow(self) -> bool:
        """Is it one step?"""
        return self.left.extents[1] <= NARROW


def extended(root: Term, product: Term, weight: Weight, rest: Mapping[Term, Weight]) -> Extension | None:
    """The extension by which another product is added to this one, if there is such a product and its weights lie in memory as
    this one's do. rest: {product: its weight}, those that may be added."""
    for other, its in rest.items():
        for x in between([root], [product, other]):
            if x.operation == "add" and product in x.of and other in x.of and its.turned == weight.turned:
                return Extension(x, other.of[0], its)
    return None


class Product:
    """A kernel that computes a product with what stands around it: see the module.

    root: the term that it computes, (m, n) or (batch, m, n). x: the array (m, k). operand: prologue(x), the left factor of all
    products. products: {product: its weight}. narrow: {narrow product times its second matrix: (the first weight, the second
    weight)}. sides: sums of rows of x. vectors: the vectors along k that the prologue and the sides read. others: the tiles
    and vectors that the epilogue reads. numbers: the arguments that are numbers. extension: a product with another left factor
    that is added.

    folds: what is stored in place of the root, see `fold`. beside: {product: its weight}, further results with the same
    operand, see `sharing`. results: what the epilogue computes, the root and other maps of the same products
    (many_rows.py)."""

    launched = True

    def __init__(
        self,
        root: Term,
        x: Term,
        operand: Term,
        products: dict[Term, Weight],
        narrow: dict[Term, tuple[Weight, Weight]],
        sides: list[Term],
        others: list[Term],
        extension: Extension | None = None,
    ):
        self.root, self.x, self.operand = root, x, operand
        self.roots: tuple[Term, ...] = (root,)
        self.results: tuple[Term, ...] = (root,)
        self.folds: tuple[Term, ...] = ()
        self.beside: dict[Term, Weight] = {}
        self.extension = extension
        self.products, self.narrow, self.sides = products, narrow, sides
        inside = between([operand, *(one.of[0] for one in sides)], [x], with_leaves=True)
        self.vectors = [y for y in inside if y.operation in ("input", "flat") and y is not x and y.ndim and along(y)]
        self.others = [y for y in others if y.ndim and y.operation in BESIDES]

    @property
    def ahead(self) -> Sequence[Term]:
        """The arrays that the kernel reads before the launch ahead of it has ended."""
        return ()

    @property
    def weights(self) -> list[Weight]:
        """All weights."""
        more = [self.extension.weight] if self.extension else []
        narrow = [w for pair in self.narrow.values() for w in pair]
        return [*self.products.values(), *self.beside.values(), *narrow, *more]

    @property
    def leaves(self) -> list[Term]:
        """All arrays and numbers that the kernel reads."""
        indices = [y for x in self.folds for y in x.of[1:]] + [x.of[1] for x in self.kept] + [x.of[0] for x in self.masks]
        return list(dict.fromkeys([*self.read, *indices, *self.numbers]))

    @property
    def dtype(self) -> str:
        """The dtype of the operands: that of x; if another kernel makes x, the first dtype of 16 bits among those that x and
        the weights are made from."""
        made_of = [*inputs(self.x), *inputs(self.weights[0].array)]
        found = [y.what[1] for y in made_of if y.ndim and y.what[1] not in (FP8, *INDEX)]
        return found[0] if viewed(self.x).operation == "input" else next((one for one in found if one in DTYPES), found[0])

    @property
    def of_16_bits(self) -> bool:
        """Is nothing fp8 of all that is loaded in tiles?"""
        return not any(viewed(x).held_as("") == FP8 for x in (self.x, *self.vectors, *(w.array for w in self.weights)))

    @property
    def twice(self) -> bool:
        """Is an array read in two ways, as in x + x @ w? A kernel has one parameter for an array, with one kind of box for
        TMA, so it cannot do this."""
        return len({*self.read}) < len(self.read)

    @property
    def joined(self) -> tuple[Term, Term | None] | None:
        """(the sum of the one product and the one narrow product, the number by which the latter is scaled or None), if there
        is such a sum: one accumulator holds it. Otherwise None."""
        if len(self.narrow) != 1:
            return None
        (narrow,) = self.narrow
        for x in between([self.root], [*self.products, narrow]):
            if x.operation == "add" and any(y in self.products for y in x.of):
                other = next(y for y in x.of if y not in self.products)
                if other is narrow:
                    return x, None
                if other.operation == "mul" and narrow in other.of:
                    scale = other.of[1 - other.of.index(narrow)]
                    if not scale.names:
                        return x, scale
        return None

    @property
    def read(self) -> list[Term]:
        """The matrices and vectors that the kernel reads."""
        more = [self.extension.left] if self.extension else []
        return [self.x, *self.vectors, *(w.array for w in self.weights), *self.others, *more]

    @property
    def numbers(self) -> list[Term]:
        """The arguments that are numbers."""
        return [y for y in between(self.results, self.read, True) if y.operation == "input" and not y.ndim]

    @property
    def lengths(self) -> list[Term]:
        """The lengths of axes that are computed with."""
        inside = between([*self.results, *(one.of[0] for one in self.sides)], [*self.read, *self.sides])
        return [y for y in inside if y.operation == "length"]

    @property
    def measured(self) -> bool:
        """Can the launching function read these lengths from the arguments?"""
        return all(x.what[0] is not None and known_length(x, inputs(*self.results)) for x in self.lengths)

    @property
    def kept(self) -> list[Term]:
        """The terms in which each row keeps some of its columns only (terms.among)."""
        return [x for x in between(self.results, self.read) if x.operation == "among"]

    @property
    def masks(self) -> list[Term]:
        """The terms that ask which column is a row's own (terms.is_column)."""
        return [x for x in between(self.results, self.read) if x.operation == "is_column"]

    @property
    def each(self) -> Term | None:
        """The stack of matrices for each of which every row has one number (terms.spread), if there is one."""
        return next((y.of[1] for y in self.others if y.operation == "spread"), None)

    @property
    def riding(self) -> list[str]:
        """What the kernel does besides the products, in words."""
        told = [f"{self.operand} is made as x arrives"] * (not self.plain)
        told += [f"{one} rides along" for one in (*self.sides, *self.narrow)]
        told += [f"{one} is made of what is complete" for one in self.results if one not in self.products]
        return told + ["its tiles leave as maxima and sums of exponentials"] * bool(self.folds)

    @property
    def fixed(self) -> dict[Axis, int]:
        """The axes whose extents are in the kernel's text. A batch of 2, and few parts, are enough to see in a proof that they
        are not mixed up."""
        inner, lead = [x.of[0] for x in self.narrow], self.root.names[:-2]
        of_parts = {axis.root: 2 * PART + 8 for axis in self.root.names[-1:] if axis and self.folds}
        for x in self.kept:
            of_parts |= {axis.root: n for axis, n in zip(x.of[2].names, (3, x.of[2].extents[1])) if axis}
        if self.each is not None:  # tiles of columns have one number a row; TMA steps by eight
            of_parts |= {axis.root: n for axis, n in zip(self.each.names, (8, PART)) if axis}
        narrow = {x.names[1].root: x.extents[1] for x in inner if x.names[1]}
        return narrow | {axis.root: 2 for axis in lead if axis} | of_parts

    @property
    def plain(self) -> bool:
        """Is the operand x itself, without a prologue?"""
        return self.operand is self.x

    @property
    def rows(self) -> int:
        return self.root.extents[-2]

    @property
    def inner(self) -> int:
        return self.x.extents[-1]

    @property
    def columns(self) -> int:
        return sum(x.extents[-1] for x in (self.root, *self.beside))

    @property
    def batch(self) -> int | None:
        """How many products there are in the batch; None if there is no batch."""
        return self.root.extents[0] if self.root.ndim == 3 else None

    @property
    def bytes(self) -> float:
        """Bytes read from memory and written to it, each once."""
        return float(sum(x.nbytes for x in (*self.leaves, *self.roots)))

    @property
    def operations(self) -> float:
        """Operations of the tensor cores."""
        sizes = [math.prod(x.extents) * self.inner for x in (*self.products, *self.beside)]
        sizes += [math.prod(x.extents) * x.of[0].extents[1] + math.prod(x.of[0].extents) * self.inner for x in self.narrow]
        return 2.0 * sum(sizes)

    @property
    def maps(self) -> float:
        """Operations on elements, outside the tensor cores."""
        return float(
            math.prod(self.x.extents) * (not self.plain + len(self.sides)) + len(self.results) * math.prod(self.root.extents)
        )

    def fold(self, roots: tuple[Term, ...]) -> Self | None:
        """The kernel that stores, in place of its result, what a softmax needs to know of the parts of its rows. None if the
        roots are not that, or if there is more than one product."""
        needed = {x.operation for x in roots} >= {"max_of_parts", "sum_of_parts"}
        if not needed or len(self.products) != 1 or len({x.of[0] for x in roots}) != 1 or self.root.ndim != 2:
            return None
        self.roots = self.folds = roots
        return self

    def sharing(self, roots: tuple[Term, ...]) -> Self | None:
        """The kernel that computes these products, all with one operand; their columns lie side by side in its tiles. None if
        they differ in more than their weights."""
        alike = all(x.operation == "matmul" and x.ndim == 2 and x.of[0] is self.operand for x in roots)
        if not alike or list(self.products) != [self.root] or self.root is not roots[0] or self.extension:
            return None
        weights = {x: Weight.of(x.of[1]) for x in roots[1:]}
        held = {(w.turned, viewed(w.array).held_as("")) for w in (self.products[self.root], *weights.values())}
        if len(held) > 1 or not all(is_tile(w.array) for w in weights.values()):
            return None
        self.roots, self.beside = roots, weights
        return self

    @classmethod
    def matches(cls, root: Term) -> Iterator[Self]:
        """The kernels that compute a term: with the prologue inside the kernel, and with the prologue's result read from
        memory."""
        whole = found_in(root)
        if whole is None:
            return
        for found in (whole, whole.apart) if whole.narrow else (whole,):
            for operand in dict.fromkeys(x.of[0] for x in found.products):
                part = found.of(operand)
                if len(part.products) > MOST_PRODUCTS:
                    continue
                for x in dict.fromkeys([_base(operand), operand]):
                    if x is None or not all(is_tile(w.array) for w in part.weights):
                        continue
                    ends = [x, *(y for y in walk(root) if y.operation in ("input", "flat"))]
                    if not np.isfinite(
                        beyond(operand, ends)
                    ).all():  # 0, which the weights are there, times infinity is no number
                        continue
                    riding = [one for one in part.reductions if one.operation == "sum" and _base(one.of[0]) is x]
                    sides = [one for one in riding if not beyond(one.of[0], ends).any()]
                    others = [*part.others, *(one for one in part.reductions if one not in sides)]
                    made = cls(root, x, operand, part.products, part.narrow, sides, others)
                    if made.measured:
                        yield made


def found_in(*roots: Term) -> Found | None:
    """What a walk down from these terms finds; None if there is no product, or something that an epilogue cannot compute."""
    found = Found()
    if any(root.operation in CASTS for root in roots):  # results have the operands' dtype
        return None
    if not all(map(is_tile, roots)) or not found.epilogue(roots) or not (found.products or found.narrow):
        return None
    if len(found.chosen) > 1:
        return None
    stacks = {y.of[1] for y in found.others if y.operation == "spread"}
    return found if len(stacks) < 2 and all(x.extents[1] % PART == 0 for x in stacks) else None


class Found:
    """What a walk down from a term finds: products with their weights, narrow products, reductions, and other terms that are
    read."""

    def __init__(self) -> None:
        self.products: dict[Term, Weight] = {}
        self.narrow: dict[Term, tuple[Weight, Weight]] = {}
        self.reductions: list[Term] = []
        self.others: list[Term] = []
        self.chosen: set[Term] = set()  # by what a row's own column is chosen

    @property
    def weights(self) -> list[Weight]:
        """The weights of all products."""
        return [*self.products.values(), *(w for pair in self.narrow.values() for w in pair)]

    @property
    def apart(self) -> Found:
        """The same, with narrow products read from memory and multiplied like any other matrix."""
        other = Found()
        other.products = self.products | {x: second for x, (_, second) in self.narrow.items()}
        other.reductions, other.others = self.reductions, self.others
        return other

    def of(self, operand: Term) -> Found:
        """The same with the products of this operand only; the others are read from memory."""
        part = Found()
        part.products = {x: w for x, w in self.products.items() if x.of[0] is operand}
        part.narrow = {x: pair for x, pair in self.narrow.items() if x.of[0].of[0] is operand}
        part.reductions, part.others = self.reductions, [*self.others]
        part.others += [x for x in (*self.products, *self.narrow) if x not in part.products and x not in part.narrow]
        return part

    def epilogue(self, roots: Sequence[Term]) -> bool:
        """Walk down from the roots to the products. Returns whether an epilogue can compute all that lies between."""
        stack, seen = [*roots][::-1], set[Term]()
        while stack:
            x = stack.pop()
            if x in seen:
                continue
            seen.add(x)
            if x.operation == "matmul":
                a, w = x.of
                if a.operation == "matmul" and x.ndim == 2 and a.extents[1] <= NARROW:
                    self.narrow[x] = Weight.of(a.of[1]), Weight.of(w)
                else:
                    self.products[x] = Weight.of(w)
            elif x.operation in ("sum", "max"):
                self.reductions.append(x)
            elif not x.of or x.operation in ("flat", "spread"):
                self.others.append(x)
            elif x.operation in MAPS:
                stack.extend(reversed(x.of))
            elif x.operation == "among":
                stack.append(x.of[0])
            elif x.operation == "is_column":
                self.chosen.add(x.of[0])
            else:
                return False
        return True


def known_length(x: Term, arrays: Iterable[Term]) -> tuple[Term, int] | None:
    """(an array, its axis) among these arrays whose axis has this length; None if there is none."""
    for y in arrays:
        for n, axis in enumerate(y.names):
            if axis is not None and axis.root is x.what[0].root:
                return y, n
    return None


def _base(x: Term) -> Term | None:
    """The one array with rows and columns that a term is a map of, besides vectors along the columns and numbers. None if
    there are several, or if the map also has a number for each row."""
    stack, seen, found = [x], set[Term](), set[Term]()
    while stack:
        y = stack.pop()
        if y in seen:
            continue
        seen.add(y)
        of_rows = y.ndim >= 2 and y.names[-2] is not None
        if y.operation in MAPS and (is_tile(y) or not of_rows):
            stack.extend(y.of)
        elif is_tile(y):
            found.add(y)
        elif of_rows or (y.ndim and not along(y)) or (y.of and y.operation not in MAPS and y.operation != "flat"):
            return None
    return found.pop() if len(found) == 1 else None
