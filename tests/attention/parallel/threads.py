"""Ranks as threads of one process: what attention.parallel computes with whatever number of ranks, without a process group."""

import queue
import threading
from collections import defaultdict

import torch

from attention.parallel.peers import Peers, Pending

PATIENCE = 60  # seconds, in which the others come


class Thread(Peers):
    """One of them. room: the messages between any two, by (from, to)."""

    @classmethod
    def of(cls, room, rank, world):
        found = cls(None, rank, world, tuple(range(world)))
        vars(found)["room"] = room
        return found

    def exchange(self, sends, receives):
        for rank, x in sends:
            if x.numel():
                assert x.is_contiguous()
                self.room[self.rank, rank].put(x.clone())
        for rank, x in receives:
            if x.numel():
                x.copy_(self.room[rank, self.rank].get(timeout=PATIENCE).reshape(x.shape))
        return Pending(())

    def collected(self, x):
        return self.told(x.clone())

    def told(self, said):
        for rank in range(self.world):
            self.room[self.rank, rank].put(said)
        return [self.room[rank, self.rank].get(timeout=PATIENCE) for rank in range(self.world)]


def together(world, body):
    """[body(peers) of each rank]. What one of them raises is raised."""
    room, found, errors = defaultdict(queue.SimpleQueue), [None] * world, []

    def run(rank):
        try:
            with torch.no_grad():  # which is a thread's own
                found[rank] = body(Thread.of(room, rank, world))
        except BaseException as error:
            errors.append(error)

    for one in (threads := [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]):
        one.start()
    for one in threads:
        one.join(2 * PATIENCE)
    if errors:
        raise errors[0]
    return found
