"""Linear attention for sm_80 and later, chunk by chunk: cp.async, ldmatrix and mma.sync. The equations are chunk_hopper.py's.

A block of four warps walks a sequence (or a segment of one) for 64 columns of the values. Each warp keeps the state of 16 of
them in registers, transposed: S^T is 16 x Dk, and as it lies there, rounded, it is the right operand of Q S. For all of them
the block makes P = tril(exp(b - b^T) w^T * Q K^T) once, 16 rows a warp, and shares it through shared memory. So

    O   = exp(b) Q S + P V                                    64 x 16 a warp: Q and P from shared memory
    S^T = exp(b_last) S^T + (exp(b_last - b) w V)^T K         V^T from registers, K from shared memory

While O is computed the next keys are on their way, the next queries and values under the state's product. It also takes what
TMA cannot: bases and strides of 8, 4 or 2 bytes, by as many smaller copies.
"""

import functools
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import (
    block as together,
)
from ops import (
    divmod,
    load,
    mma_AB,
    mma_ABt,
    row_max,
    row_sum,
    silu,
    store,
    subtile,
    tile_max,
    tile_min,
    transpose,
    truncate,
    warpgroup,
    zeros,
)
from tiles import fp32, inlined, pipeline, rt, shared, st, sv
from tiles.arguments import ENDS, FLOAT, INT, array
from tiles.layout import LANES

from . import chunk_hopper
from .chunk_hopper import TINY, WIDE
from .gates import ROWS, TILE, gates, shared_gates
from .tokens import CHUNK, COLUMNS, places

WARPS = 4  # of a block
BAND = COLUMNS // WARPS  # value columns of a warp, and rows of P that it makes


