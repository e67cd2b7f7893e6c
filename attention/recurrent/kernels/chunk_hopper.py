"""Linear attention for Hopper, chunk by chunk, where a decay is one number for a token and head.

    S_t = exp(g_t) S_(t-1) + w_t k_t^T v_t        o_t = scale q_t S_t

A block walks a sequence (or a segment of one) for some columns of the values, 64 a consumer, and keeps their part of the state
in registers, transposed: S^T is 64 x Dk. Keys of more than 128 channels are shared out to two warpgroups: each does all of
this with its half of them, and their outputs are added up. Of a chunk of 64 tokens, b being the running sum of its gates g,

    O   = exp(b) Q S + tril(exp(b - b^T) w^T * Q K^T) V          two products from shared memory, one from registers
    S^T = exp(b_last) S^T + (exp(b_last - b) w V)^T K            V^T comes from shared memory turned by ldmatrix

Every exponent that counts is a sum of gates and so never positive: nothing overflows, however strong the decay. Gates of single
tokens are loaded and summed up by warps of the producer, chunks ahead of their use.

Few long sequences are cut into segments, in two passes: one finds the state that each segment by itself ends with, the other
starts each segment from what those before it add up to.
"""

import functools
from dataclasses import dataclass, fields

from numba import cuda
from numpy import float32, int32

from ops import divmod, load, log2, row_max, silu, store, subtile, tile_min, truncate, warpgroup, zeros
from tiles import dtype, fp32, inlined, ring, rt, shared, st, sv
from tiles.arguments import ENDS, FLOAT, INT, array, tiled

from .gates import ALONG, ROWS, TILE, gates
from .tokens import CHUNK, COLUMNS, places

WIDE = 128  # key dim, beyond which a state would take half of a consumer's registers: two have half of the keys each
REGISTERS = {(1, 2): (48, 208), (2, 1): (72, 216), (1, 1): (88, 256)}  # (warpgroups, resident) -> those of producer, consumer
SHARED_BYTES = 227 * 1024
SUMMING = warpgroup.WARPGROUP - 1  # warps of the producer that sum up gates, a chunk each in turn
SMALL = 4 * 1024  # bytes of what else is in shared memory: gates and barriers
STAGES = 3  # chunks in flight, if shared memory has room for so many
TINY = 1e-10  # added to a normalizer, as flash-linear-attention does


