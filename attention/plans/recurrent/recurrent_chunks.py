"""The plans of linear attention: which of the chunk kernels (chunk_hopper.py, chunk_ampere.py, chunk_cluster_hopper.py,
mamba2_shared_heads_hopper.py, gla_hopper.py) a call launches.

A call is one launch. If few long sequences are cut into segments, another one before it computes the local state of each
(gla_states_hopper.py, gla_recent_states_hopper.py, or a chunk kernel), and for many segments a third composes these. A
normalizer is computed by a launch of its own."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for
from tiles.launching.lengths import watched_function

from ...kernels.recurrent import (
    chunk_ampere,
    chunk_cluster_hopper,
    chunk_decays,
    chunk_hopper,
    compose_segment_states,
    gla_hopper,
    gla_recent_states_hopper,
    gla_states_hopper,
    mamba2_shared_heads_hopper,
)
from ...parts.recurrent.gate_formulas import GateFormula
from ...parts.recurrent.gates import FormulaGate, Gate, HeadGate, Mamba2Gate, TokenGate
from ...parts.recurrent.gradients import HEADS, ReversedGate
from ...parts.recurrent.results import ScanNormalizer, ScanOutputs, ScanResult, ScanStates
from ...parts.recurrent.tokens import CHUNK
from .recurrent_checks import DTYPES, NO_DT_OPTIONS, DtOptions, is_varlen, pad_key_dim, repeat_head_numbers

MIN_SEGMENT_CHUNKS = 4  # chunks of a segment, at least
COMPOSE_CHUNKS = 1.5  # the time in which the last pass composes one local state, in chunks
BLOCK_CHUNKS = 1.5  # the time of a thread block's prologue and epilogue, in chunks
FOLDED_SCALES = 2**-6, 1  # scales by which fp16 scores can be multiplied without becoming too small or too large
MIN_RECENT_CHUNKS = 64  # chunks of a segment, at least, for which a launch finds out which of them still count at its end
MIN_CLUSTER_CHUNKS = 64  # chunks of a sequence, at least, that clusters scan
MIN_CLUSTER_FILL = 0.9  # the part of the multiprocessors, at least, on which clusters then run
SWAP_STATE_AXES = 0, 1, 3, 2  # to a transposed state, as chunk kernels have it
SEGMENT_RESULTS = """
    local_state  (sequences, heads, segments, value_dim, key_dim)  float32
    total_decay  (sequences, heads, segments, 1)                   float32
