"""The plan of the gradients of linear attention with decays of channels by one walk in reverse (channel_gradients_hopper.py):
a pass that computes the states before all chunks, unless forward stored them, the walk, and a kernel for the pairs of tokens of
strong chunks, which the walk leaves out."""

from types import ModuleType
from typing import NamedTuple

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.cp_async import VECTOR_SIZES
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for

from ...kernels.recurrent import channel_gradients_hopper, channel_pairs_ampere, gla_recent_states_hopper, gla_states_hopper
from ...kernels.recurrent.channel_gradients_hopper import HALF, KEYS, VALUES
from ...parts.recurrent.tokens import CHUNK
from .chunk_states import merge_chunks
from .packed_tails import INPUTS, KEY_GRADIENTS, plan_tails
from .recurrent_checks import DTYPES, has_channel_decay, is_varlen
from .recurrent_chunks import (
    SWAP_STATE_AXES,
    Arrays,
    Costs,
    ScratchAllocator,
    allocate_local_states,
    choose_segments,
    compose_segments,
    intern_value,
    scans_recent_states,
)
from .recurrent_gradients import count_chunk_indices, partial_gradients, sum_heads, wants_value_heads

STATES = "initial_state", "dstate"
COSTS = Costs(two_consumers=1, first_pass=0.7, compose=0.3, extra_launches=3)
INPUTS_WITH_TAILS = *INPUTS, ("gGates",)
RESULTS_WITH_TAILS = *KEY_GRADIENTS, ("gDGates",)  # dV is stored by rows
PAIR_WAVES = 4  # waves of thread blocks of the kernel for strong chunks


def serves_channel_walk(problem: Problem, arrays: Arrays, vector_bytes: int) -> bool:
    """Does the walk serve such a call? arrays, vector_bytes: as in recurrent_gradients.plan_chunk_gradients."""
    batch, length, key_dim, value_dim = problem("batch", "seqlen", "key_dim", "value_dim")
    gates = arrays["decay"]
    if vector_bytes or not batch * length or not has_channel_decay(problem):
        return False
    if gates is None or gates.form.dtype != "float32" or problem.bytes_at_once("decay", "ddecay") < VECTOR_SIZES[0]:
        return False  # TMA loads and stores them
    return HALF < key_dim <= KEYS and value_dim <= VALUES


