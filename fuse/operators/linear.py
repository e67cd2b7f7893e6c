"""Projections: after a norm, with low-rank adapters, with weights of fp8 and int8, whose scales are of columns or of groups."""

from ..calls.fused import kernel
from ..language.functions import matmul_by, mean, repeat, rsqrt, transpose


@kernel
def rms_norm_linear(x, g, w, eps=1e-5):
    """(x * rsqrt(mean(x^2) + eps) * g) @ w: RMSNorm and a projection. x (..., K), g (K,), w (K, N)."""
    return (x * rsqrt(mean(x * x) + eps) * g) @ w


@kernel
def layer_norm_linear(x, g, b, w, eps=1e-5):
    """((x - mean(x)) * rsqrt(var(x) + eps) * g + b) @ w: layer norm and a projection. x (..., K), g, b (K,), w (K, N)."""
    centred = x - mean(x)
    return (centred * rsqrt(mean(centred * centred) + eps) * g + b) @ w


@kernel
def lora_linear(x, w, a, b, scale=1.0):
    """x @ w + scale * ((x @ a) @ b): a projection with a low-rank adapter. x (..., K), w (K, N), a (K, R), b (R, N)."""
    return x @ w + scale * ((x @ a) @ b)


@kernel
def lora_linear_by_index(x, w, a, b, index, scale=1.0):
    """x @ w + scale * ((x @ a[index].T) @ b[index]), row by row: a projection with one of several adapters for each row, or
    none where index is negative. x (M, K), w (K, N), a (E, R, K), b (E, R, N), index (M,) of int64 or int32."""
    return x @ w + scale * matmul_by(matmul_by(x, transpose(a), index), b, index)


@kernel
def fp8_linear(x, w, scale):
    """x @ (w * scale): a projection with fp8 (e4m3) weights and a scale for each column. The weights are read as fp8, half the
    bytes of bf16, and fastest as nn.Linear holds them. x (..., K), w (K, N) of fp8, scale (N,)."""
    return x @ (w * scale)


@kernel
def int8_linear(x, w, scale):
    """x @ (w * scale): a projection with int8 weights and a scale for each column. The weights are read as int8, half the bytes
    of bf16, and fastest as nn.Linear holds them. x (..., K), w (K, N) of int8, scale (N,)."""
    return x @ (w * scale)


@kernel
def fp8_group_linear(x, w, scale):
    """x @ (w * scale[k // group]): a projection with fp8 (e4m3) weights and a scale for each column and each group along k
    (group-wise quantisation). Up to 64 rows are one kernel, which reads the weights as fp8, if they lie as nn.Linear holds
    them, scale as (K/128, N) in memory, and groups are multiples of 64. x (..., K), w (K, N) of fp8, scale (K/128, N): groups
    of 128, of 64 with (K / 64, N), and so on."""
    return x @ (w * repeat(scale, w.shape[0] // scale.shape[0], -2))


@kernel
def int8_group_linear(x, w, scale):
    """x @ (w * scale[k // group]): a projection with int8 weights and a scale for each column and each group along k
    (group-wise quantisation). Up to 64 rows are one kernel, which reads the weights as int8, if they lie as nn.Linear holds
    them, scale as (K/128, N) in memory, and groups are multiples of 64. x (..., K), w (K, N) of int8, scale (K/128, N): groups
    of 128, of 64 with (K / 64, N), and so on."""
    return x @ (w * repeat(scale, w.shape[0] // scale.shape[0], -2))
