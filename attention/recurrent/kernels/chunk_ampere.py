"""Linear attention for sm_80 and later, chunk by chunk: cp.async, ldmatrix and mma.sync. The equations are chunk_hopper.py's.

A block of four warps walks a sequence (or a segment of one) for 64 columns of the values. Each warp keeps the state of 16 of
them in registers, transposed: S^T is 16 x Dk, and as it lies there, rounded, it is the right operand of Q S. For all of them
the block makes P = tril(exp(b - b^T) w^T * Q K^T) once, 16 rows a warp, and shares it through shared memory. So

    O   = exp(b) Q S + P V                                    64 x 16 a warp: Q and P from shared memory
    S^T = exp(b_last) S^T + (exp(b_last - b) w V)^T K         V^T from registers, K from shared memory

While O is computed the next keys are on their way, the next queries and values under the state's product. It also takes what
TMA cannot: bases and strides of 8 or 4 bytes, by as many smaller copies.
"""

import functools
import itertools
from collections.abc import Iterator
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
    tile_min,
    transpose,
    truncate,
    warp_index,
    warpgroup,
    zeros,
)
from tiles import bf16, fp16, fp32, inlined, pipeline, rt, shared, st, sv
from tiles.arguments import ENDS, FLOAT, INT, array
from tiles.cp_async import PIECES
from tiles.layout import LANES

from . import chunk_hopper
from .block_exponent import BlockExponent
from .chunk_hopper import KEY_DIMS, WIDE
from .gates import ALONG, DOWN, ROWS, TILE, BySteps, ByToken, Gate
from .results import TINY, forms
from .tokens import CHUNK, COLUMNS, Sequences, assigned

WARPS = 4  # of a block
SHARE = COLUMNS // WARPS  # value columns of a warp, and rows of P that it makes


