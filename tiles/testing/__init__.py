"""Tests of your own kernels and ops: one body, run three ways, against a reference in float64.

    pytest_plugins = ["tiles.testing.plugin"]                   # in the conftest.py beside pyproject.toml or atop the tests

    @pytest.mark.parametrize(("dtype", "cols"), pairs([bf16, fp32], [64, 61, 1]))
    def test_exp2(run, sample, dtype, cols):
        @cuda.jit
        def body(x, y):                                         # the device body: registers from global memory and back
            store(y, exp2(load(x, rt(16, 64, dtype), (0, 0))), (0, 0))

        x, y = sample((16, cols), dtype), blank((16, cols))
        run(body, x, y)
        close(y, np.exp2(wide(x)), ulp=2)

The plugin has two fixtures. `run` runs a kernel, or a function that launches kernels, in three ways: `meaning`
(the interpreter, which is also a race detector), `ptx` (compiled for sm_90a and executed on the CPU) and `gpu`
(marked `gpu`, and skipped by name where there is no GPU). Choose others by indirect parameters,
`@pytest.mark.parametrize("run", ["meaning", "sm_80"], indirect=True)`. `sample(shape, dtype)` returns normally distributed
numbers, fresh in each run, from a seed that a failure prints and TILES_SEED repeats.

Outputs start as NaN (`blank`; `guarded` inside canaries), which never passes unless the reference is NaN. Results that are
exact up to rounding are judged in units in the last place, by `close`; sums of many terms by the error rule, `assert_close`.
`broken` shows that a test would notice a fault. Only the plugin needs pytest. examples/template is a project with tests like
these.
"""

from .backends import gpu, meaning, ptx
from .compare import EPS, assert_close, close, tolerance, wide
from .mutation import broken
from .samples import blank, guarded, pairs

__all__ = [
    "EPS", "assert_close", "blank", "broken", "close", "gpu", "guarded", "meaning", "pairs", "ptx", "tolerance", "wide",
]  # fmt: skip
