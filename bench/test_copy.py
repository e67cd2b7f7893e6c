"""Copies through shared memory beside the driver's own device-to-device copy (torch's copy_, cudaMemcpyAsync): GB/s, bytes read
and bytes written both counted.

- `TMA ring`: a producer fills a ring, a consumer's TMA stores empty it; nothing passes through registers.
- `cp.async`: a pipeline filled by all warps, then registers, then 16-byte stores: what a kernel for sm_80 can do.

Both are kernels as an author would write them, and the ceiling for all that fetch their operands so. See measure.py for the
protocol; `pytest bench/test_copy.py`, the ratio is in --benchmark-json's extra_info and in the test's output (`-rP`).
"""

import statistics

import pytest
from numba import cuda
from numpy import int32

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import tiles  # noqa: E402
from bench.measure import interleaved, medians, report, rotated  # noqa: E402
from ops import divmod, persistent_tile, warpgroup  # noqa: E402
from tiles import bf16, pipeline, ring, rt, shared, st  # noqa: E402

ROWS, COLS = 32768, 4096  # 256 MB
ROUNDS = 9
PROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count


# ---- TMA -----------------------------------------------------------------------------------------------------------
TILE, STAGES = st(64, 128, bf16), 4  # 64 KB a multiprocessor: with more in flight reads and writes hinder each other
smem = shared(buffer=ring(TILE, STAGES))


@cuda.jit(launch_bounds=(256, 1))
def by_tma(source, target, across, count):
    """A persistent grid takes the tiles in turn."""
    (buffer,) = smem.open()
    r = int32(0)
    if warpgroup.id() == 0:
        while persistent_tile(r) < count:
            row, col = divmod(persistent_tile(r), across)
            buffer.fill(r, source, (row, col))
            r = int32(r + 1)
    else:
        while persistent_tile(r) < count:
            row, col = divmod(persistent_tile(r), across)
            warpgroup.tma_store(target, (row, col), buffer.wait(r))
            warpgroup.store_wait(1)
            if r > 0:
                buffer.release(r - 1)
            r = int32(r + 1)
        warpgroup.store_wait()


def tma(x, y):
    """y = x"""
    across = COLS // TILE.cols
    count = ROWS // TILE.rows * across
    tiles.launch(by_tma, min(count, PROCESSORS), 256, shared=smem)(tiles.tensor(x, TILE), tiles.tensor(y, TILE), across, count)


# ---- cp.async ------------------------------------------------------------------------------------------------------
WARPS, DEEP = 4, 4
YOUNGER = DEEP - 2  # groups that may be in flight when a tile is read
PART = rt(TILE.rows // WARPS, TILE.cols, bf16)
plan = shared(buffer=pipeline(TILE, DEEP, WARPS))


@cuda.jit(launch_bounds=(32 * WARPS, 1))
def by_cp_async(source, target, across, rounds):
    """A persistent grid takes the tiles in turn; of what lies past the last row nothing is copied."""
    (buffer,) = plan.open()
    for j in range(YOUNGER + 1):
        row, col = divmod(persistent_tile(j), across)
        buffer.fill(j, source, (row * TILE.rows, col * TILE.cols), end=rounds)
    for j in range(int32(rounds)):
        tile = buffer.wait(j, newer=YOUNGER)
        ahead = int32(j + YOUNGER + 1)
        row, col = divmod(persistent_tile(ahead), across)
        buffer.fill(ahead, source, (row * TILE.rows, col * TILE.cols), end=rounds)
        row, col = divmod(persistent_tile(j), across)
        warpgroup.store(target, warpgroup.load(tile, PART), (row * TILE.rows, col * TILE.cols), aligned=True)


def cp_async(x, y):
    """y = x"""
    across = COLS // TILE.cols
    rounds = -(-(ROWS // TILE.rows * across) // PROCESSORS)
    tiles.launch(by_cp_async, PROCESSORS, 32 * WARPS, shared=plan)(x, y, across, rounds)


COPIES = {"TMA ring": tma, "cp.async": cp_async}


@pytest.mark.parametrize("name", COPIES)
def test_copy(benchmark, name):
    """GB/s, and the ratio to the driver's copy, which takes turns with it."""
    call = COPIES[name]
    make = lambda: torch.randn(ROWS, COLS, device="cuda", dtype=torch.bfloat16)
    sets = rotated(lambda: (make(), make()), 4 * ROWS * COLS)
    x, y = sets[0]
    call(x, y)
    assert torch.equal(x, y)
    times = interleaved({name: call, "driver": lambda x, y: y.copy_(x)}, sets, ROUNDS)
    benchmark.group = "copy"
    report(benchmark, times[name])
    speed = {who: round(2 * x.nbytes / ms / 1e6) for who, ms in medians(times).items()}
    ratio = statistics.median(theirs / ours for ours, theirs in zip(times[name], times["driver"]))
    benchmark.extra_info |= {"gb_per_s": speed, "ratio": round(ratio, 3)}
    print(f"{name}: {speed[name]} GB/s, driver {speed['driver']}, ratio {ratio:.3f}")
