"""The kernel that writes new keys and values into a cache, normalised, rotated and quantised on the way, and rotates queries.

    y1 = x1 cos - x2 sin,    y2 = x2 cos + x1 sin

in fp32: both products and their sum are rounded, and then the result once more, to the dtype of the cache. Which two columns
form a pair follows from strides: the rotated columns of an array are passed once more, as (batch, token, head, 2, pair).

A warp's tile has heads of one token as its rows: the token's page and slot, and its cos and sin, are the same for the whole
tile. A cache without pages is treated as one with a single, long page for each sequence."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, full, load, store
from tiles import bf16, dtype, fp8e4m3, fp16, inlined, int8
from tiles.launching.arguments import ENDS, INT, array, record
from tiles.layout import LANES
from tiles.numba_names import types
from tiles.targets import Target

from ...parts.cache_scales import (
    HEADS,
    ComputedDescales,
    GivenDescales,
    NewToken,
    NoDescales,
    X,
    load_pairs,
    rotate_first,
    rotate_second,
)
from ...parts.row_norms import NO_ROW_NORM, NoRowNorm, RowLayerNorm, RowRmsNorm

WARPS = 4  # of a thread block; each writes one token
PAGE_TABLE = types.Array(types.int32, 2, "A")
NAN = float("nan")


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. new, cache: the dtypes of new rows and of the cache. descales: what rows are divided by.
    k_norm, q_norm: the norms of keys and of queries, applied before they are rotated."""

    new: dtype
    cache: dtype
    descales: type[NoDescales] = NoDescales
    k_norm: NoRowNorm = NO_ROW_NORM
    q_norm: NoRowNorm = NO_ROW_NORM
    threads = LANES * WARPS

    @property
    def params(self):
        """The record of parameters that the norms read."""
        return record(**self.k_norm.params | self.q_norm.params)

    def __str__(self):
        return f"{self.new} to {self.cache}{self.descales(self.cache)}{self.k_norm}{self.q_norm}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The kernels; those for fp8 on architectures that have instructions for it."""
    for input_dtype in (bf16, fp16) if everything else (bf16,):
        yield Config(input_dtype, input_dtype)
        kinds = (GivenDescales, ComputedDescales, NoDescales)[: 3 if everything else 2]
        for cache in [fp8e4m3, int8] if target.has_fp8 else [int8]:
            yield from (Config(input_dtype, cache, descales) for descales in kinds)
        if everything:
            yield from (
                Config(input_dtype, input_dtype, NoDescales, norm(False), norm(True)) for norm in (RowRmsNorm, RowLayerNorm)
            )


