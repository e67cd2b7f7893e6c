"""Attention and recurrent layers as torch modules: `from attention.nn import GatedDeltaNet`. torch comes with it."""

from .attention_cache import AttentionCache
from .delta_nets import GatedDeltaNet, KimiDeltaAttention
from .layers import GatedRMSNorm, ShortConv
from .linear_attention import GatedLinearAttention
from .mamba import Mamba2
from .recurrent_layer import RecurrentCache, RecurrentLayer
from .softmax_attention import Attention
from .softmax_attention import ProjectedAttention as ProjectedAttention
from .softmax_attention import angles as angles
from .transformers_layers import from_transformers, to_transformers

__all__ = [
    "Attention",
    "AttentionCache",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GatedRMSNorm",
    "KimiDeltaAttention",
    "Mamba2",
    "RecurrentCache",
    "RecurrentLayer",
    "ShortConv",
    "from_transformers",
    "to_transformers",
]
