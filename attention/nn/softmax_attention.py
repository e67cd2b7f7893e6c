"""Softmax attention as a torch module."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import nn

import attention
from tiles.calls.torch_op import is_exporting, is_traced
from tiles.launching.frameworks import computes_tangents

from ..autograd_inputs import make_tma_contiguous
from ..kernels.softmax.rotary_rows import HEAD_DIMS
from ..names import suggests_argument_names
from ..options import check_flag, check_positive
from ..plans.softmax.call_options import window_ends
from ..plans.softmax.gradient import NO_SECOND_DERIVATIVES
from ..public.projected_qkv import projected, projected_backward
from .attention_cache import AttentionCache
from .layers import check_cache_class, check_counts, check_no_gradient, check_tokens

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

    new_cache makes a cache for generation: layer(prompt, cache=cache), then layer(token, cache=cache).

    ValueError: heads or columns do not fit; or attention.forward refuses them."""

    @suggests_argument_names
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
        check_counts(dim=dim, heads=heads, kv_heads=self.kv_heads)
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
        window_ends(window), check_positive("softcap", softcap), check_positive("scale", scale)  # raise a call's errors now
        self.options = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        self.project = nn.Linear(dim, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=bias, **factory)
        self.out = nn.Linear(self.heads * self.head_dim, dim, bias=bias, **factory)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, 1e-6, **factory) if qk_norm else None for _ in range(2))
        self.sink = nn.Parameter(torch.zeros(heads, device=device)) if sink else None

    def reset_parameters(self) -> None:
        """Initialise the sink, after `to_empty`; the layers have their own reset_parameters."""
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor | None = None, *, cache: AttentionCache | None = None, **options: Any
    ) -> torch.Tensor:
        """Attention of x (B, S, dim): see the class. positions: of the tokens, (S), (1, S) or (B, S), for rotary; by default
        from 0 on. options: further ones of attention.forward for this call, such as alibi, mask, aux, bias or cu_seqlens (x is
        then (1, S, dim); positions may run on from one sequence to the next, because rotary depends only on their differences).

        cache: of the tokens before x, from new_cache, which is updated: for generation, by a causal layer, without gradients.
        Tokens have the positions after those before, and options are those of attention.decode. With cu_seqlens, (N + 1), x
        has new tokens of N sequences, in different numbers.

        ValueError: x, positions or the cache have another shape. TypeError: x has another dtype than the parameters; an option
        belongs to the module, or no call takes it. RuntimeError: there is a cache, and gradients are recorded."""
        check_tokens(x, self.project.in_features, self.project.weight)
        for name in options:
            if name in self.options or name == "sink" or (name in NORMS and getattr(self, name) is not None):
                option = "qk_norm" if name in NORMS else name
                raise TypeError(f"{name}: is an argument of the module, Attention(.., {option}=..), not of a call")
            if name in NO_OPTION:
                raise TypeError(f"{name}: is not an argument of the module, which chooses layout and results itself")
        if cache is not None:
            check_cache_class(cache, AttentionCache)
            cache.check(x, (self.kv_heads, self.head_dim), self.rotary, self.options | options, positions)
            check_no_gradient(self, x)
        if positions is not None:
            positions = check_positions(positions, x)
        heads = self.project(x).unflatten(-1, (-1, self.head_dim))
        kernel_norms = self.norms()
        if cache is None and not options and kernel_norms is not None and self.can_fuse_projection(positions):
            return self.out(self.attend_projection(heads, positions, *kernel_norms).flatten(-2))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], -2)  # views, with one gradient for all three
        if kernel_norms is None:
            q, k = (y if norm is None else norm(y) for y, norm in ((q, self.q_norm), (k, self.k_norm)))
        if cache is not None:
            new = q.to(v.dtype), k.to(v.dtype), v
            return self.out(self.attend_cache(*new, cache, kernel_norms, **options).flatten(-2))
        if kernel_norms is not None and kernel_norms[0] is not None:
            if self.rotary is None:  # attention.forward applies the norms
                options |= dict(zip((*NORMS, "norm_eps"), kernel_norms))
            else:
                q, k = apply_norm(q, self.q_norm), apply_norm(k, self.k_norm)
        if self.rotary is not None:
            cos, sin = self.angles(heads, positions)
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        out = self.attend(q.to(v.dtype), k.to(v.dtype), v, **self.options, **options)
        return self.out(out.flatten(-2))

    def norms(self) -> tuple[torch.Tensor | None, torch.Tensor | None, float] | None:
        """(weights of the queries' norm, of the keys' norm, epsilon) for kernels that normalise; (None, None, ..) without
        norms. None: the modules are no longer two RMSNorms with one epsilon, or have hooks, so they must be called."""
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

    def can_fuse_projection(self, positions: torch.Tensor | None) -> bool:
        """Can norms, rotary and attention be one function with one gradient? Yes if `attend` is not overridden, positions are
        not learned, and neither forward-mode derivatives nor torch.func transforms are active."""
        if self.rotary is None or self.head_dim not in HEAD_DIMS or type(self).attend is not Attention.attend:
            return False
        if computes_tangents() or (positions is not None and positions.requires_grad):
            return False
        return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None

    def attend_projection(
        self,
        heads: torch.Tensor,
        positions: torch.Tensor | None,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """forward's norms, rotary and attention of x's projection (B, S, all heads, head_dim), as one function."""
        cos, sin = (table.squeeze(-2) for table in self.angles(heads, positions))
        norms = [None if weights is None else weights.float() for weights in (q_norm, k_norm)]
        window = window_ends(self.options["window"])
        options = eps, self.options["causal"], *window, self.options["softcap"], self.options["scale"]
        sink = None if self.sink is None else self.sink.float()
        if is_exporting():
            parts = heads.split([self.heads, self.kv_heads, self.kv_heads], -2)
            return projected(None, (*parts, cos, sin, *norms, sink, None, None, None), (*options, None))[0]
        return ProjectedAttention.apply(heads, cos, sin, *norms, sink, self.kv_heads, options)

    def angles(self, x: torch.Tensor, positions: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the positions of x (B, S, ..); without positions they count from 0, and the tables are shared by all
        modules."""
        base = cast(float, self.rotary)
        if positions is not None:
            return angles(positions, self.head_dim, base)
        if is_traced(x) or (
            x.is_cuda and torch.cuda.is_current_stream_capturing()
        ):  # tensors made while tracing or capturing must not be cached
            return angles(torch.arange(x.shape[1], device=x.device), self.head_dim, base)
        return _tables(x.shape[1], self.head_dim, base, x.device)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        """attention.forward of q (B, S, heads, head_dim), k and v (B, S, kv_heads, head_dim)."""
        sink = None if self.sink is None else self.sink.float()
        return attention.forward(q, k, v, sink=sink, **options)

    def attend_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: AttentionCache,
        norms: tuple[torch.Tensor | None, torch.Tensor | None, float] | None,
        **options: Any,
    ) -> torch.Tensor:
        """attention.decode of new tokens, q, k and v as in `attend`, which are written to the cache. norms: what `norms`
        returned, None if q and k are normalised."""
        if norms is not None and norms[0] is not None:
            options |= dict(zip(("q_norm", "k_new_norm", "norm_eps"), norms))
        sink = None if self.sink is None else self.sink.float()
        place = {"lengths": cache.lengths, "pages": cache.pages, "rotary": cache.rotary, **cache.descales}
        options |= place | {"k_new": k, "v_new": v, "sink": sink} | self.options
        out = attention.decode(q, cache.k, cache.v, **options)
        cache.add_lengths(q.shape[1], options.get("cu_seqlens"))
        return out

    def new_cache(self, batch_size: int, max_length: int, dtype: torch.dtype | None = None) -> AttentionCache:
        """The cache of so many sequences without tokens, with room for max_length tokens each. dtype: of keys and values, by
        default that of the parameters or, where these are float32, for autocast, bfloat16. torch.float8_e4m3fn and torch.int8:
        with a descale for each token and head, which calls write (attention.append)."""
        check_counts(batch_size=batch_size, max_length=max_length)
        weight = self.project.weight
        dtype = dtype or (torch.bfloat16 if weight.dtype == torch.float32 else weight.dtype)
        shape = batch_size, max_length, self.kv_heads
        k, v = torch.zeros(2, *shape, self.head_dim, dtype=dtype, device=weight.device)
        descales = torch.zeros(2, *shape, device=weight.device) if dtype.itemsize == 1 else (None, None)
        lengths, rotary = torch.zeros(batch_size, dtype=torch.int32, device=weight.device), None
        if self.rotary is not None:
            cos, sin = angles(torch.arange(max_length, device=weight.device), self.head_dim, self.rotary)
            rotary = cos.squeeze(-2), sin.squeeze(-2)
        return AttentionCache(k, v, lengths, rotary, None, *descales)

    def extra_repr(self) -> str:
        """The arguments that repr(module) shows."""
        fields = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "rotary": self.rotary}
        return ", ".join(f"{name}={value}" for name, value in (fields | self.options).items() if value not in (None, False))


class ProjectedAttention(torch.autograd.Function):
    """out (B, S, heads, head_dim) from a projection (B, S, heads of queries, keys and values, head_dim): see
    public/projected_qkv.py. options: eps, causal, left, right, softcap, scale."""

    @staticmethod
    def forward(ctx, heads, cos, sin, q_norm, k_norm, sink, kv_heads, options):
        parts = heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2)
        out, lse, rows = projected(None, (*parts, cos, sin, q_norm, k_norm, sink, None, None, None), (*options, None))
        ctx.save_for_backward(heads, cos, sin, q_norm, k_norm, sink, out, lse, rows)
        ctx.saved = kv_heads, options
        return out

    @staticmethod
    def backward(ctx, dout):
        """The gradients of all inputs. NotImplementedError: second derivatives."""
        heads, *inputs, out, lse, rows = ctx.saved_tensors
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():  # create_graph=True
            raise NotImplementedError(f"{NO_SECOND_DERIVATIVES}; leave create_graph=True out")
        kv_heads, options = ctx.saved
        has_norms, has_sink = inputs[2] is not None, inputs[4] is not None
        parts = heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2)
        requests = torch.are_deterministic_algorithms_enabled(), has_norms, has_sink, None
        gradients = projected_backward(
            None, (make_tma_contiguous(dout), *parts, *inputs, out, lse, rows, *(None,) * 4), (*options, *requests)
        )
        dx, *other_gradients = gradients if has_norms or has_sink else (gradients,)
        norm_gradients = other_gradients[:2] if has_norms else (None, None)
        return dx, None, None, *norm_gradients, other_gradients[-1] if has_sink else None, None, None


def check_positions(positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The positions for the rows of x (B, S, ..); a single row of positions as (S). ValueError: they have another shape."""
    batch, rows, *_ = x.shape
    if positions.shape not in ((rows,), (1, rows), (batch, rows)):
        shapes = f"must be ({rows}) or ({batch}, {rows}), as x is"
        raise ValueError(f"positions: {shapes}: positions.shape={tuple(positions.shape)}")
    return positions[0] if positions.ndim == 2 and len(positions) == 1 else positions


def apply_norm(x: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
    """The RMS norm of x, with its weights cast to x's dtype: then torch takes one fused kernel, also under autocast."""
    return nn.functional.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)


def angles(positions: torch.Tensor, head_dim: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of position / base^(2 i / head_dim), each (.., S, 1, head_dim / 2) for positions (.., S), in float32."""
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angle = positions.float()[..., None, None] * base ** (-pairs / head_dim)
    return angle.cos(), angle.sin()


@functools.lru_cache(8)
def _tables(length: int, head_dim: int, base: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of the positions from 0 to length - 1."""
    with torch.inference_mode(False):
        return angles(torch.arange(length, device=device), head_dim, base)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """(x1 cos - x2 sin, x2 cos + x1 sin), where x1 and x2 are the two halves of each row. x (B, S, H, D), in its dtype."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
