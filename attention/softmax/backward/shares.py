"""Partial dK and dV: the work on one block of keys, split over several thread blocks, and the kernel that combines the results.

A thread block has a block of keys and goes through all queries that see it, of all query heads that share its key head. So dK
and dV are summed in registers. With few key heads or few keys there are then few thread blocks: 32 for two sequences of 2048
keys and one head; 16 for cross-attention from two images of any size to two texts of 77 tokens, with 8 heads. So several thread
blocks may have the same keys: each takes one group of the query heads, and one part of their query tiles. Each stores a partial
dK and dV in the inputs' dtype, and one more kernel sums these, in float32 and in a fixed order."""

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

ROWS, COLUMNS = 16, 64  # keys and columns that a warp sums at once
WARPS = 4  # warps of a thread block
MIN_TILES = 4  # query tiles that a thread block goes through at least, counted over the heads of its group
MAX_DETERMINISTIC = 8  # with deterministic sums, keys are split only as far as there are no more pairs of batch and partial
COLUMN_MULTIPLE = 8  # partial dK and dV have a multiple of these columns, so that rows are multiples of 16 bytes


@dataclass(frozen=True)
class Config:
    """The configuration of the kernel that combines. partials: of each key head. head_dim, value_dim: columns of dK and of dV,
    padded. vector_bytes: the bytes that addresses and strides are multiples of. overlaps_previous: does the kernel begin while
    the grid before it ends (programmatic dependent launch, PDL)?"""

    partials: int
    head_dim: int
    value_dim: int
    dtype: dtype
    vector_bytes: int
    overlaps_previous: bool
    threads = LANES * WARPS

    def __str__(self):
        dims, by = (
            f"D {self.head_dim}/{self.value_dim} {self.dtype}",
            f", by {self.vector_bytes} bytes" * (self.vector_bytes != 16),
        )
        return f"{self.partials} partials, {dims}{by}" + " PDL" * self.overlaps_previous


def space(arch: str, everything: bool) -> Iterator[Config]:
    """Configurations to compile and inspect for an architecture."""
    for of, partials in itertools.product((bf16, fp16) if everything else (bf16,), (2, 8)):
        yield Config(partials, 128, 128, of, 16, arch == "sm_90a")


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    PARTIALS, OUT, VECTOR_BYTES, PDL = config.partials, config.dtype, config.vector_bytes, config.overlaps_previous
    X = rt(ROWS, COLUMNS, config.dtype)
    K_PANELS, V_PANELS = config.head_dim // COLUMNS, config.value_dim // COLUMNS

    @inlined
    def combine_panel(gPartial, gOut, batch, row, head, column):
        """gOut = the sum of gPartial over the partials of a key head, for ROWS keys and COLUMNS columns."""
        total = zeros(rt(ROWS, COLUMNS, fp32))
        for n in range(PARTIALS):
            total = total + fp32(load(gPartial, X, (batch, row, int32(PARTIALS * head + n), column), 1, 3, True))
        store(gOut, OUT(total), (batch, row, head, column), 1, 3, VECTOR_BYTES)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def combine(
        gPartialDK: array(4, OUT), gPartialDV: array(4, OUT), gDK: array(4, OUT), gDV: array(4, OUT), tiles: INT, heads: INT,
    ):  # fmt: skip
        """dK and dV of ROWS keys, one of the `tiles` of a batch's key head, from those of the head's partials. The first warps
        begin with dK, the last ones with dV."""
        if PDL:
            grid.wait()
        batch_head, tile = divmod(cuda.blockIdx.x, tiles)
        batch, head = divmod(batch_head, heads)
        row, warp = int32(ROWS * tile), cuda.threadIdx.x // LANES
        for panel in range(warp, K_PANELS, WARPS):
            combine_panel(gPartialDK, gDK, batch, row, head, int32(COLUMNS * panel))
        for panel in range(WARPS - 1 - warp, V_PANELS, WARPS):
            combine_panel(gPartialDV, gDV, batch, row, head, int32(COLUMNS * panel))

    return combine, None


class QuerySplit(NamedTuple):
    """How the queries that see a block of keys are divided among thread blocks: into how many groups the query heads that share
    a key head, and into how many splits the query tiles of each group."""

    head_groups: int = 1
    splits: int = 1

    @property
    def partials(self) -> int:
        """The number of thread blocks that have the same keys."""
        return self.head_groups * self.splits


def choose_split(
    problem: Problem, blocks: int, tiles: int, deterministic: bool, longest_first: bool, processors: int
) -> QuerySplit:
    """The QuerySplit of a problem with so many key blocks and query tiles. There should be a thread block for each
    multiprocessor; two where some take up to twice as long as others, and the longest begin first. With deterministic sums no
    length decides, because parts of sequences must have the bits of the whole."""
    batch, heads, kv_heads = problem("BHG")
    group, batch_heads = heads // kv_heads, batch * kv_heads
    if deterministic:
        return split_queries(group, batch_heads, 0, MAX_DETERMINISTIC)
    return split_queries(group, batch_heads * blocks, tiles, processors * (2 if longest_first else 1))


def split_queries(group: int, thread_blocks: int, tiles: int, wanted: int) -> QuerySplit:
    """The QuerySplit of a problem with `group` query heads to a key head and `tiles` query tiles, which has so many thread
    blocks unsplit: as many partials as give at most `wanted` thread blocks."""
    of_heads = [n for n in range(2, group + 1) if group % n == 0 and n * thread_blocks <= wanted]
    head_groups, splits = max([1, *of_heads]), 1
    while 2 * splits * head_groups * thread_blocks <= wanted and 2 * splits * max(1, MIN_TILES * head_groups // group) <= tiles:
        splits *= 2
    return QuerySplit(head_groups, splits)


def partial_arguments(early: Before, late: Before, config: BackwardConfig, split: QuerySplit) -> dict[str, Any]:
    """The main kernel's arguments that say how its queries are split, and where it stores dK and dV. If there are several
    partials, memory for them is reserved in `early`, and the launch that combines them is put in `late`."""
    problem = early.problem
    (batch, query_heads, heads), dk, dv = problem("BHG"), problem["dk"], problem["dv"]
    partial_heads, group = heads * split.partials, query_heads // (heads * split.head_groups)
    extents = {"heads": partial_heads, "batch_heads": batch * partial_heads, "group": group}
    args = extents | {"partials": split.partials, "splits": split.splits}
    if split.partials == 1:
        return {"gDK": dk, "gDV": dv, **args}
    keys, columns = dk.form.shape[1], [-(-x.form.shape[3] // COLUMN_MULTIPLE) * COLUMN_MULTIPLE for x in (dk, dv)]
    partial_dk, partial_dv = [early.memory((batch, keys, partial_heads, n), problem.dtype) for n in columns]
    combine = Config(
        split.partials, config.head_dim, config.value_dim, config.dtype, config.vector_bytes, config.overlaps_previous
    )
    arrays, tiles = {"gPartialDK": partial_dk, "gPartialDV": partial_dv, "gDK": dk, "gDV": dv}, -(-keys // ROWS)
    late.launch(sys.modules[__name__], combine, batch * heads * tiles, tiles=tiles, heads=heads, **arrays)
    return {"gDK": partial_dk, "gDV": partial_dv, **args}
