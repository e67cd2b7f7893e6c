"""What the tests of broken kernels share: `case` registers one, `check` runs it and demands the right complaint."""

import inspect
import re

import numpy as np
import pytest
from numba import cuda

from ops import warpgroup, zeros
from tiles import Hazard, barrier, bf16, fp32, inlined, ring, rt, shared, st, tensor
from tiles.interpreter import interpret

SEEDS = range(10)
S, G = st(16, 64, bf16), st(64, 64, bf16)  # the tile of one warp and of a warpgroup
H = st(32, 64, bf16)  # half of the latter
R = rt(16, 64, fp32)  # a warp's part
ONE = shared(r=ring(S, 2, readers=1))  # filled by warpgroup 0, read by warp 4
RING = shared(r=ring(G, 2, readers=4))  # filled by warpgroup 0, read by warpgroup 1
TWO = shared(r=ring(G, 2, readers=8))  # filled by warpgroup 0, read by warpgroups 1 and 2
X = shared(x=S, full=barrier(1), done=barrier(2))  # for raw ops
Y = shared(x=G, y=G)  # for mmas


@inlined
def operands():
    """Y's tiles, which the first warpgroup has written and its mmas may read."""
    x, y = Y.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, zeros(R))
        warpgroup.store(y, zeros(R))
        warpgroup.sync()
    return x, y


class Cases:
    """Broken kernels, one mistake each, and what must be said of them."""

    def __init__(self):
        self.params = []

    def __call__(self, kind, cause, warp=0, smem=None, threads=0):
        """Decorator: the kernel must fail with `kind` (several, where the schedule decides how the mistake shows), words that
        match `cause`, and one of `warp` at a statement that carries the comment `# guilty`. threads: one warp, or two
        warpgroups if there is shared memory."""

        def register(kernel):
            kinds, warps = ({x} if isinstance(x, (str, int)) else set(x) for x in (kind, warp))
            block = threads or (256 if smem else 32)
            self.params.append(pytest.param((cuda.jit(kernel), kinds, cause, warps, smem, block), id=kernel.__name__))
            return kernel

        return register

    def sweep(self, test):
        """Runs test(case, seed) for every case, in the strict order and by ten seeds. A seed is no test of its own, for which
        pytest would need as long as most of them take."""

        @pytest.mark.parametrize("case", self.params)
        def in_every_order(case):
            for seed in (None, *SEEDS):
                print(f"{seed=}")  # pytest shows it if the case fails
                test(case, seed)

        in_every_order.__doc__ = test.__doc__
        return in_every_order


def arguments(kernel):
    """What a kernel gets, by the names of its parameters: 4 x 128 x 64 numbers, as an array or cut into tiles."""
    numbers = np.arange(4 * 128 * 64, dtype=np.float32).reshape(4, 128, 64) / 1000
    known = {
        "array": lambda: numbers,
        "small": lambda: tensor(numbers.astype(bf16.np), S, 1),
        "source": lambda: tensor(numbers.astype(bf16.np), G, 1),
        "halves": lambda: tensor(numbers[0].astype(bf16.np), H),
        "target": lambda: tensor(np.zeros_like(numbers, bf16.np), G, 1),
    }
    return [known[name]() for name in inspect.signature(kernel).parameters]


def guilty(kernel):
    """file:line and text of the statements marked guilty."""
    lines, first = inspect.getsourcelines(kernel)
    file = inspect.getsourcefile(kernel).rsplit("/")[-1]
    marked = [(first + k, line.split("  #")[0].strip()) for k, line in enumerate(lines) if line.endswith("# guilty\n")]
    return {f"{file}:{number} `{text}`" for number, text in marked}


def run(kernel, smem=None, threads=256, seed=None, args=None, grid=(1, 1, 1), cluster=(1, 1, 1)):
    """Run a kernel in the interpreter."""
    function = getattr(kernel, "py_func", kernel)
    interpret(kernel, grid, threads, arguments(function) if args is None else args, smem, seed, cluster)


def check(case, seed, blocks=1):
    """The kernel, run by a cluster of `blocks`, stops with the right complaint."""
    kernel, kinds, cause, warps, smem, threads = case
    with pytest.raises(Hazard) as caught:
        run(kernel, smem, threads, seed, grid=(blocks, 1, 1), cluster=(blocks, 1, 1))
    hazard, text = caught.value, str(caught.value)
    assert hazard.kind in kinds, text
    assert re.search(cause, hazard.cause, re.DOTALL), text
    assert hazard.warp in warps, text
    assert hazard.line.split(", called at ")[-1] in guilty(kernel.py_func), text
    assert re.search(rf"warps? \[?[\d, ]*\b{hazard.warp}\b", text) and hazard.line in text
