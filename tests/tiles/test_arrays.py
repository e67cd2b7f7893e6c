"""tiles/arrays.py: every framework's arrays are described alike; stand-ins replace what is not installed."""

import contextlib
import ctypes
import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiles import arrays
from tiles.arrays import (
    contiguous,
    current_stream,
    describe,
    empty_like_caller,
    fill,
    finish,
    form,
    numpy_view,
    overlaps,
    overlaps_itself,
    stream_handle,
)

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def facts(array):
    return array.shape, array.strides, array.dtype, array.device


def sample(dtype="bfloat16", shape=(2, 5, 3, 8)):
    return np.arange(np.prod(shape)).reshape(shape).astype(DTYPES[dtype])


@pytest.fixture
def fake_cuda(monkeypatch):
    """A driver with a device 3 whose memory is the host's: memset works, and streams that are waited for are listed."""
    from cuda.bindings import driver

    waited = []

    def memset(itemsize):
        def call(pointer, pitch, bits, width, height, stream):
            for row in range(height):
                data = bits.to_bytes(itemsize, "little") * width
                ctypes.memmove(pointer + row * pitch, data, len(data))
            return (driver.CUresult.CUDA_SUCCESS,)

        return call

    monkeypatch.setattr(driver, "cuMemsetD2D16Async", memset(2))
    monkeypatch.setattr(driver, "cuMemsetD2D32Async", memset(4))
    monkeypatch.setattr(driver, "cuStreamSynchronize", lambda s: (driver.CUresult.CUDA_SUCCESS, waited.append(s))[:1])
    monkeypatch.setattr(driver, "cuPointerGetAttribute", lambda attribute, p: (driver.CUresult.CUDA_SUCCESS, 3))
    monkeypatch.setattr(driver, "cuCtxGetDevice", lambda: (driver.CUresult.CUDA_SUCCESS, 1))
    return waited


# NumPy ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy(dtype):
    x = sample(dtype)[:, ::2]
    array = describe(x, "x")
    assert facts(array) == (x.shape, x.strides, dtype, None)
    assert (array.pointer, array.owner, array.readonly) == (x.ctypes.data, x, False)
    assert array.form is describe(x, "x").form
    assert current_stream(array) == 0


def test_extent():
    flipped = describe(np.zeros((2, 16), np.float16)[::-1], "x")  # with signed strides, first to last is 0 bytes
    assert (flipped.strides, flipped.form.extent) == ((-32, 2), 64)
    assert describe(np.zeros((2, 0, 3)), "x").form.extent == 0


def test_contiguous():
    assert contiguous((2, 3, 4), 2) == (24, 8, 2) and contiguous((5,), 4) == (4,) and contiguous((), 2) == ()


def test_numpy_readonly():
    x = sample()
    x.flags.writeable = False
    view = numpy_view(describe(x, "x"))
    assert describe(x, "x").readonly and not view.flags.writeable
    np.testing.assert_array_equal(view, x)


def test_foreign_byte_order_keeps_its_name():
    assert describe(np.zeros(3, np.dtype(np.float16).newbyteorder()), "x").dtype == ">f2"


@pytest.mark.parametrize("x", [None, 3, [1.0], "q", np.float32(1)])
def test_not_an_array(x):
    with pytest.raises(TypeError, match=r"^q: must be an array with .*not \w+\."):
        describe(x, "q")


