"""ops/printing.py: print(tile) prints the same in the interpreter and on the GPU."""

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

import tiles
from ops import lane_sum, load
from tiles import bf16, fp16, fp32, rt
from tiles.compiling.compiler import compile_kernel

SPECS = [rt(16, 16, fp32), rt(32, 16, bf16), rt(16, 32, fp16), rt(16, 48, fp32).col_vec, rt(16, 48, fp32).row_vec]
SPECS += [rt(16, 32, fp32, "col"), rt(16, 32, fp32, "col").row_vec]


def on_gpu(array):
    return cuda.to_device(array.view(f"u{array.itemsize}")).view(array.dtype)  # Numba's copies know no bf16


def kernel_of(spec):
    at = (0, 0) if isinstance(spec, rt) else (0,)

    @cuda.jit
    def kernel(x):
        print(load(x, spec, at))

    return kernel


def printed(spec, to_device, capture):
    """A kernel's output for 0, 1, 2, ... minus a quarter: the words before the numbers, and the numbers."""
    shape = spec.shape if isinstance(spec, rt) else (spec.length,)
    x = (np.arange(np.prod(shape)).reshape(shape) % 128 - 0.25).astype(spec.dtype.np)
    tiles.launch(kernel_of(spec), 1, 32)(to_device(x))
    if to_device is on_gpu:
        cuda.synchronize()
    head, _, body = capture.readouterr().out.partition("\n")
    numbers = [[float(n) for n in row.split()] for row in body.splitlines()]
    return head, numbers, x.astype(np.float32).reshape(spec.shape)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_in_the_interpreter(spec, capsys):
    head, numbers, x = printed(spec, lambda a: a, capsys)
    assert head == f"[block (0, 0, 0), warp 0] {spec}"
    np.testing.assert_array_equal(numbers, x)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_on_the_card(spec, capfd):
    head, numbers, x = printed(spec, on_gpu, capfd)
    assert head == f"[block (0, 0, 0), warp 0] {spec}"
    np.testing.assert_array_equal(numbers, x)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_compiles(spec):
    scalar = {fp32: types.float32, bf16: types.bfloat16, fp16: types.float16}[spec.dtype]
    code = compile_kernel(kernel_of(spec), [types.Array(scalar, len(spec.shape) if isinstance(spec, rt) else 1, "A")], "sm_90a")
    assert code.spill_bytes == 0 and not code.warnings, code.log


def test_what_cannot_be_printed():
    T = rt(16, 16, fp32)

    @cuda.jit
    def mixed(x):
        print("tile", load(x, T, (0, 0)))

    @cuda.jit
    def partial(x):
        print(lane_sum(load(x, T, (0, 0))))

    signature = [types.Array(types.float32, 2, "A")]
    with pytest.raises(TypeError, match=r"by itself, print\(tile\), got rt\(16, 16, fp32\) among other arguments"):
        compile_kernel(mixed, signature, "sm_90a")
    with pytest.raises(TypeError, match=r"takes a register tile or vector, got partial col_vec\(16, fp32\)"):
        compile_kernel(partial, signature, "sm_90a")
