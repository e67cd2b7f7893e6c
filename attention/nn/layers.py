"""What recurrent layers are made of: the short convolution, the gated norm, and their gates' parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import attention

from ..parts.short_conv import WIDTHS
from ..plans.recurrent.gated_norm import serves
from ..public.gated_norms import check_options
from ..public.short_convolution import check_activation

GATES = {"silu": F.silu, "sigmoid": torch.sigmoid}
FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
DT_RANGE, DT_FLOOR = (0.001, 0.1), 1e-4  # in which softplus(dt_bias) begins, as in Mamba


class ShortConv(nn.Module):
    """attention.short_conv of x (B, S, hidden_size), with weights of its own: a causal convolution of kernel_size tokens, 2 to
    4, each channel by itself.

    weight: (hidden_size, kernel_size), and with bias=True bias (hidden_size): they begin as those of torch.nn.Conv1d do, whose
    weight is (hidden_size, 1, kernel_size). activation: "silu" or None. ValueError: there is no such convolution."""

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int = 4,
        bias: bool = False,
        activation: str | None = "silu",
        dtype: torch.dtype | None = None,
        device: Any = None,
    ):
        super().__init__()
        check_counts(hidden_size=hidden_size)
        check_width("kernel_size", kernel_size)
        self.activation = check_activation(activation)
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        self.weight = nn.Parameter(torch.empty(hidden_size, kernel_size, **factory))
        self.bias = nn.Parameter(torch.empty(hidden_size, **factory)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters as torch.nn.Conv1d does."""
        bound = self.weight.shape[1] ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self, x: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None, cache: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The convolution of x. cache: the tokens before the first, (B, hidden_size, kernel_size - 1), with cu_seqlens those of
        each sequence, updated in place. RuntimeError: there is a cache, and gradients are recorded."""
        options: dict[str, Any] = {"activation": self.activation, "cu_seqlens": cu_seqlens}
        if cache is None:
            return attention.short_conv(x, self.weight, self.bias, **options)
        self.check_cache(x, cu_seqlens, cache)
        check_no_gradient(self, x, cache)
        out, state = attention.short_conv(x, self.weight, self.bias, **options, initial_state=cache, return_state=True)
        cache.copy_(state)
        return out

    def check_cache(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, cache: Any) -> None:
        """TypeError: the cache is no tensor of numbers. ValueError: it is one of other sequences or of another convolution."""
        if not isinstance(cache, torch.Tensor) or not cache.is_floating_point():
            got = f"cache.dtype={cache.dtype}" if isinstance(cache, torch.Tensor) else f"{type(cache).__name__}"
            raise TypeError(f"cache: must be a tensor of float32, bfloat16 or float16, not {got}")
        channels, width = self.weight.shape
        wanted = count_sequences(x, cu_seqlens), channels, width - 1
        if cache.shape != wanted:
            raise ValueError(f"cache: must be {wanted}: cache.shape={tuple(cache.shape)}, x.shape={tuple(x.shape)}")

    def extra_repr(self) -> str:
        """The arguments that repr(module) shows."""
        channels, width = self.weight.shape
        return f"{channels}, kernel_size={width}, bias={self.bias is not None}, activation={self.activation!r}"


class GatedRMSNorm(nn.Module):
    """norm(x) act(gate), or with norm_before_gate=False norm(x act(gate)), of rows of `dim` columns, where norm(x) is
    weight x / sqrt(mean(x^2) + eps).

    activation: "silu" (Mamba, Qwen) or "sigmoid" (Kimi). groups: equal parts of the columns, each with a mean of its own.

    It is attention.gated_rms_norm where that serves a group's columns (multiples of 32 up to 8192) and x is bfloat16 or
    float16; elsewhere it is torch's operations."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        activation: str = "silu",
        norm_before_gate: bool = True,
        groups: int = 1,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ):
        super().__init__()
        self.eps, self.activation, self.norm_before_gate = check_options(eps, activation, norm_before_gate)
        self.groups = groups
        check_counts(dim=dim, groups=groups)
        if dim % groups:
            raise ValueError(f"groups: must divide dim: {groups=}, {dim=}")
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        """Initialise all weights to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """The gated norm of the rows of x, in x's dtype; without a gate the norm alone. gate: shaped as x is. ValueError: rows
        have another number of columns, or the gate has another shape."""
        if x.shape[-1:] != self.weight.shape:
            raise ValueError(f"x: rows must have {len(self.weight)} columns: x.shape={tuple(x.shape)}")
        if gate is not None and gate.shape != x.shape:
            raise ValueError(f"gate: must be shaped as x is: gate.shape={tuple(gate.shape)}, x.shape={tuple(x.shape)}")
        options: dict[str, Any] = {"activation": self.activation, "norm_before_gate": self.norm_before_gate}
        out = normalize_by_kernel(x, self.weight, gate, self.groups, eps=self.eps, **options)
        return self.by_torch(x, gate) if out is None else out

    def by_torch(self, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """The gated norm by torch's operations."""
        dtype = x.dtype
        if gate is not None:
            gate = GATES[self.activation](gate)
        if gate is not None and not self.norm_before_gate:
            x, gate = x * gate, None
        weight = self.weight.to(dtype)
        if self.groups == 1:  # one kernel of torch
            x = F.rms_norm(x, weight.shape, weight, self.eps)
        else:
            rows = x.unflatten(-1, (self.groups, -1))
            x = F.rms_norm(rows, rows.shape[-1:], eps=self.eps).flatten(-2) * weight
        return (x if gate is None else x * gate).to(dtype)

    def extra_repr(self) -> str:
        """The arguments that repr(module) shows."""
        return f"{len(self.weight)}, eps={self.eps}, activation={self.activation!r}, norm_before_gate={self.norm_before_gate}"