@dataclass(frozen=True)
class Config(chunk_hopper.Config):
    """A kernel's configuration: that of chunk_hopper.py, with one consumer. piece: the number of bytes of which all addresses
    and strides are multiples."""

    piece: int = 16

    @property
    def parts(self):
        """Always 1: a warp has all channels of the keys."""
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
        """Chunks of keys in flight: two if 99 KB have room for them, which is what a block may use on every GPU."""
        return 2 if self.key_dim <= WIDE else 1

    @property
    def segmented(self):
        """May sequences be cut into segments?"""
        return self.key_dim <= WIDE

    def __str__(self):
        return super().__str__() + f", by {self.piece} bytes" * (self.piece != 16)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations: all gates at all sizes, the other forms at one size. everything: all forms at all sizes, other
    pieces and fp16; but of those whose code lies between others' or is like them, only the plainest forms."""
    for piece, dtype in ((PIECES[0], bf16), *(((8, bf16), (4, bf16), (2, bf16), (16, fp16)) if everything else ())):
        for key_dim, kind in itertools.product(KEY_DIMS, (Gate, ByToken, BySteps)):
            plainest = (piece, dtype) in ((8, bf16), (16, fp16))
            all_forms = (everything and not plainest) or (key_dim == WIDE and kind is not Gate)
            for gate, result, varlen in forms(kind, all_forms):
                config = Config(key_dim, 1, dtype, gate, result, varlen, piece)
                if result.outputs or config.segmented:
                    yield config


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, STATE, OUT = config.dtype, rt(SHARE, config.key_dim, fp32), rt(CHUNK, SHARE, fp32)
    SQUARE, TRANSPOSED, STAGES = rt(SHARE, SHARE, fp32), rt(SHARE, CHUNK, INPUT), config.stages
    PIECE, gate, result = config.piece, config.gate, config.result
    SEGMENTS = config.segmented and result.outputs and result.values  # may it go on from earlier segments?
    NEWER = STAGES - 1  # groups of keys: so many are younger than a chunk's values
    BEHIND = (3 if result.silu else 2) * NEWER  # and so many groups than its queries
    sequences, common = Sequences(config.varlen), BlockExponent(gate.weighted and INPUT is fp16)
    smem = shared(
        q=pipeline(config.key, 1, WARPS),
        k=pipeline(config.key, STAGES, WARPS),
        v=pipeline(config.value, 1, WARPS),
        z=pipeline(config.value if result.silu else st(8 * WARPS, 16, INPUT), 1, WARPS),
        p=st(CHUNK, CHUNK, INPUT),
        b=sv(CHUNK, fp32),
        a=sv(CHUNK, fp32),
    )

    @inlined
    def fill(q, v, z, gQ, gV, gZ, j, n, batch, token, key_head, head, col):
        """Begin to copy the queries, values and z of the j-th of n chunks, those of them that are read."""
        q.fill(j, gQ, (batch, token, key_head, 0), 1, 3, n if result.outputs else 0, PIECE)
        if result.silu:
            z.fill(j, gZ, (batch, token, head, col), 1, 3, n, PIECE)
        v.fill(j, gV, (batch, token, head, col), 1, 3, n if result.values else 0, PIECE)

    @inlined
    def finish(o, z, j, gDivisor, at):
        """The output as it is stored: divided by the normalizer, times silu(z), if the result is such. See results.Outputs."""
        if result.divided:
            o = o / (load(gDivisor, OUT.col_vec, at, cols=1) + TINY)
        if result.silu:
            o = o * silu(fp32(transpose(warpgroup.load_transposed(z.wait(j, NEWER), TRANSPOSED))))
        return o

    @cuda.jit(launch_bounds=(config.threads, config.resident), fastmath=True)
    def scan(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gZ: array(4, INPUT), gGates: array(3), gRate: array(2),
        gBias: array(2), gSkip: array(2), gDivisor: array(3), gO: array(4, INPUT) if result.values else array(3),
        gStart: array(4), gLocal: array(5), gState: array(4), gTotal: array(4), gEnds: ENDS, length: INT, blocks: INT,
        segments: INT, walked: INT, begun: INT, heads: INT, group: INT, width: INT, scale: FLOAT,
    ):  # fmt: skip
        """The outputs, or the states and summed gates, of a segment: see chunk_hopper.py, whose arguments these are."""
        q, k, v, z, p, b, a = smem.open()
        a = a if gate.weighted else b
        me = warp_index()
        block, segment, key_head, sequence = assigned(cuda.blockIdx.x, blocks, walked, heads)
        span = sequences.segment(gEnds, sequence, length, segment, segments)
        first, end, batch = span
        n = span.chunks()
        shared_by, column = divmod(block, width)
        head, col = int32(key_head * group + shared_by), int32(COLUMNS * column)
        own = int32(col + SHARE * me)  # this warp's first column
        gOut = gO
        gQ, gK, gV, gZ, gO = (
            truncate(gQ, 1, end),
            truncate(gK, 1, end),
            truncate(gV, 1, end),
            truncate(gZ, 1, end),
            truncate(gO, 1, end),
        )
        for i in range(STAGES - 1):
            k.fill(i, gK, (batch, first + CHUNK * i, key_head, 0), 1, 3, n, PIECE)
        fill(q, v, z, gQ, gV, gZ, 0, n, batch, first, key_head, head, col)
        k.fill(STAGES - 1, gK, (batch, first + CHUNK * (STAGES - 1), key_head, 0), 1, 3, n, PIECE)
        s_t = load(gStart, STATE, (int32(sequence * begun + min(segment, begun - 1)), head, own, 0), aligned=False)
        for i in range(segment if SEGMENTS and begun == 1 else 0):
            total = tile_min(load(gTotal, ROWS, (sequence, head, i, 0)))
            s_t = gate.decayed(s_t, total) + load(gLocal, STATE, (sequence, head, i, own, 0), aligned=False)
        exponent = common.begin(s_t)
        s_t = common.scaled(s_t, -exponent)
        rate, bias = gate.rate_and_bias(gRate, gBias, head)
        d = load(gSkip, OUT.row_vec, (head, own), aligned=False) if result.skip else 0.0
        so_far, g = float32(0), gate.fetch(gGates, batch, first, end, head)
        for j in range(n):
            token, later = span.token(j), span.token(j + 1)
            if me == 0:
                gate.share(b, a, g, rate, bias, end - token)
            keys = k.wait(j, BEHIND)  # and the sums of gates
            before, exponent = exponent, common.after(exponent, b, a)
            if result.outputs:
                queries = q.wait(j, BEHIND)
                mine = subtile(queries, SHARE, me)
                s = mma_ABt(zeros(TILE), mine, keys)
                if not result.values:
                    earlier = row_max(mma_ABt(zeros(SQUARE), mine, INPUT(s_t)))  # each column is the same
                rows = gate.load(subtile(b, SHARE, me), ROWS)
                s = gate.scores(s, common.of_keys(rows, exponent), gate.load(a, ALONG))
                if result.values:
                    store(subtile(p, SHARE, me), INPUT(s))
                else:
                    o = (row_sum(s) + gate.decayed(earlier, rows)) * scale
                    store(gO, o, (batch, token + SHARE * me, head), cols=1)
            values = v.wait(j, NEWER)  # and all of P is there
            v_t = warpgroup.load_transposed(values, TRANSPOSED) if result.values else INPUT(zeros(TILE) + 1.0)
            if result.outputs and result.values:
                down = common.of_state(gate.load(b, DOWN), before, exponent)
                o = gate.decayed(mma_ABt(zeros(OUT), queries, INPUT(s_t)), down)
                if result.skip:  # Mamba-2's, whose scale is 1
                    o = o + common.scaled(fp32(transpose(v_t)) * d, -exponent)
                o = common.scaled(mma_ABt(o, p, v_t), exponent) * scale
                o = finish(o, z, j, gDivisor, (batch, token, head))
                store(gO, o, (batch, token, head, own), 1, 3, PIECE)
            along, total = gate.load(a, ALONG), gate.last(b)
            u_t = INPUT(gate.remaining(fp32(v_t), along, common.of_keys(total, exponent)))
            together.sync()
            fill(q, v, z, gQ, gV, gZ, j + 1, n, batch, later, key_head, head, col)
            g = gate.fetch(gGates, batch, later, end, head)
            s_t = gate.decayed(s_t, common.of_state(total, before, exponent))
            s_t, so_far = mma_AB(s_t, u_t, keys), so_far + total
            together.sync()
            k.fill(j + STAGES, gK, (batch, int32(token + CHUNK * STAGES), key_head, 0), 1, 3, n, PIECE)
        s_t = common.scaled(s_t, exponent)
        if result.outputs:
            if segment == segments - 1:
                store(gState, s_t, (sequence, head, own, 0), aligned=False)
                if sequences.varlen and result.values:
                    span = sequences.nobodys(gEnds, sequence, length)
                    for j in range(span.chunks()):
                        store(gOut, zeros(OUT), (span.batch, span.token(j), head, own), 1, 3, PIECE)
        else:
            store(gLocal, s_t, (sequence, head, segment, own, 0), aligned=False)
            store(gTotal, zeros(ROWS) + so_far, (sequence, head, segment, 0))

    return scan, smem
