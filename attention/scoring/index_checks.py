"""Bounds checks of the array reads in mask and score functions. In kernels a read out of range gives 0, or other memory.

Shapes alone are checked for every call: `docs[i]`, with docs shorter than the queries. Indices that depend on the contents of
arrays, `learned[h, buckets[j - i + S]]`, are checked where contents are (tiles/launching/checks.py): for all keys that a query
sees, those of a score function only where the mask function is true."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.checks import check_options, read

from ..options import ScoreOptions
from ..parts.block_masks import FIELDS
from .python_functions import reads_argument
from .symbolic import subterms, trace_function

MAX_SCORES = 2**20  # scores for which a function is called at once
LENGTH_ARGUMENTS = (
    "cu_seqlens",
    "cu_seqlens_k",
    "cu_seqlens_new",
    "lengths",
    "lengths_k",
    "leftpad",
)  # that say which keys there are


class IndexingFunctions(NamedTuple):
    """A mask and a score function that read aux, and a call's options, of which causal and the window decide which keys a query
    sees. most_keys: of a sequence."""

    mask: Callable | None
    score: Callable | None
    aux: Sequence[Operand]
    options: ScoreOptions
    most_keys: int


def plan_index_checks(problem: Problem, functions_of_aux: IndexingFunctions, listed: bool = False) -> list[Step]:
    """[the step that checks indices], if contents are checked in this call; otherwise []. listed: does the call pass lists of
    key blocks, so that the seen keys are unknown here? ValueError: an array is too short for the call's queries, keys, batches
    or heads."""
    if not functions_of_aux.aux:
        return []
    (queries, batch, heads), blocks = problem("seqlen_q", "sequences", "heads"), listed or FIELDS[0] in problem
    if queries > 0 and batch > 0 and heads > 0 and functions_of_aux.most_keys > 0:
        batch_sizes = {"b": batch, "h": heads}
        sizes = batch_sizes | ({} if blocks or "cu_seqlens" in problem else {"i": queries})
        sizes |= {} if blocks or any([name in problem for name in LENGTH_ARGUMENTS]) else {"j": functions_of_aux.most_keys}
        _check_forms(functions_of_aux, functions_of_aux.mask, sizes, is_score=False)
        _check_forms(functions_of_aux, functions_of_aux.score, batch_sizes if functions_of_aux.mask else sizes, is_score=True)
    return [IndexCheck(problem, functions_of_aux)] if not blocks and (problem.device is None or check_options().values) else []


def _check_forms(
    functions_of_aux: IndexingFunctions, function: Callable | None, extents: dict[str, int], is_score: bool
) -> None:
    """ValueError: an axis is indexed by b, h, i or j itself, and is shorter than their number."""
    if function is None:
        return
    try:
        traced = trace_function(function, [len(x.form.shape) for x in functions_of_aux.aux], is_score)
    except TypeError:  # it cannot be traced
        return
    for element in [x for x in subterms(traced.term) if x.op == "element"]:
        array, *index = element.args
        shape = functions_of_aux.aux[int(array.op.removeprefix("aux"))].form.shape
        for axis, place in enumerate(index):
            position = getattr(place, "op", None)
            if position in extents and shape[axis] < extents[position]:
                name, option = array.op, "score" if is_score else "mask"
                must = f"must have {extents[position]} elements or more along axis {axis}, which {option} indexes by {position}"
                raise ValueError(f"{name}: {must}: {name}.shape={shape}")


class IndexCheck(NamedTuple):
    """A step of a plan that calls the functions for all pairs of query and key on the host, and launches nothing."""

    problem: Problem
    functions_of_aux: IndexingFunctions

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        """Check the reads of the arrays at these addresses. ValueError: it names the array, the index, the shape, and the
        arguments b, h, i and j of the read."""
        names = [name for name in LENGTH_ARGUMENTS if name in self.problem]
        lengths = {name: read(addresses[(x := self.problem[name]).source], x.form, stream) for name in names}
        arrays = [read(addresses[x.source], x.form, stream) for x in self.functions_of_aux.aux]
        if any([x is None for x in (*lengths.values(), *arrays)]):  # a CUDA graph is being captured
            return
        mask, score, _, options, _ = self.functions_of_aux
        left, right = options.left, 0 if options.causal else options.right
        by_head = (mask and reads_argument(mask, 1)) or (score and reads_argument(score, 2))
        heads = self.problem.extents["heads"] if by_head else 1
        for b, queries, first, keys in self._sequences(lengths):
            rows = max(1, MAX_SCORES // max(keys, 1))
            for h, row in ((h, row) for h in range(heads) for row in range(0, queries if keys > first else 0, rows)):
                i, j = np.arange(row, min(row + rows, queries))[:, None], np.arange(first, keys)[None]
                place, visible = i + keys - queries, np.ones((len(i), j.size), bool)
                if left is not None:
                    visible &= j >= place - left
                if right is not None:
                    visible &= j <= place + right
                with np.errstate(all="ignore"):
                    for option, function in ("mask", mask), ("score", score):
                        if function is None:
                            continue
                        watched = [
                            BoundsCheckedArray(f"aux{n}", x, option, visible, (b, h, row, first)) for n, x in enumerate(arrays)
                        ]
                        scores = [np.zeros(visible.shape, np.float32)] if function is score else []
                        allowed = function(*scores, b, h, i, j, *watched)
                        visible = visible & allowed if function is mask else visible

    def _sequences(self, lengths: dict[str, Any]) -> Iterator[tuple[int, int, int, int]]:
        """(number, queries, first key, end of keys) of each sequence."""
        tokens, count = self.problem("seqlen_q", "sequences")
        ends, keys = lengths.get("cu_seqlens"), np.full(count, self.functions_of_aux.most_keys)
        queries = np.full(count, tokens) if ends is None else np.diff(ends)
        if "lengths" in lengths:
            keys = lengths["lengths"].astype(np.int64)
            new_ends = lengths.get("cu_seqlens_new", ends)
            if "k_new" in self.problem:
                keys += self.problem.extents["seqlen_new"] if new_ends is None else np.diff(new_ends)
        elif ends is not None and "batch_cache" not in self.problem.extents:  # caches are not packed
            keys = np.diff(lengths.get("cu_seqlens_k", ends))
        if "lengths_k" in lengths:
            keys = np.minimum(keys, lengths["lengths_k"])
        first = lengths.get("leftpad", np.zeros(count, np.int64))
        return ((n, int(queries[n]), int(first[n]), int(keys[n])) for n in range(count))


class BoundsCheckedArray:
    """An array that raises ValueError for indices out of range, for pairs (query, key) that are seen."""

    def __init__(self, name: str, array: np.ndarray, option: str, visible: np.ndarray, first: tuple[int, int, int, int]):
        self.name, self.option, self.visible, self.first = name, option, visible, first
        self.shape, self.ndim = array.shape, array.ndim
        self.array = array if array.dtype.kind in "biu" else array.astype(np.float32)

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        inside: Any = np.True_
        for axis, (at, size) in enumerate(zip(index, self.shape, strict=True)):
            at = np.trunc(at)
            fits = (at >= 0) & (at < size)
            wrong = np.argwhere(self.visible & ~fits)
            if len(wrong):
                b, h, row, key = self.first
                value = np.broadcast_to(at, self.visible.shape)[tuple(wrong[0])]
                where = f"{self.option} reads it at b={b}, h={h}, i={row + wrong[0][0]}, j={key + wrong[0][1]}"
                message = f"index {value:.0f} is out of range for axis {axis} of an array of shape {self.shape}"
                raise ValueError(f"{self.name}: {message}: {where}")
            inside = inside & fits
        if not self.array.size:
            return np.zeros(np.shape(inside), self.array.dtype)
        places = [np.where(inside, np.trunc(at), 0).astype(np.int64) for at in index]
        return np.where(inside, self.array[tuple(places)], self.array.dtype.type(0))
