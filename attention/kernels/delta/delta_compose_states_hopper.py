"""The state before each segment of a sequence under the delta rule, for Hopper.

    S_0 = the sequence's first        S_(p+1) = M_p S_p + N_p

[N_p | M_p] is the state after segment p from a state [0 | I] (delta_states_hopper.py, kda_states_hopper.py). Loaders, a
warpgroup for 64 rows each, split the next matrix M into bf16 high and low parts. Another warpgroup, the composer, keeps the
transpose of 64 columns of the state and splits it too; three of the four products of the parts give some 16 bits of precision.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from numba import cuda
from numpy import int32

from ops import divmod, subtile, warpgroup
from tiles import bf16, fp32, ring, rt, shared, st
from tiles.launching.arguments import INT, array
from tiles.targets import Target

from ...parts.recurrent.launch_conditions import HistoryCondition, NoCondition
from ...parts.recurrent.tokens import COLUMNS

KEY_DIMS = 64, 128  # as padded
STAGES = 2  # matrices in flight
LOADER_ROWS = 64  # rows of a matrix that a loader has
REGISTERS = 104, 240  # of a thread of two loaders, of the composer


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. condition: of the grid."""

    key_dim: int
    condition: NoCondition = field(default=NoCondition())

    @property
    def overlaps_previous(self) -> bool:
        """Does the kernel begin while the grid before still runs?"""
        return self.condition.overlaps

    @property
    def loaders(self):
        """The number of warpgroups that load a matrix."""
        return self.key_dim // LOADER_ROWS

    @property
    def threads(self):
        """The threads of a block, those of the composer and the loaders."""
        return warpgroup.THREADS * (1 + self.loaders)

    def __str__(self):
        return ", ".join(filter(None, (f"composed states, Dk {self.key_dim}", str(self.condition))))


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations, one for each padded key dim."""
    if target.has_wgmma:
        yield from map(Config, KEY_DIMS)
        if everything:
            yield from (Config(key_dim, HistoryCondition(False)) for key_dim in KEY_DIMS)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KEY_DIM, STATE, WARPS = config.key_dim, rt(16, config.key_dim, fp32), warpgroup.WARPGROUP
    (loader_registers, composer_registers), SETMAXNREG = REGISTERS, config.loaders > 1
    condition, CONDITION = config.condition, config.condition.params()
    matrices = ring(st(KEY_DIM, KEY_DIM, bf16), STAGES, WARPS, writers=WARPS * config.loaders)
    smem = shared(high=matrices, low=matrices)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def compose_states(
        gTransitions: array(4), gInitialState: array(4), gSegmentStates: array(4), blocks: INT, segments: INT, heads: INT,
        values: INT, condition_args: CONDITION,
    ):  # fmt: skip
        """The states before the `segments` of a head, for one of `blocks` blocks of columns. values: the number of columns of a
        state, and of N. condition_args: see launch_conditions.py."""
        if condition.is_skipped(condition_args):
            return
        high, low = smem.open()
        batch_head, block = divmod(cuda.blockIdx.x, blocks)
        sequence, head = divmod(batch_head, heads)
        first_state, first_transition, last = int32(sequence * segments), int32(sequence * (segments - 1)), int32(segments - 1)
        column = int32(COLUMNS * block)
        wg = warpgroup.id()
        if wg > 0:
            if SETMAXNREG:
                warpgroup.release_registers(loader_registers)
            part = int32(wg - 1)
            for p in range(last):
                m = warpgroup.load(gTransitions, STATE, (first_transition + p, head, LOADER_ROWS * part, values), aligned=True)
                rounded, high_tile, low_tile = bf16(m), high.claim(p), low.claim(p)
                warpgroup.store(subtile(high_tile, LOADER_ROWS, part), rounded)
                warpgroup.store(subtile(low_tile, LOADER_ROWS, part), m - fp32(rounded))
                high.publish(p)
                low.publish(p)
        else:
            if SETMAXNREG:
                warpgroup.claim_registers(composer_registers)
            s_t = warpgroup.load(gInitialState, STATE, (sequence, head, 0, column), 3, 2)
            for p in range(last):
                warpgroup.store(gSegmentStates, s_t, (first_state + p, head, 0, column), 3, 2)
                rounded = bf16(s_t)
                residual = bf16(s_t - fp32(rounded))
                n_t = warpgroup.load(gTransitions, STATE, (first_transition + p, head, 0, column), 3, 2)
                high_tile, low_tile = high.wait(p), low.wait(p)
                m_s = warpgroup.mm_ABt(rounded, high_tile)
                m_s = warpgroup.mma_ABt(m_s, residual, high_tile)
                m_s = warpgroup.mma_ABt(m_s, rounded, low_tile)
                s_t = warpgroup.wait(m_s) + n_t
                high.release(p)
                low.release(p)
            warpgroup.store(gSegmentStates, s_t, (first_state + last, head, 0, column), 3, 2)

    return compose_states, smem
