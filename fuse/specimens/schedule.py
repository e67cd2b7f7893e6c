"""The schedule of the few-rows template: how a product of few rows is cut, so that weights stream at memory speed.

Two rates bind (H200, bench/NOTES.md, "fuse: few rows"): memory's, and what one multiprocessor takes in, weights and rows of x
together. Wide tiles spare x, narrow ones and parts of K keep more multiprocessors busy. One block a multiprocessor has all
shared memory for its rings: two with half of it each were slower in every shape.
"""

from typing import NamedTuple

MEMORY = 4.1e6  # bytes a microsecond: what tiles of 64 to 256 columns stream at
INTAKE = 51e3  # the same of one multiprocessor
EXCHANGE = 0.5  # microseconds that a sum over a cluster takes
ROOM = 224 * 2**10  # bytes of shared memory for rings and what else there is
ITEM, MOST = 2, 12  # bytes of an operand's element; slots of a ring


class Schedule(NamedTuple):
    """The constants of a printed module: rows of x a tile has (16, 32, 64); columns of weights a block has, 64 for each of its
    consumers; elements along K in a slot; blocks of a cluster, each a part of K; slots of a ring of weights, and of x's."""

    rows: int
    columns: int
    depth: int
    blocks: int
    stages: int
    ahead: int


def schedule(rows, inner, columns, processors, weights=1, prepared=False, rank=0):
    """The Schedule of (rows, inner) @ (inner, columns), rows up to 64, on so many multiprocessors. weights: how many share x.
    prepared: x goes through a prologue to a second ring. rank: columns of a narrow product beside it, 0 for none."""
    tall = next((n for n in (16, 32, 64) if rows <= n), None)
    if tall is None:
        raise ValueError(f"schedule: few rows are up to 64, got {rows=}")
    found = [
        (_microseconds(tall, inner, columns, processors, weights, rank, wide, blocks), blocks, wide)
        for wide in (64, 128)
        for blocks in (1, 2)  # of clusters of 4 no more than 30 run at once on 132 multiprocessors, of 2 all 66
    ]
    _, blocks, wide = min(found)
    wider, finer = (_rings(tall, inner, wide, depth, blocks, weights, prepared, rank) for depth in (128, 64))
    deep = min(3, -(-inner // (128 * blocks)))
    return wider if min(wider.stages, wider.ahead + 2 * prepared) >= deep else finer


def _microseconds(tall, inner, columns, processors, weights, rank, wide, blocks):
    """By the two rates, and what the cluster's sum takes."""
    tiles = -(-columns // wide)
    turns = -(-tiles * blocks // processors)  # blocks that one multiprocessor works on
    taken = turns * -(-inner // blocks) * (weights * wide + tall + rank) * ITEM
    return round(max(weights * inner * columns * ITEM / MEMORY, taken / INTAKE) + EXCHANGE * (blocks > 1), 1)


def _rings(tall, inner, wide, depth, blocks, weights, prepared, rank):
    """As many slots as there is room for. Those of x, and of what it is prepared to, are as many as the weights' where they can
    be: a weight waits in its slot for its part of x."""
    turns = 64 // tall if prepared or rank else 1  # a slot of x is always read by the same warps, which take turns
    x, slot = tall * depth * ITEM, weights * wide * depth * ITEM
    second = max(2, turns) * prepared
    sent = weights * tall * 4 * max(16, wide - wide // blocks)  # what peers send of their sums
    room = ROOM - second * x - sent - turns * rank * (wide + tall) * ITEM
    beside = x + (rank + prepared) * depth * ITEM  # with a slot of x come rows of the narrow product, or of a vector
    steps = -(-inner // (depth * blocks))
    _, stages, less = max(
        (min(stages, ahead + second), stages, -ahead)
        for ahead in range(turns, MOST + 1, turns)
        for stages in range(1, min(steps, MOST) + 1)
        if stages * slot + ahead * beside <= room
    )
    return Schedule(tall, wide, depth, blocks, stages, -less)
