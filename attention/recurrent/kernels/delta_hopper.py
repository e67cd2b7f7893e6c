"""The delta rule for Hopper, chunk by chunk, with decays that are one number a token and head (or none).

    u_t = beta_t (v_t - exp(g_t) k_t S_(t-1))        S_t = exp(g_t) S_(t-1) + k_t^T u_t        o_t = scale q_t S_t

In a chunk of 64 tokens every u depends on those before it. With b the running sum of the gates,

    A = tril(beta exp(b - b^T) * K K^T, -1)      T = (I + A)^-1 beta              (WY representation; Yang et al. 2024)
    U = T (V - exp(b) K S)                       O = scale (exp(b) Q S + tril(exp(b - b^T) * Q K^T) U)
    S = exp(b_last) S + (exp(b_last - b) K)^T U

T and the weights of U know nothing of the state. So one warpgroup, the solver, makes T for the chunks to come, another, the
weigher, makes the weights (and has TMA bring what all need), while consumers, of 64 value columns each, carry the state through
the chunk that is ready. They hold it transposed, 64 x Dk, and U and O as well: the product of one step, rounded, is the left
operand of the next, and never leaves the registers.

Every exponent is a sum of gates, none is ever positive: nothing overflows however strong the decay.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda

from ops import cumsum, divmod, exp, last_element, load, minimum, subtile, tile_sum, truncate, warpgroup, zeros
from ops.for_attention.triangular_inverse import DIAGONAL, TRIANGLE, inverse_transposed
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, static, sv
from tiles.arguments import ENDS, FLOAT, INT, array, tiled

from .tokens import CHUNK, COLUMNS, Sequences
from .transposed_state import TransposedState

REGISTERS = {1: (104, 104, 232), 2: (72, 88, 176)}  # consumers -> registers a thread of weigher, solver and consumer
STAGES = {64: 4, 128: 3}  # padded key dim: chunks in flight
AHEAD = 2  # chunks that the solver may be ahead


@dataclass(frozen=True)
class Config:
    """A kernel's shape: key dim as padded, consumers of 64 value columns each. gated: there are decays. varlen: several
    sequences lie one behind the other in one batch."""

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
    def value(self):
        """A consumer's tile of a chunk of V."""
        return st(CHUNK, COLUMNS, self.dtype)

    def __str__(self):
        kind = f"{', gated' * self.gated}{', varlen' * self.varlen}"
        return f"Dk {self.key_dim} {self.dtype}, {COLUMNS * self.consumers} columns{kind}"


SCORES = rt(16, CHUNK, fp32)
ROWS, ALONG = SCORES.col_vec, SCORES.row_vec
SIZES = tuple(itertools.product(STAGES, REGISTERS))  # padded key dim, consumers


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The legal configurations: of varlen ones and of fp16 not all, unless `everything`."""
    if arch == "sm_90a":
        for of, size, varlen in itertools.product((bf16, fp16) if everything else (bf16,), SIZES, (False, True)):
            if not varlen or size == (128, 2) or (everything and of is bf16):
                yield from (Config(*size, of, gated, varlen) for gated in (False, True))


@static
class NoDecay:
    """Nothing decays: vectors of sums and factors are neither made nor read."""

    @inlined
    def load(self, gGates, span, j, head):
        """The gates of this warp's tokens of the j-th chunk."""
        return 0.0

    @inlined
    def sum_up(self, g, vector, b, since, until, j):
        """Hand on the running sums b of a chunk's gates, of which each warp brings 16, and what tokens decay by since the chunk
        began and until it ends."""

    @inlined
    def wait(self, vectors, j):
        """A chunk's vector of sums or factors."""
        return 0

    @inlined
    def release(self, vectors, j):
        """A chunk's vector may be overwritten."""

    @inlined
    def decayed(self, x, vector):
        """x, each of its columns times the vector's element."""
        return x

    @inlined
    def decayed_state(self, s_t, vector):
        """The state after the chunk: times the vector's last element."""
        return s_t

    @inlined
    def scores(self, s, sums):
        """s, its element (i, j) decayed from token j to i."""
        return s


