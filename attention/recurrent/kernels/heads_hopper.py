"""Mamba-2 for Hopper where heads share queries and keys, chunk by chunk.

    S_t = exp(g_t) S_(t-1) + w_t k_t^T v_t        o_t = q_t S_t        g_t and w_t of each head, q_t and k_t of all

Seen from where a chunk begins, nothing decays: with b the running sum of its gates, in powers of 2,

    V' = exp2(-b) w V        O = exp2(b) (Q S + tril(Q K^T) V')        S = exp2(b_last) (S + K^T V')

tril(Q K^T) is then the same for all heads. One warpgroup, the weigher, makes it (and sums up the gates, each warp those of a
chunk and head), while consumers, of 64 value columns of a head each, carry the state through the chunk that is ready,
transposed, 64 x Dk. They have the three products in flight at once.

A strong chunk decays by more than numbers can hold. There a consumer weighs the scores itself, as chunk_hopper.py does; no
exponent is then positive.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, exp2, last_element, load, silu, store, subtile, tile_min, transpose, truncate, warpgroup
from tiles import bf16, dtype, fp32, ring, rt, shared, st, sv
from tiles.arguments import ENDS, INT, array, tiled

from .gates import ALONG, DOWN, ROWS, BySteps
from .results import Outputs
from .tokens import CHUNK, COLUMNS, Sequences, assigned
from .transposed_state import TransposedState

CONSUMERS = 2
REGISTERS = 24, 72, 208  # a thread of the producer, the weigher and a consumer
KEY_DIMS = 64, 128  # as padded
AHEAD = 2  # chunks that the weigher may be ahead
VECTORS = 8  # chunks whose gates are kept
LEAST = 2.0**-90  # a chunk that decays by less is strong


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. gate: the kind of gates. result: what a pass computes.
    varlen: do the sequences follow one another in a single batch?"""

    key_dim: int
    dtype: dtype
    gate: BySteps
    result: Outputs
    varlen: bool = False

    @property
    def threads(self):
        """Threads of a block: the consumers, the weigher, the producer."""
        return warpgroup.THREADS * (CONSUMERS + 2)

    @property
    def key(self):
        """The tile of Q or K for a chunk."""
        return st(CHUNK, self.key_dim, self.dtype)

    @property
    def value(self):
        """A consumer's tile of V, Z or the output for a chunk."""
        return st(CHUNK, COLUMNS, self.dtype)

    @property
    def stages(self):
        """Chunks in flight."""
        return 2 if self.result.silu else 3

    def __str__(self):
        kinds = str(self.gate), str(self.result), "varlen" * self.varlen
        return ", ".join(filter(None, (f"Dk {self.key_dim} {self.dtype}", *kinds)))


