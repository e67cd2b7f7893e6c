"""Lists of the key blocks that a query tile reads under a mask function, which two kernels evaluate for every query and key.

`ClassifyBlocks`, with a warp for each key block, writes a class: 0 (skipped) if no query of the tile sees a key of the block, 2
(full) if all queries see all keys, else 1 (partial); and how many keys at the block's beginning and end no query of the tile
sees. `BuildKeyLists` turns a tile's classes into its list, a row of integers: the number of blocks; how many of them need the
mask; how many keys at the beginning of the last of these, and at the end of the first block, no query of the tile sees
(tiling.KeyBlocks); the numbers of the partial blocks, and from the end of the row backwards the numbers of the full ones, both
from the last block on. For a tile that sees nothing it lists the block after the last key."""

import functools
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import col_index, divmod, finish_sum, lane_sum, ones, row_index, tile_max, tile_sum, where, zeros
from tiles import fp32, rt
from tiles.launching.arguments import INT, Record, record
from tiles.layout import LANES

from ...parts.tiling import AT_END, AT_START, CLASSES, COUNTS, LIST_HEADER, LISTS, MAX_COUNT, Tiling
from ...parts.variant import ScoreContext, Variant, arrays_of

WARPS, ROWS = 4, 16  # warps of a CTA, each with a key block; query tiles have a multiple of so many rows
AT_ONCE = 2 * ROWS  # rows for which a mask is evaluated at once, where that divides a tile, so that reads by key are shared


@dataclass(frozen=True)
class ClassifyBlocks:
    """The kernel that classifies key blocks for query tiles: skipped, partial or full. rows, kv: queries of a tile, keys of a
    block. axes: how many axes each array of aux has."""

    variant: Variant
    rows: int
    kv: int
    axes: tuple[int, ...] = ()
    threads = LANES * WARPS

    @property
    def params(self) -> Record:
        """The record of the variant's arguments, and of the results by batch, head, tile and block: the classes, and the counts
        of unseen keys."""
        return record(classes=CLASSES, unseen=CLASSES, **self.variant.params)

    @property
    def aux(self) -> Record:
        """The record of the arrays of aux."""
        return arrays_of(self.axes)

    @staticmethod
    @functools.cache
    def make(config: "ClassifyBlocks"):
        """(kernel, shared memory) of a configuration."""
        TILE, KV, EACH = config.rows, config.kv, ROWS if config.rows % AT_ONCE else AT_ONCE
        S = rt(EACH, KV, fp32)
        PARAMS, AUX, variant = config.params, config.aux, config.variant
        tiling = Tiling(TILE, KV, variant)

        @cuda.jit
        def classify(params: PARAMS, aux: AUX, q_len: INT, kv_len: INT, blocks: INT, heads: INT, groups: INT):
            """Classify WARPS key blocks for one of the `blocks` query tiles of a head. `groups` CTAs together classify all."""
            rest, group = divmod(cuda.blockIdx.x, groups)
            batch_head, tile = divmod(rest, blocks)
            batch, head = divmod(batch_head, heads)
            ctx = ScoreContext(batch, head, TILE * tile, kv_len - q_len, q_len, kv_len, params, aux, 0)
            kv_blocks = tiling.key_blocks(TILE * tile, ctx)
            block = WARPS * group + cuda.threadIdx.x // 32
            if block < kv_blocks.n:
                lane_counts, key = lane_sum(zeros(S)), int32((kv_blocks.first + block) * KV)
                for first_row in range(0, TILE, EACH):
                    lane_counts = lane_counts + lane_sum(
                        variant.mask(ones(S), ctx._replace(row=int32(TILE * tile + first_row)), key, 0.0)
                    )
                count, place = tile_sum(finish_sum(lane_counts)), kv_blocks.first + block
                all_of_it = count == TILE * KV and key + KV <= kv_len
                kind = 0 if count == 0.0 else 2 if all_of_it else 1
                first = last = float32(KV if kind == 2 else 0)  # KV - the first key that is seen; the last one + 1
                if kind == 1:  # evaluate the mask again: few blocks are partial
                    j = col_index(S.row_vec)
                    for first_row in range(0, TILE, EACH):
                        row = int32(TILE * tile + first_row)
                        s = variant.mask(ones(S), ctx._replace(row=row), key, 0.0)
                        s = where((row_index(S.col_vec) < q_len - row) & (j < kv_len - key), s, 0.0)  # rows and keys that exist
                        first, last = max(first, tile_max(s * (KV - j))), max(last, tile_max(s * (j + 1.0)))
                    kind = 1 if first > 0.0 else 0
                ctx.params.classes[batch, head, tile, place] = kind
                ctx.params.unseen[batch, head, tile, COUNTS * place + AT_START] = min(MAX_COUNT, KV - int32(first))
                ctx.params.unseen[batch, head, tile, COUNTS * place + AT_END] = min(MAX_COUNT, KV - int32(last))

        return classify, None


@dataclass(frozen=True)
class BuildKeyLists:
    """The kernel that turns classes of key blocks into lists."""

    variant: Variant
    rows: int
    kv: int
    threads = LANES

    @property
    def params(self) -> Record:
        """The record of the variant's arguments, the results of ClassifyBlocks, and the lists."""
        return record(classes=CLASSES, unseen=CLASSES, lists=LISTS, **self.variant.params)

    @staticmethod
    @functools.cache
    def make(config: "BuildKeyLists"):
        """(kernel, shared memory) of a configuration."""
        TILE, KV, PARAMS, tiling = config.rows, config.kv, config.params, Tiling(config.rows, config.kv, config.variant)

        @cuda.jit
        def build(params: PARAMS, q_len: INT, kv_len: INT, blocks: INT, heads: INT):
            """Write the list of one of the `blocks` query tiles of a head."""
            batch_head, tile = divmod(cuda.blockIdx.x, blocks)
            batch, head = divmod(batch_head, heads)
            ctx = ScoreContext(batch, head, TILE * tile, kv_len - q_len, q_len, kv_len, params, 0, 0)
            kv_blocks = tiling.key_blocks(TILE * tile, ctx)
            partial, full, unseen_at_start, unseen_at_end = int32(0), int32(0), int32(0), int32(0)
            for i in range(kv_blocks.n):
                number = int32(kv_blocks.first + kv_blocks.n - 1 - i)
                kind = ctx.params.classes[batch, head, tile, number]
                if kind == 1:
                    unseen_at_start = int32(ctx.params.unseen[batch, head, tile, COUNTS * number + AT_START])
                    unseen_at_end = (
                        int32(ctx.params.unseen[batch, head, tile, COUNTS * number + AT_END]) if partial == 0 else unseen_at_end
                    )
                if kind > 0:
                    place = LIST_HEADER + partial if kind == 1 else ctx.params.lists.shape[3] - 1 - full
                    ctx.params.lists[batch, head, tile, place] = number
                partial, full = int32(partial + (kind == 1)), int32(full + (kind == 2))
            if partial + full == 0:
                ctx.params.lists[batch, head, tile, LIST_HEADER] = (kv_len + KV - 1) // KV
                partial = int32(1)
            ctx.params.lists[batch, head, tile, 0] = partial + full
            ctx.params.lists[batch, head, tile, 1] = partial
            ctx.params.lists[batch, head, tile, 2] = unseen_at_start
            ctx.params.lists[batch, head, tile, 3] = unseen_at_end

        return build, None
