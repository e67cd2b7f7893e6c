"""FlashAttention forward in fp8 for Hopper: forward_hopper.py's pipeline with products of e4m3, which tensor cores do twice as
fast.

Differences. fp8 wgmma takes only K-major operands, so V's tiles must be transposed: the producer warpgroup does it, or a
kernel has transposed all of V before (fp8_values.py). Weights are rounded to e4m3, whose least number is 2^-9, so the largest
weight is not 1, but 2^LIFT. Tensor cores keep only some 10 bits of a sum of fp8 products, so the product of each key block is
separate, and fp32 adds them: a consumer takes its turn for O += P V and, after that, the next scores; their softmax runs while
another consumer has its turn. Scores and values are multiplied by descales, of heads or of blocks of rows (descales.py)."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numba import cuda
from numpy import float32, int32

from ops import columns, divmod, hstack, subtile, warpgroup, zipped
from tiles import bf16, fp8e4m3, fp32, inlined, ring, rt, shared
from tiles.launching.arguments import FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.base_config import BaseConfig
from ...parts.descales import BlockDescales, HeadDescales
from ...parts.fp8_values import TransposedBefore, TransposeInProducer
from ...parts.online_softmax import Softmax, lowest_max
from ...parts.outputs import StoreOutput
from ...parts.sequences import BatchedLayout
from ...parts.tiling import OneTileScheduler, TileGrid
from ...parts.variant import Variant
from ...parts.visibility import CAUSAL, FULL

REGISTERS = {2: (40, 232), 3: (32, 160)}  # {consumers: registers a thread of (producer, consumer)}
LIFT, SLACK = 8.0, 0.75  # powers of 2: the weight of the row maximum, and how far it may still grow; e4m3 ends at 2^8.8
HEAD_DESCALES, IN_PRODUCER = HeadDescales(), TransposeInProducer()


@dataclass(frozen=True)
class Config(BaseConfig):
    """A kernel's configuration. consumers: warpgroups with 64 query rows each. stages: of the rings of keys and values.
    descales: see descales.py. v_transpose: see fp8_values.py."""

    consumers: int
    stages: int = 2
    descales: HeadDescales = field(default=HEAD_DESCALES, kw_only=True)
    v_transpose: TransposeInProducer = field(default=IN_PRODUCER, kw_only=True)
    persistent = False

    @property
    def rows(self):
        """Query rows of a CTA."""
        return warpgroup.ROWS * self.consumers

    @property
    def threads(self):
        """Threads of a CTA: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (self.consumers + 1)

    def __str__(self):
        return f"{super().__str__()}{self.descales}" + " V transposed before" * self.v_transpose.before

    @property
    def registers(self):
        """Registers a thread of (the producer, a consumer). A producer that only loads needs few."""
        return (24, 240) if self.v_transpose.before and self.consumers == 2 else REGISTERS[self.consumers]

    @property
    def masks_second(self):
        """Is the second key block masked without need? Full attention with blocks of 160 keys would otherwise have a single
        loop, for which ptxas 13.5 spills two registers a thread; with two loops it spills none."""
        return (self.value_dim, self.kv, self.variant) == (128, 160, FULL)

    @property
    def output_cols(self):
        """How many columns of the output a product has: as many as there are registers for."""
        return min(self.value_dim, 64 if self.consumers > 2 else 128)


SHAPES: dict[int, Any] = {64: (128, 3), 128: (256, 2), 256: (96, 2)}  # padded head_dim: kv, consumers
VARIED: dict[int, Any] = {64: (128, 3), 128: (192, 2), 256: (64, 2)}  # for windows, and sequences of many lengths
SCORED: dict[int, Any] = {64: (96, 3), 128: (128, 2), 256: (64, 2)}  # for score and mask functions
BLOCKED: dict[int, Any] = {64: (128, 3), 128: (256, 2)}  # for descales of blocks
BLOCKED_SHORT: dict[int, Any] = BLOCKED | {128: (128, 2)}  # for causal attention with up to SHORT keys
BLOCKED_VARIED: dict[int, Any] = {64: (64, 3), 128: (128, 2)}
# Where V is transposed before: {padded head_dim: {from so many keys on: kv, consumers, stages}}
TRANSPOSED: dict[int, dict[int, Any]] = {
    64: {8192: (192, 3, 3)},
    128: {0: (128, 3, 3), 8192: (160, 3, 2)},
    256: {0: (128, 2, 2)},
}
BLOCKED_TRANSPOSED: dict[int, Any] = {128: (128, 3, 3)}  # for descales of blocks
SHORT = 2048
MANY = 2048  # query rows for each head of V, from which on transposing it before pays
ROUNDS = 1.05  # how many times as many rows the busiest SM may have with the shapes of TRANSPOSED, which are so much faster


