"""The plan of linear attention's gradients: three scans of the chunk kernels, for dQ, dK and dV, and small kernels for what
several value heads share and for gates (parts/recurrent/gradients.py has the equations)."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.launch import kernel_for

from ...kernels.recurrent import chunk_ampere, chunk_hopper, gate_gradient, sum_head_groups
from ...parts.recurrent.gates import Gate, HeadGate, TokenGate
from ...parts.recurrent.gradients import GroupedStates, KeyGradients, QueryGradients, ReversedGate, UnroundedOutputs
from ...parts.recurrent.results import ScanOutputs, ScanResult, ScanStates
from ..partial_sums import sum_groups, sum_partials
from . import recurrent_chunks
from .recurrent_checks import DTYPES, has_channel_decay, is_varlen, pad_key_dim, repeat_head_numbers
from .recurrent_chunks import (
    SWAP_STATE_AXES,
    Arrays,
    ScratchAllocator,
    allocate_local_states,
    compose_segments,
    intern_value,
    launch_scan,
)

WARPS = 4  # of a warpgroup, or of an Ampere kernel's block: each has a part of a sum over a chunk's state


class GradientScan(NamedTuple):
    """A scan of one of the chunk kernels. gate: of the tokens in their order. reverse: does it begin with the last one? result:
    what it computes. key_dim: the channels of its queries and keys; columns: of its values and outputs."""

    gate: Gate
    reverse: bool
    result: ScanResult
    key_dim: int
    columns: int

    @property
    def width(self):
        """The number of blocks of columns of a head."""
        return -(-self.columns // chunk_hopper.COLUMNS)

    def config(self, problem: Problem, vector_bytes: int, result: ScanResult | None = None) -> chunk_hopper.Config:
        """The configuration of the kernel. vector_bytes: how many bytes a cp.async copies, 0 for TMA. result: computed in place
        of the scan's own."""
        result = result or self.result
        dtype, padded = DTYPES[problem.dtype], pad_key_dim(self.key_dim, chunk_hopper.KEY_DIMS)
        gate = intern_value(ReversedGate, self.gate) if self.reverse else self.gate
        if vector_bytes:
            return intern_value(chunk_ampere.Config, padded, 1, dtype, gate, result, is_varlen(problem), vector_bytes)
        heads, key_heads = problem("heads", "heads_k")
        # blocks with the same queries
        sharing_blocks = self.width if result.groups_queries else heads // key_heads * self.width
        consumers = 2 if sharing_blocks % 2 == 0 and padded <= chunk_hopper.WIDE_KEY_DIM else 1
        config = intern_value(chunk_hopper.Config, padded, consumers, dtype, gate, result, is_varlen(problem))
        return config if config.supports_result else dataclasses.replace(config, consumers=1)

    def count_segments(self, problem: Problem, vector_bytes: int) -> int:
        """The number of segments into which each sequence is cut."""
        return recurrent_chunks.count_segments(problem, self.config(problem, vector_bytes), self.width)

    def find_states(
        self, problem: Problem, scale: float, vector_bytes: int, arrays: Arrays, scratch: Callable[..., Operand]
    ) -> tuple[list[Step], "SegmentStates"]:
        """(the launches that compute the states before segments, what the scan takes of these). The arguments are those of
        plan."""
        segments = self.count_segments(problem, vector_bytes)
        if segments == 1:
            return [], SegmentStates(1, {})
        local_states = allocate_local_states(problem, scratch, segments - 1, (self.columns, self.key_dim))
        states = intern_value(GroupedStates if self.result.groups_queries else ScanStates)
        inputs = {name: arrays[name] for name in ("gQ", "gK", "gV", "gGates", "gCuSeqlens")}
        config_of_states = self.config(problem, vector_bytes, states)
        steps, decays = recurrent_chunks.plan_chunk_decays(problem, config_of_states, arrays, segments, scratch)
        inputs |= local_states if self.result.groups_queries else local_states | {"chunk_decays": decays}
        steps.append(launch_scan(problem, config_of_states, self.width, segments, segments - 1, inputs, scale))
        if segments <= recurrent_chunks.TOKEN_COSTS.composed_in_scan:
            return steps, SegmentStates(segments, local_states)
        step, segment_states = compose_segments(problem, segments, local_states, arrays["gInitialState"], scratch)
        steps.append(step)
        return steps, SegmentStates(segments, {"gInitialState": segment_states}, segments)

    def plan(
        self,
        problem: Problem,
        scale: float,
        vector_bytes: int,
        arrays: Arrays,
        scratch: Callable[..., Operand],
        states: "SegmentStates | None" = None,
    ) -> list[Step]:
        """The launches for these arrays, by the names of the kernel's parameters: one; if few long sequences are cut into
        segments, also those that compute the states before segments, which are not there yet."""
        steps, states = ([], states) if states else self.find_states(problem, scale, vector_bytes, arrays, scratch)
        config, number = self.config(problem, vector_bytes), states.segments
        arrays = arrays | states.arrays
        return [*steps, launch_scan(problem, config, self.width, number, number, arrays, scale, states.states_per_sequence)]


