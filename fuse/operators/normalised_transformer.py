"""The normalised transformer."""

from ..fused import kernel
from ..language import rsqrt, sum


@kernel
def normalised_step(x, h, alpha):
    """norm(x + alpha * (norm(h) - x)) with norm(t) = t / |t|: a step of the normalised transformer. x, h (..., D), alpha (D,).
    Source: nGPT, arXiv 2410.01131."""
    towards = h * rsqrt(sum(h * h))
    stepped = x + alpha * (towards - x)
    return stepped * rsqrt(sum(stepped * stepped))
