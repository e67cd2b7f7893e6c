"""The plans of the delta rule on few long sequences, without decays or with those of tokens. One launch computes everything
that does not depend on the state, for all chunks at once (delta_transform_hopper.py). Then a thread block for each 64 columns
of a head walks along the sequence (delta_walk_hopper.py). A sequence may be cut into segments: two more launches then compute
the state before each (delta_walk_states_hopper.py, delta_compose_states_hopper.py)."""

import functools
import math
from typing import Any

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for
from tiles.launching.lengths import watched_function

from ...kernels.delta import delta_transform_hopper, delta_walk_hopper, delta_walk_states_hopper
from ...parts.delta.delta_chunks import KEY_DIMS, ChunkVectors
from ...parts.recurrent.tokens import CHUNK, COLUMNS
from ..recurrent.chunk_schedule import count_parts
from ..recurrent.raw_inputs import RawOptions
from ..recurrent.recurrent_checks import DTYPES, is_varlen, pad_key_dim
from ..recurrent.recurrent_chunks import BLOCK_CHUNKS, MIN_SEGMENT_CHUNKS, Arrays, ScratchAllocator, intern_value
from ..recurrent.recurrent_gradients import count_chunk_indices, spread_to_tokens
from .delta_scans import compose_states

MIN_CHUNKS = 8  # chunks of a sequence from which on a second launch pays
# Microseconds of a chunk of the walk, by consumers in a block; of a chunk of the pass that computes states, likewise; of a step
# from the state before one segment to that before the next; of two more launches
WALK, STATES, COMPOSE, LAUNCHES = {1: 1.37, 2: 2.4}, {1: 0.76, 2: 1.17}, 3.2, 8.0


def serves_walk(problem: Problem) -> bool:
    """Does a walk take less time than delta_hopper.py, whose thread blocks each solve the chunks again, for 64 columns of the
    state? It does if each multiprocessor has one block at most."""
    blocks, chunks = count_blocks(problem)
    return problem.extents["key_dim"] <= max(KEY_DIMS) and blocks <= machine(problem.device).processors and chunks >= MIN_CHUNKS


