"""Ranks of one host that map each other's memory (torch's symmetric memory): rows are copied by the GPUs' copy engines, which
occupy no multiprocessor.

    group = parallel.mapped()                                                   # once, on every rank
    out = parallel.forward(q, k, v, group=group, scheme="gather", causal=True)

Each rank copies its rows into one half of a buffer that the others map; all ranks meet at a barrier; each copies the rows that
it needs out of the others' halves. The next call uses the other half: a rank that arrives at its barrier has finished its
copies of this call, so that no rank overwrites rows that another still needs. Copies run on a side stream that begins after the
caller's stream. The caller's stream waits for their end; or attention begins at once, and its CTAs wait for the copies of the
keys that they read (copy_schedule.py)."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .copy_schedule import CopySchedule
from .orders import Span
from .peers import Peers, PendingMessages, one_dimensional_peers
from .redistribution import Redistribution, StridedView, array_maker, strided_view

ALIGNED = 256  # bytes: arrays in the buffer begin at multiples
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # several ranks on one GPU, which then copies by kernels
TIMEOUT = 600_000  # milliseconds that the barrier waits for other ranks


@dataclass(frozen=True)
class MappedPeers(Peers):
    """The ranks of a process group that map each other's memory, and the buffers that they map."""

    memory: Any

    __hash__ = Peers.__hash__

    @property
    def maps_memory(self) -> bool:
        return self.memory.available

    @property
    def overlaps_copies(self) -> bool:
        return self.memory.uses_copy_engines and self.memory.available

    def start_copies(self, schedule: CopySchedule, k: Any, v: Any) -> tuple[Any, Any, Any]:
        return self.memory.start_copies(self.rank, schedule, k, v)

    def pull_rows(self, routes: Sequence[tuple[Any, Redistribution, Sequence[Any]]]) -> PendingMessages:
        sizes = [_aligned_bytes(plan.max_rows, x) for x, plan, _ in routes]
        self.memory.switch_half(sum(sizes))
        local, copies, offset = [], [], 0
        for (x, plan, targets), size in zip(routes, sizes):
            view = functools.partial(self.memory.view, offset, x.dtype, x.shape[2:])
            local.append((view(self.rank, 0, x.shape[1]), x))
            copies += [(target, view(rank, *rows)) for target, rank, rows in zip(targets, plan.receives, plan.source_rows)]
            offset += size
        return PendingMessages([self.memory.copy(local, copies)])


