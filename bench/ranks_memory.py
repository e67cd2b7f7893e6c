"""How many bytes calls of attention.parallel hold beyond their shards, counted without a GPU: one rank of several runs, sends
nothing, and its attention computes nothing. Every array that torch allocates is counted while it is in use.

    python -m bench.ranks_memory [--length 16384 --heads 32 --kv-heads 8 --dim 128 --ranks 2]

A table: for each scheme the most bytes that are in use at a time, beyond shards, output and lse, and which arrays these are.
`memory=` of ring is in shards of keys and values."""

import argparse
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import attention
from attention import parallel
from attention.parallel import plans
from attention.parallel.peers import Peers, PendingMessages
from attention.plans.softmax import remote_keys


class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of tensors that are allocated inside and in use: the maximum, and of which arrays; and torch's
    operations."""

    def __init__(self, *given):
        super().__init__()
        self.given = {x.untyped_storage()._cdata for x in given}
        self.known, self.most, self.calls, self.arrays = {}, 0, 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, self.calls = function(*args, **kwargs or {}), self.calls + 1
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.given | self.known.keys():
                storage = x.untyped_storage()
                said = f"{'x'.join(map(str, x.shape))} {str(x.dtype).removeprefix('torch.')}"
                self.known[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), said
        self.known = {key: one for key, one in self.known.items() if not one[0].expired()}
        live_bytes = sum([nbytes for _, nbytes, _ in self.known.values()])
        if live_bytes > self.most:
            self.most, self.arrays = live_bytes, [(said, nbytes) for _, nbytes, said in self.known.values()]
        return result


class UnsentPeers(Peers):
    """A rank that sends nothing; its messages keep the arrays that they would read until they are waited for."""

    exchanges = 0

    def exchange(self, sends, receives):
        UnsentPeers.exchanges += 1
        return PendingMessages((), [x for _, x in (*sends, *receives)])

    def all_gather_bytes(self, said, device):
        return [said] * self.world


def nothing(q, k, v, *, out=None, return_lse=False, **options):
    """Results with the shapes of attention.forward's."""
    made = q.new_empty((*q.shape[:3], v.shape[3])) if out is None else out
    return made, torch.empty(q.shape[0], q.shape[2], q.shape[1])


@contextmanager
def computing_nothing():
    """Inside, attention computes nothing, but calls are planned as always."""
    forward, planned = attention.forward, plans.plan_call

    def in_earnest(*given):
        with patch.object(attention, "forward", forward):
            return planned(*given)

    with (
        patch.object(plans, "plan_call", in_earnest),
        patch.object(attention, "forward", nothing),
        patch.object(remote_keys, "forward_two_buffers", lambda q, k, v, *others: nothing(q, k, v)),
    ):
        yield


def counts(world, rank, length, heads, kv_heads, dim, **options):
    """(the counters of a call on one of so many ranks, bytes of its output and lse)"""
    peers = UnsentPeers(None, rank, world, tuple(range(world)))
    rows = sum(map(len, parallel.Zigzag().spans(length, world)[rank]))
    q, k, v = (torch.empty(1, rows, n, dim, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads))
    call = lambda: parallel.forward(q, k, v, group=peers, length=length, **options)
    with torch.no_grad(), computing_nothing():
        call()  # what is remembered is taken once
        with MemoryCounter(q, k, v) as counted:
            call()
    return counted, rows * heads * (dim * q.element_size() + 4)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in ("length", 16384), ("heads", 32), ("kv_heads", 8), ("dim", 128), ("ranks", 2):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    asked = parser.parse_args()
    shape = asked.length, asked.heads, asked.kv_heads, asked.dim
    share = asked.length * asked.kv_heads * asked.dim * 4 / asked.ranks
    print(f"{asked}; a shard of keys and values {share / 1e6:.1f} MB")
    cases = {"gather": {}, "ring": {}, "ring, two shards": dict(memory=2 * share), "ring, least": dict(memory=1)}
    if asked.kv_heads % asked.ranks == 0:
        cases["ulysses"] = {}
    for name, options in cases.items():
        for rank in sorted({0, asked.ranks - 1}):
            counted, output_bytes = counts(asked.ranks, rank, *shape, scheme=name.partition(",")[0], causal=True, **options)
            arrays = Counter(counted.arrays)
            large = [f"{n} of {said}: {n * size / 1e6:.1f}" for (said, size), n in arrays.items() if n * size > 1e6]
            most = (counted.most - output_bytes) / 1e6
            print(f"{name:16} rank {rank} {most:7.1f} MB  at the most, with the output: {'; '.join(large)}")


if __name__ == "__main__":
    main()
