"""The plan of linear attention's gradients by one walk in reverse (linear_gradients_hopper.py): a pass that computes the states
before all chunks, the walk, and a small kernel that sums the gradients of gates. Of heads that share keys it sums pairs; where
more share them, and their sums are requested, shared_heads_gradients.py plans the call."""

from typing import NamedTuple

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.launch import kernel_for

from ...kernels.recurrent import chunk_hopper, linear_gradients_hopper
from ...kernels.recurrent.linear_gradients_hopper import CONSUMERS, KEY_DIMS, VALUES
from ...parts.recurrent.gates import Gate
from ...parts.recurrent.gradients import ReversedGate
from ...parts.recurrent.pair_exchange import BLOCKS
from ...parts.recurrent.results import ChunkStates, ScanResult, ScanStates
from . import recurrent_chunks
from .chunk_states import merge_chunks
from .packed_tails import GRADIENTS, INPUTS, plan_tails
from .recurrent_checks import DTYPES, has_channel_decay, is_varlen, pad_key_dim
from .recurrent_chunks import (
    SWAP_STATE_AXES,
    Arrays,
    ScratchAllocator,
    allocate_local_states,
    choose_config,
    compose_segments,
    intern_value,
    launch_scan,
    plan_chunk_decays,
)
from .recurrent_gradients import choose_gate, count_chunk_indices, plan_gate_sums, wants_value_heads

STATES = "initial_state", "dstate", "dinitial_state"


def serves_walk(problem: Problem, arrays: Arrays, vector_bytes: int) -> bool:
    """Does the walk serve such a call? Without gradients of gates the three scans are faster, unless forward stored the states:
    0.414 instead of 0.451 ms with 8 x 2048 tokens and 32 heads of 128; computing the states takes 0.138 ms of the latter. So
    it is with long sequences in segments: by count the scans move 16 T there and the walk 17 T, with T the bytes of q. arrays,
    vector_bytes: as in recurrent_gradients.plan_chunk_gradients."""
    batch, length, key_dim, value_dim = problem("batch", "seqlen", "key_dim", "value_dim")
    if vector_bytes or not (arrays["ddecay"] or arrays.get("chunk_states")) or not batch * length or has_channel_decay(problem):
        return False
    return key_dim <= KEY_DIMS[-1] and value_dim <= VALUES


def serves_pairs(problem: Problem, arrays: Arrays, vector_bytes: int) -> bool:
    """Does the walk serve such a call where two value heads share a key head? It sums dQ and dK of the two itself: 600 -> 473
    us. Of groups of four and 16, whose sums of pairs go through memory, it takes 553 us for the 558 of
    shared_heads_gradients.py, and 535 for 513."""
    heads, key_heads, key_dim, value_dim = problem("heads", "heads_k", "key_dim", "value_dim")
    assert arrays["dv"] is not None
    if wants_value_heads(arrays) or arrays["dv"].form.dtype == "float32" or is_varlen(problem):
        return False
    if heads != BLOCKS * key_heads or not serves_walk(problem, arrays, vector_bytes):
        return False
    return key_dim > KEY_DIMS[0] and value_dim > VALUES // CONSUMERS


