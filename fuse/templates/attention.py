"""The template of attention, which calls attention.forward or attention.decode.

    y = softmax(norm(q) @ transpose(norm(k)) * scale) @ v

Arrays have equal leading axes, a batch and heads, one of them or none; the keys may have one head for all. With five axes,
(batch, groups, heads of a group, row, column), keys have 1 in place of a group's heads, which share them (GQA). norm, of
queries or keys or neither, is x * rsqrt(mean(x * x) + eps) * g; scores may be causal. The text is a call, with no kernel of its
own. Few queries on keys that are to be normalised call decode: it reads keys once for all queries and for the heads that share
them, splits them over all multiprocessors, and normalises them in the kernel, where forward would write them first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..algebra.rules import factors, product
from ..language.axes import Axis
from ..language.expression_text import ExpressionWriter
from ..language.graph import has_columns, softmax_of
from ..language.names import unused
from ..language.terms import Term
from ..writing.kernel_text import DTYPES, KernelText
from ..writing.lines import WIDTH, format_assignments

if TYPE_CHECKING:
    from typing_extensions import Self

AXES = 4  # batch, head, row, column; one more where heads come in groups
MOST_COLUMNS, COLUMNS = 256, 8  # the largest head_dim, and what it must be a multiple of
FEW, WIDE = (32, 16), 128  # rows (queries times heads of a group) in a tile of decode: up to a head_dim of WIDE, beyond it
ON_THE_HOST = "input", "number", "add", "sub", "mul", "div", "neg"  # operations that the host can do on numbers


class AttentionOperand(NamedTuple):
    """The queries or the keys. array: as they lie in memory. numbers: their factors and divisors that are numbers, ("mul" or
    "div", term). weights, eps: of their norm, None if they are not normalised."""

    array: Term
    numbers: list[tuple[str, Term]]
    weights: Term | None = None
    eps: Term | None = None

    @property
    def normalised(self) -> bool:
        """Does a norm apply to them?"""
        return self.weights is not None


class AttentionCall:
    """A call of attention.forward or attention.decode that computes a term: see the module."""

    label, most_rows, has_launch, overlaps_previous = "attend", 2**31 - 1, False, False

    def __init__(
        self, root: Term, q: AttentionOperand, k: AttentionOperand, v: Term, scale: Term | None, eps: Term | None, causal: bool
    ):
        self.roots: tuple[Term, ...] = (root,)
        self.q, self.k, self.v = q, k, v
        self.heads = root.args[0] if root.operation == "merge_heads" else root
        self.scale, self.eps, self.causal = scale, eps, causal

    @classmethod
    def kernels_for(cls, root: Term) -> Iterator[Self]:
        """The call that computes a term, if it is attention; its heads may be merged, (rows, the columns of all heads)."""
        outer, root = root, root.args[0] if root.operation == "merge_heads" else root
        scores = softmax_of(root.args[0]) if root.operation == "matmul" else None
        if scores is None:
            return
        causal = scores.operation == "causal"
        parts = factors(scores.args[0] if causal else scores)
        products = [x for operation, x in parts if x.operation == "matmul" and operation == "mul"]
        numbers = [(operation, x) for operation, x in parts if x not in products]
        if len(products) != 1 or products[0].args[1].operation != "transpose":
            return
        q, k, v = side(products[0].args[0]), side(products[0].args[1].args[0]), root.args[1]
        scale = product([*numbers, *q.numbers, *k.numbers])
        eps = q.eps if k.eps is None else k.eps
        if not all(x is None or on_the_host(x) for _, x in [*numbers, *q.numbers, *k.numbers, ("", eps)]):
            return
        negative = scale is not None and scale.operation == "number" and scale.attr <= 0
        if not negative and q.eps in (None, eps) and fits(root, q.array, k.array, v):
            yield cls(outer, q, k, v, scale, eps, causal)

    @property
    def leaves(self) -> list[Term]:
        """The arrays and numbers that it reads."""
        numbers = [y for x in (self.scale, self.eps) if x is not None for y in _numbers(x)]
        arrays = [self.q.array, self.k.array, self.v, self.q.weights, self.k.weights]
        return list(dict.fromkeys([*(x for x in arrays if x is not None), *numbers]))

    @property
    def root(self) -> Term:
        """The term that it computes."""
        return self.roots[0]

    @property
    def fixed_extents(self) -> dict[Axis, int]:
        """The extents of a proof's run. Two heads are enough to see that heads are not mixed up."""
        q, v = self.q.array.axes, self.v.axes
        axes = [*((axis, 2) for axis in q[:-2]), (q[-1], 3 * COLUMNS), (v[-1], 5 * COLUMNS)]
        return {axis.root: n for axis, n in axes if axis is not None}

    @property
    def text_key(self) -> Any:
        """The part of its text that depends on lengths."""
        return self.uses_decode

    @property
    def uses_decode(self) -> bool:
        """Are there so few queries that decode serves, which reads and normalises the keys once?"""
        *heads, _, _ = self.k.array.extents
        rows, wide = math.prod(self.q.array.extents[:-1]), max(x.extents[-1] for x in (self.q.array, self.v)) > WIDE
        return self.k.normalised and rows <= FEW[wide] * math.prod(heads)

    @property
    def bytes(self) -> float:
        """The number of bytes that the kernel reads from memory and writes to it."""
        return float(sum(x.nbytes for x in (*self.leaves, self.root)))

    @property
    def scores(self) -> float:
        """The number of scores that are computed."""
        return math.prod(self.q.array.extents[:-1]) * self.k.array.extents[-2] / (2 if self.causal else 1)

    @property
    def operations(self) -> float:
        """The number of operations of the tensor cores."""
        return 2 * self.scores * (self.q.array.extents[-1] + self.v.extents[-1])

    @property
    def maps(self) -> float:
        """The number of operations on elements, outside the tensor cores."""
        return 4 * self.scores

    def __str__(self):
        return f"attention of {self.root}"

    def describe(self) -> str:
        """A description of the kernel, for `explain`."""
        norms = [
            f"{name} are normalised in the kernel" for name, one in (("queries", self.q), ("keys", self.k)) if one.normalised
        ]
        name = "decode" if self.uses_decode else "forward"
        return ", ".join([f"attention.{name}, whose scores stay in registers", *["scores are causal"] * self.causal, *norms])

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        writer = ExpressionWriter({x: parameters[x] for x in self.leaves}, local_names)
        arrays, views = (self.q.array, self.k.array, self.v, self.root), list[str]()
        expressions = [_with_heads(x, parameters) for x in arrays]
        *operands, out = expressions
        if self.root is not self.heads:
            y = parameters[self.root]
            out = unused(f"{y}_heads", parameters.values())
            leading = ", ".join(["1"] * (AXES - self.heads.ndim) + [f"{y}.shape[{n}]" for n in range(self.root.ndim - 1)])
            views = [f"{out} = {y}.reshape({leading}, {self.root.attr}, -1).swapaxes(1, 2)"]
        elif self.root.ndim > AXES:
            names = dict.fromkeys(parameters[x] for x in arrays)
            heads = {one: unused(f"{one}_heads", parameters.values()) for one in names}
            *operands, out = [heads[parameters[x]] for x in arrays]
            views = [f"{', '.join(heads.values())} = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in ({', '.join(names)}))"]
        options = ["lengths=None", f"causal={self.causal}"] if self.uses_decode else ["causal=True"] * self.causal
        numbers = {"q_norm": self.q.weights, "k_norm": self.k.weights, "norm_eps": self.eps, "scale": self.scale}
        options += [f"{key}={writer.expression(x)}" for key, x in numbers.items() if x is not None]
        options += ["scale=1.0"] * (self.scale is None) + ['layout="bhsd"']
        call = f"attention.{'decode' if self.uses_decode else 'forward'}({{}})".format
        local_names_of = dict(zip(expressions, ("queries", "keys", "values", f"{parameters[self.root]}_heads")))
        named = {one: one for one in (*operands, out)}
        for one in sorted([x for x in named if "(" in x], key=len, reverse=True):
            if len(call(", ".join([*(named[x] for x in operands), *options, f"out={named[out]}"]))) > WIDTH - 4:
                named[one] = unused(local_names_of[one], parameters.values())
        views += format_assignments((name, one) for one, name in named.items() if name != one)
        return KernelText(before=[*views, call(", ".join([*(named[x] for x in operands), *options, f"out={named[out]}"]))])


