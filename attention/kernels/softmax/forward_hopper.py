"""FlashAttention forward for Hopper: a producer warpgroup, and consumers that overlap their softmax with matrix products.

Every consumer has 64 query rows. Key blocks run from the last to the first, so that the blocks that need a mask come first.
While the softmax of block j runs, the tensor cores compute O += P V of block j - 1. Consumers take turns to issue wgmma
(ping-pong), so that the softmax of one overlaps with the products of another (FlashAttention-3, Shah et al. 2024). At head dims
of 96 and 128 three consumers keep the tensor cores busier than two; P then goes through shared memory, for want of registers.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from numba import cuda
from numpy import int32

from ops import divmod, subtile, warpgroup
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, static
from tiles.launching.arguments import FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.forward_config import ForwardConfig, in_pages
from ...parts.key_sources import BLOCK, OneBuffer, StreamingBuffers, TwoBuffers
from ...parts.online_softmax import Softmax, lowest_max
from ...parts.outputs import AccumulateOutput, StoreFloat32, StoreOutput, TmaStoreOutput
from ...parts.sequences import BatchedLayout, PackedLayout, QueryPartsLayout
from ...parts.tiling import OneTileScheduler, PersistentScheduler, TileGrid, zero_first_keys, zero_last_keys
from ...parts.variant import Variant
from ...parts.visibility import CAUSAL, FULL
from ...parts.weights import WeightsInRegisters, WeightsInShared
from .forward_hopper_shapes import NARROW, ONE_CONSUMER, PAGED, SHAPES, TABLES, shapes_by_length, variant_shape

REGISTERS = {1: (24, 232), 2: (40, 232), 3: (32, 160), 4: (32, 112)}  # {consumers: registers a thread of (producer, consumer)}


@dataclass(frozen=True)
class Config(ForwardConfig):
    """A kernel's configuration. consumers: warpgroups with 64 query rows each. stages, q_stages: of the rings of keys and
    values, and of queries. persistent: each SM has one CTA, which computes many query tiles and loads the next one while it
    finishes one; otherwise each query tile has a CTA, and the hardware balances the load. tma_store: TMA stores the output,
    from the stage of its queries, while the next tile begins; otherwise the consumers store it. ping_pong: do consumers take
    turns to issue wgmma? weights_in_shared: does P V read P from shared memory? ctas_per_sm: CTAs that share an SM."""

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
        """Query rows of a CTA."""
        return warpgroup.ROWS * self.consumers

    @property
    def threads(self):
        """Threads of a CTA: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (self.consumers + 1)

    @property
    def output(self):
        """The object that stores the output."""
        if self.tma_store:
            return TmaStoreOutput(self.seq_layout.bounded_by_array)
        output_class = AccumulateOutput if self.accumulates else StoreFloat32 if self.float32_out else StoreOutput
        return output_class(self.seq_layout.bounded_by_array)

    @property
    def scheduler(self):
        """The object that says which query tiles a CTA computes."""
        return (PersistentScheduler if self.persistent else OneTileScheduler)(self.tiling, self.sequences)

    @property
    def turn(self):
        """The object that orders the consumers' wgmma."""
        return warpgroup.ping_pong(self.consumers) if self.ping_pong else NoTurns()

    @property
    def weights(self):
        """The object that says where P V reads the weights P from."""
        return (WeightsInShared if self.weights_in_shared else WeightsInRegisters)(self.dtype)

    def estimate_time(self, queries: Any, keys: Any, batch_heads: Any, processors: int) -> Any:
        """The time of the busiest SM, in keys of one query row: the time of a query tile times the waves of tiles. For causal
        attention it is the greater of the last tile's time and the mean over all SMs."""
        tiles, row = batch_heads * -(-queries // self.rows), ROW_TIME[max(self.head_dim, self.value_dim)][self.consumers]
        rounds, tile = -(-tiles // processors), row * self.rows
        if self.variant.monotonic:
            last, mean = tile * (keys - min(self.rows, queries) / 2), tile * (keys - queries / 2)
            return max(TILE_OVERHEAD + last, rounds * TILE_OVERHEAD + tiles * mean / processors)
        return rounds * (TILE_OVERHEAD + tile * keys)

    def __str__(self):
        flags = " persistent" * self.persistent + " TMA store" * self.tma_store + " P in shared" * self.weights_in_shared
        return super().__str__() + flags


# One query tile for each CTA, where not all sequences have the same lengths
ONE_TILE_PER_CTA: dict[str, Any] = {"persistent": False, "q_stages": 1, "tma_store": False}
USUAL_FIELDS = ONE_TILE_PER_CTA | {"ping_pong": True, "weights_in_shared": False, "ctas_per_sm": 1}
SHORT_QUERIES = 96  # packed: mean number of queries up to which sequences are short
MANY_PER_SM = 4  # sequences times heads for each SM, from which on they are many
# The time of a query row, by padded head_dim and consumers, in units of that with three consumers; and the time of a tile
# besides its rows, in keys of one row
ROW_TIME = {64: {4: 0.97, 3: 1.0, 2: 1.27, 1: 1.78}, 96: {3: 1.0, 2: 1.15, 1: 1.65}, 128: {3: 1.0, 2: 1.03, 1: 1.6}}
TILE_OVERHEAD = 16000


def config_for(
    head_dim: int, dtype: dtype, variant: Variant, keys: float, value_dim: int | None = None, **fields: Any
) -> Config:
    """The configuration for queries that see so many keys, with the next head dims of SHAPES. fields: further fields of the
    Config. Parts of a sequence (QueryPartsLayout) have the key blocks of the whole sequence, so that the bits are equal."""
    padded, padded_value = (min(d for d in SHAPES if d >= dim) for dim in (head_dim, value_dim or head_dim))
    parts = fields.get("seq_layout") is QueryPartsLayout and not fields["axes"] and not fields["by_list"]
    if padded == padded_value and variant.positional and not variant.uses_random and (parts or not fields):
        config = _build_config(
            padded, dtype, variant, next((end for end in shapes_by_length(padded, variant) if keys <= end), None)
        )
        return replace(config, **ONE_TILE_PER_CTA, **fields) if fields else config
    needs_room = variant.uses_random or variant.reads_score_matrix or variant.tma_bias  # registers, or shared memory
    shape = None if needs_room else NARROW.get((padded, padded_value))
    shape = shape or (PAGED.get(max(padded, padded_value)) if fields.get("kv_source", OneBuffer()).paged else None)
    return Config(
        padded, padded_value, dtype, variant, **(shape or variant_shape(max(padded, padded_value), variant)), **fields
    )


def with_kv(config: Config, kv: int) -> Config:
    """The configuration with blocks of `kv` keys, in the shape that it has for other lengths, or that other variants have.
    ValueError: there is no such shape."""
    if config.kv == kv:
        return config
    padded = max(config.head_dim, config.value_dim)
    default_fields, by_length = variant_shape(padded, config.variant), shapes_by_length(padded, config.variant)
    shapes = [default_fields, *[table[padded] for table in TABLES if padded in table]]
    if not config.axes:  # arrays of aux take registers, which long and short sequences' tiles do not have
        shapes = [*[default_fields | entry for entry in by_length.values()], *shapes]
    fields_of_kv = next((fields for fields in shapes if fields["kv"] == kv), None)
    if fields_of_kv is None:
        raise ValueError(f"family: has no blocks of {kv} keys for head_dim={config.head_dim}, value_dim={config.value_dim}")
    is_plain = config.seq_layout is BatchedLayout and not (
        config.axes or config.by_list or config.float32_out or config.accumulates
    )
    return replace(config, **USUAL_FIELDS | fields_of_kv | ({} if is_plain else ONE_TILE_PER_CTA))


def fit_to_load(config: Config, queries: Any, keys: Any, batch_heads: Any, processors: int, kv: int | None = None) -> Config:
    """The configuration with fewer query rows in a tile, if much would be idle otherwise: rows of tiles, because sequences have
    few queries (`queries`, the mean of packed ones), or SMs in the last wave of tiles.
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
    if config.float32_out or config.accumulates or widest not in ONE_CONSUMER:
        return config
    small = ONE_CONSUMER[widest]
    if (
        queries <= (SHORT_QUERIES if config.seq_layout is PackedLayout else warpgroup.ROWS)
        and batch_heads >= MANY_PER_SM * processors
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
    )  # one or two CTAs fit an SM
    return min(choices, key=lambda choice: choice.estimate_time(queries, keys, batch_heads, processors))


@functools.lru_cache(1024)
def _build_config(padded: int, dtype: dtype, variant: Variant, end: float | None) -> Config:
    """The configuration for up to `end` keys, one of shapes_by_length's limits; None: for more than all of them."""
    fields = {} if end is None else shapes_by_length(padded, variant)[end]
    return Config(padded, padded, dtype, variant, **variant_shape(padded, variant) | fields)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations for problems of any length; with `everything` those of fp16, too, whose code takes as many registers
    as bf16's."""
    if target.has_wgmma:
        dtypes = (bf16, fp16)[: 1 + everything]
        for input_dtype, head_dim, variant in itertools.product(dtypes, SHAPES, (FULL, CAUSAL)):
            ends = *shapes_by_length(head_dim, variant), math.inf
            configs = [config_for(head_dim, input_dtype, variant, end) for end in ends]
            # (queries, SMs) for which one or two consumers are chosen
            problems = itertools.product(configs, ((1, 1), (warpgroup.ROWS + 1, 1), (512, 512)))
            small_configs = [fit_to_load(config, queries, 512, MANY_PER_SM, sms) for config, (queries, sms) in problems]
            yield from dict.fromkeys((*configs, *small_configs))
            if everything:
                yield config_for(head_dim, input_dtype, variant, math.inf, **in_pages(2))
            if head_dim <= BLOCK and variant is CAUSAL:  # for attention.parallel
                config = config_for(
                    head_dim, input_dtype, variant, math.inf, seq_layout=QueryPartsLayout, axes=(), by_list=False
                )
                yield from (
                    replace(config, kv_source=source)
                    for source in (TwoBuffers(config.key, config.value), StreamingBuffers(config.key, config.value))
                )


@static
class NoTurns:
    """Consumers issue wgmma as soon as they can. The methods are those of `warpgroup.ping_pong`."""

    @inlined
    def begin(self, wg):
        """Prepare the first turn: nothing to do."""

    @inlined
    def take(self, wg):
        """Wait for the consumer's turn: nothing to wait for."""

    @inlined
    def give(self, wg):
        """Pass the turn to the next consumer: nothing to pass."""


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ROWS, KV, WG_ROWS = config.rows, config.kv, warpgroup.ROWS  # rows of a query tile, of a key block, of a consumer
    CONSUMERS, PARAMS, AUX = config.consumers, config.params, config.aux
    SKIPS = config.persistent and config.variant.starts_at_zero  # consumers skip key blocks that none of their rows sees
    # with one stage of queries a tile's queries wait for the last tile, but its keys need not
    KEYS_FIRST = config.persistent and config.q_stages == 1
    KEYS_AHEAD = config.kv_source.paged  # the next keys are loaded before these values, to hide the look-up of pages
    variant, tiling, turn, output = config.variant, config.tiling, config.turn, config.output
    consumer_tiling, scheduler, kv_source = replace(config, consumers=1).tiling, config.scheduler, config.kv_source
    sequences, bias_tiles, weights = config.sequences, config.bias_tiles, config.weights
    PRODUCER, (PRODUCER_REGISTERS, CONSUMER_REGISTERS) = CONSUMERS, REGISTERS[CONSUMERS]
    INPUT, Q, S, O = config.dtype, *(rt(16, columns, fp32) for columns in (config.head_dim, config.kv, config.value_dim))
    PANELS, PANEL = config.query.panels, rt(16, config.query.panel_cols, fp32)
    LOW_SCORES, PREPARES = variant.allows_low_scores, variant.prepares_queries
    readers = CONSUMERS * warpgroup.WARPGROUP
    smem = shared(
        q=ring(config.query, config.q_stages, readers),
        k=ring(config.key, config.stages, readers),
        v=ring(config.value, config.stages, readers),
        **weights.memory(ROWS, KV),
        **bias_tiles.rings(config.stages, readers),
    )
    softmax, OUTPUT = Softmax(O, lowest_max(variant)), output.declare(config.value_dim, config.dtype)

    @inlined
    def prepare_queries(queries, ctx):
        """A consumer's rows of Q, changed by the variant in shared memory."""
        if PREPARES:
            stats = variant.query_stats(warpgroup.load(queries, Q), ctx)
            for i in range(PANELS):  # one after the other, to save registers
                panel = subtile(queries, WG_ROWS, 0, PANEL.cols, i)
                x = variant.prepare_queries(warpgroup.load(panel, PANEL), stats, ctx, PANEL.cols * i)
                warpgroup.store(panel, INPUT(x))
            warpgroup.sync()
        return queries

    def build_step(masks):
        """The step of the pipeline for a block of keys. masks: with the mask or without?"""

        @inlined
        def step(slot, p, state, queries, k, v, tiles, p_smem, wg, ctx, key, scale, slack):
            """Scores and softmax of the key block in a slot, while the tensor cores compute O += P V of the one before."""
            turn.take(wg)
            s = warpgroup.mm_ABt(queries, k.wait(slot))
            o = warpgroup.mma_AB(state.rescale(), p, v.wait(slot - 1))
            turn.give(wg)
            prefetched, ctx = variant.prefetch(S, ctx, key), bias_tiles.load_rows(tiles, slot, ctx, wg)
            s = warpgroup.wait(s, newer=1)  # the scores are done, o is still in flight
            if masks:
                s, row_offset = tiling.change_edge_scores(s, prefetched, ctx, key)
            else:
                s, row_offset = tiling.change_scores(s, prefetched, ctx, key)
            state = state.update_max(s, row_offset, scale, slack)
            p = state.weights(s, row_offset, scale, LOW_SCORES)
            k.release(slot, after=state.m)  # after: keeps the maximum before the next wait
            state, p = state.add(p), variant.drop(p, ctx, key)
            o = warpgroup.wait(o)
            v.release(slot - 1)
            return weights.stage(p, p_smem, wg), state._replace(o=o)  # after wait(o): until then the wgmma reads P

        return step

    masked_step, step = build_step(True), build_step(False)

    @inlined
    def count_blocks(row, kv_blocks, ctx):
        """(how many of the tile's key blocks a consumer computes, the last ones in order; how many of those it masks, at least
        the first). It computes none if its rows lie after the last query."""
        if SKIPS:
            consumer_blocks = consumer_tiling.key_blocks(row, ctx)
            return int32(consumer_blocks.n if row < ctx.seqlen_q else 0), int32(max(1, consumer_blocks.masked))
        else:
            return kv_blocks.n, int32(max(1, kv_blocks.masked))

    @inlined
    def skip_blocks(j, first_slot, end, unseen_at_end, k, v, tiles, wg):
        """Release the key blocks from slot j up to `first_slot`, which is not among them: none of the consumer's rows sees
        them. Every consumer takes one turn for each key block of a tile except the last. All consumers together zero the last
        `unseen_at_end` keys of the first block."""
        for slot in range(j, first_slot):
            if slot == j and unseen_at_end > 0:
                zero_last_keys(v.wait(slot), unseen_at_end, CONSUMERS)
            k.wait(slot)
            k.release(slot)
            bias_tiles.skip(tiles, slot)
            if slot < end - 1:
                turn.take(wg)
                turn.give(wg)
            v.wait(slot)
            v.release(slot)

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def attend(
        gQ: tiled(config.query, unit=1), gK: kv_source.source(config.key), gV: kv_source.source(config.value), gO: OUTPUT,
        gLse: array(3), params: PARAMS, aux: AUX, blocks: INT, heads: INT, batch_heads: INT,
        raster_group: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """O = softmax(Q K^T / sqrt(D)) V and its log-sum-exp, with the variant's changes of scores. There are `blocks` query
        tiles for each of `batch_heads` pairs of head and batch, in raster groups of `raster_group` pairs; `group` query heads
        share a key head; exp2(scale s) is the weight of a score s; the row maximum may grow by `slack` before O is rescaled."""
        memory = smem.open()
        q, k, v, tiles, p_smem = memory.q, memory.k, memory.v, bias_tiles.ring_of(memory), weights.tile_of(memory)
        wg, grid = warpgroup.id(), TileGrid(blocks, heads, batch_heads, raster_group)
        r = j = int32(0)  # query tiles and key blocks so far: the next slots of the rings
        if wg == PRODUCER:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            while scheduler.has_tile(r, grid, params):
                block, batch, head = scheduler.find_tile(r, grid, params)
                seq, row = sequences.sequence(batch, params), ROWS * block
                kv_head, _ = divmod(head, group)
                ctx = seq.context(batch, head, row, params, aux)
                kv_blocks = tiling.key_blocks(row, ctx)
                if not KEYS_FIRST:
                    q.fill(r, gQ, (seq.batch, seq.offset_q + row, head))
                arrived = kv_source.begin_tile(params)
                if KEYS_AHEAD:
                    kv_source.fill(k, j, gK, seq, batch, seq.offset_k + tiling.key(kv_blocks, 0, ctx), kv_head, params)
                for i in range(kv_blocks.n):
                    key = seq.offset_k + tiling.key(kv_blocks, i, ctx)
                    if KEYS_AHEAD and i + 1 < kv_blocks.n:
                        next_key = seq.offset_k + tiling.key(kv_blocks, i + 1, ctx)
                        kv_source.fill(k, j + i + 1, gK, seq, batch, next_key, kv_head, params)
                    if not KEYS_AHEAD:
                        arrived = kv_source.wait_for_block(arrived, key, params)
                        kv_source.fill(k, j + i, gK, seq, batch, key, kv_head, params)
                    if KEYS_FIRST and i == 0:
                        q.fill(r, gQ, (seq.batch, seq.offset_q + row, head))
                    bias_tiles.fill(tiles, j + i, params, (batch, head, row, tiling.key(kv_blocks, i, ctx) // KV))
                    kv_source.fill_values(v, j + i, gV, seq, batch, key, kv_head, params)
                r, j = int32(r + 1), int32(j + kv_blocks.n)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            turn.begin(wg)
            while scheduler.has_tile(r, grid, params):
                block, batch, head = scheduler.find_tile(r, grid, params)
                seq, row = sequences.sequence(batch, params), ROWS * block + WG_ROWS * wg
                ctx = seq.context(batch, head, row + O.rows * warpgroup.rank(), params, aux).precompute(variant)
                kv_blocks = tiling.key_blocks(ROWS * block, ctx)
                n, n_masked = count_blocks(row, kv_blocks, ctx)
                end = int32(j + kv_blocks.n)
                first_slot, queries = int32(end - n), subtile(q.wait(r), WG_ROWS, wg)
                if SKIPS:
                    skip_blocks(j, first_slot, end, kv_blocks.unseen_at_end, k, v, tiles, wg)
                if SKIPS and n == 0:
                    output.release_previous_queries(q, r)
                    output.release_queries(q, r)
                else:
                    key, queries = tiling.key(kv_blocks, first_slot - j, ctx), prepare_queries(queries, ctx)
                    s = warpgroup.wait(warpgroup.mm_ABt(queries, k.wait(first_slot)))
                    k.release(first_slot)
                    bias_ctx = bias_tiles.load_rows(tiles, first_slot, ctx, wg)
                    s, row_offset = tiling.change_edge_scores(s, variant.prefetch(S, ctx, key), bias_ctx, key)
                    state = output.init_state(softmax, variant, ctx, gO, gLse, seq, row, scale)
                    state = state.update_max(s, row_offset, scale, slack)
                    p = state.weights(s, row_offset, scale, LOW_SCORES)
                    # P V of this block is in the next step
                    p, state = weights.stage(variant.drop(p, ctx, key), p_smem, wg), state.add(p)
                    output.release_previous_queries(q, r)
                    sequences.zero_foreign_rows(v.wait(first_slot), seq.seqlen_k - key, CONSUMERS)
                    if first_slot == j and kv_blocks.unseen_at_end > 0:
                        zero_last_keys(v.wait(first_slot), kv_blocks.unseen_at_end, CONSUMERS)
                    for slot in range(int32(first_slot + 1), int32(first_slot + n_masked)):
                        key = tiling.key(kv_blocks, slot - j, ctx)
                        p, state = masked_step(slot, p, state, queries, k, v, tiles, p_smem, wg, ctx, key, scale, slack)
                    if kv_blocks.unseen_at_start > 0:
                        zero_first_keys(v.wait(first_slot + n_masked - 1), kv_blocks.unseen_at_start, CONSUMERS)
                    for slot in range(int32(first_slot + n_masked), end):
                        key = tiling.key(kv_blocks, slot - j, ctx)
                        p, state = step(slot, p, state, queries, k, v, tiles, p_smem, wg, ctx, key, scale, slack)
                    output.release_queries(q, r)
                    o = warpgroup.wait(warpgroup.mma_AB(state.rescale(), p, v.wait(end - 1)))
                    v.release(end - 1)
                    o, lse = state._replace(o=o).finish(scale, variant, ctx)
                    output.store(gO, o, queries, seq, row, head)
                    output.store_lse(gLse, lse, seq, row, head)
                r, j = int32(r + 1), end
            output.finish()
            if sequences.packed:  # whose grids have one query tile for each CTA
                block, batch, head = scheduler.find_tile(0, grid, params)
                output.clear_padding(O, gO, gLse, sequences, block, batch, head, WG_ROWS * wg, params)

    return attend, smem
