"""Attention of a few query tokens, over a part of the keys: cp.async, ldmatrix and mma.sync, for sm_80 and later.

Memory sets the speed: keys and values are read once, and each serves only a few rows. So the rows of one tile are all tokens,
and all query heads that share a key head. The warps of a block share the keys: each has some of every tile, which it loads,
reads and weighs by itself, so that no warp waits for another before the end. There their partial results are merged; if several
blocks share the keys of a sequence, combine.py merges those of the blocks. splits.py says which keys a block works on.

On Hopper the kernel begins while the one before it ends, and waits for it before it reads; so does the kernel of combine.py.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import (
    block,
    columns,
    divmod,
    exp2,
    finish_sum,
    full,
    grid,
    load,
    log2,
    maximum,
    row_index,
    store,
    subtile,
    warp_index,
    zeros,
)
from tiles import bf16, dtype, fp16, fp32, inlined, pipeline, rt, shared, st, sv
from tiles.arguments import FLOAT, INT, array, record
from tiles.cp_async import PIECES
from tiles.layout import LANES
from tiles.targets import LARGE, MEDIUM, SMALL, capability, has_early_launch, has_fp8, shared_bytes

from ..norms import Normed
from ..online import LOWEST_FLOAT, Softmax, over_sum
from ..variants import ScoreContext, Variant, arrays_of
from .caches import DenseLoader, IndexedLoader, PagedLoader
from .norms import AS_THEY_ARE, AsTheyAre, ByLayer, ByRms, LayerOfRows, RmsOfRows
from .products import Fp8KeyScaledProducts, Fp8Products, SameDtypeProducts
from .reach import KeyWindow, WholeCacheWindow
from .results import FinalOrPartialOutput, FinalOutput, OutputTile, PackedPartialOutput, PartialOutput
from .splits import FixedSplits, StreamKSplits
from .tokens import PackedRows, UniformRows

PANEL = 32  # columns of O that a warp adds up at once: a panel of float32


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. What it computes: reach, cache and variant say which keys it reads and what becomes of their
    scores; sums: what is added to the sum of weights; split: which keys a block works on; result: where the output goes; lie:
    how query tokens lie; axes: how many axes each array of aux has; keys_norm: the norm of keys before their scores. Its
    shape: `band` rows of a tile, `warps` with `keys` keys of every tile each, the stages of the pipelines, and `resident`
    blocks on a multiprocessor. overlaps_previous: may it begin before the previous launch has ended (PDL)?"""

    head_dim: int
    value_dim: int
    product: SameDtypeProducts
    variant: Variant
    window: KeyWindow
    cache: DenseLoader
    result: FinalOutput | FinalOrPartialOutput
    sums: Variant
    split: type[FixedSplits]
    overlaps_previous: bool
    band: int
    keys: int
    warps: int
    stages: int
    resident: int
    lie: type[UniformRows] = UniformRows
    axes: tuple[int, ...] = ()
    keys_norm: AsTheyAre = AS_THEY_ARE

    @property
    def kv(self):
        """Keys of a tile."""
        return self.keys * self.warps

    @property
    def threads(self):
        """Threads of a block."""
        return LANES * self.warps

    @property
    def params(self):
        """The record of what all these need in the kernel."""
        parts = self.window, self.cache, self.product, self.keys_norm, self.variant, self.sums, self.result, self.lie(self.band)
        return record(**{name: what for part in parts for name, what in part.params.items()})

    def __str__(self):
        dims = f"D {self.head_dim}" + f"/{self.value_dim}" * (self.value_dim != self.head_dim)
        scores = f" {self.variant}" * (type(self.variant) is not Variant) + f" {self.sums}" * (type(self.sums) is not Variant)
        kind = f"{dims} {self.product}{self.keys_norm} {self.window} {self.cache}{scores}{self.lie(self.band)} {self.result}"
        return f"{kind}, {self.band} x {self.kv}" + " PDL" * self.overlaps_previous


