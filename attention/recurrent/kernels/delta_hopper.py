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
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import cumsum, divmod, exp, last_element, load, minimum, subtile, tile_sum, truncate, warpgroup, zeros
from ops.for_attention.triangular_inverse import DIAGONAL, TRIANGLE, inverse_transposed
from tiles import dtype, fp32, inlined, ring, rt, shared, st, sv
from tiles.arguments import ENDS, FLOAT, INT, array, tiled

from .tokens import CHUNK, COLUMNS, span
from .transposed_state import turned

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


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, GATED, VARLEN, INPUT = config.consumers, config.gated, config.varlen, config.dtype
    SOLVER, WEIGHER, (weigh, solve, claim) = CONSUMERS, CONSUMERS + 1, REGISTERS[CONSUMERS]
    STATE, TURNED = rt(16, config.key_dim, fp32), rt(16, CHUNK, INPUT)
    WEIGHTS = rt(16, CHUNK, fp32)
    ROWS, G = WEIGHTS.col_vec, WEIGHTS.row_vec
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
    VALUES = tiled(config.value, unit=1)
    tokens, (read, without_others, hand_out) = span(VARLEN), turned(config.key_dim, INPUT, VARLEN)

    @inlined
    def gate(decays, batch, token, head):
        """The gates of this warp's tokens of a chunk."""
        return warpgroup.load(decays, ROWS, (batch, token, head), cols=1) if GATED else 0.0

    @inlined
    def add_up(g, vector, b, since, until, j):
        """Hand on the running sums of a chunk's gates, of which each warp brings 16, and what tokens decay by since the chunk
        began and until it ends."""
        if GATED:
            warpgroup.store(vector, g)
            warpgroup.sync()
            g = load(vector, G)
            sums = warpgroup.own_rows(cumsum(g))
            warpgroup.store(b.claim(j), sums)
            b.publish(j)
            warpgroup.store(since.claim(j), exp(sums))
            since.publish(j)
            warpgroup.store(until.claim(j), exp(minimum(tile_sum(g) - sums, 0.0)))
            until.publish(j)

    @inlined
    def taken(b, j):
        """A shared vector of a chunk's sums or decays."""
        return b.wait(j) if GATED else 0

    @inlined
    def given(b, j):
        """It is not needed any more."""
        if GATED:
            b.release(j)

    @inlined
    def decay(x, vector):
        """x, each of its columns times the vector's element."""
        if GATED:
            return x * load(vector, G)
        else:
            return x

    @inlined
    def whole_decay(x, vector):
        """x, times the vector's last element."""
        if GATED:
            return x * last_element(vector)
        else:
            return x

    @inlined
    def spread(s, sums):
        """s, its element (i, j) decayed from token j to i."""
        if GATED:
            return s * exp(warpgroup.causal(zeros(WEIGHTS) + warpgroup.load(sums, ROWS) - load(sums, G), 0, 0.0))
        else:
            return s

    @inlined
    def whole(k, j, rows):
        """The j-th tile of keys, with zeros from row `rows` on: another sequence's keys, maybe NaN. All warps clear them."""
        keys = k.wait(j)
        if VARLEN and rows < CHUNK:
            warpgroup.zero_rows(keys, rows, GROUPS)
        return keys

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gQ: tiled(config.key, unit=1), gK: tiled(config.key, unit=1), gV: VALUES, gBeta: array(3), gGates: array(3),
        gO: array(4, INPUT) if VARLEN else VALUES, gStart: array(4), gState: array(4), gEnds: ENDS,
        length: INT, blocks: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """O and the state after each sequence. `group` value heads, of `blocks` blocks of columns each, share a key head."""
        q, k, v, t, p, b, beta, since, until, gates, high, low, inverse_high, inverse_low, out = smem.open()
        me = warpgroup.id()
        value_head, block = divmod(cuda.blockIdx.x, blocks)
        sequence, value_head = divmod(value_head, heads * group)
        head, _ = divmod(value_head, group)
        first, end, batch = tokens(gEnds, sequence, length)
        n = int32((end - first + CHUNK - 1) // CHUNK)
        if me == WEIGHER:
            warpgroup.release_registers(weigh)
            decays, betas = truncate(gGates, 1, end), truncate(gBeta, 1, end)
            g = gate(decays, batch, first, value_head)
            strength = warpgroup.load(betas, ROWS, (batch, first, value_head), cols=1)
            for j in range(n + 1):  # chunk j comes, chunk j - 1 is weighed; gates first, for the solver waits for nothing else
                token = int32(first + CHUNK * j)
                if j > 0:
                    warpgroup.store(beta.claim(j - 1), strength)
                    beta.publish(j - 1)
                    strength = warpgroup.load(betas, ROWS, (batch, token, value_head), cols=1)
                    add_up(g, gates, b, since, until, j - 1)
                    g = gate(decays, batch, token, value_head)
                if j < n:
                    k.fill(j, gK, (batch, token, head))
                    q.fill(j, gQ, (batch, token, head))
                    for c in range(CONSUMERS):
                        v.fill(CONSUMERS * j + c, gV, (batch, token, value_head, CONSUMERS * block + c))
                if j > 0:
                    keys = whole(k, j - 1, end - token + CHUNK)
                    s = warpgroup.wait(warpgroup.mm_ABt(q.wait(j - 1), keys))
                    k.release(j - 1)
                    q.release(j - 1)
                    s = warpgroup.causal(spread(s, taken(b, j - 1)), 0, 0.0) * scale
                    warpgroup.store(p.claim(j - 1), s)
                    p.publish(j - 1)
                    given(b, j - 1)
        elif me == SOLVER:
            warpgroup.release_registers(solve)
            for j in range(n):
                token = int32(first + CHUNK * j)
                keys = whole(k, j, end - token)
                s = warpgroup.wait(warpgroup.mm_ABt(keys, keys))
                k.release(j)
                a = spread(s, taken(b, j)) * warpgroup.load(beta.wait(j), ROWS)
                given(b, j)
                x = inverse_transposed(a, high, low, inverse_high, inverse_low)
                warpgroup.store(t.claim(j), x * warpgroup.load(beta.wait(j), ROWS))
                t.publish(j)
                beta.release(j)
        else:
            warpgroup.claim_registers(claim)
            column, mine = COLUMNS * (CONSUMERS * block + me), subtile(out, CHUNK, me)
            s_t = warpgroup.load(gStart, STATE, (sequence, value_head, 0, column), 3, 2)
            for j in range(n):
                token = int32(first + CHUNK * j)
                keys = whole(k, j, end - token)
                u, o = read(s_t, keys, q.wait(j))
                q.release(j)
                values = fp32(warpgroup.load_transposed(v.wait(CONSUMERS * j + me), TURNED))
                v.release(CONSUMERS * j + me)
                before, after = taken(since, j), taken(until, j)
                u = without_others(values, end - token) - decay(u, before)
                o = decay(o, before) * scale
                s_t = whole_decay(s_t, before)
                given(since, j)
                u = warpgroup.wait(warpgroup.mm_AB(INPUT(u), t.wait(j)))
                t.release(j)
                low = INPUT(u)
                s_t = warpgroup.wait(warpgroup.mma_AB(s_t, INPUT(decay(u, after)), keys))
                given(until, j)
                k.release(j)
                o = warpgroup.wait(warpgroup.mma_ABt(o, low, p.wait(j)))
                p.release(j)
                hand_out(gO, mine, o, batch, token, end, value_head, CONSUMERS * block + me)
            warpgroup.store_wait()
            warpgroup.store(gState, s_t, (sequence, value_head, 0, column), 3, 2)

    return scan, smem