@given(st.data())
def test_view_is_the_same_memory(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    x = sample(data.draw(st.sampled_from(list(DTYPES))), shape)
    index = tuple(slice(None, None, data.draw(st.sampled_from([1, 2, -1, -2]))) for _ in shape)
    x = x[index].transpose(data.draw(st.permutations(range(x.ndim))))
    view = numpy_view(describe(x, "x"))
    assert (view.shape, view.dtype) == (x.shape, x.dtype)
    np.testing.assert_array_equal(view, x)
    view[...] = 7
    assert (x == 7).all()


def test_view_keeps_the_owner_alive():
    class Owner(np.ndarray):  # a plain ndarray has no weak references to watch
        pass

    x = np.ones(8, np.float32).view(Owner)
    alive = weakref.ref(x)
    view = numpy_view(describe(x, "x"))
    del x
    gc.collect()
    assert alive() is not None and (view == 1).all()
    del view
    gc.collect()
    assert alive() is None


def test_view_of_device_memory_is_refused():
    array = arrays.Array(4096, form((2,), (2,), "float16", 0, 2), None, arrays.Kind())
    with pytest.raises(ValueError, match="array.device=0"):
        numpy_view(array)


def test_an_empty_array_may_lie_nowhere():
    array = describe(np.zeros((2, 0), np.float32), "x")._replace(pointer=0)
    assert numpy_view(array).shape == (2, 0)


# torch ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch(dtype):
    torch = pytest.importorskip("torch")
    x = torch.arange(240).reshape(2, 5, 3, 8).to(getattr(torch, dtype)).transpose(1, 2)
    array = describe(x, "x")
    size = x.element_size()
    assert facts(array) == ((2, 3, 5, 8), tuple(size * s for s in x.stride()), dtype, None)
    assert array.pointer == x.data_ptr() and array.owner is x
    np.testing.assert_array_equal(numpy_view(array).astype(float), x.double().numpy())
    assert describe(torch.nn.Parameter(x, requires_grad=False), "x").form is array.form


def test_torch_requires_grad():
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^k: requires grad.*torch\.no_grad\(\).*k\.detach\(\)"):
        describe(x, "k")
    describe(x.detach(), "k")
    with torch.no_grad():
        describe(x, "k")


def test_torch_without_memory():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="^v: must lie in host or CUDA memory: device='meta'"):
        describe(torch.zeros(2, 3, device="meta"), "v")
    with pytest.raises(TypeError, match="^v: "):
        describe(torch.eye(3).to_sparse(), "v")


# CuPy, by a stand-in --------------------------------------------------------------------------------------------------


class FakeCuPy:
    """Enough of cupy.ndarray; the class's name and module are CuPy's."""

    def __init__(self, x, device=2):
        self.x, self.shape, self.strides, self.dtype, self.itemsize = x, x.shape, x.strides, x.dtype, x.itemsize
        self.data, self.device = SimpleNamespace(ptr=x.ctypes.data), SimpleNamespace(id=device)


FakeCuPy.__module__, FakeCuPy.__name__ = "cupy", "ndarray"


def test_cupy(monkeypatch):
    entered = []

    class Device:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def __enter__(self):
            entered.append(self.ordinal)

        def __exit__(self, *exc):
            entered.append("left")

    cuda = SimpleNamespace(get_current_stream=lambda ordinal: SimpleNamespace(ptr=100 + ordinal), Device=Device)
    empty = lambda shape, dtype: FakeCuPy(np.empty(shape, dtype))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, empty=empty))
    x = FakeCuPy(sample("bfloat16"))
    array = describe(x, "x")
    assert facts(array) == (x.shape, x.strides, "bfloat16", 2)
    assert current_stream(array) == 102
    out = empty_like_caller(array, (4, 8), "float16")
    assert type(out.owner) is FakeCuPy and facts(out) == ((4, 8), (16, 2), "float16", 2)
    assert entered == [2, "left"]


# __cuda_array_interface__ ---------------------------------------------------------------------------------------------


def interface_of(x, **changes):
    interface = {"version": 3, "shape": x.shape, "strides": x.strides, "typestr": x.dtype.str, "stream": None}
    interface |= {"data": (x.ctypes.data, False)} | changes
    return SimpleNamespace(__cuda_array_interface__=interface, dtype=x.dtype, keep=x)


@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e4m3fn", "float8_e5m2"])  # typestr "<V2", "<V1", "<f1": only .dtype tells
def test_cuda_array_interface(fake_cuda, dtype):
    x = np.ones((2, 5, 3, 16), dtype).swapaxes(1, 2)
    array = describe(interface_of(x, stream=77), "x")
    assert facts(array) == (x.shape, x.strides, dtype, 3)
    assert (array.pointer, array.readonly, current_stream(array)) == (x.ctypes.data, False, 77)


