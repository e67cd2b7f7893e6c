"""The plans of the delta rule with decays of channels on few long sequences. One launch computes everything that does not
depend on the state, for all chunks at once (kda_transform_hopper.py). Then a thread block for each 64 columns of a head, or
128 where the launch before needs the multiprocessors, walks along the sequence (kda_walk_hopper.py), or, where a few chunks
leave nothing of an older state, along each of its segments.

Where states are kept for longer, a walk beside the launch before it is faster, or kernels that compute how segments change a
state (delta_scans.py). The gates decide, which no plan knows: a launch looks at them (delta_channel_cuts_hopper.py), and of
the launches of both ways those of one end at once (parts/recurrent/launch_conditions.py)."""

import math
from typing import Any

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for
from tiles.launching.lengths import watched_function

from ...kernels.delta import delta_channel_cuts_hopper, kda_transform_hopper, kda_walk_hopper
from ...parts.delta.delta_chunks import KEY_DIMS
from ...parts.recurrent.launch_conditions import HistoryCondition, SuccessorGrid
from ...parts.recurrent.tokens import CHUNK, COLUMNS
from ..recurrent.chunk_schedule import (
    MIN_GAIN,
    ChunkCosts,
    ChunkSchedule,
    count_late_blocks,
    count_stored_chunks,
    schedule_by_heads,
    schedule_chunks,
    time_beside,
)
from ..recurrent.raw_inputs import RawOptions
from ..recurrent.recurrent_checks import DTYPES, is_varlen, pad_key_dim
from ..recurrent.recurrent_chunks import Arrays, ScratchAllocator, intern_value
from .delta_scans import UNCONDITIONAL, LaunchCondition, plan_channel_scans
from .delta_walk import count_blocks, serves_walk

# The least part of the multiprocessors that a walk of whole sequences must fill, if these have more than so many chunks. It may
# be one block a head and 64 columns; with fewer chunks it is faster than other launches nevertheless
MIN_OCCUPANCY, MIN_LONG_CHUNKS = 0.12, 128
EARLY_CHUNKS = 2  # the chunks before a segment that are walked, too, with models' decays
MIN_GAIN_BESIDE = 0.12  # the least part of the time that a walk without segments must save beside the launch before it
MAX_SCRATCH_BYTES = 4 * 2**30
# By consumers in a block of the walk beside the launch before it, to which two leave half of the multiprocessors that one has
CHANNEL_COSTS = {1: ChunkCosts(4.45, 4.25, 1.02, 1.02), 2: ChunkCosts(4.45, 4.8, 1.76, 1.02)}
# How much longer a walk in segments takes than its chunks one by one; microseconds of the first launches and last blocks of
# each way; of a launch that looks at gates, and of those that end at once
SEGMENTS_FACTOR, ENDS, HISTORY = 1.2, 15.0, 12.0
MIN_GAIN_CHOICE = 0.3  # the least part of the time that segments must save, where sequences forget: others lose HISTORY
MIN_CHUNKS_AHEAD = 64  # of a sequence, from which on a launch of its own counts overlaps before a walk in segments
# One in so many segments of a head may keep what is before it in sequences that are walked in segments: a block then walks it,
# too
KEPT_SEGMENTS = 8


def serves_channel_walk(problem: Problem) -> bool:
    """Do launches of this module serve a call? serves_walk with decays of channels: is the scratch memory also below
    MAX_SCRATCH_BYTES?"""
    batch, length, heads, key_dim = problem("batch", "seqlen", "heads", "key_dim")
    return serves_walk(problem) and batch * length * heads * (3 * key_dim + CHUNK) * 2 <= MAX_SCRATCH_BYTES


