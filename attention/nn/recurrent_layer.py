"""What all recurrent layers have in common: a convolution and a recurrence, and the cache of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import attention
from attention import gates

from ..names import suggests_argument_names
from .layers import (
    ShortConv,
    check_cache_class,
    check_counts,
    check_no_gradient,
    check_tokens,
    check_width,
    count_sequences,
)

HEAD_DIM_STEP, MAX_HEAD_DIM = 16, 256


class RecurrentCache(NamedTuple):
    """What a recurrent layer knows of the tokens so far, for N sequences. window: the last kernel_size - 1 inputs of the
    convolution, (N, channels, kernel_size - 1); None without one. state: (N, heads, key columns, value columns), float32. A
    call updates both in place, so a CUDA graph that holds the call serves all tokens."""

    window: torch.Tensor | None
    state: torch.Tensor

    def reset(self) -> None:
        """Forget all tokens: the next call begins a new sequence."""
        self.state.zero_()
        if self.window is not None:
            self.window.zero_()


class RecurrentLayer(nn.Module):
    """A layer of x (B, S, hidden_size): `mix`, which a subclass has, and out_proj. conv1d: the convolution of `channels`
    channels, or None. state_shape: (heads, key columns, value columns) of a sequence's state. column_arguments: the arguments
    that decide the columns of keys and values. width_argument: that which is the convolution's width."""

    column_arguments: ClassVar[tuple[str, str]] = "head_dim", "expand_v"
    width_argument: ClassVar[str] = "conv_size"

    def __init__(
        self,
        hidden_size: int,
        state_shape: tuple[int, int, int],
        channels: int,
        conv: dict[str, Any] | None,
        factory: dict[str, Any],
        bias: bool = False,
    ):
        super().__init__()
        heads, key_dim, value_dim = self.state_shape = state_shape
        for argument, name, columns in zip(self.column_arguments, ("keys", "values"), (key_dim, value_dim)):
            if columns % HEAD_DIM_STEP or not HEAD_DIM_STEP <= columns <= MAX_HEAD_DIM:
                limits = f"a multiple of {HEAD_DIM_STEP}, from {HEAD_DIM_STEP} to {MAX_HEAD_DIM}"
                raise ValueError(f"{argument}: heads of {name} must have {limits} columns, not {columns}")
        self.hidden_size, self.channels = hidden_size, channels
        if conv:
            check_width(self.width_argument, conv["kernel_size"])
        self.conv1d = ShortConv(channels, **conv, **factory) if conv else None
        self.out_proj = nn.Linear(heads * value_dim, hidden_size, bias=bias, **factory)

    @suggests_argument_names
    def forward(
        self, x: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None, cache: RecurrentCache | None = None
    ) -> torch.Tensor:
        """The layer's output for x (B, S, hidden_size), of the same shape. cu_seqlens: (N + 1), of N sequences that are packed
        in a batch of 1. cache: of the tokens before x, from new_cache, which is updated: for generation, without gradients.
        ValueError: shapes do not fit. TypeError: dtypes do not. RuntimeError: there is a cache, and gradients are recorded."""
        check_tokens(x, self.hidden_size, self.out_proj.weight)
        if cache is not None:
            self.check_cache(x, cu_seqlens, cache)
        return self.out_proj(self.mix(x, cu_seqlens, cache))

    def mix(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, cache: RecurrentCache | None) -> torch.Tensor:
        """What out_proj is applied to, (B, S, heads times value columns)."""
        raise NotImplementedError

    def new_cache(self, batch_size: int, max_length: int | None = None) -> RecurrentCache:
        """The cache of so many sequences without tokens. max_length: is not needed, for the cache is as large however many
        tokens there are; it is taken because softmax attention's new_cache needs it, so a hybrid asks all layers alike."""
        if batch_size != 0:
            check_counts(batch_size=batch_size)
        like = self.out_proj.weight
        window = None
        if self.conv1d is not None:
            shape = batch_size, self.channels, self.conv1d.weight.shape[1] - 1
            window = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return RecurrentCache(window, torch.zeros(batch_size, *self.state_shape, device=like.device))

    def check_cache(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, cache: RecurrentCache) -> None:
        """ValueError: the cache is one of another number of sequences or of another layer. TypeError: it is none of a
        recurrent layer, or its state is not float32. RuntimeError: gradients are recorded."""
        check_cache_class(cache, RecurrentCache)
        sequences = count_sequences(x, cu_seqlens)
        if cache.state.shape != (sequences, *self.state_shape):
            raise ValueError(
                f"cache: state must be {(sequences, *self.state_shape)}, as new_cache({sequences}) makes it: "
                f"cache.state.shape={tuple(cache.state.shape)}, x.shape={tuple(x.shape)}"
            )
        wanted = None if self.conv1d is None else (sequences, self.channels, self.conv1d.weight.shape[1] - 1)
        if wanted != (None if cache.window is None else cache.window.shape):
            window = "=None" if cache.window is None else f".shape={tuple(cache.window.shape)}"
            raise ValueError(f"cache: window must be {wanted}, as new_cache({sequences}) makes it: cache.window{window}")
        if cache.state.dtype != torch.float32:
            raise TypeError(f"cache: state must be float32, as new_cache makes it: cache.state.dtype={cache.state.dtype}")
        check_no_gradient(self, x)

    def convolve(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, cache: RecurrentCache | None) -> torch.Tensor:
        """The convolution of x and its SiLU, or SiLU alone."""
        if self.conv1d is None:
            return F.silu(x)
        return self.conv1d(x, cu_seqlens=cu_seqlens, cache=cache and cache.window)

    def recur(
        self,
        member: Callable,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        cache: RecurrentCache | None,
        **options: Any,
    ) -> torch.Tensor:
        """o (B, S, H, Dv) of a member of linear attention, from the cache's state on. options: raw gates of all tokens, decay
        and beta, and others. One token is a step, attention.linear_step."""
        if cache is None:
            return member(q, k, v, **options, cu_seqlens=cu_seqlens)
        if cu_seqlens is None and q.shape[1] == 1:
            is_raw = lambda x: isinstance(x, (gates.RawGate, gates.RawBeta))
            token = {name: x._replace(x=x.x[:, 0]) if is_raw(x) else x for name, x in options.items()}
            return attention.linear_step(cache.state, q[:, 0], k[:, 0], v[:, 0], **token)[:, None]
        out, state = member(q, k, v, **options, cu_seqlens=cu_seqlens, initial_state=cache.state, return_state=True)
        cache.state.copy_(state)
        return out
