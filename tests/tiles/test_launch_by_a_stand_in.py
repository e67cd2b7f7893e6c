"""Launches with a driver that runs in host memory: what it gets, from which frame, in which context, and what it says."""

import ctypes
import gc
import sys
import threading
import time
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from cuda.bindings import driver
from kernels import scale
from numba import cuda

import tiles
from ops import load, store, zeros
from tiles import bf16, fp16, fp32, ring, rt, shared, st, tma
from tiles.arguments import ENDS, FLOAT, INT, array, array_type, parameters, record, signature, tiled
from tiles.arrays import Operand, c_ordered
from tiles.compiler import Compiled
from tiles.profile.card import origin, rehearsed

launching = sys.modules["tiles.launch"]


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
            return (INVALID_CONTEXT,)
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
def encoded(gpu, monkeypatch):
    """A driver whose tensor maps begin with the address of the array; yields what it was asked for: ("encode" or "move",
    address). Like the real one it wants a context, and maps that are moved at multiples of 64."""
    asked = []
    tma.encoded.cache_clear()

    class Map:
        def __init__(self, pointer=0, _ptr=None):
            self.own = (ctypes.c_uint64 * 16)(pointer)
            self.at = _ptr or ctypes.addressof(self.own)

        def getPtr(self):
            return self.at

    def encode(*args):
        asked.append(("encode", args[2]))
        return (gpu.status if gpu.current == 1234 else INVALID_CONTEXT), Map(args[2])

    def move(tensor_map, pointer):
        asked.append(("move", pointer))
        assert tensor_map.at % 64 == 0
        if gpu.current != 1234:
            return (INVALID_CONTEXT,)
        ctypes.c_uint64.from_address(tensor_map.at).value = pointer
        return (gpu.status,)

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    monkeypatch.setattr(driver, "cuTensorMapReplaceAddress", move)
    monkeypatch.setattr(driver, "CUtensorMap", Map)
    return asked


INVALID_CONTEXT = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT


@cuda.jit
def takes(q, x, k, n):
    """A tensor's map, an array's seven parts, another tensor's map, a number."""


def bound_to_maps(gpu):
    q, x, gpu.count = on_device(64, 64, dtype=np.float16), on_device(8), 10
    tensors = [tiles.tensor(q, st(64, 64, fp16)), tiles.tensor(q, st(32, 64, fp16))]
    return tiles.launch(takes, 1, 32).bind(tensors[0], x, tensors[1], 7)


def frames_of(bound):
    """The frames that the kernel keeps, the one used longest ago first."""
    return list(bound.frames.recent.values())


def test_maps_are_encoded_once_and_moved(gpu, encoded):
    """The driver copies them, aligned to 64 bytes, from the frame; what was written for an address is found again."""
    bound, first, second = bound_to_maps(gpu), (4096, 8192, 12288), (16, 32, 48)
    for addresses in (first, first, second, second, first):
        bound(3, *addresses)
        _, slots, _ = gpu.launches[-1]
        assert slots == [addresses[0], 0, 0, 8, 4, addresses[1], 8, 4, addresses[2], 7]
    assert [which for which, _ in encoded] == ["encode"] * 2 + ["move"] * 4 and {at for _, at in encoded[:2]} == {tma.SOMEWHERE}
    assert [at for _, at in encoded[2:]] == [4096, 12288, 16, 48]
    for frame in frames_of(bound):
        pointers = (ctypes.c_uint64 * gpu.count).from_address(frame.pointers)
        maps = [pointers[0], pointers[8]]
        assert maps == [tensor_map.getPtr() for tensor_map in frame.maps] and all(place % 64 == 0 for place in maps)
        start, size = ctypes.addressof(frame.memory), ctypes.sizeof(frame.memory)
        assert all(start <= place < start + size for place in [*pointers, *(place + 127 for place in maps)])
    assert len(frames_of(bound)) == 2


