"""FlashAttention forward in fp8 for Hopper: hopper.py's pipeline with products of e4m3, which tensor cores do twice as fast.

What differs. fp8 instructions take only operands that lie along the contracted axis, so keys must be columns of V's tiles: the
producer warpgroup turns them, or a kernel has done so with all of V (fp8_values.py). Weights are rounded to e4m3, whose least
number is 2^-9: the greatest is not 1, but 2^LIFT. The tensor cores cut off all but some 10 bits of a sum of fp8 products, so
each key block's is its own, and fp32 adds them up: a consumer takes its turn for O += P V and, that waited for, the next
scores; their softmax runs while another one has its turn. And scores and values have the units that their arrays were divided
by, one for each sequence and head of keys."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numba import cuda
from numpy import float32, int32

from ops import columns, divmod, hstack, persistent_tile, subtile, warpgroup, zipped
from tiles import bf16, fp8e4m3, fp32, inlined, ring, rt, shared
from tiles.arguments import FLOAT, INT, array, tiled

from .base_config import BaseConfig
from .descales import OfBlocks, OfHeads
from .fp8_values import Before, ByProducer
from .hopper import REGISTERS
from .online import LOWEST, Softmax
from .output import StoreOutput
from .sequences import BatchedLayout
from .variants import ScoreContext, Variant
from .visible_keys import CAUSAL, FULL

LIFT, SLACK = 8.0, 0.75  # powers of 2: what a maximum's weight is, and may still grow by; e4m3 ends at 448, 2^8.8
HEADS, IN_BLOCK = OfHeads(), ByProducer()


@dataclass(frozen=True)
class Config(BaseConfig):
    """A kernel's configuration. consumers: each has 64 query rows. stages: of the rings of keys and values. units: see
    descales.py. turned: see fp8_values.py."""

    consumers: int
    stages: int = 2
    units: OfHeads = field(default=HEADS, kw_only=True)
    turned: ByProducer = field(default=IN_BLOCK, kw_only=True)
    persistent = False

    @property
    def rows(self):
        """Query rows of a thread block."""
        return warpgroup.ROWS * self.consumers

    @property
    def threads(self):
        """Threads of a block: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (self.consumers + 1)

    def __str__(self):
        return f"{super().__str__()}{self.units}" + " turned before" * self.turned.before

    @property
    def registers(self):
        """(a thread's of the producer, of a consumer). One that only loads needs few."""
        return (24, 240) if self.turned.before and self.consumers == 2 else REGISTERS[self.consumers]

    @property
    def masks_second(self):
        """Is the second key block masked, although it lies within the sequence? Full attention in tiles of 160 keys otherwise
        has a single loop, in which ptxas 13.5 keeps two numbers a thread in local memory; with two it finds registers."""
        return (self.value_dim, self.kv, self.variant) == (128, 160, FULL)

    @property
    def part(self):
        """The columns of the output that are taken up at a time: as many as there are registers for."""
        return min(self.value_dim, 64 if self.consumers > 2 else 128)


SHAPES: dict[int, Any] = {64: (128, 3), 128: (256, 2), 256: (96, 2)}  # padded head_dim: kv, consumers
VARIED: dict[int, Any] = {64: (128, 3), 128: (192, 2), 256: (64, 2)}  # the same of windows, and sequences of many lengths
SCORED: dict[int, Any] = {64: (96, 3), 128: (128, 2), 256: (64, 2)}  # the same where functions are asked of scores
BLOCKED: dict[int, Any] = {64: (128, 3), 128: (256, 2)}  # the same of blocks that have units of their own
BLOCKED_SHORT: dict[int, Any] = BLOCKED | {128: (128, 2)}  # the same of causal attention of up to SHORT keys
BLOCKED_VARIED: dict[int, Any] = {64: (64, 3), 128: (128, 2)}
# Where V is turned before: {padded head_dim: {from so many keys on: kv, consumers, stages}}
TURNED: dict[int, dict[int, Any]] = {
    64: {8192: (192, 3, 3)},
    128: {0: (128, 3, 3), 8192: (160, 3, 2)},
    256: {0: (128, 2, 2)},
}
BLOCKED_TURNED: dict[int, Any] = {128: (128, 3, 3)}  # the same of blocks that have units of their own
SHORT = 2048
MANY = 2048  # query rows that share a head of V, from which on turning it before pays
ROUNDS = 1.05  # how much longer, by its rows alone, the kernel of TURNED may be busy than the other: it is that much faster