def padded_dim(head_dim: int, value_dim: int | None = None) -> int:
    """The next head dim for which there are kernels."""
    return min(d for d in SHAPES if d >= max(head_dim, value_dim or head_dim))


def transposed_shape(padded: int, keys: float) -> Any:
    """(kv, consumers, stages) for V that is transposed before, for so many keys; None if there is none."""
    return next((shape for least, shape in reversed(TRANSPOSED[padded].items()) if keys >= least), None)


def blocked_shape(padded: int, keys: float, variant: Variant) -> Any:
    """(kv, consumers, stages) for descales of blocks and V that is transposed before; None if there is none."""
    return None if variant.monotonic and keys <= SHORT else BLOCKED_TRANSPOSED.get(padded)


def pays_to_transpose(padded: int, queries: int, keys: float, batch_heads: int, group: int, processors: int) -> bool:
    """Is it faster to transpose V before? For full or causal attention with so many queries and keys in each of `batch_heads`
    pairs of head and batch, `group` of which share a head of V."""
    shape = transposed_shape(padded, keys)
    if shape is None or queries * group < MANY:
        return False
    (_, consumers), (_, consumers_before, _) = SHAPES[padded], shape
    return busiest_rows(consumers_before, queries, batch_heads, processors) <= ROUNDS * busiest_rows(
        consumers, queries, batch_heads, processors
    )


