"""A residual and its norm."""

from ..fused import kernel
from ..language import mean, rsqrt


@kernel
def residual_rms_norm(x, residual, g, eps=1e-5):
    """h = x + residual, and its RMSNorm: (norm, h). x, residual (..., D), g (D,)."""
    h = x + residual
    return h * rsqrt(mean(h * h) + eps) * g, h


@kernel
def residual_layer_norm(x, residual, g, b, eps=1e-5):
    """h = x + residual, and its layer norm: (norm, h). x, residual (..., D), g, b (D,)."""
    h = x + residual
    centred = h - mean(h)
    return centred * rsqrt(mean(centred * centred) + eps) * g + b, h