def padded_dim(head_dim: int, value_dim: int | None = None) -> int:
    """The next larger head dim for which there are kernels."""
    return min(d for d in SHAPES if d >= max(head_dim, value_dim or head_dim))


def turned_shape(padded: int, keys: float) -> Any:
    """The shape for V that is transposed before, for so many keys; None if there is none."""
    return next((shape for least, shape in reversed(TURNED[padded].items()) if keys >= least), None)


def blocked_shape(padded: int, keys: float, variant: Variant) -> Any:
    """The shape for descales of blocks."""
    return None if variant.monotonic and keys <= SHORT else BLOCKED_TURNED.get(padded)


def pays_to_turn(padded: int, queries: int, keys: float, batch_heads: int, group: int, processors: int) -> bool:
    """Is it faster to transpose V before? For plain attention with so many queries and keys in each of `batch_heads` pairs of
    head and batch, `group` of which share a head of V."""
    shape = turned_shape(padded, keys)
    if shape is None or queries * group < MANY:
        return False
    (_, consumers), (_, more, _) = SHAPES[padded], shape
    return busy(more, queries, batch_heads, processors) <= ROUNDS * busy(consumers, queries, batch_heads, processors)


def busy(consumers: int, queries: int, batch_heads: int, processors: int) -> int:
    """The number of rows that the busiest multiprocessor works on, if each tile belongs to so many consumers."""
    rows = warpgroup.ROWS * consumers
    return -(-(-(-queries // rows) * batch_heads) // processors) * rows


def config_for(
    head_dim: int,
    variant: Variant,
    value_dim: int | None = None,
    units: OfHeads = HEADS,
    keys: float = math.inf,
    before: bool = False,
    **kind: Any,
) -> Config:
    """The configuration for so many keys. before: should V be transposed before, if it can be? kind: further fields of the
    Config."""
    padded = padded_dim(head_dim, value_dim)
    plain = variant.cheap_mask and kind.get("seq_layout", BatchedLayout) is BatchedLayout
    shape = blocked_shape(padded, keys, variant) if units.by_block else turned_shape(padded, keys)
    if before and plain and shape:
        kind |= {"units": units.of_tiles(shape[0]), "turned": Before()}
        return Config(padded, padded, fp8e4m3, variant, *shape, **kind)
    if units.by_block:
        short = variant.monotonic and keys <= SHORT
        shapes = BLOCKED_VARIED if not plain else BLOCKED_SHORT if short else BLOCKED
    else:
        shapes = SCORED if variant.changes_scores or not variant.positional else SHAPES if plain else VARIED
    return Config(padded, padded, fp8e4m3, variant, *shapes[padded], units=units.of_tiles(shapes[padded][0]), **kind)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with."""
    if arch == "sm_90a":
        for head_dim, variant in itertools.product(SHAPES, (FULL, CAUSAL)):
            yield config_for(head_dim, variant)
        for head_dim, variant in itertools.product(TURNED, (FULL, CAUSAL)):
            yield from (config_for(head_dim, variant, keys=keys, before=True) for keys in TURNED[head_dim])
        for head_dim, values in itertools.product(BLOCKED, (True, False)):
            yield config_for(head_dim, CAUSAL, units=OfBlocks(values))
        for head_dim, values in itertools.product(BLOCKED_TURNED, (True, False)):
            yield config_for(head_dim, CAUSAL, units=OfBlocks(values), before=True)
        yield config_for(128, CAUSAL, units=OfBlocks(True), keys=SHORT)


class Units(NamedTuple):
    """The arrays of the units by which q, k and v are multiplied, and which of their elements belong to a tile."""

    q: Any
    k: Any
    v: Any
    batch: Any
    kv_head: Any


class Tile(NamedTuple):
    """What a consumer knows about its rows: the queries, the Blocks of keys, where the rows stand, the scale of exponents, the
    unit of the scores; by how much weights are lifted and how far a maximum may lag, both in units of scores; and where units
    are found."""

    queries: Any
    kv_blocks: Any
    ctx: Any
    scale: Any
    unit: Any
    lift: Any
    slack: Any
    told: Any

    @inlined
    def per_scale(self):
        """One power of 2 of a weight, in units of scores."""
        return self.lift * float32(1 / LIFT)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ROWS, EACH = config.rows, warpgroup.ROWS  # rows of a tile of queries, of a consumer
    CONSUMERS, PARAMS, AUX = config.consumers, config.params, config.aux
    variant, tiling, sequences = config.variant, config.tiling, config.sequences
    MEASURES, units = variant.needs_raw_scores, config.units
    BY_BLOCK, (Q_UNIT, K_UNIT, V_UNIT) = units.by_block, units.arrays
    output, turn = StoreOutput(config.seq_layout.apart), warpgroup.ping_pong(CONSUMERS)
    PRODUCER, (keep, claim), MASKS_SECOND = CONSUMERS, config.registers, config.masks_second
    O, PART = rt(16, config.value_dim, fp32), config.part  # a consumer's rows of the output; columns of a product
    WHOLE, TOGETHER = config.value_dim == PART, config.value_dim <= 128  # halves: have registers room for both?
    readers, turned = CONSUMERS * warpgroup.WARPGROUP, config.turned
    smem = shared(
        q=ring(config.query, 1, readers),
        k=ring(config.key, config.stages, readers),
        **turned.rings(config.kv, config.value_dim, config.stages, readers),
    )
    softmax, OUTPUT = Softmax(O), output.declared(config.value_dim, bf16)
    VALUES, BEHIND = turned.source(config.kv, config.value_dim), turned.behind

    @inlined
    def measured(s, tile, of):
        """The scores, multiplied by their unit if the variant must know it."""
        if MEASURES:
            return units.measured(s, tile, of.unit)
        else:
            return s

    @inlined
    def lifted(below, lift):
        """What is subtracted from the scores to get weights that are lifted by a power of 2."""
        if variant.has_row_offset:
            return below - lift
        else:
            return -lift

    @inlined
    def weighed(s, key, state, tile, of):
        """(what has been seen with a block of scores, their weights). The weights are not yet in the sum; they are 2^LIFT at
        the maximum."""
        s = variant.score(measured(s, tile, of), of.ctx, key)
        below = variant.row_offset(s, of.ctx, key)
        return units.weighed(s, below, lifted(below, of.lift), state, tile, MEASURES, of)

    @inlined
    def cut_and_weighed(s, key, state, tile, of):
        """The same of a block that the mask cuts."""
        s = tiling.mask(variant.score_in_edge_block(measured(s, tile, of), of.ctx, key), of.ctx, key)
        below = variant.row_offset_in_edge_block(s, of.ctx, key)
        return units.weighed(s, below, lifted(below, of.lift), state, tile, MEASURES, of)

    @inlined
    def gained(o, lag, p, tile):
        """The output, which lags behind, plus the product of a block's weights and values, which is summed by itself."""
        if WHOLE:
            return warpgroup.wait(warpgroup.mm_ABt(p, tile)) + o * lag
        elif TOGETHER:  # the first half of the columns is taken up while the tensor cores have the second
            left, right = warpgroup.mm_ABt(p, subtile(tile, PART, 0)), warpgroup.mm_ABt(p, subtile(tile, PART, 1))
            taken = warpgroup.wait(left, newer=1) + columns(o, PART, 0) * lag
            return hstack(taken, warpgroup.wait(right) + columns(o, PART, 1) * lag)
        else:  # one half after the other: there are not registers for more
            left = warpgroup.wait(warpgroup.mm_ABt(p, subtile(tile, PART, 0))) + columns(o, PART, 0) * lag
            right = warpgroup.wait(warpgroup.mm_ABt(p, subtile(tile, PART, 1))) + columns(o, PART, 1) * lag
            return hstack(left, right)

    def steps(cut):
        """A tile's key blocks; `cut` by the mask or not."""

        @inlined
        def step(j, p, state, tile, k, values, me, of):
            """O takes up block j - 1; then scores and softmax of block j, while another consumer has the tensor cores. tile:
            its units; the next one's are asked for while these are used, for loads, and their addresses, take long."""
            key = tiling.key(of.kv_blocks, j, of.ctx)
            turn.take(me)
            state = state._replace(o=gained(state.o, state.o_scale, p, values.turned.wait(j - 1)))
            s = warpgroup.mm_ABt(of.queries, k.wait(j))
            turn.give(me)
            values.turned.release(j - 1)
            s = warpgroup.wait(s)
            if cut:
                state, p = cut_and_weighed(s, key, state, tile, of)
            else:
                state, p = weighed(s, key, state, tile, of)
            k.release(j, after=state.m)
            ahead = units.of_tile(of.told, tiling.key(of.kv_blocks, j + 1, of.ctx), of.unit)
            return zipped(p), units.summed(state, p, tile), ahead

        return step

    cut_step, step = steps(True), steps(False)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend_fp8(
        gQ: tiled(config.query, unit=1), gK: tiled(config.key, unit=1), gV: VALUES, gO: OUTPUT,
        gLse: array(3), params: PARAMS, aux: AUX, blocks: INT, heads: INT, batch_heads: INT, band: INT, group: INT,
        scale: FLOAT, gQUnit: Q_UNIT, gKUnit: K_UNIT, gVUnit: V_UNIT, qk_unit: FLOAT, v_unit: FLOAT,
    ):  # fmt: skip
        """As hopper.py's `attend`, of arrays that stand for themselves times a unit: the product of a number and of one of each
        sequence and head of keys, or of each block of rows, too."""
        q, k, values = turned.opened(smem.open())
        me = warpgroup.id()
        block, batch_head = tiling.place(persistent_tile(0), blocks, batch_heads, band)
        block, batch, head = sequences.find(block, batch_head, heads, params)
        if sequences.has(block, batch, params):
            seq, row, kv_head = sequences.sequence(batch, params), ROWS * block, divmod(head, group)[0]
            if me == PRODUCER:
                warpgroup.release_registers(keep)
                ctx = ScoreContext(batch, head, row, seq.seqlen_k - seq.seqlen_q, seq.seqlen_q, seq.seqlen_k, params, aux, 0)
                kv_blocks = tiling.key_blocks(row, ctx)
                q.fill(0, gQ, (seq.batch, seq.offset_q + row, head))
                for j in range(int32(kv_blocks.n + BEHIND)):
                    if j < kv_blocks.n:
                        key = tiling.key(kv_blocks, j, ctx)
                        k.fill(j, gK, (seq.batch, seq.offset_k + key, kv_head))
                        turned.fill(values, j, gV, seq, key, kv_head)
                    if j > 0:
                        turned.turn(values, int32(j - 1), sequences, seq.seqlen_k - tiling.key(kv_blocks, 0, ctx), kv_blocks)
            else:
                warpgroup.claim_registers(claim)
                turn.begin(me)
                mine = row + EACH * me + O.rows * warpgroup.rank()
                base_ctx = ScoreContext(
                    batch, head, mine, seq.seqlen_k - seq.seqlen_q, seq.seqlen_q, seq.seqlen_k, params, aux, 0
                )
                ctx = base_ctx._replace(precomputed=variant.precompute(base_ctx))
                kv_blocks = tiling.key_blocks(row, ctx)
                told = Units(gQUnit, gKUnit, gVUnit, int32(batch), int32(kv_head))
                unit = units.of_queries(told, seq.offset_q + row + EACH * me, head, qk_unit)
                scale = scale if MEASURES or BY_BLOCK else scale * unit
                lift, slack = float32(LIFT) / scale, float32(SLACK) / scale
                of = Tile(subtile(q.wait(0), EACH, me), kv_blocks, ctx, scale, unit, lift, slack, told)
                key = tiling.key(kv_blocks, 0, ctx)
                tile, ahead = units.of_tile(told, key, unit), units.of_tile(told, tiling.key(kv_blocks, int32(1), ctx), unit)
                s = warpgroup.wait(warpgroup.mm_ABt(of.queries, k.wait(0)))
                k.release(0)
                state, p = cut_and_weighed(s, key, softmax.init(variant.initial_max(ctx, LOWEST)), tile, of)
                p, state = zipped(p), units.summed(state, p, tile)
                if MASKS_SECOND:
                    cut = int32(min(2, kv_blocks.n))
                else:
                    cut = int32(max(1, kv_blocks.masked))
                for j in range(int32(1), cut):
                    p, state, ahead = cut_step(j, p, state, ahead, k, values, me, of)
                for j in range(cut, kv_blocks.n):
                    p, state, ahead = step(j, p, state, ahead, k, values, me, of)
                q.release(0)
                o = gained(state.o, state.o_scale, p, values.turned.wait(kv_blocks.n - 1))
                values.turned.release(kv_blocks.n - 1)
                o = o * units.of_output(told, v_unit)
                o, lse = state._replace(o=o, m=state.m - of.lift).finish(scale, variant, ctx)
                output.store(gO, o, of.queries, seq, row + EACH * me, head)
                output.store_sums(gLse, lse, seq, row + EACH * me, head)
        if sequences.packed and me != PRODUCER:
            some, row = sequences.nobodys(block, batch, params)
            if some:
                output.clear(O, gO, gLse, int32(row + EACH * me), head)

    return attend_fp8, smem
