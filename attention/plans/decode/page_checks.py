"""Checks that the pages and the batches of a cache exist that page tables and batch_index name, if values are checked
(tiles/launching/checks.py)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.checks import check_options, read


class PageCheck(NamedTuple):
    """A step of a plan that reads a page table, or batch_index, on the host, and launches nothing. ValueError: an entry for
    keys in use names a page or a batch that does not exist. left: how many keys before a sequence's first query token are in
    use; None: all."""

    problem: Problem
    left: int | None

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        """Check the arrays at `addresses`, after what is queued on `stream`. Nothing is checked while a CUDA graph is
        captured."""
        names = [name for name in ("lengths", "pages", "batch_index", "leftpad", "cu_seqlens") if name in self.problem]
        values: dict[str, Any] = {name: read(addresses[(x := self.problem[name]).source], x.form, stream) for name in names}
        if any(x is None for x in values.values()):  # a CUDA graph is being captured
            return
        tokens, size, caches, count = self.problem("seqlen_q", "seqlen_k", "batch_cache", "sequences")
        pages = self.problem.extents.get("pages_per_seq", 1)
        lengths = values["lengths"].astype(np.int64) if "lengths" in values else np.full(count, size * pages)
        queries = np.diff(values["cu_seqlens"]) if "cu_seqlens" in values else np.full_like(lengths, tokens)
        used, name = (lengths > 0) & (queries > 0), "pages" if "pages" in values else "batch_index"
        if name == "pages":
            begin = 0 if self.left is None else lengths - queries - self.left
            begin, page = np.maximum(begin, values.get("leftpad", 0)), np.arange(values["pages"].shape[1])[:, None]
            used = (used & (begin < lengths) & (page * size < lengths) & ((page + 1) * size > begin)).T
        wrong = np.argwhere(used & ((values[name] < 0) | (values[name] >= caches)))
        if len(wrong):
            at, b = ", ".join(map(str, wrong[0])), wrong[0][0]
            length = f"lengths[{b}]={lengths[b]}" if "lengths" in values else "lengths=None"
            entry = f"{name}[{at}]={values[name][tuple(wrong[0])]}, {length}"
            raise ValueError(f"{name}: must be from 0 to {caches - 1} where keys are in use: {entry}")


def plan_page_checks(problem: Problem, left: int | None = None) -> list[Step]:
    """[PageCheck], if there are pages or batch_index and values are checked (tiles/launching/checks.py says where); else []."""
    has_table = "pages" in problem or "batch_index" in problem
    return [PageCheck(problem, left)] if has_table and (problem.device is None or check_options().values) else []
