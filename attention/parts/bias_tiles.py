"""Tiles of a bias that TMA loads beside tiles of keys, or none: two objects with the same methods, which declare the ring of a
kernel, fill it, and put a consumer's part into the ScoreContext. A kernel opens its shared memory through one of them."""

from typing import Any

from numba import cuda

from ops import raw, subtile, turned, warpgroup
from tiles import dtype, inlined, ring, rt, st, static
from tiles.launching.arguments import tiled

from .part import KernelPart

ROWS = warpgroup.ROWS


@static
class NoTiles(KernelPart):
    """TMA loads no bias: the methods do nothing."""

    def rings(self, stages: int, readers: int) -> dict[str, ring]:
        """{name: ring} of bias tiles, for the shared storage."""
        return {}

    @inlined
    def ring_of(self, memory):
        """The ring of bias tiles in the kernel's shared memory."""
        return 0

    @inlined
    def fill(self, ring, j, params, at):
        """Fill stage j of the ring with the tile at coordinates `at` (batch, head, query, key block)."""

    @inlined
    def skip(self, ring, j):
        """Release stage j, which this consumer does not use."""

    @inlined
    def load_rows(self, ring, j, ctx, part):
        """`ctx` with consumer `part`'s rows of stage j (queries by keys) as params.bias. Waits for the tile, and releases
        it."""
        return ctx

    @inlined
    def load_columns(self, ring, j, ctx, part):
        """`ctx` with consumer `part`'s columns of stage j, transposed to keys by queries. Without a fence: call `release`
        after it."""
        return ctx

    @inlined
    def load_rows_of_tile(self, tile, ctx, part):
        """`load_rows` of a tile that has arrived. Without a fence: call `release` after it."""
        return ctx

    @inlined
    def release(self, ring, j, fenced=True):
        """Release stage j after load_rows_of_tile or load_columns. The fence for their loads is here, so that it comes before
        later stores, for which it would also wait. fenced=False: a fence has just been issued, so none is needed."""


@static
class BiasTiles(NoTiles):
    """TMA loads tiles of a bias (batch, head, query, key) of a 2-byte dtype, and params.bias of a ScoreContext becomes the
    consumer's part of one. queries, keys: of a tile."""

    queries: int
    keys: int
    dtype: dtype

    @property
    def tile(self) -> st:
        """The type of a bias tile in shared memory."""
        return st(self.queries, self.keys, self.dtype)

    @property
    def params(self) -> dict[str, Any]:
        return {"bias": tiled(self.tile, 4, 2, 3, unit=1)}

    def rings(self, stages: int, readers: int) -> dict[str, ring]:
        return {"tiles": ring(self.tile, stages, readers)}

    @inlined
    def ring_of(self, memory):
        return memory.tiles

    @inlined
    def fill(self, ring, j, params, at):
        ring.fill(j, params.bias, at)

    @inlined
    def skip(self, ring, j):
        ring.wait(j)
        ring.release(j)

    @inlined
    def load_rows(self, ring, j, ctx, part):
        x = warpgroup.load(subtile(ring.wait(j), ROWS, part), rt(16, self.keys, self.dtype))
        ring.release(j)
        return ctx._replace(params=ctx.params._replace(bias=x))

    @inlined
    def load_rows_of_tile(self, tile, ctx, part):
        x = warpgroup.load(subtile(tile, ROWS, part), rt(16, self.keys, self.dtype), fenced=False)
        return ctx._replace(params=ctx.params._replace(bias=x))

    @inlined
    def release(self, ring, j, fenced=True):
        if fenced:
            raw.fence_async()
            cuda.syncwarp()
        ring.release(j)

    @inlined
    def load_columns(self, ring, j, ctx, part):
        rows = subtile(ring.wait(j), self.queries, 0, ROWS, part)
        x = turned(warpgroup.load_transposed(rows, rt(16, self.queries, self.dtype), fenced=False))
        return ctx._replace(params=ctx.params._replace(bias=x))
