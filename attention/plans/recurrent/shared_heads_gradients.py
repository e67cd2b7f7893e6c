"""The plan of the gradients where value heads share queries and keys (shared_heads_gradients_hopper.py): the states before all
chunks and their gradients by two scans, unless forward stored the former, the gradients of all chunks at once, and sums."""

import math
from typing import NamedTuple

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for
from tiles.launching.lengths import watched_function

from ...kernels.recurrent import gate_sums, shared_heads_gradients_hopper
from ...kernels.recurrent.shared_heads_gradients_hopper import CHUNK, COLUMNS, KEY_DIMS, STATE_WARPS
from ...parts.recurrent.gates import Gate, SummedGate, TokenGate
from ...parts.recurrent.gradients import ReversedGate
from .chunk_states import merge_chunks
from .linear_gradient_walk import STATES, StateScan
from .packed_tails import INPUTS, VALUE_GRADIENTS, plan_tails
from .recurrent_checks import DTYPES, has_channel_decay, is_varlen, pad_key_dim
from .recurrent_chunks import SWAP_STATE_AXES, Arrays, ScratchAllocator, divide_chunks, intern_value
from .recurrent_gradients import choose_gate, count_chunk_indices, plan_gate_sums, sum_heads, wants_value_heads

# Value heads of a key head, at least. Of 32 heads of 128 with decays, B 8, S 2048, groups of 2, 4, 16 take 0.651, 0.588, 0.529
# ms; by the walk, whose dQ and dK of each head would go through memory in float32, 0.740, 0.710, 0.689
MIN_GROUP = 2
# Times in units of that of a block of 64 columns of a head in a chunk: of each chunk, whose Q and K a thread block loads, and
# dQ and dK it stores; of each chunk more if these are partial sums; of each chunk if the block loads the Q and K of several
# ahead, for which there is one stage of states less, so that each block of columns takes AHEAD_FACTOR times as long
CHUNK_COST, PARTIAL_COST, AHEAD_COST, AHEAD_FACTOR = 1.5, 2.5, 0.3, 1.04


def serves_shared_heads(problem: Problem, vector_bytes: int) -> bool:
    """Does the kernel serve such a call? vector_bytes: how many bytes a cp.async copies, 0 for TMA."""
    batch, length, heads, key_heads, key_dim = problem("batch", "seqlen", "heads", "heads_k", "key_dim")
    if vector_bytes or not batch * length or has_channel_decay(problem):
        return False
    return key_dim <= KEY_DIMS[-1] and heads >= MIN_GROUP * key_heads


def serves_linear_shared_heads(problem: Problem, arrays: Arrays, vector_bytes: int) -> bool:
    """Does it serve such a call of linear_backward? Gradients that are float32 are of each value head, or added to others.
    arrays: as in plan_shared_heads."""
    assert arrays["dv"] is not None
    unrounded = wants_value_heads(arrays) or arrays["dv"].form.dtype == "float32"
    return not unrounded and serves_shared_heads(problem, vector_bytes)


class BlockWork(NamedTuple):
    """The work that thread blocks divide. key_heads: of all sequences. chunks: of each, on average. blocks: of 64 columns of
    the value heads of a key head. resident_ctas: how many thread blocks the GPU runs at once. ahead: 1 if a block that
    goes through several chunks loads Q and K ahead, 0 if not."""

    key_heads: int
    chunks: int
    blocks: int
    resident_ctas: int
    ahead: int = 1

    def time(self, parts: int, shares: int) -> float:
        """The time if each sequence's chunks are in `parts` parts, and the value heads of each key head in `shares`."""
        waves = math.ceil(self.key_heads * parts * shares / self.resident_ctas)
        chunk = math.ceil(self.blocks / shares) + (PARTIAL_COST if shares > 1 else 0)
        if self.loads_keys_ahead(parts):
            return waves * (CHUNK_COST + math.ceil(self.chunks / parts) * (AHEAD_FACTOR * chunk + AHEAD_COST))
        return waves * math.ceil(self.chunks / parts) * (chunk + CHUNK_COST)

    def loads_keys_ahead(self, parts: int) -> bool:
        """Do blocks, of which each has one of so many parts of a sequence's chunks, load Q and K ahead?"""
        return self.ahead > 0 and parts < self.chunks

    def choose_parts(self, shares: int) -> int:
        """The parts that take the shortest time with so many shares. If that is the same, rather many blocks that go through a
        chunk each, which wait for a free multiprocessor, than a few that go through several: 0.366 for 0.379 ms, 0.360 for
        0.386, without Q and K ahead."""
        numbers = sorted({math.ceil(self.chunks / n) for n in range(1, self.chunks + 1)}, reverse=True)
        return min(numbers, key=lambda parts: self.time(parts, shares))


