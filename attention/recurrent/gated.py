"""Linear attention for Hopper where every channel of a key decays by itself (gated linear attention, Yang et al. 2024).

    S_t = diag(exp(g_t)) S_(t-1) + k_t^T v_t        o_t = scale q_t S_t        g_t: Dk numbers, never positive

With b the running sums of a chunk's gates, and any r, one number a channel, to count them from,

    q' = q exp(b - r),  k' = k exp(r - b),  S' = exp(r) S
    O  = q' S' + tril(q' k'^T) V
    S  = exp(b_last - r) (S' + k'^T V)

so in the frame of r a chunk is one of plain linear attention. r = b_last / 2 keeps all exponents small, and q' and k' are made
in place by the warps that multiply them, each some channels. What rounding takes from q' and from the weights is multiplied as
well: the frame would cost half as much again as all else that is rounded. Where a chunk decays by more than a dtype can hold,
the weights of its pairs are computed one by one, and the frames of q' and k' are its beginning and its end: no exponent is
positive then.
"""

import functools
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import (
    clip,
    col_index,
    col_min,
    columns,
    cumsum,
    equal,
    exp2,
    hstack,
    load,
    load_row,
    minimum,
    row_sum,
    split,
    store,
    subtile,
    tile_min,
    warpgroup,
    where,
    zeros,
)
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv

from ..signature import ENDS, FLOAT, INT, array, tiled
from .gates import LOG2_E, floored
from .places import CHUNK, COLUMNS, places

REGISTERS = {1: (88, 256), 2: (40, 232)}  # consumers -> registers a thread of producer and consumer
SHARED_BYTES, STAGES = 227 * 1024, 2
WIDE = 128  # key dim, beyond which a state takes half of a consumer's registers: one consumer
SLICE = 16  # channels that a warp brings into the frame at once
LEAST = {bf16: -86.0, fp16: -11.0}  # what b - r may be, in powers of 2, so that q' and k' keep their precision


