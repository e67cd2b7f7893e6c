"""Attention as a torch module: `from attention.nn import Attention`. torch comes with it."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import nn

import attention
from tiles.frameworks import with_tangents
from tiles.torch_op import exporting, traced

from .options import check_flag, check_positive
from .softmax.autograd import adjacent
from .softmax.call_options import ends_of
from .softmax.gradient import ONCE
from .softmax.projected import projected, projected_backward
from .softmax.rotary import SERVED

NORMS = "q_norm", "k_norm"
NO_OPTION = "layout", "out", "lse", "return_lse", "accumulate", "stream"  # of a call of the module


class Attention(nn.Module):
    """Self-attention of x (B, S, dim); the result has the same shape:

        q, k, v = x W            `heads` heads of queries, `kv_heads` of keys and of values, `head_dim` columns each
        q, k    = norm(q), norm(k)               with qk_norm: RMS norms of each head's rows
        q, k    = rotated by their positions     with rotary
        out     = softmax(q k^T / sqrt(head_dim)) v W_out      attention.forward, differentiable

    dim: columns of x. heads, kv_heads: heads is a multiple of kv_heads (GQA, MQA), which is heads by default. head_dim: a
    multiple of 8 up to 256, by default dim // heads. causal, window, softcap, scale: attention.forward's. sink: learn a
    logit for each head, whose exp joins its sums of weights; it starts at 0. qk_norm: learn weights (head_dim); eps is 1e-6.
    rotary: the base of the angles, 10000 in most models: position / base^(2 i / head_dim) for the pair of columns i and
    head_dim / 2 + i. None leaves positions out. bias: give the projections a bias. dtype, device: of the parameters.

    With rotary, heads of 64 or 128 columns and no further options of a call, norms, positions and attention are one function
    of the projection's output, and its gradient is one array: queries, keys and values are read where the projection left
    them.

    Kernels take bfloat16 and float16: give the module and x such a dtype, or call it under torch.autocast. Parameters are
    `project.weight` (W^T, the rows of all queries first, then keys, then values), `out.weight`, `q_norm.weight`,
    `k_norm.weight` and `sink`.

    ValueError: heads or columns do not fit; or attention.forward refuses them."""

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
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        if self.heads < 1 or self.kv_heads < 1:
            raise ValueError(f"heads: must be positive, and so must kv_heads: {heads=}, {kv_heads=}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: must be a multiple of kv_heads: {heads=}, {kv_heads=}")
        if head_dim is None and dim % heads:
            raise ValueError(f"dim: must be a multiple of heads where head_dim is not given: {dim=}, {heads=}")
        self.head_dim = dim // heads if head_dim is None else head_dim
        if self.head_dim % 8 or not 8 <= self.head_dim <= 256:
            raise ValueError(f"head_dim: must be a multiple of 8, from 8 to 256: head_dim={self.head_dim}")
        self.rotary = check_positive("rotary", rotary)
        for name, x in {"causal": causal, "sink": sink, "qk_norm": qk_norm, "bias": bias}.items():
            check_flag(name, x)
        ends_of(window), check_positive("softcap", softcap), check_positive("scale", scale)  # which refuse what a call would
        self.options = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.project = nn.Linear(dim, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=bias, **place)
        self.out = nn.Linear(self.heads * self.head_dim, dim, bias=bias, **place)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, 1e-6, **place) if qk_norm else None for _ in range(2))
        self.sink = nn.Parameter(torch.zeros(heads, device=device)) if sink else None

    def reset_parameters(self) -> None:
        """Its own parameter as it starts, after `to_empty`; its layers have such a method themselves."""
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        """See the class. positions: those of the tokens, (S), (1, S) or (B, S), for rotary; by default from 0 on. options:
        further ones of attention.forward for this call, such as mask, aux, bias or cu_seqlens (x is then (1, S, dim); positions
        may run on from one sequence to the next, because rotary depends only on their differences). ValueError: x or positions
        have another shape. TypeError: an option is the module's, or none of a call."""
        if x.ndim != 3 or x.shape[-1] != self.project.in_features:
            raise ValueError(f"x: must be (B, S, {self.project.in_features}): x.shape={tuple(x.shape)}")
        for name in options:
            if name in self.options or name == "sink" or (name in NORMS and getattr(self, name) is not None):
                how = "qk_norm" if name in NORMS else name
                raise TypeError(f"{name}: is the module's, as Attention(.., {how}=..), and not a call's")
            if name in NO_OPTION:
                raise TypeError(f"{name}: cannot be given to the module, whose axes and result are its own")
        if positions is not None:
            positions = of_rows(positions, x)
        heads = self.project(x).unflatten(-1, (-1, self.head_dim))
        of_kernels = self.norms()
        if not options and of_kernels is not None and self.at_once(positions):
            return self.out(self.projected(heads, positions, *of_kernels).flatten(-2))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], -2)  # views, and one gradient of all three
        if of_kernels is None:
            q, k = (y if norm is None else norm(y) for y, norm in ((q, self.q_norm), (k, self.k_norm)))
        elif of_kernels[0] is not None:
            if self.rotary is None:  # attention normalises
                options |= dict(zip((*NORMS, "norm_eps"), of_kernels))
            else:
                q, k = normed(q, self.q_norm), normed(k, self.k_norm)
        if self.rotary is not None:
            cos, sin = self.angles(heads, positions)
            q, k = turned(q, cos, sin), turned(k, cos, sin)
        out = self.attend(q.to(v.dtype), k.to(v.dtype), v, **self.options, **options)
        return self.out(out.flatten(-2))

    def norms(self) -> tuple[torch.Tensor | None, torch.Tensor | None, float] | None:
        """(weights of the queries' norm, of the keys', epsilon) for kernels that normalise, (None, None, ..) without norms.
        None: these are no longer two RMS norms with one epsilon, or have hooks, so they must be called."""
        norms = self.q_norm, self.k_norm
        if norms == (None, None):
            return None, None, 1e-6
        for norm in norms:
            if norm is None or type(norm) is not nn.RMSNorm:
                return None
            if norm._forward_pre_hooks or norm._forward_hooks or norm._backward_hooks:
                return None
        first, second = cast(tuple[nn.RMSNorm, nn.RMSNorm], norms)
        same = first.eps is not None and first.eps == second.eps
        return (first.weight, second.weight, first.eps) if same else None

    def at_once(self, positions: torch.Tensor | None) -> bool:
        """Do norms, rotary and attention go by one function, whose gradients are one array? If nobody overrides `attend`,
        positions are not learned, and there are no forward-mode derivatives and none of torch.func's transforms."""
        if self.rotary is None or self.head_dim not in SERVED or type(self).attend is not Attention.attend:
            return False
        if with_tangents() or (positions is not None and positions.requires_grad):
            return False
        return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None

    def projected(
        self,
        heads: torch.Tensor,
        positions: torch.Tensor | None,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """What `forward` says of x's projection (B, S, all heads, head_dim), as one function."""
        cos, sin = (table.squeeze(-2) for table in self.angles(heads, positions))
        norms = [None if weights is None else weights.float() for weights in (q_norm, k_norm)]
        window = ends_of(self.options["window"])
        options = eps, self.options["causal"], *window, self.options["softcap"], self.options["scale"]
        sink = None if self.sink is None else self.sink.float()
        if exporting():
            parts = heads.split([self.heads, self.kv_heads, self.kv_heads], -2)
            return projected(None, (*parts, cos, sin, *norms, sink, None, None, None), (*options, None))[0]
        return Projected.apply(heads, cos, sin, *norms, sink, self.kv_heads, options)

    def angles(self, x: torch.Tensor, positions: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the positions of x (B, S, ..), from 0 on if they are not given: then the same for all modules."""
        base = cast(float, self.rotary)
        if positions is not None:
            return angles(positions, self.head_dim, base)
        if traced(x) or (x.is_cuda and torch.cuda.is_current_stream_capturing()):  # what is made there does not stay
            return angles(torch.arange(x.shape[1], device=x.device), self.head_dim, base)
        return _tables(x.shape[1], self.head_dim, base, x.device)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        """attention.forward of q (B, S, heads, head_dim), k and v (B, S, kv_heads, head_dim)."""
        sink = None if self.sink is None else self.sink.float()
        return attention.forward(q, k, v, sink=sink, **options)

    def extra_repr(self) -> str:
        """What is printed beside the parameters."""
        said = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "rotary": self.rotary}
        return ", ".join(f"{name}={value}" for name, value in (said | self.options).items() if value not in (None, False))


class Projected(torch.autograd.Function):
    """out (B, S, heads, head_dim) of heads of queries, keys and values (B, S, all of them, head_dim): see softmax/projected.py.
    options: eps, causal, left, right, softcap, scale."""

    @staticmethod
    def forward(ctx, heads, cos, sin, q_norm, k_norm, sink, kv_heads, options):
        """Without gradients."""
        parts = heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2)
        out, lse, rows = projected(None, (*parts, cos, sin, q_norm, k_norm, sink, None, None, None), (*options, None))
        ctx.save_for_backward(heads, cos, sin, q_norm, k_norm, sink, out, lse, rows)
        ctx.told = kv_heads, options
        return out

    @staticmethod
    def backward(ctx, dout):
        """Of all that is learnt. NotImplementedError if that is to be differentiated once more."""
        heads, *given, out, lse, rows = ctx.saved_tensors
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():  # of a result that required grad
            raise NotImplementedError(f"{ONCE}; leave create_graph=True out")
        kv_heads, options = ctx.told
        normed, sunk = given[2] is not None, given[4] is not None
        parts = heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2)
        asked = torch.are_deterministic_algorithms_enabled(), normed, sunk, None
        found = projected_backward(None, (adjacent(dout), *parts, *given, out, lse, rows, *(None,) * 4), (*options, *asked))
        dx, *more = found if normed or sunk else (found,)
        of_norms = more[:2] if normed else (None, None)
        return dx, None, None, *of_norms, more[-1] if sunk else None, None, None


def of_rows(positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Positions of the rows of x (B, S, ..), one row of them as (S). ValueError: they have another shape."""
    batch, rows, *_ = x.shape
    if positions.shape not in ((rows,), (1, rows), (batch, rows)):
        said = f"must be ({rows}) or ({batch}, {rows}), as x is"
        raise ValueError(f"positions: {said}: positions.shape={tuple(positions.shape)}")
    return positions[0] if positions.ndim == 2 and len(positions) == 1 else positions


def normed(x: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
    """The norm of x, its weights as x is: torch has one kernel of that, and under autocast x is not what they are."""
    return nn.functional.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)


def angles(positions: torch.Tensor, head_dim: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of position / base^(2 i / head_dim), each (.., S, 1, head_dim / 2) of positions (.., S), in float32."""
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angle = positions.float()[..., None, None] * base ** (-pairs / head_dim)
    return angle.cos(), angle.sin()


@functools.lru_cache(8)
def _tables(length: int, head_dim: int, base: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`angles` of positions from 0 on."""
    with torch.inference_mode(False):
        return angles(torch.arange(length, device=device), head_dim, base)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The two halves of each row as pairs, turned: (x1 cos - x2 sin, x2 cos + x1 sin). x (B, S, H, D), in its dtype."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
