"""How kernels access global memory: the RMSNorm of docs/kernel.md with nothing said (`plain`: the warp looks whether 16 bytes
can go at once), with `aligned=True` (`promised`) and `aligned=False` (`elements`), beside the driver's copy of x, in
milliseconds. Where rows are no multiples of 16 bytes nothing can be promised.

See measure.py for the protocol; `pytest bench/test_access.py`, the rest is in --benchmark-json's extra_info (and `-rP`).
"""

import pytest
from numba import cuda

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import tiles  # noqa: E402
from bench.measure import interleaved, medians, report, rotated  # noqa: E402
from ops import load, row_sum, rsqrt, store, zeros  # noqa: E402
from tiles import fp32, rt  # noqa: E402

ROWS = rt(16, 128, fp32)
WAYS = {"plain": None, "promised": True, "elements": False}
EPSILON = 1e-6


def make(aligned):
    """The kernel of docs/kernel.md, all of whose loads and stores say `aligned`."""

    @cuda.jit
    def rms_norm(x, weight, y, epsilon):
        row, width = ROWS.rows * cuda.blockIdx.x, x.shape[1]
        squares = zeros(ROWS.col_vec)
        for col in range(0, width, ROWS.cols):
            t = load(x, ROWS, (row, col), aligned=aligned)
            squares += row_sum(t * t)
        scale = rsqrt(squares / width + epsilon)
        for col in range(0, width, ROWS.cols):
            t = load(x, ROWS, (row, col), aligned=aligned) * scale
            store(y, t * load(weight, ROWS.row_vec, (col,), aligned=aligned), (row, col), aligned=aligned)

    return rms_norm


KERNELS = {way: make(aligned) for way, aligned in WAYS.items()}


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [
        (524288, 128, torch.bfloat16),
        (65536, 1024, torch.bfloat16),
        (16384, 4096, torch.bfloat16),
        (65536, 1024, torch.float32),
        (65536, 1020, torch.bfloat16),
        (524288, 127, torch.bfloat16),
    ],
)
def test_rms_norm(benchmark, rows, width, dtype):
    new = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype)
    sets = rotated(lambda: (new(rows, width), new(width), new(rows, width)), 2 * rows * width * dtype.itemsize)
    x, weight, y = sets[0]
    want = torch.nn.functional.rms_norm(x.float(), (width,), weight.float(), EPSILON)
    providers = {"copy": lambda x, weight, y: y.copy_(x)}
    for way, kernel in KERNELS.items():
        if way == "promised" and width * dtype.itemsize % 16:
            continue

        def call(x, weight, y, kernel=kernel):
            tiles.launch(kernel, -(-rows // ROWS.rows), 32)(x, weight, y, EPSILON)

        y.fill_(float("nan"))
        call(*sets[0])
        torch.testing.assert_close(y.float(), want, rtol=2**-8, atol=2**-9)
        providers[way] = call
    times = interleaved(providers, sets)
    benchmark.group = f"RMSNorm {rows} x {width} {dtype}"
    report(benchmark, times["plain"])
    benchmark.extra_info |= {who: round(ms, 4) for who, ms in medians(times).items()}
    print(benchmark.group, benchmark.extra_info)