def test_the_same_addresses_write_nothing(gpu, monkeypatch):
    x, gpu.count, written = on_device(16, 16), 19, []
    real = launching.Frame.write
    monkeypatch.setattr(launching.Frame, "write", lambda frame, *args: written.append(args[1:]) or real(frame, *args))
    bound = tiles.launch(scale, 1, 32).bind(x, x, 2.0)
    for stream, *addresses in ((3, 16, 32), (3, 16, 32), (3, 16, 48), (4, 16, 48), (4, 16, 48), (3, 16, 48)):
        bound(stream, *addresses)
        assert gpu.launches[-1][:2] == (stream, [*gpu.launches[0][1][:4], addresses[0], *gpu.launches[0][1][5:13], addresses[1],
                                                 *gpu.launches[0][1][14:]])  # fmt: skip
    assert written == [(3, (16, 32)), (3, (16, 48)), (4, (16, 48))] and len(frames_of(bound)) == 3


def test_inputs_that_take_turns_are_written_once(gpu, monkeypatch):
    """As many as frames are kept; of more the one used longest ago is forgotten, and its frame written anew."""
    x, gpu.count, written = on_device(16, 16), 19, []
    real = launching.Frame.write
    monkeypatch.setattr(launching.Frame, "write", lambda frame, *args: written.append(frame) or real(frame, *args))
    bound = tiles.launch(scale, 1, 32).bind(x, x, 2.0)
    kept = launching.RECENT
    for n in [*range(kept), *range(kept), 0, kept, 0, 1, 2]:  # 0 was used a moment before `kept` came, 1 was not
        bound(0, 4096 * n, 0)
        assert gpu.launches[-1][1][4] == 4096 * n and len(frames_of(bound)) <= kept
    assert len(written) == kept + 3 and len(set(map(id, written))) == kept


def test_frames_know_which_launch_they_are_of(gpu):
    """Of two launches of one kernel that differ in a number, at the same addresses."""
    kernel = declared_kernel()
    gpu.count = 19
    for n in (5, 6, 5, 6):
        kernel.bind(n, n=n, s=1.0).run(0, ())
    first, second = (kernel.bind(n, n=n, s=1.0) for n in (7, 8))
    for bound in (first, second, first, second):
        bound.run(0, ())
    assert [(slots[17], config.gridDimX) for _, slots, config in gpu.launches] == [(n, n) for n in (5, 6, 5, 6, 7, 8, 7, 8)]


def test_a_launch_keeps_its_frame(gpu, encoded, monkeypatch):
    """While the driver reads a frame, another thread that launches the same takes another one."""
    bound, real = bound_to_maps(gpu), driver.cuLaunchKernelEx

    def interrupted(*args):
        monkeypatch.setattr(driver, "cuLaunchKernelEx", real)
        other = threading.Thread(target=bound, args=(5, 160, 320, 480))
        other.start(), other.join()
        gc.collect()
        return real(*args)

    bound(3, 16, 32, 48)
    monkeypatch.setattr(driver, "cuLaunchKernelEx", interrupted)
    bound(3, 1600, 3200, 4800)
    found = [(stream, slots[0], slots[5], slots[8]) for stream, slots, _ in gpu.launches]
    assert found == [(3, 16, 32, 48), (5, 160, 320, 480), (3, 1600, 3200, 4800)] and len(frames_of(bound)) == 3


def test_frames_are_limited(gpu):
    x, gpu.count = on_device(16, 16), 19
    bound = tiles.launch(scale, 1, 32).bind(x, x, 2.0)
    for k in range(100):
        bound(k % 7, 4096 * k, 8192 * k)
        assert len(frames_of(bound)) <= launching.RECENT
    assert [(stream, slots[4], slots[13]) for stream, slots, _ in gpu.launches] == [
        (k % 7, 4096 * k, 8192 * k) for k in range(100)
    ]


