"""How the producer's warps bring latents where TMA cannot: from pages of any size, and of 8 bits. See boxes.py."""

from typing import Any

from numpy import int32

from ops import cluster, commit_group, store_widened, subtile, wait_group, warpgroup
from tiles import fp8e4m3, inlined, rt, st, static, sv
from tiles.arguments import array
from tiles.layout import WARPGROUP

from ..softmax.decode.caches import Dense
from .shape import LATENT

TEAMS, BAND = 2, 16  # of warps; rows that a warp widens at once


@static
class Gathered:
    """Rows of 16 bits, behind each latent what is rotated, by cp.async. Two warps bring the even tiles, two the odd ones, half
    of the rows each: one tile is under way while the other is made ready. cache: where they lie. part: a warp's rows of them,
    as a tile holds them."""

    cache: Dense
    part: st
    blocks = 1  # that bring tiles for each other
    writers = TEAMS
    ahead = 0  # further tiles of rotated columns, and of numbers, that are under way

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
    """Latents of e4m3, which a tile holds as fp16, with a number a token to multiply them by; what is rotated lies apart. A
    warp has its rows of the next tile in registers, so that they wait for no place in shared memory, and this one for no bytes.
    Blocks of a cluster, which see the same keys, widen some columns each, for all of them. numbers, turned: a warp's numbers,
    and rotated columns."""

    numbers: sv
    turned: st
    blocks: int
    writers = WARPGROUP
    ahead = 1

    def __str__(self):
        return f"{self.cache} of fp8" + f" by {self.blocks} blocks" * (self.blocks > 1)

    @property
    def own(self) -> rt:
        """What a warp holds of a tile."""
        return rt(BAND, LATENT // self.blocks, fp8e4m3)

    def source(self, tile: st) -> Any:
        return array(4, fp8e4m3 if tile.cols == LATENT else tile.dtype)

    @inlined
    def start(self, pipes, j, gLatent, gRotary, gDescale, sequence, key, end, given):
        """A warp's rows of tile j, from `key` on: latents, on their way to registers; all else is to shared memory."""
        rows, rank = self.part.rows, warpgroup.rank()
        found = self.cache.find(self.part, gLatent, sequence, key, end, given)
        numbers = self.cache.find(self.numbers, gDescale, sequence, key, end, given)
        turned = self.cache.find(self.turned, gRotary, sequence, key, end, given)
        latents = self.cache.load(self.own, gLatent, found, sequence, key, int32(self.own.cols * self.turn()), end, given)
        rotary, units = subtile(pipes.rotary.claim(j), rows, rank), subtile(pipes.units.claim(j), rows, rank)
        self.cache.copy(rotary, gRotary, turned, sequence, key, 0, end, given)
        self.cache.copy_numbers(units, gDescale, numbers, sequence, key, end, given)
        commit_group()
        return latents

    @inlined
    def turn(self):
        """Which columns are this block's."""
        return cluster.rank() if self.blocks > 1 else int32(0)

    @inlined
    def bring(self, pipes, n, first, gLatent, gRotary, gDescale, sequence, end, given):
        rows, rank = self.part.rows, warpgroup.rank()
        key = int32(first + rows * rank)
        latents = self.start(pipes, int32(0), gLatent, gRotary, gDescale, sequence, key, end, given)
        for j in range(n):
            place = subtile(pipes.latent.claim(j), rows, rank, self.own.cols, self.turn())
            store_widened(place, latents, pipes.latent, j)
            wait_group()
            pipes.latent.publish(j)
            pipes.rotary.publish(j, fenced=True)
            pipes.units.publish(j, fenced=True)
            if j + 1 < n:
                key = int32(key + WARPGROUP * rows)
                latents = self.start(pipes, int32(j + 1), gLatent, gRotary, gDescale, sequence, key, end, given)
        wait_group()  # where there is no tile
