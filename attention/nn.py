"""Attention as a torch module: `from attention.nn import Attention`. torch comes with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import attention

from .options import positive


class Attention(nn.Module):
    """Self-attention of x (B, S, dim), which it gives back in that shape:

        q, k, v = x W            `heads` heads of queries, `kv_heads` of keys and of values, `head_dim` columns each
        q, k    = norm(q), norm(k)               with qk_norm: RMS norms of each head's rows
        q, k    = turned by their positions      with rotary
        out     = softmax(q k^T / sqrt(head_dim)) v W_out      attention.forward, differentiable

    dim: columns of x. heads, kv_heads: heads is a multiple of kv_heads (GQA, MQA), which is heads by default. head_dim: a
    multiple of 8 up to 256, by default dim // heads. causal, window, softcap, scale: attention.forward's. sink: learn a logit
    for each head, whose exp joins its sums of weights; it begins at 0. qk_norm: learn weights (head_dim), eps is 1e-6. rotary:
    the base of the angles, 10000 in most models, position / base^(2 i / head_dim) for the pair of columns i and
    head_dim / 2 + i; None leaves positions out. bias: have the projections one. dtype, device: of the parameters.

    Kernels take bfloat16 and float16: give the module and x such a dtype, or call it under torch.autocast. Parameters are
    `project.weight` (W^T, the rows of all queries first, then keys, then values), `out.weight`, `q_norm.weight`,
    `k_norm.weight` and `sink`.

    ValueError: heads, columns or what attention.forward refuses."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        sink: bool = False,
        qk_norm: bool = False,
        rotary: float | None = None,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: must be a multiple of kv_heads: {heads=}, {kv_heads=}")
        if head_dim is None and dim % heads:
            raise ValueError(f"dim: must be a multiple of heads where head_dim is not given: {dim=}, {heads=}")
        self.head_dim = head_dim or dim // heads
        if self.head_dim % 8 or not 8 <= self.head_dim <= 256:
            raise ValueError(f"head_dim: must be a multiple of 8, from 8 to 256: head_dim={self.head_dim}")
        self.rotary = positive("rotary", rotary)
        self.options = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.project = nn.Linear(dim, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=bias, **place)
        self.out = nn.Linear(self.heads * self.head_dim, dim, bias=bias, **place)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, 1e-6, **place) if qk_norm else None for _ in range(2))
        self.sink = nn.Parameter(torch.zeros(heads, device=device)) if sink else None

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        """See the class. positions: of the tokens, (S) or (B, S), for rotary; by default from 0 on. options: further ones of
        attention.forward for this call, such as mask, aux, bias or cu_seqlens (x is then (1, S, dim), and positions begin anew
        with each sequence)."""
        heads = self.project(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], -2)  # views, and one gradient of all three
        if self.q_norm is not None and self.k_norm is not None:
            if self.rotary is None:  # attention normalises
                options |= {"q_norm": self.q_norm.weight, "k_norm": self.k_norm.weight, "norm_eps": self.q_norm.eps}
            else:
                q, k = normed(q, self.q_norm), normed(k, self.k_norm)
        if self.rotary is not None:
            if positions is None:
                positions = torch.arange(x.shape[1], device=x.device)
            cos, sin = angles(positions, self.head_dim, self.rotary)
            q, k = turned(q, cos, sin), turned(k, cos, sin)
        out = self.attend(q.to(v.dtype), k.to(v.dtype), v, **self.options, **options)
        return self.out(out.flatten(-2))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        """attention.forward of q (B, S, heads, head_dim), k and v (B, S, kv_heads, head_dim)."""
        sink = None if self.sink is None else self.sink.float()
        return attention.forward(q, k, v, sink=sink, **options)

    def extra_repr(self) -> str:
        """What is printed beside the parameters."""
        said = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "rotary": self.rotary}
        return ", ".join(f"{name}={value}" for name, value in (said | self.options).items() if value not in (None, False))


def normed(x: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
    """The norm of x, its weights as x is: torch has one kernel of that, and under autocast x is not what they are."""
    return nn.functional.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)


def angles(positions: torch.Tensor, head_dim: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of position / base^(2 i / head_dim), each (.., S, 1, head_dim / 2) of positions (.., S), in float32."""
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angle = positions.float()[..., None, None] * base ** (-pairs / head_dim)
    return angle.cos(), angle.sin()


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The two halves of each row as pairs, turned: (x1 cos - x2 sin, x2 cos + x1 sin). x (B, S, H, D), in its dtype."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
