"""What TMA brings beside a tile of keys for scores to read, as objects with the same methods: what a ring of a kernel holds,
who fills it, and how a consumer takes its part. A kernel opens its shared memory through one of these."""

from typing import Any

from numba import cuda

from ops import raw, subtile, turned, warpgroup
from tiles import dtype, inlined, ring, rt, st, static
from tiles.arguments import tiled

ROWS = warpgroup.ROWS


@static
class Nothing:
    """Nothing."""

    @property
    def given(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {}

    def rings(self, stages: int, readers: int) -> dict[str, ring]:
        """What it takes of shared memory: the last of a plan's items."""
        return {}

    @inlined
    def open(self, smem):
        """The items of a plan, and behind them the ring."""
        return smem.open() + (0,)

    @inlined
    def fill(self, ring, j, given, at):
        """Tile j of the ring, as it stands `at` (batch, head, query, tile of keys)."""

    @inlined
    def pass_by(self, ring, j):
        """A consumer has no use for tile j."""

    @inlined
    def by_queries(self, ring, j, at, part):
        """`at` with tile j's rows of the part-th consumer, queries by keys: once it has come, and it may go then."""
        return at

    @inlined
    def by_keys(self, ring, j, at, part):
        """The same with its columns, as a consumer has its scores that holds keys by queries; with no fence, and it stays until
        it is given back."""
        return at

    @inlined
    def own_rows(self, tile, at, part):
        """by_queries of a tile that is there, and stays until it is given back: with no fence."""
        return at

    @inlined
    def give_back(self, ring, j, fenced=False):
        """Tile j, of which own_rows or by_keys were read, may go. Here is the fence of these loads, which behind stores would
        wait for them, too. fenced: without it, for there has just been one."""


@static
class Tiles(Nothing):
    """Tiles of a bias, (batch, head, query, key), of 2 bytes a number: at.given.bias becomes the consumer's part."""

    queries: int
    keys: int
    dtype: dtype

    @property
    def tile(self) -> st:
        """One of them."""
        return st(self.queries, self.keys, self.dtype)

    @property
    def given(self) -> dict[str, Any]:
        return {"bias": tiled(self.tile, 4, 2, 3, unit=1)}

    def rings(self, stages: int, readers: int) -> dict[str, ring]:
        return {"tiles": ring(self.tile, stages, readers)}

    @inlined
    def open(self, smem):
        return smem.open()

    @inlined
    def fill(self, ring, j, given, at):
        ring.fill(j, given.bias, at)

    @inlined
    def pass_by(self, ring, j):
        ring.wait(j)
        ring.release(j)

    @inlined
    def by_queries(self, ring, j, at, part):
        x = warpgroup.load(subtile(ring.wait(j), ROWS, part), rt(16, self.keys, self.dtype))
        ring.release(j)
        return at._replace(given=at.given._replace(bias=x))

    @inlined
    def own_rows(self, tile, at, part):
        x = warpgroup.load(subtile(tile, ROWS, part), rt(16, self.keys, self.dtype), fenced=False)
        return at._replace(given=at.given._replace(bias=x))

    @inlined
    def give_back(self, ring, j, fenced=False):
        if not fenced:
            raw.fence_async()
            cuda.syncwarp()
        ring.release(j)

    @inlined
    def by_keys(self, ring, j, at, part):
        own = subtile(ring.wait(j), self.queries, 0, ROWS, part)
        x = turned(warpgroup.load_transposed(own, rt(16, self.queries, self.dtype), fenced=False))
        return at._replace(given=at.given._replace(bias=x))
