"""tiles/launch.py, arguments.py and fallback.py: how arguments are typed and packed, where a launch runs, what it costs."""

import contextlib
import ctypes
import functools
import gc
import itertools
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from cuda.bindings import driver
from kernels import copies, scale
from numba import cuda
from numba.cuda import types

import tiles
from ops import store, warpgroup, zeros
from tiles import bf16, fallback, fp16, fp32, ring, rt, shared, st, tma
from tiles.arguments import parameter
from tiles.compiler import Compiled
from tiles.plumbing import Value

launching = sys.modules["tiles.launch"]
ROOT = Path(__file__).parents[2]


# ---- arguments -------------------------------------------------------------------------------------------------------
SCALARS = [
    (True, types.boolean, 1),
    (7, types.int32, 7),
    (-1, types.int32, 0xFFFFFFFF),
    (2**31 - 1, types.int32, 2**31 - 1),
    (1.0, types.float32, 0x3F800000),
    (float("inf"), types.float32, 0x7F800000),
    (np.bool_(False), types.boolean, 0),
    (np.int8(-1), types.int8, 0xFF),
    (np.uint16(65535), types.uint16, 65535),
    (np.int32(-2), types.int32, 0xFFFFFFFE),
    (np.int64(-1), types.int64, 2**64 - 1),
    (np.uint64(2**64 - 1), types.uint64, 2**64 - 1),
    (np.float32(-2), types.float32, 0xC0000000),
    (np.float64(1), types.float64, 0x3FF0000000000000),
]


@pytest.mark.parametrize("value, ty, bits", SCALARS, ids=[f"{type(v).__name__} {v}" for v, _, _ in SCALARS])
def test_scalars(value, ty, bits):
    p = parameter("n", value)
    assert (p.type, p.slots, p.array) == (ty, (bits,), None)


@pytest.mark.parametrize("value, cure", [(2**31, "np.int64"), (-(2**31) - 1, "np.int64"), (1e39, "np.float64")])
def test_a_number_that_does_not_fit_says_what_to_pass(value, cure):
    with pytest.raises(OverflowError, match=rf"count: .*{cure}\("):
        parameter("count", value)


def test_an_array_is_passed_as_numba_takes_it():
    x = np.zeros((3, 4, 5), np.float16)[:, ::2, ::-1]
    p = parameter("x", x)
    assert p.type == types.Array(types.float16, 3, "A")
    address = x.__array_interface__["data"][0]
    assert p.slots == (0, 0, 3 * 2 * 5, 2, address, 3, 2, 5, 40, 20, 2**64 - 2) and p.place == 4
    assert parameter("x", np.zeros((), np.int32)).slots[5:] == ()


@pytest.mark.parametrize(
    "dtype, ty",
    [(ml_dtypes.bfloat16, types.bfloat16), (np.float64, types.float64), (np.bool_, types.boolean), (np.int64, types.int64)],
)
def test_element_types(dtype, ty):
    assert parameter("x", np.zeros(3, dtype)).type.dtype == ty


def test_a_tensor_takes_one_slot_for_its_map():
    q = np.zeros((2, 64, 3, 64), bf16.np)
    source = tiles.tensor(q, st(64, 64, bf16), rows=1)
    p = parameter("q", source)
    assert p.type == Value(source.spec) and p.slots == (0,) and p.place == 0 and p.array.owner is q


