"""The gradient of a bias that has a number for each score, for Hopper: bias.py for a bias whose tiles TMA brings.

A thread block goes through its share of the tiles of dBias. For each tile it sums dS over the heads and batches that share the
tile, in registers and in a fixed order. Scores and dP are computed once more, which is two of the five products of backward.
The producer works ahead, so that the arrays for the next tile arrive while the sum of this one is written."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from numba import cuda
from numpy import int32

from ops import divmod, load, subtile, warpgroup, zeros
from tiles import bf16, fp32, inlined, ring, rt, shared, st
from tiles.arguments import FLOAT, INT, array, tiled

from ..base_config import BaseConfig
from ..scores import BiasedByTile
from ..sequences import BatchedLayout
from ..tiling import zero_first_keys, zero_last_keys
from ..variants import Both, ScoreContext
from ..visible_keys import CAUSAL
from .base_config import BackwardConfig
from .recomputed_scores import Added
from .results import of_sums

CONSUMERS, REGISTERS = 2, (40, 232)  # registers a thread of producer and consumer
KV = {64: 96, 128: 64}  # padded head_dim: keys of a tile
STAGES = 2


@dataclass(frozen=True)
class Config(BaseConfig):
    """A kernel's shape. others: queries of the main kernel's tiles, for whose rows `prepare` left two numbers each. adds: the
    gradient is added to what the array holds."""

    others: int = field(kw_only=True)
    adds: bool = field(default=False, kw_only=True)
    rows = CONSUMERS * warpgroup.ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (CONSUMERS + 1)

    def __str__(self):
        return super().__str__() + f", {self.others} others" + ", adds" * self.adds


def serves(main: BackwardConfig, read: Added) -> bool:
    """Does this kernel serve the gradient of the bias that `read` reads, if this is the main kernel's configuration?"""
    variant = main.variant
    plain = main.seq_layout is BatchedLayout and not (main.by_list or main.axes or variant.uses_random)
    return variant.tma_bias is not None and main.head_dim in KV and plain and read.both is None


