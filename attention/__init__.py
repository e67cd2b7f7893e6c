"""FlashAttention and linear attention from pure Python: `attention.forward(q, k, v, causal=True)`."""

from .recurrent.based import based
from .recurrent.delta_rule import delta_rule
from .recurrent.hedgehog import hedgehog
from .recurrent.linear import gla, lightning, linear, retention
from .recurrent.mamba2 import mamba2
from .recurrent.step import linear_step
from .softmax.forward import forward

__all__ = ["based", "delta_rule", "forward", "gla", "hedgehog", "lightning", "linear", "linear_step", "mamba2", "retention"]
