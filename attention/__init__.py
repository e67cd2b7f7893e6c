"""FlashAttention from pure Python: `attention.forward(q, k, v, causal=True)`."""

from .forward import forward

__all__ = ["forward"]
