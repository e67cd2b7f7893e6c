"""Operators written with fuse. Each is its definition, and as fast as one written by hand."""

from .attention import mla_attention, qk_norm_attention, qk_norm_rotary_attention
from .expert_linear import expert_linear, expert_mlp, mixture_of_experts
from .fp8_linear import fp8_linear
from .gated_mlp import gated_mlp, gated_mlp_down, gated_mlp_gelu
from .layer_norm_linear import layer_norm_linear
from .linear_cross_entropy import linear_cross_entropy
from .lora_linear import lora_linear, lora_linear_by_index
from .normalised_transformer import normalised_step
from .residual_norm import dropout_residual_layer_norm, residual_layer_norm, residual_rms_norm, residual_rms_norm_quantise
from .rms_norm_linear import rms_norm_linear
from .rotary import rotary

__all__ = [
    "dropout_residual_layer_norm",
    "expert_linear",
    "expert_mlp",
    "fp8_linear",
    "gated_mlp",
    "gated_mlp_down",
    "gated_mlp_gelu",
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
