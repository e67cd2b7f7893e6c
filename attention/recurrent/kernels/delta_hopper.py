"""The delta rule for Hopper, chunk by chunk, with decays that are one number a token and head (or none).

    u_t = beta_t (v_t - exp(g_t) k_t S_(t-1))        S_t = exp(g_t) S_(t-1) + k_t^T u_t        o_t = scale q_t S_t

In a chunk of 64 tokens every u depends on those before it. Seen from where the chunk begins, nothing decays: with b the
running sum of the gates and U' = exp(-b) U,

    A = tril(beta K K^T, -1)                T = (I + A)^-1 beta                     (WY representation; Yang et al. 2024)
    U' = T (exp(-b) V - K S)                O = scale exp(b) (Q S + tril(Q K^T) U')
    S = exp(b_last) (S + K^T U')

A strong chunk decays by more than U' could hold. There the decays stand where no exponent is ever positive,

    A = tril(beta exp(b - b^T) * K K^T, -1)                 U = T (V - exp(b) K S)
    S = exp(b_last) S + (exp(b_last - b) K)^T U             O = scale (exp(b) Q S + tril(exp(b - b^T) * Q K^T) U)

so that nothing overflows.

T and the weights of U know nothing of the state. So one warpgroup, the solver, makes T for the chunks to come, another, the
weigher, makes the weights (has TMA bring what all need, and sums up the gates, a chunk a warp), while consumers, of 64 value
columns each, carry the state through the chunk that is ready. They hold it transposed, 64 x Dk, and U and O as well: the
product of one step, rounded, is the left operand of the next, and never leaves the registers.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, load, store, subtile, truncate, warpgroup
from ops.for_attention.triangular_inverse import TRIANGLE
from tiles import bf16, dtype, fp16, fp32, ring, rt, shared, st, sv
from tiles.arguments import ENDS, FLOAT, INT, array, tiled

from .delta_decay import Decay, NoDecay
from .delta_solver import Solver
from .gates import DOWN
from .tokens import CHUNK, COLUMNS, Sequences, assigned
from .transposed_state import TransposedState

REGISTERS = {1: (88, 104, 256), 2: (72, 88, 176)}  # consumers -> registers a thread of weigher, solver and consumer
STAGES = {64: 4, 128: 3, 256: 2}  # padded key dim: chunks in flight
WIDE = 128  # key dim, beyond which a state takes half of a consumer's registers: one consumer
AHEAD = 2  # chunks that the solver and the weigher may be ahead
VECTORS = 8  # chunks whose gates are kept: two for each warp that sums up


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. consumers: each has 64 value columns. gated: are there
    decays? varlen: do the sequences follow one another in a single batch?"""

    key_dim: int
    consumers: int
    dtype: dtype
    gated: bool
    varlen: bool = False

    @property
    def stages(self):
        """Chunks in flight."""
        return STAGES[self.key_dim]

    @property
    def threads(self):
        """Threads of a block: the consumers, the solver, the weigher."""
        return warpgroup.THREADS * (self.consumers + 2)

    @property
    def key(self):
        """A chunk's tile of Q or K."""
        return st(CHUNK, self.key_dim, self.dtype)

    @property
    def values(self):
        """The tile of V for a chunk, of all consumers."""
        return st(CHUNK, COLUMNS * self.consumers, self.dtype)

    @property
    def value(self):
        """A consumer's tile of the output."""
        return st(CHUNK, COLUMNS, self.dtype)

    def __str__(self):
        kind = f"{', gated' * self.gated}{', varlen' * self.varlen}"
        return f"Dk {self.key_dim} {self.dtype}, {COLUMNS * self.consumers} columns{kind}"


