"""Do the pages and the batches of a cache exist in which sequences are said to lie? Checked where values are
(tiles/checks.py)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tiles.checks import asked, read
from tiles.plan import Step
from tiles.schema import Problem


class Placed(NamedTuple):
    """A step that reads page tables, or a batch_index, and launches nothing. ValueError: they name a page or a batch that does
    not exist, for keys that are used. left: how many keys before a sequence's first new token are used; None: all."""

    problem: Problem
    left: int | None

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        """At these addresses."""
        names = [name for name in ("lengths", "pages", "batch_index", "leftpad", "cu_seqlens") if name in self.problem]
        found: dict[str, Any] = {name: read(addresses[(x := self.problem[name]).source], x.form, stream) for name in names}
        if any(x is None for x in found.values()):  # a CUDA graph is being captured
            return
        (tokens, size, caches, count), room = self.problem("STCN"), found["pages"].shape[1] if "pages" in found else 1
        lengths = found["lengths"].astype(np.int64) if "lengths" in found else np.full(count, size * room)
        asking = np.diff(found["cu_seqlens"]) if "cu_seqlens" in found else np.full_like(lengths, tokens)
        used, name = (lengths > 0) & (asking > 0), "pages" if "pages" in found else "batch_index"
        if name == "pages":
            begin = 0 if self.left is None else lengths - asking - self.left
            begin, page = np.maximum(begin, found.get("leftpad", 0)), np.arange(found["pages"].shape[1])[:, None]
            used = (used & (begin < lengths) & (page * size < lengths) & ((page + 1) * size > begin)).T
        wrong = np.argwhere(used & ((found[name] < 0) | (found[name] >= caches)))
        if len(wrong):
            at, b = ", ".join(map(str, wrong[0])), wrong[0][0]
            length = f"lengths[{b}]={lengths[b]}" if "lengths" in found else "lengths=None"
            said = f"{name}[{at}]={found[name][tuple(wrong[0])]}, {length}"
            raise ValueError(f"{name}: must be from 0 to {caches - 1} where keys are in use: {said}")


def placed(problem: Problem, left: int | None = None) -> list[Step]:
    """[Placed], if there is something to check and values are checked (tiles/checks.py says where); else []."""
    there = "pages" in problem or "batch_index" in problem
    return [Placed(problem, left)] if there and (problem.device is None or asked().values) else []
