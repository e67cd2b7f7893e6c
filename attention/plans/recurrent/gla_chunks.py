"""The plan of linear attention by chunks on any GPU since Ampere where channels of the keys have decays (gla_ampere.py): one
launch, or three if sequences are cut into segments."""

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for

from ...kernels.recurrent import gla_ampere
from ...parts.recurrent.channel_chunks import KEY_DIMS
from ...parts.recurrent.gate_formulas import GateFormula
from ...parts.recurrent.tokens import CHUNK
from .recurrent_checks import DTYPES, is_varlen, pad_key_dim
from .recurrent_chunks import (
    Arrays,
    Costs,
    ScratchAllocator,
    allocate_local_states,
    choose_segments,
    compose_segments,
    intern_value,
)

# the times of both passes over segments, for Dk 128
COSTS = Costs(two_consumers=1, first_pass=0.5, compose=0.35, extra_launches=2)


def serves_gla_chunks(problem: Problem) -> bool:
    """Do chunk kernels serve such a call, with decays of channels and without a normalizer?"""
    batch, length, key_dim = problem("batch", "seqlen", "key_dim")
    return bool(batch * length) and key_dim <= max(KEY_DIMS)


def plan_gla_chunks(
    problem: Problem, arrays: Arrays, scale: float, formula: GateFormula | None, scratch: ScratchAllocator
) -> list[Step]:
    """The launches. arrays: gQ, gK, gV, gGates, gO, gInitialState, gFinalState, and gA, gDtBias of a formula; states
    transposed. formula: that of gates which the kernel computes; None for gates in memory."""
    batch, length, heads, key_heads, key_dim, columns, sequences = problem(
        "batch", "seqlen", "heads", "heads_k", "key_dim", "value_dim", "sequences"
    )
    config_fields = pad_key_dim(key_dim, KEY_DIMS), DTYPES[problem.dtype], is_varlen(problem), problem.bytes_at_once()
    blocks, chunks = -(-columns // gla_ampere.BLOCK_COLUMNS), length * batch // sequences // CHUNK
    gpu = machine(problem.device)
    ctas_per_sm = gla_ampere.count_resident_blocks(config_fields[0], gpu.shared_bytes)
    resident_ctas = ctas_per_sm * gpu.processors
    segments = choose_segments(sequences * heads * blocks, 1, 1, chunks, resident_ctas, COSTS)
    outputs, local_outputs = ("gO", "gFinalState"), ("gLocalStates", "gTotalDecays")

    def scan(local: bool, scanned_segments: int, scan_arrays: Arrays) -> Step:
        config = intern_value(gla_ampere.Config, *config_fields, local, ctas_per_sm, formula=formula)
        return kernel_for(gla_ampere, config, problem.device).bind(
            sequences * heads * blocks * scanned_segments,
            length=length,
            blocks=blocks,
            segments=segments,
            scanned_segments=scanned_segments,
            heads=heads,
            group=heads // key_heads,
            scale=scale,
            **scan_arrays,
        )

    steps = []
    if segments > 1:
        local_states = allocate_local_states(problem, scratch, segments - 1, (columns, key_dim), key_dim)
        steps.append(scan(True, segments - 1, arrays | dict.fromkeys(("gInitialState", *outputs)) | local_states))
        step, segment_states = compose_segments(problem, segments, local_states, arrays["gInitialState"], scratch)
        steps.append(step)
        arrays = arrays | {"gInitialState": segment_states}
    return [*steps, scan(False, segments, arrays | dict.fromkeys(local_outputs))]
