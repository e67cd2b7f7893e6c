"""attention.parallel.linear, delta_rule and mamba2: recurrences over a sequence that is spread over several ranks, in
contiguous shards.

A rank's shard maps a state S (Dk, Dv) to M S + N. N is the state after the shard if the state before it is 0. M is the product
of its tokens' decays, a number or a vector (Dk) for each head, or for the delta rule a matrix (Dk, Dk). Only these summaries
are sent, Dk (Dk + Dv) numbers for each head, in float32; each rank composes those of the ranks before it,

    S_0 = initial_state        S_(r+1) = M_r S_r + N_r

and computes its outputs from S_r. So there are two passes over a shard, one for the summary, which computes no outputs, and one
for the outputs. In both, a shard is split into as many segments as fill the GPU; the state before each segment follows by the
same algebra. docs/parallel.md says what the passes cost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import attention

from .. import gates
from ..options import check_flag
from ..plans.recurrent.chunk_states import STORED, choose_memory
from ..plans.recurrent.raw_gradients import evaluate_by_kernels, normalize_by_kernels
from ..public import delta_rules, linear_family, linear_gradients, mamba
from .peers import disable_compile
from .recurrence import SegmentedRecurrence, Shape, ShardedRecurrence
from .sequence_shard import MIN_LOG_DECAY, SequenceShard

MAX_KEY_DIM = 128  # of the kernels of linear and mamba2 that split sequences into segments on every GPU
MAX_VALUE_DIM = 256


@disable_compile
def linear(q: Any, k: Any, v: Any, *, group: Any = None, length: int | None = None, **options: Any) -> Any:
    """attention.linear of a sequence that is spread over several ranks, in contiguous shards (`attention.parallel.shard(..,
    order="contiguous")`, or `reorder` from zigzag). Arguments and results are linear's; decay is this rank's shard, unless it
    is one number for each head.

    Raw gates, raw beta and qk_l2norm (attention.gates) are evaluated first, by torch.

    initial_state is the state before the whole sequence, and is read on the first rank alone. return_state gives the state
    after the whole, on every rank. cu_seqlens is that of the whole sequence. group: a process group, a dimension of a
    DeviceMesh, or None for all processes. length: tokens of the whole, if shards differ in length. layout, out, stream and
    normalize=True are not supported.

    Differentiable once, with respect to all arrays, for outputs and the returned state: all ranks must ask for gradients, and
    each must call backward. Gradients of arrays that every rank has (a decay of each head) are this rank's part, like those of
    a model's weights: their sum over the ranks is the gradient. Their order of sums is fixed.

    ValueError on every rank, before anything is sent: ranks disagree. TypeError: an array is not a torch tensor."""
    q, k, _, options = _evaluate_raw(q, k, None, options)
    kind = SegmentedLinear if SegmentedLinear.supports(k, options.get("decay")) else ShardedLinear
    return kind((q, k, v), options).run(group, length)


@disable_compile
def delta_rule(q: Any, k: Any, v: Any, beta: Any, *, group: Any = None, length: int | None = None, **options: Any) -> Any:
    """attention.delta_rule of a sequence that is spread over several ranks: see `linear`. beta: this rank's shard."""
    q, k, beta, options = _evaluate_raw(q, k, beta, options)
    return ShardedDeltaRule((q, k, v, beta), options).run(group, length)


@disable_compile
def mamba2(x: Any, dt: Any, A: Any, B: Any, C: Any, *, group: Any = None, length: int | None = None, **options: Any) -> Any:
    """attention.mamba2 of a sequence that is spread over several ranks: see `linear`. dt, B, C and z: this rank's shards; A, D
    and dt_bias: whole. seq_idx is not supported; use cu_seqlens of the whole sequence instead."""
    kind = SegmentedMamba2 if SegmentedMamba2.supports(B) else ShardedMamba2
    return kind((x, dt, A, B, C), options).run(group, length)


