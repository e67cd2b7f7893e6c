"""Based: linear attention whose weights are the Taylor series of exp to the second order (Arora et al. 2024), for Hopper.

    P[i, j] = 1 + s + s ** 2 / 2,  s = scale q_i . k_j,  j <= i          o_i = sum_j P[i, j] v_j / sum_j P[i, j]

The weights are products of features, P = f(q) f(k)^T (`ops.taylor`: the 136 products of two of 16 numbers, the 16 themselves
and 1), so the sum over all earlier chunks is f(q) S, S = sum f(k)^T v. A block walks one head's chunks of 64 tokens for 64
columns of the values and keeps its part of S in registers, transposed, 64 x 160; of a chunk,

    O   = f(Q) S + tril(P) V        f(Q) is made in registers; S comes from shared memory, rounded
    S^T = S^T + V^T f(K)            f(K) is made in registers, and read from shared memory

The divisor's sum over earlier chunks is n + q . z + q^T Z q / 2 with n tokens, z = sum k and Z = sum k^T k, all of it in
registers.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from numba import cuda
from numpy import float32

from ops import (
    col_index,
    col_max,
    divmod,
    equal,
    finish_sum,
    fma,
    lane_sum,
    less,
    load,
    mma_AB,
    mma_ABt,
    mma_AtB,
    ones,
    row_index,
    row_sum,
    store,
    taylor,
    tile_sum,
    transpose,
    warpgroup,
    where,
    zeros,
)
from ops.for_attention.taylor_features import BASE, FEATURES, HALF
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st
from tiles.arguments import ENDS, FLOAT, INT, array, tiled

from .tokens import CHUNK, COLUMNS, Sequences

STAGES = 4  # chunks in flight
LOADER, THREADS, RESIDENT = 1, 2 * warpgroup.THREADS, 2  # the loading warpgroup; threads; blocks of a multiprocessor
KEEP, CLAIM = 24, 232  # registers a thread of the loader and of the other warpgroup


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. dtype: of q, k, v and out. normalize: are outputs divided by the sum of their weights? varlen:
    do the sequences follow one another in a single batch?"""

    dtype: dtype
    normalize: bool = True
    varlen: bool = False
    threads: ClassVar[int] = THREADS

    def __str__(self):
        return f"{self.dtype}{', normalized' * self.normalize}{', varlen' * self.varlen}"

    @property
    def key(self):
        """A chunk's tile of Q or K."""
        return st(CHUNK, BASE, self.dtype)

    @property
    def value(self):
        """A chunk's tile of V."""
        return st(CHUNK, COLUMNS, self.dtype)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """All configurations. Those for fp16, whose code takes as many registers as bf16's, come with `everything` only."""
    if arch == "sm_90a":
        dtypes = (bf16, fp16) if everything else (bf16,)
        yield from itertools.starmap(Config, itertools.product(dtypes, (False, True), (False, True)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, NORMALIZE, sequences = config.dtype, config.normalize, Sequences(config.varlen)
    X, ONES, STATE = rt(16, BASE, INPUT), rt(16, CHUNK, INPUT), rt(16, FEATURES, fp32)
    SQUARE, KEYS = rt(BASE, BASE, fp32), tiled(config.key, unit=1)
    DOWN, ALONG = SQUARE.col_vec, SQUARE.row_vec
    smem = shared(
        q=ring(config.key, STAGES),
        k=ring(config.key, STAGES),
        v=ring(config.value, STAGES),
        state=st(COLUMNS, FEATURES, INPUT),
        features=st(CHUNK, FEATURES, INPUT),
        out=config.value,
    )

    @inlined
    def weigh(s):
        """tril(1 + s + s ** 2 / 2)"""
        return warpgroup.tril(fma(s, fma(s, 0.5, 1.0), 1.0), 0, 0.0)

    @inlined
    def apart(d):
        """A mask: 1 where a column is d to the right of its row, counted around the end."""
        far = col_index(SQUARE) - row_index(SQUARE) - d
        return equal(far, 0.0) + equal(far, -float(BASE))

    @inlined
    def load_sums(gZ, sequence, head):
        """(n, z, Z), the number of tokens, the sum of k and the sum of k^T k, from the sums of features in memory."""
        zz, last = zeros(SQUARE), load(gZ, DOWN, (sequence, head, BASE * HALF), cols=2)
        for d in range(HALF):
            zz = zz + apart(d) * load(gZ, DOWN, (sequence, head, BASE * d), cols=2)
        zz = zz + apart(HALF) * where(less(row_index(DOWN), HALF), last, 0.0)
        z = zeros(SQUARE) + load(gZ, ALONG, (sequence, head, BASE * (HALF + 1)), cols=2, aligned=False)
        return tile_sum(where(equal(row_index(DOWN), HALF), last, 0.0)), z, zz + transpose(zz)

    @inlined
    def store_sums(gZ, sequence, head, count, z, zz):
        """Store these as sums of features. Each warp has all of them."""
        for d in range(HALF):
            share = 0.5 if d == 0 else 1.0
            store(gZ, row_sum(apart(d) * zz) * share, (sequence, head, BASE * d), cols=2)
        last = where(equal(row_index(DOWN), HALF), count, 0.0)
        store(gZ, where(less(row_index(DOWN), HALF), row_sum(apart(HALF) * zz), last), (sequence, head, BASE * HALF), cols=2)
        store(gZ, col_max(z), (sequence, head, BASE * (HALF + 1)), cols=2, aligned=False)

    @cuda.jit(launch_bounds=(THREADS, RESIDENT), fastmath=True)
    def scan(
        gQ: KEYS, gK: KEYS, gV: tiled(config.value, unit=1), gO: sequences.output(config.value),
        gStart: array(4), gStartZ: array(3), gState: array(4), gZ: array(3), gEnds: ENDS,
        length: INT, heads: INT, columns: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The outputs of one of the `heads` of the values, of which `group` share a key head, in one of `columns` blocks of 64
        columns."""
        q, k, v, state, features, out = smem.open()
        pair, column = divmod(cuda.blockIdx.x, columns)
        sequence, head = divmod(pair, heads)
        span = sequences.span(gEnds, sequence, length)
        n = span.chunks()
        if warpgroup.id() == LOADER:
            warpgroup.release_registers(KEEP)
            key_head, _ = divmod(head, group)
            for j in range(n):
                token = span.token(j)
                q.fill(j, gQ, (span.batch, token, key_head))
                k.fill(j, gK, (span.batch, token, key_head))
                v.fill(j, gV, (span.batch, token, head, column))
        else:
            warpgroup.claim_registers(CLAIM)
            s_t = warpgroup.load(gStart, STATE, (sequence, head, 0, COLUMNS * column), rows=3, cols=2)
            if NORMALIZE:
                earlier, z, zz = load_sums(gStartZ, sequence, head)
            warpgroup.store(state, s_t)
            warpgroup.sync()
            for j in range(n):
                keys, values = k.wait(j), v.wait(j)
                sequences.clear(keys, span.left(j))
                sequences.clear(values, span.left(j))
                queries = warpgroup.load(q.wait(j), X) * scale
                q.release(j)
                s = warpgroup.mm_ABt(queries, keys)
                o = warpgroup.mm_ABt(taylor(queries, 1.0), state)
                p = weigh(warpgroup.wait(s, newer=1))
                if NORMALIZE:
                    sums = finish_sum(lane_sum(p))
                o = warpgroup.mma_AB(o, INPUT(p), values)
                warpgroup.store(features, taylor(warpgroup.load(keys, X), 0.5))
                warpgroup.sync()
                s_t = warpgroup.mma_AtB(s_t, values, features)
                o = warpgroup.wait(o, newer=1)
                if NORMALIZE:
                    before = row_sum(fp32(queries) * mma_ABt(z, queries, INPUT(zz * 0.5))) + earlier + CHUNK * j
                    z, zz = mma_AB(z, ones(ONES), keys), mma_AtB(zz, keys, keys)
                    o = o / (sums + before)
                sequences.store(gO, out, o, span, span.token(j), head, column)
                if sequences.varlen:
                    warpgroup.sync()
                s_t = warpgroup.wait(s_t)
                warpgroup.store(state, s_t)
                warpgroup.store_wait()
                warpgroup.sync()
                k.release(j)
                v.release(j)
            warpgroup.store(gState, s_t, (sequence, head, 0, COLUMNS * column), rows=3, cols=2)
            sequences.store_nobodys(gO, gEnds, sequence, length, head, column)
            if NORMALIZE and column == 0:
                store_sums(gZ, sequence, head, earlier + float32(span.end - span.first), z, zz)

    return scan, smem
