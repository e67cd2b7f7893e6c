"""Ranks of one host that map each other's memory: rows come by the GPUs' copy engines, which take no multiprocessor.

    group = parallel.mapped()                                                   # once, on every rank
    out = parallel.forward(q, k, v, group=group, scheme="gather", causal=True)

A rank's rows go to one half of a memory that the others map; all meet; each copies what it wants out of the others' halves. The
next call has the other half: who meets there has its copies of this one, so that nobody overwrites what another still wants.
Copies run on a stream that begins behind the caller's, which waits for their end; or attention begins at once, and its thread
blocks wait for the copies of what they read (arrival.py)."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .arrival import CopySchedule
from .moves import Redistribution, StridedView, made_like, strided
from .orders import Span
from .peers import Peers, PendingMessages, one_dimensional_peers

ALIGNED = 256  # bytes
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # ranks of one GPU, which copies by multiprocessors
PATIENCE = 600_000  # milliseconds that the others may take to come


@dataclass(frozen=True)
class MappedPeers(Peers):
    """The ranks of a process group that map each other's memory, and what of it."""

    memory: Any

    __hash__ = Peers.__hash__

    @property
    def maps(self) -> bool:
        return self.memory.open

    @property
    def overlaps_copies(self) -> bool:
        return self.memory.by_engines and self.memory.open

    def start_copies(self, arrival: CopySchedule, k: Any, v: Any) -> tuple[Any, Any, Any]:
        return self.memory.arriving(self.rank, arrival, k, v)

    def pull_rows(self, routes: Sequence[tuple[Any, Redistribution, Sequence[Any]]]) -> PendingMessages:
        sizes = [_aligned(its.most, x) for x, its, _ in routes]
        self.memory.turn(sum(sizes))
        own, copies, at = [], [], 0
        for (x, its, places), size in zip(routes, sizes):
            view = functools.partial(self.memory.view, at, x.dtype, x.shape[2:])
            own.append((view(self.rank, 0, x.shape[1]), x))
            copies += [(place, view(rank, *rows)) for place, rank, rows in zip(places, its.receives, its.sources)]
            at += size
        return PendingMessages([self.memory.copied(own, copies)])


