"""Ranks as threads of one process: computes what attention.parallel computes with any number of ranks, without a process group,
in the interpreter or on one GPU."""

import queue
import threading
from collections import defaultdict

import torch
from ranks import differentiated, drawn

import attention
from attention import parallel
from attention.parallel.peers import Peers, PendingMessages

PATIENCE = 60  # seconds that a rank waits for the others


class RankThread(Peers):
    """A rank that is a thread. room: queues of messages, by (sender, receiver)."""

    @classmethod
    def of(cls, room, rank, world):
        actual = cls(None, rank, world, tuple(range(world)))
        vars(actual)["room"] = room
        return actual

    def exchange(self, sends, receives):
        for rank, x in sends:
            if x.numel():
                assert x.is_contiguous()
                self.room[self.rank, rank].put(x.clone())
        for rank, x in receives:
            if x.numel():
                x.copy_(self.room[rank, self.rank].get(timeout=PATIENCE).reshape(x.shape))
        return PendingMessages(())

    def all_gather(self, x):
        return self.all_gather_text(x.clone())

    def all_gather_text(self, text):
        for rank in range(self.world):
            self.room[self.rank, rank].put(text)
        return [self.room[rank, self.rank].get(timeout=PATIENCE) for rank in range(self.world)]


def together(world, body):
    """[body(peers) of each rank], computed at the same time. An exception in one of them is raised."""
    room, actual, errors = defaultdict(queue.SimpleQueue), [None] * world, []

    def run(rank):
        try:
            with torch.no_grad():  # which is a thread's own
                actual[rank] = body(RankThread.of(room, rank, world))
        except BaseException as error:
            errors.append(error)

    for one in (threads := [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]):
        one.start()
    for one in threads:
        one.join(2 * PATIENCE)
    if errors:
        raise errors[0]
    return actual


def compared(
    world, length, scheme, where="cpu", order="zigzag", learned=(), shapes=None, bitwise=(0, 1), requested=None, **options
):
    """Compare a call on so many ranks with the same call on one, like ranks.compared: out, lse and gradients; those whose
    numbers are in `bitwise` bit by bit. learned: options that every rank has whole and that have gradients; requested: further
    arguments of attention.parallel.forward."""
    q, k, v = whole = [x.to(where) for x in drawn(length, **shapes or {})]
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[0], q.shape[2], q.shape[1], device=where)
    names, arrays = [*learned], [options[name].requires_grad_() for name in learned]
    one_rank = differentiated(lambda *x: attention.forward(*x, **options, return_lse=True), whole, dout, dlse, arrays)

    def rank(peers):
        part = lambda x, dim=1: parallel.shard(x.detach(), peers, dim, order)
        mine = [x.detach().clone().requires_grad_() for x in arrays]
        call_options = (
            options | dict(zip(names, mine)) | dict(group=peers, scheme=scheme, order=order, length=length) | (requested or {})
        )
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):  # a GPU's thread would wait for itself
            of_ranks = lambda *x: parallel.forward(*x, **call_options, return_lse=True)
            its = differentiated(of_ranks, [*map(part, whole)], part(dout), part(dlse, 2), mine)
        return its, [part(one_rank[0]), part(one_rank[1], 2), *map(part, one_rank[2:5])]

    actual = together(world, rank)
    totals = [sum(x) for x in zip(*[its[5:] for its, _ in actual])]
    for at, (its, expected) in enumerate([*actual, (totals, one_rank[5:])]):
        for n, (x, y) in enumerate(zip(its, expected)):
            n += 5 * (at == world)
            said = f"{scheme} {order} of {length}, {[*options]}: result {n} on rank {at} of {world}"
            if n in bitwise:
                assert torch.equal(x, y), f"{said}: {(x.float() - y.float()).abs().max()} of {y.abs().max()}"
            else:
                close = 2.0**-6 * one_rank[n].float().abs().max() if n != 1 else 2.0**-9
                error = (x.float() - y.float()).nan_to_num(0 if n == 1 else torch.nan).abs()  # of -inf and -inf
                assert (error <= close).all(), f"{said}: {error.max()} of {one_rank[n].abs().max()}"
