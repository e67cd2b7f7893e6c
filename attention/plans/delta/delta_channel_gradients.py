"""The plan of the delta rule's gradients on Hopper where each channel of the keys has a decay. Three launches: one computes
everything that depends on no state, for all chunks at once; one runs two recurrences, which give S, E, dS and dV of all chunks;
one computes the gradients of all chunks at once. If forward stored the results of the first and S and E (delta_records.py),
there are two: the second then runs the recurrence of dS alone. Few long sequences are cut into segments where states decay fast
enough, which a further launch finds out; their segments go through the recurrences side by side.

For the largest tiles the last one is a kernel that takes a chunk as two blocks of tokens; a further launch then computes those
of strong chunks again, which decay too much for that."""

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.devices import machine, persistent

from ...kernels.delta import (
    delta_channel_block_gradients_hopper,
    delta_channel_chains_hopper,
    delta_channel_gradients_hopper,
    delta_channel_state_gradients_hopper,
)
from ...parts.recurrent.tokens import CHUNK
from ..recurrent.packed_tails import INPUTS, KEY_GRADIENTS, VALUE_GRADIENTS, NameGroups, plan_tails
from ..recurrent.recurrent_checks import is_varlen
from ..recurrent.recurrent_chunks import Arrays, ScratchAllocator
from ..recurrent.recurrent_gradients import sum_heads
from .delta_channel_chunks import ChannelChunks, count_packed_parts
from .delta_records import BY_CHANNEL, record_buffers

PARAMETERS = {
    "gQ": "q",
    "gK": "k",
    "gV": "v",
    "gDOut": "dout",
    "gBeta": "beta",
    "gGates": "decay",
    "gInitialState": "initial_state",
    "gLastState": "dstate",
    "gFirstState": "dinitial_state",
    "gDQ": "dq",
    "gDK": "dk",
    "gDV": "dv",
    "gDBeta": "dbeta",
    "gDGates": "ddecay",
}  # {a parameter of kernels: the array of the call}
INPUTS_WITH_TAILS: NameGroups = (*INPUTS, ("gGates",))
INPUTS_WITHOUT_VALUES: NameGroups = (("gQ", "gK"), ("gDOut",), ("gGates",))
RESULTS_WITH_TAILS = *KEY_GRADIENTS, ("gDGates",), *VALUE_GRADIENTS


def plan_delta_channel_gradients(
    problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator, record: Arrays
) -> list[Step]:
    """The launches. arrays, record: as in delta_gradients.plan_delta_gradients."""
    heads, key_heads = problem("heads", "heads_k")
    stored = record_buffers(record, BY_CHANNEL)
    parameters, inputs = {name: arrays[x] for name, x in PARAMETERS.items()}, INPUTS_WITH_TAILS
    if stored:
        parameters, inputs = parameters | stored, INPUTS_WITHOUT_VALUES
    chunks = ChannelChunks(problem, parameters, scratch)
    buffers = chunks.buffers
    buffers["gStateGradients"] = chunks.chunk_scratch(chunks.columns, chunks.key_dim, dtype=problem.dtype)
    if heads > key_heads:
        head_extents = problem("batch", "seqlen", "heads", "key_dim")
        buffers |= {name: scratch(*head_extents, dtype=problem.dtype) for name in ("gDQ", "gDK")}
    buffers["gQueryRows"] = arrays["q"]
    copy_tails, finish = plan_tails(problem, buffers, scratch, inputs, RESULTS_WITH_TAILS, beta_gradient=arrays["dbeta"])
    if heads > key_heads:
        finish += [step for name, x in (("gDQ", "dq"), ("gDK", "dk")) for step in sum_heads(problem, buffers[name], arrays[x])]
    if stored:
        steps = chunks.run_recurrences(delta_channel_state_gradients_hopper, scale)
    else:
        directions, numbers = delta_channel_chains_hopper.DIRECTIONS, {"sequences": problem.extents["sequences"]}
        both = chunks.run_recurrences(delta_channel_chains_hopper, scale, directions, **numbers)
        steps = [chunks.invert(), *both]
    return [*copy_tails, *steps, *_plan_chunk_gradients(chunks, scale), *finish]


def _plan_chunk_gradients(chunks: ChannelChunks, scale: float) -> list[Step]:
    """The launches of the kernels that compute the gradients of all chunks."""
    problem, buffers = chunks.problem, chunks.buffers
    length, heads, sequences = problem("seqlen", "heads", "sequences")
    device, parts, items = machine(problem.device), -(-length // CHUNK), chunks.chunks * heads
    if is_varlen(problem):
        parts = count_packed_parts(sequences, heads, parts, device.processors)
        grid = chunks.walks * parts
    else:
        grid = persistent(device, items)
    numbers = {"chunks": parts, "items": items, "heads": heads, "group": chunks.group, "scale": scale}
    fields = chunks.gates_dtype, chunks.dtype, buffers["gDGates"] is not None, chunks.varlen
    steps = []
    if (chunks.key_dim, chunks.columns) == delta_channel_block_gradients_hopper.SIZES:
        buffers |= {"gStrong": chunks.chunk_scratch(), "gStrongBlocks": chunks.scratch(grid)}
        steps.append(chunks.launch(delta_channel_block_gradients_hopper, fields, grid, **numbers))
    sizes = chunks.key_dim, chunks.columns
    return [*steps, chunks.launch(delta_channel_gradients_hopper, (*sizes, *fields), grid, **numbers)]
