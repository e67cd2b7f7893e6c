"""The plan of the delta rule's forward pass in training on Hopper, where it stores a record for the gradients
(delta_records.py): outputs come from the kernels that these would otherwise run first. Those are a pass, or for few heads a
launch that computes everything that depends on no state, for all chunks at once, and the recurrence of the states."""

from typing import Any

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.launch import kernel_for

from ...kernels.delta import delta_chains_hopper, delta_chunk_states_hopper
from ...parts.delta.delta_chunks import KEY_DIMS
from ...parts.delta.delta_gradient_config import OUTPUTS
from ..recurrent.packed_tails import VALUE_RESULTS, plan_tails
from ..recurrent.raw_inputs import prepare_rows
from ..recurrent.recurrent_checks import DTYPES, has_channel_decay, is_varlen, pad_key_dim
from ..recurrent.recurrent_chunks import Arrays, ScratchAllocator, intern_value
from ..recurrent.recurrent_gradients import count_chunk_indices, spread_to_tokens
from .delta_channel_chunks import plan_channel_outputs
from .delta_chunks import swap_axes
from .delta_gradient_walk import plan_inverses
from .delta_records import record_buffers

INPUTS = ("gQ", "gK"), ("gV",)


def plan_forward_with_record(
    problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator, record: Arrays
) -> list[Step]:
    """The launches. arrays: those of a call of delta_rule, by the names of kernels' parameters. record: where to store what
    gradients read, by field."""
    length, heads, key_heads, sequences, key_dim = problem("seqlen", "heads", "heads_k", "sequences", "key_dim")
    by_channel = has_channel_decay(problem)
    copy_rows, copies = prepare_rows(problem, scratch, l2norm=False, channel_gates=by_channel)
    buffers = arrays | copies | record_buffers(record)
    if by_channel:
        return [*copy_rows, *plan_channel_outputs(problem, buffers, scale, scratch)]
    buffers["gGates"] = arrays["gGates"] and spread_to_tokens(problem, arrays["gGates"])
    buffers |= {name: swap_axes(arrays[name]) for name in ("gInitialState", "gFinalState")}
    copy_tails, copy_back = plan_tails(problem, buffers, scratch, INPUTS, VALUE_RESULTS)
    sizes = pad_key_dim(key_dim, KEY_DIMS), DTYPES[problem.dtype], buffers["gGates"] is not None

    def launch(module: Any, config: Any, blocks: int, **numbers: float) -> Step:
        kernel, group = kernel_for(module, config, problem.device), heads // key_heads
        grid = sequences * heads * blocks
        return kernel.bind_declared(grid, buffers, length=length, heads=heads, group=group, scale=scale, **numbers)

    if "scores" not in record:
        config = intern_value(delta_chunk_states_hopper.config_for, *sizes, is_varlen(problem), True)
        return [*copy_rows, *copy_tails, launch(delta_chunk_states_hopper, config, 1), *copy_back]
    module = delta_chains_hopper
    buffers["gCounts"] = scratch(count_chunk_indices(problem), key_heads * OUTPUTS, dtype="int32")
    config = intern_value(module.with_outputs, intern_value(module.Config, *sizes))
    return [
        *copy_rows,
        plan_inverses(problem, buffers, pad_key_dim(key_dim, KEY_DIMS), buffers["gGates"] is not None, scale),
        launch(module, config, module.BLOCKS, sequences=sequences, segments=1),
    ]