class Decay(NoDecay):
    """One gate a token and head."""

    @inlined
    def load(self, gGates, span, j, head):
        return warpgroup.load(truncate(gGates, 1, span.end), ROWS, (span.batch, span.token(j), head), cols=1)

    @inlined
    def sum_up(self, g, vector, b, since, until, j):
        warpgroup.store(vector, g)
        warpgroup.sync()
        g = load(vector, ALONG)
        sums = warpgroup.own_rows(cumsum(g))
        warpgroup.store(b.claim(j), sums)
        b.publish(j)
        warpgroup.store(since.claim(j), exp(sums))
        since.publish(j)
        warpgroup.store(until.claim(j), exp(minimum(tile_sum(g) - sums, 0.0)))
        until.publish(j)

    @inlined
    def wait(self, vectors, j):
        return vectors.wait(j)

    @inlined
    def release(self, vectors, j):
        vectors.release(j)

    @inlined
    def decayed(self, x, vector):
        return x * load(vector, ALONG)

    @inlined
    def decayed_state(self, s_t, vector):
        return s_t * last_element(vector)

    @inlined
    def scores(self, s, sums):
        return s * exp(warpgroup.causal(zeros(SCORES) + warpgroup.load(sums, ROWS) - load(sums, ALONG), 0, 0.0))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, STATE = config.consumers, config.dtype, rt(16, config.key_dim, fp32)
    sequences, decay = Sequences(config.varlen), Decay() if config.gated else NoDecay()
    transposed = TransposedState(config.key_dim, INPUT, sequences)
    SOLVER, WEIGHER, (weigh, solve, claim) = CONSUMERS, CONSUMERS + 1, REGISTERS[CONSUMERS]
    group, GROUPS = warpgroup.WARPGROUP, CONSUMERS + 2
    readers = CONSUMERS * group
    smem = shared(
        q=ring(config.key, config.stages, readers + group),
        k=ring(config.key, config.stages, readers + 2 * group),
        v=ring(config.value, config.stages * CONSUMERS, group),
        t=ring(st(CHUNK, CHUNK, INPUT), AHEAD, readers, writers=group),
        p=ring(st(CHUNK, CHUNK, INPUT), AHEAD, readers, writers=group),
        b=ring(sv(CHUNK, fp32), AHEAD, 2 * group, writers=group),
        beta=ring(sv(CHUNK, fp32), AHEAD, group, writers=group),
        since=ring(sv(CHUNK, fp32), AHEAD, readers, writers=group),
        until=ring(sv(CHUNK, fp32), AHEAD, readers, writers=group),
        gates=sv(CHUNK, fp32),
        high=TRIANGLE,
        low=TRIANGLE,
        inverse_high=DIAGONAL,
        inverse_low=DIAGONAL,
        out=st(CHUNK * CONSUMERS, COLUMNS, INPUT),
    )

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gQ: tiled(config.key, unit=1), gK: tiled(config.key, unit=1), gV: tiled(config.value, unit=1), gBeta: array(3),
        gGates: array(3), gO: sequences.output(config.value), gStart: array(4), gState: array(4), gEnds: ENDS,
        length: INT, blocks: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """O and the state after each sequence. `group` value heads, of `blocks` blocks of columns each, share a key head."""
        q, k, v, t, p, b, beta, since, until, gates, high, low, inverse_high, inverse_low, out = smem.open()
        me = warpgroup.id()
        value_head, block = divmod(cuda.blockIdx.x, blocks)
        sequence, value_head = divmod(value_head, heads * group)
        head, _ = divmod(value_head, group)
        span = sequences.span(gEnds, sequence, length)
        n = span.chunks()
        if me == WEIGHER:
            warpgroup.release_registers(weigh)
            betas = truncate(gBeta, 1, span.end)
            g = decay.load(gGates, span, 0, value_head)
            strength = warpgroup.load(betas, ROWS, (span.batch, span.first, value_head), cols=1)
            for j in range(n + 1):  # chunk j comes, chunk j - 1 is weighed; gates first, for the solver waits for nothing else
                token, weighed = span.token(j), j - 1
                if j > 0:
                    warpgroup.store(beta.claim(weighed), strength)
                    beta.publish(weighed)
                    strength = warpgroup.load(betas, ROWS, (span.batch, token, value_head), cols=1)
                    decay.sum_up(g, gates, b, since, until, weighed)
                    g = decay.load(gGates, span, j, value_head)
                if j < n:
                    k.fill(j, gK, (span.batch, token, head))
                    q.fill(j, gQ, (span.batch, token, head))
                    for c in range(CONSUMERS):
                        v.fill(CONSUMERS * j + c, gV, (span.batch, token, value_head, CONSUMERS * block + c))
                if j > 0:
                    keys = k.wait(weighed)
                    sequences.clear(keys, span.left(weighed), GROUPS)
                    s = warpgroup.wait(warpgroup.mm_ABt(q.wait(weighed), keys))
                    k.release(weighed)
                    q.release(weighed)
                    s = warpgroup.causal(decay.scores(s, decay.wait(b, weighed)), 0, 0.0) * scale
                    warpgroup.store(p.claim(weighed), s)
                    p.publish(weighed)
                    decay.release(b, weighed)
        elif me == SOLVER:
            warpgroup.release_registers(solve)
            for j in range(n):
                keys = k.wait(j)
                sequences.clear(keys, span.left(j), GROUPS)
                s = warpgroup.wait(warpgroup.mm_ABt(keys, keys))
                k.release(j)
                a = decay.scores(s, decay.wait(b, j)) * warpgroup.load(beta.wait(j), ROWS)
                decay.release(b, j)
                x = inverse_transposed(a, high, low, inverse_high, inverse_low)
                warpgroup.store(t.claim(j), x * warpgroup.load(beta.wait(j), ROWS))
                t.publish(j)
                beta.release(j)
        else:
            warpgroup.claim_registers(claim)
            column, mine = COLUMNS * (CONSUMERS * block + me), subtile(out, CHUNK, me)
            s_t = warpgroup.load(gStart, STATE, (sequence, value_head, 0, column), 3, 2)
            for j in range(n):
                keys = k.wait(j)
                sequences.clear(keys, span.left(j), GROUPS)
                u, o = transposed.read(s_t, keys, q.wait(j))
                q.release(j)
                values = fp32(warpgroup.load_transposed(v.wait(CONSUMERS * j + me), transposed.values))
                v.release(CONSUMERS * j + me)
                before, after = decay.wait(since, j), decay.wait(until, j)
                u = sequences.without_others(values, span.left(j)) - decay.decayed(u, before)
                o = decay.decayed(o, before) * scale
                s_t = decay.decayed_state(s_t, before)
                decay.release(since, j)
                u = warpgroup.wait(warpgroup.mm_AB(INPUT(u), t.wait(j)))
                t.release(j)
                low = INPUT(u)
                s_t = warpgroup.wait(warpgroup.mma_AB(s_t, INPUT(decay.decayed(u, after)), keys))
                decay.release(until, j)
                k.release(j)
                o = warpgroup.wait(warpgroup.mma_ABt(o, low, p.wait(j)))
                p.release(j)
                transposed.store(gO, mine, o, span, span.token(j), value_head, CONSUMERS * block + me)
            warpgroup.store_wait()
            warpgroup.store(gState, s_t, (sequence, value_head, 0, column), 3, 2)

    return scan, smem
