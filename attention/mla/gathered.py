"""How the producer's warps bring latents where TMA cannot: from pages of any size, and of 8 bits. See boxes.py."""

from typing import Any

from numpy import int32

from ops import commit_group, store_widened, subtile, wait_group, warpgroup
from tiles import fp8e4m3, inlined, rt, st, static, sv
from tiles.arguments import array
from tiles.layout import WARPGROUP

from ..softmax.decode.caches import DenseLoader
from .shape import LATENT

TEAMS, BAND = 2, 16  # of warps; rows that a warp widens at once


@static
class LatentGather:
    """Rows of 16 bits, in which the rotated columns follow the latent, are copied by cp.async. Two warps bring the even tiles,
    two the odd ones, each half of the rows, so that one tile is on its way while another is published. cache: where the rows
    lie. part: the shared tile of a warp's rows."""

    cache: DenseLoader
    part: st
    writers = TEAMS
    ahead = 0  # further tiles of rotated columns, and of numbers, that are under way

    def __str__(self):
        return f"{self.cache} gathered"

    @property
    def params(self) -> dict[str, Any]:
        """{kernel's argument: its type} of what this needs in the kernel."""
        return self.cache.params

    def source(self, tile: st) -> Any:
        """How a kernel declares the array that tiles of this type are loaded from."""
        return array(4, tile.dtype)

    @inlined
    def bring(self, pipes, n, first, gLatent, gRotary, gDescale, sequence, end, params):
        """Bring all `n` tiles, from key `first` on; rows from `end` on become 0. The producer's warps call it."""
        rows, (team, half) = self.part.rows, (warpgroup.rank() // TEAMS, warpgroup.rank() % TEAMS)
        key = int32(first + rows * (TEAMS * team + half))
        found = self.cache.look_up_rows(self.part, gLatent, sequence, key, end, params)
        for j in range(team, n, TEAMS):
            latent, rotary = pipes.latent.claim(j), subtile(pipes.rotary.claim(j), rows, half)
            self.cache.copy_rows(subtile(latent, rows, half), gLatent, found, sequence, key, 0, end, params)
            self.cache.copy_rows(rotary, gRotary, found, sequence, key, LATENT, end, params)
            commit_group()
            key = int32(key + TEAMS * TEAMS * rows)
            found = self.cache.look_up_rows(self.part, gLatent, sequence, key, end, params)
            wait_group()
            pipes.latent.publish(j)
            pipes.rotary.publish(j, fenced=True)


@static
class Fp8LatentGather(LatentGather):
    """Latents of float8_e4m3fn, which are widened to fp16 for the shared tile. Each has a number to be multiplied by, and the
    rotated columns are an array of their own. A warp loads its rows of the next tile into registers ahead, so that neither
    loading waits for room in shared memory, nor widening for bytes. numbers, turned: the shared tiles of a warp's numbers and
    of its rotated columns."""

    numbers: sv
    turned: st
    writers = WARPGROUP
    ahead = 1

    def __str__(self):
        return f"{self.cache} of fp8"

    def source(self, tile: st) -> Any:
        return array(4, fp8e4m3 if tile.cols == LATENT else tile.dtype)

    @inlined
    def start(self, pipes, j, gLatent, gRotary, gDescale, sequence, key, end, params):
        """Begin to load a warp's rows of tile j, from `key` on. Returns the latents, on their way to registers; numbers and
        rotated columns go to shared memory."""
        rows, rank = self.part.rows, warpgroup.rank()
        found = self.cache.look_up_rows(self.part, gLatent, sequence, key, end, params)
        numbers = self.cache.look_up_rows(self.numbers, gDescale, sequence, key, end, params)
        turned = self.cache.look_up_rows(self.turned, gRotary, sequence, key, end, params)
        latents = self.cache.load_fp8_rows(rt(BAND, LATENT, fp8e4m3), gLatent, found, sequence, key, 0, end, params)
        rotary, units = subtile(pipes.rotary.claim(j), rows, rank), subtile(pipes.units.claim(j), rows, rank)
        self.cache.copy_rows(rotary, gRotary, turned, sequence, key, 0, end, params)
        self.cache.copy_descales(units, gDescale, numbers, sequence, key, end, params)
        commit_group()
        return latents

    @inlined
    def bring(self, pipes, n, first, gLatent, gRotary, gDescale, sequence, end, params):
        rows, rank = self.part.rows, warpgroup.rank()
        key = int32(first + rows * rank)
        latents = self.start(pipes, int32(0), gLatent, gRotary, gDescale, sequence, key, end, params)
        for j in range(n):
            store_widened(subtile(pipes.latent.claim(j), rows, rank), latents)
            wait_group()
            pipes.latent.publish(j)
            pipes.rotary.publish(j, fenced=True)
            pipes.units.publish(j, fenced=True)
            if j + 1 < n:
                key = int32(key + WARPGROUP * rows)
                latents = self.start(pipes, int32(j + 1), gLatent, gRotary, gDescale, sequence, key, end, params)
        wait_group()  # where there is no tile