def plan_channel_walk(problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator) -> list[Step]:
    """The launches. arrays: as in recurrent_gradients.plan_chunk_gradients. States that forward stored are not computed
    again."""
    batch, length, heads, key_heads, sequences = problem("batch", "seqlen", "heads", "heads_k", "sequences")
    key_dim, value_dim = problem("key_dim", "value_dim")
    sums_heads, stored_states = heads > key_heads and not wants_value_heads(arrays), arrays.get("chunk_states")
    assert arrays["dv"] is not None
    processors = machine(problem.device).processors
    segments = choose_segments(sequences * heads, 1, 1, length * batch // sequences // CHUNK, processors, COSTS)
    shared: Arrays = {"gGates": arrays["decay"], "gCuSeqlens": problem["cu_seqlens"]}
    initial_state, last_gradient = (x and x.permuted(SWAP_STATE_AXES) for x in (arrays[name] for name in STATES))
    forward = StatePass(problem, segments, False, 1.0, shared | {"gK": arrays["k"], "gV": arrays["v"]})
    reverse = StatePass(problem, segments, True, scale, shared | {"gK": arrays["q"], "gV": arrays["dout"]})
    steps: list[Step] = []
    if stored_states:
        states = merge_chunks(stored_states)
    else:
        states = scratch(count_chunk_indices(problem), heads, value_dim, key_dim, dtype=problem.dtype)
        steps, initial_state = forward.states_before_segments(initial_state, scratch)
        steps.append(forward.launch(segments, gInitialState=initial_state, gStates=states))
    reverse_steps, last_gradient = reverse.states_before_segments(last_gradient, scratch)
    steps += reverse_steps
    outputs = {name: partial_gradients(problem, scratch) if sums_heads else arrays[name] for name in ("dq", "dk")}
    shared |= {"gQ": arrays["q"], "gK": arrays["k"], "gV": arrays["v"], "gDOut": arrays["dout"], "gDV": arrays["dv"]}
    ddecay = arrays["ddecay"] or scratch(batch, length, heads, key_dim)  # it is computed in any case
    shared |= {"gDQ": outputs["dq"], "gDK": outputs["dk"], "gDGates": ddecay}
    shared["gStrong"] = scratch(count_chunk_indices(problem), heads)
    shared["gStrongSegments"] = scratch(sequences * segments, heads)
    numbers = {"length": length, "segments": segments, "heads": heads, "group": heads // key_heads, "scale": scale}
    fields = sums_heads or wants_value_heads(arrays), arrays["dv"].form.dtype == "float32", is_varlen(problem)
    blocks = sequences * heads * segments
    config = intern_value(channel_gradients_hopper.Config, DTYPES[problem.dtype], *fields)
    end_states: Arrays = {
        "gLastState": last_gradient and last_gradient.permuted(SWAP_STATE_AXES),
        "gFirstState": arrays["dinitial_state"],
    }
    walk, rounded = kernel_for(channel_gradients_hopper, config, problem.device), dict(shared)
    if config.unrounded:
        rounded |= {"gDQ": None, "gDK": None}
    copy_tails, copy_back = plan_tails(problem, rounded, scratch, INPUTS_WITH_TAILS, RESULTS_WITH_TAILS)
    steps += [*copy_tails, walk.bind(blocks, gStates=states, **end_states, **numbers, **rounded | shared), *copy_back]
    config, parts = intern_value(channel_pairs_ampere.Config, *config.fields), max(1, PAIR_WAVES * processors // blocks)
    pairs = kernel_for(channel_pairs_ampere, config, problem.device)
    steps.append(pairs.bind(blocks * parts, parts=parts, **numbers, **shared))
    if sums_heads:
        steps += [step for name in ("dq", "dk") for step in sum_heads(problem, outputs[name], arrays[name])]
    return steps


class StatePass(NamedTuple):
    """A pass of gla_states_hopper.py over k and v, or in reverse over q and dO. arrays: those that it reads. scale: what the
    keys are multiplied by."""

    problem: Problem
    segments: int
    reverse: bool
    scale: float
    arrays: Arrays

    def launch(self, scanned_segments: int, **arrays: Operand | None) -> Step:
        """The launch for the first `scanned_segments`. arrays: what it writes, and gInitialState where states of chunks are
        written."""
        problem, gates = self.problem, self.arrays["gGates"]
        heads, key_heads, sequences = problem("heads", "heads_k", "sequences")
        assert gates is not None
        sizes = KEYS, VALUES // CHUNK, DTYPES[gates.form.dtype], DTYPES[problem.dtype], is_varlen(problem)
        options, names = {"reverse": self.reverse}, ["gLocalStates", "gTotalDecays"]
        module: ModuleType = gla_recent_states_hopper
        if "gStates" in arrays or not scans_recent_states(problem.dtype):
            module, options["stores_states"] = gla_states_hopper, "gStates" in arrays
            names += ["gInitialState", "gStates"]
        return kernel_for(module, intern_value(module.Config, *sizes, **options), problem.device).bind(
            sequences * heads * scanned_segments,
            length=problem.extents["seqlen"],
            blocks=1,
            segments=self.segments,
            scanned_segments=scanned_segments,
            heads=heads,
            group=heads // key_heads,
            scale=self.scale,
            **self.arrays,
            **dict.fromkeys(names) | arrays,
        )

    def states_before_segments(self, initial: Operand | None, scratch: ScratchAllocator) -> tuple[list[Step], Operand | None]:
        """(the launches that compute the state before each segment, that state). initial: before each sequence."""
        if self.segments == 1:
            return [], initial
        columns, key_dim = self.problem("value_dim", "key_dim")
        local_states = allocate_local_states(self.problem, scratch, self.segments - 1, (columns, key_dim), key_dim)
        compose, states = compose_segments(self.problem, self.segments, local_states, initial, scratch)
        return [self.launch(self.segments - 1, **local_states), compose], states
