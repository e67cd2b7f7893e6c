"""The kernel that writes new keys and values into a cache, normalised, rotated and quantised on the way, and rotates queries.

    y1 = x1 cos - x2 sin,    y2 = x2 cos + x1 sin

in fp32: both products and their sum are rounded, and then the result once more, to the dtype of the cache. Which two columns
form a pair follows from strides: the rotated columns of an array are passed once more, as (batch, token, head, 2, pair).

A warp has the heads of a token as the rows of a tile, so the place of the token, and its cos and sin, are the same for all that
it moves. A cache without pages is treated as one with a single, long page for each sequence."""

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba import cuda
from numba.cuda import types
from numpy import int32

from ops import divmod, full, load, store
from tiles import bf16, dtype, fp8e4m3, fp16, inlined
from tiles.arguments import ENDS, INT, array, record
from tiles.arrays import Operand
from tiles.launch import kernel_for
from tiles.layout import LANES
from tiles.program import Step
from tiles.targets import capability, has_fp8

from .row_norms import AS_THEY_ARE, AsTheyAre, Layer, Rms
from .scales import COLUMNS, HEADS, Found, Given, New, Unscaled, X, first_of, pairs_of, second_of

WARPS = 4  # of a thread block; each has a token
TABLE = types.Array(types.int32, 2, "A")  # the type of a page table
DTYPES = {x.np.name: x for x in (bf16, fp16, fp8e4m3)}
NAN = float("nan")


@dataclass(frozen=True)
class Config:
    """A kernel's configuration: the dtypes of new rows and of the cache, the scales by which rows are divided, and the norms
    of keys and of queries before they are rotated."""

    new: dtype
    cache: dtype
    scales: type[Unscaled] = Unscaled
    keys: AsTheyAre = AS_THEY_ARE
    queries: AsTheyAre = AS_THEY_ARE
    threads = LANES * WARPS

    @property
    def params(self):
        """The record of what norms need in the kernel."""
        return record(**self.keys.params | self.queries.params)

    def __str__(self):
        return f"{self.new} to {self.cache}{self.scales(self.cache)}{self.keys}{self.queries}"


def space(arch: str, everything: bool) -> Iterator[Config]:
    """Every kernel; those for fp8 on architectures that have instructions for it."""
    for of in (bf16, fp16) if everything else (bf16,):
        yield Config(of, of)
        if has_fp8(capability(arch)):
            yield from (Config(of, fp8e4m3, scales) for scales in (Given, Found, Unscaled)[: 3 if everything else 2])
        if everything:
            yield from (Config(of, of, Unscaled, norm(False), norm(True)) for norm in (Rms, Layer))


