"""attention.parallel.linear, delta_rule and mamba2: recurrences of a sequence that lies on several ranks, one part behind the
other.

A rank's part changes a state S (Dk, Dv) to M S + N, whatever S was: N is what it leaves of a state of 0, and M the product of
its tokens' decays, a number or a vector (Dk) a head, or for the delta rule a matrix (Dk, Dk). These summaries are all that
travels, Dk (Dk + Dv) numbers a head, in float32; each rank composes those before it,

    S_0 = initial_state        S_(r+1) = M_r S_r + N_r

and goes through its part from S_r. So there are two passes, one for the summary, which needs no outputs, and one for these. A
part is cut into segments in both, as many as fill the GPU: what each starts from follows by the same algebra. docs/parallel.md
says what the passes cost."""

from __future__ import annotations

import functools
from typing import Any

import torch

import attention

from ..recurrent import delta_rule as delta
from ..recurrent import linear as plain
from ..recurrent import mamba2 as mamba
from .parts import MIN_DECAY, SequenceShard
from .peers import disable_compile
from .recurrence import SegmentedRecurrence, Shape, ShardedRecurrence

SEGMENTED = 128  # columns of keys, at most, where the kernels of linear and mamba2 cut sequences into segments on every GPU
WIDEST = 256  # columns of values


@disable_compile
def linear(q: Any, k: Any, v: Any, *, group: Any = None, length: int | None = None, **options: Any) -> Any:
    """attention.linear of a sequence that is spread over several ranks, in contiguous shares
    (`attention.parallel.shard(.., order="contiguous")`, or `reorder` from zigzag). Arguments and results are linear's; decay
    is this rank's share, except for one of heads.

    initial_state is that before the whole sequence, and counts on the first rank only. return_state gives the state after
    the whole, on every rank. cu_seqlens is that of the whole sequence. group: a process group, a dimension of a DeviceMesh,
    or None for all processes. length: tokens of the whole, if shares differ. layout, out, stream and normalize=True are not
    supported.

    ValueError on every rank, before anything travels: ranks disagree. TypeError: an array that is not torch's."""
    kind = SegmentedLinear if SegmentedLinear.serves(k, options.get("decay")) else ShardedLinear
    return kind((q, k, v), options).run(group, length)


@disable_compile
def delta_rule(q: Any, k: Any, v: Any, beta: Any, *, group: Any = None, length: int | None = None, **options: Any) -> Any:
    """attention.delta_rule of a sequence that is spread over several ranks: see `linear`. beta: this rank's share."""
    return ShardedDeltaRule((q, k, v, beta), options).run(group, length)


@disable_compile
def mamba2(x: Any, dt: Any, A: Any, B: Any, C: Any, *, group: Any = None, length: int | None = None, **options: Any) -> Any:
    """attention.mamba2 of a sequence that is spread over several ranks: see `linear`. dt, B, C and z: this rank's shares.
    seq_idx is not supported: cu_seqlens, of the whole sequence, does the same."""
    kind = SegmentedMamba2 if SegmentedMamba2.serves(B) else ShardedMamba2
    return kind((x, dt, A, B, C), options).run(group, length)


class ShardedLinear(ShardedRecurrence):
    """attention.linear. M: a number a head, or one a channel."""

    function = staticmethod(attention.linear)

    def map_shape(self, place: SequenceShard) -> Shape:
        k, v, decay = self.arrays[1], self.arrays[2], self.options.get("decay")
        return place.sequences, v.shape[2], k.shape[3] if decay is not None and decay.ndim == 4 else 1, 1

    def summary(self, place: SequenceShard) -> tuple[Any, Any]:
        decay, shape = self.options.get("decay"), self.map_shape(place)
        if decay is None:
            total = torch.zeros(shape, device=place.device)
        elif decay.ndim == 1:
            total = decay.float() * place.tokens()[:, None]
        else:
            total = place.sums(decay)
        return total.exp().reshape(shape), self.call(place, return_state=True)[1]


class SegmentedLinear(SegmentedRecurrence, ShardedLinear):
    """attention.linear so."""

    @staticmethod
    def serves(k: Any, decay: Any) -> bool:
        """Not for decays of channels, nor for wide keys."""
        return _columns(k) <= SEGMENTED and getattr(decay, "ndim", 0) < 4  # of what is no array `_check` says so

    def segment_states(self, place: SequenceShard) -> tuple[Any, Any]:
        return plain.segment_states(*self.arrays, **self._select_options(place, "decay"))

    def outputs_from_segments(self, place: SequenceShard, local: Any, total: Any, state: Any) -> Any:
        q, k, v = self.arrays
        return plain.outputs_from_segments(
            q, k, v, local, total, initial_state=state, **self._select_options(place, "decay", "scale")
        )

    def as_states(self, left: Any) -> Any:
        return left.transpose(-1, -2)


