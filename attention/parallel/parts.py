"""Parts of sequences, one rank's behind another's, and what becomes of a state that goes through them: see recurrent.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ..recurrent.kernels.tokens import CHUNK
from .orders import Span
from .peers import Peers

MIN_DECAY = -1000.0  # a decay to less leaves nothing
FORGOTTEN = -64 * math.log(2)  # what has decayed by more is less than a float32 holds of anything within 2^40 of it
MIN_CHUNKS = 16  # chunks of a sequence, from which on it is worth a look which are forgotten


class SequenceShard:
    """This rank's part of the whole: its tokens, and what of the whole's sequences lies in them. cut: into how many segments
    each of these is cut, that then lie one behind the other in one batch; `ends` are theirs."""

    def __init__(self, span: Span, batch: int, ends: Any, device: Any):
        self.span, self.batch, self.device, self.segments, self.even = span, batch, device, 1, ends is None
        self.ends = None if ends is None else (ends - span.start).clamp(0, len(span)).to(ends.dtype)
        self.sequences = batch if ends is None else len(ends) - 1

    def cut(self, segments: int) -> SequenceShard:
        """Each sequence cut into so many segments, of whole chunks but for the last one."""
        if segments == 1:
            return self
        found = SequenceShard(self.span, self.batch, None, self.device)
        found.segments, found.sequences, found.even = segments, self.sequences * segments, self.even
        if self.ends is None:
            found.ends = _even_ends(self.batch, len(self.span), segments, self.device)
        else:
            starts, lengths = self.ends[:-1, None], self.ends.diff()[:, None]
            steps = (lengths + (segments * CHUNK - 1)) // (segments * CHUNK) * CHUNK
            begins = starts + torch.minimum(lengths, steps * torch.arange(segments, device=self.device))
            found.ends = torch.cat([begins.flatten(), self.ends[-1:]]).to(self.ends.dtype)
        return found

    def options(self) -> dict[str, Any]:
        """What is said of it to a function of one GPU."""
        return {} if self.ends is None else {"cu_seqlens": self.ends}

    def packed(self, x: Any) -> Any:
        """An array of tokens (B, S, ..) as such a function takes it."""
        return x if self.ends is None or self.batch == 1 else x.flatten(0, 1)[None]

    def tokens(self) -> Any:
        """How many tokens of each sequence, or segment, lie in it, (N)."""
        return torch.full((self.sequences,), len(self.span), device=self.device) if self.ends is None else self.ends.diff()

    def sums(self, x: Any) -> Any:
        """Of each sequence, or segment, the sum of decays (B, S, ..) over its tokens here, (N, ..)."""
        x = x.float().clamp(min=MIN_DECAY)  # no difference of infinities
        if self.ends is None:
            return x.sum(1)
        x = self.packed(x)[0].cumsum(0, dtype=torch.float64)
        return torch.cat([x.new_zeros((1, *x.shape[1:])), x])[self.ends.long()].diff(dim=0).float()

    def forgotten(self, growth: Any) -> Any:
        """How many chunks at the beginning of each segment nothing is left of at its end, (N, H, 1); None: it is not worth a
        look, or segments are not alike. growth: (B, S, H), the logarithm of what each token multiplies a state by at most."""
        chunks = -(-len(self.span) // (self.segments * CHUNK))
        if not self.even or chunks < MIN_CHUNKS:
            return None
        growth = torch.nn.functional.pad(growth, (0, 0, 0, self.segments * chunks * CHUNK - len(self.span)))
        sums = growth.reshape(self.sequences, chunks, CHUNK, growth.shape[2]).sum(2)
        later = sums.flip(1).cumsum(1).flip(1)  # of a chunk and all that follow: it multiplies the state before it
        number = torch.arange(chunks, dtype=torch.float32, device=self.device)[:, None]
        return torch.where(later < FORGOTTEN, number, 0.0).amax(1)[..., None]


@functools.lru_cache(64)
def _even_ends(batch: int, length: int, segments: int, device: Any) -> Any:
    """Where segments of as many tokens end, of batches that lie one behind the other."""
    step = -(-length // (segments * CHUNK)) * CHUNK
    begins = [b * length + min(length, n * step) for b in range(batch) for n in range(segments)]
    return torch.tensor([*begins, batch * length], dtype=torch.int32, device=device)


class GatheredSummaries:
    """The summaries (M, N) of all ranks, one behind the other; the N of the first is what it leaves of the state before the
    whole. summary: this rank's, numbers, M's first and N's last; shapes: of M and of N; as_state: what makes a state of one
    that is laid out as N is."""

    def __init__(
        self,
        peers: Peers,
        summary: Any,
        shapes: tuple[Any, Any],
        compose: Callable[[Any, Any], Any],
        as_state: Callable[[Any], Any],
    ):
        self.compose, self.shapes, self.as_state = compose, shapes, as_state
        self.every = peers.all_gather(summary)

    @classmethod
    def of(cls, peers: Peers, m: Any, left: Any, compose: Callable[[Any, Any], Any]) -> GatheredSummaries:
        """Where this rank's are by themselves."""
        summary = torch.cat([m.float().flatten(), left.float().flatten()])
        return cls(peers, summary, (m.shape, left.shape), compose, lambda state: state.contiguous())

    def before(self, rank: int) -> Any:
        """The state before the part of a rank other than the first."""
        state: Any = None
        for one in self.every[:rank]:
            of_m, of_left = self.shapes
            m, left = one[: of_m.numel()].view(of_m), one[len(one) - of_left.numel() :].view(of_left)
            state = left if state is None else self.compose(m, state) + left
        return self.as_state(state)