"""  # the results of plan_segment_states, as rows of a schema
Arrays = dict[str, Operand | None]  # by the names of a kernel's parameters
ScratchShapes = list[tuple[tuple[int, ...], str]]


@functools.lru_cache(1024)
def intern_value(cls, *fields, **keywords):
    """cls(*fields, **keywords), the same object for equal arguments: a look-up takes a tenth of the time of a construction."""
    return cls(*fields, **keywords)


class Costs(NamedTuple):
    """The times of a member's launches. The unit is the time of a chunk in the last pass, with one consumer in each block.
    two_consumers: a chunk with two consumers in each block. first_pass: a chunk in the pass before, which computes local
    states. compose: a step from the state before one segment to the state before the next. extra_launches: two more launches.
    composed_in_scan: up to so many segments, the last pass composes local states itself."""

    two_consumers: float
    first_pass: float
    compose: float
    extra_launches: float
    composed_in_scan: int = 1


@watched_function
def choose_segments(head_sequences: int, width: int, first_width: int, chunks: int, resident_ctas: int, costs: Costs) -> int:
    """The number of segments for each sequence that takes the shortest time. head_sequences: the number of sequences times
    heads. width: the number of blocks of columns of a state in the last pass; first_width: in the first pass. chunks: of each
    sequence. resident_ctas: how many thread blocks the GPU runs at once."""

    def wave_time(blocks, width):
        if blocks * width <= resident_ctas:
            return 1
        return math.ceil(blocks * -(-width // 2) / resident_ctas) * costs.two_consumers

    def time(segments):
        last_pass, segment_chunks = wave_time(head_sequences * segments, width), -(-chunks // segments) + BLOCK_CHUNKS
        if segments == 1:
            return last_pass * segment_chunks
        if segments <= costs.composed_in_scan:
            compose_time = (segments - 1) * COMPOSE_CHUNKS
        else:
            compose_time = costs.extra_launches + segments * costs.compose
        first_pass = costs.first_pass * wave_time(head_sequences * segments, first_width)
        return (last_pass + first_pass) * segment_chunks + compose_time

    return min(range(1, max(1, min(chunks // MIN_SEGMENT_CHUNKS, resident_ctas)) + 1), key=time)


CHANNEL_COSTS = Costs(two_consumers=1, first_pass=0.55, compose=0.35, extra_launches=2)
TOKEN_COSTS = Costs(two_consumers=1, first_pass=0.6, compose=0.5, extra_launches=3, composed_in_scan=4)


def count_chunks(extents: Mapping[str, int]) -> int:
    """The number of chunk indices of a batch, at most (SequenceLayout.chunk_index). extents: those of a schema's axes."""
    length = extents["seqlen"]
    if "ends" in extents:  # sequences are packed in one batch
        return length // CHUNK + extents["sequences"]
    return (length + CHUNK - 1) // CHUNK


class ScratchAllocator:
    """The scratch memory of a plan. A call with a shape allocates an array of that shape, by default of float32, and returns
    it."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.shapes: ScratchShapes = []

    def __call__(self, *shape: int, dtype: str = "float32") -> Operand:
        self.shapes.append((shape, dtype))
        return self.problem.scratch(len(self.shapes) - 1, *self.shapes[-1])


def plan_token_decay(
    problem: Problem,
    arrays: Arrays,
    scale: float,
    vector_bytes: int = 0,
    dt_options: DtOptions = NO_DT_OPTIONS,
    normalizer: Arrays | None = None,
    formula: GateFormula | None = None,
    scratch: ScratchAllocator | None = None,
    chunk_states: Operand | None = None,
) -> tuple[list[Step], ScratchShapes]:
    """(launches, scratch memory between them) for decays that are one number for each token and head, or for each head.

    arrays: those of chunk_hopper.py's kernel by the names of its parameters, states transposed. vector_bytes: how many bytes a
    cp.async copies, 0 for TMA. dt_options: those of Mamba-2's dt. normalizer: the initial and final sum of keys as
    {"gInitialState": , "gFinalState": }, if outputs are divided by a normalizer. formula: that of gates which the kernel
    computes; None for gates in memory. scratch: the allocator of the caller's plan, if that has other launches. chunk_states:
    the array to store the states before all chunks in, by SequenceLayout.chunk_index."""
    heads, key_heads, columns = problem("heads", "heads_k", "value_dim")
    arrays, scratch = _broadcast_arrays(problem, arrays, bool(vector_bytes)), scratch or ScratchAllocator(problem)
    width = -(-columns // chunk_hopper.COLUMNS)
    scale_at_end = not (vector_bytes or FOLDED_SCALES[0] <= scale <= FOLDED_SCALES[1])
    gate = _choose_gate(arrays, dt_options, scale_at_end, formula)
    states: Arrays = {"states": chunk_states} if chunk_states else {}
    has_d, has_z = (arrays.get(name) is not None for name in ("gD", "gZ"))
    flags = {"skip": has_d, "normalized": normalizer is not None, "silu": has_z, "stores_states": chunk_states is not None}
    config = choose_config(problem, gate, intern_value(ScanOutputs, **flags), vector_bytes, width)
    if _runs_in_clusters(problem, config, arrays, width):
        return [_scan_in_clusters(problem, config, arrays, width, scale)], scratch.shapes
    local_states = arrays.get("gLocalStates")  # if the caller has computed these, there is no first pass
    segments = local_states.form.shape[2] if local_states else count_segments(problem, config, width)
    if segments == 1:
        arrays = {name: x for name, x in arrays.items() if name not in ("gLocalStates", "gTotalDecays")}
        if not vector_bytes and mamba2_shared_heads_hopper.supports(config, heads // key_heads * width):
            return [_scan_shared_heads(problem, config, arrays | states, width)], scratch.shapes
    steps: list[Step] = []
    if segments > 1 and not local_states:
        gate_of_states = _choose_gate(arrays, dt_options, False, formula)
        steps += _scan_local_states(problem, arrays, vector_bytes, gate_of_states, segments, segments - 1, scratch)
    composes_first = segments > TOKEN_COSTS.composed_in_scan
    if composes_first:
        steps.append(_compose_initial_states(problem, arrays, segments, scratch))
    if normalizer is not None:
        z_config = choose_config(problem, gate, intern_value(ScanNormalizer), vector_bytes, 1)
        steps.append(_scan_normalizer(problem, z_config, arrays, normalizer, scale, scratch))
    states_per_sequence = segments if composes_first else 1
    steps.append(launch_scan(problem, config, width, segments, segments, arrays | states, scale, states_per_sequence))
    return steps, scratch.shapes


def _runs_in_clusters(problem: Problem, config: Any, arrays: Arrays, width: int) -> bool:
    """Is chunk_cluster_hopper.py's kernel faster than that of this configuration, and serves the call?"""
    if not serves_clusters(config, arrays):
        return False
    length, heads, sequences = problem("seqlen", "heads", "sequences")
    returns_sum = not config.gate.kind and bool(arrays.get("gFinalState"))
    chunks, processors = length // CHUNK, machine(problem.device).processors
    return prefers_clusters(sequences * heads * width, chunks, processors, returns_sum)


