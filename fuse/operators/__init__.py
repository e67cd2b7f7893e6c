"""Operators written with fuse. Each is its definition, and as fast as one written by hand."""

from .attention import mla_attention, qk_norm_attention, qk_norm_rotary_attention, rotary
from .cross_entropy import linear_cross_entropy
from .experts import expert_linear, expert_mlp, mixture_of_experts
from .linear import (
    fp8_group_linear,
    fp8_linear,
    int8_group_linear,
    int8_linear,
    layer_norm_linear,
    lora_linear,
    lora_linear_by_index,
    rms_norm_linear,
)
from .mlp import gated_mlp, gated_mlp_down, gated_mlp_gelu
from .norms import (
    dropout_residual_layer_norm,
    normalised_step,
    residual_layer_norm,
    residual_rms_norm,
    residual_rms_norm_quantise,
)

__all__ = [
    "dropout_residual_layer_norm",
    "expert_linear",
    "expert_mlp",
    "fp8_group_linear",
    "fp8_linear",
    "gated_mlp",
    "gated_mlp_down",
    "gated_mlp_gelu",
    "int8_group_linear",
    "int8_linear",
    "layer_norm_linear",
    "linear_cross_entropy",
    "lora_linear",
    "lora_linear_by_index",
    "mixture_of_experts",
    "mla_attention",
    "normalised_step",
    "qk_norm_attention",
    "qk_norm_rotary_attention",
    "residual_layer_norm",
    "residual_rms_norm",
    "residual_rms_norm_quantise",
    "rms_norm_linear",
    "rotary",
]
