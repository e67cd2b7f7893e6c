"""FlashAttention forward for Hopper: a producer warpgroup, and consumers that overlap their softmax with matrix products.

Every consumer owns 64 query rows. Key blocks run from the last to the first, so that the ones a mask cuts come first.
While the softmax of block j runs, the tensor cores compute O += P V of block j - 1, and consumers take turns to issue, so
that one's softmax runs under another's products (FlashAttention-3, Shah et al. 2024). At a head_dim of 96 and 128 three
consumers keep the tensor cores busier than two; their registers then do not hold P, which goes through shared memory.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from numba import cuda
from numpy import int32

from ops import divmod, persistent_tile, subtile, warpgroup
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, static
from tiles.arguments import FLOAT, INT, array, tiled

from .base_config import BaseConfig, in_pages
from .key_sources import BLOCK, OneBuffer, StreamingBuffers, TwoBuffers
from .online import Softmax
from .output import AccumulateOutput, StoreFloat32, StoreOutput, TmaStoreOutput
from .sequences import BatchedLayout, PackedLayout, QueryPartsLayout
from .tiling import zero_first_keys, zero_last_keys
from .variants import ScoreContext, Variant
from .visible_keys import CAUSAL, FULL
from .weights import WeightsInRegisters, WeightsInShared

REGISTERS = {1: (24, 232), 2: (40, 232), 3: (32, 160), 4: (32, 112)}  # consumers -> registers a thread of producer and consumer


@dataclass(frozen=True)
class Config(BaseConfig):
    """A kernel's configuration. consumers: each has 64 query rows. stages, queries: the slots of the rings of keys and values,
    and of the ring of queries. persistent: each multiprocessor has one block, which works on many tiles and loads the next one
    while it finishes one; otherwise each tile has a block, and the hardware balances the load. sent: TMA stores the output,
    from the slot of its queries, while the next tile begins; otherwise the consumers store it. turns: do consumers take turns
    to issue their products? stored: do weights reach their product with the values through shared memory? resident: blocks
    that share a multiprocessor."""

    consumers: int
    stages: int = 2
    persistent: bool = False
    q_stages: int = 1
    tma_store: bool = False
    ping_pong: bool = True
    weights_in_shared: bool = False
    ctas_per_sm: int = 1

    @property
    def rows(self):
        """Query rows of a thread block."""
        return warpgroup.ROWS * self.consumers

    @property
    def threads(self):
        """Threads of a block: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (self.consumers + 1)

    @property
    def output(self):
        """The object that writes the output."""
        if self.tma_store:
            return TmaStoreOutput(self.seq_layout.bounded_by_array)
        kind = AccumulateOutput if self.accumulates else StoreFloat32 if self.float32_out else StoreOutput
        return kind(self.seq_layout.bounded_by_array)

    @property
    def turn(self):
        """The object that says in which order consumers issue their products."""
        return warpgroup.ping_pong(self.consumers) if self.ping_pong else AsTheyCome()

    @property
    def weights(self):
        """The object that says where weights lie."""
        return (WeightsInShared if self.weights_in_shared else WeightsInRegisters)(self.dtype)

    def lasts(self, queries: Any, keys: Any, batch_heads: Any, processors: int) -> Any:
        """How long the busiest multiprocessor works, in keys that rows of queries see: the time of a tile times the rounds of
        tiles. If later queries see more keys, it is the longer of the last tile's time and the mean over all
        multiprocessors."""
        tiles, row = batch_heads * -(-queries // self.rows), TAKES[max(self.head_dim, self.value_dim)][self.consumers]
        rounds, tile = -(-tiles // processors), row * self.rows
        if self.variant.monotonic:
            last, mean = tile * (keys - min(self.rows, queries) / 2), tile * (keys - queries / 2)
            return max(BESIDES + last, rounds * BESIDES + tiles * mean / processors)
        return rounds * (BESIDES + tile * keys)

    def __str__(self):
        return (
            super().__str__() + " persistent" * self.persistent + " sent" * self.tma_store + " stored" * self.weights_in_shared
        )


def one(kv: int, **more: Any) -> dict[str, Any]:
    """The shape with one consumer and this many keys in a block; two such blocks share a multiprocessor."""
    shape = {"kv": kv, "consumers": 1, "stages": 2, "persistent": False, "q_stages": 1, "tma_store": False, "ping_pong": False}
    return shape | {"weights_in_shared": False, "ctas_per_sm": 2} | more


def two(kv: int, **more: Any) -> dict[str, Any]:
    """The shape with two consumers, and one block on a multiprocessor."""
    return {"kv": kv, "consumers": 2, "stages": 2, "weights_in_shared": False} | more


def three(kv: int, **more: Any) -> dict[str, Any]:
    """The shape with three consumers, and one block on a multiprocessor."""
    return two(kv) | {"consumers": 3} | more


# By padded head_dim: the shapes, and the entries that differ if something takes registers
SHAPES = {64: three(128), 96: two(128), 128: two(128), 192: two(112), 256: two(80)}
ROOMY = {64: two(128), 192: two(96), 256: two(64)}  # random numbers are drawn
PAGED = {64: two(128)}  # the producer looks up pages
LOADED = {64: two(128), 96: two(96), 128: two(96), 192: two(64), 256: two(48)}  # a bias is read
FETCHED = LOADED | {64: three(96), 128: two(128)}  # ... whose numbers are those of columns
BROUGHT = {64: three(96), 96: two(128), 128: two(128), 192: two(80), 256: two(64)}  # ... of which TMA brings tiles
SCORED = {128: three(80, stages=3)}  # something is made of scores: two consumers are at that, not one
NARROW = {(192, 128): two(128)}  # values have fewer columns; else as if they had as many
# The entries that differ up to some number of keys. If tiles are short, a persistent grid pays, often of another shape.
# bench/notes/forward.md has the figures. At 64, causal, a consumer passes by key blocks that none of its rows sees: the smaller
# they are, the more.
PERSISTENT = {"persistent": True}
BY_LENGTH: dict[tuple[int, bool], dict[float, dict[str, Any]]] = {  # of a padded head_dim, causal or not
    (64, False): {4096: PERSISTENT | {"stages": 3, "q_stages": 2, "tma_store": True}},
    (64, True): {
        2048: PERSISTENT | {"kv": 64, "consumers": 4, "stages": 4, "q_stages": 2},
        4096: PERSISTENT | {"q_stages": 2, "tma_store": True},
    },
    (96, False): {1024: PERSISTENT | {"q_stages": 2}, math.inf: three(128, weights_in_shared=True)},
    (96, True): {
        1024: PERSISTENT | {"q_stages": 2},
        2048: PERSISTENT | three(128, weights_in_shared=True),
        math.inf: three(128, weights_in_shared=True),
    },
    (128, False): {
        2048: PERSISTENT | {"q_stages": 2, "tma_store": True},
        math.inf: three(128, weights_in_shared=True, ping_pong=False),
    },
    (128, True): {2048: PERSISTENT | {"q_stages": 2}},
    (256, True): {2048: PERSISTENT | {"ping_pong": False}},
}
CAPPED = {1024: PERSISTENT | three(128, weights_in_shared=True), math.inf: three(128, weights_in_shared=True)}
SLOPED = {1024: PERSISTENT, math.inf: three(128, weights_in_shared=True)}
SCORED_BY_LENGTH = {(96, True): CAPPED, (128, True): CAPPED, (128, False): SLOPED}  # ... are scores bent or added to
SMALL = {64: one(64, stages=4), 96: one(64), 128: one(64)}  # of many sequences of up to 64 queries
TABLES = SHAPES, SCORED, LOADED, FETCHED, BROUGHT, ROOMY, SMALL
A_BLOCK_EACH: dict[str, Any] = {
    "persistent": False,
    "q_stages": 1,
    "tma_store": False,
}  # tiles of sequences that do not all lie alike
USUAL = A_BLOCK_EACH | {"ping_pong": True, "weights_in_shared": False, "ctas_per_sm": 1}
SHORT, MANY = 96, 4  # packed: queries on average; sequences in all heads, a multiprocessor
# How long a multiprocessor takes for a row of queries, by padded head_dim and consumers, where three take 1; and how long for a
# tile besides, in keys that a row sees
TAKES = {64: {4: 0.97, 3: 1.0, 2: 1.27, 1: 1.78}, 96: {3: 1.0, 2: 1.15, 1: 1.65}, 128: {3: 1.0, 2: 1.03, 1: 1.6}}
BESIDES = 16000
WINDOW: dict[int, dict[str, Any]] = {128: {"q_stages": 2, "ping_pong": False}}  # of windows of up to 2048 keys
OTHERS: dict[float, dict[str, Any]] = {2048: PERSISTENT}


def config_for(
    head_dim: int,
    dtype: dtype,
    variant: Variant,
    keys: float,
    value_dim: int | None = None,
    **kind: Any,
) -> Config:
    """The configuration that serves a problem in which queries see so many keys: the next larger dims of SHAPES, persistent
    where tiles are short. kind: further fields of the Config. Parts of a sequence have the key blocks of the whole, for equal
    bits."""
    padded, wide = (min(d for d in SHAPES if d >= dim) for dim in (head_dim, value_dim or head_dim))
    parts = kind.get("seq_layout") is QueryPartsLayout and not kind["axes"] and not kind["by_list"]
    if padded == wide and variant.positional and not variant.uses_random and (parts or not kind):
        whole = _config(padded, dtype, variant, next((end for end in _by_length(padded, variant) if keys <= end), None))
        return replace(whole, **A_BLOCK_EACH, **kind) if kind else whole
    shape = None if variant.uses_random or variant.reads_score_matrix else NARROW.get((padded, wide))
    shape = shape or (PAGED.get(max(padded, wide)) if kind.get("kv_source", OneBuffer()).paged else None)
    return Config(padded, wide, dtype, variant, **(shape or _shape(max(padded, wide), variant)), **kind)


def of_blocks(config: Config, kv: int) -> Config:
    """The same configuration with blocks of `kv` keys, in the shape that it has for other lengths, or that other variants
    have. ValueError: there is no such shape."""
    if config.kv == kv:
        return config
    padded = max(config.head_dim, config.value_dim)
    own, by_length = _shape(padded, config.variant), _by_length(padded, config.variant)
    shapes = [own, *[of[padded] for of in TABLES if padded in of]]
    if not config.axes:  # arrays of aux take registers, which long and short sequences' tiles do not have
        shapes = [*[own | entry for entry in by_length.values()], *shapes]
    shape = next((one for one in shapes if one["kv"] == kv), None)
    if shape is None:
        raise ValueError(f"family: has no blocks of {kv} keys for head_dim={config.head_dim}, value_dim={config.value_dim}")
    alike = config.seq_layout is BatchedLayout and not (
        config.axes or config.by_list or config.float32_out or config.accumulates
    )
    return replace(config, **USUAL | shape | ({} if alike else A_BLOCK_EACH))


def fitted(config: Config, queries: Any, keys: Any, batch_heads: Any, processors: int, kv: int | None = None) -> Config:
    """The same configuration with fewer query rows in a tile, if otherwise much would be idle: rows of tiles, because
    sequences have few queries (`queries`, of packed ones the mean), or multiprocessors, while the last tiles are worked on.
    For full and causal attention only. batch_heads: how many sequences there are, counted by head. The bits stay the same,
    except for many short sequences, whose blocks of keys become smaller, unless they must have `kv` keys."""
    if (
        config.variant not in (FULL, CAUSAL)
        or config.seq_layout not in (BatchedLayout, PackedLayout)
        or config.axes
        or config.by_list
    ):
        return config
    widest = max(config.head_dim, config.value_dim)
    if config.float32_out or config.accumulates or widest not in SMALL:
        return config
    small = SMALL[widest]
    if (
        queries <= (SHORT if config.seq_layout is PackedLayout else warpgroup.ROWS)
        and batch_heads >= MANY * processors
        and kv in (None, small["kv"])
    ):
        return replace(config, **small)
    if config.seq_layout is not BatchedLayout:
        return config
    choices = [config]
    if config.consumers > 2:
        choices.append(replace(config, consumers=2, weights_in_shared=False, ping_pong=True))
    choices.append(
        replace(config, consumers=1, weights_in_shared=False, ping_pong=False, ctas_per_sm=2)
    )  # there is room for one or two
    return min(choices, key=lambda of: of.lasts(queries, keys, batch_heads, processors))


def _shape(padded: int, variant: Variant) -> dict[str, Any]:
    """The shape of the tiles of a variant."""
    loaded = FETCHED if variant.prefetches_columns and not variant.uses_random else LOADED
    loaded = BROUGHT if variant.tma_bias and not variant.uses_random else loaded
    shapes = (
        loaded
        if variant.reads_score_matrix or variant.tma_bias
        else ROOMY
        if variant.uses_random
        else SCORED
        if variant.changes_scores
        else SHAPES
    )
    return shapes.get(padded, SHAPES[padded])


def _by_length(padded: int, variant: Variant) -> dict[float, dict[str, Any]]:
    """{up to how many keys: the fields of the Config that are different then} for a variant."""
    if variant.cheap_mask:
        return BY_LENGTH.get((padded, variant.monotonic), OTHERS)
    if variant.changes_scores and variant.starts_at_zero and not (variant.reads_score_matrix or variant.tma_bias):
        return SCORED_BY_LENGTH.get((padded, variant.nonlinear), OTHERS)
    return OTHERS if variant.starts_at_zero or variant.changes_scores else {2048: PERSISTENT | WINDOW.get(padded, {})}


@functools.lru_cache(1024)
def _config(padded: int, dtype: dtype, variant: Variant, end: float | None) -> Config:
    other = {} if end is None else _by_length(padded, variant)[end]
    return Config(padded, padded, dtype, variant, **_shape(padded, variant) | other)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations that problems of any length are served with. fp16, whose code takes as many registers as bf16's,
    comes with `everything`."""
    if arch == "sm_90a":
        for of, head_dim, variant in itertools.product((bf16, fp16) if everything else (bf16,), SHAPES, (FULL, CAUSAL)):
            long = [config_for(head_dim, of, variant, end) for end in (*_by_length(head_dim, variant), math.inf)]
            loads = (1, 1), (warpgroup.ROWS + 1, 1), (512, 512)  # (queries, multiprocessors) for which one or two consumers do
            fewer = [fitted(config, queries, 512, MANY, processors) for config in long for queries, processors in loads]
            yield from dict.fromkeys((*long, *fewer))
            if everything:
                yield config_for(head_dim, of, variant, math.inf, **in_pages(2))
            if head_dim <= BLOCK and variant is CAUSAL:  # for several GPUs
                whole = config_for(head_dim, of, variant, math.inf, seq_layout=QueryPartsLayout, axes=(), by_list=False)
                yield from (
                    replace(whole, kv_source=source)
                    for source in (TwoBuffers(whole.key, whole.value), StreamingBuffers(whole.key, whole.value))
                )


@static
class AsTheyCome:
    """Consumers issue their products as soon as they can. The methods are those of `warpgroup.ping_pong`."""

    @inlined
    def begin(self, me):
        """Called once, before the first turn."""

    @inlined
    def take(self, me):
        """Wait for my turn."""

    @inlined
    def give(self, me):
        """Give the turn to the next consumer."""


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ROWS, KV, EACH = config.rows, config.kv, warpgroup.ROWS  # rows of a tile of queries, of keys, of a consumer
    CONSUMERS, PERSISTENT = config.consumers, config.persistent
    SKIPS = PERSISTENT and config.variant.starts_at_zero  # consumers pass by key blocks that none of their rows sees
    # the queries of a tile wait for the slot of the last tile's queries, but keys need not
    KEYS_FIRST = PERSISTENT and config.q_stages == 1
    AHEAD = config.kv_source.paged  # the next keys are loaded before the values, so that nobody waits while pages are looked up
    PARAMS, AUX = config.params, config.aux
    variant, tiling, turn, output = config.variant, config.tiling, config.turn, config.output
    own_rows, sequences, kv_source = replace(config, consumers=1).tiling, config.sequences, config.kv_source
    bias_tiles, weights = config.bias_tiles, config.weights
    PRODUCER, (keep, claim) = CONSUMERS, REGISTERS[CONSUMERS]
    INPUT, Q, S, O = config.dtype, *(rt(16, columns, fp32) for columns in (config.head_dim, config.kv, config.value_dim))
    DEEP, PREPARES, PANELS, PANEL = (
        variant.allows_low_scores,
        variant.prepares_queries,
        config.query.panels,
        rt(16, config.query.panel_cols, fp32),
    )
    readers = CONSUMERS * warpgroup.WARPGROUP
    smem = shared(
        q=ring(config.query, config.q_stages, readers),
        k=ring(config.key, config.stages, readers),
        v=ring(config.value, config.stages, readers),
        **weights.memory(ROWS, KV),
        **bias_tiles.rings(config.stages, readers),
    )
    softmax, OUTPUT = Softmax(O), output.declare(config.value_dim, config.dtype)

    @inlined
    def place(r, blocks, heads, batch_heads, band, params):
        """(block of queries, sequence, head) of the r-th tile."""
        block, batch_head = tiling.place(persistent_tile(r), blocks, batch_heads, band)
        return sequences.find_tile(block, batch_head, heads, params)

    @inlined
    def more(r, blocks, heads, batch_heads, band, params):
        """Does this block have an r-th tile?"""
        if PERSISTENT:
            return persistent_tile(r) < blocks * batch_heads
        elif sequences.bounded_by_array or r > 0:
            return r == 0
        else:
            block, batch, _ = place(0, blocks, heads, batch_heads, band, params)
            return r == 0 and sequences.has_tile(block, batch, params)

    @inlined
    def prepared(queries, ctx):
        """A consumer's rows of Q, as the variant changes them."""
        if PREPARES:
            of_queries = variant.query_stats(warpgroup.load(queries, Q), ctx)
            for i in range(PANELS):  # one after the other, for registers' sake
                panel = subtile(queries, EACH, 0, PANEL.cols, i)
                x = variant.prepare_queries(warpgroup.load(panel, PANEL), of_queries, ctx, PANEL.cols * i)
                warpgroup.store(panel, INPUT(x))
            warpgroup.sync()
        return queries

    def overlap(cut):
        """The middle of the pipeline: scores and softmax of block j, while O takes up block j - 1; `cut` by the mask or not."""

        @inlined
        def step(j, p, state, queries, k, v, tiles, room, me, ctx, key, scale, slack):
            turn.take(me)
            s = warpgroup.mm_ABt(queries, k.wait(j))
            o = warpgroup.mma_AB(state.rescale(), p, v.wait(j - 1))
            turn.give(me)
            fetched, here = variant.prefetch(S, ctx, key), bias_tiles.load_rows(tiles, j, ctx, me)
            s = warpgroup.wait(s, newer=1)  # the scores are here, o is still in flight
            if cut:
                s = tiling.mask(variant.score_in_edge_block_by(s, fetched, here, key), ctx, key)
                below = variant.row_offset_in_edge_block(s, ctx, key)
            else:
                s = variant.score_by(s, fetched, here, key)
                below = variant.row_offset(s, ctx, key)
            state = state.update_max(s, below, scale, slack)
            p = state.weights(s, below, scale, DEEP)
            k.release(j, after=state.m)
            state, p = state.add(p), variant.drop(p, ctx, key)
            o = warpgroup.wait(o)
            v.release(j - 1)
            return weights.stage(p, room, me), state._replace(o=o)  # only here: the mma reads P until wait(o)

        return step

    cut_step, step = overlap(True), overlap(False)

    @inlined
    def own_blocks(row, kv_blocks, ctx):
        """(how many of a tile's key blocks a consumer works on, the last ones in order; how many of them it masks: the first
        one at least, and all that the mask cuts). It works on none if its rows do not exist."""
        if SKIPS:
            own = own_rows.key_blocks(row, ctx)
            return int32(own.n if row < ctx.seqlen_q else 0), int32(max(1, own.masked))
        else:
            return kv_blocks.n, int32(max(1, kv_blocks.masked))

    @inlined
    def stand_by(j, first, end, behind, k, v, tiles, me):
        """Pass over the key blocks that none of a consumer's rows sees, so that the others have the tensor cores. Every
        consumer takes one turn for each key block of a tile except the last. The others may need my help to clear the last
        keys of the first block, `behind` of them."""
        for i in range(j, first):
            if i == j and behind > 0:
                zero_last_keys(v.wait(i), behind, CONSUMERS)
            k.wait(i)
            k.release(i)
            bias_tiles.skip(tiles, i)
            if i < end - 1:
                turn.take(me)
                turn.give(me)
            v.wait(i)
            v.release(i)

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def attend(
        gQ: tiled(config.query, unit=1), gK: kv_source.source(config.key), gV: kv_source.source(config.value), gO: OUTPUT,
        gLse: array(3), params: PARAMS, aux: AUX, blocks: INT, heads: INT, batch_heads: INT,
        band: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """O = softmax(Q K^T / sqrt(D)) V and its log-sum-exp, of what the variant makes of the scores. A tile is a block of
        query rows of one of `batch_heads` pairs of head and batch, `band` of which are worked on at once; `group` query heads
        share a key head; exp2(`scale` s) is the weight of a score, `slack` how far a maximum may lag."""
        q, k, v, tiles, room = weights.unpack(bias_tiles.open(smem))
        me = warpgroup.id()
        r = j = int32(0)  # tiles and key blocks so far
        if me == PRODUCER:
            warpgroup.release_registers(keep)
            while more(r, blocks, heads, batch_heads, band, params):
                block, batch, head = place(r, blocks, heads, batch_heads, band, params)
                seq, row = sequences.sequence(batch, params), ROWS * block
                kv_head, _ = divmod(head, group)
                ctx = ScoreContext(batch, head, row, seq.seqlen_k - seq.seqlen_q, seq.seqlen_q, seq.seqlen_k, params, aux, 0)
                kv_blocks = tiling.key_blocks(row, ctx)
                if not KEYS_FIRST:
                    q.fill(r, gQ, (seq.batch, seq.offset_q + row, head))
                arrived = kv_source.begin_tile(params)
                if AHEAD:
                    kv_source.fill(k, j, gK, seq, batch, seq.offset_k + tiling.key(kv_blocks, 0, ctx), kv_head, params)
                for i in range(kv_blocks.n):
                    key = seq.offset_k + tiling.key(kv_blocks, i, ctx)
                    if AHEAD and i + 1 < kv_blocks.n:
                        later = seq.offset_k + tiling.key(kv_blocks, i + 1, ctx)
                        kv_source.fill(k, j + i + 1, gK, seq, batch, later, kv_head, params)
                    if not AHEAD:
                        arrived = kv_source.wait_for_block(arrived, key, params)
                        kv_source.fill(k, j + i, gK, seq, batch, key, kv_head, params)
                    if KEYS_FIRST and i == 0:
                        q.fill(r, gQ, (seq.batch, seq.offset_q + row, head))
                    bias_tiles.fill(tiles, j + i, params, (batch, head, row, tiling.key(kv_blocks, i, ctx) // KV))
                    kv_source.fill_values(v, j + i, gV, seq, batch, key, kv_head, params)
                r, j = int32(r + 1), int32(j + kv_blocks.n)
        else:
            warpgroup.claim_registers(claim)
            turn.begin(me)
            while more(r, blocks, heads, batch_heads, band, params):
                block, batch, head = place(r, blocks, heads, batch_heads, band, params)
                seq, row = sequences.sequence(batch, params), ROWS * block + EACH * me
                mine = row + O.rows * warpgroup.rank()
                base_ctx = ScoreContext(
                    batch, head, mine, seq.seqlen_k - seq.seqlen_q, seq.seqlen_q, seq.seqlen_k, params, aux, 0
                )
                ctx = base_ctx._replace(precomputed=variant.precompute(base_ctx))
                kv_blocks = tiling.key_blocks(ROWS * block, ctx)
                n, cut = own_blocks(row, kv_blocks, ctx)
                end = int32(j + kv_blocks.n)
                first, queries = int32(end - n), subtile(q.wait(r), EACH, me)
                if SKIPS:
                    stand_by(j, first, end, kv_blocks.unseen_behind, k, v, tiles, me)
                if SKIPS and n == 0:
                    output.release_previous_queries(q, r)
                    output.release_queries(q, r)
                else:
                    key, queries = tiling.key(kv_blocks, first - j, ctx), prepared(queries, ctx)
                    s = warpgroup.wait(warpgroup.mm_ABt(queries, k.wait(first)))
                    k.release(first)
                    s = tiling.mask(variant.score_in_edge_block(s, bias_tiles.load_rows(tiles, first, ctx, me), key), ctx, key)
                    below = variant.row_offset_in_edge_block(s, ctx, key)
                    begun = output.init_state(softmax, variant, ctx, gO, gLse, seq, row, scale)
                    state = begun.update_max(s, below, scale, slack)
                    p = state.weights(s, below, scale, DEEP)
                    p, state = weights.stage(variant.drop(p, ctx, key), room, me), state.add(p)
                    output.release_previous_queries(q, r)
                    sequences.zero_foreign_rows(v.wait(first), seq.seqlen_k - key, CONSUMERS)
                    if first == j and kv_blocks.unseen_behind > 0:
                        zero_last_keys(v.wait(first), kv_blocks.unseen_behind, CONSUMERS)
                    for i in range(int32(first + 1), int32(first + cut)):
                        key = tiling.key(kv_blocks, i - j, ctx)
                        p, state = cut_step(i, p, state, queries, k, v, tiles, room, me, ctx, key, scale, slack)
                    if kv_blocks.unseen_ahead > 0:
                        zero_first_keys(v.wait(first + cut - 1), kv_blocks.unseen_ahead, CONSUMERS)
                    for i in range(int32(first + cut), end):
                        key = tiling.key(kv_blocks, i - j, ctx)
                        p, state = step(i, p, state, queries, k, v, tiles, room, me, ctx, key, scale, slack)
                    output.release_queries(q, r)
                    o = warpgroup.wait(warpgroup.mma_AB(state.rescale(), p, v.wait(end - 1)))
                    v.release(end - 1)
                    o, lse = state._replace(o=o).finish(scale, variant, ctx)
                    output.store(gO, o, queries, seq, row, head)
                    output.store_lse(gLse, lse, seq, row, head)
                r, j = int32(r + 1), end
            output.finish()
            if sequences.packed:
                block, batch, head = place(0, blocks, heads, batch_heads, band, params)
                some, row = sequences.padding_rows(block, batch, params)
                if some:
                    output.clear_padding(O, gO, gLse, int32(row + EACH * me), head)

    return attend, smem