SIZES = (64, 1), (64, 2), (128, 1), (128, 2), (256, 1)  # padded key dim, consumers


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations. Without `everything`, varlen ones come in one size only, and fp16 is left out."""
    if arch == "sm_90a":
        for of, size, varlen in itertools.product((bf16, fp16) if everything else (bf16,), SIZES, (False, True)):
            if not varlen or size == (128, 2) or (everything and of is bf16):
                yield from (Config(*size, of, gated, varlen) for gated in (False, True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, STATE = config.consumers, config.dtype, rt(16, config.key_dim, fp32)
    sequences, decay = Sequences(config.varlen), (Decay if config.gated else NoDecay)(INPUT)
    transposed, solver = TransposedState(config.key_dim, INPUT, sequences), Solver(sequences, decay, config.consumers + 2)
    SOLVER, WEIGHER, (weigh, solve, claim) = CONSUMERS, CONSUMERS + 1, REGISTERS[CONSUMERS]
    WARPS, GROUPS = warpgroup.WARPGROUP, CONSUMERS + 2
    readers = CONSUMERS * WARPS
    smem = shared(
        q=ring(config.key, config.stages, readers + WARPS),
        k=ring(config.key, config.stages, readers + 2 * WARPS),
        v=ring(config.values, config.stages, readers),
        t=ring(st(CHUNK, CHUNK, INPUT), AHEAD, readers, writers=WARPS),
        p=ring(st(CHUNK, CHUNK, INPUT), AHEAD, readers, writers=WARPS),
        beta=ring(sv(CHUNK, fp32), VECTORS, WARPS, writers=1),
        b=ring(sv(CHUNK, fp32), VECTORS, 2 * WARPS, writers=1),
        since=ring(sv(CHUNK, fp32), VECTORS, readers + 2 * WARPS, writers=1),
        factor=ring(sv(CHUNK, fp32), VECTORS, readers, writers=1),
        high=TRIANGLE,
        low=TRIANGLE,
        out=st(CHUNK * CONSUMERS, COLUMNS, INPUT),
    )

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gQ: tiled(config.key, unit=1), gK: tiled(config.key, unit=1), gV: tiled(config.values, unit=1), gBeta: array(3),
        gGates: array(3), gO: sequences.output(config.value), gStart: array(4), gState: array(4), gEnds: ENDS,
        length: INT, blocks: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The outputs of a segment, and the state after it. Each of the `segments` of a sequence has thread blocks of its own,
        and begins with a state of gStart. `group` value heads share a key head; each is `blocks` blocks of columns wide."""
        q, k, v, t, p, beta, b, since, factor, high, low, out = smem.open()
        me = warpgroup.id()
        block, segment, value_head, sequence = assigned(cuda.blockIdx.x, blocks, segments, heads * group)
        head, _ = divmod(value_head, group)
        span = sequences.segment(gEnds, sequence, length, segment, segments)
        n = span.chunks()
        if me == WEIGHER:
            warpgroup.release_registers(weigh)
            betas = truncate(gBeta, 1, span.end)
            warp = warpgroup.rank()
            at = span.batch, span.token(max(int32(AHEAD - WARPS + warp), 0)), value_head
            strength, g = load(betas, DOWN, at, cols=1), decay.load(gGates, span, at)
            for j in range(-WARPS, n + 1):  # chunk j comes, chunk j - 1 is weighed, each warp sums up one of the next
                if j >= 0 and j < n:
                    token = span.token(j)
                    k.fill(j, gK, (span.batch, token, head))
                    q.fill(j, gQ, (span.batch, token, head))
                    v.fill(j, gV, (span.batch, token, value_head, block))
                if j > 0:
                    weighed = j - 1
                    keys = k.wait(weighed)
                    sequences.clear(keys, span.left(weighed), GROUPS)
                    s = warpgroup.wait(warpgroup.mm_ABt(q.wait(weighed), keys))
                    k.release(weighed)
                    q.release(weighed)
                    s = decay.scores(s, decay.wait(since, weighed), decay.wait(b, weighed))
                    decay.release(since, weighed)
                    decay.release(b, weighed)
                    warpgroup.store(p.claim(weighed), warpgroup.causal(s, 0, 0.0))
                    p.publish(weighed)
                if j % WARPS == 0:
                    mine = int32(j + AHEAD + warp)
                    if mine >= 0 and mine < n:
                        store(beta.claim(mine), strength)
                        beta.publish(mine)
                        decay.sum_up(b, since, factor, mine, g)
                    at = span.batch, span.token(mine + WARPS), value_head
                    strength, g = load(betas, DOWN, at, cols=1), decay.load(gGates, span, at)
        elif me == SOLVER:
            warpgroup.release_registers(solve)
            for j in range(n):
                solver.solve(j, span.left(j), (k, t, beta, b, since), (high, low))
        else:
            warpgroup.claim_registers(claim)
            column, mine = COLUMNS * (CONSUMERS * block + me), subtile(out, CHUNK, me)
            s_t = warpgroup.load(gStart, STATE, (sequence * segments + segment, value_head, 0, column), 3, 2)
            for j in range(n):
                keys = k.wait(j)
                sequences.clear(keys, span.left(j), GROUPS)
                u, o = transposed.read(s_t, keys, q.wait(j))
                q.release(j)
                values = fp32(warpgroup.load_transposed(subtile(v.wait(j), CHUNK, 0, COLUMNS, me), transposed.values))
                v.release(j)
                before, added = decay.wait(since, j), decay.wait(factor, j)
                strong = decay.is_strong(before)
                u, o = decay.begin(sequences.without_others(values, span.left(j)), u, o, before, added, strong)
                u = warpgroup.wait(warpgroup.mm_AB(INPUT(u), t.wait(j)))
                t.release(j)
                low = INPUT(u)
                s_t = decay.decayed(s_t, before, strong)
                s_t = warpgroup.mma_AB(s_t, INPUT(decay.remaining(u, added, strong)), keys)
                o = warpgroup.mma_ABt(o, low, p.wait(j))
                decay.release(factor, j)
                s_t = decay.decayed(warpgroup.wait(s_t, newer=1), before, not strong)
                k.release(j)
                o = decay.end(warpgroup.wait(o), before, strong) * scale
                decay.release(since, j)
                p.release(j)
                transposed.store(gO, mine, o, span, span.token(j), value_head, CONSUMERS * block + me)
            warpgroup.store_wait()
            if segment == segments - 1:
                warpgroup.store(gState, s_t, (sequence, value_head, 0, column), 3, 2)
                sequences.store_nobodys(gO, gEnds, sequence, length, value_head, CONSUMERS * block + me)

    return scan, smem
