"""A recurrence on one rank's part of a sequence, whichever it is: what ranks agree on, its two passes, and its segments.
recurrent.py says what is computed, and has the members of the family."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tiles.device import machine

from ..options import check_flag
from ..recurrent import chunks
from ..recurrent import linear as plain
from ..recurrent.kernels.tokens import CHUNK, COLUMNS
from ..softmax.call_options import differentiated
from .agreement import agree_on_plan, describe_value, form_key
from .orders import Contiguous, Span, count_tokens
from .parts import GatheredSummaries, SequenceShard
from .peers import Peers, check_torch_tensors, one_dimensional_peers
from .whole import cast, check_values, parse_length

Shape = tuple[int, ...]
LOCAL = "decay", "z"  # options of which ranks have shares
ALIGNED = 32  # numbers: 128 bytes


class ShardedRecurrence:
    """A call on this rank's part: what `function` of one GPU is told, and what the part makes of a state."""

    function: Callable
    before, after = "initial_state", "return_state"  # the options for states
    values = 2  # which of the arrays are values
    whole: tuple[int, ...] = ()  # which have no tokens
    names: tuple[str, ...] = "q", "k", "v"  # of the arrays
    tiles: tuple[str, ...] = "q", "k", "v"  # of arrays and options, those that autocast casts

    def __init__(self, arrays: tuple[Any, ...], options: dict[str, Any]):
        self.arrays, self.options = arrays, {name: x for name, x in options.items() if x is not None}

    def map_shape(self, place: SequenceShard) -> Shape:
        """That of M as it travels, numbers a head with axes for what they multiply."""
        raise NotImplementedError

    def left_shape(self, place: SequenceShard) -> Shape:
        """That of states."""
        k, v = self.arrays[1], self.arrays[2]
        return place.sequences, v.shape[2], k.shape[3], v.shape[3]

    def summary(self, place: SequenceShard) -> tuple[Any, Any]:
        """(M, N) of a part that has tokens, or of each of its segments."""
        raise NotImplementedError

    def compose(self, m: Any, state: Any) -> Any:
        """M S."""
        return m * state

    def call(self, place: SequenceShard, **more: Any) -> Any:
        """The function of one GPU on this part; more: of its options."""
        arrays = [x if n in self.whole else place.packed(x) for n, x in enumerate(self.arrays)]
        options = self.options | place.options() | more
        if options.get("decay") is not None and options["decay"].ndim > 1:
            options["decay"] = place.packed(options["decay"])
        return type(self).function(*arrays, **options)

    def run(self, group: Any, length: int | None) -> Any:
        """What the public function gives."""
        peers, first = one_dimensional_peers(group), self.arrays[0]
        try:
            self._cast()
            forms = [(name, form_key(x)) for name, x in self.options.items()]
            learned = differentiated(*self.arrays, *self.options.values())
            form = type(self), length, learned, *[(x.device, form_key(x)) for x in self.arrays], *forms
            hash(form)
        except Exception:  # what is wrong `_planned` says, so that all ranks hear of it
            form = None
        span = agree_on_plan((peers,), form, lambda: self._planned(peers, length), getattr(first, "device", None))
        ends = self.options.get("cu_seqlens")
        check_values(self.options, self._total(peers, length), 0)
        with torch.no_grad():
            place = SequenceShard(span, first.shape[0], ends, first.device)
            begin, after = self.options.pop(self.before, None), self.options.pop(self.after, False)
            if peers.world == 1:
                return self.call(place, **{self.before: begin, self.after: after})
            out, chain = self.passes(peers, place, None if peers.rank else begin, after or peers.rank < peers.world - 1)
            return (out, chain.before(peers.world).contiguous()) if after else out

    def _cast(self) -> None:
        """What torch.autocast does, here, as not all that is called for a part is an op that it knows."""
        if torch.is_autocast_enabled(self.arrays[0].device.type):
            self.arrays = tuple([cast(x)[0] if its in self.tiles else x for its, x in zip(self.names, self.arrays)])
            self.options = {its: cast(x)[0] if its in self.tiles else x for its, x in self.options.items()}

    def passes(self, peers: Peers, place: SequenceShard, begin: Any, awaited: bool) -> tuple[Any, GatheredSummaries]:
        """This part's output, and all summaries. begin: the state before the whole, of the first part; awaited: does another
        one wait for this one's summary?"""
        cut = place.cut(self.segments(place))
        if not len(place.span):
            return self._empty(), GatheredSummaries.of(peers, *self._nothing_done(place, begin), self.compose)
        if peers.rank == 0 and cut is place:  # it knows what is before it, and needs no M
            out, left = self.first(place, begin)
            chain = GatheredSummaries.of(peers, self._none(place)[0], left, self.compose)
            return self.call(place, **{self.before: begin}) if out is None else out, chain
        found: list[tuple[Any, Any]] = []  # what the first segment, the first two, .. make of a state
        if awaited or cut.segments > 1:
            shapes = [(place.sequences, cut.segments, *shape(place)[1:]) for shape in (self.map_shape, self.left_shape)]
            for m, left in zip(*[x.reshape(shape).unbind(1) for x, shape in zip(self.summary(cut), shapes)]):
                found.append((self.compose(m, found[-1][0]), self.compose(m, found[-1][1]) + left) if found else (m, left))
        m, left = found[-1] if found else self._none(place)
        chain = GatheredSummaries.of(peers, m, left if begin is None else self.compose(m, begin) + left, self.compose)
        state = chain.before(peers.rank) if peers.rank else begin
        starts = [self._none(place)[1] if state is None else state]
        starts += [left if state is None else self.compose(m, state) + left for m, left in found[:-1]]
        out = self.call(cut, **{self.before: starts[0] if cut is place else torch.stack(starts, 1).flatten(0, 1)})
        return out.reshape(self.arrays[self.values].shape), chain

    def segments(self, place: SequenceShard) -> int:
        """How many thread blocks there are, one for 64 columns of a state, and how many the GPU has room for."""
        v = self.arrays[self.values]
        items = place.sequences * v.shape[2] * -(-v.shape[3] // COLUMNS)
        tokens = len(place.span) * place.batch // max(1, place.sequences)
        room = machine(v.device.index if v.is_cuda else None).processors // max(1, items)
        return max(1, min(room, tokens // CHUNK // chunks.MIN_PARALLEL_SEGMENT_CHUNKS))

    def first(self, place: SequenceShard, begin: Any) -> tuple[Any, Any]:
        """(output, state after it) of the whole's first part: where the summary takes a pass like any other, one of both."""
        return self.call(place, **{self.before: begin, self.after: True})

    def _nothing_done(self, place: SequenceShard, begin: Any) -> tuple[Any, Any]:
        """The summary of a part that has no tokens. begin: the state before the whole, of the first part."""
        m, left = self._none(place)
        m += torch.eye(m.shape[-1], device=m.device) if m.shape[-1] > 1 else 1
        return m, left if begin is None else begin.float()

    def _none(self, place: SequenceShard) -> tuple[Any, Any]:
        """What nobody waits for."""
        return torch.zeros(self.map_shape(place), device=place.device), torch.zeros(self.left_shape(place), device=place.device)

    def _empty(self) -> Any:
        return torch.empty_like(self.arrays[self.values])

    def _total(self, peers: Peers, length: int | None) -> int:
        """Tokens of the whole."""
        return self.arrays[0].shape[1] * peers.world if length is None else length

    def _planned(self, peers: Peers, length: int | None) -> tuple[str, Span]:
        """What all ranks must have in common, in words, and this one's tokens. ValueError, NotImplementedError."""
        name, first = type(self).function.__name__, self.arrays[0]
        check_torch_tensors(**dict(zip(self.names, self.arrays)))
        for its, x in zip(self.names, self.arrays):
            if x.ndim < 2 and its != "A":
                raise ValueError(f"{its}: must have a batch and tokens: {its}.shape={tuple(x.shape)}")
        for option in ("layout", "out", "stream", "normalize", "seq_idx"):
            given = self.options.get(option, False)
            if getattr(given, "ndim", 0) or given not in (False, "bshd"):  # of arrays torch does not say whether they are equal
                raise NotImplementedError(f"{option}: is not served on several ranks")
        if differentiated(*self.arrays, *self.options.values()):
            raise NotImplementedError(
                f"{name}: an array requires grad, and the backward pass is not there yet; call under torch.no_grad()"
            )
        total = self._total(peers, parse_length("length", length))
        spans = Contiguous().spans(total, peers.world)[peers.rank]
        if (expected := count_tokens(spans)) != first.shape[1]:
            had = f"rank {peers.rank} of {peers.world} has {first.shape[1]} tokens, and would have {expected} of {total}"
            raise ValueError(f"length: {had}: give length, the number of all tokens, as shards may differ")
        check_flag(self.after, self.options.get(self.after, False))
        check_torch_tensors(**{option: self.options[option] for option in ("cu_seqlens",) if option in self.options})
        self._check(peers.rank)
        check_values(self.options, total, 0, planning=True)
        forms = [f"{its}: {(*x.shape[:1], *x.shape[2:])} of {x.dtype}" for its, x in zip(self.names, self.arrays)]
        options = {option: x for option, x in self.options.items() if option != self.before}
        named = [f"{option}={_local(option, x)}" for option, x in sorted(options.items())]
        of_shares = [f"length=None of shares of {first.shape[1]}: give length where these differ"] if length is None else []
        words = [f"function={name}", *forms, *(of_shares or [f"length={total}"]), *named]
        return "; ".join(words), spans[0] if spans else Span(0, 0)

    def _check(self, rank: int) -> None:
        """What the function of one GPU says of a call without tokens: everything is checked, nothing launched, and a rank that
        has no tokens, or no state to begin with, learns what the others do."""
        none = [x if n in self.whole else x.detach()[:, :0] for n, x in enumerate(self.arrays)]
        options = {name: x for name, x in self.options.items() if name != self.after and (rank == 0 or name != self.before)}
        for name, x in options.items():
            if name in LOCAL and getattr(x, "ndim", 0) > 1:
                options[name] = x[:, :0]
            elif name == "cu_seqlens":
                options[name] = torch.zeros_like(x)
        with torch.no_grad():
            type(self).function(*none, **options)


class SegmentedRecurrence(ShardedRecurrence):
    """Where one GPU, too, cuts sequences into segments: the pass that finds what these leave gives the summary, and the second
    one goes on from the state before. So each token costs what it costs on one GPU that does so."""

    def segment_states(self, place: SequenceShard) -> tuple[Any, Any]:
        """(local, total): see linear.left_by_segments."""
        raise NotImplementedError

    def outputs_from_segments(self, place: SequenceShard, local: Any, total: Any, state: Any) -> Any:
        """The output, from the state before the part."""
        raise NotImplementedError

    def as_states(self, left: Any) -> Any:
        """Of kernels' states (.., Dv, Dk) those of this function, and of those the kernels'."""
        return left

    def passes(self, peers: Peers, place: SequenceShard, begin: Any, awaited: bool) -> tuple[Any, GatheredSummaries]:
        if not len(place.span):
            nothing = self._nothing_done(place, begin)
            summary, m, left = _room(nothing[0].shape, self.as_states(nothing[1]).shape, place.device)
            m.copy_(nothing[0])
            left.copy_(self.as_states(nothing[1]))
            return self._empty(), GatheredSummaries(peers, summary, (m.shape, left.shape), self.compose, self.as_states)
        local, total = self.segment_states(place)
        sequences, heads, _, *size = local.shape
        summary, m, left = _room((sequences, heads, 1, 1), (sequences, heads, *size), total.device)
        plain.compose_segment_states(local, total, None if begin is None else self.as_states(begin), m.squeeze(3), left)
        chain = GatheredSummaries(peers, summary, (m.shape, left.shape), self.compose, self.as_states)
        return self.outputs_from_segments(place, local, total, chain.before(peers.rank) if peers.rank else begin), chain

    def _select_options(self, place: SequenceShard, *names: str) -> dict[str, Any]:
        """These of the options."""
        return {name: x for name, x in (self.options | place.options()).items() if name in (*names, "cu_seqlens", "family")}


def _room(of_m: Shape, of_left: Shape, device: Any) -> tuple[Any, Any, Any]:
    """A summary that is to be written, and in it the places of M and of N, which begins where kernels like arrays to."""
    numbers = [math.prod(shape) for shape in (of_m, of_left)]
    summary = torch.empty(-(-numbers[0] // ALIGNED) * ALIGNED + numbers[1], device=device)
    return summary, summary[: numbers[0]].view(of_m), summary[len(summary) - numbers[1] :].view(of_left)


def _local(name: str, x: Any) -> str:
    """What is said of an option of which ranks have shares."""
    return f"{x.ndim} axes of {x.dtype}" if name in LOCAL else describe_value(name, x)
