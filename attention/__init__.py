"""FlashAttention and linear attention from pure Python: `attention.forward(q, k, v, causal=True)`."""

from .forward import forward
from .recurrent.based import based
from .recurrent.hedgehog import hedgehog
from .recurrent.step import linear_step

__all__ = ["based", "forward", "hedgehog", "linear_step"]