@watched_function
def count_walk_segments(walk_blocks: int, chunks: int, processors: int) -> int:
    """The segments of each sequence in a walk: as many as fill the GPU, if a block then walks fewer chunks. walk_blocks: of a
    segment of all sequences. chunks: of each sequence."""
    segments = max(1, min(processors // walk_blocks, chunks)) if walk_blocks else 1
    return segments if -(-chunks // segments) + EARLY_CHUNKS < chunks else 1


@watched_function
def prefers_walk(walk_blocks: int, chunks: int, processors: int) -> bool:
    """Is a walk of whole sequences at least as fast as the launches of delta_scans.py?"""
    return chunks <= MIN_LONG_CHUNKS or walk_blocks >= MIN_OCCUPANCY * processors


def time_walk_beside(head_sequences: int, width: int, chunks: int, consumers: int, processors: int) -> float:
    """Microseconds of a walk with so many consumers in a block and of the launch beside which it runs."""
    costs = CHANNEL_COSTS[consumers]
    late_blocks = count_late_blocks(head_sequences, head_sequences * width // consumers, processors, costs)
    return time_beside(head_sequences, chunks, late_blocks, 2, costs) if late_blocks > 0 else math.inf


@watched_function
def choose_consumers(head_sequences: int, width: int, chunks: int, processors: int) -> int:
    """The consumers in each block of a walk beside the launch before it. width: the blocks of 64 columns of a head."""
    numbers = (n for n in CHANNEL_COSTS if width % n == 0)
    return min(numbers, key=lambda n: time_walk_beside(head_sequences, width, chunks, n, processors))


@watched_function
def gains_segments(head_sequences: int, width: int, chunks: int, segments: int, consumers: int, processors: int) -> bool:
    """Does a walk in segments of sequences that forget take less time, by MIN_GAIN_CHOICE, than one beside the launch before
    it, with so many consumers in a block?"""
    walk = (-(-chunks // segments) + EARLY_CHUNKS) * CHANNEL_COSTS[1].walk_after
    in_segments = SEGMENTS_FACTOR * (head_sequences * chunks * CHANNEL_COSTS[1].chunk / processors + walk)
    beside = time_walk_beside(head_sequences, width, chunks, consumers, processors)
    return in_segments + HISTORY + ENDS < (1 - MIN_GAIN_CHOICE) * (beside + ENDS)


@watched_function
def counts_ahead(chunks: int) -> bool:
    """Are overlaps before segments of sequences of so many chunks counted by a launch of its own? The next one begins beside
    it; with few chunks it has room for blocks that count."""
    return chunks >= MIN_CHUNKS_AHEAD


class ChannelWalk:
    """The launches of a call. buffers: arrays by the names of kernels' parameters, of which each launch takes those that its
    kernel declares. blocks: of 64 columns of all heads; width: of one. chunks: of all sequences, as they are stored."""

    def __init__(self, problem: Problem, arrays: Arrays, scale: float, raw: RawOptions, scratch: ScratchAllocator):
        """arrays: those of kda_hopper.py's kernel. raw: the formulas that kernels apply to raw inputs."""
        self.problem, self.scale, self.scratch = problem, scale, scratch
        self.blocks, self.sequence_chunks = count_blocks(problem)
        self.width, self.chunks = -(-problem.extents["value_dim"] // COLUMNS), count_stored_chunks(problem)
        self.key_dim, gates = pad_key_dim(problem.extents["key_dim"], KEY_DIMS), arrays["gGates"]
        assert gates is not None
        self.fields = self.key_dim, 0, DTYPES[gates.form.dtype], DTYPES[problem.dtype], is_varlen(problem)
        self.options = {"formula": raw.gate, "beta": raw.beta, "l2norm": raw.l2norm}
        heads, key_heads = problem("heads", "heads_k")
        self.numbers = {"length": problem.extents["seqlen"], "heads": key_heads, "group": heads // key_heads}
        self.buffers: Arrays = arrays | {"gGateRows": gates, "gKeyRows": arrays["gK"]}
        self.buffers |= {"gQueries": self.allocate(self.key_dim), "gDecayedKeys": self.allocate(self.key_dim)}
        self.buffers |= dict.fromkeys(("gSolved", "gSolvedKeys", "gSolvedScores"), self.allocate(self.key_dim + CHUNK))
        self.buffers["gStateDecays"] = scratch(self.chunks, heads, 2 * self.key_dim)

    def allocate(self, extent: int) -> Operand:
        """Scratch memory for so many columns of each chunk and head."""
        return self.scratch(self.chunks, self.problem.extents["heads"], CHUNK, extent, dtype=self.problem.dtype)

    def count_overlaps(self, segments: int) -> tuple[Step, Operand]:
        """(the launch that counts the chunks before each segment which still count there, these counts)"""
        head_sequences = self.blocks // self.width
        overlaps = self.scratch(1, head_sequences, segments)
        config = intern_value(delta_channel_cuts_hopper.Config, *self.fields, **self.options)
        kernel = kernel_for(delta_channel_cuts_hopper, config, self.problem.device)
        grid, arrays = head_sequences * (segments - 1), self.buffers | {"gOverlaps": overlaps}
        return kernel.bind_declared(grid, arrays, segments=segments, **self.numbers), overlaps

    def walk(
        self,
        schedule: ChunkSchedule,
        segments: int,
        overlaps: Operand | None = None,
        transform_condition: LaunchCondition = UNCONDITIONAL,
        walk_condition: LaunchCondition = UNCONDITIONAL,
        consumers: int = 1,
    ) -> list[Step]:
        """The two launches of a walk. schedule: of the first one's chunks. overlaps: the counts before segments, if they are
        known; otherwise the first launch counts, too. consumers: in each block of the walk."""
        head_sequences, counts = self.blocks // self.width, 0
        if segments > 1 and overlaps is None:
            overlaps, counts = self.scratch(1, head_sequences, segments), head_sequences * (segments - 1)
        arrays, order, condition = self.buffers | {"gOverlaps": overlaps}, schedule.order, transform_condition.static
        config = intern_value(kda_transform_hopper.Config, *self.fields, **self.options, order=order, condition=condition)
        transform = kernel_for(kda_transform_hopper, config, self.problem.device).bind_declared(
            schedule.blocks + counts,
            arrays,
            segments=segments,
            counts=counts,
            scale=self.scale,
            **self.numbers,
            **schedule.args,
            **transform_condition.args,
        )
        _, _, _, input_dtype, varlen = self.fields
        static = walk_condition.static
        walk_config = intern_value(kda_walk_hopper.Config, self.key_dim, input_dtype, varlen, order, static, consumers)
        walk = kernel_for(kda_walk_hopper, walk_config, self.problem.device).bind_declared(
            self.blocks // consumers * segments,
            arrays,
            length=self.numbers["length"],
            blocks=self.width // consumers,
            segments=segments,
            heads=self.problem.extents["heads"],
            scale=self.scale,
            **schedule.walk_args,
            **walk_condition.args,
        )
        return [transform, walk]

    def walk_segments(self, schedule: ChunkSchedule, segments: int) -> list[Step]:
        """The launches of a walk in segments, whatever the gates are: a launch counts overlaps before those of `walk`, or with
        few chunks the first of these does."""
        if segments == 1 or not counts_ahead(self.sequence_chunks):
            return self.walk(schedule, segments)
        count, overlaps = self.count_overlaps(segments)
        successor = LaunchCondition(intern_value(SuccessorGrid), {})
        return [count, *self.walk(schedule, segments, overlaps, successor, successor)]


def plan_channel_walk(problem: Problem, arrays: Arrays, scale: float, raw: RawOptions, scratch: ScratchAllocator) -> list[Step]:
    """The launches. arrays: those of kda_hopper.py's kernel. raw: the formulas that kernels apply to raw inputs."""
    launches, processors = ChannelWalk(problem, arrays, scale, raw, scratch), machine(problem.device).processors
    head_sequences, chunks = launches.blocks // launches.width, launches.sequence_chunks
    segments = count_walk_segments(launches.blocks, chunks, processors)
    resident_ctas = kda_transform_hopper.CTAS_PER_SM * processors
    min_gain = MIN_GAIN if segments == 1 else MIN_GAIN_BESIDE
    sizes = head_sequences, launches.width, chunks
    consumers = int(choose_consumers(*sizes, processors))  # a key of a table
    costs, walk_blocks = CHANNEL_COSTS[consumers], launches.blocks // consumers
    schedule = schedule_chunks(problem, walk_blocks, costs, resident_ctas, scratch, min_gain=min_gain)
    prefers_whole = prefers_walk(launches.blocks, chunks, processors)
    if prefers_whole and not schedule.order.overlaps:
        return launches.walk_segments(schedule, segments)
    if prefers_whole and (segments == 1 or not gains_segments(*sizes, segments, consumers, processors)):
        return launches.walk(schedule, 1, consumers=consumers)
    # The gates choose between a walk in segments, where sequences forget, and what is faster where they keep
    count, overlaps = launches.count_overlaps(segments)
    args: dict[str, Any] = {"gHistories": overlaps, "max_kept": segments // KEPT_SEGMENTS}
    forgets, keeps = (LaunchCondition(intern_value(HistoryCondition, x), args) for x in (True, False))
    in_segments = launches.walk(schedule_by_heads(problem, resident_ctas), segments, overlaps, forgets, forgets)
    if prefers_whole:
        beside = LaunchCondition(intern_value(HistoryCondition, False, True), args)
        return [count, *in_segments, *launches.walk(schedule, 1, None, keeps, beside, consumers)]
    return [count, *in_segments, *plan_channel_scans(problem, arrays, scale, raw, scratch, keeps)]
