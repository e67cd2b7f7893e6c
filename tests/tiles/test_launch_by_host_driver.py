"""Launches with a driver that runs in host memory: what it gets, from which frame, in which context, and what it says."""

import sys
import threading
import time

import numpy as np
import pytest
from cuda.bindings import driver
from host_driver import OnDevice, on_device
from kernels import scale
from numba import cuda

import tiles
from ops import store, zeros
from tiles import bf16, fp32, ring, rt, shared, st

launching = sys.modules["tiles.launching.launch"]


def test_the_driver_gets_the_slots_in_order(gpu):
    x, y, gpu.count = on_device(16, 32), on_device(16, 32), 19
    tiles.launch(scale, (1, 2), 32, stream=9)(x, y, 2.0)
    ((stream, slots, config),) = gpu.launches
    pointers = [a.array.ctypes.data for a in (x, y)]
    expected = [[0, 0, 512, 4, p, 16, 32, 128, 4] for p in pointers]
    assert stream == 9 and slots == [*expected[0], *expected[1], 0x40000000]
    assert (config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX) == (1, 2, 1, 32)


def test_the_array_s_stream_is_taken_if_none_is_given(gpu):
    x = on_device(16, 16)
    x.__class__ = type("Streamed", (OnDevice,), {})
    type(x).__cuda_array_interface__ = property(lambda self: {**self.array.__array_interface__, "stream": 11})
    tiles.launch(scale, 1, 32)(x, x, 2.0)
    assert gpu.launches[0][0] == 11


def test_a_bound_launch_takes_other_arrays(gpu):
    x, gpu.count = on_device(16, 16), 19
    bound = tiles.launch(scale, 1, 32).bind(x, x, 2.0)
    bound(3, 4096, 8192)
    bound(4, 12288, 16384)
    (s1, first, _), (s2, second, _) = gpu.launches
    assert (s1, s2) == (3, 4) and (first[4], first[13], second[4], second[13]) == (4096, 8192, 12288, 16384)
    assert first[5:9] == second[5:9] == [16, 16, 64, 4] and first[18] == second[18]
    with pytest.raises(TypeError, match="takes 2 addresses, got 1"):
        bound(3, 4096)


def test_a_kernel_is_loaded_once_for_arrays_of_any_extent(gpu):
    for n in (16, 32, 48):
        tiles.launch(scale, 1, 32)(on_device(16, n), on_device(16, n), n)
    assert gpu.loaded == 1
    tiles.launch(scale, 1, 32)(on_device(16, 16), on_device(16, 16), np.float64(1))
    assert gpu.loaded == 2


def test_threads_do_not_mix_their_arguments(gpu):
    x, gpu.count = on_device(16, 16), 19
    bound, start = tiles.launch(scale, 1, 32).bind(x, x, 2.0), threading.Barrier(8)
    real = driver.cuLaunchKernelEx

    def slow(*args):  # the driver lets other threads run before it reads the arguments
        time.sleep(0.0002)
        return real(*args)

    driver.cuLaunchKernelEx = slow

    def work(n):
        start.wait()
        for k in range(100):
            bound(n, 4096 * n, 16 * (k % 10) + n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(gpu.launches) == 800
    for stream, slots, _ in gpu.launches:
        assert slots[4] == 4096 * stream and slots[13] % 16 == stream % 16


def test_the_gpu_s_context_is_made_current_and_the_old_one_comes_back(gpu):
    x = on_device(16, 16)
    for other in (99, 0):
        gpu.current = other
        tiles.launch(scale, 1, 32)(x, x, 2.0)
        assert gpu.current == other and not gpu.pushed
    assert len(gpu.launches) == 2


def test_errors_carry_cuda_s_name(gpu, monkeypatch):
    gpu.status = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(driver, "cuGetErrorName", lambda s: (s, b"CUDA_ERROR_INVALID_VALUE"))
    monkeypatch.setattr(driver, "cuGetErrorString", lambda s: (s, b"invalid argument"))
    with pytest.raises(RuntimeError, match=r"launch\(scale, \(1, 1, 1\), \(32, 1, 1\)\).*CUDA_ERROR_INVALID_VALUE: invalid"):
        tiles.launch(scale, 1, 32)(on_device(16, 16), on_device(16, 16), 2.0)


def test_shared_memory_is_allowed_for_and_limited(gpu):
    @cuda.jit
    def uses(x):
        pass

    plan = shared(buffer=ring(st(64, 64, bf16), 20))
    tiles.launch(uses, 1, 32, shared=plan)(on_device(1))
    tiles.launch(uses, 1, 32, shared=shared(buffer=ring(st(64, 64, bf16), 2)))(on_device(1))
    assert gpu.attributes == [plan.nbytes] and gpu.launches[0][2].sharedMemBytes == plan.nbytes
    too_much = shared(buffer=ring(st(64, 64, bf16), 40))
    with pytest.raises(ValueError, match=rf"shared: {too_much.nbytes} bytes a block, but GPU 0, Fake \(sm_90a\) has 232448"):
        tiles.launch(uses, 1, 32, shared=too_much)(on_device(1))


def test_clusters(gpu):
    tiles.launch(scale, (4, 2), 32, cluster=(2, 1))(on_device(16, 16), on_device(16, 16), 2.0)
    (_, _, config) = gpu.launches[0]
    dims = config.attrs[0].value.clusterDim
    assert config.numAttrs == 1 and (dims.x, dims.y, dims.z) == (2, 1, 1)


def test_arrays_must_lie_in_one_place(gpu, monkeypatch):
    with pytest.raises(TypeError, match="target lies in host memory, but source in GPU 0"):
        tiles.launch(scale, 1, 32)(on_device(16, 16), np.zeros((16, 16), np.float32), 1.0)
    ordinals = iter((0, 1))
    monkeypatch.setattr(driver, "cuPointerGetAttribute", lambda *_: (driver.CUresult.CUDA_SUCCESS, next(ordinals)))
    with pytest.raises(TypeError, match="target lies in GPU 1, but source in GPU 0"):
        tiles.launch(scale, 1, 32)(on_device(16, 16), on_device(16, 16), 1.0)
    assert not gpu.launches


def test_device_arrays_can_be_interpreted(gpu, monkeypatch):
    """Two views of one buffer, side by side: what lies between a view's elements keeps its value."""
    monkeypatch.setenv("TILES_INTERPRET", "1")
    whole = np.arange(16 * 32, dtype=np.float32).reshape(16, 32)
    before, writes = whole.copy(), []
    real = driver.cuMemcpyHtoD
    monkeypatch.setattr(driver, "cuMemcpyHtoD", lambda to, s, n: writes.append((to - whole.ctypes.data, n)) or real(to, s, n))
    tiles.launch(scale, 1, 32)(OnDevice(whole[:, :16]), OnDevice(whole[:, 16:]), 2.0)
    np.testing.assert_array_equal(whole[:, 16:], 2 * before[:, :16])
    np.testing.assert_array_equal(whole[:, :16], before[:, :16])
    assert len(writes) == 1 and writes[0][0] >= 64 and not gpu.launches


def test_an_error_in_the_interpreter_changes_nothing_on_the_device(gpu, monkeypatch):
    monkeypatch.setenv("TILES_INTERPRET", "1")

    tile = rt(16, 16, fp32)

    @cuda.jit
    def wrong(x):
        store(x, zeros(tile), (0, 0))
        x[16, 0] = 1.0

    x = on_device(16, 16)
    with pytest.raises(tiles.Hazard):
        tiles.launch(wrong, 1, 32)(x)
    assert (x.array == 1).all()
