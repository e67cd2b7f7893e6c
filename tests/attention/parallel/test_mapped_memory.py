"""attention.parallel on ranks that map each other's memory: threads, with stand-ins for symmetric memory and streams."""

import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from ranks import drawn
from threads import PATIENCE, RankThread, together

import attention
from attention import parallel
from attention.parallel.peers import PendingMessages
from attention.parallel.symmetric_memory import MappedPeers, SymmetricBuffers


def share(x, peers, order="contiguous", dim=1):
    return parallel.shard(x, peers, dim, order)


class SharedBuffers:
    """Memory of a thread that all others read, in place of symmetric_memory.SymmetricBuffers. buffers: two halves a rank."""

    available, uses_copy_engines, half, late = True, False, 0, 0

    def __init__(self, buffers, meeting):
        self.buffers, self.meeting = buffers, meeting

    def switch_half(self, nbytes):
        assert nbytes <= self.buffers[0].shape[1]
        self.half ^= 1

    def view(self, at, dtype, shape, rank, first, end):
        size = dtype.itemsize * torch.Size(shape).numel()
        return self.buffers[rank, self.half, at + first * size : at + end * size].view(dtype).view(1, end - first, *shape)

    def copy(self, local, copies):
        for place, x in local:
            place.copy_(x)
        self.meeting.wait(PATIENCE)
        time.sleep(self.late)
        for place, x in copies:
            place.copy_(x)
        return PendingMessages(())


class MappedThreads(MappedPeers, RankThread):
    """Ranks that are threads and map each other's memory."""


@pytest.mark.parametrize("world", [2, 3])
def test_mapped_rows_are_copied(world):
    """Repeated calls with two signatures and new arrays, some ranks being late: no message is sent."""
    buffers, meeting = torch.zeros(world, 2, 2**16, dtype=torch.uint8), threading.Barrier(world)
    calls = [(61 + 9 * (n % 2), drawn(61 + 9 * (n % 2), seed=n)) for n in range(6)]
    expected = [attention.forward(*whole, causal=True) for _, whole in calls]

    def rank(peers):
        mine = MappedThreads(None, peers.rank, world, peers.ranks, memory := SharedBuffers(buffers, meeting))
        vars(mine).update(room=peers.room, exchange=None)
        for n, (length, whole) in enumerate(calls):
            memory.late = 0.05 * ((n + peers.rank) % world)
            inputs = [share(x, peers, "zigzag") for x in whole]
            out = parallel.forward(*inputs, group=mine, scheme="gather", causal=True, length=length)
            assert torch.equal(out, share(expected[n], peers, "zigzag"))

    together(world, rank)


class StreamingSharedBuffers(SymmetricBuffers):
    """SymmetricBuffers whose memory the other threads read, with stand-ins for streams."""

    available = uses_copy_engines = True

    def __init__(self, buffers, meeting):
        self.buffers, self.meeting, self.views, self.half, self.nbytes = buffers, meeting, {}, 0, buffers[0].numel() // 2
        self.handle = self
        self.caller = self.stream = self.event = SimpleNamespace(wait_event=lambda event: None, record=lambda stream: None)

    def switch_half(self, nbytes):
        assert nbytes <= self.nbytes
        self.half = 0 if self.half else self.nbytes

    def barrier(self, channel, patience):
        self.meeting.wait(PATIENCE)

    def get_buffer(self, rank, shape, dtype, begin):
        return self.buffers[rank].view(dtype)[begin : begin + torch.Size(shape).numel()].view(shape)

    def write(self, count, at, n):
        count.view(torch.int32)[at] = n


@pytest.mark.parametrize("world", [2, 3])
def test_mapped_keys_are_streamed(monkeypatch, world):
    """Repeated calls with two alternating signatures, once with a k that is not contiguous: no message is sent, and the bits
    are those of one call."""
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    buffers, meeting = torch.zeros(world, 2**17, dtype=torch.uint8), threading.Barrier(world)
    lengths = [256 * world * (1 + n % 2) for n in range(4)]
    calls = [drawn(length, heads=1, seed=n) for n, length in enumerate(lengths)]
    expected = [attention.forward(*whole, causal=True) for whole in calls]

    def rank(peers):
        mine = MappedThreads(None, peers.rank, world, peers.ranks, StreamingSharedBuffers(buffers, meeting))
        vars(mine).update(room=peers.room, exchange=None)
        for n, whole in enumerate(calls):
            q, k, v = (share(x, peers, "zigzag") for x in whole)
            if n == 3:
                k = torch.stack([k, k], -1)[..., 0]
            out = parallel.forward(q, k, v, group=mine, scheme="gather", causal=True)
            assert torch.equal(out, share(expected[n], peers, "zigzag"))

    together(world, rank)
