"""A product with its prologue and epilogue: what the templates of products have in common.

    y = epilogue(prologue(x) @ w, prologue(x) @ w2, (prologue(x) @ a) @ b, sums of rows of x, ...)

- prologue: maps of x and of vectors along its columns, as x's tile arrives;
- products of one operand with several weights share its loads; each has an accumulator;
- a product with a narrow matrix, which another product follows (LoRA), is computed alongside;
- row sums: sums of each row of maps of x, accumulated in the loop along k; maxima are read from memory;
- epilogue: maps of all these, of vectors, of tiles of the result's shape, and of columns that an index selects for each row
  (term_operations.select_columns);
- softmax partials: in place of the result, statistics of blocks of its columns, for a softmax (term_operations.reduce_parts).

All of them may be of a batch, an axis before rows and columns: a product's matrices are then one for each of it, except those
that lack that axis.

`Product.matches` finds this in a term (product_match.py). few_rows.py, many_rows.py and since_ampere.py are such kernels;
product_text.py has what their texts have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...language.axes import PART, Axis
from ...language.evaluate import values_past_row_end
from ...language.graph import between, extents_at, has_columns, inputs, is_matrix, walk
from ...language.maps import BYTES
from ...language.term_views import view_base
from ...language.terms import INDEX, Term
from ...writing.kernel_text import DTYPES
from .product_match import Extension, Weight, base, known_length, match_products

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_PRODUCTS = 2
BESIDES = "input", "matmul", "sum", "max", "flat", "repeat_columns"  # terms that an epilogue reads from memory


class Product:
    """A kernel that computes a product with its prologue and epilogue: see the module.

    root: the term that it computes, (m, n) or (batch, m, n). x: the array (m, k). operand: prologue(x), the left factor of all
    products. products: {product: its weight}. narrow: {narrow product times its second matrix: (the first weight, the second
    weight)}. row_sums: sums of rows of x. vectors: the vectors along k that the prologue and the row sums read.
    epilogue_inputs: the tiles and vectors that the epilogue reads. numbers: the arguments that are numbers. extension: a
    product with another left factor that is added.

    softmax_partials: the statistics that are stored in place of the root, see `with_softmax_partials`. adjacent: {product: its
    weight}, further results with the same operand, see `with_adjacent`. results: what the epilogue computes, the root and other
    maps of the same products (many_rows.py)."""

    has_launch = True
    keeps_sums = False  # does the kernel keep products in fp32 until they are results?
    scales_groups = False  # can the kernel multiply groups of rows of a weight by their scales?

    def __init__(
        self,
        root: Term,
        x: Term,
        operand: Term,
        products: dict[Term, Weight],
        narrow: dict[Term, tuple[Weight, Weight]],
        row_sums: list[Term],
        epilogue_inputs: list[Term],
        extension: Extension | None = None,
    ):
        self.root, self.x, self.operand = root, x, operand
        self.roots: tuple[Term, ...] = (root,)
        self.results: tuple[Term, ...] = (root,)
        self.softmax_partials: tuple[Term, ...] = ()
        self.adjacent: dict[Term, Weight] = {}
        self.extension = extension
        self.products, self.narrow, self.row_sums = products, narrow, row_sums
        inside = between([operand, *(one.args[0] for one in row_sums)], [x], with_leaves=True)
        self.vectors = [y for y in inside if y.operation in ("input", "flat") and y is not x and y.ndim and has_columns(y)]
        self.epilogue_inputs = [y for y in epilogue_inputs if y.ndim and y.operation in BESIDES]

    @property
    def early_reads(self) -> Sequence[Term]:
        """The arrays that the kernel reads before the previous launch has ended."""
        return ()

    @property
    def weights(self) -> list[Weight]:
        """The weights of all products, narrow and adjacent ones and the extension included."""
        extension_arrays = [self.extension.weight] if self.extension else []
        narrow = [w for pair in self.narrow.values() for w in pair]
        return [*self.products.values(), *self.adjacent.values(), *narrow, *extension_arrays]

    @property
    def leaves(self) -> list[Term]:
        """All arrays and numbers that the kernel reads."""
        indices = (
            [y for x in self.softmax_partials for y in x.args[1:]]
            + [x.args[1] for x in self.selections]
            + [x.args[0] for x in self.column_masks]
        )
        return list(dict.fromkeys([*self.read_arrays, *indices, *self.numbers]))

    @property
    def dtype(self) -> str:
        """The dtype of the operands: that of x; if another kernel computes x, the first 16-bit dtype among the arguments of x
        and of the weights."""
        sources = [*inputs(self.x), *inputs(self.weights[0].array)]
        dtypes = [y.attr[1] for y in sources if y.ndim and y.attr[1] not in (*BYTES, *INDEX)]
        return (
            dtypes[0] if view_base(self.x).operation == "input" else next((one for one in dtypes if one in DTYPES), dtypes[0])
        )

    @property
    def of_16_bits(self) -> bool:
        """Has no tile that is loaded a dtype of one byte?"""
        return not any(
            view_base(x).stored_dtype("") in BYTES for x in (self.x, *self.vectors, *(w.array for w in self.weights))
        )

    @property
    def reads_array_twice(self) -> bool:
        """Is an array read in two ways, as in x + x @ w? A kernel has one parameter for an array, with one TMA box, so it
        cannot do this."""
        return len({*self.read_arrays}) < len(self.read_arrays)

    @property
    def joint_sum(self) -> tuple[Term, Term | None] | None:
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
    def read_arrays(self) -> list[Term]:
        """The matrices and vectors that the kernel reads."""
        extension_arrays = [self.extension.left] if self.extension else []
        weights = [y for w in self.weights for y in w.arrays]
        return [self.x, *self.vectors, *weights, *self.epilogue_inputs, *extension_arrays]

    @property
    def numbers(self) -> list[Term]:
        """The arguments that are numbers."""
        return [y for y in between(self.results, self.read_arrays, True) if y.operation == "input" and not y.ndim]

    @property
    def lengths(self) -> list[Term]:
        """The lengths of axes that the kernel computes with."""
        inside = between([*self.results, *(one.args[0] for one in self.row_sums)], [*self.read_arrays, *self.row_sums])
        return [y for y in inside if y.operation == "length"]

    @property
    def lengths_known(self) -> bool:
        """Can the launching function read these lengths from the arguments?"""
        return all(x.attr[0] is not None and known_length(x, inputs(*self.results)) for x in self.lengths)

    @property
    def selections(self) -> list[Term]:
        """The terms in which each row keeps only some columns (term_operations.select_columns)."""
        return [x for x in between(self.results, self.read_arrays) if x.operation == "select_columns"]

    @property
    def column_masks(self) -> list[Term]:
        """The masks of the column that an index names in each row (term_operations.is_column)."""
        return [x for x in between(self.results, self.read_arrays) if x.operation == "is_column"]

    @property
    def expert_stack(self) -> Term | None:
        """The stack of expert matrices for each of which every row has a weight (term_operations.repeat_columns), if there is
        one."""
        return next((y.args[1] for y in self.epilogue_inputs if y.operation == "repeat_columns"), None)

    @property
    def fused_work(self) -> list[tuple[str, Term]]:
        """What the kernel computes besides the products: where, and the term."""
        work = [("prologue", self.operand)] * (not self.plain)
        work += [("alongside", one) for one in (*self.row_sums, *self.narrow)]
        return work + [("epilogue", one) for one in self.results if one not in self.products]

    @property
    def stored_parts(self) -> list[str]:
        """What is stored in place of the product, in words."""
        return ["maxima and sums of exponentials are stored in place of its tiles"] * bool(self.softmax_partials)

    @property
    def fixed_extents(self) -> dict[Axis, int]:
        """The extents that are in the kernel's text. A batch of 2, and few parts, are enough to see in a proof that they are
        not mixed up."""
        inner, leading = [x.args[0] for x in self.narrow], self.root.axes[:-2]
        of_parts = {axis.root: 2 * PART + 8 for axis in self.root.axes[-1:] if axis and self.softmax_partials}
        for x in self.selections:
            of_parts |= {axis.root: n for axis, n in zip(x.args[2].axes, (3, x.args[2].extents[1])) if axis}
        if self.expert_stack is not None:  # a tile of columns has one weight per row; TMA needs multiples of 8
            of_parts |= {axis.root: n for axis, n in zip(self.expert_stack.axes, (8, PART)) if axis}
        narrow = {x.axes[1].root: x.extents[1] for x in inner if x.axes[1]}
        return narrow | {axis.root: 2 for axis in leading if axis} | of_parts

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
        return sum(x.extents[-1] for x in (self.root, *self.adjacent))

    @property
    def batch(self) -> int | None:
        """How many products there are in the batch; None if there is no batch."""
        return self.root.extents[0] if self.root.ndim == 3 else None

    def sizes(self, known: Mapping[Axis, Any]) -> tuple[Any, Any, Any]:
        """(the number of products in the batch, 1 if there is none; rows; columns), for these extents of axes; other extents
        are those of its terms."""
        extents = extents_at(self.root, known)
        beside = [extents_at(x, known)[-1] for x in self.adjacent]
        return extents[0] if self.root.ndim == 3 else 1, extents[-2], sum(beside, extents[-1])

    @property
    def text_key(self) -> Any:
        """The part of its text that depends on lengths, besides `schedule_at`."""
        return ()

    @property
    def bytes(self) -> float:
        """Bytes read from memory and written to it, each once."""
        return float(sum(x.nbytes for x in (*self.leaves, *self.roots)))

    @property
    def operations(self) -> float:
        """The number of operations of the tensor cores."""
        sizes = [math.prod(x.extents) * self.inner for x in (*self.products, *self.adjacent)]
        sizes += [math.prod(x.extents) * x.args[0].extents[1] + math.prod(x.args[0].extents) * self.inner for x in self.narrow]
        return 2.0 * sum(sizes)

    @property
    def maps(self) -> float:
        """The number of operations on elements, outside the tensor cores."""
        return float(
            math.prod(self.x.extents) * (not self.plain + len(self.row_sums)) + len(self.results) * math.prod(self.root.extents)
        )

    def with_softmax_partials(self, roots: tuple[Term, ...]) -> Self | None:
        """The kernel that stores, in place of its result, statistics of blocks of columns for a softmax. None if the roots are
        no such statistics, or if there is more than one product."""
        needed = {x.operation for x in roots} >= {"max_of_parts", "sum_of_parts"}
        if not needed or len(self.products) != 1 or len({x.args[0] for x in roots}) != 1 or self.root.ndim != 2:
            return None
        self.roots = self.softmax_partials = roots
        return self

    def with_adjacent(self, roots: tuple[Term, ...]) -> Self | None:
        """The kernel that computes these products, all with one operand; their columns lie side by side in its tiles. None if
        they differ in more than their weights."""
        shares_operand = all(x.operation == "matmul" and x.ndim == 2 and x.args[0] is self.operand for x in roots)
        if not shares_operand or list(self.products) != [self.root] or self.root is not roots[0] or self.extension:
            return None
        weights = {x: Weight.from_term(x.args[1]) for x in roots[1:]}
        layouts = {(w.transposed, view_base(w.array).stored_dtype("")) for w in (self.products[self.root], *weights.values())}
        scaled = any(w.scales is not None for w in (self.products[self.root], *weights.values()))
        if scaled or len(layouts) > 1 or not all(is_matrix(w.array) for w in weights.values()):
            return None
        self.roots, self.adjacent = roots, weights
        return self

    @classmethod
    def matches(cls, root: Term) -> Iterator[Self]:
        """The kernels that compute a term: with the prologue inside the kernel, and with the prologue's result read from
        memory."""
        match = match_products(root, scales_groups=cls.scales_groups)
        if match is None:
            return
        for matched in (match, match.without_narrow) if match.narrow else (match,):
            for operand in dict.fromkeys(x.args[0] for x in matched.products):
                part = matched.for_operand(operand)
                if len(part.products) > MOST_PRODUCTS:
                    continue
                for x in dict.fromkeys([base(operand), operand]):
                    if x is None or not all(is_matrix(w.array) for w in part.weights):
                        continue
                    ends = [x, *(y for y in walk(root) if y.operation in ("input", "flat"))]
                    if not np.isfinite(values_past_row_end(operand, ends)).all():  # infinity times weights of 0 would be NaN
                        continue
                    fused_work = [one for one in part.reductions if one.operation == "sum" and base(one.args[0]) is x]
                    row_sums = [one for one in fused_work if not values_past_row_end(one.args[0], ends).any()]
                    epilogue_inputs = [*part.epilogue_inputs, *(one for one in part.reductions if one not in row_sums)]
                    kernel = cls(root, x, operand, part.products, part.narrow, row_sums, epilogue_inputs)
                    if kernel.lengths_known:
                        yield kernel