def side(x: Term) -> AttentionOperand:
    """The AttentionOperand that a term is: an array or its norm, times numbers."""
    parts = factors(x)
    numbers = [one for one in parts if not one[1].axes]
    arrays = [one for operation, one in parts if operation == "mul" and one.ndim > 1 and has_columns(one)]
    if len(arrays) != 1:
        return AttentionOperand(x, [])
    rest = [one for one in parts if one[1].axes and one[1] is not arrays[0]]
    if not rest:
        return AttentionOperand(arrays[0], numbers)
    weights = [one for operation, one in rest if operation == "mul" and one.ndim == 1 and one.operation == "input"]
    scales = [one for one in rest if one[1] not in weights]
    eps = _eps_of(arrays[0], *scales[0]) if len(weights) == len(scales) == 1 else None
    return AttentionOperand(x, []) if eps is None else AttentionOperand(arrays[0], numbers, weights[0], eps)


def _eps_of(x: Term, kind: str, scale: Term) -> Term | None:
    """The number eps, if `scale` is 1 / sqrt(mean(x * x) + eps); otherwise None."""
    if (kind, scale.operation) not in (("mul", "rsqrt"), ("div", "sqrt")) or scale.args[0].operation != "add":
        return None
    for mean, eps in (scale.args[0].args, scale.args[0].args[::-1]):
        if mean.operation == "div" and mean.args[0].operation == "sum" and mean.args[1].operation == "length":
            squares, count = mean.args[0].args[0], mean.args[1]
            counts_columns = count.attr[1] == x.extents[-1]
            if counts_columns and squares.operation == "mul" and squares.args == (x, x) and not eps.axes:
                return eps
    return None