@watched_function
def choose_shares(*work: int) -> int:
    """The shares that take the shortest time. work: the fields of a BlockWork."""
    options, total = [2**i for i in range(BlockWork(*work).blocks.bit_length())], BlockWork(*work)
    shares = min(options, key=lambda shares: total.time(total.choose_parts(shares), shares))
    return math.ceil(total.blocks / math.ceil(total.blocks / shares))  # none is empty


@watched_function
def choose_parts(shares: int, *work: int) -> int:
    """BlockWork.choose_parts, for the fields of a BlockWork as `work`."""
    return BlockWork(*work).choose_parts(shares)


@watched_function
def loads_keys_ahead(parts: int, *work: int) -> bool:
    """BlockWork.loads_keys_ahead, for the fields of a BlockWork as `work`."""
    return BlockWork(*work).loads_keys_ahead(parts)


class GateInputs(NamedTuple):
    """The gates of a call. gate: their kind, with the weights of keys; arrays: the inputs that they are computed from, by the
    names of the kernels' parameters, gGates first of all."""

    gate: Gate
    arrays: Arrays


class SummedGates(NamedTuple):
    """A call's gates as the scans and the kernel read them: their sums over the tokens of each chunk (gate_sums.py), and the
    gates without weights of keys, their kind and their array. None: there are no gates."""

    sums: Operand | None
    gate: Gate
    decays: Operand | None


