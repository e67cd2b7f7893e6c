"""The cumulative sums of gates of all chunks, b and a of parts/recurrent/gates.py, for a kernel that goes through the heads of
a chunk and reads these sums of each (shared_heads_gradients_hopper.py). With Mamba-2's steps also the decays dt A, for scans
that have no weights of keys.

A warp has a chunk of 16 heads. Weights count as 2^MIN_WEIGHT at least, so that they have reciprocals."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import float32, int32

from ops import cumsum, grid, less, load, log2, maximum, row_index, store, truncate, where
from tiles.launching.arguments import ENDS, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.recurrent.gates import LOG2_E, Gate, Mamba2Gate, TokenGate, clamp_gates
from ...parts.recurrent.gradients import GATES, HEAD_VEC, share_of_warp
from ...parts.recurrent.tokens import CHUNK, SequenceLayout

WARPS = 4  # of a block
MIN_WEIGHT = -100.0  # of a key, in powers of 2


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. gate: the kind of gates. varlen: are sequences packed (cu_seqlens)?"""

    gate: Gate
    varlen: bool = False
    threads, overlaps_previous = LANES * WARPS, True

    def __str__(self):
        return f"sums of {self.gate}" + ", varlen" * self.varlen


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations. everything: packed sequences, and steps with and without softplus and limits, too."""
    gates = TokenGate(scale_at_end=True), Mamba2Gate(softplus=True, low=0.001, high=0.1)
    others = Mamba2Gate(), Mamba2Gate(softplus=True)
    if target.has_wgmma:
        for varlen in (False, True) if everything else (False,):
            yield from (Config(gate, varlen) for gate in (*gates, *others * everything))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    gate: Any = config.gate  # Mamba-2's if there are weights
    seq_layout, WEIGHTED = SequenceLayout(config.varlen), gate.weighted

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def sum_gates_of_chunks(
        gGates: array(3), gA: array(2), gDtBias: array(2), gSums: array(3), gDecays: array(3), gCuSeqlens: ENDS, length: INT,
        splits: INT, groups: INT, warps: INT,
    ):  # fmt: skip
        """A warp, of `warps`, has one of `splits` parts of the chunks of a sequence, for one of `groups` groups of heads.
        gGates: gates of each token and head, or steps. gSums: b of each chunk, head and token of the chunk; with weights, a
        after b. gDecays: dt A of each token and head."""
        grid.follow()
        warp = int32(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES)
        if warp >= warps:
            return
        _, sequence, split, head, seq = share_of_warp(warp, splits, groups, seq_layout, gCuSeqlens, length)
        for j in range(split, seq.num_chunks(), splits):
            token = seq.chunk_start(j)
            chunk, at = seq_layout.chunk_index(token, sequence, length), (seq.batch, token, head)
            gates = load(truncate(gGates, 1, seq.end), GATES, at, 1, 2)
            if WEIGHTED:
                dt = gate.step_size(gates + load(gDtBias, HEAD_VEC, (head, 0), cols=0))
                dt = where(less(row_index(GATES), float32(seq.remaining(j))), dt, 0.0)
                gates = dt * load(gA, HEAD_VEC, (head, 0), cols=0)
                store(truncate(gDecays, 1, seq.end), gates, at, 1, 2)
            b = cumsum(clamp_gates(gates) * LOG2_E)
            store(gSums, b, (chunk, head, 0), 2, 1)
            if WEIGHTED:
                store(gSums, b - maximum(log2(dt), MIN_WEIGHT), (chunk, head, CHUNK), 2, 1)

    return sum_gates_of_chunks, None