@pytest.mark.parametrize("context", [0, 99])
def test_maps_in_a_thread_without_the_context(gpu, encoded, context):
    """They are made in the GPU's own, and the other one comes back; so it is if a map must be moved there."""
    bound = bound_to_maps(gpu)
    for before, addresses in ((context, (16, 32, 48)), (1234, (160, 320, 480)), (context, (1600, 3200, 4800))):
        gpu.current = before
        bound(3, *addresses)
        assert gpu.current == before and not gpu.pushed
    assert [(slots[0], slots[5], slots[8]) for _, slots, _ in gpu.launches] == [
        (16, 32, 48), (160, 320, 480), (1600, 3200, 4800)
    ]  # fmt: skip


def test_an_error_of_the_driver_leaves_no_frame_half_written(gpu, encoded, monkeypatch):
    """What it refused is reported, once more in the GPU's own context, and what follows is right."""
    bound, ok = bound_to_maps(gpu), gpu.status
    monkeypatch.setattr(driver, "cuGetErrorName", lambda s: (ok, b"CUDA_ERROR_INVALID_VALUE"))
    monkeypatch.setattr(driver, "cuGetErrorString", lambda s: (ok, b"invalid argument"))
    bound(3, 16, 32, 48)
    for current in (1234, 0):
        gpu.status, gpu.current = driver.CUresult.CUDA_ERROR_INVALID_VALUE, current
        with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE: invalid argument"):
            bound(3, 160, 320, 480)
        with pytest.raises(ValueError, match="multiple of 16 bytes, got 0x8"):
            bound(3, 8, 320, 480)
        assert gpu.current == current and not gpu.pushed
        gpu.status, gpu.current = ok, 1234
        bound(3, 1600, 3200, 4800)
        _, slots, _ = gpu.launches[-1]
        assert (slots[0], slots[5], slots[8]) == (1600, 3200, 4800)


# ---- kernels that say what they take ---------------------------------------------------------------------------------
@cuda.jit
def declares(gQ: tiled(st(64, 64, fp16), 2, 0, 1), gX: array(2), gEnds: ENDS, n: INT, s: FLOAT):
    """Slots 0; 1 to 9; 10 to 16; 17; 18."""


def declared_kernel(ordinal=0):
    return launching.Kernel(declares, 64, None, ordinal)


PLACES = {"ends": 1, "x": 2, "q": 3}  # of addresses, among others


def operand(name, shape, dtype, **changes):
    return Operand(PLACES[name], c_ordered(shape, dtype, 0)._replace(**changes))


def given(**changes):
    q, x, ends = operand("q", (64, 64), "float16"), operand("x", (3, 5), "float32"), operand("ends", (4,), "int32")
    return dict(gQ=q, gX=x, gEnds=ends, n=7, s=1.0) | changes


def test_operands_are_bound_by_name_and_found_by_their_source(gpu, encoded):
    """Wherever a program has their addresses."""
    gpu.count = 19
    bound = declared_kernel().bind(6, **given())
    for stream, addresses in ((5, (1, 16, 32, 48)), (6, [1, 160, 320, 480])):
        bound.run(stream, addresses)
        at, slots, config = gpu.launches[-1]
        assert at == stream and slots[0] == addresses[3]
        assert slots[1:10] == [0, 0, 15, 4, addresses[2], 3, 5, 20, 4] and slots[10:17] == [0, 0, 4, 4, addresses[1], 4, 4]
        assert slots[17:] == [7, 0x3F800000] and (config.gridDimX, config.gridDimY, config.blockDimX) == (6, 1, 64)


def test_two_views_of_one_array(gpu, encoded):
    """Each has its own strides, and both its address."""
    gpu.count = 19
    x = operand("x", (5, 3), "float32")
    bound = declared_kernel().bind(
        (2, 3, 4), **given(gX=x.permuted((1, 0)), gEnds=Operand(PLACES["x"], c_ordered((2,), "int32", 0)))
    )
    bound.run(0, (0, 0, 32, 16))
    (_, slots, config) = gpu.launches[0]
    assert slots[5:10] == [32, 3, 5, 4, 12] and slots[14] == 32 and (config.gridDimY, config.gridDimZ) == (3, 4)


