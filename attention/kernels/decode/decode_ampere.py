"""Split-KV attention of a few query tokens, for sm_80 and later: cp.async, ldmatrix and mma.sync. It serves decoding on Hopper,
too, up to 32 rows of tokens and heads (decode_launches.py chooses).

Memory bandwidth sets the speed: keys and values are read once, and each serves only a few rows. So the rows of a tile are all
tokens and all query heads that share a key head. The warps of a block share out the keys of every tile: each loads its own, and
computes their scores and its own partial O, so that no warp waits for another in the loop over keys. After it the warps' O are
merged; if several blocks share out the keys of a sequence (splits.py), decode_combine.py merges theirs.

On Hopper the kernel begins while the previous launch ends (programmatic dependent launch), and waits for it before it reads; so
does decode_combine.py's."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import block, columns, divmod, exp2, finish_sum, grid, load, maximum, row_index, store, subtile, warp_index, zeros
from tiles import bf16, dtype, fp8e4m3, fp16, fp32, inlined, int8, pipeline, rt, shared, st, sv
from tiles.cp_async import VECTOR_SIZES
from tiles.launching.arguments import FLOAT, INT, array, record
from tiles.layout import LANES
from tiles.targets import LARGE, MEDIUM, SMALL, Target

from ...parts.decode.cache_loaders import DenseLoader, IndexedLoader, KeyTiles, PagedLoader, TileReader
from ...parts.decode.key_window import KeyWindow, WholeCacheWindow
from ...parts.decode.norms import PLAIN_KEYS, LayerNormedKeys, MultiHeadLayerNorm, MultiHeadRmsNorm, PlainKeys, RmsNormedKeys
from ...parts.decode.outputs import FinalOrPartialOutput, FinalOutput, OutputTile, PackedPartialOutput, PartialOutput
from ...parts.decode.products import KeyScaledProducts, QuantizedProducts, SameDtypeProducts
from ...parts.decode.splits import FixedSplits, StreamKSplits
from ...parts.decode.token_rows import PackedRows, UniformRows
from ...parts.norms import QueryNorm
from ...parts.online_softmax import LOWEST_FLOAT, Softmax, lowest_max, over_sum
from ...parts.variant import TokenHeadContext, Variant, arrays_of

SLAB_COLS = 32  # columns of O that a warp merges at a time: one panel of float32
TWO_AHEAD_ELEMENTS = 16 * 192  # of a warp's O, up to which registers hold the page numbers of two tiles


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. product: the dtypes of the products. variant: what is done to scores. window: which keys are
    visible. cache: how they are loaded. result: where O goes. sink: a variant that adds to the row sums of final outputs.
    split: which keys a block works on. overlaps_previous: may the kernel begin before the previous launch has ended (PDL)?
    tile_rows: rows of a tile. warp_keys: keys of each tile that a warp has. stages: of the pipelines. ctas_per_sm: thread
    blocks that a multiprocessor is to hold. seq_layout: how query tokens are laid out. axes: the number of axes of each array
    of aux. keys_norm: the norm of the cache's keys."""

    head_dim: int
    value_dim: int
    product: SameDtypeProducts
    variant: Variant
    window: KeyWindow
    cache: DenseLoader
    result: FinalOutput | FinalOrPartialOutput
    sink: Variant
    split: type[FixedSplits]
    overlaps_previous: bool
    tile_rows: int
    warp_keys: int
    warps: int
    stages: int
    ctas_per_sm: int
    seq_layout: type[UniformRows] = UniformRows
    axes: tuple[int, ...] = ()
    keys_norm: PlainKeys = PLAIN_KEYS

    @property
    def kv(self):
        """The number of keys of a tile."""
        return self.warp_keys * self.warps

    @property
    def threads(self):
        """The number of threads of a block."""
        return LANES * self.warps

    @property
    def params(self):
        """The record of parameters that the parts of the configuration read."""
        parts = self.window, self.cache, self.product, self.keys_norm, self.variant, self.sink, self.result
        parts = *parts, self.seq_layout(self.tile_rows)
        return record(**{name: kind for part in parts for name, kind in part.params.items()})

    def __str__(self):
        dims = f"D {self.head_dim}" + f"/{self.value_dim}" * (self.value_dim != self.head_dim)
        scores = f" {self.variant}" * (type(self.variant) is not Variant) + f" {self.sink}" * (type(self.sink) is not Variant)
        parts = f"{dims} {self.product}{self.keys_norm} {self.window} {self.cache}{scores}{self.seq_layout(self.tile_rows)}"
        return f"{parts} {self.result}, {self.tile_rows} x {self.kv}" + " PDL" * self.overlaps_previous


