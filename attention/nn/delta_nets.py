"""Layers of the delta rule: gated delta networks and Kimi delta attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import attention
from attention import gates

from ..names import suggests_argument_names
from ..options import check_flag, check_number
from .layers import GatedRMSNorm, check_counts, gate_parameter, reset_rates, reset_time_steps
from .recurrent_layer import RecurrentCache, RecurrentLayer


class DeltaLayer(RecurrentLayer):
    """What both layers of the delta rule share: heads, and the convolution of their projections."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None,
        head_dim: int,
        expand_v: float,
        use_short_conv: bool,
        conv: dict[str, Any],
        allow_neg_eigval: bool,
        factory: dict[str, Any],
    ):
        self.num_heads, self.num_v_heads = num_heads, num_heads if num_v_heads is None else num_v_heads
        check_counts(hidden_size=hidden_size, num_heads=num_heads, num_v_heads=self.num_v_heads, head_dim=head_dim)
        if self.num_v_heads % num_heads:
            raise ValueError(f"num_v_heads: must be a multiple of num_heads: {num_heads=}, num_v_heads={self.num_v_heads}")
        value_dim = round(head_dim * expand_v)
        if value_dim != head_dim * expand_v:
            raise ValueError(f"expand_v: must make a whole number of columns of head_dim: {expand_v=}, {head_dim=}")
        check_flag("use_short_conv", use_short_conv)
        self.head_dim, self.head_v_dim = head_dim, value_dim
        self.key_dim, self.value_dim = num_heads * head_dim, self.num_v_heads * value_dim
        channels, shape = 2 * self.key_dim + self.value_dim, (self.num_v_heads, head_dim, value_dim)
        super().__init__(hidden_size, shape, channels, conv if use_short_conv else None, factory)
        self.allow_neg_eigval = check_flag("allow_neg_eigval", allow_neg_eigval)

    def heads(
        self, qkv: torch.Tensor, cu_seqlens: torch.Tensor | None, cache: RecurrentCache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k (B, S, num_heads, head_dim) and v (B, S, num_v_heads, head_v_dim), after the convolution."""
        qkv = self.convolve(qkv, cu_seqlens, cache)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], -1)
        q, k = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k))
        return q, k, v.unflatten(-1, (-1, self.head_v_dim))

    def extra_repr(self) -> str:
        """The arguments that repr(module) shows."""
        heads = f"num_heads={self.num_heads}, num_v_heads={self.num_v_heads}"
        return f"{heads}, head_dim={self.head_dim}, head_v_dim={self.head_v_dim}, allow_neg_eigval={self.allow_neg_eigval}"


class GatedDeltaNet(DeltaLayer):
    """A gated delta network (Yang, Kautz and Hatamizadeh 2024; Qwen3-Next, Qwen3.5, OLMo hybrid) of x (B, S, hidden_size); the
    result has the same shape:

        q, k, v, z = x W_qkvz      q, k, v = silu(conv(q, k, v))      q, k = q / |q|, k / |k|      b, a = x W_ba
        decay = -exp(A_log) softplus(a + dt_bias)                     beta = sigmoid(b), doubled with allow_neg_eigval
        out   = (norm(delta_rule(q, k, v, beta, decay)) silu(z)) W_out

    num_heads: of queries and keys; num_v_heads: of values, a multiple of num_heads, which it is by default. head_dim: columns
    of a key; a value has head_dim expand_v; both multiples of 16 up to 256. use_gate: is there z? use_short_conv: is there a
    convolution, of conv_size tokens (2 to 4), with a bias if conv_bias? norm_eps: of the norm over a head's columns.
    allow_neg_eigval: negative eigenvalues (Grazzi et al. 2024). dtype, device: of the parameters, but A_log and dt_bias are
    float32.

    Kernels take bfloat16 and float16: give the module and x such a dtype, or call it under torch.autocast. Parameters are
    `in_proj_qkvz.weight` (rows of q, k, v, z), `in_proj_ba.weight` (b, a), `conv1d.weight`, `A_log`, `dt_bias`, `norm.weight`
    and `out_proj.weight`. A_log begins with logarithms of numbers between 0 and 16, softplus(dt_bias) between 0.001 and 0.1.

    forward: see RecurrentLayer. ValueError: heads or columns do not fit."""

    @suggests_argument_names
    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_v_heads: int | None = None,
        head_dim: int = 128,
        expand_v: float = 1.0,
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ):
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        conv = {"kernel_size": conv_size, "bias": conv_bias}
        sizes = hidden_size, num_heads, num_v_heads, head_dim, expand_v
        super().__init__(*sizes, use_short_conv, conv, allow_neg_eigval, factory)
        self.use_gate = check_flag("use_gate", use_gate)
        self.in_proj_qkvz = nn.Linear(hidden_size, self.channels + use_gate * self.value_dim, bias=False, **factory)
        self.in_proj_ba = nn.Linear(hidden_size, 2 * self.num_v_heads, bias=False, **factory)
        self.A_log, self.dt_bias = (gate_parameter(self.num_v_heads, device) for _ in range(2))
        self.norm = GatedRMSNorm(self.head_v_dim, norm_eps, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise A_log and dt_bias, after `to_empty`; the layers have their own reset_parameters."""
        reset_rates(self.A_log, 0, 16)
        reset_time_steps(self.dt_bias)

    def mix(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, cache: RecurrentCache | None) -> torch.Tensor:
        qkv, *gate = self.in_proj_qkvz(x).split([self.channels, *[self.value_dim] * self.use_gate], -1)
        b, a = self.in_proj_ba(x).chunk(2, -1)
        decay = gates.softplus(a, self.A_log, self.dt_bias)
        options = {"beta": gates.beta(b, doubled=self.allow_neg_eigval), "decay": decay, "qk_l2norm": True}
        out = self.recur(attention.delta_rule, *self.heads(qkv, cu_seqlens, cache), cu_seqlens, cache, **options)
        return self.norm(out, *[z.unflatten(-1, (-1, self.head_v_dim)) for z in gate]).flatten(-2)


class KimiDeltaAttention(DeltaLayer):
    """Kimi delta attention (Kimi Linear, Moonshot AI 2025) of x (B, S, hidden_size); the result has the same shape. It is a
    GatedDeltaNet whose keys have a decay for each channel, and whose output gate is a sigmoid:

        q, k, v = silu(conv(x W_qkv))      q, k = q / |q|, k / |k|      beta = sigmoid(x W_b), doubled with allow_neg_eigval
        decay   = -exp(A_log) softplus(f + dt_bias), or with lower_bound, which is negative,
                  lower_bound sigmoid(exp(A_log) (f + dt_bias)), where f = x W_f1 W_f2
        out     = (norm(delta_rule(q, k, v, beta, decay)) sigmoid(x W_g1 W_g2 + bias)) W_out

    Arguments are those of GatedDeltaNet without use_gate, for there is a gate. lower_bound: None, or -5 in models that say so.
    W_f1 and W_g1 have as many columns as a head of values. Each head of values has a beta and decays of its own, also where it
    shares its keys with others.

    Parameters are `in_proj_qkv.weight` (rows of q, k, v), `f_proj.0.weight`, `f_proj.1.weight`, `b_proj.weight`,
    `g_proj.0.weight`, `g_proj.1.weight`, `g_proj.1.bias`, `conv1d.weight`, `A_log` (num_v_heads), `dt_bias` (num_v_heads
    head_dim), `norm.weight` and `out_proj.weight`. A_log begins with logarithms of numbers between 1 and 16, with lower_bound
    with 0; dt_bias as in GatedDeltaNet."""

    @suggests_argument_names
    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_v_heads: int | None = None,
        head_dim: int = 128,
        expand_v: float = 1.0,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ):
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        conv = {"kernel_size": conv_size, "bias": conv_bias}
        sizes = hidden_size, num_heads, num_v_heads, head_dim, expand_v
        super().__init__(*sizes, use_short_conv, conv, allow_neg_eigval, factory)
        bound = check_number("lower_bound", lower_bound)
        if bound is not None and not -math.inf < bound < 0:
            raise ValueError(f"lower_bound: must be negative and finite, or None: {lower_bound=}")
        self.lower_bound, rank = bound, self.head_v_dim
        self.in_proj_qkv = nn.Linear(hidden_size, self.channels, bias=False, **factory)
        self.f_proj, self.g_proj = (
            nn.Sequential(
                nn.Linear(hidden_size, rank, bias=False, **factory), nn.Linear(rank, columns, bias=has_bias, **factory)
            )
            for columns, has_bias in ((self.num_v_heads * head_dim, False), (self.value_dim, True))
        )
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False, **factory)
        self.A_log, self.dt_bias = (gate_parameter(self.num_v_heads * n, device) for n in (1, head_dim))
        self.norm = GatedRMSNorm(self.head_v_dim, norm_eps, "sigmoid", **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise A_log and dt_bias, after `to_empty`; the layers have their own reset_parameters."""
        highest = 16 if self.lower_bound is None else 1  # a sigmoid of 16 (f + dt_bias) would have no gradient
        reset_rates(self.A_log, 1, highest)
        reset_time_steps(self.dt_bias)

    def decay(self, f: torch.Tensor) -> gates.RawGate:
        """The gate of the projections f (B, S, num_v_heads, head_dim)."""
        dt_bias = self.dt_bias.unflatten(0, (-1, self.head_dim))
        if self.lower_bound is None:
            return gates.softplus(f, self.A_log, dt_bias)
        return gates.sigmoid(f, self.A_log, dt_bias, lower=self.lower_bound)

    def mix(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, cache: RecurrentCache | None) -> torch.Tensor:
        b, f = self.b_proj(x), self.f_proj(x).unflatten(-1, (-1, self.head_dim))
        options = {"beta": gates.beta(b, doubled=self.allow_neg_eigval), "decay": self.decay(f), "qk_l2norm": True}
        q, k, v = self.heads(self.in_proj_qkv(x), cu_seqlens, cache)
        out = self.recur(attention.delta_rule, q, k, v, cu_seqlens, cache, **options)
        return self.norm(out, self.g_proj(x).unflatten(-1, (-1, self.head_v_dim))).flatten(-2)

    def extra_repr(self) -> str:
        """The arguments that repr(module) shows."""
        return f"{super().extra_repr()}, lower_bound={self.lower_bound}"
