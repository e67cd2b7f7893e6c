"""The state before each segment of a sequence under the delta rule, for Hopper.

    S_0 = the sequence's first        S_(p+1) = M_p S_p + N_p

[N_p | M_p] is what a segment makes of a state [0 | 1]: what it leaves of a state of 0, and the matrix that it multiplies one by
(delta_states_hopper.py). Loaders, a warpgroup for 64 rows each, part the next matrix into bf16 high and low; another warpgroup
carries on the transpose of 64 columns of the state, parted as well: three products of four are fp32's to some 16 bits.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, subtile, warpgroup
from tiles import bf16, fp32, ring, rt, shared, st
from tiles.arguments import INT, array

from .tokens import COLUMNS

KEY_DIMS = 64, 128  # as padded
STAGES = 2  # matrices in flight
ROWS = 64  # of a matrix, that a loader has
REGISTERS = 104, 240  # a thread of two loaders, and of the warpgroup beside them


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded."""

    key_dim: int

    @property
    def loaders(self):
        """The warpgroups that load a matrix."""
        return self.key_dim // ROWS

    @property
    def threads(self):
        """Threads of a block."""
        return warpgroup.THREADS * (1 + self.loaders)

    def __str__(self):
        return f"maps, Dk {self.key_dim}"


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The legal configurations."""
    if arch == "sm_90a":
        yield from map(Config, KEY_DIMS)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KEY_DIM, STATE, WARPS = config.key_dim, rt(16, config.key_dim, fp32), warpgroup.WARPGROUP
    (loads, claim), CLAIMS = REGISTERS, config.loaders > 1
    matrices = ring(st(KEY_DIM, KEY_DIM, bf16), STAGES, WARPS, writers=WARPS * config.loaders)
    smem = shared(high=matrices, low=matrices)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def carry_on(
        gLeft: array(4), gStart: array(4), gStarts: array(4), blocks: INT, segments: INT, heads: INT, values: INT,
    ):  # fmt: skip
        """The states before the `segments` of a head, for one of `blocks` blocks of columns. values: how many columns a state
        has."""
        high, low = smem.open()
        pair, block = divmod(cuda.blockIdx.x, blocks)
        sequence, head = divmod(pair, heads)
        before, first, last = int32(sequence * segments), int32(sequence * (segments - 1)), int32(segments - 1)
        column = int32(COLUMNS * block)
        me = warpgroup.id()
        if me > 0:
            if CLAIMS:
                warpgroup.release_registers(loads)
            part = int32(me - 1)
            for p in range(last):
                m = warpgroup.load(gLeft, STATE, (first + p, head, ROWS * part, values), aligned=True)
                rounded, upper, lower = bf16(m), high.claim(p), low.claim(p)
                warpgroup.store(subtile(upper, ROWS, part), rounded)
                warpgroup.store(subtile(lower, ROWS, part), m - fp32(rounded))
                high.publish(p)
                low.publish(p)
        else:
            if CLAIMS:
                warpgroup.claim_registers(claim)
            s_t = warpgroup.load(gStart, STATE, (sequence, head, 0, column), 3, 2)
            for p in range(last):
                warpgroup.store(gStarts, s_t, (before + p, head, 0, column), 3, 2)
                rounded = bf16(s_t)
                rest = bf16(s_t - fp32(rounded))
                left = warpgroup.load(gLeft, STATE, (first + p, head, 0, column), 3, 2)
                upper, lower = high.wait(p), low.wait(p)
                carried = warpgroup.mm_ABt(rounded, upper)
                carried = warpgroup.mma_ABt(carried, rest, upper)
                carried = warpgroup.mma_ABt(carried, rounded, lower)
                s_t = warpgroup.wait(carried) + left
                high.release(p)
                low.release(p)
            warpgroup.store(gStarts, s_t, (before + last, head, 0, column), 3, 2)

    return carry_on, smem