def normalize_by_kernel(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None, groups: int, **options: Any
) -> torch.Tensor | None:
    """attention.gated_rms_norm of the last axis of x, (.., D), each of `groups` equal parts by itself; None where it does not
    support such an x. weight: (D). gate: shaped as x is. options: its eps, activation and norm_before_gate."""
    if x.dtype not in (torch.bfloat16, torch.float16) or not serves(x.shape[-1] // groups):
        return None
    rows, of_gate = _rows(x, groups), None if gate is None else _rows(gate.to(x.dtype), groups)
    weight = weight if groups == 1 else weight.unflatten(0, (groups, -1))
    return attention.gated_rms_norm(rows, weight, of_gate, **options).view(x.shape)


def _rows(x: torch.Tensor, groups: int) -> torch.Tensor:
    """x as (batch, tokens, heads or groups, columns), the heads of a token one behind the other."""
    if x.ndim != 4 or groups > 1:
        lead = x.shape[:-1] if x.ndim == 3 else (1, -1)
        x = x.reshape(*lead, groups, x.shape[-1] // groups)
    adjacent = x.stride(3) == 1 and (x.shape[2] == 1 or x.stride(2) == x.shape[3])
    return x if adjacent else x.contiguous()


def check_counts(**counts: Any) -> None:
    """ValueError: one of these arguments is no integer, or not positive."""
    for name, value in counts.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
            raise ValueError(f"{name}: must be a positive integer: {name}={value!r}")


def check_width(name: str, width: Any) -> None:
    """ValueError: no convolution has so many tokens. name: of the argument."""
    if width not in WIDTHS:
        raise ValueError(f"{name}: must be from {WIDTHS[0]} to {WIDTHS[-1]}: {name}={width!r}")


def check_tokens(x: Any, columns: int, weight: torch.Tensor) -> None:
    """TypeError: x is no tensor or, outside of autocast, of another dtype than the parameters, of which `weight` is one.
    ValueError: it is not (B, S, columns)."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: must be a torch tensor, not {type(x).__name__}")
    if x.ndim != 3 or x.shape[-1] != columns:
        raise ValueError(f"x: must be (B, S, {columns}): x.shape={tuple(x.shape)}")
    plain = type(weight) is nn.Parameter and {x.dtype, weight.dtype} <= FLOATS  # neither quantised nor a shard of FSDP's
    if plain and x.dtype != weight.dtype and not (x.is_meta or torch.is_autocast_enabled(x.device.type)):
        wanted = f"must be that of the layer's parameters, {weight.dtype}, outside of torch.autocast"
        raise TypeError(f"x: dtype {wanted}: x.dtype={x.dtype}")


def count_sequences(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    """The number of sequences of x (B, S, ..), which are packed if there are cu_seqlens."""
    return len(x) if cu_seqlens is None else len(cu_seqlens) - 1


def check_cache_class(cache: Any, expected: type) -> None:
    """TypeError: the cache is of another class, for instance that of another kind of layer."""
    if not isinstance(cache, expected):
        must = f"must be what the layer's new_cache returns, of the class {expected.__name__}"
        raise TypeError(f"cache: {must}, not {type(cache).__name__}")


def check_no_gradient(layer: nn.Module, *tensors: torch.Tensor) -> None:
    """RuntimeError: a layer is called with a cache while gradients of its parameters, or of these tensors, are recorded."""
    if torch.is_grad_enabled() and any(y.requires_grad for y in (*tensors, *layer.parameters())):
        raise RuntimeError("cache: is updated in place, and has no gradient: call the layer under torch.no_grad()")


def gate_parameter(count: int, device: Any) -> nn.Parameter:
    """A parameter of gates, float32, without values."""
    return nn.Parameter(torch.empty(count, dtype=torch.float32, device=device))


@torch.no_grad()
def reset_rates(A_log: torch.Tensor, low: float, high: float) -> None:
    """Initialise A_log: logarithms of numbers drawn evenly between low and high. Optimisers that read Mamba's
    _no_weight_decay apply no weight decay to it."""
    vars(A_log)["_no_weight_decay"] = True
    A_log.uniform_(low, high).clamp_(min=torch.finfo(A_log.dtype).tiny).log_()


@torch.no_grad()
def reset_time_steps(dt_bias: torch.Tensor) -> None:
    """Initialise dt_bias, so that log(softplus(dt_bias)) is drawn evenly between the logarithms of DT_RANGE. It has the mark
    of A_log, too."""
    vars(dt_bias)["_no_weight_decay"] = True
    low, high = map(math.log, DT_RANGE)
    dt = dt_bias.uniform_(low, high).exp_().clamp_(min=DT_FLOOR)
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
