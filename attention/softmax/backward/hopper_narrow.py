"""Gradients of softmax attention for Hopper, for narrow heads. Two warpgroups, the consumers, compute P and dS of 64 keys each,
and dV. They leave dS in shared memory, and a third warpgroup, the gatherer, computes from it what needs dS of all keys: dK, dQ.

So a warpgroup that computes exponentials never waits for a product of dQ, stores one, or holds dK. The dS of a tile is
published while the scores of the next tile are computed. The gatherer computes dK^T = Q^T dS, with dS of all keys as the right
operand, because that reads less shared memory than dK = dS^T Q. dQ is added up as in hopper.py. 512 threads have registers for
this if heads have up to 64 columns and the variant needs few (`serves`).

If the variant changes scores, the consumers take turns to compute their weights, so that the exponentials of one run under the
products of the other, and not beside its exponentials."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import divmod, grid, load, store, subtile, transpose, turned, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st
from tiles.arguments import FLOAT, INT, array, tiled

from .. import variants
from ..variants import ScoreContext
from ..visible_keys import CAUSAL, FULL
from . import hopper, hopper_pipeline
from .hopper_pipeline import CONSUMERS, FILLER, READERS, SENDER, SENDERS

GATHERER, PRODUCER = CONSUMERS, CONSUMERS + 1  # the third and the fourth warpgroup
REGISTERS = (24, 136, 176)  # for each thread of the producer, of the gatherer, of a consumer
HEAD_DIM, QUERIES = 64, 128  # columns of a head, padded; queries of a tile


@dataclass(frozen=True)
class Config(hopper.Config):
    """A kernel's shape. Each consumer owns 64 keys."""

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers, the gatherer and one producer warpgroup."""
        return warpgroup.THREADS * (PRODUCER + 1)

    def __str__(self):
        return super().__str__() + " apart"


def serves(head_dim: int, variant: variants.Variant, value_dim: int | None = None) -> bool:
    """Is this kernel for such heads?"""
    return max(head_dim, value_dim or 0) <= HEAD_DIM and variant.fits_narrow_backward


@functools.lru_cache(1024)
def config_for(head_dim: int, dtype: dtype, variant: variants.Variant, value_dim: int | None = None, **kind: Any) -> Config:
    """The configuration that serves a problem. kind: `ordered`, `stores`."""
    shape = CONSUMERS * warpgroup.ROWS, QUERIES
    ds_stages = 1 if variant.tma_bias else 2  # there is room for no more
    return Config(HEAD_DIM, HEAD_DIM, dtype, variant, *shape, stages=3, ds_stages=ds_stages, rounded=True, **kind)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with."""
    if arch == "sm_90a":
        for of, variant in itertools.product((bf16, fp16) if everything else (bf16,), (FULL, CAUSAL)):
            yield config_for(HEAD_DIM, of, variant)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, EACH = config.kv, config.rows, warpgroup.ROWS  # keys of a block, queries of a tile, keys of a consumer
    PARAMS, AUX, INPUT, order, brought = config.params, config.aux, config.dtype, config.order, config.brought
    variant, tiling, parts, sequences, PARTS = config.variant, config.tiling, config.parts, config.sequences, config.parts.count
    DK, DV, S = rt(16, KV, fp32), rt(16, config.value_dim, fp32), rt(ROWS, 16, fp32, "col")  # of dK^T a warp has 16 columns
    gathers = warpgroup.WARPGROUP
    BENDS, TURNS, (keep, take, claim) = variant.nonlinear, variant.changes_scores, REGISTERS
    smem = shared(
        k=ring(config.key, 1, READERS),
        v=ring(config.value, 1, READERS),
        q=ring(config.query, config.stages, READERS + gathers),
        do=ring(config.dout, config.do_stages, READERS),
        ds=ring(st(ROWS, KV, INPUT), config.ds_stages, gathers, READERS),
        dq=ring(parts.tile, config.dq_stages, 1, gathers),
        sums=ring(config.of_rows, config.stages, READERS),
        **brought.rings(1, READERS),
    )
    turn = warpgroup.ping_pong(CONSUMERS)

    @inlined
    def publish(j, rings):
        """Publish dS of tile j, and give back its numbers of rows."""
        q, do, ds, dq, sums, bias = rings
        ds.publish(j)
        sums.release(j, None, True)

    @inlined
    def step(j, dv, cut, rings, keys, values, ctx, key, scale):
        """P and dS of tile j of queries, and dV with its contribution."""
        q, do, ds, dq, sums, bias = rings
        s = warpgroup.mm_ABt(keys, q.wait(j))
        if j > 0:
            publish(j - 1, rings)  # only now: the fence waits for the stores of dS, while the scores are computed
        of_rows = sums.wait(j)
        s = turned(warpgroup.wait(s))
        if TURNS:
            turn.take(warpgroup.id())
        q.release(j)
        mine = int32(key + EACH * warpgroup.id() + S.cols * warpgroup.rank())  # computed anew, to save registers
        ctx = brought.by_keys(bias, j, ctx, warpgroup.id())
        brought.give_back(bias, j)
        s, bend = variant.score_and_grad(s, ctx, mine)
        if BENDS:
            bend = INPUT(bend)  # to save registers
        p = tiling.weights(s, load(subtile(of_rows, ROWS, 0), S.col_vec), cut, ctx, mine, scale)
        if TURNS:
            turn.give(warpgroup.id())
        dout = do.wait(j)
        dp = warpgroup.mm_ABt(values, dout)
        weights = INPUT(turned(p))
        dv = warpgroup.mma_AB(dv, weights, dout)
        dp = turned(warpgroup.wait(dp, newer=1))
        delta = load(subtile(of_rows, ROWS, 1), S.col_vec)
        slope = fp32(turned(weights)) * (dp - delta)  # from rounded weights, which take fewer registers
        if BENDS:
            slope = slope * fp32(bend)
        warpgroup.store_transposed(subtile(ds.claim(j), ROWS, 0, EACH, warpgroup.id()), INPUT(turned(slope)))
        dv = warpgroup.wait(dv)
        do.release(j)
        return dv

    @inlined
    def stored(n, part, dq):
        """Hand a part of dQ to a sender."""
        warpgroup.store_held(dq.claim(n), part)
        dq.publish(n)

    @inlined
    def gathered(j, dk, rings, every_key):
        """dK^T with the contribution of tile j of queries, and the two parts of its dQ: the first one is handed on while the
        other products run."""
        q, do, ds, dq, sums, bias = rings
        every, queries = ds.wait(j), q.wait(j)
        part = parts.product(0, every, every_key)
        dk = warpgroup.mma_AtB(dk, queries, every)
        stored(PARTS * j, warpgroup.wait(part, newer=1), dq)
        part = parts.product(1, every, every_key)
        dk = warpgroup.wait(dk, newer=1)
        q.release(j)
        part = warpgroup.wait(part)
        ds.release(j)
        stored(PARTS * j + 1, part, dq)
        return dk

    bring, send, following = hopper_pipeline.bringing(config), hopper_pipeline.sending(config), hopper_pipeline.going(config)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: tiled(config.query), gK: tiled(config.key), gV: tiled(config.value),
        gDO: tiled(config.dout), gSums: tiled(config.of_rows, 3, None, 2), gSum: tiled(parts.tile, 3, 1, 2),
        gDK: array(4, INPUT), gDV: array(4, INPUT), params: PARAMS, aux: AUX, blocks: INT, heads: INT, batch_heads: INT,
        band: INT, group: INT, shares: INT, spans: INT, scale: FLOAT, unit: FLOAT,
    ):  # fmt: skip
        """As in hopper.py."""
        k, v, q, do, ds, dq, sums, bias = brought.open(smem)
        grid.follow()
        me = warpgroup.id()
        block, batch_head = order.place(tiling, cuda.blockIdx.x, blocks, batch_heads, band)
        batch, share = divmod(batch_head, heads)
        subgroup, span = divmod(share, spans)
        seq, key = sequences.sequence(batch, params), int32(KV * block)
        ctx = ScoreContext(
            batch, group * subgroup, int32(0), seq.seqlen_k - seq.seqlen_q, seq.seqlen_q, seq.seqlen_k, params, aux, 0
        )
        every = tiling.span(tiling.tiles(key, ctx, group), span, spans)
        tiles, row = int32(group * every.n), seq.offset_k + key
        if me == PRODUCER:
            warpgroup.release_registers(keep)
            if warpgroup.rank() == FILLER:
                arrays, into = (gK, gV, gQ, gDO, gSums), (k, v, q, do, sums, bias)
                bring(arrays, into, seq, block, divmod(share, shares)[0], every, key, ctx, group, 0)
            if SENDER <= warpgroup.rank() < SENDER + SENDERS:
                send(gSum, dq, block, divmod(batch_head, spans)[0], every, key, ctx, group, 0)
        elif me == GATHERER:
            warpgroup.claim_registers(take)
            dk, rings = zeros(DK), (q, do, ds, dq, sums, bias)
            if tiles > 0:
                every_key = k.wait(0)
                for j in range(tiles):
                    dk = gathered(int32(j), dk, rings, every_key)
            store(gDK, transpose(INPUT(dk * unit)), (seq.batch, row, share, 16 * warpgroup.rank()), 1, 3, True)
        else:
            warpgroup.claim_registers(claim)
            if TURNS:
                turn.begin(me)
            dv, rings = zeros(DV), (q, do, ds, dq, sums, bias)
            if tiles > 0:
                here = ctx._replace(row=int32(ROWS * order.start(every)))
                here, i = here._replace(precomputed=variant.precompute(here)), int32(0)
                every_key, every_value = k.wait(0), v.wait(0)
                every.clear(every_key, CONSUMERS)
                every.clear(every_value, CONSUMERS)
                keys, values = subtile(every_key, EACH, me), subtile(every_value, EACH, me)
                last = int32(0)
                for j in range(tiles):
                    if j > 0:
                        i, here = following(i, every, here)
                    last = int32(j)
                    cut = tiling.cut(every, order.nth(every.n, i))
                    dv = step(int32(j), dv, cut, rings, keys, values, here, key, scale)
                publish(last, rings)
            warpgroup.store(gDV, INPUT(dv), (seq.batch, row + EACH * me, share, 0), 1, 3, True)

    return attend, smem