TILE_ROWS = 16  # rows of a tile
TALL_ROWS = 2 * TILE_ROWS  # rows of a tall tile
# padded head_dim: (warp_keys, warps, stages, ctas_per_sm)
SHAPES = {64: (32, 4, 2, 2), 96: (16, 4, 3, 2), 128: (16, 4, 2, 2), 192: (16, 4, 2, 1), 256: (16, 4, 2, 1)}
SHAPES_BY_LIMIT = {  # {bytes of shared memory that a block may have: shapes that differ}. An SM has little more in all
    SMALL: {64: (32, 4, 2, 1), 96: (16, 4, 3, 1), 128: (16, 4, 2, 1), 192: (16, 2, 3, 1), 256: (16, 2, 2, 1)},
    MEDIUM: {},
    LARGE: {64: (32, 4, 3, 2), 96: (16, 4, 4, 2), 128: (16, 4, 3, 2), 192: (16, 4, 2, 2), 256: (16, 4, 3, 1)},
}
DENSE_SHAPES = {128: (32, 4, 2, 1)}  # LARGE: of dense caches of 16 bits, and of stream-K, where a block has several epilogues
PLAIN_SHAPES = {96: (32, 4, 2, 1), 192: (32, 4, 2, 1)}  # LARGE: the same if neither scores nor keys are changed
# LARGE: of one byte with fixed splits; timed with descales of heads over dense caches alone
QUANTIZED_SPLIT_SHAPES = {128: (32, 4, 3, 2)}
TALL_SHAPES = {  # of tall tiles, where they pay: half of all warps' O must fit into the values' stages
    SMALL: {64: (32, 4, 2, 1)},
    MEDIUM: {64: (32, 4, 2, 1), 96: (16, 4, 4, 1), 128: (16, 4, 3, 1)},
    LARGE: {64: (32, 4, 3, 2), 96: (16, 4, 4, 1), 128: (16, 4, 4, 1)},
}
TALL_STREAM_K_SHAPES = {128: (32, 4, 2, 1)}  # LARGE: of tall tiles with stream-K; timed without score changes, dense
NORMS = (MultiHeadRmsNorm(True), RmsNormedKeys()), (MultiHeadLayerNorm(False), LayerNormedKeys())  # of queries and of keys


def config_for(
    head_dim: int, value_dim: int, product: SameDtypeProducts, variant: Variant, window: KeyWindow, cache: DenseLoader,
    result: FinalOutput | FinalOrPartialOutput, sink: Variant, split: type[FixedSplits] = FixedSplits, pdl: bool = False,
    tall: bool = False, shared_limit: int = LARGE, seq_layout: type[UniformRows] = UniformRows, axes: tuple[int, ...] = (),
    keys_norm: PlainKeys = PLAIN_KEYS, few_keys: bool = False,
) -> Config:  # fmt: skip
    """The configuration for a problem, on a GPU whose blocks may use `shared_limit` bytes of shared memory. Dims are rounded up
    to the next one of SHAPES; the larger of the two decides the shape. tall: are there rows for more than one tile? few_keys:
    does each block have all keys of a sequence, and are these few?"""
    padded, padded_value = (min(d for d in SHAPES if d >= dim) for dim in (head_dim, value_dim))
    shared_limit = max(limit for limit in SHAPES_BY_LIMIT if limit <= shared_limit)
    is_large = shared_limit >= LARGE
    shapes, tall_shapes, dim = SHAPES | SHAPES_BY_LIMIT[shared_limit], TALL_SHAPES[shared_limit], max(padded, padded_value)
    is_dense = type(product) is SameDtypeProducts and type(cache) is DenseLoader
    is_plain = is_dense and type(variant) is Variant and keys_norm is PLAIN_KEYS
    if is_large and not few_keys and (split is StreamKSplits or is_dense):
        shapes |= DENSE_SHAPES | (PLAIN_SHAPES if is_plain else {})
    if is_large and split is StreamKSplits and is_plain:
        tall_shapes = tall_shapes | TALL_STREAM_K_SHAPES
    tall = tall and keys_norm.allows_tall_tiles and dim in tall_shapes
    tile_rows, (keys, warps, stages, blocks) = (TALL_ROWS, tall_shapes[dim]) if tall else (TILE_ROWS, shapes[dim])
    fixed_split = split is FixedSplits and is_large and not tall and dim in QUANTIZED_SPLIT_SHAPES
    if fixed_split and type(product) is QuantizedProducts and type(cache) is DenseLoader:
        keys, warps, stages, blocks = QUANTIZED_SPLIT_SHAPES[dim]
    elif product.cache_dtype.itemsize == 1:  # twice the warps, so that a stage has as many bytes
        warps, blocks = 2 * warps, 1
    if product.has_key_descales and tall and keys > TILE_ROWS:  # there are no registers for the descales of so many keys
        keys, stages = keys // 2, 2 * stages
    parts = product, variant, window, cache, result, sink, split, pdl
    return Config(padded, padded_value, *parts, tile_rows, keys, warps, stages, blocks, seq_layout, axes, keys_norm)


