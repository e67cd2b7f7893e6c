"""The schedule of two launches: one that computes what depends on no state, of all chunks, and a walk along the sequences that
reads it, after the first one's end or beside it (parts/recurrent/chunk_order.py)."""

import math
from typing import Any, NamedTuple

from tiles.calls.schema import Problem
from tiles.launching.devices import machine
from tiles.launching.lengths import watched_function

from ...parts.recurrent.chunk_order import ChunkMajor, HeadMajor
from ...parts.recurrent.tokens import CHUNK
from .recurrent_checks import is_varlen
from .recurrent_chunks import ScratchAllocator, intern_value
from .recurrent_gradients import count_chunk_indices

ITEM_CHUNKS = 2  # chunks of an item: fewer let the walk begin earlier
ROUNDS = 1  # of all workers: after more, what the walk reads has left the L2 cache
# The blocks beside the walk together produce chunks at most so many times as fast as the walk uses them; faster, they would
# take memory bandwidth from it
LEAD = 1.1
MIN_GAIN = 0.02  # the least part of the time that a walk beside the first launch must save


class ChunkCosts(NamedTuple):
    """Microseconds of a chunk on one multiprocessor. The first two are divided by the chunks that it has at once, one of each
    warpgroup.

    chunk: in the first launch alone.
    chunk_beside: there, while the walk runs.
    walk: in the walk beside the first launch.
    walk_after: in the walk after it."""

    chunk: float
    chunk_beside: float
    walk: float
    walk_after: float


class ChunkSchedule(NamedTuple):
    """The order of chunks; the first launch's number of blocks; what the order takes in the first launch, and in the walk."""

    order: HeadMajor
    blocks: Any
    args: dict[str, Any]
    walk_args: dict[str, Any]


@watched_function
def count_parts(head_sequences: int, chunks: int, resident_ctas: int) -> int:
    """The number of blocks for a head of a sequence. head_sequences: the number of sequences times heads."""
    return max(1, min(resident_ctas // head_sequences, chunks))


def count_stored_chunks(problem: Problem) -> Any:
    """The chunks that the first launch stores: all, and one slot into which items write what lies past a head's last chunk."""
    return count_chunk_indices(problem) + 1


@watched_function
def count_late_blocks(head_sequences: int, walk_blocks: int, processors: int, costs: ChunkCosts) -> int:
    """The blocks of the first launch that go on beside the walk: as many as it leaves room for, or as stay ahead of it."""
    return min(processors - walk_blocks, math.ceil(LEAD * head_sequences * costs.chunk / costs.walk))


@watched_function
def gains_beside(
    head_sequences: int,
    chunks: int,
    late_blocks: int,
    processors: int,
    block_workers: int,
    costs: ChunkCosts,
    min_gain: float = MIN_GAIN,
) -> bool:
    """Do both launches take less time, by `min_gain` of it, if the walk runs beside the first one? chunks: of each sequence."""
    if late_blocks <= 0 or head_sequences * -(-chunks // ITEM_CHUNKS) < ROUNDS * block_workers * processors:
        return False
    beside = time_beside(head_sequences, chunks, late_blocks, block_workers, costs)
    return beside < (1 - min_gain) * (head_sequences * chunks * costs.chunk / processors + chunks * costs.walk_after)


def time_beside(head_sequences: int, chunks: int, late_blocks: int, block_workers: int, costs: ChunkCosts) -> float:
    """Microseconds of both launches, if the walk runs beside the first one. chunks: of each sequence."""
    first_items = ROUNDS * ITEM_CHUNKS * block_workers * costs.chunk
    return first_items + max(chunks * costs.walk, head_sequences * chunks * costs.chunk_beside / late_blocks)


def schedule_by_heads(problem: Problem, resident_ctas: int) -> ChunkSchedule:
    """The schedule of a walk after the first launch; see schedule_chunks."""
    length, heads, sequences, batch = problem("seqlen", "heads", "sequences", "batch")
    parts = count_parts(sequences * heads, length * batch // sequences // CHUNK, resident_ctas)
    return ChunkSchedule(intern_value(HeadMajor), sequences * heads * parts, {"parts": parts}, {})


def schedule_chunks(
    problem: Problem,
    walk_blocks: int,
    costs: ChunkCosts,
    resident_ctas: int,
    scratch: ScratchAllocator,
    block_workers: int = 2,
    min_gain: float = MIN_GAIN,
) -> ChunkSchedule:
    """The schedule of a problem. walk_blocks: of the walk. resident_ctas: for how many blocks of one warpgroup the GPU has room
    in the first launch. block_workers: the workers of a block there that has a multiprocessor to itself. min_gain: see
    gains_beside."""
    length, heads, sequences = problem("seqlen", "heads", "sequences")
    head_sequences, processors = sequences * heads, machine(problem.device).processors
    chunks = -(-length // CHUNK)
    late_blocks = count_late_blocks(head_sequences, walk_blocks, processors, costs)
    if is_varlen(problem) or not gains_beside(head_sequences, chunks, late_blocks, processors, block_workers, costs, min_gain):
        return schedule_by_heads(problem, resident_ctas)
    args = {
        "gCounts": scratch(block_workers * processors, dtype="int32"),
        "workers": block_workers * processors,
        "early_workers": block_workers * (processors - late_blocks),
        "rounds": ROUNDS,
        "head_sequences": head_sequences,
        "item_chunks": ITEM_CHUNKS,
    }
    items = head_sequences * -(-chunks // ITEM_CHUNKS)
    return ChunkSchedule(intern_value(ChunkMajor, block_workers), processors, args | {"items": items}, args)
