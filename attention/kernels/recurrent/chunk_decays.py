"""The sum of the gates of each chunk and head, in powers of 2, from which passes over segments see how far back tokens count
(parts/recurrent/recent_chunks.py). Gates are read, or computed as the passes do. A warp has a chunk of 16 heads."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import col_sum, less, load, row_index, store, truncate, where
from tiles.launching.arguments import ENDS, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.recurrent.gate_formulas import FORMULAS
from ...parts.recurrent.gates import LOG2_E, FormulaGate, Mamba2Gate, TokenGate, clamp_gates
from ...parts.recurrent.gradients import GATES, HEAD_VEC, share_of_warp
from ...parts.recurrent.tokens import SequenceLayout

WARPS = 4  # of a block


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. gate: the kind of gates. varlen: are sequences packed (cu_seqlens)?"""

    gate: TokenGate
    varlen: bool = False
    threads = LANES * WARPS

    def __str__(self):
        return f"decays of chunks, {self.gate}" + ", varlen" * self.varlen


def space(target: Target, everything: bool) -> Iterator[Config]:
    """Gates, a formula and steps, of GPUs whose chunk kernels cut sequences into long segments, and gates of packed sequences;
    with `everything` all formulas, steps without softplus, and packed sequences of all."""
    if target.has_wgmma:
        gates = TokenGate(), *[FormulaGate(False, x) for x in FORMULAS], Mamba2Gate(softplus=True), Mamba2Gate()
        for gate in gates if everything else (gates[0], gates[1], gates[-2]):
            yield Config(gate)
        yield from (Config(gate, True) for gate in (gates if everything else gates[:1]))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    seq_layout, gate = SequenceLayout(config.varlen), config.gate

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def sum_decays(
        gGates: array(3), gA: array(2), gDtBias: array(2), gChunkDecays: array(2), gCuSeqlens: ENDS, length: INT, splits: INT,
        groups: INT, warps: INT,
    ):  # fmt: skip
        """A warp, of `warps`, has one of `splits` parts of the chunks of a sequence, for one of `groups` groups of heads.
        gChunkDecays: of each head and chunk."""
        warp = int32(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES)
        if warp >= warps:
            return
        _, sequence, split, head, seq = share_of_warp(warp, splits, groups, seq_layout, gCuSeqlens, length)
        rates, biases = load(gA, HEAD_VEC, (head, 0), cols=0), load(gDtBias, HEAD_VEC, (head, 0), cols=0)
        for j in range(split, seq.num_chunks(), splits):
            token = seq.chunk_start(j)
            gates = load(truncate(gGates, 1, seq.end), GATES, (seq.batch, token, head), 1, 2)
            if gate.has_formula:
                gates = gate.compute_gates(gates, rates, biases)
                gates = where(less(row_index(GATES), float32(seq.remaining(j))), gates, 0.0)
            total = col_sum(clamp_gates(gates) * LOG2_E)
            store(gChunkDecays, total, (head, seq_layout.chunk_index(token, sequence, length)), cols=0)

    return sum_decays, None