class ShardedDeltaRule(ShardedRecurrence):
    """attention.delta_rule. M: a matrix a head, what a state of 1 becomes where there are no values."""

    function = staticmethod(attention.delta_rule)
    names = "q", "k", "v", "beta"

    def map_shape(self, place: SequenceShard) -> Shape:
        k, v = self.arrays[1], self.arrays[2]
        return place.sequences, v.shape[2], k.shape[3], k.shape[3]

    def summary(self, place: SequenceShard) -> tuple[Any, Any]:
        """See Recurrence: both at once, from a state [0 | 1]; with decays of channels by values [v | 0], where that is no more
        than 256 columns."""
        q, k, v, beta = self.arrays
        keys, columns = k.shape[3], v.shape[3]
        begin = _nothing_and_one(keys, columns, k.device).expand(*self.map_shape(place)[:2], -1, -1)
        if not self._of_channels():
            both = self._states(place, begin)
            return both[..., columns:], both[..., :columns]
        none = v.new_zeros((*v.shape[:3], keys))
        if keys + columns > WIDEST:
            one = begin[..., columns:].contiguous()
            m = ShardedDeltaRule((q, k, none, beta), self.options).call(place, initial_state=one, return_state=True)[1]
            return m, self.call(place, return_state=True)[1]
        both = ShardedDeltaRule((q, k, torch.cat([v, none], -1), beta), self.options)
        left = both.call(place, initial_state=begin.contiguous(), return_state=True)[1]
        return left[..., columns:], left[..., :columns]

    def first(self, place: SequenceShard, begin: Any) -> tuple[Any, Any]:
        """See Recurrence: others get the state sooner by a pass of its own, which makes no output."""
        if self._of_channels():
            return super().first(place, begin)
        begin = torch.zeros(self.left_shape(place), device=place.device) if begin is None else begin
        return None, self._states(place, begin)

    def _of_channels(self) -> bool:
        decay = self.options.get("decay")
        return decay is not None and decay.ndim == 4

    def _states(self, place: SequenceShard, begin: Any) -> Any:
        _, k, v, beta = map(place.packed, self.arrays)
        options = {name: x for name, x in (self.options | place.options()).items() if name in ("decay", "cu_seqlens", "family")}
        if options.get("decay") is not None and options["decay"].ndim > 1:
            options["decay"] = place.packed(options["decay"])
        return delta.final_states(k, v, beta, begin, skipped=self._forgotten(place), **options)

    def _forgotten(self, place: SequenceShard) -> Any:
        """What need not be walked for a state, as it has decayed to nothing at the end: see Part.forgotten. A token multiplies
        a state by exp(decay) (1 - beta k k^T), whose norm is exp(decay) or, where beta |k|^2 is not between 0 and 2, more."""
        _, k, v, beta = self.arrays
        decay = self.options.get("decay")
        if decay is None:
            return None
        lengths = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).repeat_interleave(v.shape[2] // k.shape[2], 2)
        norms = (1 - beta.float() * lengths.square()).abs().clamp(min=1)
        return place.forgotten(decay.float().clamp(min=MIN_DECAY) + norms.log())

    def compose(self, m: Any, state: Any) -> Any:
        return m @ state


class ShardedMamba2(ShardedRecurrence):
    """attention.mamba2. M: a number a head; states have their axes swapped."""

    function = staticmethod(attention.mamba2)
    before, after, values, whole = "initial_states", "return_final_states", 0, (2,)
    names, tiles = ("x", "dt", "A", "B", "C"), ("x", "B", "C", "z")

    def map_shape(self, place: SequenceShard) -> Shape:
        return place.sequences, self.arrays[0].shape[2], 1, 1

    def left_shape(self, place: SequenceShard) -> Shape:
        x, B = self.arrays[0], self.arrays[3]
        return place.sequences, x.shape[2], x.shape[3], B.shape[3]

    def segments(self, place: SequenceShard) -> int:
        """See Recurrence: its z is not cut."""
        return 1

    def summary(self, place: SequenceShard) -> tuple[Any, Any]:
        _, dt, A, _, _ = self.arrays
        bias = self.options.get("dt_bias")
        steps = dt.float() if bias is None else dt.float() + bias.float()
        steps = (torch.nn.functional.softplus(steps) if self.options.get("dt_softplus") else steps).clamp(min=0)
        total = place.sums(steps * A.float()).exp().reshape(self.map_shape(place))
        return total, self.call(place, return_final_states=True)[1]


class SegmentedMamba2(SegmentedRecurrence, ShardedMamba2):
    """attention.mamba2 so."""

    @staticmethod
    def serves(B: Any) -> bool:
        """Not for wide keys."""
        return _columns(B) <= SEGMENTED

    def segment_states(self, place: SequenceShard) -> tuple[Any, Any]:
        return mamba.segment_states(*self.arrays, **self._select_options(place, "dt_bias", "dt_softplus"))

    def outputs_from_segments(self, place: SequenceShard, local: Any, total: Any, state: Any) -> Any:
        options = self._select_options(place, "D", "z", "dt_bias", "dt_softplus")
        x, dt, A, B, C = self.arrays
        return mamba.outputs_from_segments(x, dt, A, B, C, local, total, initial_states=state, **options)


@functools.lru_cache(64)
def _nothing_and_one(keys: int, columns: int, device: Any) -> Any:
    """[0 | 1], a state of 0 and one of 1 beside each other."""
    return torch.cat([torch.zeros(keys, columns), torch.eye(keys)], 1).to(device)[None, None]


def _columns(x: Any) -> int:
    """Those of an array; 0 of what is none."""
    return next(iter(getattr(x, "shape", ())[-1:]), 0)