class SymmetricBuffers:
    """Memory of every rank that all map, in two halves, of so many bytes as a call has needed."""

    def __init__(self, peers: Peers):
        self.peers, self.nbytes, self.half, self.stream = peers, 0, 0, torch.cuda.Stream()
        self.views: dict[Any, Any] = {}
        self.device, self.now, self.event = torch.cuda.current_device(), torch.cuda.current_stream(), torch.cuda.Event()
        self.raw = self.now.cuda_stream
        self.by_engines = os.environ.get(OVERLAPPING) != "1"
        self.write = torch._C._distributed_c10d._SymmetricMemory.stream_write_value32

    @property
    def open(self) -> bool:
        """May a call come in? Not while a graph is captured, which would have one half again and again."""
        return not torch.cuda.is_current_stream_capturing()

    def turn(self, nbytes: int) -> None:
        """The next call, which needs so many bytes of every rank's, has the other half."""
        if nbytes > self.nbytes:
            from torch.distributed import _symmetric_memory

            torch.cuda.synchronize()
            dist.barrier(self.peers.group)  # nobody wants anything of what is given back
            self.views, self.nbytes = {}, nbytes
            self.whole = _symmetric_memory.empty(2 * nbytes, dtype=torch.uint8, device="cuda")
            self.handle = _symmetric_memory.rendezvous(self.whole, self.peers.group)
        raw = torch._C._cuda_getCurrentRawStream(self.device)
        if raw != self.raw:  # what was called on another stream may still read, or be copied
            now = torch.cuda.current_stream()
            for one in (self.now, self.stream):
                now.wait_stream(one)
            self.now, self.raw = now, raw
        self.half = 0 if self.half else self.nbytes

    def arriving(self, rank: int, arrival: CopySchedule, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Own rows are put where others read them, all meet, and the others' are copied while what is given back is read.

        Whoever has read all of it has waited for all copies, so that what is given back is free then, and so is the half."""
        form = self.views.get(arrival)
        if form is None:
            makers = [made_like(x, arrival.rows) for x in (k, v)]
            form = [_aligned(arrival.most, x) for x in (k, v)], *makers
        (of_keys, of_values), make_keys, make_values = form
        self.turn(of_keys + of_values)
        self.views[arrival] = form
        known = self.views.get((arrival, self.half))
        if known is None:
            known = self.views[arrival, self.half] = self._arriving(rank, arrival, of_keys, k, v)
        places, none, copies, arrived, count = known
        keys, values = make_keys(), make_values()
        torch._foreach_copy_(places, [k, v, none])
        self.handle.barrier(0, PATIENCE)
        self.event.record(self.now)
        self.stream.wait_event(self.event)
        torch.cuda.set_stream(self.stream)
        try:
            for n, (keys_part, its_keys, values_part, its_values) in enumerate(copies):
                strided(keys, *keys_part).copy_(its_keys)
                strided(values, *values_part).copy_(its_values)
                self.write(count, 0, n + 1)
        finally:
            torch.cuda.set_stream(self.now)
        return keys, values, arrived

    def _arriving(self, rank: int, arrival: CopySchedule, of_keys: int, k: Any, v: Any) -> tuple[Any, ...]:
        """What calls of a form have in common in this half: where own rows go, what is copied, and what counts copies."""

        def rows(rank: int, at: int, x: Any, span: Span) -> Any:
            return self.view(at, x.dtype, x.shape[2:], rank, *span)

        def part(x: Any, span: Span) -> StridedView:
            each = math.prod(x.shape[2:])
            return (1, len(span), *x.shape[2:]), (arrival.rows * each, *x.stride()[1:]), span.start * each

        places = [rows(rank, at, x, Span(0, x.shape[1])) for at, x in ((0, k), (of_keys, v))]
        copies = [
            (part(k, to), rows(other, 0, k, source), part(v, to), rows(other, of_keys, v, source))
            for other, source, to in arrival.copies
        ]
        counts = torch.zeros(2, dtype=torch.int32, device=k.device)[:1]
        none = torch.zeros(2, dtype=k.dtype, device=k.device)
        return [*places, counts.view(k.dtype)], none, copies, counts, counts.view(torch.uint32)

    def view(self, at: int, dtype: Any, shape: Sequence[int], rank: int, first: int, end: int) -> Any:
        """Rows of the array that a rank has in its half from a byte on."""
        key = self.half, at, dtype, shape, rank, first, end
        found = self.views.get(key)
        if found is None:
            begin = (self.half + at) // dtype.itemsize + first * math.prod(shape)
            found = self.views[key] = self.handle.get_buffer(rank, (1, end - first, *shape), dtype, begin)
        return found

    def copied(self, own: Sequence[tuple[Any, Any]], copies: Sequence[tuple[Any, Any]]) -> Any:
        """Pairs (to, from) are copied, one's own before all meet; what is given back is waited for."""
        now = torch.cuda.current_stream()
        now.wait_stream(self.stream)  # whoever called last
        torch._foreach_copy_([place for place, _ in own], [x for _, x in own])
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            self.handle.barrier(0, PATIENCE)
            for place, x in copies:
                place.copy_(x)
            return self.stream.record_event()


def _aligned(rows: int, x: Any) -> int:
    """Bytes of so many rows of an array."""
    return -(-rows * math.prod(x.shape[2:]) * x.element_size() // ALIGNED) * ALIGNED


def mapped(group: Any = None) -> MappedPeers:
    """The ranks of a process group, or all, as ranks that map each other's memory; pass it to this package's functions as
    `group`. Every rank calls it, once. Their GPUs are on one host and reach each other
    (torch.distributed._symmetric_memory).

    Rows of a batch of one that have all heads then come by copies: keys and values of "gather", unless they come in two
    turns (choice.first_heads), and while attention reads them where arrival.py serves the call. Everything else comes by
    messages, as before. Twice the largest share that came this way stays allocated. If a rank does not call it, the others
    get a CUDA error after ten minutes, which names nothing."""
    return _mapped(one_dimensional_peers(group))


@functools.lru_cache(64)
def _mapped(peers: Peers) -> MappedPeers:
    return MappedPeers(peers.group, peers.rank, peers.world, peers.ranks, SymmetricBuffers(peers))
