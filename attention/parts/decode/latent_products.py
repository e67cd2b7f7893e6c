"""The two products over latents on Hopper, S = Q K^T and O += P V, by what the cache holds, as classes with the same
methods."""

from ops import load, warpgroup
from tiles import dtype, fp16, fp32, inlined, ring, rt, static, sv

KV = 64  # keys of a tile
DESCALES = rt(16, KV, fp32).row_vec


@static
class LatentProducts:
    """The cache has the dtype of the queries."""

    q_dtype: dtype

    def __str__(self):
        return str(self.q_dtype)

    @property
    def mma_dtype(self) -> dtype:
        """The dtype of the operands of both products."""
        return self.q_dtype

    def descale_rings(self, stages: int, readers: int, writers: int) -> dict[str, ring]:
        """{name: ring} of the latents' descales, {} if there are none."""
        return {}

    @inlined
    def convert_q(self, x):
        """Some columns of the queries, in the products' dtype."""
        return x

    @inlined
    def mma_qk(self, latent, rotary, tiles, j):
        """The scores of tile j, pending."""
        return warpgroup.mma_ABt(warpgroup.mm_ABt(tiles.q, latent), tiles.q_rotary, rotary)

    @inlined
    def convert_p(self, p, tiles, j):
        """The weights of tile j, in the products' dtype."""
        return self.q_dtype(p)


@static
class Fp8LatentProducts(LatentProducts):
    """The cache is fp8, and fp16 in shared memory. Each latent has a descale, which multiplies the scores of its unrotated
    columns and its weight, not the latent itself, which so is not rounded again. Queries become fp16."""

    def __str__(self):
        return f"{self.q_dtype} of fp8"

    @property
    def mma_dtype(self) -> dtype:
        return fp16

    def descale_rings(self, stages: int, readers: int, writers: int) -> dict[str, ring]:
        return {"descales": ring(sv(KV, fp32), stages, readers, writers=writers)}

    @inlined
    def convert_q(self, x):
        return fp16(x)

    @inlined
    def mma_qk(self, latent, rotary, tiles, j):
        s = warpgroup.wait(warpgroup.mm_ABt(tiles.q, latent)) * load(tiles.descales.wait(j), DESCALES)
        return warpgroup.mma_ABt(s, tiles.q_rotary, rotary)

    @inlined
    def convert_p(self, p, tiles, j):
        descales = load(tiles.descales.wait(j), DESCALES)  # loaded again: during the softmax they would take 16 registers
        tiles.descales.release(j)
        return fp16(p * descales)