def serves(form, columns: int) -> bool:
    """Can this kernel do the work? form: the chunk_hopper.Config that would do it otherwise. columns: how many blocks of 64
    value columns, of all heads together, share a key head."""
    fits = isinstance(form.gate, BySteps) and form.dtype is bf16 and form.key_dim in KEY_DIMS
    return fits and isinstance(form.result, Outputs) and columns % CONSUMERS == 0


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations; without `everything` those of the plainest result only."""
    if arch == "sm_90a":
        full = BySteps(softplus=True), Outputs(skip=True, silu=True)
        for key_dim, form, varlen in itertools.product(KEY_DIMS, ((BySteps(), Outputs()), full), (False, True)):
            if everything or (form is not full and not varlen):
                yield Config(key_dim, bf16, *form, varlen)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    WEIGHER, PRODUCER, WARPS, (keep, weighs, claim) = CONSUMERS, CONSUMERS + 1, warpgroup.WARPGROUP, REGISTERS
    INPUT, STATE, STAGES, gate, result = config.dtype, rt(16, config.key_dim, fp32), config.stages, config.gate, config.result
    ROUND, GROUPS, WEIGHTS = WARPS // CONSUMERS, CONSUMERS + 1, rt(16, CHUNK, INPUT)
    readers = CONSUMERS * WARPS
    sequences = Sequences(config.varlen)
    state = TransposedState(config.key_dim, INPUT, sequences)
    KEYS_OF_TMA, VALUES_OF_TMA = tiled(config.key, unit=1), tiled(config.value, unit=1)
    keys = ring(config.key, STAGES, readers + WARPS)
    values = ring(config.value, STAGES * CONSUMERS, WARPS)
    vectors = ring(sv(CHUNK, fp32), VECTORS * CONSUMERS, WARPS, writers=1)
    smem = shared(
        q=keys,
        k=keys,
        v=values,
        z=values if result.silu else ring(config.value, 1, WARPS),
        p=ring(st(CHUNK, CHUNK, INPUT), AHEAD, readers, writers=WARPS),
        b=vectors,
        a=vectors,
        since=vectors,
        factor=vectors,
        out=st(CHUNK * CONSUMERS, COLUMNS, INPUT),
    )

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gQ: KEYS_OF_TMA, gK: KEYS_OF_TMA, gV: VALUES_OF_TMA, gZ: VALUES_OF_TMA, gGates: array(3), gRate: array(2),
        gBias: array(2), gSkip: array(2), gO: sequences.output(config.value), gStart: array(4), gState: array(4), gEnds: ENDS,
        length: INT, blocks: INT, heads: INT, group: INT, width: INT,
    ):  # fmt: skip
        """The outputs and the state after each sequence. `group` value heads share a key head; each is `width` blocks of 64
        columns wide, and together they have `blocks` thread blocks."""
        q, k, v, z, p, b, a, since, factor, staged = smem.open()
        me = warpgroup.id()
        block, _, key_head, sequence = assigned(cuda.blockIdx.x, blocks, 1, heads)
        span = sequences.span(gEnds, sequence, length)
        n = span.chunks()
        if me == PRODUCER:
            warpgroup.release_registers(keep)
            if warpgroup.rank() == 0:
                for j in range(n):
                    token = span.token(j)
                    k.fill(j, gK, (span.batch, token, key_head))
                    q.fill(j, gQ, (span.batch, token, key_head))
                    for c in range(CONSUMERS):
                        shared_by, column = divmod(CONSUMERS * block + c, width)
                        result.fill(v, z, CONSUMERS * j + c, gV, gZ, (span.batch, token, key_head * group + shared_by, column))
        elif me == WEIGHER:
            warpgroup.release_registers(weighs)
            ahead, c = divmod(warpgroup.rank(), CONSUMERS)  # of whose gates this warp sums up
            shared_by, _ = divmod(CONSUMERS * block + c, width)
            head, steps = key_head * group + shared_by, truncate(gGates, 1, span.end)
            rate, bias = gate.rate_and_bias(gRate, gBias, head)
            g = load(steps, DOWN, (span.batch, span.token(ahead), head), cols=1)
            for j in range(-ROUND, n):  # chunks to come are summed up, chunk j is weighed
                if j % ROUND == 0:
                    chunk = int32(j + ROUND + ahead)
                    mine = CONSUMERS * chunk + c
                    if chunk < n:
                        sums, minus = gate.summed(transpose(g), rate, bias, span.left(chunk))
                        total = tile_min(sums)
                        store(b.claim(mine), sums)
                        b.publish(mine)
                        store(a.claim(mine), minus)
                        a.publish(mine)
                        store(since.claim(mine), exp2(sums))
                        since.publish(mine)
                        store(factor.claim(mine), exp2((total if exp2(total) < LEAST else 0.0) - minus))
                        factor.publish(mine)
                    g = load(steps, DOWN, (span.batch, span.token(chunk + ROUND), head), cols=1)
                if j >= 0:
                    keys = k.wait(j)
                    sequences.clear(keys, span.left(j), GROUPS)
                    s = warpgroup.wait(warpgroup.mm_ABt(q.wait(j), keys))
                    k.release(j)
                    q.release(j)
                    warpgroup.store(p.claim(j), warpgroup.causal(s, 0, 0.0))
                    p.publish(j)
        else:
            warpgroup.claim_registers(claim)
            shared_by, column = divmod(CONSUMERS * block + me, width)
            head, row, out = int32(key_head * group + shared_by), int32(COLUMNS * column), subtile(staged, CHUNK, me)
            s_t = warpgroup.load(gStart, STATE, (sequence, head, row, 0), aligned=False)
            d = warpgroup.load(gSkip, ROWS, (head, row))
            for j in range(n):
                mine = CONSUMERS * j + me
                keys, queries = k.wait(j), q.wait(j)
                sequences.clear(keys, span.left(j), GROUPS)
                given = v.wait(mine)
                values = sequences.without_others(warpgroup.load_transposed(given, state.values), span.left(j))
                before, added = since.wait(mine), factor.wait(mine)
                sums, minus = b.wait(mine), a.wait(mine)
                o = warpgroup.mm_ABt(INPUT(s_t), queries)
                v_t = INPUT(fp32(values) * load(added, ALONG))
                weights, last = p.wait(j), last_element(before)
                if last < LEAST:
                    o = warpgroup.wait(o) * load(before, ALONG)
                    s = fp32(warpgroup.load(weights, WEIGHTS))
                    s = warpgroup.causal(gate.scores(s, warpgroup.load(sums, ROWS), load(minus, ALONG)), 0, 0.0)
                    warpgroup.store_wait()
                    warpgroup.sync()
                    warpgroup.store(out, s)
                    warpgroup.sync()
                    o = warpgroup.wait(warpgroup.mma_ABt(o, values, out))
                    s_t = warpgroup.wait(warpgroup.mma_AB(s_t * last, v_t, keys))
                else:
                    o = warpgroup.mma_ABt(o, v_t, weights)
                    s_t = warpgroup.mma_AB(s_t, v_t, keys)
                    o = warpgroup.wait(o, newer=1) * load(before, ALONG)
                    s_t = warpgroup.wait(s_t) * last
                q.release(j)
                k.release(j)
                p.release(j)
                since.release(mine)
                factor.release(mine)
                b.release(mine)
                a.release(mine)
                if result.skip:
                    o = o + fp32(warpgroup.load_transposed(given, state.values)) * d
                v.release(mine)
                if result.silu:
                    o = o * silu(fp32(warpgroup.load_transposed(z.wait(mine), state.values)))
                    z.release(mine)
                state.store(gO, out, o, span, span.token(j), head, column)
            warpgroup.store_wait()
            warpgroup.store(gState, s_t, (sequence, head, row, 0), aligned=False)
            sequences.store_nobodys(gO, gEnds, sequence, length, head, column)

    return scan, smem
