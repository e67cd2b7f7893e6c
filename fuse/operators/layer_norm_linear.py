"""Layer norm and a projection."""

from ..fused import kernel
from ..language import mean, rsqrt


@kernel
def layer_norm_linear(x, g, b, w, eps=1e-5):
    """((x - mean(x)) * rsqrt(var(x) + eps) * g + b) @ w: layer norm and a projection. x (..., K), g, b (K,), w (K, N)."""
    centred = x - mean(x)
    return (centred * rsqrt(mean(centred * centred) + eps) * g + b) @ w
