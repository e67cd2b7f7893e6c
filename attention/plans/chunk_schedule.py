"""The schedule of two launches: one that computes what depends on no state, of all chunks, and a walk along the sequences that
reads it, after the first one's end or beside it (parts/recurrent/chunk_order.py)."""

import functools
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

ITEM_CHUNKS = 4  # chunks of an item; with a wait for each chunk the gated delta rule's walk took 4 % more time
LEAD = 9.0  # how many times as fast as the walk are the blocks that go on beside it, at most; not measured
MAX_WALK_OCCUPANCY = 1 / 3  # the part of the multiprocessors that a walk beside the first launch may fill: more saves nothing
MIN_GAIN = 0.06  # the least part of the time that a walk beside the grid before it must save


class ChunkCosts(NamedTuple):
    """Microseconds of a chunk on one multiprocessor: in the first launch, where several warpgroups have one each, divided by
    how many these are; in the walk; and of both while they run beside each other."""

    chunk: float
    walk: float
    chunk_beside: float
    walk_beside: float


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
    """The blocks of the first launch that go on beside the walk: as many as it leaves room for, or as stay ahead of it."""
    return min(processors - walk_blocks, math.ceil(LEAD * lanes * costs.chunk / costs.walk))


@watched_function
@functools.lru_cache(1024)
def choose_rounds(lanes: int, chunks: int, late_blocks: int, processors: int, copies: int, costs: ChunkCosts) -> int:
    """The number of rounds of all workers before some make room for the walk, so that both launches take the shortest time; 0
    if the walk had better begin when all is done. chunks: of each of `lanes` heads of sequences."""
    workers, late, items = copies * processors, copies * late_blocks, lanes * -(-chunks // ITEM_CHUNKS)
    item_time, item_time_beside = (ITEM_CHUNKS * copies * cost for cost in (costs.chunk, costs.chunk_beside))

    def time(rounds: int) -> float:
        beside = math.ceil((items - rounds * workers) / late) * item_time_beside
        walk = max(ITEM_CHUNKS, chunks - beside / costs.walk_beside) * costs.walk
        return rounds * item_time + beside + walk

    best = min(range(1, items // workers + 1) if late > 0 else (), key=time, default=0)
    one_by_one = lanes * chunks * costs.chunk / processors + chunks * costs.walk
    return best if best and time(best) < (1 - MIN_GAIN) * one_by_one else 0


def schedule_chunks(
    problem: Problem, walk_blocks: int, costs: ChunkCosts | None, resident_ctas: int, scratch: ScratchAllocator, copies: int = 2
) -> ChunkSchedule:
    """The schedule of a problem. walk_blocks: of the walk. costs: None if the walk is not to run beside the first launch.
    resident_ctas: for how many blocks of one warpgroup the GPU has room in that one. copies: the warpgroups of a block there
    that has a multiprocessor to itself."""
    length, heads, sequences, batch = problem("seqlen", "heads", "sequences", "batch")
    lanes, processors = sequences * heads, machine(problem.device).processors
    chunks = -(-length // CHUNK)
    rounds = late_blocks = 0
    if costs and not is_varlen(problem) and walk_blocks <= MAX_WALK_OCCUPANCY * processors:
        late_blocks = count_late_blocks(lanes, walk_blocks, processors, costs)
        rounds = choose_rounds(lanes, chunks, late_blocks, processors, copies, costs)
    if rounds == 0:
        parts = count_parts(lanes, length * batch // sequences // CHUNK, resident_ctas)
        return ChunkSchedule(intern_value(HeadMajor), lanes * parts, {"parts": parts}, {})
    args = {
        "gCounts": scratch(copies * processors, dtype="int32"),
        "workers": copies * processors,
        "early_workers": copies * (processors - late_blocks),
        "rounds": rounds,
        "lanes": lanes,
        "item_chunks": ITEM_CHUNKS,
    }
    items = lanes * -(-chunks // ITEM_CHUNKS)
    return ChunkSchedule(intern_value(ChunkMajor, copies), processors, args | {"items": items}, args)
