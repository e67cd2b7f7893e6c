"""The shards of sequences that a recurrence is computed on, and the states that pass from one rank's shard to the next: see
recurrent.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ..parts.recurrent.tokens import CHUNK
from .orders import Span
from .peers import Peers

MIN_LOG_DECAY = -1000.0  # a smaller log decay leaves nothing either
FORGOTTEN_LOG = -64 * math.log(2)  # a state that decays by more leaves less than float32 resolves beside values 2^-40 as large
MIN_CHUNKS = 16  # the fewest chunks of a segment for which counting the forgotten ones pays


class SequenceShard:
    """This rank's shard of the whole: its tokens, and the parts of the sequences among them. segments: into how many segments
    each of these parts is split, packed in one batch; cu_seqlens: where the parts or segments begin and end, None if there is
    one in each batch; sequences: how many there are; uniform: do all have the same number of tokens?"""

    def __init__(self, span: Span, batch: int, cu_seqlens: Any, device: Any):
        self.span, self.batch, self.device, self.segments, self.uniform = span, batch, device, 1, cu_seqlens is None
        self.cu_seqlens = None if cu_seqlens is None else (cu_seqlens - span.start).clamp(0, len(span)).to(cu_seqlens.dtype)
        self.sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1

    def split(self, segments: int) -> SequenceShard:
        """The shard with each sequence split into so many segments, of whole chunks except for the last."""
        if segments == 1:
            return self
        shard = SequenceShard(self.span, self.batch, None, self.device)
        shard.segments, shard.sequences, shard.uniform = segments, self.sequences * segments, self.uniform
        if self.cu_seqlens is None:
            shard.cu_seqlens = _uniform_cu_seqlens(self.batch, len(self.span), segments, self.device)
        else:
            starts, lengths = self.cu_seqlens[:-1, None], self.cu_seqlens.diff()[:, None]
            steps = (lengths + (segments * CHUNK - 1)) // (segments * CHUNK) * CHUNK
            begins = starts + torch.minimum(lengths, steps * torch.arange(segments, device=self.device))
            shard.cu_seqlens = torch.cat([begins.flatten(), self.cu_seqlens[-1:]]).to(self.cu_seqlens.dtype)
        return shard

    def varlen_options(self) -> dict[str, Any]:
        """The shard's cu_seqlens as an option of attention's functions, if there is one."""
        return {} if self.cu_seqlens is None else {"cu_seqlens": self.cu_seqlens}

    def pack(self, x: Any) -> Any:
        """An array of tokens (B, S, ..), packed in one batch if attention's functions get cu_seqlens."""
        return x if self.cu_seqlens is None or self.batch == 1 else x.flatten(0, 1)[None]

    def lengths(self) -> Any:
        """How many tokens each sequence or segment has in this shard, (N)."""
        if self.cu_seqlens is None:
            return torch.full((self.sequences,), len(self.span), device=self.device)
        return self.cu_seqlens.diff()

    def sum_log_decays(self, x: Any) -> Any:
        """The sum of log decays (B, S, ..) over each sequence's or segment's tokens in this shard, (N, ..)."""
        x = x.float().clamp(min=MIN_LOG_DECAY)  # differences of infinities would be NaN
        if self.cu_seqlens is None:
            return x.sum(1)
        x = self.pack(x)[0].cumsum(0, dtype=torch.float64)
        return torch.cat([x.new_zeros((1, *x.shape[1:])), x])[self.cu_seqlens.long()].diff(dim=0).float()

    def count_forgotten_chunks(self, growth: Any) -> Any:
        """How many chunks at the beginning of each segment leave nothing in the state at its end, (N, H, 1). None: counting
        does not pay, or segments differ in length. growth: (B, S, H), the logarithm of the largest factor by which each token
        multiplies a state."""
        chunks = -(-len(self.span) // (self.segments * CHUNK))
        if not self.uniform or chunks < MIN_CHUNKS:
            return None
        growth = torch.nn.functional.pad(growth, (0, 0, 0, self.segments * chunks * CHUNK - len(self.span)))
        sums = growth.reshape(self.sequences, chunks, CHUNK, growth.shape[2]).sum(2)
        remaining = sums.flip(1).cumsum(1).flip(1)  # of a chunk and all later ones: the factor of the state before the chunk
        number = torch.arange(chunks, dtype=torch.float32, device=self.device)[:, None]
        return torch.where(remaining < FORGOTTEN_LOG, number, 0.0).amax(1)[..., None]


@functools.lru_cache(64)
def _uniform_cu_seqlens(batch: int, length: int, segments: int, device: Any) -> Any:
    """The cu_seqlens of the segments of sequences of the same length, packed."""
    step = -(-length // (segments * CHUNK)) * CHUNK
    begins = [b * length + min(length, n * step) for b in range(batch) for n in range(segments)]
    return torch.tensor([*begins, batch * length], dtype=torch.int32, device=device)


class GatheredSummaries:
    """The summaries (M, N) of all ranks, where a shard maps a state S to M S + N; the first rank's N includes the initial
    state. summary: this rank's, as numbers, M's first and N's last; shapes: of M and of N; convert: makes a state of N's layout
    one of the function's layout."""

    def __init__(
        self,
        peers: Peers,
        summary: Any,
        shapes: tuple[Any, Any],
        compose: Callable[[Any, Any], Any],
        convert: Callable[[Any], Any],
    ):
        self.compose, self.shapes, self.convert = compose, shapes, convert
        self.summaries = peers.all_gather(summary)

    @classmethod
    def gather(cls, peers: Peers, m: Any, n: Any, compose: Callable[[Any, Any], Any]) -> GatheredSummaries:
        """All ranks' summaries, from this rank's M and N as separate arrays."""
        summary = torch.cat([m.float().flatten(), n.float().flatten()])
        return cls(peers, summary, (m.shape, n.shape), compose, lambda state: state.contiguous())

    def state_before(self, rank: int) -> Any:
        """The state before the shard of a rank, which is not the first; of `world`, the state after the whole."""
        return self._compose_in_order(self.summaries[:rank])

    def gradient_after(self, rank: int) -> Any:
        """The gradient of the state after the shard of a rank, which is not the last, from (M^T, L) as summaries; the last
        rank's L includes the gradient of the state after the whole."""
        return self._compose_in_order(self.summaries[:rank:-1])

    def own_map(self, rank: int) -> Any:
        """M of a rank's shard, which maps the state before the shard to M S + N."""
        m_shape, _ = self.shapes
        return self.summaries[rank][: m_shape.numel()].view(m_shape)

    def _compose_in_order(self, summaries: Any) -> Any:
        """The state after all these shards; the first of them has no state before it."""
        state: Any = None
        for one in summaries:
            m_shape, n_shape = self.shapes
            m, n = one[: m_shape.numel()].view(m_shape), one[len(one) - n_shape.numel() :].view(n_shape)
            state = n if state is None else self.compose(m, state) + n
        return self.convert(state)
