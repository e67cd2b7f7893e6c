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

`Product.matches` finds this in a term (found.py). few_rows.py, many_rows.py and since_ampere.py are such kernels; what their
texts have in common is in product_text.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..axes import PART, Axis
from ..classes import extents_at
from ..evaluate import beyond
from ..functions import FP8
from ..graph import along, between, inputs, is_tile, walk
from ..module import DTYPES
from ..terms import INDEX, Term, viewed
from .found import Extension, Weight, base, known_length, match_products

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_PRODUCTS = 2
BESIDES = "input", "matmul", "sum", "max", "flat", "spread"  # what an epilogue reads


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

    has_launch = True

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
        inside = between([operand, *(one.args[0] for one in sides)], [x], with_leaves=True)
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
        indices = [y for x in self.folds for y in x.args[1:]] + [x.args[1] for x in self.kept] + [x.args[0] for x in self.masks]
        return list(dict.fromkeys([*self.read, *indices, *self.numbers]))

    @property
    def dtype(self) -> str:
        """The dtype of the operands: that of x; if another kernel makes x, the first dtype of 16 bits among those that x and
        the weights are made from."""
        made_of = [*inputs(self.x), *inputs(self.weights[0].array)]
        found = [y.attr[1] for y in made_of if y.ndim and y.attr[1] not in (FP8, *INDEX)]
        return found[0] if viewed(self.x).operation == "input" else next((one for one in found if one in DTYPES), found[0])

    @property
    def of_16_bits(self) -> bool:
        """Is nothing fp8 of all that is loaded in tiles?"""
        return not any(viewed(x).stored_dtype("") == FP8 for x in (self.x, *self.vectors, *(w.array for w in self.weights)))

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
            if x.operation == "add" and any(y in self.products for y in x.args):
                other = next(y for y in x.args if y not in self.products)
                if other is narrow:
                    return x, None
                if other.operation == "mul" and narrow in other.args:
                    scale = other.args[1 - other.args.index(narrow)]
                    if not scale.axes:
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
        inside = between([*self.results, *(one.args[0] for one in self.sides)], [*self.read, *self.sides])
        return [y for y in inside if y.operation == "length"]

    @property
    def measured(self) -> bool:
        """Can the launching function read these lengths from the arguments?"""
        return all(x.attr[0] is not None and known_length(x, inputs(*self.results)) for x in self.lengths)

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
        return next((y.args[1] for y in self.others if y.operation == "spread"), None)

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
        inner, lead = [x.args[0] for x in self.narrow], self.root.axes[:-2]
        of_parts = {axis.root: 2 * PART + 8 for axis in self.root.axes[-1:] if axis and self.folds}
        for x in self.kept:
            of_parts |= {axis.root: n for axis, n in zip(x.args[2].axes, (3, x.args[2].extents[1])) if axis}
        if self.each is not None:  # tiles of columns have one number a row; TMA steps by eight
            of_parts |= {axis.root: n for axis, n in zip(self.each.axes, (8, PART)) if axis}
        narrow = {x.axes[1].root: x.extents[1] for x in inner if x.axes[1]}
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

    def sizes(self, known: Mapping[Axis, Any]) -> tuple[Any, Any, Any]:
        """(how many products there are in the batch, 1 if there is none; rows; columns), for these lengths of axes; the extents
        of others are those of its terms."""
        extents = extents_at(self.root, known)
        beside = [extents_at(x, known)[-1] for x in self.beside]
        return extents[0] if self.root.ndim == 3 else 1, extents[-2], sum(beside, extents[-1])

    @property
    def cut(self) -> Any:
        """What of its text follows from lengths, besides `schedule_at`."""
        return ()

    @property
    def bytes(self) -> float:
        """Bytes read from memory and written to it, each once."""
        return float(sum(x.nbytes for x in (*self.leaves, *self.roots)))

    @property
    def operations(self) -> float:
        """Operations of the tensor cores."""
        sizes = [math.prod(x.extents) * self.inner for x in (*self.products, *self.beside)]
        sizes += [math.prod(x.extents) * x.args[0].extents[1] + math.prod(x.args[0].extents) * self.inner for x in self.narrow]
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
        if not needed or len(self.products) != 1 or len({x.args[0] for x in roots}) != 1 or self.root.ndim != 2:
            return None
        self.roots = self.folds = roots
        return self

    def sharing(self, roots: tuple[Term, ...]) -> Self | None:
        """The kernel that computes these products, all with one operand; their columns lie side by side in its tiles. None if
        they differ in more than their weights."""
        alike = all(x.operation == "matmul" and x.ndim == 2 and x.args[0] is self.operand for x in roots)
        if not alike or list(self.products) != [self.root] or self.root is not roots[0] or self.extension:
            return None
        weights = {x: Weight.of(x.args[1]) for x in roots[1:]}
        held = {(w.transposed, viewed(w.array).stored_dtype("")) for w in (self.products[self.root], *weights.values())}
        if len(held) > 1 or not all(is_tile(w.array) for w in weights.values()):
            return None
        self.roots, self.beside = roots, weights
        return self

    @classmethod
    def matches(cls, root: Term) -> Iterator[Self]:
        """The kernels that compute a term: with the prologue inside the kernel, and with the prologue's result read from
        memory."""
        whole = match_products(root)
        if whole is None:
            return
        for found in (whole, whole.apart) if whole.narrow else (whole,):
            for operand in dict.fromkeys(x.args[0] for x in found.products):
                part = found.of(operand)
                if len(part.products) > MOST_PRODUCTS:
                    continue
                for x in dict.fromkeys([base(operand), operand]):
                    if x is None or not all(is_tile(w.array) for w in part.weights):
                        continue
                    ends = [x, *(y for y in walk(root) if y.operation in ("input", "flat"))]
                    if not np.isfinite(beyond(operand, ends)).all():  # times weights of 0 it would be NaN
                        continue
                    riding = [one for one in part.reductions if one.operation == "sum" and base(one.args[0]) is x]
                    sides = [one for one in riding if not beyond(one.args[0], ends).any()]
                    others = [*part.others, *(one for one in part.reductions if one not in sides)]
                    made = cls(root, x, operand, part.products, part.narrow, sides, others)
                    if made.measured:
                        yield made
