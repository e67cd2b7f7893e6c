"""RMSNorm and a projection."""

from ..fused import kernel
from ..language import mean, rsqrt


@kernel
def rms_norm_linear(x, g, w, eps=1e-5):
    """(x * rsqrt(mean(x^2) + eps) * g) @ w: RMSNorm and a projection. x (..., K), g (K,), w (K, N)."""
    return (x * rsqrt(mean(x * x) + eps) * g) @ w
