"""The cache of keys and values of attention.nn.Attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..plans.softmax.call_options import window_ends

SET_BY_CACHE = "lengths", "pages", "k_new", "v_new", "rotary", "k_new_norm", "cu_seqlens_new", "interleaved"


class AttentionCache(NamedTuple):
    """What softmax attention knows of the tokens so far, for N sequences: keys, normalised and rotated, and values.

    k, v: (N, max_length, kv_heads, head_dim). lengths: (N), int32, how many tokens each sequence has. rotary: (cos, sin) of all
    positions, each (max_length, head_dim / 2), float32, as attention.decode takes them; None without rotary. A call writes the
    tokens after those that are there and adds their number to lengths, all in place, so a CUDA graph that holds the call serves
    all tokens. To forget the last n tokens, such as drafts that were rejected: cache.lengths.sub_(n).

    pages: None, or (N, most pages), int32, the page table of pools k and v (pages, page size, kv_heads, head_dim), such as
    those of a layer of attention.cache.PagedCache.

    k_descale, v_descale: None, or for caches of torch.float8_e4m3fn or torch.int8 what their numbers are multiplied by,
    float32, (N, max_length, kv_heads) or (pages, page size, kv_heads): one for each token and head, which calls write, too."""

    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    pages: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None

    def __repr__(self) -> str:  # the numbers of a whole cache help nobody
        shape, count = tuple(self.k.shape), self.lengths.shape[0]
        paged = ", in pages" * (self.pages is not None)
        return f"AttentionCache({count} sequences, max_length={self.max_length}, k.shape={shape}, {self.k.dtype}{paged})"

    @property
    def max_length(self) -> int:
        """How many tokens there is room for in a sequence."""
        return self.k.shape[1] if self.pages is None else self.pages.shape[1] * self.k.shape[1]

    @property
    def descales(self) -> dict[str, torch.Tensor]:
        """The arguments of attention.decode for k_descale and v_descale, none if there are none."""
        return (
            {}
            if self.k_descale is None or self.v_descale is None
            else {"k_descale": self.k_descale, "v_descale": self.v_descale}
        )

    def reset(self) -> None:
        """Forget all tokens: the next call begins a new sequence."""
        self.lengths.zero_()

    def add_lengths(self, tokens: int, cu_seqlens: torch.Tensor | None) -> None:
        """Count new tokens: `tokens` of each sequence, or those of packed sequences."""
        self.lengths.add_(tokens if cu_seqlens is None else cu_seqlens.diff())

    def check(
        self, x: torch.Tensor, heads: tuple[int, int], rotary: float | None, options: dict[str, Any], positions: Any
    ) -> None:
        """Check that a layer with (kv_heads, head_dim), whose options of a call are these, can use the cache for x (B, S, dim).
        ValueError: it has another number of sequences, is another layer's or has no room for so many tokens; the layer is not
        causal; or there are positions. TypeError: an option is the cache's own."""
        _, right = window_ends(options["window"])
        if not options["causal"] and right != 0:
            raise ValueError(
                "cache: needs a causal layer, for tokens of earlier calls do not see later ones: "
                f"causal={options['causal']}, window={options['window']}"
            )
        if positions is not None:
            raise ValueError("positions: must be None with a cache, whose lengths say where the tokens are")
        for name in (*SET_BY_CACHE, *self.descales):
            if name in options:
                raise TypeError(f"{name}: must not be passed with a cache, which sets it")
        ends = options.get("cu_seqlens")
        sequences = len(x) if ends is None else len(ends) - 1
        if self.lengths.shape != (sequences,):
            raise ValueError(
                f"cache: must be of {sequences} sequences, as new_cache({sequences}, max_length) makes it: "
                f"cache.lengths.shape={tuple(self.lengths.shape)}, x.shape={tuple(x.shape)}"
            )
        for name, array in {"k": self.k, "v": self.v}.items():
            if array.ndim != 4 or array.shape[2:] != heads or (self.pages is None and len(array) != sequences):
                first = sequences if self.pages is None else "pages"
                raise ValueError(
                    f"cache: {name} must be ({first}, tokens, {heads[0]}, {heads[1]}): cache.{name}.shape={tuple(array.shape)}"
                )
        if (rotary is None) != (self.rotary is None):
            raise ValueError(
                f"cache: must have rotary tables if the layer has rotary, and only then: {rotary=}, "
                f"cache.rotary={'None' if self.rotary is None else '(cos, sin)'}"
            )
        if ends is None and x.shape[1] > self.max_length:
            raise ValueError(f"cache: has room for {self.max_length} tokens a sequence: x.shape={tuple(x.shape)}")
