"""What surrounds linear attention in Mamba-2's gradients. Before the kernels of linear attention's gradients one computes
values and gates from x and dt, and after them one computes the gradients of x, dt, A, D, z and dt_bias from those of values and
gates. Where the kernel between them reads x and dt itself (shared_heads_gradients_hopper.py), one before it computes dy and dz,
unless it does, and one after it the gradients of dt, dt_bias and A.

With dt = softplus(step + dt_bias) within limits, or without softplus, and linear attention's v = dt x, decay g = dt A, and dy,

    dy = dout silu(z)               dx = dt dv + D dy                    dz = dout y silu'(z)
    ddt = dv . x + A dg             dstep = ddt softplus'(step + dt_bias), and 0 beyond a limit of dt
    dA = sum of dt dg               ddt_bias = sum of dstep              dD = sum of dy x

where y is the output before the gate silu(z). A block has 64 tokens of a head and writes its part of each sum, in float32;
norm_gradients.SumNormPartials adds these in order, so that results have the same bits every time."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import (
    block,
    col_sum,
    divmod,
    grid,
    less,
    load,
    row_index,
    row_sum,
    sigmoid,
    silu,
    store,
    tile_max,
    tile_sum,
    truncate,
    where,
    zeros,
)
from tiles import bf16, dtype, fp16, fp32, inlined, rt, shared, sv
from tiles.launching.arguments import ENDS, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.recurrent.gates import Mamba2Gate
from ...parts.recurrent.gradients import GATES, HEAD_VEC, differentiate_gates, share_of_warp, sum_row_dots
from ...parts.recurrent.shared_heads import SKIPS, silu_derivative
from ...parts.recurrent.tokens import SequenceLayout

WARPS, PART = 4, rt(16, 32, fp32)  # warps of a block; tokens of a warp, and the columns that it works on at a time
TOKENS = WARPS * PART.rows  # of a block
TOKEN_VEC = PART.col_vec


@inlined
def load_head_number(x, head):
    """The number of a head, from an array whose columns are the same; 0 if there is no array."""
    return tile_max(load(x, TOKEN_VEC, (head, 0)))


@dataclass(frozen=True)
class Mamba2GradientInputs:
    """The configuration of the kernel before. has_z: is there a z?"""

    dtype: dtype
    gate: Mamba2Gate
    has_z: bool
    threads = LANES * WARPS

    def __str__(self):
        return f"Mamba-2 values, {self.dtype}, {self.gate}" + ", z" * self.has_z

    @staticmethod
    @functools.cache
    def make(config: "Mamba2GradientInputs"):
        """(kernel, shared memory) of a configuration."""
        INPUT, HAS_Z, gate = config.dtype, config.has_z, config.gate

        @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
        def prepare(
            gX: array(4, INPUT), gDt: array(3), gA: array(2), gDtBias: array(2), gZ: array(4, INPUT), gDOut: array(4, INPUT),
            gValues: array(4, INPUT), gGates: array(3), gDY: array(4, INPUT), tiles: INT, panels: INT, heads: INT,
        ):  # fmt: skip
            """gValues = dt x, gGates = dt A and, with z, gDY, of one of the `tiles` of a head's tokens."""
            batch_head, tile = divmod(cuda.blockIdx.x, tiles)
            batch, head = divmod(batch_head, heads)
            token = int32(TOKENS * tile + PART.rows * (cuda.threadIdx.x // LANES))
            dt = gate.step_size(load(gDt, TOKEN_VEC, (batch, token, head), cols=1) + load_head_number(gDtBias, head))
            store(gGates, dt * load_head_number(gA, head), (batch, token, head), cols=1)
            for panel in range(panels):
                at = batch, token, head, int32(PART.cols * panel)
                store(gValues, INPUT(load(gX, PART, at, 1, 3) * dt), at, 1, 3, True)
                if HAS_Z:
                    store(gDY, INPUT(load(gDOut, PART, at, 1, 3) * silu(load(gZ, PART, at, 1, 3))), at, 1, 3, True)

        return prepare, None


@dataclass(frozen=True)
class Mamba2GradientOutputs:
    """The configuration of the kernel after. has_dz: is dz computed? skip: one of SKIPS. varlen: are sequences packed
    (cu_seqlens)?"""

    dtype: dtype
    gate: Mamba2Gate
    has_dz: bool
    skip: str
    varlen: bool
    threads = LANES * WARPS

    def __str__(self):
        labels = {"dz": self.has_dz, f"dD by {self.skip}": self.skip, "varlen": self.varlen}
        return ", ".join([f"Mamba-2 gradients, {self.dtype}, {self.gate}", *(label for label, used in labels.items() if used)])

    @staticmethod
    @functools.cache
    def make(config: "Mamba2GradientOutputs"):
        """(kernel, shared memory) of a configuration."""
        INPUT, HAS_DZ, gate, seq_layout = config.dtype, config.has_dz, config.gate, SequenceLayout(config.varlen)
        SKIP_OF_HEAD, SKIP_OF_COLUMN = config.skip == "head", config.skip == "column"
        smem = shared(sums=sv(4 * WARPS, fp32), columns=sv(PART.cols * WARPS, fp32))

        @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
        def finish(
            gX: array(4, INPUT), gDt: array(3), gA: array(2), gDtBias: array(2), gD: array(2), gZ: array(4, INPUT),
            gDOut: array(4, INPUT), gY: array(4, INPUT), gDY: array(4, INPUT), gDValues: array(4, INPUT), gDGates: array(3),
            gDX: array(4, INPUT), gDDt: array(3), gDZ: array(4, INPUT), gRateSums: array(2), gBiasSums: array(2),
            gSkipSums: array(2), gColumnSums: array(3), gCuSeqlens: ENDS, length: INT, tiles: INT, panels: INT, heads: INT,
        ):  # fmt: skip
            """Gradients for one of the `tiles` of a head's tokens, and its parts of sums: those of dA, ddt_bias and of a dD of
            heads (block, head); of a dD of columns (head, block, column). gDOut, gY and gZ are read for gDZ only. Arguments
            are not read after the last sequence, where gDGates, gDValues and gY are 0, and gradients are."""
            sums, columns = smem.open()
            batch_head, tile = divmod(cuda.blockIdx.x, tiles)
            batch, head = divmod(batch_head, heads)
            warp = int32(cuda.threadIdx.x // LANES)
            block_index, token = int32(batch * tiles + tile), int32(TOKENS * tile + PART.rows * warp)
            end, at_token = seq_layout.padding_start(gCuSeqlens, length), (batch, token, head)
            rate = load_head_number(gA, head)
            step = load(truncate(gDt, 1, end), TOKEN_VEC, at_token, cols=1) + load_head_number(gDtBias, head)
            dt, dg = gate.step_size(step), load(gDGates, TOKEN_VEC, at_token, cols=1)
            ddt, skip_sum = dg * rate, zeros(TOKEN_VEC)
            for panel in range(panels):
                col = int32(PART.cols * panel)
                at = batch, token, head, col
                x = load(truncate(gX, 1, end), PART, at, 1, 3)
                dv = load(gDValues, PART, at, 1, 3, True)
                dy = load(truncate(gDY, 1, end), PART, at, 1, 3)
                ddt = row_sum(dv * x, ddt)
                d = load(gD, PART.row_vec, (head, col), 0, 1)
                store(gDX, INPUT(dv * dt + dy * d), at, 1, 3)
                if SKIP_OF_HEAD:
                    skip_sum = row_sum(dy * x, skip_sum)
                if SKIP_OF_COLUMN:
                    column_sums = block.reduce_sum(col_sum(dy * x), columns)
                    if warp == 0:
                        store(gColumnSums, column_sums, (head, block_index, col))
                if HAS_DZ:
                    z, dout = load(truncate(gZ, 1, end), PART, at, 1, 3), load(truncate(gDOut, 1, end), PART, at, 1, 3)
                    store(gDZ, INPUT(dout * load(gY, PART, at, 1, 3, True) * silu_derivative(silu(z), sigmoid(z))), at, 1, 3)
            ddt = gate.differentiate_step(step, ddt)
            store(gDDt, ddt, at_token, cols=1)
            rate_sum = block.reduce_sum(tile_sum(dt * dg), sums)
            bias_sum = block.reduce_sum(tile_sum(ddt), sums)
            if warp == 0:
                gRateSums[block_index, head] = rate_sum
                gBiasSums[block_index, head] = bias_sum
            if SKIP_OF_HEAD:
                skip_total = block.reduce_sum(tile_sum(skip_sum), sums)
                if warp == 0:
                    gSkipSums[block_index, head] = skip_total

        return finish, smem


@dataclass(frozen=True)
class Mamba2OutputGate:
    """The configuration of the kernel for the gate silu(z) of outputs alone, which computes dy. dz: dz, too?"""

    dtype: dtype
    dz: bool
    varlen: bool
    threads = LANES * WARPS

    def __str__(self):
        return "Mamba-2 dy" + ", dz" * self.dz + f", {self.dtype}" + ", varlen" * self.varlen

    @staticmethod
    @functools.cache
    def make(config: "Mamba2OutputGate"):
        """(kernel, shared memory) of a configuration."""
        INPUT, DZ, seq_layout = config.dtype, config.dz, SequenceLayout(config.varlen)

        @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
        def differentiate_gate(
            gDOut: array(4, INPUT), gZ: array(4, INPUT), gY: array(4, INPUT), gDY: array(4, INPUT), gDZ: array(4, INPUT),
            gCuSeqlens: ENDS, length: INT, tiles: INT, panels: INT, heads: INT,
        ):  # fmt: skip
            """gDY = dout silu(z), gDZ = dout y silu'(z), of one of the `tiles` of a head's tokens; 0 after the last one."""
            batch_head, tile = divmod(cuda.blockIdx.x, tiles)
            batch, head = divmod(batch_head, heads)
            token = int32(TOKENS * tile + PART.rows * (cuda.threadIdx.x // LANES))
            end = seq_layout.padding_start(gCuSeqlens, length)
            for panel in range(panels):
                at = batch, token, head, int32(PART.cols * panel)
                dout = load(truncate(gDOut, 1, end), PART, at, 1, 3, True)
                z = load(truncate(gZ, 1, end), PART, at, 1, 3, True)
                if DZ:
                    y = load(gY, PART, at, 1, 3, True)
                    store(gDZ, INPUT(dout * y * silu_derivative(silu(z), sigmoid(z))), at, 1, 3, True)
                store(gDY, INPUT(dout * silu(z)), at, 1, 3, True)

        return differentiate_gate, None


@dataclass(frozen=True)
class Mamba2StepGradients:
    """The configuration of the kernel for the gradients of steps, from what shared_heads_gradients_hopper.py stored. varlen:
    are sequences packed (cu_seqlens)?"""

    gate: Mamba2Gate
    varlen: bool
    threads, overlaps_previous = LANES * WARPS, True

    def __str__(self):
        return f"Mamba-2 gradients of steps, {self.gate}" + ", varlen" * self.varlen

    @staticmethod
    @functools.cache
    def make(config: "Mamba2StepGradients"):
        """(kernel, shared memory) of a configuration."""
        gate, seq_layout = config.gate, SequenceLayout(config.varlen)

        @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
        def differentiate_steps(
            gQueryDots: array(4), gValueDots: array(4), gCarriedDots: array(3), gStateDots: array(3), gDt: array(3),
            gA: array(2), gDtBias: array(2), gDDt: array(3), gRateSums: array(2), gBiasSums: array(2), gCuSeqlens: ENDS,
            length: INT, splits: INT, groups: INT, warps: INT,
        ):  # fmt: skip
            """A warp, of `warps` in all, has one of `splits` parts of the chunks of a sequence, for one of `groups` groups of
            heads. gQueryDots: q . dq, gValueDots: v . dv / dt of each token and head, in parts; gCarriedDots, gStateDots: see
            gradients.py. gRateSums, gBiasSums: the sums of dt dg and of dstep of each split and head."""
            grid.follow()
            warp = int32(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES)
            if warp >= warps:
                return
            index, sequence, split, head, seq = share_of_warp(warp, splits, groups, seq_layout, gCuSeqlens, length)
            rate, bias = load(gA, HEAD_VEC, (head, 0), cols=0), load(gDtBias, HEAD_VEC, (head, 0), cols=0)
            rate_sum, bias_sum = zeros(HEAD_VEC), zeros(HEAD_VEC)
            for j in range(split, seq.num_chunks(), splits):
                token, chunk = seq.chunk_start(j), seq_layout.chunk_index(seq.chunk_start(j), sequence, length)
                inside, at = less(row_index(GATES), float32(seq.remaining(j))), (seq.batch, token, head)
                step = load(truncate(gDt, 1, seq.end), GATES, at, 1, 2) + bias
                dt = where(inside, gate.step_size(step), 0.0)
                value_dots = sum_row_dots(gValueDots, seq, token, head)
                r = sum_row_dots(gQueryDots, seq, token, head) - dt * value_dots
                dg = differentiate_gates(r, dt * rate, gCarriedDots, gStateDots, chunk, head)
                dstep = gate.differentiate_step(step, value_dots + dg * rate)
                store(truncate(gDDt, 1, seq.end), dstep, at, 1, 2)
                rate_sum = rate_sum + col_sum(dt * dg)
                bias_sum = bias_sum + col_sum(where(inside, dstep, 0.0))
            store(gRateSums, rate_sum, (index, head), cols=1)
            store(gBiasSums, bias_sum, (index, head), cols=1)
            padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
            for j in range(split, padding.num_chunks(), splits):
                store(gDDt, zeros(GATES), (padding.batch, padding.chunk_start(j), head), 1, 2)

        return differentiate_steps, None


@dataclass(frozen=True)
class Mamba2HeadSums:
    """The configuration of the kernel that adds up the parts of dA, ddt_bias and dD of heads, in one launch."""

    threads, overlaps_previous = LANES * WARPS, True

    def __str__(self):
        return "Mamba-2 sums of heads"

    @staticmethod
    @functools.cache
    def make(config: "Mamba2HeadSums"):
        """(kernel, shared memory) of a configuration."""
        smem = shared(scratch=sv(PART.cols * WARPS, fp32))

        @inlined
        def sum_rows(gParts, gSum, scratch, warp, col):
            """gSum (column) = the sum of gParts (part, column), for 32 columns."""
            total = zeros(PART)
            for row in range(PART.rows * warp, gParts.shape[0], PART.rows * WARPS):
                total = total + load(gParts, PART, (int32(row), col))
            sums = block.reduce_sum(col_sum(total), scratch)
            if warp == 0:
                store(gSum, sums, (col,))

        @cuda.jit(launch_bounds=(config.threads, 1))
        def sum_heads(
            gRateSums: array(2), gBiasSums: array(2), gSkipSums: array(2), gDRate: array(1), gDBias: array(1), gDSkip: array(1),
            panels: INT,
        ):  # fmt: skip
            """A block has 32 heads of one of the three sums."""
            grid.follow()
            (scratch,) = smem.open()
            which, panel = divmod(cuda.blockIdx.x, panels)
            warp, col = int32(cuda.threadIdx.x // LANES), int32(PART.cols * panel)
            if which == 0:
                sum_rows(gRateSums, gDRate, scratch, warp, col)
            elif which == 1:
                sum_rows(gBiasSums, gDBias, scratch, warp, col)
            else:
                sum_rows(gSkipSums, gDSkip, scratch, warp, col)

        return sum_heads, smem


Mamba2GradientConfig = Mamba2GradientInputs | Mamba2GradientOutputs | Mamba2OutputGate | Mamba2StepGradients | Mamba2HeadSums


def space(target: Target, everything: bool) -> Iterator[Mamba2GradientConfig]:
    """The configurations with all options; others, and fp16, with `everything` only."""
    for varlen in (False, True):
        yield from (Mamba2OutputGate(bf16, dz, varlen) for dz in (False, True) if everything or varlen)
        if everything:
            yield from (Mamba2OutputGate(fp16, dz, varlen) for dz in (False, True))
    yield Mamba2HeadSums()
    gates = (Mamba2Gate(), Mamba2Gate(softplus=True), Mamba2Gate(softplus=True, low=0.001, high=0.1))
    for gate, varlen in itertools.product(gates, (False, True)):
        if everything or (gate.has_limits and varlen):
            yield Mamba2StepGradients(gate, varlen)
    for input_dtype, gate, has_z in itertools.product((bf16, fp16), gates, (False, True)):
        if everything or (input_dtype is bf16 and gate.has_limits and has_z):
            yield Mamba2GradientInputs(input_dtype, gate, has_z)
            for skip, varlen in itertools.product(SKIPS, (False, True)):
                if everything or (skip and varlen):
                    yield Mamba2GradientOutputs(input_dtype, gate, has_z, skip, varlen)


@functools.cache
def make(config: Mamba2GradientConfig):
    """(kernel, shared memory) of a configuration."""
    return config.make(config)