class SegmentStates(NamedTuple):
    """What a scan takes of the states of so many segments: arrays by the names of its parameters, with so many states of a
    sequence among its initial ones."""

    segments: int
    arrays: Arrays
    states_per_sequence: int = 1

    def transposed(self) -> "SegmentStates":
        """What a scan takes whose states are these, transposed."""
        arrays = dict(self.arrays)
        for name in {"gInitialState", "gLocalStates"} & arrays.keys():
            state = arrays[name]
            assert state is not None
            arrays[name] = state.swapaxes(len(state.form.shape) - 2, len(state.form.shape) - 1)
        return self._replace(arrays=arrays)


def gradient_arrays(problem: Problem, wants_gates: bool, wants_state: bool) -> Arrays:
    """The arrays of a call of linear_backward, by their names; None for a gradient that is not wanted."""
    names = "dout", "q", "k", "v", "decay", "initial_state", "dstate", "dq", "dk", "dv"
    gradients = {"ddecay": wants_gates, "dinitial_state": wants_state}
    return {name: problem[name] for name in names} | {name: problem[name] if x else None for name, x in gradients.items()}


def plan_chunk_gradients(
    problem: Problem, arrays: Arrays, scale: float, vector_bytes: int, scratch: ScratchAllocator
) -> list[Step]:
    """The launches for the gradients of linear attention without decays of channels. arrays: gradient_arrays, or those of
    another member that has these, by the names of linear_backward. If dq and dk are float32, they are the gradients of each
    value head, not summed over those that share a key head; dv may be float32, too. vector_bytes: how many bytes a cp.async
    copies, 0 for TMA."""
    key_dim, value_dim = problem("key_dim", "value_dim")
    queries, keys, values = _choose_scans(problem, arrays, bool(vector_bytes))
    sums_heads = queries.result.unrounded and not wants_value_heads(arrays)
    shared: Arrays = {"gGates": choose_gate(problem, arrays["decay"], bool(vector_bytes))[1]}
    shared["gCuSeqlens"] = problem["cu_seqlens"]
    dout, q, k, v = (arrays[name] for name in ("dout", "q", "k", "v"))
    outputs = {name: partial_gradients(problem, scratch) if sums_heads else arrays[name] for name in ("dq", "dk")}
    initial_state, dstate = arrays["initial_state"], arrays["dstate"]
    query_arrays = shared | {"gQ": dout, "gK": v, "gV": k, "gO": outputs["dq"], "gInitialState": initial_state}
    key_arrays = shared | {"gQ": v, "gK": dout, "gV": q, "gO": outputs["dk"], "gInitialState": dstate}
    key_arrays["gFinalState"] = arrays["dinitial_state"]
    value_arrays = shared | {"gQ": k, "gK": q, "gV": dout, "gO": arrays["dv"]}
    value_arrays["gInitialState"] = dstate and dstate.permuted(SWAP_STATE_AXES)
    finish: list[Step] = []
    if arrays["ddecay"]:
        config = keys.config(problem, vector_bytes)
        row_parts = config.row_parts * keys.width
        state_parts = WARPS * keys.width * config.key_parts
        dots, finish = plan_gate_sums(
            problem, arrays, scratch, carried_parts=state_parts, state_parts=state_parts, row_parts=row_parts
        )
        chunks, heads = count_chunk_indices(problem), problem.extents["heads"]
        states = scratch(chunks, heads, key_dim, value_dim, dtype=problem.dtype)
        chunk_arrays = {"states": states, "carried_dots": dots["gCarriedDots"], "state_dots": dots["gStateDots"]}
        query_arrays |= {"gZ": q, "row_dots": dots["gQueryDots"]} | chunk_arrays
        key_arrays |= {"gZ": k, "row_dots": dots["gKeyDots"]} | chunk_arrays
    if sums_heads:
        finish += [step for name in ("dq", "dk") for step in sum_heads(problem, outputs[name], arrays[name])]
    steps = queries.plan(problem, scale, vector_bytes, query_arrays, scratch)
    # dK's states are dV's, transposed
    new_steps, value_states = values.find_states(problem, scale, vector_bytes, value_arrays, scratch)
    shared_states = value_states.transposed() if keys.count_segments(problem, vector_bytes) == value_states.segments else None
    steps += [*new_steps, *keys.plan(problem, scale, vector_bytes, key_arrays, scratch, shared_states)]
    steps += values.plan(problem, scale, vector_bytes, value_arrays, scratch, value_states)
    return [*steps, *finish]


