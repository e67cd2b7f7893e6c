"""Norms of rows, and what comes before them: a residual, dropout, a step of the normalised transformer."""

from tiles import fp8e4m3, fp32

from ..calls.fused import kernel
from ..language.functions import abs, cast, dropout, max, maximum, mean, rsqrt, sum


@kernel
def residual_rms_norm(x, residual, g, eps=1e-5):
    """h = x + residual, and its RMSNorm: (norm, h). x, residual (..., D), g (D,)."""
    h = x + residual
    return h * rsqrt(mean(h * h) + eps) * g, h


@kernel
def residual_rms_norm_quantise(x, residual, g, eps=1e-5):
    """h = x + residual, and its RMSNorm in fp8 (e4m3) with a float32 scale for each row, so that the largest number of a row
    becomes 448: (norm / scale, scale, h). x, residual (..., D), g (D,)."""
    h = x + residual
    norm = h * rsqrt(mean(h * h) + eps) * g
    scale = maximum(max(abs(norm)) / 448, 1e-12)
    return cast(norm * (1 / scale), fp8e4m3), cast(scale, fp32), h


@kernel
def residual_layer_norm(x, residual, g, b, eps=1e-5):
    """h = x + residual, and its layer norm: (norm, h). x, residual (..., D), g, b (D,)."""
    h = x + residual
    centred = h - mean(h)
    return centred * rsqrt(mean(centred * centred) + eps) * g + b, h


@kernel
def dropout_residual_layer_norm(x, residual, g, b, seed, p=0.1, eps=1e-5):
    """h = residual + dropout(x, p, seed), and its layer norm: (norm, h). x, residual (..., D), g, b (D,), seed (1,) of int64.
    seed is an array, so that a captured call draws anew."""
    h = residual + dropout(x, p, seed)
    centred = h - mean(h)
    return centred * rsqrt(mean(centred * centred) + eps) * g + b, h


@kernel
def normalised_step(x, h, alpha):
    """norm(x + alpha * (norm(h) - x)) with norm(t) = t / |t|: a step of the normalised transformer. x, h (..., D), alpha (D,).
    Source: nGPT, arXiv 2410.01131."""
    towards = h * rsqrt(sum(h * h))
    stepped = x + alpha * (towards - x)
    return stepped * rsqrt(sum(stepped * stepped))