def plan_gate_sums_of_chunks(problem: Problem, gates: GateInputs, scratch: ScratchAllocator) -> tuple[list[Step], SummedGates]:
    """The launch that sums gates up, and what it writes."""
    gate, inputs = gates
    if not gate.kind:
        return [], SummedGates(None, gate, None)
    heads, length = problem("heads", "seqlen")
    chunks, decays = count_chunk_indices(problem), gates.arrays["gGates"]
    sums = scratch(chunks, heads, CHUNK * (1 + gate.weighted))
    outputs: Arrays = {"gSums": sums}
    if gate.weighted:
        outputs["gDecays"] = decays = scratch(problem.extents["batch"], length, heads)
    numbers, config = divide_chunks(problem, chunks), intern_value(gate_sums.Config, gate, is_varlen(problem))
    step = kernel_for(gate_sums, config, problem.device).bind(
        -(-numbers["warps"] // gate_sums.WARPS),
        length=length,
        **numbers,
        gCuSeqlens=problem["cu_seqlens"],
        **inputs,
        **outputs,
    )
    return [step], SummedGates(sums, intern_value(TokenGate, True), decays)


def plan_chunk_states(
    problem: Problem, arrays: Arrays, gates: GateInputs, summed: SummedGates, gZ: Operand | None, scale: float,
    scratch: ScratchAllocator,
) -> tuple[list[Step], Arrays]:  # fmt: skip
    """The launches of the scans that store the gradients of the states after all chunks and, unless forward has stored them,
    the states before all chunks; and both arrays. arrays: as in plan_shared_heads. gZ: the gate of outputs, or None."""
    heads, key_dim, value_dim = problem("heads", "key_dim", "value_dim")
    chunks, stored, sums = count_chunk_indices(problem), arrays.get("chunk_states"), summed.sums
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    ends = {name: x and x.permuted(SWAP_STATE_AXES) for name in STATES for x in [arrays[name]]}
    packing: Arrays = {"gCuSeqlens": problem["cu_seqlens"]}
    queries: Arrays = packing | {"gGates": summed.decays, "gQ": q, "gK": q, "gV": dout, "gZ": gZ}
    reverse_sums = sums and (intern_value(ReversedGate, intern_value(SummedGate, True)), sums)
    reverse_gate = intern_value(ReversedGate, summed.gate)
    reverse = StateScan(problem, reverse_gate, queries, scale, reverse_sums, gZ is not None)
    scans = {"gDStates": (reverse, {"gInitialState": ends["dstate"], "gFinalState": ends["dinitial_state"]})}
    if not stored:
        forward_sums = sums and (intern_value(SummedGate, True, gates.gate.weighted), sums)
        keys = gates.arrays | packing | {"gQ": k, "gK": k, "gV": v}
        forward = StateScan(problem, gates.gate, keys, sums=forward_sums)
        scans["gStates"] = forward, {"gInitialState": ends["initial_state"]}
    steps: list[Step] = []
    states: Arrays = {"gStates": merge_chunks(stored)} if stored else {}
    for name, (scan, end_states) in scans.items():
        states[name] = array = scratch(chunks, heads, value_dim, key_dim, dtype=problem.dtype)
        steps += scan.store_states(array, end_states, scratch)
    return steps, states


def plan_shared_heads(
    problem: Problem, arrays: Arrays, gates: GateInputs, scale: float, scratch: ScratchAllocator, extra_arrays: Arrays
) -> list[Step]:
    """The launches but those for the gradients of gates and D. arrays: as in recurrent_gradients.plan_chunk_gradients.
    extra_arrays: D, z and dz, and the sums from which these gradients are computed, if they are wanted, by the names of the
    kernel's parameters."""
    heads, key_heads, key_dim, value_dim, sequences = problem("heads", "heads_k", "key_dim", "value_dim", "sequences")
    batch, length = problem("batch", "seqlen")
    width, gZ = -(-value_dim // COLUMNS), extra_arrays.get("gZ")
    steps, summed = plan_gate_sums_of_chunks(problem, gates, scratch)
    scans, states = plan_chunk_states(problem, arrays, gates, summed, gZ, scale, scratch)
    inputs = {"gQ": "q", "gK": "k", "gV": "v", "gDOut": "dout", "gDV": "dv"}
    buffers: Arrays = {name: arrays[x] for name, x in inputs.items()} | extra_arrays | states
    buffers |= {"gSums": summed.sums, "gCuSeqlens": problem["cu_seqlens"]}
    work = BlockWork(
        sequences * key_heads,
        -(-count_chunk_indices(problem) // sequences),
        heads // key_heads * width,
        machine(problem.device).processors,
        0 if is_varlen(problem) else 1,
    )
    shares = choose_shares(*work)
    partial, names = shares > 1, ("dq", "dk")
    outputs = {name: scratch(batch, length, key_heads * shares, key_dim) if partial else arrays[name] for name in names}
    skip = "head" if "gSkipSums" in extra_arrays else "column" if "gColumnSums" in extra_arrays else ""
    form = pad_key_dim(key_dim, KEY_DIMS), DTYPES[problem.dtype], gates.gate.kind, skip, partial, is_varlen(problem)
    parts = choose_parts(shares, *work)
    flags = "gQueryDots" in extra_arrays, "gZ" in extra_arrays, bool(loads_keys_ahead(parts, *work))
    config = intern_value(shared_heads_gradients_hopper.Config, *form, *flags)
    copy_tails, copy_back = plan_tails(problem, buffers, scratch, INPUTS, VALUE_GRADIENTS)  # dQ, dK are stored by rows
    kernel = kernel_for(shared_heads_gradients_hopper, config, problem.device)
    steps += [
        *scans,
        *copy_tails,
        kernel.bind(
            sequences * key_heads * parts * shares,
            length=length,
            parts=parts,
            shares=shares,
            heads=key_heads,
            group=heads // key_heads,
            width=width,
            scale=scale,
            gDQ=outputs["dq"],
            gDK=outputs["dk"],
            **buffers,
        ),
        *copy_back,
    ]
    if partial:
        steps += [step for name in names for step in sum_heads(problem, outputs[name], arrays[name])]
    return steps


def plan_linear_shared_heads(problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator) -> list[Step]:
    """The launches for the gradients of linear attention. arrays: as in plan_shared_heads."""
    gate, gates = choose_gate(problem, arrays["decay"], by_cp_async=True)
    width = -(-problem.extents["value_dim"] // COLUMNS)
    dots: Arrays = {}
    finish: list[Step] = []
    if arrays["ddecay"] is not None:
        dots, finish = plan_gate_sums(problem, arrays, scratch, width, STATE_WARPS * width, width)
    steps = plan_shared_heads(problem, arrays, GateInputs(gate, {"gGates": gates}), scale, scratch, dots)
    return [*steps, *finish]
