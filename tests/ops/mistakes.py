"""Kernels with one mistake each, and the error they must raise: `says` registers one, `check` runs it."""

from pathlib import Path

import numpy as np
import pytest
from numba import cuda

import tiles
from tiles import barrier, bf16, fp8e4m3, fp16, fp32, rt, st, tensor
from tiles.testing import blank, meaning, ptx

T, B, WIDE, E = rt(16, 64, fp32), rt(16, 64, bf16), rt(16, 128, fp32), rt(16, 64, fp8e4m3)
S, S8 = st(64, 64, bf16), st(64, 64, fp8e4m3)
smem = tiles.shared(s=S, v=st(64, 48, fp16), f=S8, bar=barrier(1))


class RefusedKernels:
    """Decorator `says(message)`: the kernel below must be refused with a TypeError whose message begins so."""

    def __init__(self):
        self.params = []

    def __call__(self, message):
        def register(mistake):
            self.params.append(pytest.param(mistake, message, id=mistake.__name__))
            return mistake

        return register

    def sweep(self, test):
        """Runs a test(backend, mistake, message) for every case, in the interpreter and by the compiler."""
        test = pytest.mark.parametrize(("mistake", "message"), self.params)(test)
        return pytest.mark.parametrize("backend", [meaning, ptx])(test)


def check(backend, mistake, message):
    """The error has the message, then the kernel's line."""
    with pytest.raises(TypeError) as error:
        backend(cuda.jit(mistake), np.zeros((64, 64), np.float32), tensor(blank((64, 64), bf16), S), warps=4, shared=smem)
    said, line = str(error.value).split("\n", 1)
    assert said.startswith(message)
    assert Path(mistake.__code__.co_filename).name in line
