"""Attention and what stands before it."""

from ..fused import kernel
from ..language import attention, mean, rsqrt, transpose


@kernel
def qk_norm_attention(q, k, v, gq, gk, eps=1e-6):
    """Attention whose queries and keys are normalised, RMSNorm by rows. q (..., S, D), k (..., T, D), v (..., T, Dv), the
    leading axes a batch and heads; gq, gk (D,)."""
    q_normed = q * rsqrt(mean(q * q) + eps) * gq
    k_normed = k * rsqrt(mean(k * k) + eps) * gk
    return attention(q_normed, k_normed, v, q.shape[-1] ** -0.5)


@kernel
def mla_attention(q, latent, wk, wv):
    """Attention whose keys and values are projections of one latent: multi-head latent attention, arXiv 2405.04434.
    q (H, S, D), latent (T, R), wk (H, D, R), wv (H, Dv, R). A head's weights are rows of what nn.Linear holds, (H D, R): the
    latent is multiplied by those of all heads at once, and a head's keys are some of the product's columns."""
    return attention(q, latent @ transpose(wk), latent @ transpose(wv), q.shape[-1] ** -0.5)