def _evaluate_raw(q: Any, k: Any, beta: Any, options: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """q, k, beta and the options, with raw gates, raw beta and qk_l2norm evaluated, because a shard's M and N depend on the
    values."""
    beta, options = gates.evaluate(beta) if isinstance(beta, gates.RawBeta) else beta, dict(options)
    if isinstance(options.get("decay"), gates.RawGate):
        options["decay"] = evaluate_by_kernels(options["decay"], "bshd")
    if check_flag("qk_l2norm", options.pop("qk_l2norm", False)):
        q, k = normalize_by_kernels(q), normalize_by_kernels(k)
    return q, k, beta, options


class ShardedLinear(ShardedRecurrence):
    """attention.linear. M: for each head a number, or a vector of the channels' decays."""

    function = staticmethod(attention.linear)
    backward: Callable = staticmethod(attention.linear_backward)  # SegmentedLinear's takes states

    def m_shape(self, shard: SequenceShard) -> Shape:
        k, v, decay = self.arrays[1], self.arrays[2], self.options.get("decay")
        return shard.sequences, v.shape[2], k.shape[3] if decay is not None and decay.ndim == 4 else 1, 1

    def summarize(self, shard: SequenceShard) -> tuple[Any, Any]:
        decay, shape = self.options.get("decay"), self.m_shape(shard)
        if decay is None:
            total = torch.zeros(shape, device=shard.device)
        elif decay.ndim == 1:
            total = decay.float() * shard.lengths()[:, None]
        else:
            total = shard.sum_log_decays(decay)
        return total.exp().reshape(shape), self.call(shard, return_state=True)[1]


class SegmentedLinear(SegmentedRecurrence, ShardedLinear):
    """attention.linear, by the kernels that split sequences into segments."""

    backward, reuses_states = staticmethod(linear_gradients.gradients_from_segments), True

    @staticmethod
    def supports(k: Any, decay: Any) -> bool:
        """Do these kernels support the call? Not decays of channels, nor wide keys."""
        return _last_extent(k) <= MAX_KEY_DIM and getattr(decay, "ndim", 0) < 4  # other objects: see _check_options

    def segment_states(self, shard: SequenceShard) -> tuple[Any, Any]:
        return linear_family.segment_states(*self.arrays, **self._select_options(shard, "decay"))

    def outputs_from_segments(self, shard: SequenceShard, local_state: Any, total_decay: Any, state: Any) -> Any:
        options = self._select_options(shard, "decay", "scale") | {"initial_state": state}
        q, k, v = self.arrays
        memory, decay = self.options.get("memory", STORED), options.get("decay")
        if not self.in_training or choose_memory(memory, q, v, decay, False, options.get("family")) != STORED:
            return linear_family.outputs_from_segments(q, k, v, local_state, total_decay, **options)
        out, chunk_states = linear_family.outputs_from_segments(
            q, k, v, local_state, total_decay, return_chunk_states=True, **options
        )
        self.stored = {"chunk_states": chunk_states}
        return out

    def reverse_states(self, shard: SequenceShard, dout: Any) -> tuple[Any, Any]:
        q, scale = self.arrays[0], self.options.get("scale")
        options = self._select_options(shard, "decay")
        local_state, total_decay = linear_family.segment_states(q, q, dout, reverse=True, **options)
        local_state.mul_(q.shape[-1] ** -0.5 if scale is None else scale)
        self.stored |= {"local_state": local_state, "total_decay": total_decay}
        return local_state, total_decay

    def convert_state(self, state: Any) -> Any:
        return state.transpose(-1, -2)


class ShardedDeltaRule(ShardedRecurrence):
    """attention.delta_rule. M: a matrix for each head, which is the state after the shard if the state before it is the
    identity and all values are 0."""

    function, backward = staticmethod(attention.delta_rule), staticmethod(attention.delta_rule_backward)
    names = "q", "k", "v", "beta"

    def m_shape(self, shard: SequenceShard) -> Shape:
        k, v = self.arrays[1], self.arrays[2]
        return shard.sequences, v.shape[2], k.shape[3], k.shape[3]

    def summarize(self, shard: SequenceShard) -> tuple[Any, Any]:
        """(M, N), computed together: the state [0 | I] becomes [N | M], with columns of 0 as M's values. With decays of
        channels these columns are appended to v, if that has then at most 256 columns; else M and N are two calls."""
        q, k, v, beta = self.arrays
        keys, columns = k.shape[3], v.shape[3]
        initial = _zero_and_identity(keys, columns, k.device).expand(*self.m_shape(shard)[:2], -1, -1)
        if not self._has_channel_decay():
            final = self._final_states(shard, initial)
            return final[..., columns:], final[..., :columns]
        zeros = v.new_zeros((*v.shape[:3], keys))
        if keys + columns > MAX_VALUE_DIM:
            identity = initial[..., columns:].contiguous()
            m_call = ShardedDeltaRule((q, k, zeros, beta), self.options)
            m = m_call.call(shard, initial_state=identity, return_state=True)[1]
            return m, self.call(shard, return_state=True)[1]
        wide_call = ShardedDeltaRule((q, k, torch.cat([v, zeros], -1), beta), self.options)
        final = wide_call.call(shard, initial_state=initial.contiguous(), return_state=True)[1]
        return final[..., columns:], final[..., :columns]

    def run_first_shard(self, shard: SequenceShard, initial: Any) -> tuple[Any, Any]:
        """(None, state after it): other ranks get the state sooner by a pass that computes no outputs."""
        if self._has_channel_decay():
            return super().run_first_shard(shard, initial)
        initial = torch.zeros(self.state_shape(shard), device=shard.device) if initial is None else initial
        return None, self._final_states(shard, initial)

    def _has_channel_decay(self) -> bool:
        decay = self.options.get("decay")
        return decay is not None and decay.ndim == 4

    def _final_states(self, shard: SequenceShard, initial: Any) -> Any:
        """The state after each sequence or segment, without outputs."""
        _, k, v, beta = map(shard.pack, self.arrays)
        options = self.options | shard.varlen_options()
        options = {name: x for name, x in options.items() if name in ("decay", "cu_seqlens", "family")}
        if options.get("decay") is not None and options["decay"].ndim > 1:
            options["decay"] = shard.pack(options["decay"])
        return delta_rules.final_states(k, v, beta, initial, skipped=self._forgotten_chunks(shard), **options)

    def _forgotten_chunks(self, shard: SequenceShard) -> Any:
        """The number of chunks that leave nothing in the final state: see SequenceShard.count_forgotten_chunks. A token
        multiplies a state by exp(decay) (1 - beta k k^T), whose norm is exp(decay), or more if beta |k|^2 is not between 0 and
        2."""
        _, k, v, beta = self.arrays
        decay = self.options.get("decay")
        if decay is None:
            return None
        lengths = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).repeat_interleave(v.shape[2] // k.shape[2], 2)
        norms = (1 - beta.float() * lengths.square()).abs().clamp(min=1)
        return shard.count_forgotten_chunks(decay.float().clamp(min=MIN_LOG_DECAY) + norms.log())

    def compose(self, m: Any, state: Any) -> Any:
        """M S, for matrices M."""
        return m @ state

    def transpose(self, m: Any) -> Any:
        return m.mT


class ShardedMamba2(ShardedRecurrence):
    """attention.mamba2. M: a number for each head; states are transposed."""

    function, backward = staticmethod(attention.mamba2), staticmethod(attention.mamba2_backward)
    final_gradient, optional_gradients = "dstates", ("D", "z", "dt_bias", "initial_states")
    initial_option, final_option, value_index, without_tokens = "initial_states", "return_final_states", 0, (2,)
    names, autocast_names = ("x", "dt", "A", "B", "C"), ("x", "B", "C", "z")

    def m_shape(self, shard: SequenceShard) -> Shape:
        return shard.sequences, self.arrays[0].shape[2], 1, 1

    def state_shape(self, shard: SequenceShard) -> Shape:
        x, B = self.arrays[0], self.arrays[3]
        return shard.sequences, x.shape[2], x.shape[3], B.shape[3]

    def count_segments(self, shard: SequenceShard) -> int:
        """1, because z is not split into segments."""
        return 1

    def summarize(self, shard: SequenceShard) -> tuple[Any, Any]:
        total = shard.sum_log_decays(self.log_decays()).exp().reshape(self.m_shape(shard))
        return total, self.call(shard, return_final_states=True)[1]

    def log_decays(self) -> Any:
        """The logarithm of each token's decay, dt A, in float32."""
        _, dt, A, _, _ = self.arrays
        bias = self.options.get("dt_bias")
        steps = dt.float() if bias is None else dt.float() + bias.float()
        steps = torch.nn.functional.softplus(steps) if self.options.get("dt_softplus") else steps
        return steps.clamp(*self.options.get("dt_limit", (0.0, None))) * A.float()


class SegmentedMamba2(SegmentedRecurrence, ShardedMamba2):
    """attention.mamba2, by the kernels that split sequences into segments."""

    @staticmethod
    def supports(B: Any) -> bool:
        """Do these kernels support the call? Not wide keys."""
        return _last_extent(B) <= MAX_KEY_DIM

    def segment_states(self, shard: SequenceShard) -> tuple[Any, Any]:
        return mamba.segment_states(*self.arrays, **self._select_options(shard, "dt_bias", "dt_softplus", "dt_limit"))

    def outputs_from_segments(self, shard: SequenceShard, local_state: Any, total_decay: Any, state: Any) -> Any:
        options = self._select_options(shard, "D", "z", "dt_bias", "dt_softplus", "dt_limit")
        x, _, _, B, _ = self.arrays
        options |= {"local_state": local_state, "total_decay": total_decay, "initial_states": state}
        memory = self.options.get("memory", STORED)
        if not self.in_training or choose_memory(memory, B, x, None, False, options.get("family")) != STORED:
            return mamba.outputs_from_segments(*self.arrays, **options)
        out, chunk_states = mamba.outputs_from_segments(*self.arrays, return_chunk_states=True, **options)
        self.stored = {"chunk_states": chunk_states}
        return out

    def reverse_states(self, shard: SequenceShard, dout: Any) -> tuple[Any, Any]:
        C, z = self.arrays[4], self.options.get("z")
        dout = dout if z is None else (dout * torch.nn.functional.silu(z.float())).to(dout.dtype)
        options = self._select_options(shard) | {"decay": self.log_decays()}
        return linear_family.segment_states(C, C, dout, reverse=True, **options)


@functools.lru_cache(64)
def _zero_and_identity(keys: int, columns: int, device: Any) -> Any:
    """[0 | I]: a state of 0 (keys, columns) and the identity (keys, keys), side by side."""
    return torch.cat([torch.zeros(keys, columns), torch.eye(keys)], 1).to(device)[None, None]


def _last_extent(x: Any) -> int:
    """The extent of an array's last axis; 0 if x is no array."""
    return next(iter(getattr(x, "shape", ())[-1:]), 0)