def test_cuda_array_interface_defaults(fake_cuda):
    array = describe(interface_of(sample("float16"), strides=None, data=(0, True)), "x")
    assert facts(array) == ((2, 5, 3, 8), (240, 48, 16, 2), "float16", 1)  # NULL: the current device
    assert array.readonly and current_stream(array) == 0


def test_a_protocol_is_looked_for_in_each_object(fake_cuda):
    """Two objects of one class may differ: the interface is often set on the instance."""
    describe(interface_of(sample()), "x")
    with pytest.raises(TypeError, match="^x: must be an array with"):
        describe(SimpleNamespace(), "x")


def test_cuda_array_interface_masked(fake_cuda):
    with pytest.raises(TypeError, match="^q: masked"):
        describe(interface_of(sample(), mask=object()), "q")


def test_numba_class_has_the_interface():
    """A Numba device array is taken by its interface, which needs no GPU to see."""
    devicearray = pytest.importorskip("numba.cuda.cudadrv.devicearray")
    assert hasattr(devicearray.DeviceNDArray, "__cuda_array_interface__")


# __dlpack__ -----------------------------------------------------------------------------------------------------------


class Exporter:
    """A producer of DLPack capsules that is nobody's array."""

    def __init__(self, x, **fixed):
        self.x, self.fixed = x, fixed

    def __dlpack__(self, **request):
        return self.x.__dlpack__(**(request | self.fixed))

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


@pytest.mark.parametrize("version", [(1, 0), None])  # None: capsules as they were before DLPack 1.0
def test_dlpack(version):
    x = sample("float16")[:, 1::2]
    array = describe(Exporter(x, max_version=version), "x")
    assert facts(array) == (x.shape, x.strides, "float16", None)
    assert array.pointer == x.ctypes.data
    np.testing.assert_array_equal(numpy_view(array), x)


def test_dlpack_bfloat16():
    torch = pytest.importorskip("torch")
    x = torch.arange(12).reshape(3, 4).bfloat16().T
    array = describe(Exporter(x), "x")
    assert facts(array) == ((4, 3), (2, 8), "bfloat16", None)
    np.testing.assert_array_equal(numpy_view(array).astype(float), x.double().numpy())


def test_dlpack_readonly():
    x = sample("float16")
    x.flags.writeable = False
    assert describe(Exporter(x), "x").readonly


def test_dlpack_keeps_the_memory():
    exporter = Exporter(np.full(1000, 3, np.float16))
    view = numpy_view(describe(exporter, "x"))
    exporter.x = None
    gc.collect()
    assert (view == 3).all()


def test_dlpack_errors_name_the_argument():
    unexportable = Exporter(np.zeros(3, np.dtype(np.float16).newbyteorder()))
    with pytest.raises(TypeError, match="^v: "):
        describe(unexportable, "v")
    elsewhere = type("Elsewhere", (Exporter,), {"__dlpack_device__": lambda self: (8, 0)})(sample())
    with pytest.raises(TypeError, match=r"^v: must lie in host or CUDA memory.*\(8, 0\)"):
        describe(elsewhere, "v")


def test_jax():
    jax = pytest.importorskip("jax")
    x = jax.numpy.arange(24, dtype=jax.numpy.bfloat16).reshape(2, 3, 4)
    array = describe(x, "x")
    assert facts(array) == ((2, 3, 4), (24, 8, 2), "bfloat16", None)
    assert array.owner is x and array.readonly
    np.testing.assert_array_equal(numpy_view(array), np.asarray(x))


def test_jax_result_is_written_before_it_is_seen():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((4, 8), jax.numpy.bfloat16)
    first, second = (empty_like_caller(describe(x, "x"), (4, 8), "bfloat16") for _ in range(2))
    assert first.pointer != second.pointer and not first.readonly
    for array, value in ((first, 2), (second, 3)):
        numpy_view(array)[...] = value
        finish(array, 0)
    assert isinstance(first.owner, jax.Array)
    assert float(first.owner.sum()) == 64 and float(second.owner.sum()) == 96 and float(x.sum()) == 32


