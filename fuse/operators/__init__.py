"""Operators that are written with fuse: each is its definition, and as fast as one written by hand."""

from .gated_mlp import gated_mlp, gated_mlp_down, gated_mlp_gelu
from .layer_norm_linear import layer_norm_linear
from .lora_linear import lora_linear
from .normalised_transformer import normalised_step
from .residual_norm import residual_layer_norm, residual_rms_norm
from .rms_norm_linear import rms_norm_linear

__all__ = [
    "gated_mlp",
    "gated_mlp_down",
    "gated_mlp_gelu",
    "layer_norm_linear",
    "lora_linear",
    "normalised_step",
    "residual_layer_norm",
    "residual_rms_norm",
    "rms_norm_linear",
]
