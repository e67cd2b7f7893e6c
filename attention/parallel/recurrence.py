"""A recurrence on one rank's shard of a sequence: what ranks agree on, the two passes over the shard, and its segments.
recurrent.py has the equations and the recurrences themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tiles.launching.devices import machine

from ..options import check_flag
from ..parts.recurrent.tokens import CHUNK, COLUMNS
from ..plans.recurrent import recurrent_chunks
from ..plans.requires_grad import requires_grad
from ..public import linear_family
from .agreement import agree_on_plan, cache_key, describe_value
from .orders import Contiguous, Span, count_tokens
from .peers import Peers, check_torch_tensors, one_dimensional_peers
from .recurrent_gradients import ShardedRecurrenceFunction
from .sequence_shard import GatheredSummaries, SequenceShard
from .whole_checks import autocast, check_values, parse_length

Shape = tuple[int, ...]
SHARDED_OPTIONS = "decay", "z"  # options of which each rank has its shard
ALIGNED = 32  # numbers: 128 bytes


class ShardedRecurrence:
    """A call on this rank's shard, which maps a state S to M S + N. Subclasses say which function of one GPU computes it, and
    how M and N are computed. backward: the function of its gradients, which returns those of the arrays, and of the
    optional_gradients that a flag asks for. initial_option, final_option: the function's options for states; final_gradient:
    backward's; value_index: which array holds the values; without_tokens: the indices of arrays that have no token axis; names:
    of the arrays; autocast_names: the arrays and options that torch.autocast casts. in_training: will there be gradients?
    stored: what `backward` is given besides, by the names of its options: what forward stores for it, and if it reuses_states
    what gradient_before computes."""

    function: Callable
    backward: Callable
    initial_option, final_option, final_gradient = "initial_state", "return_state", "dstate"
    optional_gradients: tuple[str, ...] = "decay", "initial_state"
    value_index = 2
    without_tokens: tuple[int, ...] = ()
    names: tuple[str, ...] = "q", "k", "v"
    autocast_names: tuple[str, ...] = "q", "k", "v"
    reuses_states = False

    def __init__(self, arrays: tuple[Any, ...], options: dict[str, Any]):
        self.arrays, self.options = arrays, {name: x for name, x in options.items() if x is not None}
        self.in_training, self.stored = False, dict[str, Any]()

    def m_shape(self, shard: SequenceShard) -> Shape:
        """The shape of M, (sequences, heads, ..), with axes for what it multiplies."""
        raise NotImplementedError

    def state_shape(self, shard: SequenceShard) -> Shape:
        """The shape of a state, and so of N: (sequences, heads, key_dim, value_dim)."""
        k, v = self.arrays[1], self.arrays[2]
        return shard.sequences, v.shape[2], k.shape[3], v.shape[3]

    def summarize(self, shard: SequenceShard) -> tuple[Any, Any]:
        """(M, N) of a shard that has tokens, or of each of its segments."""
        raise NotImplementedError

    def compose(self, m: Any, state: Any) -> Any:
        """M S, for M of numbers or vectors."""
        return m * state

    def transpose(self, m: Any) -> Any:
        """M^T, which is M for numbers and vectors."""
        return m

    def gradient_before(self, shard: SequenceShard, dout: Any) -> Any:
        """L, what the gradients of the outputs contribute to that of the state before the shard, by a pass that computes
        nothing else; None: there is no such pass."""
        return None

    def tensor_options(self) -> dict[str, Any]:
        """The options that may have gradients: tensors, except cu_seqlens."""
        return {name: x for name, x in self.options.items() if isinstance(x, torch.Tensor) and name != "cu_seqlens"}

    def call(self, shard: SequenceShard, **extra_options: Any) -> Any:
        """The result of the function of one GPU on this shard. extra_options: further options."""
        arrays = [x if n in self.without_tokens else shard.pack(x) for n, x in enumerate(self.arrays)]
        options = self.options | shard.varlen_options() | extra_options
        if options.get("decay") is not None and options["decay"].ndim > 1:
            options["decay"] = shard.pack(options["decay"])
        return type(self).function(*arrays, **options)

    def run(self, group: Any, length: int | None) -> Any:
        """out, or (out, state), of this rank's shard, as attention.parallel returns it. length: of all shards."""
        peers, first = one_dimensional_peers(group), self.arrays[0]
        try:
            self._autocast()
            option_keys = [(name, cache_key(x)) for name, x in self.options.items()]
            needs_gradient = requires_grad(*self.arrays, *self.options.values())
            array_keys = [(x.device, cache_key(x)) for x in self.arrays]
            key = type(self), length, needs_gradient, *array_keys, *option_keys
            hash(key)
        except Exception:  # _plan_call raises what is wrong, on all ranks
            key = None
        span = agree_on_plan((peers,), key, lambda: self._plan_call(peers, length), getattr(first, "device", None))
        check_values(self.options, self._total_tokens(peers, length), 0)
        if peers.world == 1:
            return self.call(SequenceShard(span, first.shape[0], self.options.get("cu_seqlens"), first.device))
        tensors = dict(zip(self.names, self.arrays)) | self.tensor_options()
        if requires_grad(*tensors.values()):
            return ShardedRecurrenceFunction.apply(self, peers, span, tuple(tensors), *tensors.values())
        with torch.no_grad():
            out, final, _ = self.compute(peers, span)
        return out if final is None else (out, final)

    def compute(self, peers: Peers, span: Span) -> tuple[Any, Any, GatheredSummaries]:
        """(this shard's output, the state after the whole or None, the summaries of all ranks)."""
        first, options = self.arrays[0], self.options
        shard = SequenceShard(span, first.shape[0], options.get("cu_seqlens"), first.device)
        initial, wants_final = options.get(self.initial_option), options.get(self.final_option, False)
        self.options = {name: x for name, x in options.items() if name not in (self.initial_option, self.final_option)}
        is_needed = wants_final or peers.rank < peers.world - 1
        out, summaries = self.run_passes(peers, shard, None if peers.rank else initial, is_needed)
        return out, summaries.state_before(peers.world).contiguous() if wants_final else None, summaries

    def _autocast(self) -> None:
        """Cast like torch.autocast, which does not know all the functions that are called for a shard."""
        if torch.is_autocast_enabled(self.arrays[0].device.type):
            names = self.autocast_names
            self.arrays = tuple([autocast(x)[0] if name in names else x for name, x in zip(self.names, self.arrays)])
            self.options = {name: autocast(x)[0] if name in names else x for name, x in self.options.items()}

    def run_passes(self, peers: Peers, shard: SequenceShard, initial: Any, is_needed: bool) -> tuple[Any, GatheredSummaries]:
        """This shard's output, and the summaries of all ranks. initial: the state before the whole, on the first rank;
        is_needed: does another rank need this one's summary?"""
        segmented = shard.split(self.count_segments(shard))
        if not len(shard.span):
            summary = self._identity_summary(shard, initial)
            return self._empty_output(), GatheredSummaries.gather(peers, *summary, self.compose)
        if peers.rank == 0 and segmented is shard:  # the state before it is known, so M is not needed
            out, n = self.run_first_shard(shard, initial)
            summaries = GatheredSummaries.gather(peers, self._zero_summary(shard)[0], n, self.compose)
            return self.call(shard, **{self.initial_option: initial}) if out is None else out, summaries
        prefixes: list[tuple[Any, Any]] = []  # (M, N) of the first segment, of the first two, ..
        if is_needed or segmented.segments > 1:
            shapes = [(shard.sequences, segmented.segments, *shape(shard)[1:]) for shape in (self.m_shape, self.state_shape)]
            for m, n in zip(*[x.reshape(shape).unbind(1) for x, shape in zip(self.summarize(segmented), shapes)]):
                if prefixes:
                    before_m, before_n = prefixes[-1]
                    m, n = self.compose(m, before_m), self.compose(m, before_n) + n
                prefixes.append((m, n))
        m, n = prefixes[-1] if prefixes else self._zero_summary(shard)
        n = n if initial is None else self.compose(m, initial) + n
        summaries = GatheredSummaries.gather(peers, m, n, self.compose)
        state = summaries.state_before(peers.rank) if peers.rank else initial
        states = [self._zero_summary(shard)[1] if state is None else state]  # before each segment
        states += [n if state is None else self.compose(m, state) + n for m, n in prefixes[:-1]]
        before = states[0] if segmented is shard else torch.stack(states, 1).flatten(0, 1)
        out = self.call(segmented, **{self.initial_option: before})
        return out.reshape(self.arrays[self.value_index].shape), summaries

    def count_segments(self, shard: SequenceShard) -> int:
        """Into how many segments to split each sequence so that the thread blocks, one for 64 columns of a state, fill the
        GPU."""
        v = self.arrays[self.value_index]
        blocks = shard.sequences * v.shape[2] * -(-v.shape[3] // COLUMNS)
        tokens = len(shard.span) * shard.batch // max(1, shard.sequences)
        fitting = machine(v.device.index if v.is_cuda else None).processors // max(1, blocks)
        return max(1, min(fitting, tokens // CHUNK // recurrent_chunks.MIN_SEGMENT_CHUNKS))

    def run_first_shard(self, shard: SequenceShard, initial: Any) -> tuple[Any, Any]:
        """(output, state after it) of the whole's first shard, in one pass; the output is None where the state alone comes
        sooner, and the output needs another pass."""
        return self.call(shard, **{self.initial_option: initial, self.final_option: True})

    def _identity_summary(self, shard: SequenceShard, initial: Any) -> tuple[Any, Any]:
        """(M, N) of a shard without tokens: the identity and 0, or on the first rank the state before the whole."""
        m, n = self._zero_summary(shard)
        m += torch.eye(m.shape[-1], device=m.device) if m.shape[-1] > 1 else 1
        return m, n if initial is None else initial.float()

    def _zero_summary(self, shard: SequenceShard) -> tuple[Any, Any]:
        """(M, N) of zeros, of a shard whose summary no rank needs."""
        return torch.zeros(self.m_shape(shard), device=shard.device), torch.zeros(self.state_shape(shard), device=shard.device)

    def _empty_output(self) -> Any:
        return torch.empty_like(self.arrays[self.value_index])

    def _total_tokens(self, peers: Peers, length: int | None) -> int:
        """How many tokens the whole sequence has."""
        return self.arrays[0].shape[1] * peers.world if length is None else length

    def _plan_call(self, peers: Peers, length: int | None) -> tuple[str, Span]:
        """A description of what must be equal on all ranks, and this rank's tokens. ValueError, NotImplementedError."""
        function_name, first = type(self).function.__name__, self.arrays[0]
        check_torch_tensors(**dict(zip(self.names, self.arrays)))
        for name, x in zip(self.names, self.arrays):
            if x.ndim < 2 and name != "A":
                raise ValueError(f"{name}: must have a batch axis and a token axis: {name}.shape={tuple(x.shape)}")
        for option in ("layout", "out", "stream", "normalize", "seq_idx"):
            value = self.options.get(option, False)
            if getattr(value, "ndim", 0) or value not in (False, "bshd"):  # `in` cannot compare arrays
                raise NotImplementedError(f"{option}: is not supported on several ranks; leave it out")
        total = self._total_tokens(peers, parse_length("length", length))
        spans = Contiguous().spans(total, peers.world)[peers.rank]
        if (expected := count_tokens(spans)) != first.shape[1]:
            shares = f"rank {peers.rank} of {peers.world} has {first.shape[1]} tokens, and would have {expected} of {total}"
            raise ValueError(f"length: {shares}: give length, the number of all tokens, because shards may differ in length")
        check_flag(self.final_option, self.options.get(self.final_option, False))
        check_torch_tensors(**{option: self.options[option] for option in ("cu_seqlens",) if option in self.options})
        self._check_options(peers.rank)
        check_values(self.options, total, 0, planning=True)
        arrays = [f"{name}: {(*x.shape[:1], *x.shape[2:])} of {x.dtype}" for name, x in zip(self.names, self.arrays)]
        options = {option: x for option, x in self.options.items() if option != self.initial_option}
        values = [f"{option}={_describe_option(option, x)}" for option, x in sorted(options.items())]
        gradients = f"gradients={requires_grad(*self.arrays, *self.options.values())}"
        tokens = f"length={total}"
        if length is None:
            tokens = f"length=None of shards of {first.shape[1]}: give length where these differ"
        return "; ".join([f"function={function_name}", *arrays, tokens, gradients, *values]), spans[0] if spans else Span(0, 0)

    def _check_options(self, rank: int) -> None:
        """Call the function of one GPU without tokens: it checks everything and launches nothing. So ranks without tokens, or
        without an initial state, raise the same errors as the others."""
        arrays = [x if n in self.without_tokens else x.detach()[:, :0] for n, x in enumerate(self.arrays)]
        skipped = {self.final_option} if rank == 0 else {self.final_option, self.initial_option}
        options = {name: x for name, x in self.options.items() if name not in skipped}
        for name, x in options.items():
            if name in SHARDED_OPTIONS and getattr(x, "ndim", 0) > 1:
                options[name] = x[:, :0]
            elif name == "cu_seqlens":
                options[name] = torch.zeros_like(x)
        with torch.no_grad():
            type(self).function(*arrays, **options)


class SegmentedRecurrence(ShardedRecurrence):
    """A recurrence whose kernels split sequences into segments on one GPU as well: the pass that computes the segments' states
    also gives the summary, and the second pass continues from the state before. So each token costs what it costs on one
    GPU."""

    def segment_states(self, shard: SequenceShard) -> tuple[Any, Any]:
        """(local_state, total_decay) of the segments: see recurrent.linear.segment_states."""
        raise NotImplementedError

    def outputs_from_segments(self, shard: SequenceShard, local_state: Any, total_decay: Any, state: Any) -> Any:
        """The output, from the segments' states and the state before the shard."""
        raise NotImplementedError

    def reverse_states(self, shard: SequenceShard, dout: Any) -> tuple[Any, Any]:
        """(local_state, total_decay) of the segments from the last one to the first: see recurrent.linear.segment_states."""
        raise NotImplementedError

    def gradient_before(self, shard: SequenceShard, dout: Any) -> Any:
        local_state, total_decay = self.reverse_states(shard, dout)
        sequences, heads, _, *size = local_state.shape
        numbers, gradient = total_decay.new_empty(sequences, heads, 1), local_state.new_empty(sequences, heads, *size)
        linear_family.compose_segment_states(local_state, total_decay, None, numbers, gradient)
        return self.convert_state(gradient)

    def convert_state(self, state: Any) -> Any:
        """A state in the kernels' layout (.., Dv, Dk) from one in the function's layout, and the other way round."""
        return state

    def run_passes(self, peers: Peers, shard: SequenceShard, initial: Any, is_needed: bool) -> tuple[Any, GatheredSummaries]:
        if not len(shard.span):
            identity_m, identity_n = self._identity_summary(shard, initial)
            identity_n = self.convert_state(identity_n)
            summary, m, n = _allocate_summary(identity_m.shape, identity_n.shape, shard.device)
            m.copy_(identity_m)
            n.copy_(identity_n)
            return self._empty_output(), GatheredSummaries(peers, summary, (m.shape, n.shape), self.compose, self.convert_state)
        local_state, total_decay = self.segment_states(shard)
        sequences, heads, _, *size = local_state.shape
        summary, m, n = _allocate_summary((sequences, heads, 1, 1), (sequences, heads, *size), total_decay.device)
        initial_state = None if initial is None else self.convert_state(initial)
        linear_family.compose_segment_states(local_state, total_decay, initial_state, m.squeeze(3), n)
        summaries = GatheredSummaries(peers, summary, (m.shape, n.shape), self.compose, self.convert_state)
        before = summaries.state_before(peers.rank) if peers.rank else initial
        return self.outputs_from_segments(shard, local_state, total_decay, before), summaries

    def _select_options(self, shard: SequenceShard, *names: str) -> dict[str, Any]:
        """The options of these names, cu_seqlens and family."""
        options = self.options | shard.varlen_options()
        return {name: x for name, x in options.items() if name in (*names, "cu_seqlens", "family")}


def _allocate_summary(m_shape: Shape, n_shape: Shape, device: Any) -> tuple[Any, Any, Any]:
    """(an uninitialised summary, views of M and of N in it), where N begins at an address that is aligned for kernels."""
    numbers = [math.prod(shape) for shape in (m_shape, n_shape)]
    summary = torch.empty(-(-numbers[0] // ALIGNED) * ALIGNED + numbers[1], device=device)
    return summary, summary[: numbers[0]].view(m_shape), summary[len(summary) - numbers[1] :].view(n_shape)


def _describe_option(name: str, x: Any) -> str:
    """An option's value in words; of an option that is sharded, only its axes and dtype."""
    return f"{x.ndim} axes of {x.dtype}" if name in SHARDED_OPTIONS else describe_value(name, x)
