"""The plans of the delta rule on Hopper whose kernels compute everything of a chunk themselves: one launch, or with decays of
channels three if sequences are cut into segments."""

from typing import Any, NamedTuple

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for

from ...kernels.delta import delta_compose_states_hopper, delta_hopper, kda_hopper, kda_states_hopper
from ...kernels.delta.delta_compose_states_hopper import KEY_DIMS
from ...parts.recurrent.launch_conditions import NoCondition
from ...parts.recurrent.tokens import CHUNK, COLUMNS
from ..recurrent.raw_inputs import NOT_RAW, RawOptions
from ..recurrent.recurrent_checks import DTYPES, is_varlen, pad_key_dim
from ..recurrent.recurrent_chunks import Costs, ScratchAllocator, choose_segments, intern_value

# The times of both passes over segments with decays of channels, for Dk 128
CHANNEL_COSTS = Costs(two_consumers=1.25, first_pass=0.7, compose=0.75, extra_launches=0.5)


class LaunchCondition(NamedTuple):
    """When launches of a call have work. static: the object of their kernels' configurations; args: its arguments."""

    static: NoCondition
    args: dict[str, Any]


UNCONDITIONAL = LaunchCondition(NoCondition(), {})


def plan_channel_scans(
    problem: Problem,
    arrays: dict,
    scale: float,
    raw: RawOptions,
    scratch: ScratchAllocator,
    condition: LaunchCondition = UNCONDITIONAL,
) -> list[Step]:
    """The launches with decays of channels. There is one, or three if sequences are cut into segments: the first computes how
    each segment changes a state, the second the state before each segment, the third the outputs. condition: of all
    launches."""
    batch, length, heads, key_dim, columns, sequences = problem("batch", "seqlen", "heads", "key_dim", "value_dim", "sequences")
    width, first_width = -(-columns // COLUMNS), -(-(columns + key_dim) // COLUMNS)
    processors, chunks_per_sequence = machine(problem.device).processors, length * batch // sequences // CHUNK
    padded = pad_key_dim(key_dim, KEY_DIMS)
    costs = CHANNEL_COSTS._replace(compose=CHANNEL_COSTS.compose * padded / max(KEY_DIMS))
    segments = choose_segments(sequences * heads, width, first_width, chunks_per_sequence, processors, costs)
    steps = []
    if segments > 1:
        scanned_segments, both_columns = segments - 1, columns + key_dim  # of [N | M]
        transitions = scratch(sequences * scanned_segments, heads, key_dim, both_columns)
        inputs = {name: x for name, x in arrays.items() if name not in ("gQ", "gO", "gInitialState")}
        inputs["gFinalState"] = transitions
        grid = {"segments": segments, "scanned_segments": scanned_segments}
        steps.append(
            scan_chunks(
                problem, inputs, both_columns, kda_states_hopper, scanned_segments, raw, condition, values=columns, **grid
            )
        )
        compose, segment_states = compose_states(problem, transitions, arrays["gInitialState"], segments, scratch, condition)
        steps.append(compose)
        arrays = arrays | {"gInitialState": segment_states}
    return [*steps, scan_chunks(problem, arrays, columns, kda_hopper, segments, raw, condition, segments=segments, scale=scale)]


def scan_chunks(
    problem: Problem,
    arrays: dict,
    columns: int,
    module: Any,
    grid_segments: int,
    raw: RawOptions = NOT_RAW,
    condition: LaunchCondition = UNCONDITIONAL,
    **numbers: Any,
) -> Step:
    """The launch of one of Hopper's chunk kernels for `grid_segments` segments of each sequence and states with so many
    columns. raw: the formulas that the kernel applies to raw inputs. condition: of the launch, with decays of channels.
    numbers: its further arguments."""
    batch, length, heads, key_heads, key_dim, sequences = problem("batch", "seqlen", "heads", "heads_k", "key_dim", "sequences")
    width, gates = -(-columns // COLUMNS), arrays["gGates"]
    fits_one_wave = sequences * heads * grid_segments * width <= machine(problem.device).processors  # an SM for each 64 columns
    padded = pad_key_dim(key_dim, delta_hopper.STAGES)
    consumers = 1 if fits_one_wave or key_dim > delta_hopper.WIDE_KEY_DIM else min(width, 2)
    dtype, varlen = DTYPES[problem.dtype], is_varlen(problem)
    options = {"formula": raw.gate, "beta": raw.beta, "l2norm": raw.l2norm}
    if module in (kda_hopper, kda_states_hopper):
        config = module.Config(
            padded, consumers, DTYPES[gates.form.dtype], dtype, varlen, **options, condition=condition.static
        )
    else:
        config = module.Config(padded, dtype, gates is not None, varlen, consumers=consumers, **options)
        if gates and len(gates.form.shape) == 1:  # one for each head
            arrays = arrays | {"gGates": gates.spread(0, length).spread(0, batch)}
    blocks = -(-width // config.consumers)
    return kernel_for(module, config, problem.device).bind(
        sequences * heads * grid_segments * blocks,
        length=length,
        blocks=blocks,
        heads=key_heads,
        group=heads // key_heads,
        **numbers,
        **arrays,
        **condition.args,
    )


def compose_states(
    problem: Problem,
    transitions: Operand,
    initial_state: Operand | None,
    segments: int,
    scratch: ScratchAllocator,
    condition: LaunchCondition = UNCONDITIONAL,
) -> tuple[Step, Operand]:
    """(the launch that composes the states before each segment of all transitions [N | M], these states)"""
    heads, key_dim, columns, sequences = problem("heads", "key_dim", "value_dim", "sequences")
    width, segment_states = -(-columns // COLUMNS), scratch(sequences * segments, heads, key_dim, columns)
    config = intern_value(delta_compose_states_hopper.Config, pad_key_dim(key_dim, KEY_DIMS), condition.static)
    step = kernel_for(delta_compose_states_hopper, config, problem.device).bind(
        sequences * heads * width,
        blocks=width,
        segments=segments,
        heads=heads,
        values=columns,
        gTransitions=transitions,
        gInitialState=initial_state,
        gSegmentStates=segment_states,
        **condition.args,
    )
    return step, segment_states
