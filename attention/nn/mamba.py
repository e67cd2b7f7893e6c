"""The sequence mixer of a Mamba-2 block as a torch module: projections, short convolution, state space scan, gated norm."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import attention

from ..names import suggests_argument_names
from ..options import check_flag
from ..plans.recurrent.recurrent_checks import make_dt_options
from .layers import GatedRMSNorm, check_counts, gate_parameter, reset_rates, reset_time_steps
from .recurrent_layer import RecurrentCache, RecurrentLayer


class Mamba2(RecurrentLayer):
    """Mamba-2 (Dao and Gu 2024; Nemotron-H, Bamba) of x (B, S, d_model); the result has the same shape:

        z, x, B, C, dt = x W_in            x, B, C = silu(conv(x, B, C))
        y   = mamba2(x, clip(softplus(dt + dt_bias), dt_limit), A = -exp(A_log), B, C, D)
        out = norm(y silu(z)) W_out        norm(y) silu(z) with norm_before_gate

    There are expand d_model columns of x and z, in heads of headdim; B and C have ngroups heads of d_state; headdim and d_state
    are multiples of 16 up to 256. d_conv: tokens of the convolution, 2 to 4; conv_bias: has it a bias? The norm is over the
    columns of a group; rmsnorm=False leaves it out: y silu(z). D_has_hdim: is there a D for each column? dt_limit: of time
    steps, (low, high). bias: do the projections have one? dtype, device: of the parameters, but A_log, dt_bias and D are
    float32.

    Kernels take bfloat16 and float16: give the module and x such a dtype, or call it under torch.autocast. Arguments and
    parameters have mamba_ssm's names: `in_proj.weight` (rows of z, x, B, C, dt), `conv1d.weight`, which there is (channels, 1,
    d_conv), `conv1d.bias`, `A_log`, `dt_bias`, `D`, `norm.weight`, `out_proj.weight`. A_log begins with logarithms of numbers
    between 1 and 16, softplus(dt_bias) between 0.001 and 0.1, D with 1.

    forward: see RecurrentLayer; the cache's state is (N, heads, d_state, headdim). ValueError: heads or columns do not fit."""

    column_arguments, width_argument = ("d_state", "headdim"), "d_conv"

    @suggests_argument_names
    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 128,
        d_conv: int = 4,
        expand: float = 2,
        headdim: int = 64,
        ngroups: int = 1,
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        norm_eps: float = 1e-5,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        bias: bool = False,
        conv_bias: bool = True,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ):
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        check_counts(d_model=d_model, d_state=d_state, headdim=headdim, ngroups=ngroups)
        self.d_inner, self.headdim, self.d_state, self.ngroups = round(d_model * expand), headdim, d_state, ngroups
        self.nheads = self.d_inner // headdim
        if self.d_inner != self.nheads * headdim:
            raise ValueError(f"headdim: must divide expand d_model, {self.d_inner}: {headdim=}, {expand=}, {d_model=}")
        if self.nheads % ngroups:
            raise ValueError(f"ngroups: must divide the number of heads, {self.nheads}: {ngroups=}")
        self.dt_limit = make_dt_options(True, dt_limit).limits
        channels, shape = self.d_inner + 2 * ngroups * d_state, (self.nheads, d_state, headdim)
        super().__init__(d_model, shape, channels, {"kernel_size": d_conv, "bias": conv_bias}, factory, bias)
        self.in_proj = nn.Linear(d_model, self.d_inner + channels + self.nheads, bias=bias, **factory)
        self.A_log, self.dt_bias = (gate_parameter(self.nheads, device) for _ in range(2))
        self.D = gate_parameter(self.d_inner if check_flag("D_has_hdim", D_has_hdim) else self.nheads, device)
        options = norm_eps, "silu", check_flag("norm_before_gate", norm_before_gate), ngroups
        self.norm = GatedRMSNorm(self.d_inner, *options, **factory) if check_flag("rmsnorm", rmsnorm) else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise A_log, dt_bias and D, after `to_empty`; the layers have their own reset_parameters."""
        reset_rates(self.A_log, 1, 16)
        reset_time_steps(self.dt_bias)
        nn.init.ones_(self.D)

    def mix(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, cache: RecurrentCache | None) -> torch.Tensor:
        z, xBC, dt = self.in_proj(x).split([self.d_inner, self.channels, self.nheads], -1)
        groups = self.ngroups * self.d_state
        values, B, C = self.convolve(xBC, cu_seqlens, cache).split([self.d_inner, groups, groups], -1)
        values = values.unflatten(-1, (-1, self.headdim))
        B, C = (y.unflatten(-1, (self.ngroups, -1)) for y in (B, C))
        y = self.scan(values, dt, B, C, cu_seqlens, cache).flatten(-2)
        return y * F.silu(z) if self.norm is None else self.norm(y, z)

    def scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        cache: RecurrentCache | None,
    ) -> torch.Tensor:
        """attention.mamba2 of x (B, S, heads, headdim), from the cache's state on. One token is a step: linear_step."""
        A, D = -self.A_log.float().exp(), self.D.float()
        D = D.unflatten(0, (-1, self.headdim)) if len(D) > self.nheads else D
        options = {
            "D": D,
            "dt_bias": self.dt_bias.float(),
            "dt_softplus": True,
            "dt_limit": self.dt_limit,
            "cu_seqlens": cu_seqlens,
        }
        if cache is None or not x.numel():  # without a token the cache stays as it is
            return attention.mamba2(x, dt, A, B, C, **options)
        if cu_seqlens is None and x.shape[1] == 1:
            dt = F.softplus(dt[:, 0].float() + self.dt_bias.float()).clamp(*self.dt_limit)
            v = (dt[..., None] * x[:, 0]).to(x.dtype)
            y = attention.linear_step(cache.state, C[:, 0], B[:, 0], v, decay=dt * A, scale=1.0)
            return (y + (D if D.ndim > 1 else D[:, None]) * x[:, 0]).to(x.dtype)[:, None]
        states = cache.state.transpose(-1, -2)  # attention.mamba2 has the columns of values first
        y, final = attention.mamba2(x, dt, A, B, C, **options, initial_states=states, return_final_states=True)
        states.copy_(final)
        return y

    def extra_repr(self) -> str:
        """The arguments that repr(module) shows."""
        return f"heads={self.nheads}, headdim={self.headdim}, d_state={self.d_state}, ngroups={self.ngroups}"
