"""The plan of the gradients where value heads share queries and keys (shared_heads_gradients_hopper.py): the states before all
chunks and their gradients by two scans, unless forward stored the former, the gradients of all chunks at once, and sums."""

import functools
import math
from typing import NamedTuple

from tiles.calls.plan import Fill, Step
from tiles.calls.schema import Problem
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for
from tiles.launching.lengths import watched_function
from tiles.layout import WARPGROUP

from ..kernels import shared_heads_gradients_hopper
from ..kernels.shared_heads_gradients_hopper import COLUMNS, KEY_DIMS
from ..parts.recurrent.gates import Gate
from ..parts.recurrent.gradients import ReversedGate
from .chunk_states import merge_chunks
from .linear_gradient_walk import STATES, StateScan
from .recurrent_checks import DTYPES, has_channel_decay, is_varlen, pad_key_dim
from .recurrent_chunks import SWAP_STATE_AXES, Arrays, ScratchAllocator, intern_value
from .recurrent_gradients import count_chunk_indices, sum_heads

MIN_GROUP = 4  # value heads of a key head, at least: with fewer the walk moves fewer bytes, and is one launch less
# Times of a thread block in units of that of a block of 64 columns of a head in a chunk: at its begin and end; of each chunk,
# whose Q and K it loads and dQ and dK it stores; of each chunk more if these are partial sums
BLOCK_COST, CHUNK_COST, PARTIAL_COST = 1.0, 1.5, 2.5


def serves_shared_heads(problem: Problem, vector_bytes: int) -> bool:
    """Does the kernel serve such a call? vector_bytes: how many bytes a cp.async copies, 0 for TMA."""
    batch, length, heads, key_heads, key_dim = problem("batch", "seqlen", "heads", "heads_k", "key_dim")
    if vector_bytes or not batch * length or has_channel_decay(problem):
        return False
    return key_dim <= KEY_DIMS[-1] and heads >= MIN_GROUP * key_heads


class Work(NamedTuple):
    """What thread blocks divide. key_heads: of all sequences. chunks: of each, on average. blocks: of 64 columns of the value
    heads of a key head. resident_ctas: how many thread blocks the GPU runs at once."""

    key_heads: int
    chunks: int
    blocks: int
    resident_ctas: int

    def time(self, parts: int, shares: int) -> float:
        """The time if each sequence's chunks are in `parts` parts, and the value heads of each key head in `shares`."""
        waves = math.ceil(self.key_heads * parts * shares / self.resident_ctas)
        chunk = math.ceil(self.blocks / shares) + CHUNK_COST + (PARTIAL_COST if shares > 1 else 0)
        return waves * (BLOCK_COST + math.ceil(self.chunks / parts) * chunk)

    def choose_parts(self, shares: int) -> int:
        """The parts that take the shortest time with so many shares."""
        numbers = sorted({math.ceil(self.chunks / n) for n in range(1, self.chunks + 1)})
        return min(numbers, key=lambda parts: self.time(parts, shares))


@watched_function
@functools.lru_cache(1024)
def choose_shares(*work: int) -> int:
    """The shares that take the shortest time. work: the fields of a Work."""
    options, total = [2**i for i in range(Work(*work).blocks.bit_length())], Work(*work)
    return min(options, key=lambda shares: total.time(total.choose_parts(shares), shares))


@watched_function
@functools.lru_cache(1024)
def choose_parts(shares: int, *work: int) -> int:
    """Work.choose_parts."""
    return Work(*work).choose_parts(shares)


def plan_shared_heads(
    problem: Problem,
    arrays: Arrays,
    gates: Arrays,
    kinds: tuple[Gate, Gate],
    scale: float,
    scratch: ScratchAllocator,
    skip: str = "",
) -> tuple[list[Step], Arrays]:
    """(the launches but those of gates' gradients, the kernel's arrays by the names of its parameters). arrays: as in
    recurrent_gradients.plan_chunk_gradients. gates: the arrays that gates are made of, and D, by the names of the kernels'
    parameters. kinds: of the gates with the weights of keys, and without. skip: see the kernel's configuration."""
    heads, key_heads, key_dim, value_dim, sequences = problem("heads", "heads_k", "key_dim", "value_dim", "sequences")
    batch, length = problem("batch", "seqlen")
    width, chunks, stored = -(-value_dim // COLUMNS), count_chunk_indices(problem), arrays.get("chunk_states")
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    ends = {name: x and x.permuted(SWAP_STATE_AXES) for name in STATES for x in [arrays[name]]}
    shared: Arrays = gates | {"gCuSeqlens": problem["cu_seqlens"]}
    of_scans: Arrays = {name: x for name, x in shared.items() if name != "gD"}
    forward = StateScan(problem, kinds[0], of_scans | {"gQ": k, "gK": k, "gV": v})
    reverse = StateScan(problem, intern_value(ReversedGate, kinds[1]), of_scans | {"gQ": q, "gK": q, "gV": dout}, scale)
    buffers: Arrays = shared | {"gQ": q, "gK": k, "gV": v, "gDOut": dout, "gDV": arrays["dv"]}
    steps: list[Step] = []
    scans = [(reverse, "gDStates", {"gInitialState": ends["dstate"], "gFinalState": ends["dinitial_state"]})]
    if stored:
        buffers["gStates"] = merge_chunks(stored)
    else:
        scans.insert(0, (forward, "gStates", {"gInitialState": ends["initial_state"]}))
    for scan, name, states in scans:
        buffers[name] = scratch(chunks, heads, value_dim, key_dim, dtype=problem.dtype)
        steps += scan.store_states(buffers[name], states, scratch)
    with_gates = bool(kinds[0].kind) and bool(arrays["ddecay"] or gates.get("gA"))
    if with_gates:  # rows along tokens, as they are read
        buffers |= {name: scratch(batch, heads * width, length).permuted((0, 2, 1)) for name in ("gQueryDots", "gKeyDots")}
        buffers["gCarriedDots"] = scratch(chunks, heads, WARPGROUP * width)
        buffers["gStateDots"] = scratch(chunks, heads, width)
    if skip == "head":
        buffers["gSkipSums"] = scratch(chunks * WARPGROUP * width, heads)
    if skip == "column":
        buffers["gColumnSums"] = scratch(heads, chunks * WARPGROUP, value_dim)
    for name in ("gSkipSums", "gColumnSums"):
        sums = buffers.get(name)
        if sums and is_varlen(problem):
            steps.append(Fill(sums, 0.0))  # some indices of chunks belong to none
    work = Work(sequences * key_heads, -(-chunks // sequences), heads // key_heads * width, machine(problem.device).processors)
    shares = choose_shares(*work)
    partial, parts = shares > 1, choose_parts(shares, *work)
    outputs = {name: scratch(batch, length, key_heads * shares, key_dim) if partial else arrays[name] for name in ("dq", "dk")}
    config = intern_value(
        shared_heads_gradients_hopper.Config,
        pad_key_dim(key_dim, KEY_DIMS),
        DTYPES[problem.dtype],
        kinds[0],
        skip,
        partial,
        is_varlen(problem),
        with_gates,
    )
    steps.append(
        kernel_for(shared_heads_gradients_hopper, config, problem.device).bind(
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
        )
    )
    if partial:
        steps += [step for name in ("dq", "dk") for step in sum_heads(problem, outputs[name], arrays[name])]
    return steps, buffers
