"""Arguments for the operators of fuse.operators, and the card without wgmma that stands for those since Ampere."""

import numpy as np

from fuse.planning.cost import Card
from tiles import bf16, fp8e4m3, int8

A100 = Card("NVIDIA A100", 108, 1.7e12, 2.2e14, 1e13, wgmma=False)
K, N, R = 136, 72, 16
SHAPES = {  # of the arguments, but for the rows of what has them, "m"
    "dropout_residual_layer_norm": [("m", K), ("m", K), (K,), (K,), (1,)],
    "expert_linear": [(2, "m", K), (2, K, N)],
    "expert_mlp": [(2, "m", K), (2, K, N), (2, K, N), (2, N, K)],
    "fp8_group_linear": [("m", 128), (128, N), (2, N)],
    "fp8_linear": [("m", K), (K, N), (N,)],
    "gated_mlp": [("m", K), (K, N), (K, N)],
    "gated_mlp_gelu": [("m", K), (K, N), (K, N)],
    "gated_mlp_down": [("m", K), (K, N), (K, N), (N, K)],
    "int8_group_linear": [("m", 128), (128, N), (2, N)],
    "int8_linear": [("m", K), (K, N), (N,)],
    "layer_norm_linear": [("m", K), (K,), (K,), (K, N)],
    "linear_cross_entropy": [("m", K), (K, N), ("m",)],
    "lora_linear": [("m", K), (K, N), (K, R), (R, N)],
    "lora_linear_by_index": [("m", K), (K, N), (3, R, K), (3, R, N), ("m",)],
    "mixture_of_experts": [("m", 40), (40, 8), (8, 128, 40), (8, 128, 40), (8, 128, 40)],
    "mla_attention": [(2, "m", 16), (40, K), (2, 16, K), (2, 24, K)],
    "normalised_step": [("m", K), ("m", K), (K,)],
    "qk_norm_attention": [(2, "m", 16), (2, 40, 16), (2, 40, 24), (16,), (16,)],
    "qk_norm_rotary_attention": [(2, "m", 16), (2, "m", 16), (2, "m", 24), (16,), (16,), ("m", 8), ("m", 8)],
    "residual_layer_norm": [("m", K), ("m", K), (K,), (K,)],
    "residual_rms_norm": [("m", K), ("m", K), (K,)],
    "residual_rms_norm_quantise": [("m", K), ("m", K), (K,)],
    "rms_norm_linear": [("m", K), (K,), (K, N)],
    "rotary": [("m", K), ("m", K // 2), ("m", K // 2)],
}

INDEX = np.dtype(np.int64)
DTYPES = {
    ("dropout_residual_layer_norm", 4): INDEX,
    ("fp8_group_linear", 1): fp8e4m3.np,
    ("fp8_linear", 1): fp8e4m3.np,
    ("int8_group_linear", 1): int8.np,
    ("int8_linear", 1): int8.np,
    ("linear_cross_entropy", 2): INDEX,
    ("lora_linear_by_index", 4): INDEX,
}  # of arguments that have another than the first


def sample(name, rows, dtype, seed=0):
    """Random arguments for the operator `name`, which has so many rows."""
    rng = np.random.default_rng(seed)
    shapes = [tuple(rows if n == "m" else n for n in shape) for shape in SHAPES[name]]
    result = [rng.standard_normal(shape) / shape[0] ** 0.25 for shape in shapes]
    dtypes = [DTYPES.get((name, n), dtype.np) for n in range(len(result))]
    return [(x * (32 if one == int8.np else 1)).astype(one) for x, one in zip(result, dtypes)]


def normal(*shape):
    """Normal numbers in bf16, the same in each call."""
    return np.random.default_rng(0).standard_normal(shape).astype(bf16.np)