def count_blocks(problem: Problem) -> tuple[int, int]:
    """(blocks of 64 columns, chunks of a sequence)"""
    batch, length, heads, columns, sequences = problem("batch", "seqlen", "heads", "value_dim", "sequences")
    return sequences * heads * -(-columns // COLUMNS), length * batch // sequences // CHUNK


@functools.lru_cache(1024)
def choose_walk(head_sequences: int, width: int, first_width: int, chunks: int, processors: int) -> tuple[int, int]:
    """(segments for each sequence, consumers in each block of the walk) that take the shortest time. head_sequences: the number
    of sequences times heads. width: the number of blocks of 64 columns of a state, first_width: of [N | M]. chunks: of each
    sequence."""

    def time(segments: int, consumers: int) -> float:
        segment_chunks, blocks = -(-chunks // segments) + BLOCK_CHUNKS, head_sequences * (segments - 1) * first_width
        walk = math.ceil(head_sequences * segments * width / consumers / processors) * segment_chunks * WALK[consumers]
        if segments == 1:
            return walk
        waves = math.ceil(blocks / 2 / processors) * STATES[2] if blocks > processors else STATES[1]
        return walk + waves * segment_chunks + LAUNCHES + segments * COMPOSE

    numbers = range(1, max(1, min(chunks // MIN_SEGMENT_CHUNKS, processors)) + 1)
    return min(((n, consumers) for n in numbers for consumers in WALK if width % consumers == 0), key=lambda x: time(*x))


@watched_function
def choose_segments(*sizes: int) -> int:
    """The number of segments for each sequence. sizes: choose_walk's arguments."""
    return choose_walk(*sizes)[0]


@watched_function
def choose_consumers(*sizes: int) -> int:
    """The number of consumers in each block of the walk. sizes: choose_walk's arguments."""
    return choose_walk(*sizes)[1]


class TokenWalk:
    """The launches of a call. buffers: arrays by the names of kernels' parameters, of which each launch takes those that its
    kernel declares. chunks: of each sequence. fields: of the kernels' configurations, which have these in common."""

    def __init__(self, problem: Problem, arrays: Arrays, raw: RawOptions, scratch: ScratchAllocator):
        """arrays: those of delta_hopper.py's kernel. raw: the formulas that kernels apply to raw inputs."""
        heads, sequences, key_dim = problem("heads", "sequences", "key_dim")
        self.problem, self.raw, self.scratch = problem, raw, scratch
        self.head_sequences, (_, self.chunks) = sequences * heads, count_blocks(problem)
        gates, chunk_indices = arrays["gGates"], count_chunk_indices(problem)
        self.fields = pad_key_dim(key_dim, KEY_DIMS), DTYPES[problem.dtype], gates is not None, is_varlen(problem)
        self.buffers = arrays | {"gGates": gates and spread_to_tokens(problem, gates)}
        self.buffers["gTransforms"] = scratch(chunk_indices, heads, CHUNK, CHUNK, dtype=problem.dtype)
        self.buffers["gVectors"] = scratch(chunk_indices, heads, ChunkVectors(gates is not None).spec.length)
        if gates is not None:
            self.buffers["gExponents"] = scratch(heads, chunk_indices)

    def launch(self, module: Any, grid: int, options: dict[str, Any], changed: Arrays, **numbers: Any) -> Step:
        """A launch of `grid` thread blocks. options: further fields of the configuration. changed: arrays that stand for others
        of `buffers`."""
        length, heads, key_heads = self.problem("seqlen", "heads", "heads_k")
        config = intern_value(module.Config, *self.fields, l2norm=self.raw.l2norm, **options)
        kernel, sizes = kernel_for(module, config, self.problem.device), {"heads": key_heads, "group": heads // key_heads}
        return kernel.bind_declared(grid, self.buffers | changed, length=length, **sizes, **numbers)

    def solve(self) -> Step:
        """The launch that solves all chunks."""
        resident_ctas = delta_transform_hopper.Config.ctas_per_sm * machine(self.problem.device).processors
        parts = count_parts(self.head_sequences, self.chunks, resident_ctas)
        options = {"formula": self.raw.gate, "beta": self.raw.beta}
        return self.launch(delta_transform_hopper, self.head_sequences * parts, options, {}, parts=parts)

    def composes_states(self, segments: int) -> bool:
        """Are the states before segments composed of N and M? Of two segments, the first of which begins with 0, they are N."""
        return segments > 2 or self.buffers["gInitialState"] is not None

    def compute_states(self, segments: int) -> tuple[list[Step], Operand]:
        """(the launches that compute the state before each segment, these states; unless composes_states, without those before
        first segments)"""
        problem, composes, scanned_segments = self.problem, self.composes_states(segments), segments - 1
        heads, key_dim, columns, sequences = problem("heads", "key_dim", "value_dim", "sequences")
        both_columns, walks = columns + key_dim * composes, self.head_sequences * scanned_segments
        transitions = self.scratch(sequences * scanned_segments, heads, key_dim, both_columns)
        consumers = 1 if walks * -(-both_columns // COLUMNS) <= machine(problem.device).processors else 2
        width, numbers = -(-both_columns // (COLUMNS * consumers)), {"segments": segments, "values": columns}
        walk = self.launch(
            delta_walk_states_hopper,
            walks * width,
            {"consumers": consumers},
            {"gFinalState": transitions},
            blocks=width,
            scanned_segments=scanned_segments,
            **numbers,
        )
        if not composes:
            return [walk], transitions
        compose, states = compose_states(problem, transitions, self.buffers["gInitialState"], segments, self.scratch)
        return [walk, compose], states


def plan_walk(problem: Problem, arrays: Arrays, scale: float, raw: RawOptions, scratch: ScratchAllocator) -> list[Step]:
    """The launches. arrays, raw: see TokenWalk."""
    launches, (key_dim, columns) = TokenWalk(problem, arrays, raw, scratch), problem("key_dim", "value_dim")
    width, first_width, head_sequences = -(-columns // COLUMNS), -(-(columns + key_dim) // COLUMNS), launches.head_sequences
    sizes = head_sequences, width, first_width, launches.chunks, machine(problem.device).processors
    segments, consumers = choose_segments(*sizes), 2 if choose_consumers(*sizes) > 1 else 1
    states: list[Step] = []
    segment_states, first_state = arrays["gInitialState"], 0
    solve = launches.solve()
    if segments > 1:
        states, segment_states = launches.compute_states(segments)
        first_state = int(not launches.composes_states(segments))
    walk = launches.launch(
        delta_walk_hopper,
        head_sequences * segments * width // consumers,
        {"consumers": consumers},
        {"gInitialState": segment_states},
        blocks=width // consumers,
        segments=segments,
        first_state=first_state,
        scale=scale,
    )
    return [solve, *states, walk]