def wants_value_heads(arrays: Arrays) -> bool:
    """Are dq and dk those of each value head, in float32, instead of sums over heads that share a key head?"""
    assert arrays["dq"] is not None
    return arrays["dq"].form.dtype == "float32"


def serves_gradients(problem: Problem, arrays: Arrays, vector_bytes: int) -> bool:
    """Do chunk kernels serve such a call? arrays, vector_bytes: as in plan_chunk_gradients."""
    batch, length = problem("batch", "seqlen")
    if not batch * length or has_channel_decay(problem):
        return False
    return all(
        scan.config(problem, vector_bytes).supports_result for scan in _choose_scans(problem, arrays, bool(vector_bytes))
    )


def _choose_scans(problem: Problem, arrays: Arrays, by_cp_async: bool) -> tuple[GradientScan, GradientScan, GradientScan]:
    """The scans of dQ, dK and dV."""
    gate, _ = choose_gate(problem, arrays["decay"], by_cp_async)
    heads, key_heads, key_dim, value_dim = problem("heads", "heads_k", "key_dim", "value_dim")
    with_gates, unrounded = arrays["ddecay"] is not None, heads > key_heads or wants_value_heads(arrays)
    queries, keys = (intern_value(kind, with_gates, unrounded) for kind in (QueryGradients, KeyGradients))
    assert arrays["dv"] is not None
    values = intern_value(UnroundedOutputs if arrays["dv"].form.dtype == "float32" else ScanOutputs)
    return (
        GradientScan(gate, False, queries, value_dim, key_dim),
        GradientScan(gate, True, keys, value_dim, key_dim),
        GradientScan(gate, True, values, key_dim, value_dim),
    )


def count_chunk_indices(problem: Problem) -> int:
    """The number of chunk indices of all batches, at most (SequenceLayout.chunk_index)."""
    return problem.extents["batch"] * recurrent_chunks.count_chunks(problem.extents)


def choose_gate(problem: Problem, decay: Operand | None, by_cp_async: bool) -> tuple[Gate, Operand | None]:
    """(the kind of gates, their array as the kernel takes it). No scan of gradients adds log2 of the scale to gates."""
    if decay is None:
        return intern_value(Gate), None
    if len(decay.form.shape) > 1:
        return intern_value(TokenGate, True), decay
    if by_cp_async:
        return intern_value(TokenGate, True), spread_to_tokens(problem, decay)
    return intern_value(HeadGate, True), repeat_head_numbers(decay)


def spread_to_tokens(problem: Problem, decay: Operand) -> Operand:
    """A decay (B, S, H) as it is; a decay (H,) of each head as such a view, in which strides of 0 bytes repeat it."""
    return (
        decay if len(decay.form.shape) > 1 else decay.spread(0, problem.extents["seqlen"]).spread(0, problem.extents["batch"])
    )


def partial_gradients(problem: Problem, scratch: Callable[..., Operand]) -> Operand:
    """Scratch memory for the gradient of q or k of each value head, in float32."""
    return scratch(*problem("batch", "seqlen", "heads", "key_dim"))


def gate_dots(
    problem: Problem,
    scratch: Callable[..., Operand],
    carried_parts: int,
    state_parts: int,
    row_parts: int = 1,
    subtracts_key_dots: bool = False,
) -> Arrays:
    """Scratch memory for the sums that the decay's gradient is computed from. The arguments are those of plan_gate_sums."""
    batch, length, heads = problem("batch", "seqlen", "heads")
    dots: Arrays = {  # of rows along tokens, as they are read
        name: scratch(batch, heads * row_parts, length).permuted((0, 2, 1))
        for name in ("gQueryDots", "gKeyDots")[: 1 if subtracts_key_dots else 2]
    }
    parts = {"gCarriedDots": carried_parts, "gStateDots": state_parts}
    return dots | {name: scratch(count_chunk_indices(problem), heads, n) for name, n in parts.items() if n}