def _moving(scales: Unscaled, norm: AsTheyAre):
    """(copied, rotated): the two ways in which rows go to the target, as functions of (source, (batch, token), target, (page,
    slot), ...). of_rows: what the rows are normalised by."""

    @inlined
    def copied(gX, at, gY, there, head, first, scale, of_rows, params):
        """y = x, in the columns from `first` on."""
        for col in range(first + X.cols * cuda.blockIdx.z, gX.shape[3], X.cols * cuda.gridDim.z):
            x = norm.columns(load(gX, X, (at[0], at[1], head, col)), X, of_rows, head, col, params)
            store(gY, scales.held(x, scale), (there[0], there[1], head, col))

    @inlined
    def rotated(gX, at, gY, there, head, gCos, gSin, position, scale, of_rows, params):
        """Pairs of columns, rotated by the angle of a position."""
        for col in range(X.cols * cuda.blockIdx.z, gX.shape[4], X.cols * cuda.gridDim.z):
            x, y, cos, sin = pairs_of(gX, at, head, col, gCos, gSin, position, norm, of_rows, params)
            store(gY, scales.held(first_of(x, y, cos, sin), scale), (there[0], there[1], head, 0, col), 2, 4)
            store(gY, scales.held(second_of(x, y, cos, sin), scale), (there[0], there[1], head, 1, col), 2, 4)

    return copied, rotated


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, CACHE, scales = config.new, config.cache, config.scales(config.cache)
    SCALE, keys, queries, NORMED, PARAMS = scales.array, config.keys, config.queries, config.keys.changes, config.params
    copied, _ = _moving(scales, AS_THEY_ARE)
    copied_key, rotated = _moving(scales, keys)
    copied_query, rotated_query = _moving(Unscaled(INPUT), queries)

    @inlined
    def sequence_of(gEnds, token):
        """The packed sequence to which a token belongs, found by bisection."""
        low, high = int32(0), int32(gEnds.shape[0] - 1)
        while high - low > 1:
            middle = int32((low + high) // 2)
            if gEnds[middle] <= token:
                low = middle
            else:
                high = middle
        return low

    @inlined
    def page_of(gPages, sequence, n, count):
        """The page that holds the n-th part of a sequence, if there are so many pages; else -1."""
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
        gK: array(4, CACHE), gKPairs: array(5, CACHE), gV: array(4, CACHE), gKScale: SCALE, gVScale: SCALE,
        gQ: array(4, INPUT), gQPairs: array(5, INPUT), gOut: array(4, INPUT), gOutPairs: array(5, INPUT),
        gLengths: ENDS, gPages: TABLE, gEnds: ENDS, gCos: array(2), gSin: array(2), gPositions: ENDS,
        rows: INT, tokens: INT, page_size: INT, key_parts: INT, fixed: INT, params: PARAMS,
    ):  # fmt: skip
        """Each warp has a token; a batch has `tokens`. Blocks along y: `key_parts` groups of 16 heads of K, as many of V, then
        those of Q. Blocks along z: columns. fixed: all queries of a sequence have the position of its first."""
        row, part = int32(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES), int32(cuda.blockIdx.y)
        if row < rows:
            batch, token = divmod(row, tokens)
            sequence, n = batch, token
            if gEnds.shape[0] > 0:
                sequence = sequence_of(gEnds, token)
                n = int32(token - gEnds[sequence])
            length = int32(gLengths[sequence])
            start = length if gPositions.shape[0] == 0 else int32(gPositions[sequence])
            of_query = part >= 2 * key_parts
            position = start + n * (1 - fixed * of_query)
            known = gCos.shape[0] == 0 or (position >= 0 and position < gCos.shape[0])
            columns = 2 * gCos.shape[1]
            if of_query:
                head, at = int32(HEADS * (part - 2 * key_parts)), (batch, token)
                if token < gQ.shape[1]:
                    if known:
                        of_rows = queries.of_rows(gQ, X, (batch, token, head), params)
                        rotated_query(gQPairs, at, gOutPairs, at, head, gCos, gSin, position, 1.0, of_rows, params)
                        copied_query(gQ, at, gOut, at, head, columns, 1.0, of_rows, params)
                    else:
                        for col in range(X.cols * cuda.blockIdx.z, gQ.shape[3], X.cols * cuda.gridDim.z):
                            store(gOut, full(X, NAN), (batch, token, head, col))
            elif token < gKNew.shape[1] and length >= 0 and known:
                which, slot = divmod(length + n, page_size)
                page = page_of(gPages, sequence, which, gK.shape[0])
                if page >= 0:
                    at, there, of_key = (batch, token), (page, slot), part < key_parts
                    head = int32(HEADS * (part if of_key else part - key_parts))
                    new = New(gKNew, gKNewPairs, gVNew, at, gCos, gSin, position, params)
                    scale = scales.of(gKScale if of_key else gVScale, sequence, there, head, of_key, new, keys)
                    if of_key:
                        of_rows = keys.of_rows(gKNew, X, (batch, token, head), params)
                        rotated(gKNewPairs, at, gKPairs, there, head, gCos, gSin, position, scale, of_rows, params)
                        if NORMED:
                            copied_key(gKNew, at, gK, there, head, columns, scale, of_rows, params)
                    if not (NORMED and of_key):
                        gX, gY = (gKNew, gK) if of_key else (gVNew, gV)
                        copied(gX, at, gY, there, head, columns if of_key else 0, scale, None, params)

    return append, None


class Norm(NamedTuple):
    """Weights of a norm (head, column), and a bias of a layer norm."""

    weights: Operand
    bias: Operand | None