@dataclass(frozen=True)
class Config(chunk_hopper.Config):
    """A kernel's shape and what it computes: chunk_hopper's, with one consumer. piece: the bytes that bases and strides are
    multiples of."""

    piece: int = 16

    @property
    def parts(self):
        """A warp has all keys."""
        return 1

    @property
    def resident(self):
        """Blocks that share a multiprocessor's registers."""
        return 2 if self.key_dim <= WIDE else 1

    @property
    def threads(self):
        """Threads of a block."""
        return LANES * WARPS

    @property
    def stages(self):
        """Chunks of keys in flight: two where 99 KB, what a block may have on every GPU, have room for them."""
        return 2 if self.key_dim <= WIDE else 1

    def __str__(self):
        return super().__str__() + f", by {self.piece} bytes" * (self.piece != 16)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, STATE, OUT = config.dtype, rt(BAND, config.key_dim, fp32), rt(CHUNK, BAND, fp32)
    SQUARE, TURNED, STAGES = rt(BAND, BAND, fp32), rt(BAND, CHUNK, INPUT), config.stages
    PIECE = config.piece
    LATER = not (config.states or config.ones) and config.key_dim <= WIDE
    SKIP, GATED, ONES, DIVIDED = config.skip, config.gated, config.ones, config.divided
    OUTPUTS = not config.states
    NEWER = STAGES - 1  # groups of keys: so many are younger than a chunk's values
    BEHIND = (3 if config.gated else 2) * NEWER  # and so many groups than its queries
    place, tokens = places(config.varlen)
    *_, decayed, pairs, remaining = gates(config.gate)
    given, put, of_pairs, of_rows, of_end = shared_gates(config.gate, config.softplus)
    smem = shared(
        q=pipeline(config.key, 1, WARPS),
        k=pipeline(config.key, STAGES, WARPS),
        v=pipeline(config.value, 1, WARPS),
        z=pipeline(config.value if config.gated else st(8 * WARPS, 16, INPUT), 1, WARPS),
        p=st(CHUNK, CHUNK, INPUT),
        b=sv(CHUNK, fp32),
        a=sv(CHUNK, fp32),
    )

    @inlined
    def finish(o, z, j, gDivisor, at):
        """What becomes of an output before it is stored."""
        batch, token, head, _ = at
        if DIVIDED:
            o = o / (load(gDivisor, OUT.col_vec, (batch, token, head), cols=1) + TINY)
        if GATED:
            o = o * silu(fp32(transpose(warpgroup.load_transposed(z.wait(j, NEWER), TURNED))))
        return o

    @cuda.jit(launch_bounds=(config.threads, config.resident), fastmath=True)
    def scan(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gZ: array(4, INPUT), gGates: array(3), gRate: array(2),
        gBias: array(2), gSkip: array(2), gDivisor: array(3), gO: array(3) if ONES else array(4, INPUT), gStart: array(4),
        gLocal: array(5), gState: array(4), gTotal: array(4), gEnds: ENDS, length: INT, blocks: INT, segments: INT, walked: INT,
        heads: INT, group: INT, width: INT, scale: FLOAT,
    ):  # fmt: skip
        """The outputs, or the states and summed gates, of a segment: see chunk_hopper.py, whose arguments these are."""
        q, k, v, z, p, b, a = smem.open()
        me = int32(cuda.threadIdx.x // 32)
        block, segment, key_head, sequence = place(cuda.blockIdx.x, blocks, walked, heads)
        first, end, batch = tokens(gEnds, sequence, length, segment, segments)
        n = int32((end - first + CHUNK - 1) // CHUNK)
        shared_by, part = divmod(block, width)
        head, left, at = int32(key_head * group + shared_by), int32(COLUMNS * part), int32(COLUMNS * part + BAND * me)
        gQ, gK, gV, gZ, gO = (
            truncate(gQ, 1, end),
            truncate(gK, 1, end),
            truncate(gV, 1, end),
            truncate(gZ, 1, end),
            truncate(gO, 1, end),
        )
        for i in range(STAGES - 1):
            k.fill(i, gK, (batch, first + CHUNK * i, key_head, 0), 1, 3, n, PIECE)
        q.fill(0, gQ, (batch, first, key_head, 0), 1, 3, n if OUTPUTS else 0, PIECE)
        if GATED:
            z.fill(0, gZ, (batch, first, head, left), 1, 3, n, PIECE)
        v.fill(0, gV, (batch, first, head, left), 1, 3, 0 if ONES else n, PIECE)
        k.fill(STAGES - 1, gK, (batch, first + CHUNK * (STAGES - 1), key_head, 0), 1, 3, n, PIECE)
        s_t = load(gStart, STATE, (sequence, head, at, 0))
        for i in range(segment if LATER else 0):
            total = tile_min(load(gTotal, ROWS, (sequence, head, i, 0)))
            s_t = decayed(s_t, total) + load(gLocal, STATE, (sequence, head, i, at, 0))
        rate, bias = tile_max(load(gRate, ROWS, (head, 0))), tile_max(load(gBias, ROWS, (head, 0)))
        skip = load(gSkip, OUT.row_vec, (head, at)) if SKIP else 0.0
        so_far, g = float32(0), given(gGates, batch, first, end, head)
        for j in range(n):
            token, later = int32(first + CHUNK * j), int32(first + CHUNK * (j + 1))
            if me == 0:
                put(b, a, g, rate, bias, end - token)
            keys = k.wait(j, BEHIND)  # and the sums of gates
            if OUTPUTS:
                queries = q.wait(j, BEHIND)
                mine = subtile(queries, BAND, me)
                s = mma_ABt(zeros(TILE), mine, keys)
                if ONES:
                    earlier = row_max(mma_ABt(zeros(SQUARE), mine, INPUT(s_t)))  # each column is the same
                rows, along = of_pairs(b, a, me)
                s = pairs(s, rows, along)
                if ONES:
                    store(gO, (row_sum(s) + decayed(earlier, rows)) * scale, (batch, token + BAND * me, head), cols=1)
                else:
                    store(subtile(p, BAND, me), INPUT(s))
            values = v.wait(j, NEWER)  # and all of P is there
            v_t = INPUT(zeros(TILE) + 1.0) if ONES else warpgroup.load_transposed(values, TURNED)
            if OUTPUTS and not ONES:
                o = decayed(mma_ABt(zeros(OUT), queries, INPUT(s_t)), of_rows(b))
                if SKIP:  # Mamba-2's, whose scale is 1
                    o = o + fp32(transpose(v_t)) * skip
                o = mma_ABt(o, p, v_t) * scale
                o = finish(o, z, j, gDivisor, (batch, token, head, at))
                store(gO, o, (batch, token, head, at), 1, 3, PIECE)
            along, total = of_end(b, a)
            u_t = INPUT(remaining(fp32(v_t), along, total))
            together.sync()
            q.fill(j + 1, gQ, (batch, later, key_head, 0), 1, 3, n if OUTPUTS else 0, PIECE)
            if GATED:
                z.fill(j + 1, gZ, (batch, later, head, left), 1, 3, n, PIECE)
            v.fill(j + 1, gV, (batch, later, head, left), 1, 3, 0 if ONES else n, PIECE)
            g = given(gGates, batch, later, end, head)
            s_t, so_far = mma_AB(decayed(s_t, total), u_t, keys), so_far + total
            together.sync()
            k.fill(j + STAGES, gK, (batch, int32(token + CHUNK * STAGES), key_head, 0), 1, 3, n, PIECE)
        if OUTPUTS:
            if segment == (segments - 1 if LATER else 0):
                store(gState, s_t, (sequence, head, at, 0))
        else:
            store(gLocal, s_t, (sequence, head, segment, at, 0))
            store(gTotal, zeros(ROWS) + so_far, (sequence, head, segment, 0))

    return scan, smem
