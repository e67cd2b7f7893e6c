"""A projection with a low-rank adapter."""

from ..fused import kernel


@kernel
def lora_linear(x, w, a, b, scale=1.0):
    """x @ w + scale * ((x @ a) @ b): a projection with a low-rank adapter. x (..., K), w (K, N), a (K, R), b (R, N)."""
    return x @ w + scale * ((x @ a) @ b)
