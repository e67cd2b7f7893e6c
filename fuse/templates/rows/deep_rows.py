"""A row map of arrays with more axes: their leading axes are rows, as in a matrix of all rows.

    row by row, of (batch, head, sequence, columns):   y = x * rsqrt(mean(x * x)) * g

The arrays are viewed as matrices. All tiles must have all leading axes; the kernel is a row map's (row_map.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...language import term_views
from ...language.axes import Axis
from ...language.graph import between, rebuild
from ...language.maps import MAPS
from ...language.names import unused
from ...language.term_views import view_base
from ...language.terms import Term
from ...writing.kernel_text import KernelText
from .row_map import KNOWN, RowMap


class DeepRows:
    """A kernel that computes terms of three axes or more as a row map of matrices.

    roots: the terms. inner: the row map. words: {term: the same term of matrices}."""

    label, operations, most_rows, has_launch, overlaps_previous = "rows", 0.0, 2**31 - 1, True, True

    def __init__(self, roots: Sequence[Term], inner: RowMap, words: Mapping[Term, Term]):
        self.roots, self.inner, self.words = tuple(roots), inner, words

    @classmethod
    def matches(cls, roots: Sequence[Term], leaves: Sequence[Term], clusters: bool = False) -> DeepRows | None:
        """The kernel that computes these terms from these leaves; None if they are no such terms. clusters: does the card have
        thread block clusters?"""
        lead = [name and name.root for name in roots[0].axes[:-1]]
        if len(lead) < 2:
            return None

        def deep(x: Term) -> bool:
            return [name and name.root for name in x.axes[:-1]] == lead

        if any(x.operation not in MAPS and x.operation not in KNOWN for x in between(roots, leaves)):
            return None
        if not all(map(deep, roots)) or not all((deep(x) and view_base(x) is x) or x.ndim < 2 for x in leaves):
            return None
        words = {x: term_views.rows(x) if x.ndim > 1 else x for x in leaves}
        for x in between(roots, leaves):
            words[x] = rebuild(x, [words[y] for y in x.args])
        inner = RowMap.matches([words[x] for x in roots], [words[x] for x in leaves], clusters)
        return cls(roots, inner, words) if inner else None

    @property
    def leaves(self) -> list[Term]:
        """The arrays that it reads."""
        return list(self.inner.leaves)

    @property
    def text_key(self) -> Any:
        return self.inner.text_key

    @property
    def early_reads(self) -> list[Term]:
        return self.inner.early_reads

    @property
    def fixed_extents(self) -> dict[Axis, int]:
        """The extents of a proof's run. Extents of 2 or 3 of the leading axes are enough to see that they are not mixed up."""
        lead = {axis.root: 2 + n for n, axis in enumerate(self.roots[0].axes[:-2]) if axis is not None}
        return lead | self.inner.fixed_extents

    @property
    def bytes(self) -> float:
        """The number of bytes that the kernel reads from memory and writes to it."""
        return self.inner.bytes

    @property
    def maps(self) -> float:
        """The number of operations on elements, outside the tensor cores."""
        return self.inner.maps

    def __str__(self):
        return f"rows of {', '.join(map(str, self.roots))}"

    def describe(self) -> str:
        """A description of the kernel, for `explain`."""
        return f"{self.inner.describe()}; leading axes are rows"

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        parameters, local_names = (
            dict(parameters),
            {self.words[x]: name_of for x, name_of in local_names.items() if x in self.words},
        )
        views = []
        for x, matrix in zip(self.roots, self.inner.roots):
            y = parameters[x]
            parameters[matrix] = unused(f"{y}_rows", parameters.values())
            views.append(f"{parameters[matrix]} = {y}.reshape(-1, {y}.shape[{x.ndim - 1}])")
        text = self.inner.text(name, parameters, local_names)
        text.before = [*views, *text.before]
        return text