def on_the_host(x: Term) -> bool:
    """Is the term a number that Python can compute before the launch?"""
    return not x.axes and x.operation in ON_THE_HOST and all(map(on_the_host, x.args))


def _numbers(x: Term) -> list[Term]:
    """The arguments that a number is computed from."""
    return [x] if x.operation == "input" else [argument for y in x.args for argument in _numbers(y)]


def fits(root: Term, q: Term, k: Term, v: Term) -> bool:
    """Do attention.forward and attention.decode take arrays of these shapes and dtypes?"""
    if not root.ndim == q.ndim == k.ndim == v.ndim <= AXES + 1 or k.extents[:-2] != v.extents[:-2]:
        return False
    columns = all(x.extents[-1] % COLUMNS == 0 and x.extents[-1] <= MOST_COLUMNS for x in (q, v))
    *batch, heads = (1, *q.extents[:-2])
    *batch_of_keys, heads_of_keys = (1, *k.extents[:-2])
    dtypes = {x.attr[1] for x in (q, k, v) if x.operation == "input"}
    fitting = heads_of_keys == 1 or (heads_of_keys == heads and root.ndim <= AXES)
    return columns and batch == batch_of_keys and fitting and len(dtypes) <= 1 and dtypes <= {*DTYPES}


def _with_heads(x: Term, parameters: Mapping[Term, str]) -> str:
    """The expression of an array with the axes for batch and heads that it lacks."""
    if x.operation == "heads":
        base, heads = (parameters[y] for y in x.args)
        return f"{base}.reshape(1, {base}.shape[0], {heads}.shape[0], -1).swapaxes(1, 2)"
    name = parameters[x]
    return name if x.ndim >= AXES else f"{name}.reshape({'1, ' * (AXES - x.ndim)}*{name}.shape)"
