"""How the producer's warps bring latents where TMA cannot: from pages of any size, and of 8 bits. See boxes.py."""

from typing import Any

from numpy import int32

from ops import commit_group, load, store_widened, subtile, wait_group, warpgroup
from tiles import fp8e4m3, fp32, inlined, rt, st, static, sv
from tiles.arguments import array
from tiles.layout import WARPGROUP

from ..softmax.decode.caches import Dense
from .shape import LATENT

TEAMS, BAND, COLUMNS = 2, 16, 128  # of warps; rows and columns that a warp widens at once
UNITS = rt(BAND, COLUMNS, fp32).col_vec


@static
class Gathered:
    """Rows of 16 bits, behind each latent what is rotated, by cp.async. Two warps bring the even tiles, two the odd ones, half
    of the rows each: one tile is under way while the other is made ready. cache: where they lie. part: a warp's rows of them,
    as a tile holds them."""

    cache: Dense
    part: st
    writers = TEAMS
    ahead = 0  # further tiles of rotated columns, and of numbers, that are under way

    def __str__(self):
        return f"{self.cache} gathered"

    @property
    def registers(self) -> tuple[int, int]:
        """See boxes.py."""
        return 72, 216

    @property
    def given(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return self.cache.given

    def source(self, tile: st) -> Any:
        """What the kernel says of the array that such tiles come from."""
        return array(4, tile.dtype)

    @inlined
    def bring(self, pipes, n, first, gLatent, gRotary, gDescale, sequence, end, given):
        """All `n` tiles, from key `first` on; rows from `end` on are 0. By the producer's warps."""
        rows, (team, half) = self.part.rows, (warpgroup.rank() // TEAMS, warpgroup.rank() % TEAMS)
        key = int32(first + rows * (TEAMS * team + half))
        found = self.cache.find(self.part, gLatent, sequence, key, end, given)
        for j in range(team, n, TEAMS):
            latent, rotary = pipes.latent.claim(j), subtile(pipes.rotary.claim(j), rows, half)
            self.cache.copy(subtile(latent, rows, half), gLatent, found, sequence, key, 0, end, given)
            self.cache.copy(rotary, gRotary, found, sequence, key, LATENT, end, given)
            commit_group()
            key = int32(key + TEAMS * TEAMS * rows)
            found = self.cache.find(self.part, gLatent, sequence, key, end, given)
            wait_group()
            pipes.latent.publish(j)
            pipes.rotary.publish(j, fenced=True)


@static
class Narrow(Gathered):
    """Latents of e4m3, with a number a token to multiply them by, and apart what is rotated. A warp has its rows of the next
    tile in registers, so that they wait for no place in shared memory, and this tile for no bytes. It has no fence, which would
    wait for what is under way: that is its readers'. numbers, turned: a warp's numbers, and rotated columns."""

    numbers: sv
    turned: st
    writers = WARPGROUP
    ahead = 1

    @property
    def registers(self) -> tuple[int, int]:
        """See Gathered. Where rows do not lie in batch n, finding them takes some of the producer's."""
        return (88, 208) if type(self.cache) is Dense else (104, 200)

    def __str__(self):
        return f"{self.cache} of fp8"

    def source(self, tile: st) -> Any:
        """See Gathered."""
        return array(4, fp8e4m3 if tile.cols == LATENT else tile.dtype)

    @inlined
    def units(self, pipes, j):
        """Where a warp's numbers of tile j lie."""
        return subtile(pipes.units, self.part.rows, WARPGROUP * (j % 2) + warpgroup.rank())

    @inlined
    def start(self, pipes, j, gRotary, gDescale, sequence, key, end, given):
        """Start copying a warp's rows of tile j, from `key` on, but for their latents."""
        numbers = self.cache.find(self.numbers, gDescale, sequence, key, end, given)
        turned = self.cache.find(self.turned, gRotary, sequence, key, end, given)
        rotary = subtile(pipes.rotary.claim(j), self.part.rows, warpgroup.rank())
        self.cache.copy(rotary, gRotary, turned, sequence, key, 0, end, given)
        self.cache.copy_numbers(self.units(pipes, j), gDescale, numbers, sequence, key, end, given)

    @inlined
    def load(self, gLatent, found, sequence, key, part, end, given):
        """Some columns of its rows from `key` on."""
        col = COLUMNS * part
        return self.cache.load(rt(BAND, COLUMNS, fp8e4m3), gLatent, found, sequence, key, col, end, given)

    @inlined
    def bring(self, pipes, n, first, gLatent, gRotary, gDescale, sequence, end, given):
        """See Gathered."""
        rows, rank, last = self.part.rows, warpgroup.rank(), int32(min(end, first + WARPGROUP * self.part.rows * n))
        key = int32(first + rows * rank)
        found = self.cache.find(self.part, gLatent, sequence, key, last, given)
        x0 = self.load(gLatent, found, sequence, key, 0, last, given)
        x1 = self.load(gLatent, found, sequence, key, 1, last, given)
        x2 = self.load(gLatent, found, sequence, key, 2, last, given)
        x3 = self.load(gLatent, found, sequence, key, 3, last, given)
        if n > 0:
            self.start(pipes, int32(0), gRotary, gDescale, sequence, key, last, given)
        commit_group()
        for j in range(n):
            key = int32(key + WARPGROUP * rows)
            if j + 1 < n:
                self.start(pipes, int32(j + 1), gRotary, gDescale, sequence, key, last, given)
            commit_group()
            found = self.cache.find(self.part, gLatent, sequence, key, last, given)
            wait_group(1)
            units, tile = load(self.units(pipes, j), UNITS), subtile(pipes.latent.claim(j), rows, rank)
            store_widened(subtile(tile, rows, 0, COLUMNS, 0), x0, units)
            x0 = self.load(gLatent, found, sequence, key, 0, last, given)
            store_widened(subtile(tile, rows, 0, COLUMNS, 1), x1, units)
            x1 = self.load(gLatent, found, sequence, key, 1, last, given)
            store_widened(subtile(tile, rows, 0, COLUMNS, 2), x2, units)
            x2 = self.load(gLatent, found, sequence, key, 2, last, given)
            store_widened(subtile(tile, rows, 0, COLUMNS, 3), x3, units)
            x3 = self.load(gLatent, found, sequence, key, 3, last, given)
            pipes.latent.publish(j, fenced=True)
            pipes.rotary.publish(j, fenced=True)
