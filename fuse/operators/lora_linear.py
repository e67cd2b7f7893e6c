"""A projection with a low-rank adapter, or with several adapters and one of them for each row."""

from ..fused import kernel
from ..language import matmul_by, transpose


@kernel
def lora_linear(x, w, a, b, scale=1.0):
    """x @ w + scale * ((x @ a) @ b): a projection with a low-rank adapter. x (..., K), w (K, N), a (K, R), b (R, N)."""
    return x @ w + scale * ((x @ a) @ b)


@kernel
def lora_linear_by_index(x, w, a, b, index, scale=1.0):
    """x @ w + scale * ((x @ a[index].T) @ b[index]), row by row: a projection with one of several adapters for each row, or
    none where index is negative. x (M, K), w (K, N), a (E, R, K), b (E, R, N), index (M,) of int64 or int32."""
    return x @ w + scale * matmul_by(matmul_by(x, transpose(a), index), b, index)
