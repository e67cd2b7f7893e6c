"""Attention and what comes before it."""

from ..calls.fused import kernel
from ..language.functions import attention, concatenate, halves, mean, rsqrt, transpose


@kernel
def qk_norm_attention(q, k, v, gq, gk, eps=1e-6):
    """Attention with normalised queries and keys (RMSNorm of each row). q (..., S, D), k (..., T, D), v (..., T, Dv); the
    leading axes are a batch and heads. Query heads may share key heads (torch's enable_gqa): q (B, H, S, D), k (B, Hk, T, D),
    v (B, Hk, T, Dv), H a multiple of Hk; or with an axis of their own, q (B, Hk, H / Hk, S, D), k (B, Hk, 1, T, D),
    v (B, Hk, 1, T, Dv). gq, gk (D,)."""
    q_normed = q * rsqrt(mean(q * q) + eps) * gq
    k_normed = k * rsqrt(mean(k * k) + eps) * gk
    return attention(q_normed, k_normed, v, q.shape[-1] ** -0.5, enable_gqa=True)


@kernel
def qk_norm_rotary_attention(q, k, v, gq, gk, cos, sin, eps=1e-6):
    """Causal attention with queries and keys that are normalised (RMSNorm of each row) and rotated by their positions.
    q, k (..., S, D), v (..., S, Dv); the leading axes are a batch and heads. Query heads may share key heads, as in
    qk_norm_attention. gq, gk (D,). cos, sin (S, D/2)."""
    q1, q2 = halves(q * rsqrt(mean(q * q) + eps) * gq)
    k1, k2 = halves(k * rsqrt(mean(k * k) + eps) * gk)
    queries = concatenate([q1 * cos - q2 * sin, q2 * cos + q1 * sin])
    keys = concatenate([k1 * cos - k2 * sin, k2 * cos + k1 * sin])
    return attention(queries, keys, v, q.shape[-1] ** -0.5, enable_gqa=True, is_causal=True)


@kernel
def mla_attention(q, latent, wk, wv):
    """Attention whose keys and values are projections of one latent: multi-head latent attention, arXiv 2405.04434.
    q (H, S, D), latent (T, R), wk (H, D, R), wv (H, Dv, R). A head's weights are rows of what nn.Linear holds, (H D, R): the
    latent is multiplied by the weights of all heads at once, and a head's keys are some columns of the product."""
    return attention(q, latent @ transpose(wk), latent @ transpose(wv), q.shape[-1] ** -0.5)


@kernel
def rotary(x, cos, sin):
    """The two halves of each row, rotated: (x1 * cos - x2 * sin, x2 * cos + x1 * sin). x (..., D), cos, sin (..., D/2), which
    may lack leading axes of x or have length 1 there: (S, D/2) for x (B, H, S, D), (S, 1, D/2) for x (B, S, H, D)."""
    first, second = halves(x)
    return concatenate([first * cos - second * sin, second * cos + first * sin])
