"""A projection whose weights are fp8."""

from ..fused import kernel


@kernel
def fp8_linear(x, w, scale):
    """x @ (w * scale): a projection whose weights are fp8 (e4m3), of which each column has a scale. They are read as they lie,
    half of what others take, and best as nn.Linear has them. x (..., K), w (K, N) of fp8, scale (N,)."""
    return x @ (w * scale)
