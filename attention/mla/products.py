"""The two products over latents on Hopper, by what a cache holds, as objects with the same methods."""

from ops import load, warpgroup
from tiles import dtype, fp16, fp32, inlined, ring, rt, static, sv

KV = 64  # keys of a tile
UNITS = rt(16, KV, fp32).row_vec


@static
class LatentProducts:
    """The cache has the dtype of the queries, `wide`."""

    q_dtype: dtype

    def __str__(self):
        return str(self.q_dtype)

    @property
    def mma_dtype(self) -> dtype:
        """The dtype of the factors of both products."""
        return self.q_dtype

    def descale_rings(self, stages: int, readers: int, writers: int) -> dict[str, ring]:
        """{name: ring} of what brings the numbers that latents are multiplied by; none here."""
        return {}

    @inlined
    def convert_q(self, x):
        """Some columns of the queries, in the dtype that the products take."""
        return x

    @inlined
    def mma_qk(self, latent, rotary, pipes, j):
        """The scores of tile j, pending."""
        return warpgroup.mma_ABt(warpgroup.mm_ABt(pipes.q, latent), pipes.q_rotary, rotary)

    @inlined
    def convert_p(self, p, pipes, j):
        """The weights of tile j, in the dtype that the product with the values takes."""
        return self.q_dtype(p)


@static
class Fp8LatentProducts(LatentProducts):
    """The cache is fp8, and lies in shared memory as fp16. Each latent has a number to be multiplied by. Instead of the
    latent, the scores of its unrotated columns and its weight are multiplied, so that no latent is rounded again. Queries
    become fp16."""

    def __str__(self):
        return f"{self.q_dtype} of fp8"

    @property
    def mma_dtype(self) -> dtype:
        return fp16

    def descale_rings(self, stages: int, readers: int, writers: int) -> dict[str, ring]:
        return {"units": ring(sv(KV, fp32), stages, readers, writers=writers)}

    @inlined
    def convert_q(self, x):
        return fp16(x)

    @inlined
    def mma_qk(self, latent, rotary, pipes, j):
        s = warpgroup.wait(warpgroup.mm_ABt(pipes.q, latent)) * load(pipes.units.wait(j), UNITS)
        return warpgroup.mma_ABt(s, pipes.q_rotary, rotary)

    @inlined
    def convert_p(self, p, pipes, j):
        units = load(pipes.units.wait(j), UNITS)  # again: over the softmax they would take 16 registers
        pipes.units.release(j)
        return fp16(p * units)
