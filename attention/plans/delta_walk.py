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

from ..kernels import (
    delta_transform_hopper,
    delta_walk_hopper,
    delta_walk_states_hopper,
)
from ..parts.recurrent.delta_chunks import KEY_DIMS, ChunkVectors
from ..parts.recurrent.tokens import CHUNK, COLUMNS
from .chunk_schedule import count_parts
from .delta_scans import compose_states
from .raw_inputs import RawOptions
from .recurrent_checks import DTYPES, is_varlen, pad_key_dim
from .recurrent_chunks import BLOCK_CHUNKS, MIN_SEGMENT_CHUNKS, Arrays, ScratchAllocator, intern_value
from .recurrent_gradients import count_chunk_indices, spread_to_tokens

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


def plan_walk(problem: Problem, arrays: Arrays, scale: float, raw: RawOptions, scratch: ScratchAllocator) -> list[Step]:
    """The launches. arrays: those of delta_hopper.py's kernel. raw: the formulas that kernels apply to raw inputs."""
    length, heads, key_heads, key_dim, columns, sequences = problem(
        "seqlen", "heads", "heads_k", "key_dim", "value_dim", "sequences"
    )
    head_sequences, (_, chunks), processors = sequences * heads, count_blocks(problem), machine(problem.device).processors
    width, first_width = -(-columns // COLUMNS), -(-(columns + key_dim) // COLUMNS)
    sizes = head_sequences, width, first_width, chunks, processors
    segments, consumers = choose_segments(*sizes), 2 if choose_consumers(*sizes) > 1 else 1
    config_fields = pad_key_dim(key_dim, KEY_DIMS), DTYPES[problem.dtype], arrays["gGates"] is not None, is_varlen(problem)
    extents: dict[str, Any] = {"length": length, "heads": key_heads, "group": heads // key_heads}
    inverse, chunk_results = _plan_inverse(problem, arrays, config_fields, raw, scratch, extents)
    states: list[Step] = []
    segment_states, first_state = arrays["gInitialState"], 0
    if segments > 1:
        states, segment_states = _plan_states(problem, arrays | chunk_results, config_fields, raw, scratch, segments, extents)
        first_state = int(not composes_states(segments, arrays))
    walk_arrays = {name: arrays[name] for name in ("gQ", "gK", "gV", "gO", "gFinalState", "gCuSeqlens")}
    walk_arrays |= {name: chunk_results[name] for name in ("gTransforms", "gVectors")}
    config = intern_value(delta_walk_hopper.Config, *config_fields, l2norm=raw.l2norm, consumers=consumers)
    walk = kernel_for(delta_walk_hopper, config, problem.device).bind(
        head_sequences * segments * width // consumers,
        blocks=width // consumers,
        segments=segments,
        first_state=first_state,
        scale=scale,
        gInitialState=segment_states,
        **extents,
        **walk_arrays,
    )
    return [inverse, *states, walk]


def _plan_inverse(
    problem: Problem, arrays: Arrays, config_fields: tuple, raw: RawOptions, scratch: ScratchAllocator, extents: dict[str, Any]
) -> tuple[Step, Arrays]:
    """(the launch that solves all chunks, its results)"""
    heads, sequences = problem("heads", "sequences")
    gates, chunks = arrays["gGates"] and spread_to_tokens(problem, arrays["gGates"]), count_chunk_indices(problem)
    chunk_results: Arrays = {"gTransforms": scratch(chunks, heads, CHUNK, CHUNK, dtype=problem.dtype)}
    chunk_results["gVectors"] = scratch(chunks, heads, ChunkVectors(gates is not None).spec.length)
    if gates is not None:
        chunk_results["gExponents"] = scratch(heads, chunks)
    config = intern_value(delta_transform_hopper.Config, *config_fields, formula=raw.gate, beta=raw.beta, l2norm=raw.l2norm)
    resident_ctas = config.ctas_per_sm * machine(problem.device).processors
    parts = count_parts(sequences * heads, count_blocks(problem)[1], resident_ctas)
    excluded = "gQ", "gV", "gO", "gInitialState", "gFinalState"
    inputs = {name: x for name, x in arrays.items() if name not in excluded} | {"gGates": gates} | chunk_results
    kernel = kernel_for(delta_transform_hopper, config, problem.device)
    return kernel.bind(sequences * heads * parts, parts=parts, **extents, **inputs), chunk_results


def _plan_states(
    problem: Problem,
    arrays: Arrays,
    config_fields: tuple,
    raw: RawOptions,
    scratch: ScratchAllocator,
    segments: int,
    extents: dict[str, Any],
) -> tuple[list[Step], Operand]:
    """(the launches that compute the state before each segment, these states; unless composes_states, without those before
    first segments)"""
    heads, key_dim, columns, sequences = problem("heads", "key_dim", "value_dim", "sequences")
    composes = composes_states(segments, arrays)
    scanned_segments, both_columns = segments - 1, columns + key_dim * composes
    transitions = scratch(sequences * scanned_segments, heads, key_dim, both_columns)
    blocks = sequences * heads * scanned_segments * -(-both_columns // COLUMNS)
    consumers = 1 if blocks <= machine(problem.device).processors else 2
    config = intern_value(delta_walk_states_hopper.Config, *config_fields, l2norm=raw.l2norm, consumers=consumers)
    width = -(-both_columns // (COLUMNS * consumers))
    names = "gK", "gV", "gTransforms", "gVectors", "gExponents", "gCuSeqlens"
    inputs = {name: arrays[name] for name in names if name in arrays}
    walk = kernel_for(delta_walk_states_hopper, config, problem.device).bind(
        sequences * heads * scanned_segments * width,
        blocks=width,
        segments=segments,
        scanned_segments=scanned_segments,
        values=columns,
        gFinalState=transitions,
        **extents,
        **inputs,
    )
    if not composes:
        return [walk], transitions
    compose, segment_states = compose_states(problem, transitions, arrays["gInitialState"], segments, scratch)
    return [walk, compose], segment_states


def composes_states(segments: int, arrays: Arrays) -> bool:
    """Are the states before segments composed of N and M? Of two segments, the first of which begins with 0, they are N."""
    return segments > 2 or arrays["gInitialState"] is not None
