"""How the producer's warps load tiles of latents where TMA cannot: from pages of any size, and of fp8. The methods are those of
latent_boxes.py."""

from typing import Any

from numpy import int32

from ops import commit_group, store_widened, subtile, wait_group, warpgroup
from tiles import fp8e4m3, inlined, rt, st, static, sv
from tiles.launching.arguments import array
from tiles.layout import WARPGROUP

from .cache_loaders import DenseLoader
from .latent_shape import LATENT

TEAMS = 2  # of two warps each
CONVERTED_ROWS = 16  # rows of fp8 that a warp converts at a time


@static
class LatentGather:
    """cp.async copies rows of 16 bits, whose rotated columns follow the latent. Two warps load the even tiles, two the odd
    ones, each half of the rows, so that one tile is being loaded while another is published. cache: how rows are looked up and
    copied. part: the shared tile of a warp's rows."""

    cache: DenseLoader
    part: st
    writers = TEAMS
    extra_stages = 0  # further stages of the rings of rotated columns and of descales

    def __str__(self):
        return f"{self.cache} gathered"

    @property
    def params(self) -> dict[str, Any]:
        """{parameter: its type} of the kernel's parameters that these methods read."""
        return self.cache.params

    def source(self, tile: st) -> Any:
        """The declaration of the kernel's array from which tiles of this type are loaded."""
        return array(4, tile.dtype)

    @inlined
    def load_tiles(self, tiles, n, first, gLatent, gRotary, gDescale, sequence, end, params):
        """Load all `n` tiles, from key `first` on; rows from `end` on become 0. All warps of the producer call it."""
        rows, (team, half) = self.part.rows, (warpgroup.rank() // TEAMS, warpgroup.rank() % TEAMS)
        key = int32(first + rows * (TEAMS * team + half))
        lookup = self.cache.look_up_rows(self.part, gLatent, sequence, key, end, params)
        for j in range(team, n, TEAMS):
            latent, rotary = tiles.latent.claim(j), subtile(tiles.rotary.claim(j), rows, half)
            self.cache.copy_rows(subtile(latent, rows, half), gLatent, lookup, sequence, key, 0, end, params)
            self.cache.copy_rows(rotary, gRotary, lookup, sequence, key, LATENT, end, params)
            commit_group()
            key = int32(key + TEAMS * TEAMS * rows)
            lookup = self.cache.look_up_rows(self.part, gLatent, sequence, key, end, params)
            wait_group()
            tiles.latent.publish(j)
            tiles.rotary.publish(j, fenced=False)


@static
class Fp8LatentGather(LatentGather):
    """Latents of float8_e4m3fn, which a warp converts to fp16 on the way to the shared tile. Each has a descale, and the
    rotated columns are an array of their own. A warp loads its rows of the next tile to registers before it stores this one's,
    so that loads do not wait for a free stage, nor conversions for loads. descales, rotated: the shared tiles of a warp's
    descales and rotated columns."""

    descales: sv
    rotated: st
    writers = WARPGROUP
    extra_stages = 1

    def __str__(self):
        return f"{self.cache} of fp8"

    def source(self, tile: st) -> Any:
        return array(4, fp8e4m3 if tile.cols == LATENT else tile.dtype)

    @inlined
    def start_loads(self, tiles, j, gLatent, gRotary, gDescale, sequence, key, end, params):
        """Start loading a warp's rows of tile j, from `key` on. Returns the latents, in registers; descales and rotated columns
        are copied to shared memory."""
        rows, rank = self.part.rows, warpgroup.rank()
        lookup = self.cache.look_up_rows(self.part, gLatent, sequence, key, end, params)
        descale_lookup = self.cache.look_up_rows(self.descales, gDescale, sequence, key, end, params)
        rotary_lookup = self.cache.look_up_rows(self.rotated, gRotary, sequence, key, end, params)
        latents = self.cache.load_fp8_rows(rt(CONVERTED_ROWS, LATENT, fp8e4m3), gLatent, lookup, sequence, key, 0, end, params)
        rotary, descales = subtile(tiles.rotary.claim(j), rows, rank), subtile(tiles.descales.claim(j), rows, rank)
        self.cache.copy_rows(rotary, gRotary, rotary_lookup, sequence, key, 0, end, params)
        self.cache.copy_descales(descales, gDescale, descale_lookup, sequence, key, end, params)
        commit_group()
        return latents

    @inlined
    def load_tiles(self, tiles, n, first, gLatent, gRotary, gDescale, sequence, end, params):
        rows, rank = self.part.rows, warpgroup.rank()
        key = int32(first + rows * rank)
        latents = self.start_loads(tiles, int32(0), gLatent, gRotary, gDescale, sequence, key, end, params)
        for j in range(n):
            store_widened(subtile(tiles.latent.claim(j), rows, rank), latents)
            wait_group()
            tiles.latent.publish(j)
            tiles.rotary.publish(j, fenced=False)
            tiles.descales.publish(j, fenced=False)
            if j + 1 < n:
                key = int32(key + WARPGROUP * rows)
                latents = self.start_loads(tiles, int32(j + 1), gLatent, gRotary, gDescale, sequence, key, end, params)
        wait_group()  # for start_loads's copies if n is 0