REFUSED = {
    "text": ("a", TypeError, "x: must be an array.*builtins.str"),
    "dtype": (np.zeros(3, object), TypeError, "x: kernels know no elements of type object"),
    "order": (np.zeros(3, ">f4"), TypeError, "x: kernels know no elements of type >f4"),
    "tensor": (tiles.tensor(np.zeros((64, 64), np.float32), st(64, 64, bf16)), TypeError, "x: .*bfloat16, got float32"),
    "address": (
        tiles.tensor(np.zeros((64, 72), bf16.np)[:, 1:65], st(64, 64, bf16)),
        ValueError,
        "x: the address must be a multiple of 16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_an_argument_by_its_name(case):
    value, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        parameter("x", value)


# ---- what launch refuses ---------------------------------------------------------------------------------------------
@cuda.jit(launch_bounds=(128, 1))
def small(x):
    pass


WRONG = {
    "kernel": (lambda: tiles.launch(len, 1, 32), TypeError, "@cuda.jit"),
    "grid": (lambda: tiles.launch(scale, 0, 32), ValueError, "grid must be .* got 0"),
    "grid axes": (lambda: tiles.launch(scale, (1, 1, 1, 1), 32), ValueError, "up to three"),
    "block": (lambda: tiles.launch(scale, 1, 32.0), ValueError, "block must be"),
    "threads": (lambda: tiles.launch(scale, 1, (32, 33)), ValueError, "1056 threads.*up to 1024"),
    "bounds": (lambda: tiles.launch(small, 1, 160), ValueError, "small is made for up to 128"),
    "cluster": (lambda: tiles.launch(scale, 3, 32, cluster=2), ValueError, "cluster=2 must divide grid=3"),
    "shared": (lambda: tiles.launch(scale, 1, 32, shared="1024"), TypeError, "tiles.shared plan, got '1024'"),
    "count": (lambda: tiles.launch(scale, 1, 32)(1), TypeError, r"scale takes 3 arguments \(source, target, factor\), got 1"),
    "block axes": (lambda: tiles.launch(small, 1, (32, 2))(np.zeros(1)), ValueError, "blocks of one axis"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses(case):
    make, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        make()


# ---- in the interpreter ------------------------------------------------------------------------------------------------
def test_arrays_in_host_memory_run_in_the_interpreter_and_a_log_line_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(fallback, "_said", [])
    x = np.arange(32 * 48, dtype=np.float32).reshape(32, 48)
    y = np.full_like(x, np.nan)
    with caplog.at_level(logging.INFO):
        for factor in (2.0, 3):
            tiles.launch(scale, (2, 3), 32)(x, y, factor)
            np.testing.assert_array_equal(y, factor * x)
    (record,) = [r for r in caplog.records if r.name.startswith("tiles")]
    assert "scale runs in the interpreter" in record.getMessage()


def test_a_kernel_is_called_by_its_short_name(caplog, monkeypatch):
    """`scale`, also where a function made it: not test_...<locals>.scale."""
    monkeypatch.setattr(fallback, "_said", [])

    @cuda.jit
    def scale(x):
        pass

    with caplog.at_level(logging.INFO):
        tiles.launch(scale, 1, 32)(np.zeros(3, np.float32))
    assert [r.getMessage().split()[0] for r in caplog.records if r.name.startswith("tiles")] == ["scale"]
    with pytest.raises(TypeError, match=r"^scale takes 1 arguments \(x\), got 0"):
        tiles.launch(scale, 1, 32)()


def test_torch_tensors_in_host_memory():
    torch = pytest.importorskip("torch")
    x, y = torch.ones(16, 16, dtype=torch.bfloat16), torch.zeros(16, 16, dtype=torch.bfloat16)
    bound = tiles.launch(scale, 1, 32).bind(x, y, 3.0)
    bound(0, x.data_ptr(), y.data_ptr())
    assert (y == 3).all()


def test_a_kernel_without_arrays_runs_in_the_interpreter(capsys):
    @cuda.jit
    def hello(n):
        print("hello", n)

    tiles.launch(hello, 1, 32)(3)
    assert "hello 3" in capsys.readouterr().out


def test_the_seed_reaches_the_interpreter(monkeypatch):
    seen = []
    monkeypatch.setattr(fallback, "interpret", lambda kernel, grid, threads, args, shared, seed, *_: seen.append(seed))
    x = np.zeros((16, 16), np.float32)
    for seed in ("", "7"):
        monkeypatch.setenv("TILES_SEED", seed)
        tiles.launch(scale, 1, 32)(x, x, 1.0)
    assert seen == [None, 7]


# ---- a driver that runs in host memory ---------------------------------------------------------------------------------
class OnDevice:
    """An array said to lie on a GPU."""

    def __init__(self, array):
        self.array = array

    shape, dtype = property(lambda self: self.array.shape), property(lambda self: self.array.dtype)
    __cuda_array_interface__ = property(lambda self: {**self.array.__array_interface__, "stream": None})


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose memory is the host's. Kernels are not run: a launch reads its arguments as the driver would, and leaves
    them in `.launches`."""
    ok, gpu = driver.CUresult.CUDA_SUCCESS, SimpleNamespace(launches=[], current=1234, pushed=[], loaded=0, attributes=[])

    def stand_in(name, answer=lambda *_: ()):
        monkeypatch.setattr(driver, name, lambda *args: (ok, *answer(*args)))

    def launch(config, function, address, extra):
        pointers = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))
        slots = [ctypes.cast(pointers[k], ctypes.POINTER(ctypes.c_uint64))[0] for k in range(gpu.count)]
        if gpu.current != 1234:
            return (driver.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        gpu.launches.append((int(config.hStream), slots, config))
        return (gpu.status,)

    def push(context):
        gpu.pushed.append(gpu.current)
        gpu.current = int(context)
        return ()

    def pop():
        gpu.current = gpu.pushed.pop()
        return (gpu.current,)

    def copy(to, source, nbytes, *_):
        ctypes.memmove(to, source, nbytes)
        return ()

    def load(*_):
        gpu.loaded += 1
        return (gpu.loaded,)

    gpu.status, gpu.count = ok, 0
    stand_in("cuInit"), stand_in("cuDeviceGet", lambda n: (n,)), stand_in("cuDeviceGetName", lambda *_: (b"Fake\0",))
    stand_in("cuDevicePrimaryCtxRetain", lambda d: (1234,)), stand_in("cuDeviceGetAttribute", lambda *_: (232448,))
    stand_in("cuCtxGetCurrent", lambda: (gpu.current,)), stand_in("cuCtxPushCurrent", push), stand_in("cuCtxPopCurrent", pop)
    stand_in("cuPointerGetAttribute", lambda *_: (0,)), stand_in("cuStreamSynchronize")
    stand_in("cuThreadExchangeStreamCaptureMode", lambda m: (m,)), stand_in("cuLibraryLoadData", load)
    stand_in("cuLibraryGetKernel", lambda *_: (5,)), stand_in("cuKernelGetFunction", lambda *_: (6,))
    stand_in("cuFuncSetAttribute", lambda f, a, n: gpu.attributes.append(n) or ())
    stand_in("cuMemcpyDtoH", copy), stand_in("cuMemcpyHtoD", copy)
    monkeypatch.setattr(driver, "cuLaunchKernelEx", launch)
    target = launching.Device(0)
    target.capability = 9, 0
    monkeypatch.setattr(launching, "device", lambda ordinal: target)
    monkeypatch.setattr(launching, "_machine_code", lambda *_: Compiled(b"", "k", ""))
    monkeypatch.setattr(launching, "_loaded", launching.weakref.WeakKeyDictionary())
    return gpu


def on_device(*shape, dtype=np.float32):
    return OnDevice(np.ones(shape, dtype))


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


@pytest.fixture
def encoded(monkeypatch):
    """A driver whose tensor maps begin with the address of the array; yields what it was asked for."""
    asked = []

    class Map:
        def __init__(self, pointer):
            self.bytes = (ctypes.c_uint64 * 16)(pointer)

        def getPtr(self):
            return ctypes.addressof(self.bytes)

    def encode(*args):
        asked.append(args[2])
        return driver.CUresult.CUDA_SUCCESS, Map(args[2])

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    yield asked
    tma.tensor_map.cache_clear()


def test_the_driver_copies_maps_from_where_they_lie(gpu, encoded):
    """One argument each: a tensor's map, an array's seven parts, another tensor's map, a number."""

    @cuda.jit
    def takes(q, x, k, n):
        pass

    q, x, gpu.count = on_device(64, 64, dtype=np.float16), on_device(8), 10
    tensors = [tiles.tensor(q, st(64, 64, fp16)), tiles.tensor(q, st(32, 64, fp16))]
    bound = tiles.launch(takes, 1, 32).bind(tensors[0], x, tensors[1], 7)
    for addresses in ((4096, 8192, 12288), (16, 32, 48), (4096, 8192, 12288)):
        bound(3, *addresses)
        _, slots, _ = gpu.launches[-1]
        assert slots == [addresses[0], 0, 0, 8, 4, addresses[1], 8, 4, addresses[2], 7]
    assert encoded == [4096, 12288, 16, 48]


def test_a_launch_keeps_its_maps(gpu, encoded, monkeypatch):
    """While the driver reads a frame, other threads may push it and its maps out of every cache."""
    x, gpu.count = tiles.tensor(on_device(64, 64, dtype=np.float16), st(64, 64, fp16)), 1

    @cuda.jit
    def takes(x):
        pass

    bound, real = tiles.launch(takes, 1, 32).bind(x), driver.cuLaunchKernelEx

    def forgetful(*args):
        bound.ready.clear()
        tma.tensor_map.cache_clear()
        gc.collect()
        return real(*args)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", forgetful)
    for k in range(1, 20):
        bound(0, 16 * k)
    assert [slots for _, slots, _ in gpu.launches] == [[16 * k] for k in range(1, 20)]


def test_a_bound_launch_does_not_remember_for_ever(gpu, monkeypatch):
    monkeypatch.setattr(launching, "READY", 8)
    monkeypatch.setattr(launching, "STREAMS", 3)
    x, gpu.count = on_device(16, 16), 19
    bound = tiles.launch(scale, 1, 32).bind(x, x, 2.0)
    for k in range(100):
        bound(k % 7, 4096 * k, 8192 * k)
        assert len(bound.ready) <= 8 and len(bound.configs) <= 3
    assert [(stream, slots[4], slots[13]) for stream, slots, _ in gpu.launches] == [
        (k % 7, 4096 * k, 8192 * k) for k in range(100)
    ]


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


# ---- machine code ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch, lacks", [("sm_80", "cp.async.bulk"), ("sm_100a", None)])
def test_a_gpu_without_the_instructions_is_named(arch, lacks, monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_CACHE_DIR", str(tmp_path))
    kernel, _ = copies(st(64, 64, bf16), 2, 0)
    spec = tiles.tensor(np.zeros((64, 64), bf16.np), st(64, 64, bf16)).spec
    signature = Value(spec), Value(spec), types.int32, types.int32
    target = type("Target", (), {"arch": arch, "__str__": lambda self: f"GPU 0, Some Card ({arch})"})()
    expected = pytest.raises(RuntimeError, match=rf"copy uses .*, which GPU 0, Some Card \({arch}\) does not have")
    with expected if lacks else contextlib.nullcontext():
        assert launching._machine_code(kernel, signature, target).cubin


@cuda.jit
def product(out):
    (b,) = plan.open()
    warpgroup.store(out, warpgroup.wait(warpgroup.mm_AB(zeros(LEFT), b)), (0, 0))


LEFT = rt(16, 64, bf16)
plan = shared(b=st(64, 64, bf16))


def test_wgmma_where_there_is_none():
    target = type("Target", (), {"arch": "sm_100a", "__str__": lambda self: "a B200"})()
    with pytest.raises(RuntimeError, match="product uses wgmma.*, which a B200 does not have"):
        launching._machine_code(product, (types.Array(types.float32, 2, "A"),), target)


@pytest.mark.parametrize("cached", [False, True])
def test_complaints_of_ptxas_are_warnings(cached, monkeypatch):
    log = "ptxas info : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
    compiled = Compiled(b"", "k", log)
    monkeypatch.setattr(launching.cache, "load", lambda name: compiled if cached else None)
    monkeypatch.setattr(launching.cache, "store", lambda *_: None)
    monkeypatch.setattr(launching, "compile_kernel", lambda *_: compiled)
    with pytest.warns(RuntimeWarning, match="scale: .*C7512"):
        launching._machine_code(scale, (), SimpleNamespace(arch="sm_90a"))


# ---- on the card -------------------------------------------------------------------------------------------------------
@pytest.fixture
def torch():
    """torch, on a card."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    torch.manual_seed(0)
    return torch


@pytest.mark.gpu
@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scale_on_the_card(torch, dtype):
    x = torch.randn(64, 96, device="cuda", dtype=getattr(torch, dtype))[:, ::2]
    y = torch.full((48, 64), float("nan"), device="cuda", dtype=x.dtype).T
    tiles.launch(scale, (4, 3), 32)(x, y, 2.0)
    torch.testing.assert_close(y, 2 * x, rtol=0, atol=0)


@pytest.mark.gpu
def test_numbers_on_the_card(torch):
    @cuda.jit
    def numbers(out, flag, i, wide, x, double):
        if cuda.threadIdx.x == 0:
            out[0] = i
            out[1] = wide
            out[2] = x
            out[3] = double
            out[4] = 7.0 if flag else -7.0

    out = torch.zeros(5, device="cuda", dtype=torch.float64)
    tiles.launch(numbers, 1, 32)(out, True, -3, np.int64(2**40), 0.5, np.float64(1 / 3))
    assert out.tolist() == [-3, 2**40, 0.5, 1 / 3, 7]


@pytest.mark.gpu
@pytest.mark.smoke
def test_more_than_48_kb_of_shared_memory(torch):
    kernel, smem = copies(st(64, 64, bf16), 2, 0, stages=24)
    assert smem.nbytes > 190_000
    x = torch.randn(128, 192, device="cuda", dtype=torch.bfloat16)
    y = torch.full_like(x, float("nan"))
    source, target = (tiles.tensor(t, st(64, 64, bf16)) for t in (x, y))
    tiles.launch(kernel, (2, 3), 128, shared=smem)(source, target, 1, 1)
    assert torch.equal(x, y)


def copier(torch, rows=640, cols=640, dtype=None):
    """(bound copy kernel, make) with make() a fresh array of its form."""
    make = lambda: torch.randn(rows, cols, device="cuda", dtype=dtype or torch.bfloat16)
    tile = st(64, 64, bf16)
    kernel, smem = copies(tile, 2, 0)
    x, y = make(), make()
    grid = rows // 64, cols // 64
    return tiles.launch(kernel, grid, 128, shared=smem).bind(tiles.tensor(x, tile), tiles.tensor(y, tile), 1, 1), make


@pytest.mark.gpu
def test_capture_in_a_graph_with_maps_never_seen_before(torch):
    tile, (bound, make) = st(64, 64, bf16), copier(torch)
    kernel, smem = copies(tile, 2, 0)
    x, y, z = make(), make(), make()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiles.launch(kernel, (10, 10), 128, shared=smem)(tiles.tensor(x, tile), tiles.tensor(y, tile), 1, 1)
        bound(torch.cuda.current_stream().cuda_stream, y.data_ptr(), z.data_ptr())
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(x, z)


@pytest.mark.gpu
def test_first_launch_of_a_kernel_during_capture(torch, monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_CACHE_DIR", str(tmp_path))

    @cuda.jit
    def fresh(x):
        x[cuda.threadIdx.x] += 1

    x, graph = torch.zeros(32, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiles.launch(fresh, 1, 32)(x)
    graph.replay()
    graph.replay()
    assert (x == 2).all()


@pytest.mark.gpu
def test_runs_on_the_caller_s_stream(torch):
    x, y = torch.zeros(64, 96, device="cuda"), torch.zeros(64, 96, device="cuda")
    side = torch.cuda.Stream()
    tiles.launch(scale, (4, 6), 32)(x.fill_(0), y, 1.0)
    assert (y == 0).all()  # what is used below is compiled and loaded now: that takes longer than the stream sleeps
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.fill_(1)
        tiles.launch(scale, (4, 6), 32)(x, y, 3.0)
    assert not side.query(), "the launch waited for the stream"
    assert (y == 0).all()  # by the default stream: nothing has been written yet
    side.synchronize()
    assert (y == 3).all()
    tiles.launch(scale, (4, 6), 32, stream=side)(x, y, 5.0)
    side.synchronize()
    assert (y == 5).all()


@pytest.mark.gpu
def test_maps_may_go_once_the_launch_has_returned(torch, monkeypatch):
    """Launches in a queue and in a graph have their own copies."""
    monkeypatch.setattr(launching, "READY", 2)
    monkeypatch.setattr(tma, "tensor_map", functools.lru_cache(2)(tma.tensor_map.__wrapped__))
    bound, make = copier(torch)
    arrays, graph, stream = [make() for _ in range(40)], torch.cuda.CUDAGraph(), torch.cuda.Stream()
    a, b, first = make(), make(), arrays[0].clone()
    with torch.cuda.graph(graph):
        bound(torch.cuda.current_stream().cuda_stream, a.data_ptr(), b.data_ptr())
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for x, y in itertools.pairwise(arrays):
            bound(stream.cuda_stream, x.data_ptr(), y.data_ptr())
    assert not stream.query(), "the launches have been waited for"
    gc.collect()
    stream.synchronize()
    assert all(torch.equal(x, first) for x in arrays)
    for _ in range(3):
        a.normal_()
        graph.replay()
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_threads_on_the_card(torch):
    bound, make = copier(torch)
    wrong, start = [], threading.Barrier(6)

    def work():
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                x, y = make(), make()
                bound(torch.cuda.current_stream().cuda_stream, x.data_ptr(), y.data_ptr())
                torch.cuda.current_stream().synchronize()
                if not torch.equal(x, y):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
def test_a_thread_without_a_context(torch):
    bound, make = copier(torch)
    x, y = make(), make()
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: bound(0, x.data_ptr(), y.data_ptr()))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("stream", ["default", "side"])
def test_another_context_of_the_same_gpu_is_current(torch, stream):
    bound, make = copier(torch)
    x, y, handle = make(), make(), 0 if stream == "default" else torch.cuda.Stream().cuda_stream
    torch.cuda.synchronize()
    primary = driver.cuCtxGetCurrent()[1]
    other = driver.cuCtxCreate(None, 0, driver.cuDeviceGet(0)[1])
    assert not other[0] and int(driver.cuCtxGetCurrent()[1]) != int(primary)
    try:
        bound(handle, x.data_ptr(), y.data_ptr())
        assert int(driver.cuCtxGetCurrent()[1]) == int(other[1])
    finally:
        driver.cuCtxDestroy(other[1])
        driver.cuCtxSetCurrent(primary)
    torch.cuda.synchronize()
    assert torch.equal(x, y)


@pytest.mark.gpu
def test_an_axis_without_stride_on_the_card(torch):
    """One row, seen 128 times."""
    tile, y = st(64, 64, bf16), torch.zeros(128, 64, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, 64, device="cuda", dtype=torch.bfloat16).expand(128, 64)
    kernel, smem = copies(tile, 2, 0)
    tiles.launch(kernel, (2, 1), 128, shared=smem)(tiles.tensor(x, tile), tiles.tensor(y, tile), 1, 1)
    assert torch.equal(x, y)


@pytest.mark.gpu
def test_device_arrays_in_the_interpreter_on_the_card(torch, monkeypatch):
    monkeypatch.setenv("TILES_INTERPRET", "1")
    whole = torch.randn(64, 64, device="cuda")
    before = whole.clone()
    tiles.launch(scale, (4, 2), 32)(whole[:, :32], whole[:, 32:], 2.0)
    assert torch.equal(whole[:, 32:], 2 * before[:, :32]) and torch.equal(whole[:, :32], before[:, :32])


@pytest.mark.gpu
def test_clusters_on_the_card(torch):
    x, y = torch.randn(64, 64, device="cuda"), torch.zeros(64, 64, device="cuda")
    tiles.launch(scale, (4, 4), 32, cluster=(2, 2))(x, y, 2.0)
    assert torch.equal(y, 2 * x)


COLD = """
import sys, time
sys.path[:0] = [{root!r}, {tests!r}]
import torch, tiles, kernels
x = torch.ones(64, 64, device="cuda"); y = torch.zeros_like(x); torch.cuda.synchronize()
start = time.perf_counter()
tiles.launch(kernels.scale, (4, 4), 32)(x, y, 2.0)
torch.cuda.synchronize()
took = time.perf_counter() - start
assert (y == 2).all()
from tiles import cache
from numba.cuda import types
array = types.Array(types.float32, 2, "A")
print(took, cache.key(kernels.scale, (array, array, types.float32), "sm_90a"))
"""


@pytest.mark.gpu
def test_first_call_in_another_process(tmp_path, monkeypatch):
    monkeypatch.setenv("TILES_CACHE_DIR", str(tmp_path / "cache"))
    program = COLD.format(root=str(ROOT), tests=str(Path(__file__).parent))
    outcomes = []
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
        took, key = run.stdout.split()
        outcomes.append((float(took), key))
    times = [t for t, _ in outcomes]
    print(f"\nfirst call: compiled {times[0]:.3f} s, from disk {times[1]:.3f} and {times[2]:.3f} s")
    assert len({key for _, key in outcomes}) == 1 and outcomes[0][1] != "None"
    assert len(list((tmp_path / "cache").glob("*.json"))) == 1
    assert min(times[1:]) < 0.4


def p50(call, n=10_000):
    """Median host time of a call, in microseconds."""
    spent = []
    for k in range(n):
        start = time.perf_counter_ns()
        call()
        spent.append(time.perf_counter_ns() - start)
        if k % 100 == 99:
            cuda.synchronize()  # so that the queue of launches never fills
    return sorted(spent)[n // 2] / 1000


@pytest.mark.gpu
def test_host_cost(torch):
    """What a launch costs the host; printed, and held to twice what it should be, for machines differ."""
    tile = st(64, 64, bf16)

    @cuda.jit
    def nothing(q, k, v, out, lse, n, s):
        pass

    q, k, v, out = (torch.zeros(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    lse = torch.zeros(1, 1, 64, device="cuda")
    tensors = [tiles.tensor(t, tile, rows=1) for t in (q, k, v, out)]
    every = *tensors, lse, 64, 1.0
    launch, stream = tiles.launch(nothing, 1, 128), torch.cuda.current_stream().cuda_stream
    bound = launch.bind(*every)
    addresses = [t.data_ptr() for t in (q, k, v, out, lse)]
    fresh = iter(range(2**40, 2**41, 4096))  # addresses that nobody has seen; they are never read
    x, three = torch.zeros(16, 16, device="cuda"), tiles.launch(nothing, 1, 32).bind
    costs = {
        "bound, 4 maps + 1 array": p50(lambda: bound(stream, *addresses)),
        "the same, addresses never seen": p50(lambda: bound(stream, *(next(fresh) for _ in addresses)), 2000),
        "encoding a map": p50(lambda: tma.encode(bound.encodings[0], next(fresh)), 2000),
        "launch(...)(4 tensors, 1 array, 2 numbers)": p50(lambda: tiles.launch(nothing, 1, 128)(*every), 2000),
        "launch(...)(2 arrays, 1 number)": p50(lambda: tiles.launch(scale, 1, 32)(x, x, 2.0), 2000),
        "bind alone": p50(lambda: three(*every), 2000),
        "cuLaunchKernelEx alone": p50(lambda: driver.cuLaunchKernelEx(*bare(bound, stream))),
        "torch x + x": p50(lambda: x + x),
    }
    scale[1, 32](x, x, 2.0)
    costs["Numba's own, 2 arrays, 1 number"] = p50(lambda: scale[1, 32](x, x, 2.0), 2000)
    print("\nhost cost, p50:" + "".join(f"\n  {cost:7.2f} us  {name}" for name, cost in costs.items()))
    assert costs["bound, 4 maps + 1 array"] < 8


def bare(bound, stream):
    """The arguments of the driver's call in a bound launch."""
    ready = next(ready for where, ready in bound.ready.items() if where[0] == stream)
    return ready.config, ready.function, ready.frame.address, 0