def test_jax_waits_for_the_stream(fake_cuda):
    kind = object.__new__(arrays.Jax)
    device, host = (arrays.Array(0, form((1,), (4,), "float32", where, 4), None, kind) for where in (0, None))
    finish(device, 5)
    finish(host, 6)
    assert fake_cuda == [5]


def test_jax_tracer_is_no_array():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match="^q: "):
        jax.jit(lambda x: describe(x, "q"))(jax.numpy.ones(3))


# Results, streams, fills ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_like_caller_on_the_host(dtype):
    torch = pytest.importorskip("torch")
    anyones = Exporter(sample("float16"))
    for caller, kind in ((sample(), np.ndarray), (torch.zeros(2, 3), torch.Tensor), (anyones, np.ndarray)):
        out = empty_like_caller(describe(caller, "x"), (2, 3, 8), dtype)
        assert type(out.owner) is kind and not out.readonly
        assert facts(out)[:1] + facts(out)[2:] == ((2, 3, 8), dtype, None)
        assert out.strides == (24 * out.form.itemsize, 8 * out.form.itemsize, out.form.itemsize)


@pytest.mark.parametrize(
    "stream, handle",
    [
        (0, 0),
        (12345, 12345),
        (np.int64(7), 7),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 11)), 11),
        (SimpleNamespace(cuda_stream=12), 12),
        (SimpleNamespace(ptr=13), 13),
    ],
)
def test_stream_handle(stream, handle):
    assert stream_handle(stream) == handle


@pytest.mark.parametrize("stream", [-1, True, "s", 1.5, object()])
def test_stream_handle_refuses(stream):
    with pytest.raises(TypeError, match="^stream: "):
        stream_handle(stream)


def test_torch_stream(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 1000 + ordinal, raising=False)
    host = describe(torch.zeros(2), "x")
    assert current_stream(host) == 0
    assert current_stream(host._replace(form=form((2,), (4,), "float32", 5, 4))) == 1005


class Entered(list):
    """Which context managers a stand-in of a framework has given out that were entered, with their arguments; and left."""

    def manager(self, name):
        @contextlib.contextmanager
        def enter(*args, **options):
            self.append((name, *args, options))
            yield
            self.append(name)

        return enter


@pytest.mark.parametrize("stream, handle", [(77, 77), (arrays.LEGACY_STREAM, 0), (0, 0)])
def test_torch_makes_memory_for_a_stream(stream, handle):
    """torch's allocator reuses memory by the stream that is current when it is asked for it."""
    entered = Entered()
    cuda = SimpleNamespace(ExternalStream=lambda handle, device: ("stream", handle, device), stream=entered.manager("stream"))
    kind = object.__new__(arrays.Torch)
    kind.torch = SimpleNamespace(cuda=cuda)
    with kind.on(stream, 3):
        assert entered == [("stream", ("stream", handle, 3), {})]
    assert entered.pop() == "stream"


def test_cupy_makes_memory_for_a_stream(monkeypatch):
    entered = Entered()
    cuda = SimpleNamespace(Device=entered.manager("device"), ExternalStream=entered.manager("stream"))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    with arrays.CuPy().on(77, 2):
        assert entered == [("device", 2, {}), ("stream", 77, {})]
    assert entered[2:] == ["stream", "device"]


@pytest.mark.parametrize("kind", [arrays.NumPy, arrays.CudaArrayInterface, arrays.DLPack])
def test_others_know_no_memory_of_a_stream(kind):
    with kind().on(77, 0) as nothing:
        assert nothing is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # one driver serves all examples
@given(st.tuples(*[st.integers(0, 3)] * 4), st.permutations(range(3)), st.integers(1, 2), st.sampled_from(list(DTYPES)))
def test_fill_reaches_every_element_and_no_other(fake_cuda, shape, order, step, dtype):
    memory = np.zeros([2 * n for n in shape], DTYPES[dtype])
    x = memory[tuple(slice(0, step * n, step) for n in shape[:3]) + (slice(0, shape[3]),)].transpose(*order, 3)
    array = describe(x, "x")
    on_device = array._replace(form=form(x.shape, x.strides, dtype, 0, x.itemsize))
    for target, value in ((array, 1.0), (on_device, -np.inf)):
        memory[...] = 0
        fill(target, value, 0)
        assert (x == value).all() and (memory != 0).sum() == x.size


