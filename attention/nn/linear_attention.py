"""The layer of gated linear attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import attention
from attention import gates

from ..names import suggests_argument_names
from ..options import check_flag, check_positive
from .layers import GatedRMSNorm, check_counts
from .recurrent_layer import RecurrentCache, RecurrentLayer


class GatedLinearAttention(RecurrentLayer):
    """Gated linear attention (Yang et al. 2024) of x (B, S, hidden_size); the result has the same shape:

        q, k, v, z = x W_qkvz            q, k, v = silu(conv(q, k, v)) with use_short_conv
        decay = log(sigmoid(x W_g1 W_g2 + bias)) / gate_logit_normalizer       for each channel of the keys
        out   = (norm(gla(q, k, v, decay)) silu(z)) W_out

    num_heads heads share hidden_size expand_k columns of queries and keys, and hidden_size expand_v of values; columns of a
    head are multiples of 16 up to 256. use_gate: is there z? use_short_conv: is there a convolution, of conv_size tokens (2 to
    4), with a bias if conv_bias? gate_low_rank_dim: columns of W_g1. norm_eps: of the norm over a head's columns. dtype,
    device: of the parameters.

    Kernels take bfloat16 and float16: give the module and x such a dtype, or call it under torch.autocast. Parameters are
    `in_proj_qkvz.weight` (rows of q, k, v, z), `gk_proj.0.weight`, `gk_proj.1.weight`, `gk_proj.1.bias`, `norm.weight`,
    `out_proj.weight`, and with use_short_conv `conv1d.weight`.

    forward: see RecurrentLayer. ValueError: heads or columns do not fit."""

    column_arguments = "expand_k", "expand_v"

    @suggests_argument_names
    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 4,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        use_gate: bool = True,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        gate_logit_normalizer: float = 16.0,
        gate_low_rank_dim: int = 16,
        norm_eps: float = 1e-5,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ):
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        check_counts(hidden_size=hidden_size, num_heads=num_heads, gate_low_rank_dim=gate_low_rank_dim)
        self.key_dim, self.value_dim = round(hidden_size * expand_k), round(hidden_size * expand_v)
        if self.key_dim % num_heads or self.value_dim % num_heads:
            columns = f"columns of queries: {self.key_dim}, of values: {self.value_dim}"
            raise ValueError(f"num_heads: must divide hidden_size expand_k and hidden_size expand_v: {num_heads=}, {columns}")
        self.num_heads, self.head_dim, self.head_v_dim = num_heads, self.key_dim // num_heads, self.value_dim // num_heads
        conv = {"kernel_size": conv_size, "bias": conv_bias} if check_flag("use_short_conv", use_short_conv) else None
        shape, channels = (num_heads, self.head_dim, self.head_v_dim), 2 * self.key_dim + self.value_dim
        super().__init__(hidden_size, shape, channels, conv, factory)
        check_positive("gate_logit_normalizer", gate_logit_normalizer)
        self.use_gate, self.gate_logit_normalizer = check_flag("use_gate", use_gate), gate_logit_normalizer
        self.in_proj_qkvz = nn.Linear(hidden_size, channels + use_gate * self.value_dim, bias=False, **factory)
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False, **factory),
            nn.Linear(gate_low_rank_dim, self.key_dim, bias=True, **factory),
        )
        self.norm = GatedRMSNorm(self.head_v_dim, norm_eps, **factory)

    def mix(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, cache: RecurrentCache | None) -> torch.Tensor:
        qkv, *gate = self.in_proj_qkvz(x).split([self.channels, *[self.value_dim] * self.use_gate], -1)
        if self.conv1d is not None:
            qkv = self.convolve(qkv, cu_seqlens, cache)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], -1)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in (q, k, v))
        logits = self.gk_proj(x).unflatten(-1, (self.num_heads, -1))
        decay = gates.logsigmoid(logits, divisor=self.gate_logit_normalizer)
        out = self.recur(attention.linear, q, k, v, cu_seqlens, cache, decay=decay)
        return self.norm(out, *[z.unflatten(-1, (self.num_heads, -1)) for z in gate]).flatten(-2)

    def extra_repr(self) -> str:
        """The arguments that repr(module) shows."""
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, head_v_dim={self.head_v_dim}"
