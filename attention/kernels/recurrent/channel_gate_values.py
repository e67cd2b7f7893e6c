"""Gates of channels that a formula computes, as an array, and the gradients of what they are computed from. This is for
training: forward's kernels compute gates where they read them, but those of gradients read gates several times.

    g = formula(x + dt_bias, exp(A_log))    dx = dg dg/dx    dA_log = sum of dg dg/dA_log    ddt_bias = sum of dx

A warp has a strip of tokens and PART.cols channels of a head. Its parts of the sums over tokens are stored, and other kernels
add them in order, so that results have the same bits every time."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba import cuda
from numpy import float32, int32

from ops import col_sum, divmod, load, store, tile_sum, warp_index, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt
from tiles.launching.arguments import INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.recurrent.gate_formulas import FORMULAS, GateFormula

WARPS, PART = 4, rt(16, 32, fp32)  # warps of a block; tokens and channels that a warp works on at a time
STRIP = 8 * PART.rows  # tokens of a warp


class GateStrip(NamedTuple):
    """The tokens from `token` on of a batch, and the channels from `col` on of a head, that a warp has. number: of the strip
    among all strips of tokens; panel: of the channels."""

    batch: Any
    token: Any
    head: Any
    col: Any
    number: Any
    panel: Any


@inlined
def find_strip(strips, panels, heads):
    """The GateStrip of this warp. strips: of a sequence. panels: of a head's channels. Beyond the last warp `batch` is
    beyond the last batch."""
    rest, panel = divmod(WARPS * cuda.blockIdx.x + warp_index(), panels)
    number, head = divmod(rest, heads)
    batch, strip = divmod(number, strips)
    return GateStrip(int32(batch), int32(STRIP * strip), int32(head), int32(PART.cols * panel), int32(number), int32(panel))


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

        @cuda.jit(launch_bounds=(config.threads, 6))
        def evaluate_gates(
            gX: array(4, INPUT), gA: array(2), gDtBias: array(2), gOut: array(4), strips: INT, panels: INT, heads: INT
        ):
            """gOut = g of gX (batch, token, head, channel). gA, gDtBias (head, channel)."""
            strip = find_strip(strips, panels, heads)
            if strip.batch >= gX.shape[0]:
                return
            rate, bias = formula.load_rate(gA, strip.head), load(gDtBias, PART.row_vec, (strip.head, strip.col))
            for token in range(strip.token, min(strip.token + STRIP, gX.shape[1]), PART.rows):
                at = strip.batch, int32(token), strip.head, strip.col
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

        @cuda.jit(launch_bounds=(config.threads, 5))
        def differentiate_gates(
            gX: array(4, INPUT), gA: array(2), gDtBias: array(2), gDGates: array(4), gDX: array(4, INPUT), gRateSums: array(2),
            gBiasSums: array(2), gChannelSums: array(3), strips: INT, panels: INT, heads: INT,
        ):  # fmt: skip
            """gDX from gDGates, dg (batch, token, head, channel), and the sums of dA_log and of a ddt_bias of heads (strip and
            panel, head), or of one of channels (head, strip, channel)."""
            strip = find_strip(strips, panels, heads)
            if strip.batch >= gX.shape[0]:
                return
            rate, bias = formula.load_rate(gA, strip.head), load(gDtBias, PART.row_vec, (strip.head, strip.col))
            bias_sums, rate_sum = zeros(PART), float32(0)
            for token in range(strip.token, min(strip.token + STRIP, gX.shape[1]), PART.rows):
                at = strip.batch, int32(token), strip.head, strip.col
                x, dg = load(gX, PART, at, 1, 3), load(gDGates, PART, at, 1, 3)
                of_x, of_rate = formula.derivatives(x, rate, bias)
                dx = dg * of_x
                store(gDX, INPUT(dx), at, 1, 3)
                bias_sums = bias_sums + dx
                if SUMS_RATE:
                    rate_sum = rate_sum + tile_sum(dg * of_rate)
            row = strip.number * panels + strip.panel
            if SUMS_RATE:
                gRateSums[row, strip.head] = rate_sum
            if BIAS_OF_HEAD:
                gBiasSums[row, strip.head] = tile_sum(bias_sums)
            if BIAS_OF_CHANNEL:
                store(gChannelSums, col_sum(bias_sums), (strip.head, strip.number, strip.col))

        return differentiate_gates, None


GateValueConfig = GateValues | GateValueGradients
BIASES = "", "head", "channel"


def space(target: Target, everything: bool) -> Iterator[GateValueConfig]:
    """Each formula with all sums; others, and fp16, with `everything` only."""
    for input_dtype, formula in itertools.product((bf16, fp16) if everything else (bf16,), FORMULAS):
        yield GateValues(input_dtype, formula)
        for sums_rate, sums_bias in itertools.product((False, True), BIASES) if everything else [(True, "channel")]:
            yield GateValueGradients(input_dtype, formula, sums_rate, sums_bias)


def make(config: GateValueConfig):
    """(kernel, shared memory) of a configuration."""
    return config.make(config)
