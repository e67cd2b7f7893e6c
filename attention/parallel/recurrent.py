"""attention.parallel.linear, delta_rule and mamba2: recurrences of a sequence that lies on several ranks, one part behind the
other.

A rank's part changes a state S (Dk, Dv) to M S + N, whatever S was: N is what it leaves of a state of 0, and M the product of
its tokens' decays, a number or a vector (Dk) a head, or for the delta rule a matrix (Dk, Dk). These summaries are all that
travels, Dk (Dk + Dv) numbers a head, in float32; each rank composes those before it,

    S_0 = initial_state        S_(r+1) = M_r S_r + N_r

and goes through its part once more from S_r. So a token costs twice what it costs on one GPU, but on the first rank; for
`linear` without decays of channels as much as where one GPU has few heads, and cuts the sequence into segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import attention

from ..recurrent.linear import going_on, left_by_segments
from .agreed import agreed, form_of, words_of
from .orders import Contiguous, Span, count
from .peers import Peers, one_of

Shape = tuple[int, ...]
SEGMENTED = 128  # columns of keys, at most, where sequences are cut into segments on every GPU


def linear(q: Any, k: Any, v: Any, *, group: Any = None, length: int | None = None, **options: Any) -> Any:
    """attention.linear of a sequence that lies on several ranks, in contiguous shares (attention.parallel.shard(.., order=
    "contiguous"), or `reorder` from zigzag): its arguments and results, decay being this rank's share, but for one of heads.

    initial_state is that before the whole sequence, and counts on the first rank alone; what return_state gives is that after
    the whole, on every rank. cu_seqlens is of the whole sequence. group: a process group, a dimension of a DeviceMesh, or None
    for all processes; length: tokens of the whole, where shares differ. layout, out, stream and normalize=True are not served.
    ValueError on every rank, before anything travels: ranks disagree."""
    kind = InSegments if InSegments.serves(k, options.get("decay")) else Linear
    return kind((q, k, v), options).run(group, length)


def delta_rule(q: Any, k: Any, v: Any, beta: Any, *, group: Any = None, length: int | None = None, **options: Any) -> Any:
    """attention.delta_rule of a sequence that lies on several ranks: see `linear`. beta: this rank's share."""
    return Delta((q, k, v, beta), options).run(group, length)


def mamba2(x: Any, dt: Any, A: Any, B: Any, C: Any, *, group: Any = None, length: int | None = None, **options: Any) -> Any:
    """attention.mamba2 of a sequence that lies on several ranks: see `linear`. dt, B, C and z: this rank's shares. seq_idx is
    not served: cu_seqlens, of the whole sequence, does the same."""
    return Mamba((x, dt, A, B, C), options).run(group, length)


class Part:
    """This rank's part of the whole: its tokens, and what of the whole's sequences lies in them."""

    def __init__(self, span: Span, batch: int, ends: Any, device: Any):
        self.span, self.device = span, device
        self.ends = None if ends is None else (ends - span.start).clamp(0, len(span)).to(ends.dtype)
        self.sequences = batch if ends is None else len(ends) - 1

    def options(self) -> dict[str, Any]:
        """What is said of it to a function of one GPU."""
        return {} if self.ends is None else {"cu_seqlens": self.ends}

    def tokens(self) -> Any:
        """How many tokens of each sequence lie in it, (N)."""
        return torch.full((self.sequences,), len(self.span), device=self.device) if self.ends is None else self.ends.diff()

    def sums(self, x: Any) -> Any:
        """Of each sequence the sum of x (B, S, ..) over its tokens here, (N, ..)."""
        if self.ends is None:
            return x.sum(1)
        return torch.cat([x.new_zeros((1, *x.shape[2:])), x[0].cumsum(0)])[self.ends.long()].diff(dim=0)