def split_row_parts(dots: Arrays, parts: int) -> Arrays:
    """The arrays of gate_dots with an axis for the parts of each row sum."""
    split = dict(dots)
    for name in ("gQueryDots", "gKeyDots"):
        if x := dots.get(name):
            batch, length, rows = x.form.shape
            *strides, stride = x.form.strides
            form = x.form._replace(shape=(batch, length, rows // parts, parts), strides=(*strides, parts * stride, stride))
            split[name] = x._replace(form=form)
    return split


def plan_gate_sums(
    problem: Problem,
    arrays: Arrays,
    scratch: Callable[..., Operand],
    carried_parts: int,
    state_parts: int,
    row_parts: int = 1,
    subtracts_key_dots: bool = False,
) -> tuple[Arrays, list[Step]]:
    """(scratch memory for the sums that the decay's gradient is computed from, by the names of gate_gradient.py's parameters;
    the launches that compute it). carried_parts, state_parts: in how many parts a kernel stores the carried dots and <S, dS> of
    a chunk and head, 0 if the former include the latter, times exp(b_last); row_parts: a row's dots. subtracts_key_dots: does
    gQueryDots hold q . dq - k . dk, so that there is no gKeyDots?"""
    decay, gradient = arrays["decay"], arrays["ddecay"]
    assert decay is not None and gradient is not None
    length, heads, sequences = problem("seqlen", "heads", "sequences")
    chunks, per_head = count_chunk_indices(problem), len(decay.form.shape) == 1
    dots = gate_dots(problem, scratch, carried_parts, state_parts, row_parts, subtracts_key_dots)
    numbers = recurrent_chunks.divide_chunks(problem, chunks)
    partial = scratch(sequences * numbers["splits"], heads) if per_head else None
    kernel = kernel_for(gate_gradient, intern_value(gate_gradient.Config, per_head, is_varlen(problem)), problem.device)
    step = kernel.bind(
        -(-numbers["warps"] // gate_gradient.WARPS),
        gGates=spread_to_tokens(problem, decay),
        gGradient=None if per_head else gradient,
        gPartial=partial,
        gCuSeqlens=problem["cu_seqlens"],
        length=length,
        **numbers,
        **{"gKeyDots": None, "gStateDots": None} | split_row_parts(dots, row_parts),
    )
    return dots, [step, sum_partials(problem, partial, gradient)] if partial else [step]


def sum_heads(problem: Problem, partial: Operand | None, out: Operand | None) -> list[Step]:
    """The launch that adds the partial gradients of each key head, which lie side by side; no launch if there are no tokens."""
    batch, length = problem("batch", "seqlen")
    if not batch * length:
        return []
    assert partial is not None and out is not None
    config = intern_value(sum_head_groups.Config, DTYPES[problem.dtype], problem.bytes_at_once())
    return [sum_groups(problem, config, partial, out)]


def plan_accumulation(
    plan: Callable[..., list[Step]],
    problem: Problem,
    arrays: Arrays,
    scale: float,
    vector_bytes: int,
    scratch: ScratchAllocator,
) -> list[Step]:
    """The launches of `plan`, called with these arguments but with scratch memory for its results, and the launches that add
    these results to `arrays`, which are float32."""
    tokens, key_dim = problem("batch", "seqlen", "heads"), problem.extents["key_dim"]
    names = [name for name in ("dq", "dk", "dv", "ddecay", "dinitial_state", "dinitial_z") if arrays.get(name)]
    sums = {name: x for name in names for x in [arrays[name]] if x}
    shapes = {name: (*tokens, key_dim) for name in ("dq", "dk")}
    gradients = {name: scratch(*shapes.get(name, x.form.shape)) for name, x in sums.items()}
    steps = plan(problem, arrays | gradients, scale, vector_bytes, scratch)
    for name, x in sums.items():
        if 0 not in x.form.shape:
            steps.append(plan_addition(problem, name, gradients[name], x))
    return steps


def plan_addition(problem: Problem, name: str, gradients: Operand, total: Operand) -> Step:
    """The launch that adds the gradient of this name to an array, over the value heads that share a key head."""
    gradients, total = (_view_as_tokens(name, x) for x in (gradients, total))
    return sum_groups(problem, sum_head_groups.ACCUMULATE, gradients, total)


def _view_as_tokens(name: str, x: Operand) -> Operand:
    """A gradient of any of these names as (batch, token, head, column); of a state the channels of keys count as tokens."""
    if name in ("dinitial_state", "dinitial_states"):
        return x.swapaxes(1, 2)
    if name == "dinitial_z":
        return x.spread(1, 1)
    if len(x.form.shape) < 3:
        x = x.spread(0, 1).spread(0, 1)
    return x if len(x.form.shape) == 4 else x.spread(3, 1)
