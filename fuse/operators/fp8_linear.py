"""A projection whose weights are fp8."""

from ..fused import kernel


@kernel
def fp8_linear(x, w, scale):
    """x @ (w * scale): a projection with fp8 (e4m3) weights and a scale for each column. The weights are read as fp8, half the
    bytes of bf16, and fastest as nn.Linear holds them. x (..., K), w (K, N) of fp8, scale (N,)."""
    return x @ (w * scale)
