"""The schedule of two launches: one that computes what depends on no state, of all chunks, and a walk along the sequences that
reads it, after the first one's end or beside it (parts/recurrent/chunk_order.py)."""

import math
from typing import Any, NamedTuple

from tiles.calls.schema import Problem
from tiles.launching.devices import machine
from tiles.launching.lengths import watched_function

from ..parts.recurrent.chunk_order import ChunkMajor, HeadMajor
from ..parts.recurrent.tokens import CHUNK
from .recurrent_checks import is_varlen
from .recurrent_chunks import ScratchAllocator, intern_value
from .recurrent_gradients import count_chunk_indices

ITEM_CHUNKS = 2  # chunks of an item: fewer let the walk begin earlier
ROUNDS = 1  # of all workers: after more, what the walk reads has left the L2 cache
LEAD = 1.1  # how many times as fast as the walk what goes on beside it is, at most: more takes memory's speed from it
MIN_GAIN = 0.02  # the least part of the time that a walk beside the first launch must save


class ChunkCosts(NamedTuple):
    """Microseconds of a chunk on one multiprocessor: in the first launch, where several warpgroups have one each, divided by
    how many these are; there, beside the walk; in the walk."""

    chunk: float
    chunk_beside: float
    walk: float


class ChunkSchedule(NamedTuple):
    """The order of chunks; the first launch's number of blocks; what the order takes in the first launch, and in the walk."""

    order: HeadMajor
    blocks: Any
    args: dict[str, Any]
    walk_args: dict[str, Any]


@watched_function
def count_parts(lanes: int, chunks: int, resident_ctas: int) -> int:
    """The number of blocks for the chunks of each of `lanes` heads of sequences."""
    return max(1, min(resident_ctas // lanes, chunks))


def count_stored_chunks(problem: Problem) -> Any:
    """The chunks that the first launch stores: all, and one in whose place those are that items have and heads have not."""
    return count_chunk_indices(problem) + 1


@watched_function
def count_late_blocks(lanes: int, walk_blocks: int, processors: int, costs: ChunkCosts) -> int:
    """The blocks of the first launch that go on beside the walk: as many as it leaves room for, or as stay ahead of it. lanes:
    the number of sequences times heads."""
    return min(processors - walk_blocks, math.ceil(LEAD * lanes * costs.chunk / costs.walk))


@watched_function
def gains_beside(lanes: int, chunks: int, late_blocks: int, processors: int, copies: int, costs: ChunkCosts) -> bool:
    """Do both launches take less time if the walk runs beside the first one? chunks: of each of `lanes` heads of sequences."""
    if late_blocks <= 0 or lanes * -(-chunks // ITEM_CHUNKS) < ROUNDS * copies * processors:
        return False
    first_items, walk = ROUNDS * ITEM_CHUNKS * copies * costs.chunk, chunks * costs.walk
    beside = first_items + max(walk, lanes * chunks * costs.chunk_beside / late_blocks)
    return beside < (1 - MIN_GAIN) * (lanes * chunks * costs.chunk / processors + walk)


def schedule_chunks(
    problem: Problem, walk_blocks: int, costs: ChunkCosts, resident_ctas: int, scratch: ScratchAllocator, copies: int = 2
) -> ChunkSchedule:
    """The schedule of a problem. walk_blocks: of the walk. resident_ctas: for how many blocks of one warpgroup the GPU has room
    in the first launch. copies: the warpgroups of a block there that has a multiprocessor to itself."""
    length, heads, sequences, batch = problem("seqlen", "heads", "sequences", "batch")
    lanes, processors = sequences * heads, machine(problem.device).processors
    chunks = -(-length // CHUNK)
    late_blocks = count_late_blocks(lanes, walk_blocks, processors, costs)
    if is_varlen(problem) or not gains_beside(lanes, chunks, late_blocks, processors, copies, costs):
        parts = count_parts(lanes, length * batch // sequences // CHUNK, resident_ctas)
        return ChunkSchedule(intern_value(HeadMajor), lanes * parts, {"parts": parts}, {})
    args = {
        "gCounts": scratch(copies * processors, dtype="int32"),
        "workers": copies * processors,
        "early_workers": copies * (processors - late_blocks),
        "rounds": ROUNDS,
        "lanes": lanes,
        "item_chunks": ITEM_CHUNKS,
    }
    items = lanes * -(-chunks // ITEM_CHUNKS)
    return ChunkSchedule(intern_value(ChunkMajor, copies), processors, args | {"items": items}, args)
