"""What the delta rule leaves of a state, for Hopper: delta_hopper.py without queries and outputs.

    u_t = beta_t (v_t - exp(g_t) k_t S_(t-1))        S_t = exp(g_t) S_(t-1) + k_t^T u_t

S may have more columns than values: v_t is 0 in those. There S is multiplied by what the tokens do to any state, whatever it
was, so that one pass from [0 | I] gives what a part of a sequence leaves of a state of 0, and the matrix that it multiplies
one by. TMA brings zeros for columns that values have not, and reads nothing.

Of each of a sequence's segments by themselves it is found so (`mapped`): maps_hopper.py adds up what they leave.

What has decayed to nothing by the end need not be walked: where there are decays `gSkipped` says of each sequence and head how
many chunks are left out at its beginning, with the state before them.

A chunk is what it is in delta_hopper.py, so the solver makes the same T. What is left of the weigher is a loader: one of its
warps has TMA bring keys and values, the others sum up the gates.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import col_index, divmod, equal, load, store, subtile, tile_max, truncate, warpgroup, where, zeros
from ops.for_attention.triangular_inverse import TRIANGLE
from tiles import bf16, fp16, fp32, ring, rt, shared, st, sv
from tiles.arguments import ENDS, INT, array, tiled

from . import delta_hopper
from .delta_decay import ROWS, Decay, NoDecay
from .delta_hopper import VECTORS
from .delta_solver import Solver
from .gates import DOWN
from .tokens import CHUNK, COLUMNS, Sequences, Span, assigned

REGISTERS = {1: (56, 104, 240), 2: (48, 96, 184)}  # consumers -> registers a thread of loader, solver and consumer
STAGES = 4  # chunks in flight
AHEAD = 3  # chunks that the solver may be ahead
SUMMING = warpgroup.WARPGROUP - 1  # warps of the loader that sum up gates, a chunk each in turn


@dataclass(frozen=True)
class Config(delta_hopper.Config):
    """A kernel's configuration: see delta_hopper.py. consumers: each has 64 columns of a state. mapped: do states begin as [0
    | 1], instead of given ones?"""

    mapped: bool = False

    def __str__(self):
        return f"states{', mapped' * self.mapped}, {super().__str__()}"


KEY_DIMS = 64, 128  # as padded
SIZES = tuple(itertools.product(KEY_DIMS, REGISTERS))  # padded key dim, consumers


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations. Without `everything`, varlen ones come in one size only, and fp16 is left out."""
    if arch == "sm_90a":
        for of, size, varlen in itertools.product((bf16, fp16) if everything else (bf16,), SIZES, (False, True)):
            if not varlen or size == (128, 2) or (everything and of is bf16):
                yield from (Config(*size, of, gated, varlen, mapped) for gated in (False, True) for mapped in (False, True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, STATE = config.consumers, config.dtype, rt(16, config.key_dim, fp32)
    VALUES, sequences = rt(16, CHUNK, INPUT), Sequences(config.varlen)
    SKIPS, MAPPED, decay = config.gated and not config.mapped, config.mapped, (Decay if config.gated else NoDecay)(INPUT)
    SOLVER, LOADER, (keep, solve, claim) = CONSUMERS, CONSUMERS + 1, REGISTERS[CONSUMERS]
    WARPS, READERS = warpgroup.WARPGROUP, CONSUMERS + 1  # warpgroups that read keys
    solver, readers = Solver(sequences, decay, READERS), CONSUMERS * WARPS
    smem = shared(
        k=ring(config.key, STAGES, readers + WARPS),
        v=ring(config.values, STAGES, readers),
        t=ring(st(CHUNK, CHUNK, INPUT), AHEAD, readers, writers=WARPS),
        beta=ring(sv(CHUNK, fp32), VECTORS, WARPS, writers=1),
        b=ring(sv(CHUNK, fp32), VECTORS, WARPS, writers=1),
        since=ring(sv(CHUNK, fp32), VECTORS, readers + WARPS, writers=1),
        factor=ring(sv(CHUNK, fp32), VECTORS, readers, writers=1),
        high=TRIANGLE,
        low=TRIANGLE,
    )

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gK: tiled(config.key, unit=1), gV: tiled(config.values, unit=1), gBeta: array(3), gGates: array(3), gStart: array(4),
        gState: array(4), gSkipped: array(3), gEnds: ENDS, length: INT, blocks: INT, segments: INT, walked: INT, heads: INT,
        group: INT, values: INT,
    ):  # fmt: skip
        """The state after each of `walked` of the `segments` of a sequence. values: how many of its columns have values; those
        of the others are 0. `group` value heads share a key head; each is `blocks` blocks of columns wide."""
        k, v, t, beta, b, since, factor, high, low = smem.open()
        me = warpgroup.id()
        block, segment, value_head, sequence = assigned(cuda.blockIdx.x, blocks, walked, heads * group)
        head, _ = divmod(value_head, group)
        whole = sequences.segment(gEnds, sequence, length, segment, segments)
        skipped = int32(tile_max(load(gSkipped, ROWS, (sequence, value_head, 0)))) if SKIPS else int32(0)
        span = Span(int32(min(whole.end, whole.first + CHUNK * skipped)), whole.end, whole.batch)
        n = span.chunks()
        if me == LOADER:
            warpgroup.release_registers(keep)
            warp = warpgroup.rank()
            if warp == 0:
                for j in range(n):
                    k.fill(j, gK, (span.batch, span.token(j), head))
                    v.fill(j, gV, (span.batch, span.token(j), value_head, block))
            else:
                betas = truncate(gBeta, 1, span.end)
                for j in range(warp - 1, n, SUMMING):
                    at = span.batch, span.token(j), value_head
                    strength, g = load(betas, DOWN, at, cols=1), decay.load(gGates, span, at)
                    store(beta.claim(j), strength)
                    beta.publish(j)
                    decay.sum_up(b, since, factor, j, g)
        elif me == SOLVER:
            warpgroup.release_registers(solve)
            for j in range(n):
                solver.solve(j, span.left(j), (k, t, beta, b, since), (high, low))
        else:
            warpgroup.claim_registers(claim)
            column = COLUMNS * (CONSUMERS * block + me)
            if MAPPED:
                one = equal(warpgroup.row_index(ROWS) + float32(column - values), col_index(STATE))
                s_t = where(one, 1.0, zeros(STATE))
            else:
                s_t = warpgroup.load(gStart, STATE, (sequence, value_head, 0, column), 3, 2) * (0.0 if skipped > 0 else 1.0)
            for j in range(n):
                keys = k.wait(j)
                sequences.clear(keys, span.left(j), READERS)
                known = warpgroup.mm_ABt(INPUT(s_t), keys)
                values = fp32(warpgroup.load_transposed(subtile(v.wait(j), CHUNK, 0, COLUMNS, me), VALUES))
                v.release(j)
                before, added = decay.wait(since, j), decay.wait(factor, j)
                strong, known = decay.is_strong(before), warpgroup.wait(known)
                u, _ = decay.begin(sequences.without_others(values, span.left(j)), known, known, before, added, strong)
                u = warpgroup.wait(warpgroup.mm_AB(INPUT(u), t.wait(j)))
                t.release(j)
                s_t = decay.decayed(s_t, before, strong)
                s_t = warpgroup.wait(warpgroup.mma_AB(s_t, INPUT(decay.remaining(u, added, strong)), keys))
                k.release(j)
                decay.release(factor, j)
                s_t = decay.decayed(s_t, before, not strong)
                decay.release(since, j)
            warpgroup.store(gState, s_t, (sequence * walked + segment, value_head, 0, column), 3, 2)

    return scan, smem
