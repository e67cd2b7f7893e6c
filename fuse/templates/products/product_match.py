"""Pattern matching of products: a walk down from a term finds its products, their weights, and the other inputs of the
epilogue.

Product.matches (product.py) makes kernels of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...algebra.rules import NARROW
from ...language.axes import PART
from ...language.graph import between, group_scaled, has_columns, is_matrix
from ...language.maps import CASTS, MAPS
from ...language.terms import Term


class Weight(NamedTuple):
    """A weight as it lies in memory: (k, n), or (n, k) if it is `transposed`. scales: an array (k / group, n), by whose rows
    `group` rows of the weight are multiplied each, if there is one."""

    array: Term
    transposed: bool
    scales: Term | None = None
    group: int = 0

    @classmethod
    def from_term(cls, x: Term, scales_groups: bool = False) -> Weight:
        """The Weight of a product's right factor. scales_groups: may it have scales of groups?"""
        scaled = group_scaled(x) if scales_groups else None
        if scaled and scaled.axis == -2 and scaled.scales.operation == "input":
            return cls.from_term(scaled.matrix)._replace(scales=scaled.scales, group=scaled.group)
        return cls(x.args[0], True) if x.operation == "transpose" else cls(x, False)

    @property
    def arrays(self) -> list[Term]:
        """What a kernel reads of it."""
        return [self.array] if self.scales is None else [self.array, self.scales]


class Extension(NamedTuple):
    """A product with another left factor that is computed in further steps along k: x @ w + t @ b = [x, t] @ [w; b]. joint: the
    sum of both products. left, weight: the factors of the added one."""

    joint: Term
    left: Term
    weight: Weight

    @property
    def narrow(self) -> bool:
        """Is it a single step along k?"""
        return self.left.extents[1] <= NARROW


def find_extension(root: Term, product: Term, weight: Weight, rest: Mapping[Term, Weight]) -> Extension | None:
    """The extension by which another product is added to this one, if there is such a product and its weight has the same
    layout as this one's. rest: {product: its weight}, those that may be added."""
    for other, terms_of_other in rest.items():
        for x in between([root], [product, other]):
            if (
                x.operation == "add"
                and product in x.args
                and other in x.args
                and terms_of_other.transposed == weight.transposed
            ):
                return Extension(x, other.args[0], terms_of_other)
    return None


def match_products(*roots: Term, scales_groups: bool = False) -> ProductMatch | None:
    """The products below these terms, and what else their epilogue reads; None if there is no product, or something that an
    epilogue cannot compute. scales_groups: can the kernel multiply weights by scales of groups?"""
    match = ProductMatch(scales_groups)
    if any(root.operation in CASTS for root in roots):  # the kernels' results have the operands' dtype
        return None
    if not all(map(is_matrix, roots)) or not match.epilogue(roots) or not (match.products or match.narrow):
        return None
    if len(match.chosen) > 1:
        return None
    stacks = {y.args[1] for y in match.epilogue_inputs if y.operation == "repeat_columns"}
    return match if len(stacks) < 2 and all(x.extents[1] % PART == 0 for x in stacks) else None


class ProductMatch:
    """The match of a term: products with their weights, narrow products, reductions, and other terms that the epilogue
    reads."""

    def __init__(self, scales_groups: bool = False) -> None:
        self.scales_groups = scales_groups
        self.products: dict[Term, Weight] = {}
        self.narrow: dict[Term, tuple[Weight, Weight]] = {}
        self.reductions: list[Term] = []
        self.epilogue_inputs: list[Term] = []
        self.chosen: set[Term] = set()  # the indices that choose a column for each row

    @property
    def weights(self) -> list[Weight]:
        """The weights of all products."""
        return [*self.products.values(), *(w for pair in self.narrow.values() for w in pair)]

    @property
    def without_narrow(self) -> ProductMatch:
        """This match with narrow products read from memory and multiplied like any other matrix."""
        other = ProductMatch()
        other.products = self.products | {x: second for x, (_, second) in self.narrow.items()}
        other.reductions, other.epilogue_inputs = self.reductions, self.epilogue_inputs
        return other

    def for_operand(self, operand: Term) -> ProductMatch:
        """This match with the products of one operand only; the others are read from memory."""
        part = ProductMatch()
        part.products = {x: w for x, w in self.products.items() if x.args[0] is operand}
        part.narrow = {x: pair for x, pair in self.narrow.items() if x.args[0].args[0] is operand}
        part.reductions, part.epilogue_inputs = self.reductions, [*self.epilogue_inputs]
        part.epilogue_inputs += [x for x in (*self.products, *self.narrow) if x not in part.products and x not in part.narrow]
        return part

    def epilogue(self, roots: Sequence[Term]) -> bool:
        """Walk down from the roots to the products. Returns whether an epilogue can compute all terms on the way."""
        stack, visited = [*roots][::-1], set[Term]()
        while stack:
            x = stack.pop()
            if x in visited:
                continue
            visited.add(x)
            if x.operation == "matmul":
                a, w = x.args
                if a.operation == "matmul" and x.ndim == 2 and a.extents[1] <= NARROW:
                    self.narrow[x] = Weight.from_term(a.args[1]), Weight.from_term(w)
                else:
                    self.products[x] = Weight.from_term(w, self.scales_groups)
            elif x.operation in ("sum", "max"):
                self.reductions.append(x)
            elif not x.args or x.operation in ("flat", "repeat_columns"):
                self.epilogue_inputs.append(x)
            elif x.operation in MAPS:
                stack.extend(reversed(x.args))
            elif x.operation == "select_columns":
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
    """The one matrix that a term is a map of, besides vectors along the columns and numbers. None if there are several, or if
    the map also reads a number for each row."""
    stack, visited, bases = [x], set[Term](), set[Term]()
    while stack:
        y = stack.pop()
        if y in visited:
            continue
        visited.add(y)
        of_rows = y.ndim >= 2 and y.axes[-2] is not None
        if y.operation in MAPS and (is_matrix(y) or not of_rows):
            stack.extend(y.args)
        elif is_matrix(y):
            bases.add(y)
        elif of_rows or (y.ndim and not has_columns(y)) or (y.args and y.operation not in MAPS and y.operation != "flat"):
            return None
    return bases.pop() if len(bases) == 1 else None
