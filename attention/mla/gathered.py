"""How the producer's warps bring latents of a sequence by cp.async, where TMA cannot: from pages of any size, and of 8 bits.
See boxes.py. Two warps bring the even tiles, two the odd ones, half of the rows each: one tile is under way while the other is
made ready."""

from typing import Any

from numba import cuda
from numpy import int32

from ops import commit_group, load, store, subtile, viewed, wait_group, warpgroup, widened
from tiles import fp8e4m3, inlined, rt, st, static, sv
from tiles.arguments import array

from ..softmax.decode.caches import Dense
from .shape import LATENT

TEAMS, BAND, COLUMNS = 2, 16, 128  # of warps; rows and columns that a warp widens at once


@static
class Gathered:
    """Rows of 16 bits, behind each latent what is rotated. cache: where they lie. part: a warp's rows of them, as a tile holds
    them."""

    cache: Dense
    part: st
    writers = 2

    def __str__(self):
        return f"{self.cache} gathered"

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
    """Latents of e4m3, which a tile holds as fp16, their columns unzipped (ops/matmul/unzipped.py), with a number a token to
    multiply them by; what is rotated lies apart. Bytes are copied to where the right half of the tile will lie, and widened
    from the left: what they overwrite has been read. numbers: a warp's."""

    numbers: sv

    def __str__(self):
        return f"{self.cache} of fp8"

    def source(self, tile: st) -> Any:
        """See Gathered."""
        return array(4, fp8e4m3 if tile.cols == LATENT else tile.dtype)

    @inlined
    def widen(self, latent, held):
        """A warp's rows of a tile of fp16, from those bytes."""
        for band in range(held.rows // BAND):
            for part in range(held.cols // COLUMNS):
                x = load(subtile(held, BAND, band, COLUMNS, part), rt(BAND, COLUMNS, fp8e4m3))
                cuda.syncwarp()
                store(subtile(latent, BAND, band, COLUMNS, part), widened(x))

    @inlined
    def bring(self, pipes, n, first, gLatent, gRotary, gDescale, sequence, end, given):
        """See Gathered."""
        rows, (team, half) = self.part.rows, (warpgroup.rank() // TEAMS, warpgroup.rank() % TEAMS)
        key = int32(first + rows * (TEAMS * team + half))
        found = self.cache.find(self.part, gLatent, sequence, key, end, given)
        for j in range(team, n, TEAMS):
            latent, rotary = subtile(pipes.latent.claim(j), rows, half), subtile(pipes.rotary.claim(j), rows, half)
            units = subtile(pipes.units.claim(j), rows, half)
            held = viewed(subtile(latent, rows, 0, LATENT // 2, 1), self.part)
            numbers = self.cache.find(self.numbers, gDescale, sequence, key, end, given)
            self.cache.copy(held, gLatent, found, sequence, key, 0, end, given)
            self.cache.copy(rotary, gRotary, found, sequence, key, 0, end, given)
            self.cache.copy_numbers(units, gDescale, numbers, sequence, key, end, given)
            commit_group()
            key = int32(key + TEAMS * TEAMS * rows)
            found = self.cache.find(self.part, gLatent, sequence, key, end, given)
            wait_group()
            self.widen(latent, held)
            pipes.latent.publish(j)
            pipes.rotary.publish(j, fenced=True)
            pipes.units.publish(j, fenced=True)
