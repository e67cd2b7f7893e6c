"""tiles/compiling/code_size.py: how much code a kernel has, before it is compiled."""

from types import SimpleNamespace

from numba import cuda

from attention.kernels.softmax import forward_ampere
from attention.parts.visibility import CAUSAL
from ops import exp2
from tiles import bf16, static
from tiles.compiling.code_size import OP, estimate_size
from tiles.op import inlined


@inlined
def long(x):
    return x + x * x + x * x * x + x * x * x * x + x * x * x * x * x


@static
class Part:
    """A part with a helper."""

    @inlined
    def add(self, x):
        return self.twice(x)

    @inlined
    def twice(self, x):
        return long(x) + long(x)


def size(function):
    return estimate_size(SimpleNamespace(py_func=function))


def test_helpers_count_at_each_call():
    part, variant = Part(), SimpleNamespace(part=Part())
    alone = size(long)
    assert size(lambda x: x) < alone
    assert alone < size(lambda x: long(x)) < 2 * alone < size(lambda x: long(x) + long(x)) < 3 * alone
    assert size(lambda x: part.add(x)) > 2 * alone
    assert size(lambda x: variant.part.add(x)) > 2 * alone
    assert size(lambda x: x.add(x)) < alone


def test_ops_count():
    assert size(lambda x: exp2(x)) == size(lambda x: len(x)) + OP


def test_what_cannot_be_looked_up_counts_for_nothing():
    if False:
        missing = 0

    def again(x):
        return again(x)

    assert size(lambda x: missing) == 0
    assert size(again) > 0


def test_a_kernel():
    small = cuda.jit(lambda gX, n: None)
    kernel, _ = forward_ampere.make(forward_ampere.config_for(64, bf16, CAUSAL))
    assert 100 * estimate_size(small) < estimate_size(kernel)