def final_or_partial(output_dtype: dtype, vector_bytes: int) -> FinalOrPartialOutput:
    """The output of blocks of which some read all keys of their rows, and others a part of them."""
    return FinalOrPartialOutput(FinalOutput(output_dtype, vector_bytes), PartialOutput(output_dtype, vector_bytes))


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with: for bf16, one token and vectors of 16 bytes, or for `everything`.
    fp16 takes as many registers as bf16."""
    plain, size = Variant(), VECTOR_SIZES[0]
    limit, pdl = target.shared_bytes, target.has_early_launch
    quantized = [fp8e4m3, int8] if target.has_fp8 else [int8]
    one_token, causal = KeyWindow(False, False, False), KeyWindow(False, True, False)
    Result = Callable[[dtype, int], FinalOutput | FinalOrPartialOutput]
    kinds: list[tuple[KeyWindow, type[DenseLoader], Result, type[FixedSplits]]]
    kinds = [(one_token, DenseLoader, final_or_partial, StreamKSplits), (causal, PagedLoader, final_or_partial, StreamKSplits)]
    if everything:
        kinds.append((KeyWindow(True, True, False), IndexedLoader, PartialOutput, FixedSplits))
        kinds.append((KeyWindow(False, True, True), PagedLoader, FinalOutput, FixedSplits))
    products: list[tuple[SameDtypeProducts, int]] = [(SameDtypeProducts(bf16), size)]
    products += [(QuantizedProducts(bf16, one, True), size) for one in (quantized if everything else quantized[:1])]
    if everything:
        products += [*((SameDtypeProducts(bf16), n) for n in VECTOR_SIZES[1:]), (SameDtypeProducts(fp16), size)]
    configs = [
        config_for(dim, dim, product, plain, window, cache(n), result(product.q_dtype, n), plain, split, pdl, tall, limit)
        for (product, n), dim, (window, cache, result, split), tall in itertools.product(products, SHAPES, kinds, (False, True))
    ]
    for one in quantized:
        dense, part = DenseLoader(size), PartialOutput(bf16, size)
        by_head = QuantizedProducts(bf16, one, True), plain, causal, dense, part, plain, FixedSplits, pdl
        configs.append(config_for(128, 128, *by_head, False, limit))
        for dim, loader, tall in itertools.product(SHAPES if everything else (128,), (DenseLoader, PagedLoader), (False, True)):
            by_key = KeyScaledProducts(bf16, one, True), plain, causal, loader(size), final_or_partial(bf16, size), plain
            configs.append(config_for(dim, dim, *by_key, StreamKSplits, pdl, tall, limit))
    if everything:
        same, output = SameDtypeProducts(bf16), PackedPartialOutput(bf16, size)
        packed = same, plain, causal, PagedLoader(size), output, plain, FixedSplits, pdl
        configs += [config_for(dim, dim, *packed, tall, limit, PackedRows) for dim in SHAPES for tall in (False, True)]
        for (q_norm, keys_norm), dim, tall in itertools.product(NORMS, SHAPES, (False, True)):
            if keys_norm.allows_tall_tiles or dim < max(SHAPES) or limit > SMALL:  # the other one spills 32 bytes
                variant, outputs = QueryNorm(q_norm), final_or_partial(bf16, size)
                normed = same, variant, causal, DenseLoader(size), outputs, plain, StreamKSplits, pdl
                configs.append(config_for(dim, dim, *normed, tall, limit, keys_norm=keys_norm))
    yield from dict.fromkeys(configs)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ROWS, KEYS, WARPS, KV, STAGES = config.tile_rows, config.warp_keys, config.warps, config.kv, config.stages
    INPUT, CACHE, PARAMS = config.product.q_dtype, config.product.cache_dtype, config.params
    product = config.product
    variant, window, cache, result, sink = config.variant, config.window, config.cache, config.result, config.sink
    split, layout, PDL = config.split(window, KV), config.seq_layout(ROWS), config.overlaps_previous
    AUX, ALLOWS_LOW_SCORES, IS_PARTIAL = arrays_of(config.axes), variant.allows_low_scores, type(result) is not FinalOutput
    norm, PREPARES = config.keys_norm, variant.prepares_queries or config.keys_norm.prepares_queries

    # queries, and scores
    PANEL_BYTES = 0 if norm.allows_tall_tiles else 64  # of Q: narrow panels take half of the registers, where these are short
    QUERY, VALUES = st(ROWS, config.head_dim, INPUT, PANEL_BYTES), st(KV, config.value_dim, CACHE)
    # is a panel of Q loaded with its factors before the keys? If a warp has one panel at most, and registers for it
    PREFETCHES = PREPARES and norm.allows_tall_tiles and QUERY.panels <= WARPS and ROWS < TALL_ROWS
    Q_OPERAND = st(ROWS, config.head_dim, product.mma_dtype, PANEL_BYTES)
    KEEPS_Q = product.mma_dtype is INPUT and not PREPARES  # does the product take queries as they are?
    Q, Q_ROWS = rt(ROWS, QUERY.panel_cols, fp32 if PREPARES else INPUT), rt(ROWS, config.head_dim, fp32)
    K_PANEL = rt(KEYS, st(KEYS, config.head_dim, CACHE).panel_cols, fp32)
    S, O = rt(ROWS, KEYS, fp32), rt(ROWS, config.value_dim, fp32)

    # how the warps' O are merged
    value_bytes = STAGES * KV * config.value_dim * CACHE.itemsize  # there the warps' O are merged, in O_PARTS parts
    o_bytes = WARPS * ROWS * config.value_dim * fp32.itemsize
    O_PARTS = next(n for n in (1, 2, 3, 4) if o_bytes <= n * value_bytes and O.cols % (SLAB_COLS * n) == 0)
    COLUMNS, ALL_COLUMNS = config.value_dim // O_PARTS, config.value_dim
    WARPS_O, SLAB, SLABS = st(WARPS * ROWS, COLUMNS, fp32), rt(ROWS, SLAB_COLS, fp32), COLUMNS // SLAB_COLS

    # how keys and values are copied
    # are pages looked up two tiles ahead? If there are registers for it
    TWO_AHEAD = ROWS * config.value_dim <= TWO_AHEAD_ELEMENTS and not product.has_key_descales
    reader = TileReader(cache, product, KV, TWO_AHEAD)
    # does a block know which keys it has without a read from global memory?
    KNOWS_KEYS = type(window) is WholeCacheWindow and not window.padded and config.seq_layout is UniformRows
    DESCALES = product.descale_pipelines(KV, STAGES, WARPS)
    COMMITS, AHEAD = 2 + len(DESCALES), STAGES - 1  # commit groups of a tile; tiles that are being copied
    PENDING = COMMITS * (STAGES - 2) + COMMITS // 2  # commit groups that follow the keys, or the values, that are waited for
    PENDING_DESCALES = PENDING + COMMITS // 2  # the same of their descales, for which one waits after the next copies began
    smem = shared(
        q=pipeline(QUERY, 1, WARPS),
        k=pipeline(st(KV, config.head_dim, CACHE), STAGES, WARPS),
        v=pipeline(VALUES, STAGES, WARPS),
        scratch=sv(WARPS * ROWS, fp32),
        **DESCALES,
    )
    softmax = Softmax(O, lowest_max(variant))

    @inlined
    def compute_query_stats(tile, ctx):
        """What the variant needs of whole rows of queries, computed before the rows are overwritten."""
        if variant.prepares_queries:
            stats = variant.query_stats(load(tile, Q_ROWS), ctx)
            block.sync()
            return stats
        else:
            return None

    @inlined
    def load_factors(i, head, params):
        """Load what panel i of the queries is multiplied by."""
        col = int32(Q.cols * i)
        return variant.prefetch_query_params(Q.row_vec, col, params), norm.prefetch(Q.row_vec, head, col, params)

    @inlined
    def prepare_panel(tile, operand, i, sums, stats, factors, ctx, head):
        """Write panel i of the queries to `operand`, as the product takes it. Returns `sums` with this panel's added."""
        x = variant.prepare_queries_by(load(subtile(tile, ROWS, 0, Q.cols, i), Q), stats, factors[0], ctx, Q.cols * i)
        y = product.convert_q(norm.weight_queries(x, factors[1]))
        store(subtile(operand, ROWS, 0, Q.cols, i), y)
        return norm.add_query_sums(sums, x, y, head, Q.cols * i, ctx.params)

    @inlined
    def prepare_queries(q, ctx, head, factors, scratch):
        """Wait for the queries. Returns (the queries as the product takes them, the sums over their columns that scores need).
        factors: of the warp's own panel, or None."""
        tile = q.wait(0, COMMITS * AHEAD)
        if KEEPS_Q:
            return tile, None
        operand, stats, sums = q.reuse(Q_OPERAND), compute_query_stats(tile, ctx), norm.init_query_sums(zeros(O.col_vec))
        warp = warp_index()
        if PREFETCHES:
            if warp < QUERY.panels:
                sums = prepare_panel(tile, operand, warp, sums, stats, factors, ctx, head)
        else:
            for i in range(warp, QUERY.panels, WARPS):
                sums = prepare_panel(tile, operand, i, sums, stats, load_factors(i, head, ctx.params), ctx, head)
        block.sync(fenced=False)
        return operand, norm.reduce_query_sums(sums, scratch)

    @inlined
    def merge_warps(o, part, l, v_descale, v, out_tile, params):
        """Add the warps' O, of a part of its columns, in the values' stages, and store o / l. Each warp adds some slabs."""
        if part > 0:
            block.sync()  # the part before has been read
        warps_o, warp = v.reuse(WARPS_O), warp_index()  # computed here again: no register holds it over the loop over keys
        store(subtile(warps_o, ROWS, warp), columns(o, COLUMNS, part))
        block.sync()
        for slab in range(warp, SLABS, WARPS):
            total = zeros(SLAB)
            for other in range(WARPS):
                total = total + load(subtile(warps_o, ROWS, other, SLAB_COLS, slab), SLAB)
            total = product.finish_columns(total, v_descale)
            result.store(over_sum(total, l), out_tile, int32(COLUMNS * part + SLAB_COLS * slab), params)

    @inlined
    def clear_unused_rows(tile, tokens, head, row, part, warp, group, scale, params):
        """Store O = 0 and lse = -inf for the tile's rows from `row` on whose tokens come after the last sequence."""
        first, last = layout.unused_tokens(tile, tokens, group, params)
        if first <= last:
            row = int32(max(row, first * group))  # the rows before it are the last sequence's
            out_tile = OutputTile(int32(0), head, part, int32(0), False, row, first, last, group)
            for slab in range(warp, ALL_COLUMNS // SLAB_COLS, WARPS):
                result.store(zeros(SLAB), out_tile, int32(SLAB_COLS * slab), params)
            if warp == 0:
                result.clear_row_sums(O.col_vec, scale, out_tile, params)

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def attend(
        gQ: array(5, INPUT), gK: array(4, CACHE), gV: array(4, CACHE), params: PARAMS, aux: AUX,
        heads: INT, row_tiles: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """Attention of one of `row_tiles` tiles of rows of a key head, over one of `splits` splits of the keys. A row is one of
        the `group` query heads of one of `tokens` tokens. The weight of a score s is exp2(`scale` s). slack: by how much the
        row maximum may lag behind the scores."""
        memory = smem.open()
        q, k, v, scratch, descale_pipes = memory.q, memory.k, memory.v, memory.scratch, memory[4:]
        if PDL and IS_PARTIAL:
            grid.release()  # decode_combine.py's blocks may begin, and wait
        rest, index = divmod(cuda.blockIdx.x, row_tiles)
        number, head = divmod(rest, heads)  # heads' rows are neighbours in memory: neighbouring blocks read them
        if PDL and not KNOWS_KEYS:
            grid.wait(int32(number + head + index))
        tile, all_tokens = layout.find_tile(index, tokens, group, params), tokens
        warp, row, tokens, seq_row = warp_index(), tile.row, tile.tokens, int32(tile.seq_start * group)
        end_row = int32(tokens * group)
        last_row = int32(min(row + ROWS, end_row) - 1)
        first_token, last_token = int32(row // group), int32(last_row // group)
        work = split.first_work(layout.block_number(number, splits, tile), splits, sequences, tokens, params)
        while work.tiles_left > 0 and layout.has_rows(tile, group):
            sequence, batch, is_final = work.sequence, layout.batch_of(work.sequence), work.end_tile - work.tile == work.tiles
            part_batch = layout.batch_of(work.part_batch)
            first_out, last_out = int32(tile.seq_start + first_token), int32(tile.seq_start + last_token)
            out_row = int32(seq_row + row)
            out_tile = OutputTile(batch, head, work.part, part_batch, is_final, out_row, first_out, last_out, group)
            first, n, span = split.find_tiles(work, first_token, last_token, tokens, params)
            if PDL and KNOWS_KEYS:
                grid.wait(int32(first + n))
            factors = load_factors(warp_index(), head, params) if PREFETCHES else None  # after the keys it would come late
            q_lookup = q.look_up(None, group, (0, out_tile.row), seq_row + end_row)  # only a token's rows are contiguous
            kv = KeyTiles(k, v, descale_pipes, gK, gV, sequence, head, span.end, n)
            lookups = reader.look_up_first(first, kv, params)
            q.fill_pages(0, gQ, q_lookup, (out_tile.row, batch, head, 0), seq_row + end_row, None, cache.vector_bytes)
            for i in range(AHEAD):
                key, next_key = int32(first + KV * i), int32(first + KV * (i + 1))
                reader.copy_keys(i, key, lookups, kv, params)
                reader.copy_values(i, key, lookups, kv, params)
                lookups = reader.look_up_next(lookups, next_key, kv, params)
            rows = row_index(O.col_vec) + row
            token = rows // group
            row_head = rows - token * group + head * group
            ctx = TokenHeadContext(sequence, row_head, token, span.shift, tokens, span.end, params, aux, 0).precompute(variant)
            k_descale, v_descale = product.head_descales(sequence, head, params)
            queries, q_sums = prepare_queries(q, ctx, head, factors, scratch)
            state, o_unit = softmax.init(softmax.lowest), product.initial_unit()
            for i in range(n):
                key, copied_key = int32(first + KV * i + KEYS * warp), int32(first + KV * (i + AHEAD))
                prefetched = variant.prefetch(S, ctx, key)
                keys = k.wait_warp(i, PENDING)
                reader.copy_keys(i + AHEAD, copied_key, lookups, kv, params)
                k_descales = product.k_descales(k_descale, descale_pipes, i, PENDING_DESCALES, S.row_vec)
                s = product.mma_qk(zeros(S), queries, keys, k_descales)
                s = norm.normalise_scores(s, keys, K_PANEL, k_descales, q_sums, params)
                values = v.wait_warp(i, PENDING)
                reader.copy_values(i + AHEAD, copied_key, lookups, kv, params)
                lookups = reader.look_up_next(lookups, int32(copied_key + KV), kv, params)
                s = variant.mask(variant.score_by(s, prefetched, ctx, key), ctx, key, -math.inf)
                s = window.mask(s, ctx, key, span.end)
                state = state.update_max(s, None, scale, slack)
                v_descales = product.v_descales(v_descale, descale_pipes, i, PENDING_DESCALES, S.row_vec)
                o, o_unit = product.rescale_o(state, o_unit, v_descales)
                p = state.weights(s, None, scale, ALLOWS_LOW_SCORES)
                state = state._replace(o=product.mma_pv(o, p, values, o_unit, v_descales)).add(p)

            m = block.reduce_max(state.m, scratch)
            if result.is_final(out_tile):
                m = maximum(m, sink.initial_max(ctx, LOWEST_FLOAT))
            weight = exp2((state.m - m) * scale)
            l = block.reduce_sum(finish_sum(state.l) * weight, scratch)
            if result.is_final(out_tile):
                l = sink.finish_row_sum(l, m, scale, ctx)
            o = state.o * product.merge_weight(weight, o_unit)  # the reductions were barriers: no warp reads values any more
            merge_warps(o, 0, l, v_descale, v, out_tile, params)
            if O_PARTS > 1:
                merge_warps(o, 1, l, v_descale, v, out_tile, params)
            if O_PARTS > 2:
                merge_warps(o, 2, l, v_descale, v, out_tile, params)
            if O_PARTS > 3:
                merge_warps(o, 3, l, v_descale, v, out_tile, params)
            if warp == 0:
                result.store_row_sums(m, l, scale, out_tile, params)
            work = split.next_work(work, tokens, params)
            if work.tiles_left > 0:
                block.sync()  # the warps' O have been read: values may be copied to their place
        if layout.is_packed:
            clear_unused_rows(tile, all_tokens, head, int32(seq_row + row), work.part, warp, group, scale, params)

    return attend, smem
