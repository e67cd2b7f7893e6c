"""How TMA finds the latents of a sequence, as objects with the same methods: what fills the rings of Hopper's kernel."""

from typing import Any

from numpy import int32

from tiles import inlined, st, static
from tiles.arguments import ENDS, INT, tiled

from ..softmax.decode.caches import TABLE
from .shape import LATENT, ROTARY

BEHIND = LATENT // ROTARY  # rotated columns are so many times their own number behind a row's first


@static
class TmaLatents:
    """Sequence n lies in batch n of an array (batch, row, head, column)."""

    label = "dense"
    writers = ahead = 0  # warps that store tiles; further tiles of rotated columns that are under way

    def __str__(self):
        return self.label

    @property
    def params(self) -> dict[str, Any]:
        """{kernel's argument: its type} of what this needs in the kernel."""
        return {}

    def source(self, tile: st) -> Any:
        """How a kernel declares the array that tiles of this type are loaded from."""
        return tiled(tile, unit=1)

    @inlined
    def fill(self, latent, rotary, j, gLatent, gRotary, sequence, key, end, params):
        """Have TMA bring tile j of both rings, the sequence's rows from `key` on. Rows from `end` on may hold anything."""
        latent.fill(j, gLatent, (sequence, key, 0, 0))
        rotary.fill(j, gRotary, (sequence, key, 0, BEHIND))

    @inlined
    def bring(self, pipes, n, first, gLatent, gRotary, gDescale, sequence, end, params):
        """Have TMA bring all `n` tiles, from key `first` on. The producer's warps call it."""
        for j in range(n):
            key = int32(first + pipes.latent.tile.rows * j)
            self.fill(pipes.latent, pipes.rotary, j, gLatent, gRotary, sequence, key, end, params)


class TmaIndexedLatents(TmaLatents):
    """Sequence n is batch params.batch_index[n]."""

    label = "indexed"

    @property
    def params(self) -> dict[str, Any]:
        return {"batch_index": ENDS}

    @inlined
    def fill(self, latent, rotary, j, gLatent, gRotary, sequence, key, end, params):
        batch = int32(params.batch_index[sequence])
        latent.fill(j, gLatent, (batch, key, 0, 0))
        rotary.fill(j, gRotary, (batch, key, 0, BEHIND))


@static
class TmaPagedLatents(TmaLatents):
    """Sequence n lies in the pages params.pages[n] of an array (page, row, head, column). A tile of keys is `parts` boxes, each
    of which lies in one page."""

    parts: int

    def __str__(self):
        return f"paged by {self.parts}" if self.parts > 1 else "paged"

    @property
    def params(self) -> dict[str, Any]:
        return {"pages": TABLE, "page_size": INT}

    def source(self, tile: st) -> Any:
        return tiled(st(tile.rows // self.parts, tile.cols, tile.dtype), unit=1)

    @inlined
    def fill(self, latent, rotary, j, gLatent, gRotary, sequence, key, end, params):
        """See Dense. For a box beyond the end of the sequence the last one is loaded instead, because the table has no page
        for it."""
        parts, rows = self.parts, latent.tile.rows // self.parts
        for part in range(parts):
            first = int32(min(key + rows * part, (end - 1) // rows * rows))
            entry = first // params.page_size
            page, row = int32(params.pages[sequence, entry]), int32(first - entry * params.page_size)
            latent.fill(j, gLatent, (page, row, 0, 0), part, parts)
            rotary.fill(j, gRotary, (page, row, 0, BEHIND), part, parts)
