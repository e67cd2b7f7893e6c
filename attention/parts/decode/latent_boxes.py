"""How TMA loads tiles of latents into the rings of Hopper's kernel, by how the cache is laid out, as classes with the same
methods."""

from typing import Any

from numpy import int32

from tiles import inlined, st, static
from tiles.launching.arguments import ENDS, INT, tiled

from ..key_sources import PAGE_TABLE
from ..part import KernelPart
from .latent_shape import LATENT, ROTARY

ROTARY_BLOCK = LATENT // ROTARY  # index of the rotated columns in a row, in blocks of ROTARY columns


@static
class TmaLatents(KernelPart):
    """Sequence n is batch n of an array (batch, row, head, column)."""

    label = "dense"
    writers = extra_stages = 0  # warps that store to the rings; further stages of the ring of rotated columns

    def __str__(self):
        return self.label

    def source(self, tile: st) -> Any:
        """The declaration of the kernel's array from which tiles of this type are loaded."""
        return tiled(tile, unit=1)

    @inlined
    def fill(self, latent, rotary, j, gLatent, gRotary, sequence, key, end, params):
        """Load tile j of both rings by TMA: the sequence's rows from `key` on. Rows from `end` on may hold anything."""
        latent.fill(j, gLatent, (sequence, key, 0, 0))
        rotary.fill(j, gRotary, (sequence, key, 0, ROTARY_BLOCK))

    @inlined
    def load_tiles(self, tiles, n, first, gLatent, gRotary, gDescale, sequence, end, params):
        """Load all `n` tiles, from key `first` on. All warps of the producer call it."""
        for j in range(n):
            key = int32(first + tiles.latent.tile.rows * j)
            self.fill(tiles.latent, tiles.rotary, j, gLatent, gRotary, sequence, key, end, params)


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
        rotary.fill(j, gRotary, (batch, key, 0, ROTARY_BLOCK))


@static
class TmaPagedLatents(TmaLatents):
    """Sequence n is in the pages params.pages[n] of an array (page, row, head, column). TMA loads a tile of keys as `boxes`
    boxes, each from one page."""

    boxes: int

    def __str__(self):
        return f"paged by {self.boxes}" if self.boxes > 1 else "paged"

    @property
    def params(self) -> dict[str, Any]:
        return {"pages": PAGE_TABLE, "page_size": INT}

    def source(self, tile: st) -> Any:
        return tiled(st(tile.rows // self.boxes, tile.cols, tile.dtype), unit=1)

    @inlined
    def fill(self, latent, rotary, j, gLatent, gRotary, sequence, key, end, params):
        """Load tile j of both rings by TMA: the sequence's rows from `key` on. In place of a box beyond the end of the
        sequence, for which the table has no page, the last box is loaded again."""
        boxes, rows = self.boxes, latent.tile.rows // self.boxes
        for box in range(boxes):
            first = int32(min(key + rows * box, (end - 1) // rows * rows))
            entry = first // params.page_size
            page, row = int32(params.pages[sequence, entry]), int32(first - entry * params.page_size)
            latent.fill(j, gLatent, (page, row, 0, 0), box, boxes)
            rotary.fill(j, gRotary, (page, row, 0, ROTARY_BLOCK), box, boxes)
