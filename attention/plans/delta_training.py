"""The plan of the delta rule's forward pass in training on Hopper, where it stores a record for the gradients
(delta_records.py): outputs come from the kernels that these would otherwise run first."""

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.launch import kernel_for

from ..kernels import delta_chunk_states_hopper
from ..parts.recurrent.delta_chunks import KEY_DIMS
from .delta_chunks import swap_axes
from .delta_records import record_buffers
from .packed_tails import VALUE_RESULTS, plan_tails
from .raw_inputs import prepare_rows
from .recurrent_checks import DTYPES, is_varlen, pad_key_dim
from .recurrent_chunks import Arrays, ScratchAllocator, intern_value
from .recurrent_gradients import spread_to_tokens

INPUTS = ("gQ", "gK"), ("gV",)
# The arrays of delta_chunk_states_hopper.py with outputs
ARRAYS = (
    *("gQ", "gK", "gV", "gBeta", "gGates", "gO", "gInitialState", "gFinalState", "gCuSeqlens"),
    *("gErrors", "gStates", "gSolutions", "gVectors", "gTailQ", "gTailK", "gTailV", "gTailO"),
)


def plan_forward_with_record(
    problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator, record: Arrays
) -> list[Step]:
    """The launches. arrays: those of a call of delta_rule, by the names of kernels' parameters. record: where to store what
    gradients read, by field."""
    length, heads, key_heads, sequences, key_dim = problem("seqlen", "heads", "heads_k", "sequences", "key_dim")
    copy_rows, copies = prepare_rows(problem, scratch, l2norm=False)
    buffers = arrays | copies | record_buffers(record)
    buffers["gGates"] = arrays["gGates"] and spread_to_tokens(problem, arrays["gGates"])
    buffers |= {name: swap_axes(arrays[name]) for name in ("gInitialState", "gFinalState")}
    copy_tails, copy_back = plan_tails(problem, buffers, scratch, INPUTS, VALUE_RESULTS)
    config = intern_value(
        delta_chunk_states_hopper.config_for,
        pad_key_dim(key_dim, KEY_DIMS),
        DTYPES[problem.dtype],
        buffers["gGates"] is not None,
        is_varlen(problem),
        True,
    )
    step = kernel_for(delta_chunk_states_hopper, config, problem.device).bind(
        sequences * heads,
        length=length,
        heads=heads,
        group=heads // key_heads,
        scale=scale,
        **{name: buffers.get(name) for name in ARRAYS},
    )
    return [*copy_rows, *copy_tails, step, *copy_back]