def _compose_initial_states(problem: Problem, arrays: Arrays, segments: int, scratch: ScratchAllocator) -> Step:
    """The launch that computes the states before all segments from the local states in `arrays`, which it takes the place of
    there."""
    local_states = {name: arrays.pop(name) for name in ("gLocalStates", "gTotalDecays")}
    step, arrays["gInitialState"] = compose_segments(problem, segments, local_states, arrays.get("gInitialState"), scratch)
    return step


def _scan_normalizer(
    problem: Problem, config: Any, arrays: Arrays, normalizer: Arrays, scale: float, scratch: ScratchAllocator
) -> Step:
    """The launch that computes the numbers by which outputs are divided. Adds them to `arrays`. normalizer: as in
    plan_token_decay."""
    normalizers = scratch(*problem("batch", "seqlen", "heads"))
    z_first, z_last = normalizer["gInitialState"], normalizer["gFinalState"]
    normalizer_arrays = {"gO": normalizers, "gInitialState": z_first and z_first.spread(2, chunk_hopper.COLUMNS)}
    normalizer_arrays["gFinalState"] = z_last and z_last.spread(2, 1)
    step = launch_scan(problem, config, 1, 1, 1, arrays | normalizer_arrays, scale)
    arrays["gNormalizer"] = normalizers
    return step