BAND = 16  # rows of a tile
MOST = 2 * BAND  # rows of a tall tile
SHAPES = {  # padded head_dim: (keys, warps, stages, resident)
    64: (32, 4, 2, 2),
    96: (16, 4, 3, 2),
    128: (16, 4, 2, 2),
    192: (16, 4, 2, 1),
    256: (16, 4, 2, 1),
}
ROOMS = {  # bytes of shared memory that a block may have: other shapes. A multiprocessor has little more than one such block
    SMALL: {64: (32, 4, 2, 1), 96: (16, 4, 3, 1), 128: (16, 4, 2, 1), 192: (16, 2, 3, 1), 256: (16, 2, 2, 1)},
    MEDIUM: {},
    LARGE: {64: (32, 4, 3, 2), 96: (16, 4, 4, 2), 128: (16, 4, 3, 2), 192: (16, 4, 2, 2), 256: (16, 4, 3, 1)},
}
SHARED = {128: (32, 4, 2, 1)}  # the same of dense caches of 16 bits, and of shares, where a block begins and ends several times
PLAIN = {96: (32, 4, 2, 1), 192: (32, 4, 2, 1)}  # and of plain attention over dense caches alone
NARROW = {128: (32, 4, 3, 2)}  # and of fp8 where a sequence is parted; timed of descales of heads over dense caches alone
SHARED_TALL = {128: (32, 4, 2, 1)}  # and of tiles of twice as many rows; timed of plain attention over dense caches alone
TALL = {  # the same of tiles of twice as many rows, where they serve: half of all warps' parts of O must fit where values were
    SMALL: {64: (32, 4, 2, 1)},
    MEDIUM: {64: (32, 4, 2, 1), 96: (16, 4, 4, 1), 128: (16, 4, 3, 1)},
    LARGE: {64: (32, 4, 3, 2), 96: (16, 4, 4, 1), 128: (16, 4, 4, 1)},
}
NORMS = (RmsOfRows(True), ByRms()), (LayerOfRows(False), ByLayer())  # of queries and of keys


def config_for(
    head_dim: int, value_dim: int, product: SameDtypeProducts, variant: Variant, window: KeyWindow, cache: DenseLoader,
    result: FinalOutput | FinalOrPartialOutput, sums: Variant, split: type[FixedSplits] = FixedSplits, pdl: bool = False,
    tall: bool = False, room: int = LARGE,
    lie: type[UniformRows] = UniformRows, axes: tuple[int, ...] = (), keys_norm: AsTheyAre = AS_THEY_ARE, brief: bool = False,
) -> Config:  # fmt: skip
    """The configuration for a problem, on a GPU whose blocks may use `room` bytes of shared memory. Dims are rounded up to the
    next for which there are kernels; the greater of the two decides the shape. tall: are there rows for more than one tile?
    brief: does each block have all keys of a sequence, and are these few?"""
    padded, wide = (min(d for d in SHAPES if d >= dim) for dim in (head_dim, value_dim))
    room = max(r for r in ROOMS if r <= room)
    short, high, dim = SHAPES | ROOMS[room], TALL[room], max(padded, wide)
    plain = (
        type(variant) is Variant
        and type(product) is SameDtypeProducts
        and type(cache) is DenseLoader
        and keys_norm is AS_THEY_ARE
    )
    if (
        room >= LARGE
        and not brief
        and (split is StreamKSplits or (type(product) is SameDtypeProducts and type(cache) is DenseLoader))
    ):
        short |= SHARED | (PLAIN if plain else {})
    if room >= LARGE and split is StreamKSplits and plain:
        high = high | SHARED_TALL
    tall = tall and keys_norm.slim and dim in high
    band, (keys, warps, stages, resident) = (2 * BAND, high[dim]) if tall else (BAND, short[dim])
    parted = split is FixedSplits and room >= LARGE and band == BAND and dim in NARROW
    if parted and type(product) is Fp8Products and type(cache) is DenseLoader:
        keys, warps, stages, resident = NARROW[dim]
    elif product.cache_dtype.itemsize == 1:  # twice the warps: a stage has as many bytes then
        warps, resident = 2 * warps, 1
    if product.has_key_descales and band > BAND and keys > BAND:  # there are not registers for the numbers of so many
        keys, stages = keys // 2, 2 * stages
    shape = band, keys, warps, stages, resident
    return Config(padded, wide, product, variant, window, cache, result, sums, split, pdl, *shape, lie, axes, keys_norm)