def test_what_is_not_given_is_absent(gpu, encoded):
    """No elements at no address, and no map is made of it."""
    gpu.count = 19
    bound = declared_kernel().bind(1, n=7, s=1.0)
    bound.run(0, ())
    assert not encoded
    pointers = (ctypes.c_uint64 * 19).from_address(frames_of(bound)[0].pointers)
    assert [ctypes.c_uint64.from_address(place).value for place in pointers][1:] == [0] * 16 + [7, 0x3F800000]


WRONG = {
    "unknown": (given(gY=None), TypeError, "^declares has no parameter gY"),
    "no number": (given(n=None), TypeError, "^n: must be a number: n=None"),
    "too large": (given(n=2**31), OverflowError, "^n: 2147483648 does not fit int32"),
    "dtype": (given(gQ=operand("q", (64, 64), "bfloat16")), TypeError, "^gQ: .*of float16, got bfloat16"),
    "address": (given(gQ=operand("q", (64, 64), "float16", past=8)), ValueError, "^gQ: the address must be a multiple of 16"),
    "stride": (given(gQ=operand("q", (64, 64), "float16", strides=(-128, 2))), ValueError, "^gQ: strides must be multiples"),
}


@pytest.mark.parametrize("place", ["gpu", "interpreter"])
@pytest.mark.parametrize("case", WRONG)
def test_a_kernel_refuses_by_the_parameter_s_name(gpu, case, place):
    arguments, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        declared_kernel(0 if place == "gpu" else None).bind(1, **arguments)
    assert not gpu.loaded


@pytest.mark.parametrize(
    "changes",
    [{}, {"gX": None, "gQ": None}, {"gX": operand("x", (5, 3), "bfloat16").permuted((1, 0))}, {"n": -2, "s": 0.5}],
    ids=["all", "absent", "other elements, another order", "numbers"],
)
def test_a_launch_can_be_read_back(gpu, changes):
    """From its parameter block: what it was bound to, for a profile."""
    kernel, arguments = declared_kernel(), given(**changes)
    assert kernel.given(kernel.bind(6, **arguments)) == {name: x for name, x in arguments.items() if x is not None}


@cuda.jit
def climbs(gX: array(2), given: record(gEnds=ENDS, first=INT)):
    """Reads as many tiles as the block's end says."""
    x = zeros(rt(16, 16, fp32))
    for j in range(given.first, given.gEnds[cuda.blockIdx.x]):
        x = x + load(gX, rt(16, 16, fp32), (16 * j, 0))


def test_a_launch_on_a_card_is_counted_here(gpu):
    """Its integers are copied, its floats are not; of many blocks a few stand for all."""
    x, ends = np.full((64, 16), np.nan, np.float32), np.array([1, 2, 3, 4], np.int32)
    kernel = launching.Kernel(climbs, 32, None, 0)
    operands = Operand(0, c_ordered(x.shape, "float32", 0)), Operand(1, c_ordered((4,), "int32", 0))
    bound = kernel.bind(4, gX=operands[0], gEnds=operands[1], first=0)
    addresses = x.ctypes.data, ends.ctypes.data
    counts, kept = rehearsed(bound, None, addresses)
    assert (counts.read, counts.counted, list(kept)) == (10 * 1024 + 4 * 4, 4, [((0, 0, 0), 0)])
    assert counts.once == x.nbytes + ends.nbytes
    counts, _ = rehearsed(bound, None, addresses, sample=1)
    assert (counts.read, counts.counted, counts.clusters) == (4 * (3 * 1024 + 4), 1, 4)
    by_hand, y = tiles.launch(scale, 1, 32), on_device(16, 16)
    parts = parameters(scale, (y, y, 2.0))
    counts, _ = rehearsed(by_hand._bind(parts), origin(by_hand, parts), [y.array.ctypes.data] * 2)
    assert (counts.read, counts.written, counts.once) == (1024, 1024, 2048)
    with pytest.raises(LookupError, match="was bound before it was profiled"):
        rehearsed(by_hand.bind(on_device(16, 16), on_device(16, 16), 2.0), None, (1, 2))