class SymmetricBuffers:
    """A buffer on every rank that all ranks map, in two halves, each as large as the largest call so far needs."""

    def __init__(self, peers: Peers):
        self.peers, self.nbytes, self.half, self.stream = peers, 0, 0, torch.cuda.Stream()
        self.views: dict[Any, Any] = {}
        self.device, self.caller, self.event = torch.cuda.current_device(), torch.cuda.current_stream(), torch.cuda.Event()
        self.caller_handle = self.caller.cuda_stream
        self.uses_copy_engines = os.environ.get(OVERLAPPING) != "1"
        self.write = torch._C._distributed_c10d._SymmetricMemory.stream_write_value32

    @property
    def available(self) -> bool:
        """Can a call use the buffers? Not while a graph is captured, whose replays would all use one half."""
        return not torch.cuda.is_current_stream_capturing()

    def switch_half(self, nbytes: int) -> None:
        """Give the next call the other half, of at least so many bytes on every rank."""
        if nbytes > self.nbytes:
            from torch.distributed import _symmetric_memory

            torch.cuda.synchronize()
            dist.barrier(self.peers.group)  # no rank still reads the buffers that are freed
            self.views, self.nbytes = {}, nbytes
            self.buffer = _symmetric_memory.empty(2 * nbytes, dtype=torch.uint8, device="cuda")
            self.handle = _symmetric_memory.rendezvous(self.buffer, self.peers.group)
        handle = torch._C._cuda_getCurrentRawStream(self.device)
        if handle != self.caller_handle:  # earlier calls on another stream may still be reading or copying
            caller = torch.cuda.current_stream()
            for one in (self.caller, self.stream):
                caller.wait_stream(one)
            self.caller, self.caller_handle = caller, handle
        self.half = 0 if self.half else self.nbytes

    def start_copies(self, rank: int, schedule: CopySchedule, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """(keys, values, number of copies done). This rank's rows are put where the others read them, all ranks meet, and the
        others' rows are copied to keys and values while attention reads these.

        A kernel that has read all keys has waited for all copies, so the returned arrays are free after it, and so is the
        half."""
        form = self.views.get(schedule)
        if form is None:
            makers = [array_maker(x, schedule.rows) for x in (k, v)]
            form = [_aligned_bytes(schedule.max_rows, x) for x in (k, v)], *makers
        (key_bytes, value_bytes), make_keys, make_values = form
        self.switch_half(key_bytes + value_bytes)
        self.views[schedule] = form
        cached = self.views.get((schedule, self.half))
        if cached is None:
            cached = self.views[schedule, self.half] = self._plan_half(rank, schedule, key_bytes, k, v)
        targets, zero, copies, arrived, counter = cached
        keys, values = make_keys(), make_values()
        torch._foreach_copy_(targets, [k, v, zero])
        self.handle.barrier(0, TIMEOUT)
        self.event.record(self.caller)
        self.stream.wait_event(self.event)
        torch.cuda.set_stream(self.stream)
        try:
            for n, (key_view, key_source, value_view, value_source) in enumerate(copies):
                strided_view(keys, *key_view).copy_(key_source)
                strided_view(values, *value_view).copy_(value_source)
                self.write(counter, 0, n + 1)
        finally:
            torch.cuda.set_stream(self.caller)
        return keys, values, arrived

    def _plan_half(self, rank: int, schedule: CopySchedule, key_bytes: int, k: Any, v: Any) -> tuple[Any, ...]:
        """(targets of this rank's rows and of the counter's reset, the zero that resets it, copies, the counter as int32 and as
        uint32) for all calls with a schedule that use this half."""

        def rows(rank: int, offset: int, x: Any, span: Span) -> Any:
            return self.view(offset, x.dtype, x.shape[2:], rank, *span)

        def view(x: Any, span: Span) -> StridedView:
            row_size = math.prod(x.shape[2:])
            return (1, len(span), *x.shape[2:]), (schedule.rows * row_size, *x.stride()[1:]), span.start * row_size

        targets = [rows(rank, offset, x, Span(0, x.shape[1])) for offset, x in ((0, k), (key_bytes, v))]
        copies = [
            (view(k, target), rows(other, 0, k, source), view(v, target), rows(other, key_bytes, v, source))
            for other, source, target in schedule.copies
        ]
        counter = torch.zeros(2, dtype=torch.int32, device=k.device)[:1]
        zero = torch.zeros(2, dtype=k.dtype, device=k.device)
        return [*targets, counter.view(k.dtype)], zero, copies, counter, counter.view(torch.uint32)

    def view(self, offset: int, dtype: Any, shape: Sequence[int], rank: int, first: int, end: int) -> Any:
        """Rows [first, end) of the array that begins at a byte offset of a rank's half."""
        key = self.half, offset, dtype, shape, rank, first, end
        view = self.views.get(key)
        if view is None:
            begin = (self.half + offset) // dtype.itemsize + first * math.prod(shape)
            view = self.views[key] = self.handle.get_buffer(rank, (1, end - first, *shape), dtype, begin)
        return view

    def copy(self, local: Sequence[tuple[Any, Any]], copies: Sequence[tuple[Any, Any]]) -> Any:
        """Copy pairs (to, from): local ones, then, after a barrier of all ranks, the others. Returns an event to wait for."""
        caller = torch.cuda.current_stream()
        caller.wait_stream(self.stream)  # after the copies of the call before
        torch._foreach_copy_([target for target, _ in local], [x for _, x in local])
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            self.handle.barrier(0, TIMEOUT)
            for target, x in copies:
                target.copy_(x)
            return self.stream.record_event()


def _aligned_bytes(rows: int, x: Any) -> int:
    """Bytes of so many rows of an array, rounded up to a multiple of ALIGNED."""
    return -(-rows * math.prod(x.shape[2:]) * x.element_size() // ALIGNED) * ALIGNED


def mapped(group: Any = None) -> MappedPeers:
    """The ranks of a process group, or all ranks, with memory that they map of each other; pass it to this package's functions
    as `group`. Every rank calls it, once. Their GPUs are on one host and can access each other
    (torch.distributed._symmetric_memory).

    Rows of all heads, with a batch of one, are then copied instead of sent: keys and values of "gather", unless they come in
    two steps (choice.count_first_heads), and while attention reads them if copy_schedule.py supports the call. Everything else
    is sent by messages. Twice the largest shard that was copied stays allocated. If a rank does not call it, the others get a
    CUDA error after ten minutes, which does not name the cause."""
    return _mapped(one_dimensional_peers(group))


@functools.lru_cache(64)
def _mapped(peers: Peers) -> MappedPeers:
    return MappedPeers(peers.group, peers.rank, peers.world, peers.ranks, SymmetricBuffers(peers))