def plan_gradient_walk(problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator) -> list[Step]:
    """The launches. arrays: as in recurrent_gradients.plan_chunk_gradients. States that forward stored are not computed
    again."""
    heads, key_heads, key_dim, value_dim, sequences = problem("heads", "heads_k", "key_dim", "value_dim", "sequences")
    gate, gates = choose_gate(problem, arrays["decay"], by_cp_async=False)
    with_gates, stored_states = arrays["ddecay"] is not None, arrays.get("chunk_states")
    assert arrays["dv"] is not None
    paired = heads > key_heads and not wants_value_heads(arrays)
    # for packed sequences the kernel has gates of tokens only, as others would spill registers
    walk_gate, walk_gates = choose_gate(problem, arrays["decay"], by_cp_async=is_varlen(problem))
    config = intern_value(
        linear_gradients_hopper.Config,
        pad_key_dim(key_dim, KEY_DIMS),
        DTYPES[problem.dtype],
        walk_gate,
        wants_value_heads(arrays),
        arrays["dv"].form.dtype == "float32",
        is_varlen(problem),
        with_gates,
        paired,
    )
    known_states: Arrays = {"gLocalStates": arrays.get("local_state"), "gTotalDecays": arrays.get("total_decay")}
    if known_states["gLocalStates"]:
        segments = problem.extents["segments"]
    else:
        segments = recurrent_chunks.count_segments(problem, config, CONSUMERS)
    shared: Arrays = {"gGates": gates, "gCuSeqlens": problem["cu_seqlens"]}
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    end_states = {name: x and x.permuted(SWAP_STATE_AXES) for name in STATES for x in [arrays[name]]}
    forward, reverse = (
        StateScan(problem, gate, shared | {"gQ": k, "gK": k, "gV": v}),
        StateScan(problem, intern_value(ReversedGate, gate), shared | {"gQ": q, "gK": q, "gV": dout}, scale),
    )
    steps: list[Step] = []
    if stored_states:
        states = merge_chunks(stored_states)
    else:
        states = scratch(count_chunk_indices(problem), heads, value_dim, key_dim, dtype=problem.dtype)
        steps, initial_state = forward.states_before_segments(end_states["initial_state"], segments, scratch)
        outputs_of_scan = {"gInitialState": initial_state, "states": states}
        steps.append(forward.launch(intern_value(ChunkStates), segments, segments, outputs_of_scan))
    reverse_steps, last_gradient = reverse.states_before_segments(end_states["dstate"], segments, scratch, known_states)
    steps += reverse_steps
    buffers: Arrays = {"gGates": walk_gates, "gCuSeqlens": problem["cu_seqlens"]}
    buffers |= {"gQ": q, "gK": k, "gV": v, "gDOut": dout, "gStates": states, "gLastState": last_gradient}
    buffers |= {"gDQ": arrays["dq"], "gDK": arrays["dk"], "gDV": arrays["dv"], "gFirstState": end_states["dinitial_state"]}
    dots, finish = plan_gate_sums(problem, arrays, scratch, 1, 0) if with_gates else ({}, [])
    rounded: Arrays = {name: x if x and x.form.dtype == problem.dtype else None for name, x in buffers.items()}
    copy_tails, copy_back = plan_tails(problem, rounded, scratch, INPUTS, GRADIENTS)
    walk = kernel_for(linear_gradients_hopper, config, problem.device).bind(
        sequences * heads * segments,
        length=problem.extents["seqlen"],
        segments=segments,
        heads=heads,
        group=heads // key_heads,
        scale=scale,
        **rounded | buffers,
        **dots,
    )
    return [*steps, *copy_tails, walk, *copy_back, *finish]


class StateScan(NamedTuple):
    """Scans of chunk_hopper.py that compute states, or in reverse the gradients of states. arrays: those that all of these
    scans read. scale: what keys are multiplied by. sums: the kind of gates, and their array, that scans of all chunks' states
    read instead, if they are there. gated: are values multiplied by silu(z)?"""

    problem: Problem
    gate: Gate
    arrays: Arrays
    scale: float = 1.0
    sums: tuple[Gate, Operand] | None = None
    gated: bool = False

    def of_chunks(self) -> "StateScan":
        """The scan as it stores the states of all chunks: with gates that are summed up already, if they are."""
        if not self.sums:
            return self
        gate, gates = self.sums
        return self._replace(gate=gate, arrays=self.arrays | {"gGates": gates}, sums=None)

    def launch(self, result: ScanResult, segments: int, scanned_segments: int, arrays: Arrays) -> Step:
        """The launch of a scan of the first `scanned_segments`."""
        width = -(-self.problem.extents["value_dim"] // chunk_hopper.COLUMNS)
        config = choose_config(self.problem, self.gate, result, 0, width)
        return launch_scan(self.problem, config, width, segments, scanned_segments, self.arrays | arrays, self.scale, segments)

    def states_before_segments(
        self, initial: Operand | None, segments: int, scratch: ScratchAllocator, known_states: Arrays | None = None
    ) -> tuple[list[Step], Operand | None]:
        """(the launches that compute the state before each segment, that state). initial: before each sequence. known_states:
        the local states of all segments, where another call has computed them."""
        if segments == 1:
            return [], initial
        columns, key_dim = self.problem("value_dim", "key_dim")
        scans: list[Step] = []
        if known_states and known_states["gLocalStates"]:
            local_states = known_states
        else:
            local_states = allocate_local_states(self.problem, scratch, segments - 1, (columns, key_dim))
            result = intern_value(ScanStates, self.gated)
            config = choose_config(self.problem, self.gate, result, 0, -(-columns // chunk_hopper.COLUMNS))
            scans, decays = plan_chunk_decays(self.problem, config, self.arrays, segments, scratch)
            scans.append(self.launch(result, segments, segments - 1, local_states | {"chunk_decays": decays}))
        compose, states = compose_segments(self.problem, segments, local_states, initial, scratch)
        return [*scans, compose], states

    def store_states(self, states: Operand, ends: Arrays, scratch: ScratchAllocator) -> list[Step]:
        """The launches that store the states before all chunks in `states`. ends: the state before each sequence, and where
        that after it goes, by the names of the kernel's parameters."""
        width, scan = -(-self.problem.extents["value_dim"] // chunk_hopper.COLUMNS), self.of_chunks()
        result = intern_value(ChunkStates, self.gated)
        config = choose_config(self.problem, scan.gate, result, 0, width)
        segments = recurrent_chunks.count_segments(self.problem, config, width)
        steps, initial = self.states_before_segments(ends["gInitialState"], segments, scratch)
        arrays = ends | {"gInitialState": initial, "states": states}
        return [*steps, scan.launch(result, segments, segments, arrays)]