class Recurrence:
    """A call on this rank's part: what `function` of one GPU is told, and what the part makes of a state."""

    function: Callable
    before, after = "initial_state", "return_state"  # the options for states
    values, shared = 2, ()  # which of the arrays are values; which have no tokens

    def __init__(self, arrays: tuple[Any, ...], options: dict[str, Any]):
        self.arrays, self.options = arrays, {name: x for name, x in options.items() if x is not None}

    def map_shape(self, place: Part) -> Shape:
        """That of M as it travels, numbers a head with axes for what they multiply."""
        raise NotImplementedError

    def left_shape(self, place: Part) -> Shape:
        """That of states."""
        k, v = self.arrays[1], self.arrays[2]
        return place.sequences, v.shape[2], k.shape[3], v.shape[3]

    def summary(self, place: Part) -> tuple[Any, Any]:
        """(M, N) of a part that has tokens."""
        raise NotImplementedError

    def compose(self, m: Any, state: Any) -> Any:
        """M S."""
        return m * state

    def call(self, place: Part, **more: Any) -> Any:
        """The function of one GPU on this part."""
        return type(self).function(*self.arrays, **self.options | place.options() | more)

    def run(self, group: Any, length: int | None) -> Any:
        """What the public function gives."""
        peers, first = one_of(group), self.arrays[0]
        forms = [(name, form_of(x)) for name, x in self.options.items()]
        key = type(self), peers, length, *map(form_of, self.arrays), *forms
        span = agreed([peers], key, lambda: self._planned(peers, length), first.device)
        with torch.no_grad():
            place = Part(span, first.shape[0], self.options.get("cu_seqlens"), first.device)
            begin, after = self.options.pop(self.before, None), self.options.pop(self.after, False)
            if peers.world == 1:
                return self.call(place, **{self.before: begin, self.after: after})
            out, chain = self.passes(peers, place, None if peers.rank else begin, after or peers.rank < peers.world - 1)
        return (out, chain.before(peers.world)) if after else out

    def passes(self, peers: Peers, place: Part, begin: Any, awaited: bool) -> tuple[Any, Chain]:
        """This part's output, and all summaries. begin: the state before the whole, of the first part; awaited: does another
        one wait for this one's summary?"""
        if peers.rank == 0 and len(place.span):  # it knows what is before it: one pass gives its output and what it leaves
            out, left = self.call(place, **{self.before: begin, self.after: True})
            return out, Chain(peers, torch.zeros(self.map_shape(place), device=place.device), left, self.compose)
        chain = Chain(peers, *(self._left(place, begin) if awaited else self._none(place)), self.compose)
        return self.call(place, **{self.before: chain.before(peers.rank)}) if len(place.span) else self._empty(), chain

    def _left(self, place: Part, begin: Any) -> tuple[Any, Any]:
        """The summary of a part, whether it has tokens or not. begin: the state before the whole, of the first part."""
        if len(place.span):
            return self.summary(place)
        m, left = self._none(place)
        if m.shape[-1] > 1:
            m += torch.eye(m.shape[-1], device=m.device)
        return m if m.shape[-1] > 1 else m + 1, left if begin is None else begin.float()

    def _none(self, place: Part) -> tuple[Any, Any]:
        """What nobody waits for."""
        return torch.zeros(self.map_shape(place), device=place.device), torch.zeros(self.left_shape(place), device=place.device)

    def _empty(self) -> Any:
        return torch.empty_like(self.arrays[self.values])

    def _planned(self, peers: Peers, length: int | None) -> tuple[str, Span]:
        """What all ranks must have in common, in words, and this one's tokens. ValueError, NotImplementedError."""
        name, first = type(self).function.__name__, self.arrays[0]
        for option in ("layout", "out", "stream", "normalize", "seq_idx"):
            if self.options.get(option, False) not in (False, "bshd"):
                raise NotImplementedError(f"{option}: is not served on several ranks")
        total = first.shape[1] * peers.world if length is None else length
        spans = Contiguous().spans(total, peers.world)[peers.rank]
        if count(spans) != first.shape[1]:
            had = f"rank {peers.rank} of {peers.world} has {first.shape[1]} tokens, and would have {count(spans)} of {total}"
            raise ValueError(f"length: {had}: give length, the number of all tokens, as shards may differ")
        forms = [f"array {n}: {(*x.shape[:1], *x.shape[2:])} of {x.dtype}" for n, x in enumerate(self.arrays)]
        options = {option: x for option, x in self.options.items() if option != self.before}
        named = [f"{option}={_local(option, x)}" for option, x in sorted(options.items())]
        return "; ".join([name, *forms, f"length={total}", *named]), spans[0] if spans else Span(0, 0)


class Linear(Recurrence):
    """attention.linear. M: a number a head, or one a channel."""

    function = staticmethod(attention.linear)

    def map_shape(self, place: Part) -> Shape:
        """See Recurrence."""
        k, v, decay = self.arrays[1], self.arrays[2], self.options.get("decay")
        return place.sequences, v.shape[2], k.shape[3] if decay is not None and decay.ndim == 4 else 1, 1

    def summary(self, place: Part) -> tuple[Any, Any]:
        """See Recurrence."""
        decay, shape = self.options.get("decay"), self.map_shape(place)
        if decay is None:
            total = torch.zeros(shape, device=place.device)
        elif decay.ndim == 1:
            total = decay.float() * place.tokens()[:, None]
        else:
            total = place.sums(decay.float())
        return total.exp().reshape(shape), self.call(place, return_state=True)[1]


