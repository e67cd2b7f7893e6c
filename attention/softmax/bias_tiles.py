"""What TMA brings beside a tile of keys for scores to read: nothing, or tiles of a bias. Two objects with the same methods,
which say what a ring of the kernel holds, fill it, and give a consumer its part. A kernel opens its shared memory through one
of them."""

from typing import Any

from numba import cuda

from ops import raw, subtile, turned, warpgroup
from tiles import dtype, inlined, ring, rt, st, static
from tiles.arguments import tiled

ROWS = warpgroup.ROWS


@static
class NoTiles:
    """Nothing is brought."""

    @property
    def params(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {}

    def rings(self, stages: int, readers: int) -> dict[str, ring]:
        """The ring that it takes in shared memory, as the last item of the plan."""
        return {}

    @inlined
    def open(self, smem):
        """The items of the kernel's plan, and behind them the ring."""
        return smem.open() + (0,)

    @inlined
    def fill(self, ring, j, params, at):
        """Fill tile j of the ring with the tile `at` (batch, head, query, tile of keys)."""

    @inlined
    def pass_by(self, ring, j):
        """Give back tile j, which this consumer does not use."""

    @inlined
    def by_queries(self, ring, j, ctx, part):
        """`at` with the rows of tile j that belong to consumer `part`, queries by keys. Waits for the tile, and gives it
        back."""
        return ctx

    @inlined
    def by_keys(self, ring, j, ctx, part):
        """The same for a consumer that holds scores keys by queries: columns of the tile. No fence; the tile stays until it is
        given back."""
        return ctx

    @inlined
    def own_rows(self, tile, ctx, part):
        """by_queries for a tile that has arrived. No fence; the tile stays until it is given back."""
        return ctx

    @inlined
    def give_back(self, ring, j, fenced=False):
        """Give back tile j after own_rows or by_keys. The fence for their loads is here, because behind stores it would wait
        for these, too. fenced: there has just been a fence, so none is needed."""


@static
class BiasTiles(NoTiles):
    """Tiles of a bias, (batch, head, query, key), of 2 bytes a number: ctx.params.bias becomes the consumer's part."""

    queries: int
    keys: int
    dtype: dtype

    @property
    def tile(self) -> st:
        """One of them."""
        return st(self.queries, self.keys, self.dtype)

    @property
    def params(self) -> dict[str, Any]:
        return {"bias": tiled(self.tile, 4, 2, 3, unit=1)}

    def rings(self, stages: int, readers: int) -> dict[str, ring]:
        return {"tiles": ring(self.tile, stages, readers)}

    @inlined
    def open(self, smem):
        return smem.open()

    @inlined
    def fill(self, ring, j, params, at):
        ring.fill(j, params.bias, at)

    @inlined
    def pass_by(self, ring, j):
        ring.wait(j)
        ring.release(j)

    @inlined
    def by_queries(self, ring, j, ctx, part):
        x = warpgroup.load(subtile(ring.wait(j), ROWS, part), rt(16, self.keys, self.dtype))
        ring.release(j)
        return ctx._replace(params=ctx.params._replace(bias=x))

    @inlined
    def own_rows(self, tile, ctx, part):
        x = warpgroup.load(subtile(tile, ROWS, part), rt(16, self.keys, self.dtype), fenced=False)
        return ctx._replace(params=ctx.params._replace(bias=x))

    @inlined
    def give_back(self, ring, j, fenced=False):
        if not fenced:
            raw.fence_async()
            cuda.syncwarp()
        ring.release(j)

    @inlined
    def by_keys(self, ring, j, ctx, part):
        rows = subtile(ring.wait(j), self.queries, 0, ROWS, part)
        x = turned(warpgroup.load_transposed(rows, rt(16, self.queries, self.dtype), fenced=False))
        return ctx._replace(params=ctx.params._replace(bias=x))