def plan_segment_states(
    problem: Problem,
    arrays: Arrays,
    vector_bytes: int = 0,
    dt_options: DtOptions = NO_DT_OPTIONS,
    reverse: bool = False,
) -> tuple[list[Step], ScratchShapes]:
    """(the launches that compute how each segment changes a state, their scratch memory). Its last two arrays are the results:
    the local state, (sequence, head, segment, columns, Dk), and log2 of the total decay, (sequence, head, segment, 1). The
    number of segments is plan_token_decay's. reverse: do states go from the last token to the first, as their gradients do?"""
    arrays = _broadcast_arrays(problem, arrays, bool(vector_bytes))
    scratch = ScratchAllocator(problem)
    width = -(-problem.extents["value_dim"] // chunk_hopper.COLUMNS)
    gate = _choose_gate(arrays, dt_options)
    gate = intern_value(ReversedGate, gate) if reverse else gate
    segments = count_segments(problem, choose_config(problem, gate, intern_value(ScanOutputs), vector_bytes, width), width)
    return _scan_local_states(problem, arrays, vector_bytes, gate, segments, segments, scratch), scratch.shapes


def _scan_local_states(
    problem: Problem,
    arrays: Arrays,
    vector_bytes: int,
    gate: Gate,
    segments: int,
    scanned_segments: int,
    scratch: Callable[..., Operand],
) -> list[Step]:
    """The launches that compute the local states of the first `scanned_segments` of the `segments`. Adds the results to
    `arrays`."""
    width = -(-problem.extents["value_dim"] // chunk_hopper.COLUMNS)
    config = choose_config(problem, gate, intern_value(ScanStates), vector_bytes, width)
    steps, decays = plan_chunk_decays(problem, config, arrays, segments, scratch)
    arrays |= allocate_local_states(problem, scratch, scanned_segments, problem("value_dim", "key_dim"))
    scan_arrays = arrays | {"gInitialState": None, "gO": None, "chunk_decays": decays}
    scale = 1.0  # there are no outputs
    return [*steps, launch_scan(problem, config, width, segments, scanned_segments, scan_arrays, scale)]


def plan_chunk_decays(
    problem: Problem, config: Any, arrays: Mapping[str, Operand | None], segments: int, scratch: Callable[..., Operand]
) -> tuple[list[Step], Operand | None]:
    """(the launch that sums up the gates of each chunk, for a scan of local states on Hopper; its result), or ([], None) if
    there is no gate for each token and head, or segments are short. arrays: of the scan."""
    if not isinstance(config, chunk_hopper.Config) or not config.gate.per_token:
        return [], None
    length, heads, sequences = problem("seqlen", "heads", "sequences")
    chunks = problem.extents["batch"] * count_chunks(problem.extents)
    if chunks < MIN_RECENT_CHUNKS * sequences * segments:
        return [], None
    decays, numbers = scratch(heads, chunks), divide_chunks(problem, chunks)
    gate = config.gate.gate if isinstance(config.gate, ReversedGate) else config.gate
    gate = gate if gate.has_formula else intern_value(TokenGate)
    kernel = kernel_for(chunk_decays, intern_value(chunk_decays.Config, gate, config.varlen), problem.device)
    inputs: Arrays = {name: arrays.get(name) for name in ("gGates", "gA", "gDtBias")}
    inputs |= {"gChunkDecays": decays, "gCuSeqlens": problem["cu_seqlens"]}
    step = kernel.bind(-(-numbers["warps"] // chunk_decays.WARPS), length=length, **numbers, **inputs)
    return [step], decays


def divide_chunks(problem: Problem, chunks: int) -> dict[str, int]:
    """The numbers of kernels of which a warp has one of `splits` parts of the chunks of a sequence, for one of `groups` groups
    of HEADS heads (gradients.py). chunks: how many chunk indices there are."""
    heads, sequences = problem("heads", "sequences")
    splits, groups = -(-chunks // sequences), -(-heads // HEADS)
    return {"splits": splits, "groups": groups, "warps": sequences * splits * groups}


def launch_scan(
    problem: Problem,
    config: chunk_hopper.Config,
    width: int,
    segments: int,
    scanned_segments: int,
    arrays: Arrays,
    scale: float,
    states_per_sequence: int = 1,
) -> Step:
    """The launch of the chunk kernel of this configuration for the first `scanned_segments` of the `segments`. width: the
    number of blocks of columns of a head. states_per_sequence: 1 or the number of segments, the number of states in
    gInitialState for each sequence."""
    length, heads, key_heads, sequences = problem("seqlen", "heads", "heads_k", "sequences")
    group = heads // key_heads
    blocks = group * width // config.consumers
    module = chunk_ampere if isinstance(config, chunk_ampere.Config) else chunk_hopper
    return kernel_for(module, config, problem.device).bind(
        sequences * key_heads * scanned_segments * blocks,
        length=length,
        blocks=blocks,
        segments=segments,
        scanned_segments=scanned_segments,
        states_per_sequence=states_per_sequence,
        heads=key_heads,
        group=group,
        width=width,
        scale=scale,
        **arrays,
    )


def _broadcast_arrays(problem: Problem, arrays: Mapping[str, Operand | None], by_cp_async: bool) -> Arrays:
    """The arrays with one number for each token or column, also if the caller passed one for each head, whose elements strides
    of 0 bytes repeat."""
    batch, length, columns = problem("batch", "seqlen", "value_dim")
    arrays, gates = dict(arrays), arrays.get("gGates")
    if by_cp_async and gates and len(gates.form.shape) == 1:  # one for each head
        arrays["gGates"] = gates.spread(0, length).spread(0, batch)
    for name, extent in ("gGates", CHUNK), ("gA", CHUNK), ("gDtBias", CHUNK), ("gD", columns):
        if name in arrays:
            arrays[name] = repeat_head_numbers(arrays[name], extent)
    return arrays


def choose_mamba2_gate(dt_options: DtOptions) -> Mamba2Gate:
    """The kind of gates that Mamba-2 computes from dt and A."""
    return intern_value(Mamba2Gate, False, dt_options.dt_softplus, *dt_options.limits)


def _choose_gate(arrays: Arrays, dt_options: DtOptions, scale_at_end: bool = False, formula: GateFormula | None = None) -> Gate:
    """The kind of gates in these arrays. scale_at_end: see gates.DecayGate. formula: as in plan_token_decay."""
    gates = arrays.get("gGates")
    if gates is None:
        return intern_value(Gate)
    if formula is not None:
        return intern_value(FormulaGate, scale_at_end, formula)
    if arrays.get("gA"):
        return choose_mamba2_gate(dt_options)
    return intern_value(HeadGate if len(gates.form.shape) == 2 else TokenGate, scale_at_end)


def choose_config(problem: Problem, gate: Gate, result: ScanResult, vector_bytes: int, width: int) -> chunk_hopper.Config:
    """The configuration of the chunk kernel for values of `width` blocks of columns."""
    heads, key_heads, key_dim = problem("heads", "heads_k", "key_dim")
    key_dim, dtype = pad_key_dim(key_dim, chunk_hopper.KEY_DIMS), DTYPES[problem.dtype]
    if vector_bytes:
        return intern_value(chunk_ampere.Config, key_dim, 1, dtype, gate, result, is_varlen(problem), vector_bytes)
    consumers = 2 if heads // key_heads * width % 2 == 0 and key_dim <= chunk_hopper.WIDE_KEY_DIM else 1
    return intern_value(chunk_hopper.Config, key_dim, consumers, dtype, gate, result, is_varlen(problem))


def count_segments(problem: Problem, config: chunk_hopper.Config, width: int) -> int:
    """The number of segments into which each sequence is cut."""
    if not config.supports_segments:
        return 1
    batch, length, heads, sequences = problem("batch", "seqlen", "heads", "sequences")
    chunks = length * batch // sequences // CHUNK
    resident_ctas = config.ctas_per_sm * machine(problem.device).processors
    return choose_segments(sequences * heads * width // config.consumers, 1, 1, chunks, resident_ctas, TOKEN_COSTS)


def serves_clusters(config: chunk_hopper.Config, arrays: Arrays) -> bool:
    """Can chunk_cluster_hopper.py's kernel compute what chunk_hopper.py's does with this configuration?"""
    if isinstance(config, chunk_ampere.Config) or config.key_dim not in chunk_cluster_hopper.KEY_DIMS or config.varlen:
        return False
    return config.result == ScanOutputs() and not config.gate.weighted and not arrays.get("gLocalStates")


@watched_function
def prefers_clusters(clusters: int, chunks: int, processors: int, returns_sum: bool) -> bool:
    """Are sequences of so many chunks scanned by clusters? A multiprocessor has one block, and the time does not depend on how
    many there are: they must fill the GPU. returns_sum: is the last state returned, of gates that are all 0? It is a sum of
    products in fp32 then, which messages of 16 bits would round (1.2e-3 for 7e-7)."""
    blocks = clusters * chunk_cluster_hopper.BLOCKS
    return not returns_sum and chunks >= MIN_CLUSTER_CHUNKS and MIN_CLUSTER_FILL * processors <= blocks <= processors


def _scan_in_clusters(problem: Problem, chunk_config: chunk_hopper.Config, arrays: Arrays, width: int, scale: float) -> Step:
    """The launch of chunk_cluster_hopper.py's kernel, in place of chunk_hopper.py's with this configuration."""
    length, heads, key_heads, sequences = problem("seqlen", "heads", "heads_k", "sequences")
    config = intern_value(chunk_cluster_hopper.Config, chunk_config.key_dim, chunk_config.dtype, chunk_config.gate)
    blocks = chunk_cluster_hopper.BLOCKS
    tokens = blocks * chunk_cluster_hopper.RUN * CHUNK  # of a round
    names = "gQ", "gK", "gV", "gGates", "gA", "gDtBias", "gO", "gInitialState", "gFinalState"
    return kernel_for(chunk_cluster_hopper, config, problem.device).bind(
        blocks * sequences * heads * width,
        length=length,
        rounds=-(-length // tokens),
        heads=heads,
        group=heads // key_heads,
        width=width,
        scale=scale,
        **{name: arrays[name] for name in names if name in arrays},
    )


def _scan_shared_heads(problem: Problem, chunk_config: chunk_hopper.Config, arrays: Arrays, width: int) -> Step:
    """The launch of mamba2_shared_heads_hopper.py's kernel, in place of chunk_hopper.py's with this configuration."""
    length, heads, key_heads, sequences = problem("seqlen", "heads", "heads_k", "sequences")
    group = heads // key_heads
    blocks = group * width // mamba2_shared_heads_hopper.CONSUMERS
    config = intern_value(
        mamba2_shared_heads_hopper.Config,
        chunk_config.key_dim,
        chunk_config.dtype,
        chunk_config.gate,
        chunk_config.result,
        chunk_config.varlen,
    )
    return kernel_for(mamba2_shared_heads_hopper, config, problem.device).bind(
        sequences * key_heads * blocks,
        length=length,
        blocks=blocks,
        heads=key_heads,
        group=group,
        width=width,
        **{name: x for name, x in arrays.items() if name != "gNormalizer"},
    )


def plan_channel_decay(
    problem: Problem,
    arrays: Arrays,
    scale: float,
    formula: GateFormula | None = None,
    scratch: ScratchAllocator | None = None,
    l2norm: bool = False,
    chunk_states: Operand | None = None,
) -> tuple[list[Step], ScratchShapes]:
    """(launches, scratch memory between them) for decays of channels. arrays: those of gla_hopper.py's kernel. formula,
    chunk_states: as in plan_token_decay."""
    batch, length, heads, key_heads, key_dim, columns, sequences = problem(
        "batch", "seqlen", "heads", "heads_k", "key_dim", "value_dim", "sequences"
    )
    width, padded_dim = -(-columns // gla_hopper.COLUMNS), pad_key_dim(key_dim, gla_hopper.STAGES)
    consumers = 2 if width % 2 == 0 and padded_dim <= gla_hopper.WIDE_KEY_DIM else 1
    blocks, chunks = width // consumers, length * batch // sequences // gla_hopper.CHUNK
    segments = choose_segments(sequences * heads, blocks, blocks, chunks, machine(problem.device).processors, CHANNEL_COSTS)
    gates = arrays["gGates"]
    assert gates is not None
    sizes = padded_dim, consumers, DTYPES[gates.form.dtype], DTYPES[problem.dtype], is_varlen(problem)
    steps, scratch = [], scratch or ScratchAllocator(problem)

    def launch(module, grid_segments: int, arguments: dict[str, Any], **options: bool) -> Step:
        config = intern_value(module.Config, *sizes, formula=formula, l2norm=l2norm, **options)
        return kernel_for(module, config, problem.device).bind(
            sequences * heads * blocks * grid_segments,
            length=length,
            blocks=blocks,
            segments=segments,
            heads=heads,
            group=heads // key_heads,
            **arguments,
        )

    if segments > 1:
        local_states = allocate_local_states(problem, scratch, segments - 1, (columns, key_dim), key_dim)
        inputs = {name: x for name, x in arrays.items() if name not in ("gQ", "gO", "gInitialState", "gFinalState")}
        inputs |= local_states | {"scanned_segments": segments - 1, "scale": 1.0}
        if scans_recent_states(problem.dtype):
            steps.append(launch(gla_recent_states_hopper, segments - 1, inputs))
        else:
            steps.append(launch(gla_states_hopper, segments - 1, inputs | dict.fromkeys(("gInitialState", "gStates"))))
        step, segment_states = compose_segments(problem, segments, local_states, arrays["gInitialState"], scratch)
        steps.append(step)
        arrays = arrays | {"gInitialState": segment_states}
    arguments = arrays | {"gStates": chunk_states, "scale": scale}
    return [*steps, launch(gla_hopper, segments, arguments, stores_states=chunk_states is not None)], scratch.shapes


def scans_recent_states(dtype: str) -> bool:
    """Does gla_recent_states_hopper.py compute local states? In float16, keys decayed to the end of a segment would be 0 too
    soon."""
    return dtype == "bfloat16"


def allocate_local_states(
    problem: Problem, scratch: Callable[..., Operand], segments: int, state: Sequence[int], decays: int = 1
) -> Arrays:
    """Scratch memory for what a pass over `segments` segments of each sequence stores, by the names of kernels' parameters: the
    local states, transposed, of shape `state`, and the total decays: one of all channels, or so many as keys have channels."""
    sequences, heads = problem("sequences", "heads")
    local_states = scratch(sequences, heads, segments, *state)
    return {"gLocalStates": local_states, "gTotalDecays": scratch(sequences, heads, segments, decays)}


def compose_segments(
    problem: Problem, segments: int, local_states: Arrays, initial: Operand | None, scratch: Callable[..., Operand]
) -> tuple[Step, Operand]:
    """(the launch of compose_segment_states.py, the state before each segment that it computes). local_states: as
    allocate_local_states returns them, of all segments but the last one, or of more; gTotalDecays None: there are no decays.
    initial: the state before each sequence, transposed."""
    sequences, heads = problem("sequences", "heads")
    local, decays = local_states["gLocalStates"], local_states["gTotalDecays"]
    assert local is not None
    *_, height, width = local.form.shape
    rows, cols = -(-height // compose_segment_states.TILE.rows), -(-width // compose_segment_states.TILE.cols)
    per_channel = decays is not None and decays.form.shape[-1] > 1
    kernel = kernel_for(
        compose_segment_states, intern_value(compose_segment_states.Config, per_channel, decays is not None), problem.device
    )
    states = scratch(sequences * segments, heads, height, width)
    arrays = local_states | {"gInitialState": initial, "gSegmentStates": states}
    return kernel.bind(sequences * heads * rows * cols, heads=heads, segments=segments, rows=rows, cols=cols, **arrays), states
