"""The two products over latents on Hopper, by what a cache holds, as objects with the same methods."""

from ops import load, warpgroup
from tiles import dtype, fp16, fp32, inlined, ring, rt, static, sv

KV = 64  # keys of a tile
UNITS = rt(16, KV, fp32).row_vec


@static
class Same:
    """Latents are of queries' dtype. wide: which that is."""

    wide: dtype

    def __str__(self):
        return str(self.wide)

    @property
    def takes(self) -> dtype:
        """What the products take latents, queries and weights as."""
        return self.wide

    def rings(self, stages: int, readers: int, writers: int) -> dict[str, ring]:
        """What brings the numbers by which latents are multiplied."""
        return {}

    @inlined
    def queries(self, x):
        """What the products take of some columns of queries."""
        return x

    @inlined
    def scores(self, q, q_rotary, latent, rotary, units):
        """Those of a tile, in flight."""
        return warpgroup.mma_ABt(warpgroup.mm_ABt(q, latent), q_rotary, rotary)

    @inlined
    def units(self, pipes, j):
        """What tile j's latents are multiplied by."""
        return 1.0

    @inlined
    def weights(self, p, units):
        """Weights as the product with values takes them."""
        return self.wide(p)


@static
class Widened(Same):
    """Latents are of fp8, and lie in shared memory as fp16; each has a number to multiply it by: so are the
    scores of the unrotated columns, before the others join them, and the weights. No latent is rounded again. Queries become
    fp16."""

    def __str__(self):
        return f"{self.wide} of fp8"

    @property
    def takes(self) -> dtype:
        return fp16

    def rings(self, stages: int, readers: int, writers: int) -> dict[str, ring]:
        return {"units": ring(sv(KV, fp32), stages, readers, writers=writers)}

    @inlined
    def queries(self, x):
        return fp16(x)

    @inlined
    def scores(self, q, q_rotary, latent, rotary, units):
        return warpgroup.mma_ABt(warpgroup.wait(warpgroup.mm_ABt(q, latent)) * units, q_rotary, rotary)

    @inlined
    def units(self, pipes, j):
        found = load(pipes.units.wait(j), UNITS)
        pipes.units.release(j)
        return found

    @inlined
    def weights(self, p, units):
        return fp16(p * units)
