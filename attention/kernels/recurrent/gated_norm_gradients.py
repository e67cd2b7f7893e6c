"""The gradients of the gated RMS norm, see gated_norm.py. With u = x, or x act(z) where the gate comes first, r = 1 /
sqrt(mean(u^2) + eps) and q = dy u, times act(z) where the gate comes after,

    du = r weight dy (times act(z) likewise) - u r^3 mean(q weight)        dweight = sum q r
    the gate after:  dx = du           dz = r weight dy x act'(z)
    the gate first:  dx = du act(z)    dz = du x act'(z)

The sums over each strip's tokens are stored, and another kernel adds them in their order: there are no atomic additions."""

import functools
from collections.abc import Iterator

from numba import cuda

from ops import rsqrt, zeros
from tiles import inlined, shared
from tiles.launching.arguments import FLOAT, INT, array
from tiles.targets import Target

from . import gated_norm
from .gated_norm import GATES, SCRATCH, norm_space

BEFORE_NORM_REGISTERS = 168  # of a thread where the gate comes first


class Config(gated_norm.Config):
    """A configuration of the kernel of gradients."""


def space(target: Target, everything: bool) -> Iterator[gated_norm.Config]:
    return norm_space(Config, everything)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    rows, INPUT, GATED, NORM_FIRST = config.rows, config.rows.dtype, config.gate is not None, config.norm_first
    gate, registers = GATES[config.gate or "silu"], rows.registers[1] if NORM_FIRST else BEFORE_NORM_REGISTERS
    weights = config.weights
    smem = shared(squares=SCRATCH, products=SCRATCH)

    @inlined
    def norm_input(x, activation):
        """u: x, or where the gate comes first x act(z)."""
        return x * activation if GATED and not NORM_FIRST else x

    @inlined
    def norm_output_gradient(dy, activation):
        """The gradient of u weight r: dy, or where the gate comes after dy act(z)."""
        return dy * activation if GATED and NORM_FIRST else dy

    @cuda.jit(launch_bounds=config.bounds(registers), fastmath=True)
    def gated_norm_gradients(
        gDOut: array(4, INPUT), gX: array(4, INPUT), gGate: array(4, INPUT), gWeight: array(3), gDX: array(4, INPUT),
        gDGate: array(4, INPUT), gSums: array(4), eps: FLOAT, inverse_columns: FLOAT, length: INT, tokens: INT, splits: INT,
        panels: INT,
    ):  # fmt: skip
        """Arguments are those of gated_norm; gSums (head, strip, line, column): of the gradients of weights."""
        squares, products = smem.open()
        strip = rows.find(panels, splits, tokens, length, gX.shape[0])
        weight, sums = weights.load(rows, gWeight, strip.head), zeros(rows.fp32_tile)
        for t in range(strip.start, strip.end):
            x, dy = rows.load(gX, strip, t), rows.load(gDOut, strip, t)
            z = rows.load(gGate, strip, t) if GATED else x
            activation = gate.activate(z)
            u = norm_input(x, activation)
            r = rsqrt(rows.sum_rows(u * u, squares) * inverse_columns + eps)
            c = rows.sum_rows(norm_output_gradient(dy, activation) * u * weight, products) * r * r * r * inverse_columns
            x, dy = rows.reload(x, gX, strip, t), rows.reload(dy, gDOut, strip, t)
            activation, derivative = gate.activate_with_derivative(rows.reload(z, gGate, strip, t) if GATED else x)
            u, dn, scaled = norm_input(x, activation), norm_output_gradient(dy, activation), weight * r
            sums = sums + dn * u * r
            du = dn * scaled - u * c
            if GATED:
                rows.store(gDGate, dy * x * derivative * scaled if NORM_FIRST else du * x * derivative, strip, t)
            rows.store(gDX, du * activation if GATED and not NORM_FIRST else du, strip, t)
        if strip.batch < gX.shape[0]:
            weights.store_sums(rows, gSums, sums, strip)

    return gated_norm_gradients, smem