def test_fill_of_contiguous_memory_is_one_call(fake_cuda, monkeypatch):
    from cuda.bindings import driver

    calls, success = [], (driver.CUresult.CUDA_SUCCESS,)
    monkeypatch.setattr(driver, "cuMemsetD2D32Async", lambda *call: calls.append(call) or success)
    fill(arrays.Array(4096, form((2, 3, 5), (60, 20, 4), "float32", 0, 4), None, arrays.Kind()), -np.inf, 9)
    assert [call[2:] for call in calls] == [(0xFF800000, 30, 1, 9)]


# Overlap --------------------------------------------------------------------------------------------------------------


def bytes_of(x):
    """The set of bytes that x's elements occupy."""
    base = x.__array_interface__["data"][0]
    starts = (base + np.dot(index, x.strides) for index in np.ndindex(x.shape))
    return [int(start) + byte for start in starts for byte in range(x.itemsize)]


memory = np.zeros(400, np.float16)


@st.composite
def windows(draw):
    """A strided window of one memory, strides >= 0, elements perhaps on top of each other."""
    shape = draw(st.tuples(*[st.integers(0, 3)] * 3))
    strides = tuple(2 * draw(st.integers(0, 20)) for _ in shape)
    return np.lib.stride_tricks.as_strided(memory[draw(st.integers(0, 60)) :], shape, strides)


@given(windows(), windows())
def test_overlaps_is_exact(a, b):
    assert overlaps(describe(a, "a"), describe(b, "b")) == bool(set(bytes_of(a)) & set(bytes_of(b)))


@given(windows())
def test_overlaps_itself_never_misses(x):
    collides = len(set(bytes_of(x))) < len(bytes_of(x))
    assert overlaps_itself(describe(x, "x").form) or not collides


@given(st.permutations(range(4)), st.tuples(*[st.integers(1, 3)] * 4))
def test_no_view_of_a_plain_array_overlaps_itself(order, shape):
    assert not overlaps_itself(describe(np.zeros(shape)[::2, ::-1].transpose(order), "x").form)


# Without frameworks, and with a card ----------------------------------------------------------------------------------


def test_importing_imports_no_framework():
    check = "import sys, tiles.arrays; sys.exit(any(m in sys.modules for m in ('torch', 'cupy', 'jax')))"
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.gpu
def test_torch_on_the_card():
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 3, 4, 8, device="cuda", dtype=torch.bfloat16)
    array = describe(x, "x")
    assert facts(array) == ((2, 3, 4, 8), (192, 64, 16, 2), "bfloat16", x.device.index)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert current_stream(array) == side.cuda_stream == stream_handle(side) != 0
    fill(describe(x[:, ::2], "x"), 2, current_stream(array))
    assert x[:, ::2].eq(2).all() and x[:, 1].eq(0).all()


@pytest.mark.gpu
def test_numba_on_the_card():
    cuda = pytest.importorskip("numba.cuda")
    host = sample("bfloat16")
    x = cuda.to_device(host.view(np.uint16)).view(host.dtype)  # Numba's copies know no bf16
    array = describe(x, "x")
    assert facts(array) == (x.shape, x.strides, "bfloat16", 0)
    out = empty_like_caller(array, (2, 3), "float32")
    fill(out, -np.inf, current_stream(array))
    assert np.isneginf(out.owner.copy_to_host()).all()
    assert describe(cuda.device_array((0, 3), np.float16), "x").device == 0


@pytest.mark.gpu
def test_jax_on_the_card():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((4, 8), jax.numpy.bfloat16)
    if next(iter(x.devices())).platform == "cpu":
        pytest.skip("this JAX has no GPU")
    out = empty_like_caller(describe(x, "x"), (4, 8), "bfloat16")
    fill(out, 3, 0)
    finish(out, 0)
    assert out.device == 0 and float(out.owner.sum()) == 96 and float(x.sum()) == 32
