"""FlashAttention forward for Hopper: a producer warpgroup, and consumers that overlap their softmax with matrix products.

Every consumer owns 64 query rows. Key blocks run from the last to the first, so that the ones a mask cuts come first.
While the softmax of block j runs, the tensor cores compute O += P V of block j - 1, and consumers take turns to issue, so
that one's softmax runs under another's products (FlashAttention-3, Shah et al. 2024).

A row that has seen no key keeps the finite maximum LOWEST while its masked scores are -inf: exp2 gives exact zeros, and
neither the loop nor the end needs a test for it.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import (
    divmod,
    exp2,
    finish_sum,
    full,
    lane_sum,
    lazy_maximum,
    log2,
    maximum,
    persistent_tile,
    rescale,
    right_fill,
    row_max,
    subtile,
    warpgroup,
    zeros,
)
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st
from tiles.arguments import FLOAT, INT, array, tiled

from .tiling import walk

LOWEST, TINY, LN2 = -1e30, 1e-30, math.log(2)
SLACK = 8.0  # how far, in powers of 2, the maximum may grow before O is rescaled: P stays below 2**8
SHARED_BYTES = 227 * 1024
SHORT = 2048  # keys, up to which a persistent grid pays: 5 % at 1024, -2 % from 4096 on (bench/NOTES.md)
REGISTERS = {2: (40, 232), 3: (32, 160)}  # consumers -> registers a thread of producer and consumer


@dataclass(frozen=True)
class Config:
    """A kernel's shape: head_dim as padded, key rows of a block, consumers of 64 query rows each, stages of the rings.
    persistent: a block a multiprocessor goes through many tiles and loads the next while it finishes one; else a block a
    tile, whose main loop is 2 % faster (it has more uniform registers for wgmma's descriptors)."""

    head_dim: int
    dtype: dtype
    causal: bool
    kv: int
    consumers: int
    persistent: bool = False
    stages: int = 2

    @property
    def rows(self):
        """Query rows of a thread block."""
        return warpgroup.ROWS * self.consumers

    @property
    def threads(self):
        """Threads of a block: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (self.consumers + 1)

    @property
    def query(self):
        """A block's tile of Q, 64 rows a consumer."""
        return st(self.rows, self.head_dim, self.dtype)

    @property
    def key(self):
        """A tile of K or V."""
        return st(self.kv, self.head_dim, self.dtype)

    def __str__(self):
        return (
            f"D {self.head_dim} {self.dtype}{' causal' * self.causal}, {self.rows} x {self.kv}{' persistent' * self.persistent}"
        )


SHAPES = {64: (128, 3), 96: (128, 2), 128: (128, 2), 192: (112, 2), 256: (80, 2)}  # padded head_dim: (kv, consumers)


def config_for(head_dim: int, dtype: dtype, causal: bool, seqlen_kv: int) -> Config:
    """The configuration that serves a problem: the next larger head_dim of SHAPES, persistent where tiles are short, and of
    fewer rows where half of a tile would lie beyond the diagonal."""
    padded = min(d for d in SHAPES if d >= head_dim)
    kv, consumers = SHAPES[padded]
    if causal and seqlen_kv <= SHORT // 2:
        consumers = min(consumers, 2)
    return Config(padded, dtype, causal, kv, consumers, persistent=seqlen_kv <= SHORT)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems of any length are served with; fp16, whose code takes the same registers as bf16's, with `everything`."""
    if arch == "sm_90a":
        for of, head_dim, causal in itertools.product((bf16, fp16) if everything else (bf16,), SHAPES, (False, True)):
            yield from dict.fromkeys(config_for(head_dim, of, causal, SHORT * n // 2) for n in (1, 2, 3))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, CONSUMERS, CAUSAL, PERSISTENT = config.kv, config.rows, config.consumers, config.causal, config.persistent
    PRODUCER, (keep, claim) = CONSUMERS, REGISTERS[CONSUMERS]
    INPUT, O = config.dtype, rt(16, config.head_dim, fp32)
    readers = CONSUMERS * warpgroup.WARPGROUP
    smem = shared(
        q=ring(config.query, 1, readers),
        k=ring(config.key, config.stages, readers),
        v=ring(config.key, config.stages, readers),
    )
    turn = warpgroup.ping_pong(CONSUMERS)

    place, key_blocks = walk(config)

    @inlined
    def more(r, tiles):
        """Is there an r-th tile for this block?"""
        if PERSISTENT:
            return persistent_tile(r) < tiles
        else:
            return r == 0

    @inlined
    def mask(s, edge):
        """-inf for the scores that must not be seen: from column `edge` on or, causal, right of the diagonal `edge`."""
        if CAUSAL:
            return warpgroup.causal(s, edge, -math.inf)
        else:
            return right_fill(s, edge, -math.inf)

    @inlined
    def softmax_step(s, m, scale, slack):
        """exp2(scale (s - m_new)), the running maximum m_new, and the factor for sums taken with the old one."""
        m_new = lazy_maximum(m, maximum(m, row_max(s)), slack)
        return exp2(s * scale - m_new * scale), m_new, exp2((m - m_new) * scale)

    def overlap(cut):
        """The middle of the pipeline: scores and softmax of block j, while O takes up block j - 1; `cut` by the mask or not."""

        @inlined
        def step(j, o, p, m, l, alpha, queries, k, v, me, edge, scale, slack):
            turn.take(me)
            s = warpgroup.mm_ABt(queries, k.wait(j))
            o = rescale(o, alpha)
            o = warpgroup.mma_AB(o, p, v.wait(j - 1))
            turn.give(me)
            s = warpgroup.wait(s, newer=1)  # the scores are here, o is still in flight
            if cut:
                s = mask(s, edge + j * KV)
            p, m, alpha = softmax_step(s, m, scale, slack)
            k.release(j, after=m)
            l = l * alpha + lane_sum(p)
            o = warpgroup.wait(o)
            v.release(j - 1)
            return o, INPUT(p), m, l, alpha  # P is rounded here, not earlier: the mma reads its registers until wait(o)

        return step

    cut_step, step = overlap(True), overlap(False)

    @inlined
    def stand_by(r, j, n, q, k, v, me):
        """What a consumer does about a tile that has no rows for it: the others have the tensor cores for themselves."""
        q.wait(r)
        q.release(r)
        for i in range(j, int32(j + n)):
            k.wait(i)
            k.release(i)
            if i > j:
                turn.take(me)
                turn.give(me)
            v.wait(i)
            v.release(i)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: tiled(config.query), gK: tiled(config.key), gV: tiled(config.key), gO: array(4, INPUT), gLse: array(3),
        q_len: INT, kv_len: INT, offset: INT, blocks: INT, heads: INT, pairs: INT, band: INT, group: INT,
        scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """O = softmax(Q K^T / sqrt(D)) V and its log-sum-exp. A tile is a block of query rows of one of `pairs` pairs of head
        and batch, `band` of which are worked on at once; query i stands at key i + `offset`; `group` query heads
        share a key head; `scale` is log2(e) / sqrt(D), `slack` how far a maximum may lag."""
        q, k, v = smem.open()
        me = warpgroup.id()
        r = j = int32(0)  # tiles and key blocks so far
        if me == PRODUCER:
            warpgroup.release_registers(keep)
            while more(r, blocks * pairs):
                block, pair = place(persistent_tile(r), blocks, pairs, band)
                batch, head = divmod(pair, heads)
                kv_head, _ = divmod(head, group)
                n, _ = key_blocks(ROWS * block + offset, kv_len)
                for i in range(n):
                    k.fill(j + i, gK, (batch, n - 1 - i, kv_head))
                    if i == 0:
                        q.fill(r, gQ, (batch, block, head))
                    v.fill(j + i, gV, (batch, n - 1 - i, kv_head))
                r, j = int32(r + 1), int32(j + n)
        else:
            warpgroup.claim_registers(claim)
            turn.begin(me)
            while more(r, blocks * pairs):
                block, pair = place(persistent_tile(r), blocks, pairs, band)
                diagonal = ROWS * block + offset  # the last key that the first row may see
                n, cut = key_blocks(diagonal, kv_len)
                row = ROWS * block + 64 * me
                if PERSISTENT and row >= q_len:
                    stand_by(r, j, n, q, k, v, me)
                else:
                    edge = (diagonal + 64 * me if CAUSAL else kv_len) - (n - 1 + j) * KV
                    queries = subtile(q.wait(r), 64, me)
                    s = warpgroup.wait(warpgroup.mm_ABt(queries, k.wait(j)))
                    k.release(j)
                    p, m, alpha = softmax_step(mask(s, edge + j * KV), full(O.col_vec, LOWEST), scale, slack)
                    l = lane_sum(p)
                    p = INPUT(p)
                    o = zeros(O)
                    for i in range(int32(j + 1), int32(j + cut)):
                        o, p, m, l, alpha = cut_step(i, o, p, m, l, alpha, queries, k, v, me, edge, scale, slack)
                    for i in range(int32(j + cut), int32(j + n)):
                        o, p, m, l, alpha = step(i, o, p, m, l, alpha, queries, k, v, me, edge, scale, slack)
                    q.release(r)
                    o = warpgroup.wait(warpgroup.mma_AB(rescale(o, alpha), p, v.wait(j + n - 1)))
                    v.release(j + n - 1)
                    l = finish_sum(l)
                    batch, head = divmod(pair, heads)
                    warpgroup.store(gO, o / maximum(l, TINY), (batch, row, head, 0), rows=1, cols=3, aligned=True)
                    warpgroup.store(gLse, (m * scale + log2(l)) * LN2, (batch, head, row))
                r, j = int32(r + 1), int32(j + n)

    return attend, smem