class InSegments(Linear):
    """The same where one GPU, too, cuts sequences into segments: the pass that finds what these leave gives the summary, and
    the second one goes on from the state before. So each token costs what it costs on one GPU."""

    @staticmethod
    def serves(k: Any, decay: Any) -> bool:
        """Not for decays of channels, nor for wide keys."""
        return k.shape[-1] <= SEGMENTED and (decay is None or decay.ndim < 4)

    def passes(self, peers: Peers, place: Part, begin: Any, awaited: bool) -> tuple[Any, Chain]:
        """See Recurrence."""
        if not len(place.span):
            return super().passes(peers, place, begin, awaited)
        told = {name: x for name, x in (self.options | place.options()).items() if name in ("decay", "cu_seqlens", "family")}
        local, total = left_by_segments(*self.arrays, **told)
        later = total.flip(2).cumsum(2).flip(2) - total  # of the segments behind each
        left = (local * later.exp2()[..., None]).sum(2).transpose(-1, -2)
        m = total.sum(2, keepdim=True).exp2()
        chain = Chain(peers, m, left if begin is None else m * begin + left, self.compose)
        state = chain.before(peers.rank) if peers.rank else begin
        told |= {"scale": self.options.get("scale"), "initial_state": state}
        q, k, v = self.arrays
        return going_on(q, k, v, local, total, **told), chain


class Delta(Recurrence):
    """attention.delta_rule. M: a matrix a head, what a state of 1 becomes where there are no values."""

    function = staticmethod(attention.delta_rule)

    def map_shape(self, place: Part) -> Shape:
        """See Recurrence."""
        k, v = self.arrays[1], self.arrays[2]
        return place.sequences, v.shape[2], k.shape[3], k.shape[3]

    def summary(self, place: Part) -> tuple[Any, Any]:
        """See Recurrence: both at once, where that is no more than 256 columns of values."""
        q, k, v, beta = self.arrays
        keys, columns = k.shape[3], v.shape[3]
        none, one = v.new_zeros((*v.shape[:3], keys)), torch.eye(keys, device=k.device).expand(self.map_shape(place))
        if keys + columns > 256:
            m = Delta((q, k, none, beta), self.options).call(place, initial_state=one.contiguous(), return_state=True)[1]
            return m, self.call(place, return_state=True)[1]
        begin = torch.cat([one.new_zeros(self.left_shape(place)), one], -1)
        both = Delta((q, k, torch.cat([v, none], -1), beta), self.options).call(place, initial_state=begin, return_state=True)[
            1
        ]
        return both[..., columns:], both[..., :columns]

    def compose(self, m: Any, state: Any) -> Any:
        """See Recurrence."""
        return m @ state


class Mamba(Recurrence):
    """attention.mamba2. M: a number a head; states have their axes swapped."""

    function = staticmethod(attention.mamba2)
    before, after, values = "initial_states", "return_final_states", 0

    def map_shape(self, place: Part) -> Shape:
        """See Recurrence."""
        return place.sequences, self.arrays[0].shape[2], 1, 1

    def left_shape(self, place: Part) -> Shape:
        """See Recurrence."""
        x, B = self.arrays[0], self.arrays[3]
        return place.sequences, x.shape[2], x.shape[3], B.shape[3]

    def summary(self, place: Part) -> tuple[Any, Any]:
        """See Recurrence."""
        _, dt, A, _, _ = self.arrays
        bias = self.options.get("dt_bias")
        steps = dt.float() if bias is None else dt.float() + bias.float()
        steps = (torch.nn.functional.softplus(steps) if self.options.get("dt_softplus") else steps).clamp(min=0)
        total = place.sums(steps * A.float()).exp().reshape(self.map_shape(place))
        return total, self.call(place, return_final_states=True)[1]


class Chain:
    """The summaries of all ranks, one behind the other. That of the first is what it leaves of the state before the whole."""

    def __init__(self, peers: Peers, m: Any, left: Any, compose: Callable[[Any, Any], Any]):
        self.compose, self.shapes = compose, (m.shape, left.shape)
        mine = torch.cat([m.float().flatten(), left.float().flatten()])
        self.every = [torch.empty_like(mine) for _ in range(peers.world)]
        dist.all_gather(self.every, mine, group=peers.group)

    def before(self, rank: int) -> Any:
        """The state before the part of a rank other than the first."""
        state: Any = None
        for one in self.every[:rank]:
            m, left = (x.reshape(shape) for x, shape in zip(one.split([shape.numel() for shape in self.shapes]), self.shapes))
            state = left if state is None else self.compose(m, state) + left
        return state.contiguous()


def _local(name: str, x: Any) -> str:
    """What is said of an option of which ranks have shares."""
    return f"{x.ndim} axes of {x.dtype}" if name in ("decay", "z") else words_of(name, x)