def config_for(main: BackwardConfig) -> Config:
    """The configuration that serves where this is the main kernel's."""
    shape = main.head_dim, main.value_dim, main.dtype, main.variant, KV[main.head_dim]
    return Config(*shape, axes=main.axes, others=main.rows, adds=main.adds)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with."""
    if arch == "sm_90a":
        for head_dim, others in ((64, 128), (128, 64)):
            variant = Both(CAUSAL, BiasedByTile(True, False, bf16))
            yield Config(head_dim, head_dim, bf16, variant, KV[head_dim], others=others)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ROWS, COLS, EACH, OTHERS = config.rows, config.kv, warpgroup.ROWS, config.others
    PARAMS, AUX, variant, tiling, brought = config.params, config.aux, config.variant, config.tiling, config.brought
    sequences, result, (keep, claim) = config.sequences, of_sums(config.adds), REGISTERS
    S, readers = rt(16, COLS, fp32), CONSUMERS * warpgroup.WARPGROUP
    DOUT = st(ROWS, config.value_dim, config.dtype)
    smem = shared(
        q=ring(config.query, STAGES, readers),
        k=ring(config.key, STAGES, readers),
        v=ring(config.value, STAGES, readers),
        do=ring(DOUT, STAGES, readers),
        **brought.rings(STAGES, readers),
    )

    @inlined
    def place(m, own_heads, own_tiles, blocks, params, aux):
        """(the At of the m-th tile's first query and head, its first key, do its queries see any of its keys, must scores be
        masked?)"""
        rest, number = divmod(int32(m), blocks)
        rest, tile = divmod(rest, own_tiles)
        batch, head = divmod(rest, own_heads)
        seq, row, key = sequences.sequence(batch, params), int32(ROWS * tile), int32(COLS * number)
        ctx = ScoreContext(batch, head, row, seq.seqlen_k - seq.seqlen_q, seq.seqlen_q, seq.seqlen_k, params, aux, 0)
        seen = variant.key_range(row, row + ROWS - 1, ctx)
        cut = key < seen.inner_first or key + COLS > seen.inner_end
        return ctx, key, seen.first < key + COLS and key < seen.end, cut

    @inlined
    def slope(n, tile, rings, gSums, ctx, key, cut, me, scale):
        """dS of a consumer's rows, for the n-th tiles of queries and keys that arrived."""
        q, k, v, do = rings
        s = warpgroup.mm_ABt(subtile(q.wait(n), EACH, me), k.wait(n))
        values = v.wait(n)
        zero_first_keys(values, tiling.unseen_ahead(key, ctx), CONSUMERS)
        zero_last_keys(values, tiling.unseen_behind(key + COLS, ctx), CONSUMERS)
        dp = warpgroup.mm_ABt(subtile(do.wait(n), EACH, me), values)
        numbers = int32(2 * OTHERS * (ctx.row // OTHERS) + ctx.row % OTHERS)
        lse = load(gSums, S.col_vec, (ctx.batch, ctx.head, numbers))
        delta = load(gSums, S.col_vec, (ctx.batch, ctx.head, int32(numbers + OTHERS)))
        ctx = brought.own_rows(tile, ctx._replace(precomputed=variant.precompute(ctx)), me)
        s = warpgroup.wait(s, newer=1)
        q.release(n)
        k.release(n)
        s, _ = variant.score_and_grad(s, ctx, key)
        p = tiling.weights(s, lse, cut, ctx, key, scale)
        dp = warpgroup.wait(dp)
        do.release(n)
        v.release(n)
        return p * (dp - delta)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def biased(
        gQ: tiled(config.query), gK: tiled(config.key), gV: tiled(config.value), gDO: tiled(DOUT), gSums: array(3),
        gDBias: array(4), params: PARAMS, aux: AUX, every: INT, own_heads: INT, own_tiles: INT, blocks: INT, batches: INT,
        heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """A share of `every` tile of dBias, which has `own_heads` heads, `own_tiles` tiles of queries and `blocks` of keys;
        `batches` and `heads` share each. The weight of a score s is exp2(`scale` s - lse); `group` query heads share a key
        head."""
        q, k, v, do, tiles = brought.open(smem)
        me = warpgroup.id()
        t = n = int32(0)  # tiles, and their queries and keys, so far
        if me == CONSUMERS:
            warpgroup.release_registers(keep)
            for m in range(cuda.blockIdx.x, every, cuda.gridDim.x):
                ctx, key, seen, _ = place(m, own_heads, own_tiles, blocks, params, aux)
                if seen:
                    brought.fill(tiles, t, params, (ctx.batch, ctx.head, ctx.row, key // COLS))
                    for i in range(batches * heads):
                        batch, head = divmod(int32(i), heads)
                        batch, head = int32(ctx.batch + batch), int32(ctx.head + head)
                        q.fill(n, gQ, (batch, ctx.row // ROWS, head))
                        k.fill(n, gK, (batch, key // COLS, head // group))
                        do.fill(n, gDO, (batch, ctx.row // ROWS, head))
                        v.fill(n, gV, (batch, key // COLS, head // group))
                        n = int32(n + 1)
                    t = int32(t + 1)
        else:
            warpgroup.claim_registers(claim)
            rings = q, k, v, do
            for m in range(cuda.blockIdx.x, every, cuda.gridDim.x):
                ctx, key, seen, cut = place(m, own_heads, own_tiles, blocks, params, aux)
                mine, total = int32(ctx.row + EACH * me + S.rows * warpgroup.rank()), zeros(S)
                if seen:
                    tile = tiles.wait(t)
                    for i in range(batches * heads):
                        batch, head = divmod(int32(i), heads)
                        here = ctx._replace(batch=int32(ctx.batch + batch), head=int32(ctx.head + head), row=mine)
                        total = total + slope(n, tile, rings, gSums, here, key, cut, me, scale)
                        n = int32(n + 1)
                    brought.give_back(tiles, t)
                    t = int32(t + 1)
                result.store_sums(gDBias, total, (ctx.batch, ctx.head, mine, key))

    return biased, smem
