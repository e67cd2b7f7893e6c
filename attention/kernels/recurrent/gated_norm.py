"""The gated RMS norm of rows: y = norm(x) weight act(z), or norm(x act(z)) weight, with norm(u) = u / sqrt(mean(u^2) + eps).
Without a gate and weights, and with sums in place of means, it is the L2 norm of queries and keys.

The time is that of reading x and z and writing y once."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda

from ops import rsqrt
from tiles import bf16, fp16, fp32, shared, sv
from tiles.launching.arguments import FLOAT, INT, array
from tiles.targets import Target

from ...parts.gated_rows import (
    GROUPS,
    MAX_WARPS,
    ROW_WEIGHTS,
    UNIT_WEIGHTS,
    GroupedRows,
    RowWeights,
    SigmoidGate,
    SiluGate,
    SpreadRow,
)

GATES = {"silu": SiluGate(), "sigmoid": SigmoidGate()}
SCRATCH = sv(4 * MAX_WARPS, fp32)  # for the sums of a block's warps


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. rows: where they lie. gate: an activation of GATES, None without a gate. norm_first: does the
    norm come before the gate? weights: of the norm."""

    rows: GroupedRows
    gate: str | None = "silu"
    norm_first: bool = True
    weights: RowWeights = ROW_WEIGHTS

    @property
    def threads(self) -> int:
        """How many threads a block has."""
        return self.rows.threads

    def bounds(self, registers: int) -> tuple[int, int]:
        """Launch bounds: the threads of a block, and as many blocks of a multiprocessor as leave a thread so many registers."""
        return self.threads, max(1, 65536 // registers // self.threads)

    def __str__(self):
        order = f"{self.gate} {'after' if self.norm_first else 'before'} the norm" if self.gate else "no gate"
        return f"{self.rows}, {order}{self.weights}"


def norm_space(make_config: type[Config], everything: bool) -> Iterator[Config]:
    """The configurations of bf16, of rows of 128 and of 4096 columns, with SiLU; with `everything` others, too."""
    forms = [(GroupedRows, 4), (SpreadRow, 128)]
    if everything:
        forms += [(GroupedRows, lines) for lines in GROUPS if lines != 4] + [(SpreadRow, lines) for lines in (3, 256)]
    dtypes, alignments = ((bf16, fp16), (True, False)) if everything else ((bf16,), (True,))
    gates = ("silu", "sigmoid", None) if everything else ("silu",)
    for (form, lines), input_dtype, aligned, gate in itertools.product(forms, dtypes, alignments, gates):
        for norm_first in (True, False) if gate else (True,):
            yield make_config(form(lines, input_dtype, aligned), gate, norm_first)
    for (form, lines), input_dtype, aligned in itertools.product(forms[:: 1 if everything else 2], dtypes, alignments):
        yield make_config(form(lines, input_dtype, aligned), None, True, UNIT_WEIGHTS)


def space(target: Target, everything: bool) -> Iterator[Config]:
    return norm_space(Config, everything)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    rows, INPUT, GATED, NORM_FIRST = config.rows, config.rows.dtype, config.gate is not None, config.norm_first
    gate, weights = GATES[config.gate or "silu"], config.weights
    smem = shared(scratch=SCRATCH)

    @cuda.jit(launch_bounds=config.bounds(rows.registers[0]), fastmath=True)
    def gated_norm(
        gX: array(4, INPUT), gGate: array(4, INPUT), gWeight: array(3), gOut: array(4, INPUT),
        eps: FLOAT, inverse_columns: FLOAT, length: INT, tokens: INT, splits: INT, panels: INT,
    ):  # fmt: skip
        """gX, gGate, gOut (batch, token, line, column), gWeight (head, line, column). inverse_columns: 1 / columns, or 1
        for an L2 norm. tokens: of a strip, of which a sequence has `splits`. panels: of heads."""
        (scratch,) = smem.open()
        strip = rows.find(panels, splits, tokens, length, gX.shape[0])
        weight = weights.load(rows, gWeight, strip.head)
        for t in range(strip.start, strip.end):
            u = rows.load(gX, strip, t)
            if GATED:
                activation = gate.activate(rows.load(gGate, strip, t))
                if not NORM_FIRST:
                    u = u * activation
            y = u * rsqrt(rows.sum_rows(u * u, scratch) * inverse_columns + eps) * weight
            if GATED and NORM_FIRST:
                y = y * activation
            rows.store(gOut, y, strip, t)

    return gated_norm, smem