def test_other_elements_are_other_code(gpu, monkeypatch):
    """Decays in bf16, int64 ends: compiled for them, each once."""
    compiled = []
    monkeypatch.setattr(launching, "_machine_code", lambda _, types, target: compiled.append(types) or Compiled(b"", "k", ""))
    kernel, wide = declared_kernel(), given(gEnds=operand("ends", (4,), "int64"))
    for arguments in (given(), wide, given(gX=operand("x", (9, 9), "bfloat16")), given(gX=None), wide, given(n=8)):
        kernel.bind(1, **arguments)
    plain = signature(declares)
    assert compiled == [
        plain,
        (*plain[:2], array_type("int64", 1), *plain[3:]),
        (plain[0], array_type("bfloat16", 2), *plain[2:]),
    ]


def test_a_kernel_without_annotations_is_no_kernel_of_names():
    with pytest.raises(TypeError, match="^takes: what is q, x, k, n"):
        launching.Kernel(takes, 32, None, 0)


def test_a_kernel_is_made_once_for_a_configuration():
    made = []

    class Config(NamedTuple):
        threads: int

    class Family:
        make = staticmethod(lambda config: made.append(config) or (declares, None))

    kernels = [launching.kernel_for(Family, Config(96), ordinal) for ordinal in (0, 0, None, None)]
    assert kernels[0] is kernels[1] is not kernels[2] is kernels[3] and len(made) == 2
    assert [kernel.ordinal for kernel in kernels[::2]] == [0, None] and kernels[0].threads == 96


@pytest.mark.parametrize("ordinal", [None, 0])
def test_the_same_call_in_the_interpreter(gpu, monkeypatch, ordinal):
    """Operands by their source, numbers, what is absent; on host memory, and by TILES_INTERPRET=1 on a GPU's."""
    monkeypatch.setenv("TILES_INTERPRET", str(int(ordinal == 0)))

    @cuda.jit
    def doubles(gX: array(2), gY: array(2), gNone: array(2), gEnds: ENDS, factor: FLOAT):
        rows = rt(16, 16, fp32)
        store(gY, (load(gX, rows, (0, 0)) + load(gNone, rows, (0, 0))) * factor + gEnds[1], (0, 0))

    x, y, ends = np.arange(256, dtype=np.float32).reshape(16, 16), np.zeros((16, 16), np.float32), np.array([0, 7])
    bound = launching.Kernel(doubles, 32, None, ordinal).bind(
        1,
        gX=Operand(2, c_ordered((16, 16), "float32", ordinal)),
        gY=Operand(1, c_ordered((16, 16), "float32", ordinal)).permuted((1, 0)),
        gEnds=Operand(0, c_ordered((2,), "int64", ordinal)),
        factor=2.0,
    )
    bound.run(0, [a.ctypes.data for a in (ends, y, x)])
    np.testing.assert_array_equal(y.T, 2 * x + 7)
    assert not gpu.launches


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


def test_threads_share_few_frames(gpu, monkeypatch):
    """However often they take turns in taking and adding them."""
    x, gpu.count, start = on_device(16, 16), 19, threading.Barrier(8)
    monkeypatch.setattr(launching, "RECENT", 4)
    bound = tiles.launch(scale, 1, 32).bind(x, x, 2.0)
    before, failed = sys.getswitchinterval(), []
    sys.setswitchinterval(1e-6)

    def work(n):
        start.wait()
        try:
            for k in range(500):
                bound(n, 4096 * (k % 7), 16)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed and len(frames_of(bound)) <= 4 + 8 and len(gpu.launches) == 4000
    assert [slots[4] % 4096 for _, slots, _ in gpu.launches] == [0] * 4000
