"""What stands around a product in a term: a walk down from the term finds the products, their weights, and what else is read.

Product.matches (product.py) makes kernels of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..axes import PART
from ..functions import CASTS, MAPS
from ..graph import along, between, is_tile
from ..rules import NARROW
from ..terms import Term


class Weight(NamedTuple):
    """A weight as it lies in memory: (k, n), or if it is `turned` (n, k)."""

    array: Term
    transposed: bool

    @classmethod
    def of(cls, x: Term) -> Weight:
        return cls(x.args[0], True) if x.operation == "transpose" else cls(x, False)


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


def find_extension(root: Term, product: Term, weight: Weight, rest: Mapping[Term, Weight]) -> Extension | None:
    """The extension by which another product is added to this one, if there is such a product and its weights lie in memory as
    this one's do. rest: {product: its weight}, those that may be added."""
    for other, its in rest.items():
        for x in between([root], [product, other]):
            if x.operation == "add" and product in x.args and other in x.args and its.transposed == weight.transposed:
                return Extension(x, other.args[0], its)
    return None


def match_products(*roots: Term) -> ProductMatch | None:
    """What a walk down from these terms finds; None if there is no product, or something that an epilogue cannot compute."""
    found = ProductMatch()
    if any(root.operation in CASTS for root in roots):  # results have the operands' dtype
        return None
    if not all(map(is_tile, roots)) or not found.epilogue(roots) or not (found.products or found.narrow):
        return None
    if len(found.chosen) > 1:
        return None
    stacks = {y.args[1] for y in found.others if y.operation == "spread"}
    return found if len(stacks) < 2 and all(x.extents[1] % PART == 0 for x in stacks) else None


class ProductMatch:
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
    def apart(self) -> ProductMatch:
        """The same, with narrow products read from memory and multiplied like any other matrix."""
        other = ProductMatch()
        other.products = self.products | {x: second for x, (_, second) in self.narrow.items()}
        other.reductions, other.others = self.reductions, self.others
        return other

    def of(self, operand: Term) -> ProductMatch:
        """The same with the products of this operand only; the others are read from memory."""
        part = ProductMatch()
        part.products = {x: w for x, w in self.products.items() if x.args[0] is operand}
        part.narrow = {x: pair for x, pair in self.narrow.items() if x.args[0].args[0] is operand}
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
                a, w = x.args
                if a.operation == "matmul" and x.ndim == 2 and a.extents[1] <= NARROW:
                    self.narrow[x] = Weight.of(a.args[1]), Weight.of(w)
                else:
                    self.products[x] = Weight.of(w)
            elif x.operation in ("sum", "max"):
                self.reductions.append(x)
            elif not x.args or x.operation in ("flat", "spread"):
                self.others.append(x)
            elif x.operation in MAPS:
                stack.extend(reversed(x.args))
            elif x.operation == "among":
                stack.append(x.args[0])
            elif x.operation == "is_column":
                self.chosen.add(x.args[0])
            else:
                return False
        return True


def known_length(x: Term, arrays: Iterable[Term]) -> tuple[Term, int] | None:
    """(an array, its axis) among these arrays whose axis has this length; None if there is none."""
    for y in arrays:
        for n, axis in enumerate(y.axes):
            if axis is not None and axis.root is x.attr[0].root:
                return y, n
    return None


def base(x: Term) -> Term | None:
    """The one array with rows and columns that a term is a map of, besides vectors along the columns and numbers. None if
    there are several, or if the map also has a number for each row."""
    stack, seen, found = [x], set[Term](), set[Term]()
    while stack:
        y = stack.pop()
        if y in seen:
            continue
        seen.add(y)
        of_rows = y.ndim >= 2 and y.axes[-2] is not None
        if y.operation in MAPS and (is_tile(y) or not of_rows):
            stack.extend(y.args)
        elif is_tile(y):
            found.add(y)
        elif of_rows or (y.ndim and not along(y)) or (y.args and y.operation not in MAPS and y.operation != "flat"):
            return None
    return found.pop() if len(found) == 1 else None
