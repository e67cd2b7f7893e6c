"""Shares: thread blocks that have the same keys, each for some of the queries.

A thread block has a block of keys and goes through all queries that see it, of all query heads that share its head. So dK and
dV are summed in registers. With few key heads or few keys there are then few thread blocks: 32 for two sequences of 2048 keys
and one head; 16 for two texts of 77 words and 8 heads, however many places of two pictures look at them. So several may have
the same keys: each for a subgroup of the query heads, and for one of several spans of their queries. Each leaves its dK and dV
in the inputs' dtype, and one more kernel adds them up, in float32 and in a fixed order."""

import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba import cuda
from numpy import int32

from ops import divmod, grid, load, store, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt
from tiles.arguments import INT, array
from tiles.layout import LANES
from tiles.schema import Problem

from ..launches import Before
from .base_config import BackwardConfig

ROWS, COLUMNS = 16, 64  # keys and columns of what a warp adds up at once
WARPS = 4  # of a thread block
LEAST = 4  # tiles of a span, of all heads of its subgroup
IN_ORDER = 8  # pairs of share and batch in order, at most, if there are several shares
WHOLE = 8  # columns: what shares leave has a multiple of these, whole pieces of 16 bytes


@dataclass(frozen=True)
class Config:
    """The kernel's configuration. count: shares of a key head. head_dim, value_dim: columns of dK and of dV, padded.
    vector_bytes: the bytes that addresses and strides are multiples of. overlaps_previous: does the kernel begin while the grid
    before it ends (programmatic dependent launch, PDL)?"""

    count: int
    head_dim: int
    value_dim: int
    dtype: dtype
    vector_bytes: int
    overlaps_previous: bool
    threads = LANES * WARPS

    def __str__(self):
        dims = f"D {self.head_dim}/{self.value_dim} {self.dtype}"
        by = f", by {self.vector_bytes} bytes" * (self.vector_bytes != 16)
        return f"{self.count} shares, {dims}{by}" + " PDL" * self.overlaps_previous


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with."""
    for of, count in itertools.product((bf16, fp16) if everything else (bf16,), (2, 8)):
        yield Config(count, 128, 128, of, 16, arch == "sm_90a")


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    COUNT, OUT, VECTOR_BYTES, PDL, X = (
        config.count,
        config.dtype,
        config.vector_bytes,
        config.overlaps_previous,
        rt(ROWS, COLUMNS, config.dtype),
    )
    K_PANELS, V_PANELS = config.head_dim // COLUMNS, config.value_dim // COLUMNS

    @inlined
    def sum_of(gFound, gOut, batch, row, head, column):
        """The sum of a panel over all shares."""
        total = zeros(rt(ROWS, COLUMNS, fp32))
        for n in range(COUNT):
            total = total + fp32(load(gFound, X, (batch, row, int32(COUNT * head + n), column), 1, 3, True))
        store(gOut, OUT(total), (batch, row, head, column), 1, 3, VECTOR_BYTES)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def add_up(gFoundK: array(4, OUT), gFoundV: array(4, OUT), gDK: array(4, OUT), gDV: array(4, OUT), bands: INT, heads: INT):
        """dK and dV of ROWS keys, one of the `bands` of a pair of batch and key head, from those of the head's shares. The
        first warps begin with dK, the last ones with dV."""
        if PDL:
            grid.wait()
        batch_head, band = divmod(cuda.blockIdx.x, bands)
        batch, head = divmod(batch_head, heads)
        row, warp = int32(ROWS * band), cuda.threadIdx.x // LANES
        for panel in range(warp, K_PANELS, WARPS):
            sum_of(gFoundK, gDK, batch, row, head, int32(COLUMNS * panel))
        for panel in range(WARPS - 1 - warp, V_PANELS, WARPS):
            sum_of(gFoundV, gDV, batch, row, head, int32(COLUMNS * panel))

    return add_up, None


class Cut(NamedTuple):
    """Into how many subgroups the query heads of a key head go, and into how many spans their queries."""

    subgroups: int = 1
    spans: int = 1

    @property
    def shares(self) -> int:
        """How many thread blocks have the same keys."""
        return self.subgroups * self.spans


def cut_of(problem: Problem, blocks: int, tiles: int, ordered: bool, longest_first: bool, processors: int) -> Cut:
    """The Cut of a problem with so many blocks of keys and tiles of queries. There should be a thread block for each
    multiprocessor; two where some take up to twice as long as others, and these come first. In order (ordered) no length
    decides, for parts of sequences must give the bits of the whole."""
    batch, heads, kv_heads = problem("BHG")
    group, batch_heads = heads // kv_heads, batch * kv_heads
    if ordered:
        return cut(group, batch_heads, 0, IN_ORDER)
    return cut(group, batch_heads * blocks, tiles, processors * (2 if longest_first else 1))


def cut(group: int, thread_blocks: int, tiles: int, wanted: int) -> Cut:
    """The Cut of a problem of `group` query heads to a key head and `tiles` tiles of queries, which not cut has so many thread
    blocks: as many shares as leave no more than are wanted."""
    of_heads = [n for n in range(2, group + 1) if group % n == 0 and n * thread_blocks <= wanted]
    subgroups, spans = max([1, *of_heads]), 1
    while 2 * spans * subgroups * thread_blocks <= wanted and 2 * spans * max(1, LEAST * subgroups // group) <= tiles:
        spans *= 2
    return Cut(subgroups, spans)


def arguments(early: Before, late: Before, config: BackwardConfig, cut: Cut) -> dict[str, Any]:
    """The arguments of the main kernel of this configuration that say how queries are cut, and where it leaves dK and dV. Those
    of several shares are added up later."""
    problem = early.problem
    (batch, query_heads, heads), dk, dv = problem("BHG"), problem["dk"], problem["dv"]
    every, group = heads * cut.shares, query_heads // (heads * cut.subgroups)
    told = {"heads": every, "batch_heads": batch * every, "group": group, "shares": cut.shares, "spans": cut.spans}
    if cut.shares == 1:
        return {"gDK": dk, "gDV": dv, **told}
    keys, columns = dk.form.shape[1], [-(-x.form.shape[3] // WHOLE) * WHOLE for x in (dk, dv)]
    found_k, found_v = [early.memory((batch, keys, cut.shares * heads, n), problem.dtype) for n in columns]
    own = Config(cut.shares, config.head_dim, config.value_dim, config.dtype, config.vector_bytes, config.overlaps_previous)
    arrays, bands = {"gFoundK": found_k, "gFoundV": found_v, "gDK": dk, "gDV": dv}, -(-keys // ROWS)
    late.launch(sys.modules[__name__], own, batch * heads * bands, bands=bands, heads=heads, **arrays)
    return {"gDK": found_k, "gDV": found_v, **told}