@dataclass(frozen=True)
class Config:
    """A kernel's shape, here and for the delta rule (kda.py): key dim as padded, consumers of 64 value columns each, the dtype
    of the gates and that of all else; varlen: the sequences lie one behind the other in one batch."""

    key_dim: int
    consumers: int
    gates: dtype
    dtype: dtype
    varlen: bool = False

    @property
    def threads(self):
        """Threads of a block: the consumers and the warpgroup that brings them what they consume."""
        return warpgroup.THREADS * (self.consumers + 1)

    @property
    def key(self):
        """A chunk's tile of Q or K, in panels of one slice each."""
        return st(CHUNK, self.key_dim, self.dtype, width=SLICE * self.dtype.itemsize)

    @property
    def gate(self):
        """A chunk's tile of gates, likewise."""
        return st(CHUNK, self.key_dim, self.gates, width=SLICE * self.gates.itemsize)

    @property
    def value(self):
        """A consumer's tile of a chunk of V, or of the output."""
        return st(CHUNK, COLUMNS, self.dtype)

    @property
    def sums(self):
        """The running sums of a chunk's gates."""
        return st(CHUNK, self.key_dim, fp32, width=SLICE * fp32.itemsize)

    @property
    def stages(self):
        """Chunks in flight."""
        chunk = 2 * self.key.nbytes + self.gate.nbytes + self.consumers * self.value.nbytes
        kept = self.consumers * (self.key.nbytes + self.value.nbytes) + self.key.nbytes
        kept += (self.gates is not fp32) * self.sums.nbytes + 2048  # for what is small
        return min(STAGES, (SHARED_BYTES - kept) // chunk)

    def __str__(self):
        kinds = f", gates {self.gates}{', varlen' * self.varlen}"
        return f"Dk {self.key_dim} {self.dtype}, {COLUMNS * self.consumers} columns{kinds}"


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, (keep, claim) = config.consumers, REGISTERS[config.consumers]
    PRODUCER, INPUT, STATE = CONSUMERS, config.dtype, rt(16, config.key_dim, fp32)
    VARLEN, IN_PLACE, LIMIT = config.varlen, config.gates is fp32, LEAST[config.dtype]
    CLAIMS = CONSUMERS > 1  # one consumer alone has all it may have
    KEY_DIM, WARPS, SLICES = config.key_dim, warpgroup.WARPGROUP * CONSUMERS, config.key_dim // SLICE
    FEW = rt(CHUNK // 2, SLICE, fp32, "col")
    ENDS, HALF, SCORES = STATE.row_vec, rt(16, KEY_DIM // 2, fp32).row_vec, rt(16, CHUNK, fp32)
    PANEL = min(128, HALF.length * INPUT.itemsize)
    CHANNELS = rt(16, SLICE, fp32)
    place, tokens = places(VARLEN)
    smem = shared(
        q=ring(config.key, config.stages, WARPS),
        k=ring(config.key, config.stages, WARPS),
        g=ring(config.gate, config.stages, WARPS),
        v=ring(config.value, config.stages * CONSUMERS, warpgroup.WARPGROUP),
        lost=config.key,
        state=st(COLUMNS * CONSUMERS, KEY_DIM, INPUT, width=PANEL),
        out=st(COLUMNS * CONSUMERS, COLUMNS, INPUT),
        sums=config.sums if not IN_PLACE else sv(16, fp32),
        ends=sv(2 * config.key_dim, fp32),  # of this chunk and the one before it, which slower warps still read
    )

    @inlined
    def few(tile, n, i):
        """The n-th half of the tokens of the i-th slice."""
        return subtile(tile, FEW.rows, n, SLICE, i)

    @inlined
    def sum_up(gates, sums, ends, warp):
        """The running sums of the gates, and where they end, of this warp's slices."""
        for i in range(warp, SLICES, WARPS):
            end = zeros(FEW.row_vec)
            for n in range(CHUNK // FEW.rows):
                b = cumsum(floored(load(few(gates, n, i), FEW)) * LOG2_E) + end
                store(few(sums, n, i), b)
                end = col_min(b)
            store(subtile(ends, SLICE, i), end)

    @inlined
    def rest(x):
        """What rounding takes from x."""
        return INPUT(x - fp32(INPUT(x)))

    @inlined
    def change_frame(queries, lost, keys, sums, ends, warp, of_queries, of_keys):
        """q' and k' in place of q and k, and what q' lost, of this warp's slices; a frame is a share of where the sums end."""
        for i in range(warp, SLICES, WARPS):
            end = load(subtile(ends, SLICE, i), FEW.row_vec)
            for n in range(CHUNK // FEW.rows):
                b, q, k = few(sums, n, i), few(queries, n, i), few(keys, n, i)
                framed = load(q, FEW) * exp2(load(b, FEW) - end * of_queries)
                store(q, framed)
                store(few(lost, n, i), rest(framed))
                store(k, load(k, FEW) * exp2(end * of_keys - load(b, FEW)))

    @inlined
    def half(s_t, last, share, i):
        """Half of the channels of exp2(share * b_last) S: of all at once the exponents would fill the registers."""
        return columns(s_t, HALF.length, i) * exp2(load(subtile(last, HALF.length, i), HALF) * share)

    @inlined
    def framed(s_t, last, share):
        """exp2(share * b_last) S"""
        return hstack(half(s_t, last, share, 0), half(s_t, last, share, 1))

    @inlined
    def one_by_one(queries, keys, sums):
        """tril(q_i . (exp2(b_i - b_j) k_j)), key after key and a slice at a time."""
        p = zeros(SCORES)
        for i in range(SLICES):
            k, b = subtile(keys, CHUNK, 0, SLICE, i), subtile(sums, CHUNK, 0, SLICE, i)
            own, sum_of_own = warpgroup.load(subtile(queries, CHUNK, 0, SLICE, i), CHANNELS), warpgroup.load(b, CHANNELS)
            for j in range(CHUNK):
                kept = exp2(minimum(sum_of_own - load_row(b, CHANNELS.row_vec, j), 0.0))
                scores = row_sum(own * kept * load_row(k, CHANNELS.row_vec, j))
                p = where(equal(col_index(SCORES), j), p + scores, p)
        return warpgroup.causal(p, 0, 0.0)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(gQ, gK, gV, gGates, gO, gStart, gState, gEnds, length, blocks, heads, group, scale):
        """The outputs of a sequence and its last state, for some columns of the values: one of `blocks` blocks of a head, of
        which `group` share a key head."""
        q, k, g, v, lost, state, staged, kept, ends = smem.open()
        me = warpgroup.id()
        block, _, head, sequence = place(cuda.blockIdx.x, blocks, 1, heads)
        first, end, batch = tokens(gEnds, sequence, length, 0, 1)
        n = int32((end - first + CHUNK - 1) // CHUNK)
        if me == PRODUCER:
            warpgroup.release_registers(keep)
            _, key_head = split(head, group)
            for j in range(n):
                token = first + CHUNK * j
                g.fill(j, gGates, (batch, token, head))
                k.fill(j, gK, (batch, token, key_head))
                q.fill(j, gQ, (batch, token, key_head))
                for c in range(CONSUMERS):
                    v.fill(CONSUMERS * j + c, gV, (batch, token, head, CONSUMERS * block + c))
        else:
            if CLAIMS:
                warpgroup.claim_registers(claim)
            warp, column = int32(cuda.threadIdx.x // 32), CONSUMERS * block + me
            at, turned, out = COLUMNS * column, subtile(state, COLUMNS, me), subtile(staged, COLUMNS, me)
            s_t = warpgroup.load(gStart, STATE, (sequence, head, at, 0))
            for j in range(n):
                mine, token = CONSUMERS * j + me, first + CHUNK * j
                queries, keys, gates, values = q.wait(j), k.wait(j), g.wait(j), v.wait(mine)
                if VARLEN and end - token < CHUNK:
                    warpgroup.zero_rows(values, end - token)
                    warpgroup.zero_rows(keys, end - token, CONSUMERS)
                    warpgroup.zero_rows(gates, end - token, CONSUMERS)
                sums = gates if IN_PLACE else kept
                last = subtile(ends, KEY_DIM, j % 2)
                sum_up(gates, sums, last, warp)
                warpgroup.meet(CONSUMERS)
                strong = tile_min(load(last, ENDS)) < 2 * LIMIT
                of_queries, of_keys = 0.0 if strong else 0.5, 1.0 if strong else 0.5
                weights, lost_weights = INPUT(zeros(SCORES)), INPUT(zeros(SCORES))
                if strong:
                    weights = INPUT(one_by_one(queries, keys, sums))
                    warpgroup.meet(CONSUMERS)
                change_frame(queries, lost, keys, sums, last, warp, of_queries, of_keys)
                warpgroup.store(subtile(turned, COLUMNS, 0, HALF.length, 0), half(s_t, last, of_queries, 0))
                warpgroup.store(subtile(turned, COLUMNS, 0, HALF.length, 1), half(s_t, last, of_queries, 1))
                s_t = framed(s_t, last, of_keys)
                warpgroup.store_wait()
                warpgroup.meet(CONSUMERS)
                if not strong:
                    p = warpgroup.mma_ABt(warpgroup.mm_ABt(queries, keys), lost, keys)
                    p = warpgroup.causal(warpgroup.wait(p), 0, 0.0)
                    weights, lost_weights = INPUT(p), rest(p)
                o = warpgroup.mma_AB(warpgroup.mm_ABt(queries, turned), weights, values)
                o = warpgroup.mma_AB(o, lost_weights, values)
                s_t = warpgroup.mma_AtB(s_t, values, keys)
                o = warpgroup.wait(o, newer=1) * scale
                if VARLEN:
                    warpgroup.store(clip(gO, 1, end), o, (batch, token, head, at), rows=1, cols=3, aligned=True)
                else:
                    warpgroup.store(out, o)
                    warpgroup.tma_store(gO, (batch, token, head, column), out)
                s_t = framed(warpgroup.wait(s_t), last, 1.0 - of_keys)
                q.release(j)
                k.release(j)
                g.release(j)
                v.release(mine)
            warpgroup.store_wait()
            warpgroup.store(gState, s_t, (sequence, head, at, 0))

    return scan, smem


def signature(config: Config):
    """The Numba types of the kernel's arguments."""
    key, value = tiled(config.key, unit=1), tiled(config.value, unit=1)
    out = array(4, config.dtype) if config.varlen else value
    return key, key, value, tiled(config.gate, unit=1), out, array(4), array(4), ENDS, *[INT] * 4, FLOAT