def final_or_partial(of: dtype, vector_bytes: int) -> FinalOrPartialOutput:
    """The output of blocks of which some read all keys of their rows, and others a part of them."""
    return FinalOrPartialOutput(FinalOutput(of, vector_bytes), PartialOutput(of, vector_bytes))


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with: for bf16, one token and whole pieces, or for `everything`. fp16
    takes as many registers as bf16."""
    plain, target = Variant(), capability(arch)
    room, pdl, fp8 = shared_bytes(target), has_early_launch(target), has_fp8(target)
    kinds: list[
        tuple[KeyWindow, type[DenseLoader], Callable[[dtype, int], FinalOutput | FinalOrPartialOutput], type[FixedSplits]]
    ]
    kinds = [
        (KeyWindow(False, False, False), DenseLoader, final_or_partial, StreamKSplits),
        (KeyWindow(False, True, False), PagedLoader, final_or_partial, StreamKSplits),
    ]
    if everything:
        kinds += [
            (KeyWindow(True, True, False), IndexedLoader, PartialOutput, FixedSplits),
            (KeyWindow(False, True, True), PagedLoader, FinalOutput, FixedSplits),
        ]
    forms: list[tuple[SameDtypeProducts, int]] = [(SameDtypeProducts(bf16), PIECES[0])] + [
        (Fp8Products(bf16, True), PIECES[0])
    ] * fp8
    if everything:
        forms += [
            *((SameDtypeProducts(bf16), vector_bytes) for vector_bytes in PIECES[1:]),
            (SameDtypeProducts(fp16), PIECES[0]),
        ]
    found = [
        config_for(
            dim, dim, of, plain, window, cache(vector_bytes), result(of.q_dtype, vector_bytes), plain, split, pdl, tall, room
        )
        for (of, vector_bytes), dim, (window, cache, result, split), tall in itertools.product(
            forms, SHAPES, kinds, (False, True)
        )
    ]
    if fp8:  # keys that have numbers of their own
        by_key, causal, vector_bytes = Fp8KeyScaledProducts(bf16, True), KeyWindow(False, True, False), PIECES[0]
        dense, part = DenseLoader(vector_bytes), PartialOutput(bf16, vector_bytes)
        found.append(
            config_for(128, 128, Fp8Products(bf16, True), plain, causal, dense, part, plain, FixedSplits, pdl, False, room)
        )
        for dim, cache, tall in itertools.product(SHAPES if everything else (128,), (DenseLoader, PagedLoader), (False, True)):
            lies, given = cache(vector_bytes), final_or_partial(bf16, vector_bytes)
            found.append(config_for(dim, dim, by_key, plain, causal, lies, given, plain, StreamKSplits, pdl, tall, room))
    if everything:  # queries one behind the other
        kind = (
            SameDtypeProducts(bf16),
            plain,
            KeyWindow(False, True, False),
            PagedLoader(PIECES[0]),
            PackedPartialOutput(bf16, PIECES[0]),
            plain,
            FixedSplits,
            pdl,
        )
        found += [config_for(dim, dim, *kind, tall, room, PackedRows) for dim in SHAPES for tall in (False, True)]
        read = KeyWindow(False, True, False), DenseLoader(PIECES[0]), final_or_partial(bf16, PIECES[0])
        for (rows, keys), dim, tall in itertools.product(NORMS, SHAPES, (False, True)):
            if keys.slim or dim < max(SHAPES) or room > SMALL:  # but for what spills 32 bytes
                normed = SameDtypeProducts(bf16), Normed(rows), *read, plain, StreamKSplits, pdl, tall, room
                found.append(config_for(dim, dim, *normed, keys_norm=keys))
    yield from dict.fromkeys(found)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    BAND, KEYS, WARPS, KV, STAGES = config.band, config.keys, config.warps, config.kv, config.stages
    INPUT, HELD, PARAMS = config.product.q_dtype, config.product.cache_dtype, config.params
    product = config.product
    variant, window, cache, result, sums = config.variant, config.window, config.cache, config.result, config.sums
    split, lie, PDL, AUX = config.split(window, KV), config.lie(BAND), config.overlaps_previous, arrays_of(config.axes)
    norm, PREPARES = config.keys_norm, variant.prepares_queries or config.keys_norm.prepares
    WIDTH = 0 if norm.slim else 64  # of a panel of queries, in bytes: half as much for a warp to hold, where it matters
    IS_PARTIAL, DEEP = type(result) is not FinalOutput, variant.allows_low_scores
    QUERY, VALUES = st(BAND, config.head_dim, INPUT, WIDTH), st(KV, config.value_dim, HELD)
    SOON = PREPARES and norm.slim and QUERY.panels <= WARPS and BAND < MOST  # has a warp one panel, and registers for more?
    TAKEN, SAME = st(BAND, config.head_dim, product.mma_dtype, WIDTH), product.mma_dtype is INPUT and not PREPARES
    Q, ROWS = rt(BAND, QUERY.panel_cols, fp32 if PREPARES else INPUT), rt(BAND, config.head_dim, fp32)
    KEY = rt(KEYS, st(KEYS, config.head_dim, HELD).panel_cols, fp32)
    S, O = rt(BAND, KEYS, fp32), rt(BAND, config.value_dim, fp32)
    room = STAGES * KV * config.value_dim * HELD.itemsize  # where values lie: O goes through it in so many parts
    PARTS = next(
        n for n in (1, 2, 3) if WARPS * BAND * config.value_dim * fp32.itemsize <= n * room and O.cols % (PANEL * n) == 0
    )
    COLUMNS, ALL_COLUMNS = config.value_dim // PARTS, config.value_dim
    ADDENDS, SLAB, SLABS = st(WARPS * BAND, COLUMNS, fp32), rt(BAND, PANEL, fp32), COLUMNS // PANEL
    FAR = O.rows * O.cols <= 16 * 192 and not product.has_key_descales  # are tiles looked up two ahead? If registers allow
    KNOWS = (
        type(window) is WholeCacheWindow and not window.padded and config.lie is UniformRows
    )  # where its keys are, without reading?
    PIPES = product.descale_pipelines(KV, STAGES, WARPS)
    GROUPS, AHEAD = 2 + len(PIPES), STAGES - 1  # groups of copies that bring a tile; tiles under way
    NEWER = GROUPS * (STAGES - 2) + GROUPS // 2  # groups that are younger than keys, or values, that are waited for
    smem = shared(
        q=pipeline(QUERY, 1, WARPS),
        k=pipeline(st(KV, config.head_dim, HELD), STAGES, WARPS),
        v=pipeline(VALUES, STAGES, WARPS),
        scratch=sv(WARPS * BAND, fp32),
        **PIPES,
    )
    softmax = Softmax(O)

    @inlined
    def following(there, k, gK, sequence, key, end, params):
        """Look up where the next tile lies, from `key` on; and the tile after it, if that is looked up ahead."""
        if FAR:
            return there, cache.look_up(k, gK, sequence, int32(key + KV), end, params)
        return cache.look_up(k, gK, sequence, key, end, params), there

    @inlined
    def whole_rows(tile, ctx):
        """What the variant needs to know of whole rows of queries, taken before the rows are overwritten."""
        if variant.prepares_queries:
            found = variant.query_stats(load(tile, ROWS), ctx)
            block.sync()
            return found
        else:
            return None

    @inlined
    def ahead(i, head, params):
        """Load what panel i of the queries is multiplied by, ahead of its use."""
        col = int32(Q.cols * i)
        return variant.prefetch_query_params(Q.row_vec, col, params), norm.ahead(Q.row_vec, head, col, params)

    @inlined
    def panel(tile, made, i, known, of_queries, asked, ctx, head):
        """Prepare panel i of the queries for the products. Returns `known`, with what is known of this panel added."""
        x = variant.prepare_queries_by(load(subtile(tile, BAND, 0, Q.cols, i), Q), of_queries, asked[0], ctx, Q.cols * i)
        y = product.convert_q(norm.queries(x, asked[1]))
        store(subtile(made, BAND, 0, Q.cols, i), y)
        return norm.more(known, x, y, head, Q.cols * i, ctx.params)

    @inlined
    def taken(q, ctx, head, asked, scratch):
        """(the queries as the products take them, once they have arrived; what scores need to know of them). asked: what was
        loaded ahead for the warp's own panel, or None."""
        tile = q.wait(0, GROUPS * AHEAD)
        if SAME:
            return tile, None
        made, of_queries, known = q.reuse(TAKEN), whole_rows(tile, ctx), norm.begin(zeros(O.col_vec))
        warp = warp_index()
        if SOON:
            if warp < QUERY.panels:
                known = panel(tile, made, warp, known, of_queries, asked, ctx, head)
        else:
            for i in range(warp, QUERY.panels, WARPS):
                known = panel(tile, made, i, known, of_queries, ahead(i, head, ctx.params), ctx, head)
        block.sync(fenced=True)
        return made, norm.whole(known, scratch)

    @inlined
    def add_up(o, l, unit, col, v, out_tile, params):
        """Add up some columns of O, from `col` on, over all warps, and store them."""
        addends, warp = v.reuse(ADDENDS), warp_index()  # anew: nothing that follows from it is held over the keys
        store(subtile(addends, BAND, warp), o)
        block.sync()
        for slab in range(warp, SLABS, WARPS):
            o = zeros(SLAB)
            for other in range(WARPS):
                o = o + load(subtile(addends, BAND, other, PANEL, slab), SLAB)
            o = product.finish_columns(o, unit)
            result.store(over_sum(o, l), out_tile, int32(col + PANEL * slab), params)

    @inlined
    def clear_nobodys(rows, tokens, head, row, part, warp, group, scale, params):
        """Store 0, and lse -inf, for the tile's rows from `row` on whose tokens lie behind the last sequence."""
        first, last = lie.nobodys(rows, tokens, group, params)
        if first <= last:
            row = int32(max(row, first * group))  # what is ahead of it in the tile is the last sequence's
            out_tile = OutputTile(int32(0), head, part, int32(0), False, row, first, last, group)
            for slab in range(warp, ALL_COLUMNS // PANEL, WARPS):
                result.store(zeros(SLAB), out_tile, int32(PANEL * slab), params)
            if warp == 0:
                result.store_lse(full(O.col_vec, -math.inf), scale, out_tile, params)

    @cuda.jit(launch_bounds=(config.threads, config.resident), fastmath=True)
    def attend(
        gQ: array(5, INPUT), gK: array(4, HELD), gV: array(4, HELD), params: PARAMS, aux: AUX,
        heads: INT, bands: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """Attention of one of `bands` tiles of rows (a row is one of `group` query heads of one of `tokens` tokens) of a key
        head, over one of `splits` parts of the keys. The weight of a score s is exp2(`scale` s). slack: by how much the
        maximum may lag behind the scores."""
        opened = smem.open()
        q, k, v, scratch, pipes = opened[0], opened[1], opened[2], opened[3], opened[4:]
        if PDL and IS_PARTIAL:
            grid.release()  # the blocks of combine.py may begin, and wait
        rest, band = divmod(cuda.blockIdx.x, bands)
        number, head = divmod(rest, heads)  # heads' rows are neighbours in memory: they are read at the same time
        if PDL and not KNOWS:
            grid.wait(int32(number + head + band))
        rows, all_tokens = lie.find(band, tokens, group, params), tokens
        warp, row, tokens, begin = warp_index(), rows.row, rows.tokens, int32(rows.start * group)
        end = int32(tokens * group)
        last_row = int32(min(row + BAND, end) - 1)
        first_token, last_token = int32(row // group), int32(last_row // group)
        work = split.first_work(lie.number(number, splits, rows), splits, sequences, tokens, params)
        while work.tiles_left > 0 and lie.has(rows, group):
            sequence, batch, whole = work.sequence, lie.batch(work.sequence), work.end_tile - work.tile == work.tiles
            of, first_out, last_out = (
                lie.batch(work.part_batch),
                int32(rows.start + first_token),
                int32(rows.start + last_token),
            )
            out_tile = OutputTile(batch, head, work.part, of, whole, int32(begin + row), first_out, last_out, group)
            every = window.key_span(sequence, 0, tokens - 1, tokens, params)
            sees = window.key_span(sequence, first_token, last_token, tokens, params)
            tile = int32(max(work.tile, (sees.first - every.first) // KV))
            first = int32(every.first + KV * tile)
            n = int32(max(0, min(work.end_tile - tile, (sees.end - first + KV - 1) // KV)))
            if PDL and KNOWS:
                grid.wait(int32(first + n))
            asked = ahead(warp_index(), head, params) if SOON else None  # ahead of the keys: behind them it would arrive late
            place = q.look_up(None, group, (0, out_tile.row), begin + end)  # only the rows of one token lie side by side
            here = cache.look_up(k, gK, sequence, first, sees.end, params)
            there = cache.look_up(k, gK, sequence, int32(first + KV), sees.end, params) if FAR else here
            numbers = product.look_up_descales(pipes, cache, sequence, first, sees.end, params)
            q.fill_pages(0, gQ, place, (out_tile.row, batch, head, 0), begin + end, None, cache.vector_bytes)
            for i in range(AHEAD):
                key, later = int32(first + KV * i), int32(first + KV * (i + 1))
                product.fill_k_descales(pipes, i, cache, numbers, sequence, key, head, sees.end, n, params)
                cache.fill(k, i, gK, here, sequence, key, head, sees.end, n, params)
                product.fill_v_descales(pipes, i, cache, numbers, sequence, key, head, sees.end, n, params)
                cache.fill(v, i, gV, here, sequence, key, head, sees.end, n, params)
                here, there = following(there, k, gK, sequence, later, sees.end, params)
                numbers = product.look_up_descales(pipes, cache, sequence, later, sees.end, params)
            of_rows = row_index(O.col_vec) + row
            token = of_rows // group
            ctx = ScoreContext(
                sequence, of_rows - token * group + head * group, token, sees.shift, tokens, sees.end, params, aux, 0
            )
            ctx = ctx._replace(precomputed=variant.precompute(ctx))
            k_unit, v_unit = product.head_descales(sequence, head, params)
            (queries, known), state, o_unit = (
                taken(q, ctx, head, asked, scratch),
                softmax.init(variant.max_floor),
                product.initial_unit(),
            )
            for i in range(n):
                key, later = int32(first + KV * i + KEYS * warp), int32(first + KV * (i + AHEAD))
                keys = k.own(i, NEWER)
                product.fill_k_descales(pipes, i + AHEAD, cache, numbers, sequence, later, head, sees.end, n, params)
                cache.fill(k, i + AHEAD, gK, here, sequence, later, head, sees.end, n, params)
                of_keys = product.k_descales(k_unit, pipes, i, NEWER + GROUPS // 2, S.row_vec)
                s = product.mma_qk(zeros(S), queries, keys, of_keys)
                s = norm.scores(s, keys, KEY, of_keys, known, params)
                values = v.own(i, NEWER)
                product.fill_v_descales(pipes, i + AHEAD, cache, numbers, sequence, later, head, sees.end, n, params)
                cache.fill(v, i + AHEAD, gV, here, sequence, later, head, sees.end, n, params)
                here, there = following(there, k, gK, sequence, int32(later + KV), sees.end, params)
                numbers = product.look_up_descales(pipes, cache, sequence, int32(later + KV), sees.end, params)
                s = window.mask(variant.mask(variant.score(s, ctx, key), ctx, key, -math.inf), ctx, key, sees.end)
                state = state.update_max(s, None, scale, slack)
                of_values = product.v_descales(v_unit, pipes, i, NEWER + GROUPS // 2, S.row_vec)
                o, o_unit = product.rescale_o(state, o_unit, of_values)
                p = state.weights(s, None, scale, DEEP)
                state = state._replace(o=product.mma_pv(o, p, values, o_unit, of_values)).add(p)

            m = block.reduce_max(state.m, scratch)
            if result.is_final(out_tile):
                m = maximum(m, sums.initial_max(ctx, LOWEST_FLOAT))
            weight = exp2((state.m - m) * scale)
            l = block.reduce_sum(finish_sum(state.l) * weight, scratch)
            if result.is_final(out_tile):
                l = sums.finish_row_sum(l, m, scale, ctx)
            o = state.o * product.merge_weight(weight, o_unit)  # the warps have met, so the values are no longer read
            add_up(columns(o, COLUMNS, 0), l, v_unit, 0, v, out_tile, params)
            if PARTS > 1:
                block.sync()
                add_up(columns(o, COLUMNS, 1), l, v_unit, COLUMNS, v, out_tile, params)
            if PARTS > 2:
                block.sync()
                add_up(columns(o, COLUMNS, 2), l, v_unit, 2 * COLUMNS, v, out_tile, params)
            if warp == 0:
                result.store_lse(m + log2(l) / scale, scale, out_tile, params)
            work = split.next_work(work, tokens, params)
            if work.tiles_left > 0:
                block.sync()  # the addends are no longer read; values will come to their place
        if lie.packed:
            clear_nobodys(rows, all_tokens, head, int32(begin + row), work.part, warp, group, scale, params)

    return attend, smem
