"""Gates of channels that a formula computes, as an array, and the gradients of what they are computed from. This is for
training: forward's kernels compute gates where they read them, but those of gradients read gates several times.

    g = formula(x + dt_bias, exp(A_log))    dx = dg dg/dx    dA_log = sum of dg dg/dA_log    ddt_bias = sum of dx

A block has tokens of a head. Its parts of the sums over tokens are stored, and other kernels add them in order, so that results
have the same bits every time."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import block, col_sum, divmod, load, store, tile_sum, zeros
from tiles import bf16, dtype, fp16, fp32, rt, shared, sv
from tiles.launching.arguments import INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.recurrent.gate_formulas import FORMULAS, GateFormula

WARPS, PART = 4, rt(16, 64, fp32)  # warps of a block; tokens and channels that a warp works on at a time
TOKENS = WARPS * PART.rows  # that a block works on at a time
STRIP = 4 * TOKENS  # tokens of a block of GateValueGradients


@dataclass(frozen=True)
class GateValues:
    """The configuration of the kernel that computes gates."""

    dtype: dtype
    formula: GateFormula
    threads = LANES * WARPS

    def __str__(self):
        return f"{self.formula} gates, {self.dtype}"

    @staticmethod
    @functools.cache
    def make(config: "GateValues"):
        """(kernel, shared memory) of a configuration."""
        INPUT, formula = config.dtype, config.formula

        @cuda.jit(launch_bounds=(config.threads, 1))
        def evaluate_gates(
            gX: array(4, INPUT), gA: array(2), gDtBias: array(2), gOut: array(4), tiles: INT, panels: INT, heads: INT
        ):
            """gOut = g of gX (batch, token, head, channel), for one of the `tiles` of a head's tokens. gA, gDtBias (head,
            channel)."""
            rest, head = divmod(cuda.blockIdx.x, heads)
            batch, tile = divmod(rest, tiles)
            token = int32(TOKENS * tile + PART.rows * (cuda.threadIdx.x // LANES))
            rate = formula.load_rate(gA, int32(head))
            for panel in range(panels):
                col = int32(PART.cols * panel)
                at = int32(batch), token, int32(head), col
                bias = load(gDtBias, PART.row_vec, (int32(head), col))
                store(gOut, formula.compute(load(gX, PART, at, 1, 3), rate, bias), at, 1, 3)

        return evaluate_gates, None


@dataclass(frozen=True)
class GateValueGradients:
    """The configuration of the kernel of gradients. sums_rate: is dA_log wanted? sums_bias: one of BIASES, for ddt_bias."""

    dtype: dtype
    formula: GateFormula
    sums_rate: bool
    sums_bias: str
    threads = LANES * WARPS

    def __str__(self):
        sums = ", dA_log" * self.sums_rate + f", ddt_bias by {self.sums_bias}" * bool(self.sums_bias)
        return f"{self.formula} gates' gradients, {self.dtype}{sums}"

    @staticmethod
    @functools.cache
    def make(config: "GateValueGradients"):
        """(kernel, shared memory) of a configuration."""
        INPUT, formula, SUMS_RATE = config.dtype, config.formula, config.sums_rate
        BIAS_OF_HEAD, BIAS_OF_CHANNEL = config.sums_bias == "head", config.sums_bias == "channel"
        smem = shared(sums=sv(4 * WARPS, fp32), columns=sv(PART.cols * WARPS, fp32))

        @cuda.jit(launch_bounds=(config.threads, 3))
        def differentiate_gates(
            gX: array(4, INPUT), gA: array(2), gDtBias: array(2), gDGates: array(4), gDX: array(4, INPUT), gRateSums: array(2),
            gBiasSums: array(2), gChannelSums: array(3), strips: INT, panels: INT, heads: INT,
        ):  # fmt: skip
            """gDX from gDGates, dg (batch, token, head, channel), for PART.cols channels of one of the `strips` of a head's
            tokens, and the sums of dA_log and of a ddt_bias of heads (strip and panel, head), or of one of channels (head,
            strip, channel)."""
            sums, columns = smem.open()
            rest, panel = divmod(cuda.blockIdx.x, panels)
            rest, head = divmod(rest, heads)
            batch, strip = divmod(rest, strips)
            head, col, index = int32(head), int32(PART.cols * panel), int32(batch * strips + strip)
            warp = int32(cuda.threadIdx.x // LANES)
            rate, bias = formula.load_rate(gA, head), load(gDtBias, PART.row_vec, (head, col))
            bias_sums, rate_sum = zeros(PART), float32(0)
            for i in range(STRIP // TOKENS):
                at = int32(batch), int32(STRIP * strip + TOKENS * i + PART.rows * warp), head, col
                x, dg = load(gX, PART, at, 1, 3), load(gDGates, PART, at, 1, 3)
                of_x, of_rate = formula.derivatives(x, rate, bias)
                dx = dg * of_x
                store(gDX, INPUT(dx), at, 1, 3)
                bias_sums = bias_sums + dx
                if SUMS_RATE:
                    rate_sum = rate_sum + tile_sum(dg * of_rate)
            if SUMS_RATE:
                total = block.reduce_sum(rate_sum, sums)
                if warp == 0:
                    gRateSums[index * panels + panel, head] = total
            if BIAS_OF_HEAD:
                total = block.reduce_sum(tile_sum(bias_sums), sums)
                if warp == 0:
                    gBiasSums[index * panels + panel, head] = total
            if BIAS_OF_CHANNEL:
                channels = block.reduce_sum(col_sum(bias_sums), columns)
                if warp == 0:
                    store(gChannelSums, channels, (head, index, col))

        return differentiate_gates, smem


GateValueConfig = GateValues | GateValueGradients
BIASES = "", "head", "channel"


def space(target: Target, everything: bool) -> Iterator[GateValueConfig]:
    """Each formula with all sums; others, and fp16, with `everything` only."""
    for input_dtype, formula in itertools.product((bf16, fp16) if everything else (bf16,), FORMULAS):
        yield GateValues(input_dtype, formula)
        for sums_rate, sums_bias in itertools.product((False, True), BIASES) if everything else [(True, "channel")]:
            yield GateValueGradients(input_dtype, formula, sums_rate, sums_bias)
