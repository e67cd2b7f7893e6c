"""Query heads that share a key head, in subgroups.

A thread block has a block of keys and goes through all query heads that share its head, so dK and dV are summed in registers.
With few key heads there are then few thread blocks: 32 for two sequences of 2048 keys and one head. So each key head may have
several thread blocks for the same keys, each for a subgroup of its query heads. Each leaves its dK and dV in the inputs' dtype,
and one more kernel adds them up, in float32 and in a fixed order."""

import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, grid, load, store, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt
from tiles.arguments import INT, array
from tiles.arrays import Operand
from tiles.layout import LANES
from tiles.schema import Problem

from ..launches import Before
from .base_config import BackwardConfig

ROWS, COLUMNS = 16, 64  # keys and columns of what a warp adds up at once
WARPS = 4  # of a thread block
NEARLY = 0.95  # of the multiprocessors
WHOLE = 8  # columns: what subgroups leave has a multiple of these, whole pieces of 16 bytes


@dataclass(frozen=True)
class Config:
    """The kernel's configuration. count: subgroups of a key head. head_dim, value_dim: columns of dK and of dV, padded. piece:
    the bytes that addresses and strides are multiples of. early: does the kernel begin while the grid before it ends?"""

    count: int
    head_dim: int
    value_dim: int
    dtype: dtype
    piece: int
    early: bool
    threads = LANES * WARPS

    def __str__(self):
        dims, by = f"D {self.head_dim}/{self.value_dim} {self.dtype}", f", by {self.piece} bytes" * (self.piece != 16)
        return f"{self.count} subgroups, {dims}{by}" + " early" * self.early


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with."""
    for of, count in itertools.product((bf16, fp16) if everything else (bf16,), (2, 8)):
        yield Config(count, 128, 128, of, 16, arch == "sm_90a")


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    COUNT, OUT, PIECE, EARLY, X = config.count, config.dtype, config.piece, config.early, rt(ROWS, COLUMNS, config.dtype)
    K_PANELS, V_PANELS = config.head_dim // COLUMNS, config.value_dim // COLUMNS

    @inlined
    def sum_of(gFound, gOut, batch, row, head, column):
        """The sum over subgroups of a panel."""
        total = zeros(rt(ROWS, COLUMNS, fp32))
        for n in range(COUNT):
            total = total + fp32(load(gFound, X, (batch, row, int32(COUNT * head + n), column), 1, 3, True))
        store(gOut, OUT(total), (batch, row, head, column), 1, 3, PIECE)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def add_up(gFoundK: array(4, OUT), gFoundV: array(4, OUT), gDK: array(4, OUT), gDV: array(4, OUT), bands: INT, heads: INT):
        """dK and dV of ROWS keys, one of the `bands` of a pair of batch and key head, from those of the head's subgroups. The
        first warps begin with dK, the last ones with dV."""
        if EARLY:
            grid.wait()
        pair, band = divmod(cuda.blockIdx.x, bands)
        batch, head = divmod(pair, heads)
        row, warp = int32(ROWS * band), cuda.threadIdx.x // LANES
        for panel in range(warp, K_PANELS, WARPS):
            sum_of(gFoundK, gDK, batch, row, head, int32(COLUMNS * panel))
        for panel in range(WARPS - 1 - warp, V_PANELS, WARPS):
            sum_of(gFoundV, gDV, batch, row, head, int32(COLUMNS * panel))

    return add_up, None


def count(problem: Problem, blocks: int, rising: bool, processors: int) -> int:
    """Into how many subgroups the query heads of a key head go, whose keys are in `blocks` blocks: as few as give nearly every
    multiprocessor a block. rising: do later queries see more keys? Then the first blocks take twice as long as others do on
    average, so there must be two for each multiprocessor."""
    batch, heads, kv_heads = problem("BHG")
    wanted, group = processors * (2 if rising else NEARLY), heads // kv_heads
    fitting = [n for n in range(1, group + 1) if group % n == 0]
    return next((n for n in fitting if n * batch * kv_heads * blocks >= wanted), group)


def results(early: Before, late: Before, config: BackwardConfig, count: int) -> dict[str, Operand | int]:
    """The arguments of the main kernel of this configuration that say how many subgroups there are, and where it leaves dK and
    dV. Those of several subgroups are added up later."""
    problem = early.problem
    dk, dv = problem["dk"], problem["dv"]
    if count == 1:
        return {"gDK": dk, "gDV": dv, "subgroups": count}
    batch, keys, heads, _ = dk.form.shape
    columns = [-(-x.form.shape[3] // WHOLE) * WHOLE for x in (dk, dv)]
    found_k, found_v = [early.memory((batch, keys, count * heads, n), problem.dtype) for n in columns]
    own, bands = Config(count, config.head_dim, config.value_dim, config.dtype, config.piece, config.early), -(-keys // ROWS)
    arrays = {"gFoundK": found_k, "gFoundV": found_v, "gDK": dk, "gDV": dv}
    late.launch(sys.modules[__name__], own, batch * heads * bands, bands=bands, heads=heads, **arrays)
    return {"gDK": found_k, "gDV": found_v, "subgroups": count}