def busiest_rows(consumers: int, queries: int, batch_heads: int, processors: int) -> int:
    """How many query rows the busiest SM computes, if a tile has so many consumers."""
    rows = warpgroup.ROWS * consumers
    return -(-(-(-queries // rows) * batch_heads) // processors) * rows


def config_for(
    head_dim: int,
    variant: Variant,
    value_dim: int | None = None,
    descales: HeadDescales = HEAD_DESCALES,
    keys: float = math.inf,
    transposes_first: bool = False,
    **fields: Any,
) -> Config:
    """The configuration for so many keys. transposes_first: should V be transposed before, if there is a shape for it? fields:
    further fields of the Config."""
    padded = padded_dim(head_dim, value_dim)
    plain = variant.cheap_mask and fields.get("seq_layout", BatchedLayout) is BatchedLayout
    shape = blocked_shape(padded, keys, variant) if descales.by_block else transposed_shape(padded, keys)
    if transposes_first and plain and shape:
        fields |= {"descales": descales.for_blocks_of(shape[0]), "v_transpose": TransposedBefore()}
        return Config(padded, padded, fp8e4m3, variant, *shape, **fields)
    if descales.by_block:
        short = variant.monotonic and keys <= SHORT
        shapes = BLOCKED_VARIED if not plain else BLOCKED_SHORT if short else BLOCKED
    else:
        shapes = SCORED if variant.changes_scores or not variant.positional else SHAPES if plain else VARIED
    return Config(
        padded, padded, fp8e4m3, variant, *shapes[padded], descales=descales.for_blocks_of(shapes[padded][0]), **fields
    )


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with."""
    if target.has_wgmma:
        for head_dim, variant in itertools.product(SHAPES, (FULL, CAUSAL)):
            yield config_for(head_dim, variant)
        for head_dim, variant in itertools.product(TRANSPOSED, (FULL, CAUSAL)):
            yield from (config_for(head_dim, variant, keys=keys, transposes_first=True) for keys in TRANSPOSED[head_dim])
        for head_dim, values in itertools.product(BLOCKED, (True, False)):
            yield config_for(head_dim, CAUSAL, descales=BlockDescales(values))
        for head_dim, values in itertools.product(BLOCKED_TRANSPOSED, (True, False)):
            yield config_for(head_dim, CAUSAL, descales=BlockDescales(values), transposes_first=True)
        yield config_for(128, CAUSAL, descales=BlockDescales(True), keys=SHORT)


class DescaleArrays(NamedTuple):
    """The descales of q, k and v, and which of their elements belong to a query tile. seqlen_k: the keys in use of its
    sequence."""

    q: Any
    k: Any
    v: Any
    batch: Any
    kv_head: Any
    seqlen_k: Any


class ConsumerTile(NamedTuple):
    """What a consumer knows about its query rows: the queries in shared memory, the KeyBlocks, the ScoreContext, the scale of
    exponents, the descale of scores, by how much weights are lifted and how far a row maximum may grow before O is rescaled
    (both in units of scores), and the DescaleArrays."""

    queries: Any
    kv_blocks: Any
    ctx: Any
    scale: Any
    descale: Any
    lift: Any
    slack: Any
    arrays: Any

    @inlined
    def per_scale(self):
        """The difference of scores that doubles a weight."""
        return self.lift * float32(1 / LIFT)

    @inlined
    def lift_offset(self, row_offset, variant):
        """What is subtracted from scores so that their weights are multiplied by 2^LIFT, together with the row offset."""
        if variant.has_row_offset:
            return row_offset - self.lift
        else:
            return -self.lift


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ROWS, WG_ROWS = config.rows, warpgroup.ROWS  # rows of a tile of queries, of a consumer
    CONSUMERS, PARAMS, AUX = config.consumers, config.params, config.aux
    variant, tiling, sequences = config.variant, config.tiling, config.sequences
    scheduler = OneTileScheduler(tiling, sequences)
    descales, (Q_DESCALE, K_DESCALE, V_DESCALE) = config.descales, config.descales.arrays
    output, turn = StoreOutput(config.seq_layout.bounded_by_array), warpgroup.ping_pong(CONSUMERS)
    PRODUCER, (PRODUCER_REGISTERS, CONSUMER_REGISTERS), MASKS_SECOND = CONSUMERS, config.registers, config.masks_second
    S, O, COLS = rt(16, config.kv, fp32), rt(16, config.value_dim, fp32), config.output_cols  # of a warp; columns of a product
    ONE_PRODUCT, BOTH_HALVES = config.value_dim == COLS, config.value_dim <= 128  # are there registers for two halves at once?
    readers, v_transpose = CONSUMERS * warpgroup.WARPGROUP, config.v_transpose
    smem = shared(
        q=ring(config.query, 1, readers),
        k=ring(config.key, config.stages, readers),
        **v_transpose.rings(config.kv, config.value_dim, config.stages, readers),
    )
    softmax, OUTPUT = Softmax(O, lowest_max(variant)), output.declare(config.value_dim, bf16)
    VALUES, LAG = v_transpose.source(config.kv, config.value_dim), v_transpose.lag

    @inlined
    def weigh(s, key, state, tile_descales, consumer):
        """(the softmax state with the maximum of a block of scores, their weights). The weights are not yet in the row sum;
        they are 2^LIFT at the maximum."""
        s, ctx = descales.multiply(s, tile_descales, consumer.descale, variant), consumer.ctx
        s, row_offset = tiling.change_scores(s, variant.prefetch(S, ctx, key), ctx, key)
        return descales.weigh(s, row_offset, state, tile_descales, variant, consumer)

    @inlined
    def weigh_edge_block(s, key, state, tile_descales, consumer):
        """`weigh` for a block that needs the mask."""
        s, ctx = descales.multiply(s, tile_descales, consumer.descale, variant), consumer.ctx
        s, row_offset = tiling.change_edge_scores(s, variant.prefetch(S, ctx, key), ctx, key)
        return descales.weigh(s, row_offset, state, tile_descales, variant, consumer)

    @inlined
    def accumulate(o, o_scale, p, tile):
        """o o_scale + p V, with the product summed by itself. tile: V^T of a block."""
        if ONE_PRODUCT:
            return warpgroup.wait(warpgroup.mm_ABt(p, tile)) + o * o_scale
        elif BOTH_HALVES:  # the first half is added while the tensor cores compute the second
            left, right = warpgroup.mm_ABt(p, subtile(tile, COLS, 0)), warpgroup.mm_ABt(p, subtile(tile, COLS, 1))
            added = warpgroup.wait(left, newer=1) + columns(o, COLS, 0) * o_scale
            return hstack(added, warpgroup.wait(right) + columns(o, COLS, 1) * o_scale)
        else:  # one half after the other, for want of registers
            left = warpgroup.wait(warpgroup.mm_ABt(p, subtile(tile, COLS, 0))) + columns(o, COLS, 0) * o_scale
            right = warpgroup.wait(warpgroup.mm_ABt(p, subtile(tile, COLS, 1))) + columns(o, COLS, 1) * o_scale
            return hstack(left, right)

    def build_step(masked):
        """The step of the pipeline for a block of keys, with the mask or without."""

        @inlined
        def step(j, p, state, tile_descales, k, values, wg, consumer):
            """O += P V of block j - 1, then scores and softmax of block j, while another consumer has the tensor cores.
            tile_descales: of block j; those of block j + 1 are loaded meanwhile, because loads take long."""
            key = tiling.key(consumer.kv_blocks, j, consumer.ctx)
            turn.take(wg)
            state = state._replace(o=accumulate(state.o, state.o_scale, p, values.transposed.wait(j - 1)))
            s = warpgroup.mm_ABt(consumer.queries, k.wait(j))
            turn.give(wg)
            values.transposed.release(j - 1)
            s = warpgroup.wait(s)
            if masked:
                state, p = weigh_edge_block(s, key, state, tile_descales, consumer)
            else:
                state, p = weigh(s, key, state, tile_descales, consumer)
            k.release(j, after=state.m)
            next_key = tiling.key(consumer.kv_blocks, j + 1, consumer.ctx)
            next_descales = descales.load_tile(consumer.arrays, next_key, consumer.descale)
            return zipped(p), descales.add(state, p, tile_descales), next_descales

        return step

    masked_step, step = build_step(True), build_step(False)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend_fp8(
        gQ: tiled(config.query, unit=1), gK: tiled(config.key, unit=1), gV: VALUES, gO: OUTPUT,
        gLse: array(3), params: PARAMS, aux: AUX, blocks: INT, heads: INT, batch_heads: INT, raster_group: INT, group: INT,
        scale: FLOAT, gQDescale: Q_DESCALE, gKDescale: K_DESCALE, gVDescale: V_DESCALE, qk_descale: FLOAT, v_descale: FLOAT,
    ):  # fmt: skip
        """O = softmax(Q K^T / sqrt(D)) V like forward_hopper.py's `attend`, of arrays that are multiplied by descales: by the
        numbers qk_descale and v_descale, and by the elements of gQDescale, gKDescale and gVDescale."""
        memory = smem.open()
        q, k, values = memory.q, memory.k, v_transpose.rings_of(memory)
        wg = warpgroup.id()
        block, batch, head = scheduler.find_tile(0, TileGrid(blocks, heads, batch_heads, raster_group), params)
        if sequences.has_tile(block, batch, params):
            seq, row, kv_head = sequences.sequence(batch, params), ROWS * block, divmod(head, group)[0]
            if wg == PRODUCER:
                warpgroup.release_registers(PRODUCER_REGISTERS)
                ctx = seq.context(batch, head, row, params, aux)
                kv_blocks = tiling.key_blocks(row, ctx)
                q.fill(0, gQ, (seq.batch, seq.offset_q + row, head))
                for j in range(int32(kv_blocks.n + LAG)):
                    if j < kv_blocks.n:
                        key = tiling.key(kv_blocks, j, ctx)
                        k.fill(j, gK, (seq.batch, seq.offset_k + key, kv_head))
                        v_transpose.fill(values, j, gV, seq, key, kv_head)
                    if j > 0:
                        v_transpose.transpose(
                            values, int32(j - 1), sequences, seq.seqlen_k - tiling.key(kv_blocks, 0, ctx), kv_blocks
                        )
            else:
                warpgroup.claim_registers(CONSUMER_REGISTERS)
                turn.begin(wg)
                warp_row = row + WG_ROWS * wg + O.rows * warpgroup.rank()
                ctx = seq.context(batch, head, warp_row, params, aux).precompute(variant)
                kv_blocks = tiling.key_blocks(row, ctx)
                arrays = DescaleArrays(gQDescale, gKDescale, gVDescale, int32(batch), int32(kv_head), int32(seq.seqlen_k))
                descale = descales.load_queries(arrays, seq.offset_q + row + WG_ROWS * wg, head, qk_descale)
                scale = descales.scale_exponents(scale, descale, variant)
                lift, slack = float32(LIFT) / scale, float32(SLACK) / scale
                consumer = ConsumerTile(subtile(q.wait(0), WG_ROWS, wg), kv_blocks, ctx, scale, descale, lift, slack, arrays)
                key = tiling.key(kv_blocks, 0, ctx)
                tile_descales = descales.load_first_tile(arrays, key, descale)
                next_descales = descales.load_tile(arrays, tiling.key(kv_blocks, int32(1), ctx), descale)
                s = warpgroup.wait(warpgroup.mm_ABt(consumer.queries, k.wait(0)))
                k.release(0)
                state = softmax.init(variant.initial_max(ctx, softmax.lowest))
                state, p = weigh_edge_block(s, key, state, tile_descales, consumer)
                p, state = zipped(p), descales.add(state, p, tile_descales)
                masked = int32(min(2, kv_blocks.n) if MASKS_SECOND else max(1, kv_blocks.masked))
                for j in range(int32(1), masked):
                    p, state, next_descales = masked_step(j, p, state, next_descales, k, values, wg, consumer)
                for j in range(masked, kv_blocks.n):
                    p, state, next_descales = step(j, p, state, next_descales, k, values, wg, consumer)
                q.release(0)
                o = accumulate(state.o, state.o_scale, p, values.transposed.wait(kv_blocks.n - 1))
                values.transposed.release(kv_blocks.n - 1)
                o = o * descales.load_output(arrays, v_descale)
                state = state._replace(o=o, m=state.m - consumer.lift)  # for lse: its weights are not lifted
                o, lse = state.finish(scale, variant, ctx)
                output.store(gO, o, consumer.queries, seq, row + WG_ROWS * wg, head)
                output.store_lse(gLse, lse, seq, row + WG_ROWS * wg, head)
        if wg != PRODUCER:
            output.clear_padding(O, gO, gLse, sequences, block, batch, head, WG_ROWS * wg, params)

    return attend_fp8, smem
