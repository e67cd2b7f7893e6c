"""Arrays for the tests of tiles/launching/arrays.py, frameworks.py and schema.py: samples, what is known of one, stand-ins."""

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from tiles.launching.frameworks import describe

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def facts(array):
    return array.shape, array.strides, array.dtype, array.device


def sample(dtype="bfloat16", shape=(2, 5, 3, 8)):
    return np.arange(np.prod(shape)).reshape(shape).astype(DTYPES[dtype])


def made_like(array, shape, dtype):
    """A result of this array's kind and place, described; `.owner` is the new object."""
    result = describe(array.kind.allocator(array.kind.placement(array), shape, dtype)(), "out")
    assert array.kind.address(result.owner) == result.pointer
    return result._replace(form=result.form._replace(readonly=False))  # JAX's, until it is handed out


class Exporter:
    """A producer of DLPack capsules that is nobody's array."""

    def __init__(self, x, **fixed):
        self.x, self.fixed = x, fixed

    def __dlpack__(self, **request):
        return self.x.__dlpack__(**(request | self.fixed))

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def bytes_of(x):
    """The set of bytes that x's elements occupy."""
    base = x.__array_interface__["data"][0]
    starts = (base + np.dot(index, x.strides) for index in np.ndindex(x.shape))
    return [int(start) + byte for start in starts for byte in range(x.itemsize)]


memory = np.zeros(600, np.float16)


@st.composite
def windows(draw):
    """A strided window of one memory, strides of any sign, elements perhaps on top of each other."""
    shape = draw(st.tuples(*[st.integers(0, 3)] * 3))
    strides = tuple(2 * draw(st.integers(-20, 20)) for _ in shape)
    behind = sum(2 * -stride for stride in strides if stride < 0) // 2  # elements that lie before the first one
    return np.lib.stride_tricks.as_strided(memory[behind + draw(st.integers(0, 60)) :], shape, strides)