def _define_copies(descales: NoDescales, norm: NoRowNorm):
    """(copy_columns, rotate_columns): functions of a kernel that write a tile of heads of gX at src, (batch, token), to gY at
    dst, (page, slot), normalised with `stats` (row_norms.py) and divided by `descale`. Blocks along z share out the columns."""

    @inlined
    def copy_columns(gX, src, gY, dst, head, first, descale, stats, params):
        """y = x, in the columns from `first` on."""
        for col in range(first + X.cols * cuda.blockIdx.z, gX.shape[3], X.cols * cuda.gridDim.z):
            x = norm.apply(load(gX, X, (src[0], src[1], head, col)), X, stats, head, col, params)
            store(gY, descales.quantize(x, descale), (dst[0], dst[1], head, col))

    @inlined
    def rotate_columns(gX, src, gY, dst, head, gCos, gSin, position, descale, stats, params):
        """The module's equation for the pairs of gX and gY, (batch, token, head, 2, pair), at a token's position."""
        for col in range(X.cols * cuda.blockIdx.z, gX.shape[4], X.cols * cuda.gridDim.z):
            x, y, cos, sin = load_pairs(gX, src, head, col, gCos, gSin, position, norm, stats, params)
            store(gY, descales.quantize(rotate_first(x, y, cos, sin), descale), (dst[0], dst[1], head, 0, col), 2, 4)
            store(gY, descales.quantize(rotate_second(x, y, cos, sin), descale), (dst[0], dst[1], head, 1, col), 2, 4)

    return copy_columns, rotate_columns


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, CACHE, PARAMS = config.new, config.cache, config.params
    descales, k_norm, q_norm = config.descales(config.cache), config.k_norm, config.q_norm
    DESCALE, NORMS_KEYS = descales.array, k_norm.is_norm
    copy_columns, _ = _define_copies(descales, NO_ROW_NORM)
    copy_key, rotate_key = _define_copies(descales, k_norm)
    copy_query, rotate_query = _define_copies(NoDescales(INPUT), q_norm)

    @inlined
    def find_sequence(gEnds, token):
        """The packed sequence that a token belongs to, by bisection of cu_seqlens."""
        low, high = int32(0), int32(gEnds.shape[0] - 1)
        while high - low > 1:
            middle = int32((low + high) // 2)
            if gEnds[middle] <= token:
                low = middle
            else:
                high = middle
        return low

    @inlined
    def find_page(gPages, sequence, n, count):
        """The n-th page of a sequence, -1 if the table has no valid page there. Without a page table a sequence is one page."""
        if n < gPages.shape[1]:
            page = gPages[sequence, n]
            return int32(page) if page >= 0 and page < count else int32(-1)
        elif gPages.shape[1] == 0 and n == 0:
            return int32(sequence)
        else:
            return int32(-1)

    @cuda.jit(launch_bounds=(config.threads, 1))
    def append(
        gKNew: array(4, INPUT), gKNewPairs: array(5, INPUT), gVNew: array(4, INPUT),
        gK: array(4, CACHE), gKPairs: array(5, CACHE), gV: array(4, CACHE), gKDescale: DESCALE, gVDescale: DESCALE,
        gQ: array(4, INPUT), gQPairs: array(5, INPUT), gOut: array(4, INPUT), gOutPairs: array(5, INPUT),
        gLengths: ENDS, gPages: PAGE_TABLE, gEnds: ENDS, gCos: array(2), gSin: array(2), gPositions: ENDS,
        rows: INT, tokens: INT, page_size: INT, kv_head_tiles: INT, one_position: INT, params: PARAMS,
    ):  # fmt: skip
        """Write one of `rows` tokens, `tokens` of each batch, by one warp, for the heads of one tile. Blocks along y:
        `kv_head_tiles` tiles of 16 heads of K, as many of V, then those of Q. Blocks along z: columns. one_position: do all
        queries of a sequence have the position of its first?"""
        row, head_tile = int32(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES), int32(cuda.blockIdx.y)
        if row < rows:
            batch, token = divmod(row, tokens)
            sequence, n = batch, token
            if gEnds.shape[0] > 0:
                sequence = find_sequence(gEnds, token)
                n = int32(token - gEnds[sequence])
            length = int32(gLengths[sequence])
            start = length if gPositions.shape[0] == 0 else int32(gPositions[sequence])
            is_query = head_tile >= 2 * kv_head_tiles
            position = start + n * (1 - one_position * is_query)
            in_tables = gCos.shape[0] == 0 or (position >= 0 and position < gCos.shape[0])
            rotated = 2 * gCos.shape[1]
            if is_query:
                head, src = int32(HEADS * (head_tile - 2 * kv_head_tiles)), (batch, token)
                if token < gQ.shape[1]:
                    if in_tables:
                        stats = q_norm.row_stats(gQ, X, (batch, token, head), params)
                        rotate_query(gQPairs, src, gOutPairs, src, head, gCos, gSin, position, 1.0, stats, params)
                        copy_query(gQ, src, gOut, src, head, rotated, 1.0, stats, params)
                    else:
                        for col in range(X.cols * cuda.blockIdx.z, gQ.shape[3], X.cols * cuda.gridDim.z):
                            store(gOut, full(X, NAN), (batch, token, head, col))
            elif token < gKNew.shape[1] and length >= 0 and in_tables:
                page_number, slot = divmod(length + n, page_size)
                page = find_page(gPages, sequence, page_number, gK.shape[0])
                if page >= 0:
                    src, dst, is_key = (batch, token), (page, slot), head_tile < kv_head_tiles
                    head = int32(HEADS * (head_tile if is_key else head_tile - kv_head_tiles))
                    new = NewToken(gKNew, gKNewPairs, gVNew, src, gCos, gSin, position, params)
                    descale = descales.find(gKDescale if is_key else gVDescale, sequence, dst, head, is_key, new, k_norm)
                    if is_key:
                        stats = k_norm.row_stats(gKNew, X, (batch, token, head), params)
                        rotate_key(gKNewPairs, src, gKPairs, dst, head, gCos, gSin, position, descale, stats, params)
                        if NORMS_KEYS:
                            copy_key(gKNew, src, gK, dst, head, rotated, descale, stats, params)
                    if not (NORMS_KEYS and is_key):
                        gX, gY = (gKNew, gK) if is_key else (gVNew, gV)
                        copy_columns(gX, src, gY, dst, head, rotated if is_key else 0, descale, None, params)

    return append, None