def launch(
    device: int | None,
    new: tuple[Operand, Operand],
    cache: tuple[Operand, Operand],
    lengths: Operand,
    *,
    pages: Operand | None = None,
    batch_index: Operand | None = None,
    ends: Operand | None = None,
    rotary: tuple[Operand, Operand] | None = None,
    interleaved: bool = False,
    positions: Operand | None = None,
    scales: tuple[Operand | None, Operand | None] = (None, None),
    queries: tuple[Operand, Operand] | None = None,
    causal: bool = True,
    norms: tuple[Norm | None, Norm | None] = (None, None),
    norm_eps: float = 0.0,
    in_place: bool = False,
) -> Step:
    """The launch that writes `new` K and V, (B, S, Hk, D), into a cache (pages, page size, Hk, D), behind `lengths`. If
    `queries` is a pair (q, out), it also rotates q (B, Sq, H, D) to out. norms: of keys and of queries. in_place: out may be q.
    All other arguments are those of attention.append; there is at most one of a page table and batch_index."""
    (k_new, v_new), (k, v), (cos, sin) = new, cache, rotary or (None, None)
    batch, tokens, heads, _ = k_new.shape
    if batch_index is not None:  # as a page table with one page for each sequence
        pages = batch_index.spread(1, 1)
    pairs = cos.shape[1] if cos else 0
    arrays = {"gKNew": k_new, "gVNew": v_new, "gK": k, "gV": v, "gLengths": lengths, "gPages": pages, "gEnds": ends}
    arrays |= {"gCos": cos, "gSin": sin, "gPositions": positions}
    arrays |= {"gKNewPairs": _pairs(k_new, pairs, interleaved), "gKPairs": _pairs(k, pairs, interleaved)}
    parts = key_parts = -(-heads // HEADS)
    parts += key_parts
    if queries:
        q, out = queries
        arrays |= {"gQ": q, "gOut": out}
        arrays |= {"gQPairs": _pairs(q, pairs, interleaved), "gOutPairs": _pairs(out, pairs, interleaved)}
        tokens, parts = max(tokens, q.shape[1]), parts + -(-q.shape[2] // HEADS)
    kind = Unscaled
    if scales != (None, None):
        arrays |= {"gKScale": _of_heads(scales[0], lengths), "gVScale": _of_heads(scales[1], lengths)}
        kind = Found if scales[0] and len(scales[0].shape) == 3 else Given
    of_norms, normed = _normed((norms[0], norms[1] if queries else None), pairs, interleaved, norm_eps)
    config = Config(DTYPES[k_new.form.dtype], DTYPES[k.form.dtype], kind, *of_norms)
    rows, columns = batch * tokens, max(k.shape[3], v.shape[3])
    # a norm reads columns that other warps might have overwritten
    whole = kind(config.cache).whole or (in_place and norms[1] is not None)
    across = 1 if whole else -(-columns // COLUMNS)
    return kernel_for(sys.modules[__name__], config, device).bind(
        (-(-rows // WARPS), parts, across),
        rows=rows,
        tokens=tokens,
        page_size=k.shape[1],
        key_parts=key_parts,
        fixed=int(not causal),
        **arrays,
        **normed,
    )


def turned(
    device: int | None,
    queries: tuple[Operand, Operand],
    lengths: Operand,
    rotary: tuple[Operand, Operand],
    *,
    ends: Operand | None,
    interleaved: bool,
    positions: Operand | None,
    causal: bool,
    norm: Norm | None = None,
    norm_eps: float = 0.0,
) -> Step:
    """The launch of the same kernel that only rotates queries."""
    (q, out), (cos, sin) = queries, rotary
    pairs, (batch, tokens, heads, columns) = cos.shape[1], q.shape
    arrays = {"gQ": q, "gOut": out, "gLengths": lengths, "gEnds": ends, "gCos": cos, "gSin": sin, "gPositions": positions}
    arrays |= {"gQPairs": _pairs(q, pairs, interleaved), "gOutPairs": _pairs(out, pairs, interleaved)}
    of_norms, normed = _normed((None, norm), pairs, interleaved, norm_eps)
    config, rows = Config(DTYPES[q.form.dtype], DTYPES[q.form.dtype], Unscaled, *of_norms), batch * tokens
    numbers = {"rows": rows, "tokens": tokens, "page_size": 1, "key_parts": 0, "fixed": int(not causal)}
    grid = -(-rows // WARPS), -(-heads // HEADS), -(-columns // COLUMNS)
    return kernel_for(sys.modules[__name__], config, device).bind(grid, **numbers, **arrays, **normed)


def _normed(
    norms: tuple[Norm | None, Norm | None], pairs: int, interleaved: bool, eps: float
) -> tuple[list[AsTheyAre], dict[str, Any]]:
    """(the norms of keys and of queries, the kernel's arguments for them)"""
    found: list[AsTheyAre] = []
    told: dict[str, Any] = {}
    for norm, name in zip(norms, ("k_norm", "q_norm")):
        if norm is None:
            found.append(AS_THEY_ARE)
            continue
        found.append((Layer if norm.bias else Rms)(name == "q_norm"))
        told["norm_eps"] = eps
        for said, x in ((name, norm.weights), (f"{name}_bias", norm.bias)):
            if x is not None:
                told |= {said: x, f"{said}_pairs": _pairs(x, pairs, interleaved)}
    return found, told


def _pairs(x: Operand, pairs: int, interleaved: bool) -> Operand | None:
    """The rotated columns as (.., 2, pairs): a pair is two neighbours, or one column of each half."""
    if not pairs:
        return None
    form = x.form
    *strides, step = form.strides
    steps = (step, 2 * step) if interleaved else (pairs * step, step)
    return x._replace(form=form._replace(shape=(*form.shape[:-1], 2, pairs), strides=(*strides, *steps)))


def _of_heads(scale: Operand | None, lengths: Operand) -> Operand | None:
    """Scales with an axis for sequences and one for heads. Scales for each token are returned as they are."""
    return scale.spread(0, lengths.shape[0]) if scale and len(scale.shape) == 1 else scale