@dataclass(frozen=True)
class Config:
    """A kernel's shape and what it computes.

    key_dim: as padded. consumers: one warpgroup or two (`parts`) for 64 value columns each. gate: one of gates.KINDS.
    softplus: dt is that of what is given. skip: D v is added to the output. gated: which is then multiplied by silu(z).
    states: a pass that finds the states of segments, and no output. varlen: the sequences lie one behind the other in one
    batch. ones: all values are 1, and the output is the normalizer, one fp32 number a row and head. divided: the output is
    divided by that. apart: the scale is multiplied in at the end, instead of being one more factor among the decays."""

    key_dim: int
    consumers: int
    dtype: dtype
    gate: str | None = None
    softplus: bool = False
    skip: bool = False
    gated: bool = False
    states: bool = False
    varlen: bool = False
    ones: bool = False
    divided: bool = False
    apart: bool = False

    @property
    def parts(self):
        """Warpgroups that share out the keys of a consumer."""
        return 2 if self.key_dim > WIDE else 1

    @property
    def resident(self):
        """Blocks that share a multiprocessor's registers."""
        return 2 if self.consumers == 1 and self.key_dim < WIDE and self.gate != "step" else 1

    @property
    def threads(self):
        """Threads of a block: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (self.consumers * self.parts + 1)

    @property
    def key(self):
        """A part's tile of a chunk of Q or K."""
        return st(CHUNK, self.key_dim // self.parts, self.dtype)

    @property
    def value(self):
        """A consumer's tile of a chunk of V, Z or the output."""
        return st(CHUNK, COLUMNS, self.dtype)

    @property
    def handed(self):
        """What the second part hands to the first: its output."""
        return st(CHUNK, COLUMNS, fp32) if self.parts > 1 else st(16, 16, fp32)

    @property
    def stages(self):
        """Chunks in flight."""
        keys, values = self.parts * self.key.nbytes, self.consumers * self.value.nbytes
        chunk = (1 + (not self.states)) * keys + (1 + self.gated) * values
        kept = self.consumers * keys + values + self.handed.nbytes + SMALL
        return min(STAGES, (SHARED_BYTES - kept) // chunk)

    def __str__(self):
        kinds = [f"gates by {self.gate}"] * bool(self.gate)
        kinds += [field.name for field in fields(self) if getattr(self, field.name) is True]
        return ", ".join([f"Dk {self.key_dim} {self.dtype}", f"{COLUMNS * self.consumers} columns", *kinds])


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, PARTS, INPUT = config.consumers, config.parts, config.dtype
    PRODUCER, KEYS = CONSUMERS * PARTS, config.key.cols  # the warpgroup after those that consume
    (keep, claim), STATE = REGISTERS[CONSUMERS * PARTS, config.resident], rt(16, KEYS, fp32)
    LOADED = config.gate in ("token", "step")
    SKIP, GATED, ONES, DIVIDED = config.skip, config.gated, config.ones, config.divided
    GROWN = config.gate is not None and not config.apart  # the scale is one more summand of the exponents
    VARLEN, OUTPUTS, TURNED = config.varlen, not config.states, rt(16, CHUNK, INPUT)
    KEYS_OF_TMA, VALUES_OF_TMA = tiled(config.key, unit=1), tiled(config.value, unit=1)
    GATES = array(2 if config.gate == "head" else 3)
    OUTPUT = array(3) if ONES else array(4, INPUT) if VARLEN or config.states else VALUES_OF_TMA
    place, tokens = places(config.varlen)
    sum_up, steady, sums, decayed, pairs, remaining = gates(config.gate, config.softplus)

    def of_keys(used=True):
        """A ring whose tiles are for one part of all consumers each."""
        return ring(config.key, config.stages * PARTS if used else 1, CONSUMERS * warpgroup.WARPGROUP)

    def of_values(used=True, parts=PARTS):
        """A ring whose tiles are for one consumer each, all its parts or one."""
        return ring(config.value, config.stages * CONSUMERS if used else 1, parts * warpgroup.WARPGROUP)

    summed = ring(sv(CHUNK, fp32), CONSUMERS * SUMMING if LOADED else 1, PARTS * warpgroup.WARPGROUP, writers=1)
    smem = shared(
        q=of_keys(OUTPUTS),
        k=of_keys(),
        v=of_values(not ONES),
        z=of_values(GATED, 1),
        b=summed,
        a=summed,
        state=st(COLUMNS * CONSUMERS * PARTS, KEYS, INPUT),
        out=st(COLUMNS * CONSUMERS, COLUMNS, INPUT),
        handed=ring(config.handed, 1, warpgroup.WARPGROUP, writers=warpgroup.WARPGROUP),
    )

    @inlined
    def sum_of_parts(o, values, handed, j, part, skip):
        """What the parts of a consumer get, and D v, added up; the first one's is the sum."""
        if SKIP and (PARTS == 1 or part > 0):
            o = o + fp32(warpgroup.load(values, TURNED)) * skip
        if PARTS > 1:
            if part > 0:
                warpgroup.store(handed.claim(j), o)
                handed.publish(j)
            else:
                o = o + warpgroup.load(handed.wait(j), TILE)
                handed.release(j)
        return o

    @inlined
    def finish(o, z, mine, gDivisor, at):
        """What becomes of an output before it is stored."""
        if DIVIDED:
            o = o / (warpgroup.load(gDivisor, ROWS, at, cols=1) + TINY)
        if GATED:
            o = o * silu(fp32(warpgroup.load(z.wait(mine), TURNED)))
            z.release(mine)
        return o

    @cuda.jit(launch_bounds=(config.threads, config.resident), fastmath=True)
    def scan(
        gQ: KEYS_OF_TMA, gK: KEYS_OF_TMA, gV: VALUES_OF_TMA, gZ: VALUES_OF_TMA, gGates: GATES,
        gRate: array(2), gBias: array(2), gSkip: array(2), gDivisor: array(3), gO: OUTPUT, gStart: array(4), gLocal: array(5),
        gState: array(4), gTotal: array(4), gEnds: ENDS, length: INT, blocks: INT, segments: INT, walked: INT, heads: INT,
        group: INT, width: INT, scale: FLOAT,
    ):  # fmt: skip
        """The outputs, or the states and summed gates, of a segment. `group` value heads share a key head, each `width` blocks
        of 64 columns wide; `walked` of the `segments` have blocks in this launch."""
        q, k, v, z, b, a, state, staged, handed = smem.open()
        me = warpgroup.id()
        block, segment, key_head, sequence = place(cuda.blockIdx.x, blocks, walked, heads)
        first, end, batch = tokens(gEnds, sequence, length, segment, segments)
        n = int32((end - first + CHUNK - 1) // CHUNK)
        if me == PRODUCER:
            warpgroup.release_registers(keep)
            warp = cuda.threadIdx.x // 32 - 4 * PRODUCER
            if warp == 0:
                for j in range(n):
                    token = first + CHUNK * j
                    for part in range(PARTS):
                        k.fill(PARTS * j + part, gK, (batch, token, key_head, part))
                        if OUTPUTS:
                            q.fill(PARTS * j + part, gQ, (batch, token, key_head, part))
                    for c in range(CONSUMERS):
                        shared_by, column = divmod(CONSUMERS * block + c, width)
                        if not ONES:
                            v.fill(CONSUMERS * j + c, gV, (batch, token, key_head * group + shared_by, column))
                        if GATED:
                            z.fill(CONSUMERS * j + c, gZ, (batch, token, key_head * group + shared_by, column))
            elif LOADED:
                for mine in range(warp - 1, CONSUMERS * n, SUMMING):
                    j, c = divmod(mine, CONSUMERS)
                    shared_by, _ = divmod(CONSUMERS * block + c, width)
                    of = batch, first + CHUNK * j, end, key_head * group + shared_by
                    sum_up(b, a, mine, truncate(gGates, 1, end), gRate, gBias, *of)
        else:
            warpgroup.claim_registers(claim)
            c, part = (me, int32(0)) if PARTS == 1 else (int32(0), me)
            shared_by, column = divmod(CONSUMERS * block + c, width)
            head, at, key = int32(key_head * group + shared_by), int32(COLUMNS * column), int32(KEYS * part)
            turned, out = subtile(state, COLUMNS, me), subtile(staged, COLUMNS, c)
            s_t = warpgroup.load(gStart, STATE, (sequence, head, at, key))
            for i in range(segment if OUTPUTS else 0):
                total = tile_min(load(gTotal, ROWS, (sequence, head, i, 0)))
                s_t = decayed(s_t, total) + warpgroup.load(gLocal, STATE, (sequence, head, i, at, key))
            same, so_far, growth = steady(gGates, head), float32(0), log2(zeros(ROWS) + scale)
            skip = load(gSkip, ALONG, (head, at)) if SKIP else 0.0
            if ONES:
                if part == 0:
                    warpgroup.store(out, zeros(TILE) + 1.0)
                warpgroup.sync_several(PARTS)
            for j in range(n):
                mine, ours, left = int32(CONSUMERS * j + c), int32(PARTS * j + part), int32(end - first - CHUNK * j)
                keys = k.wait(ours)
                values = out if ONES else v.wait(mine)
                if VARLEN and left < CHUNK:
                    warpgroup.zero_rows(keys, left, CONSUMERS)
                    if not ONES:
                        warpgroup.zero_rows(values, left, PARTS)
                if OUTPUTS:
                    queries = q.wait(ours)
                    warpgroup.store(turned, s_t)
                    warpgroup.store_wait()
                    s = warpgroup.mm_ABt(queries, keys)
                    warpgroup.sync()
                    o = warpgroup.mm_ABt(queries, turned)
                rows, along, total = sums(b, a, mine, same, left)
                if GROWN:
                    rows = rows + growth
                if OUTPUTS:
                    p = INPUT(pairs(warpgroup.wait(s, newer=1), rows, along))
                    o = warpgroup.mma_AB(decayed(warpgroup.wait(o), rows), p, values)
                    q.release(ours)
                v_t = INPUT(remaining(fp32(warpgroup.load_transposed(values, TURNED)), along, total))
                s_t, so_far = warpgroup.mma_AB(decayed(s_t, total), v_t, keys), so_far + total
                token = int32(first + CHUNK * j)
                if OUTPUTS:
                    o = warpgroup.wait(o, newer=1) * (1.0 if GROWN else scale)
                    o = sum_of_parts(o, values, handed, j, part, skip)
                    if PARTS == 1 or part == 0:
                        o = finish(o, z, mine, gDivisor, (batch, token, head))
                        if ONES:
                            warpgroup.store(truncate(gO, 1, end), row_max(o), (batch, token, head), cols=1)
                        elif VARLEN:
                            warpgroup.store(truncate(gO, 1, end), o, (batch, token, head, at), rows=1, cols=3, aligned=True)
                        else:
                            warpgroup.store(out, o)
                            warpgroup.tma_store(gO, (batch, token, head, column), out)
                s_t = warpgroup.wait(s_t)
                k.release(ours)
                if not ONES:
                    v.release(mine)
            if OUTPUTS:
                warpgroup.store_wait()
                if segment == segments - 1:
                    warpgroup.store(gState, s_t, (sequence, head, at, key))
            else:
                warpgroup.store(gLocal, s_t, (sequence, head, segment, at, key))
                store(gTotal, zeros(ROWS) + so_far, (sequence, head, segment, 0))

    return scan, smem
