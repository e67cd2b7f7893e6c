"""tiles/launching/frameworks.py: every framework's arrays are described alike; stand-ins replace what is not installed."""

import contextlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from samples import DTYPES, Exporter, facts, made_like, sample

from tiles.launching import frameworks
from tiles.launching.arrays import c_ordered, fill, numpy_view
from tiles.launching.devices import INTERPRETER
from tiles.launching.frameworks import current_stream, describe, finish, kind_of, processors, stream_handle


def view_of(array):
    """The described array's elements, as a NumPy array that shares its memory."""
    return numpy_view(array.pointer, array.form, array)


def fill_array(array, value, stream):
    fill(array.pointer, array.form, value, stream)


# ---- NumPy -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy(dtype):
    x = sample(dtype)[:, ::2]
    array = describe(x, "x")
    assert facts(array) == (x.shape, x.strides, dtype, None)
    assert (array.pointer, array.owner, array.readonly) == (x.ctypes.data, x, False)
    assert array.form == describe(x, "x").form
    assert current_stream(array) == 0


def test_foreign_byte_order_keeps_its_name():
    assert describe(np.zeros(3, np.dtype(np.float16).newbyteorder()), "x").dtype == ">f2"


@pytest.mark.parametrize("x", [None, 3, [1.0], "q", np.float32(1)])
def test_not_an_array(x):
    with pytest.raises(TypeError, match=r"^q: must be an array(, not a list: q=| with .*not \w+\.)"):
        describe(x, "q")


def test_processors():
    """Of what works on an array."""
    assert processors(np.zeros(3)) == INTERPRETER.processors
    with pytest.raises(TypeError, match="^x: must be an array"):
        processors(3)


# ---- torch -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch(dtype):
    torch = pytest.importorskip("torch")
    x = torch.arange(240).reshape(2, 5, 3, 8).to(getattr(torch, dtype)).transpose(1, 2)
    array = describe(x, "x")
    size = x.element_size()
    assert facts(array) == ((2, 3, 5, 8), tuple(size * s for s in x.stride()), dtype, None)
    assert array.pointer == x.data_ptr() and array.owner is x
    np.testing.assert_array_equal(view_of(array).astype(float), x.double().numpy())
    assert describe(torch.nn.Parameter(x, requires_grad=False), "x").form == array.form


def test_torch_requires_grad():
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^k: requires grad.*torch\.no_grad\(\).*k\.detach\(\)"):
        describe(x, "k")
    describe(x.detach(), "k")
    with torch.no_grad():
        describe(x, "k")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_torch_nested(layout):
    torch = pytest.importorskip("torch")
    x = torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(4, 2)], layout=getattr(torch, layout))
    with pytest.raises(TypeError, match=r"^q: is a NestedTensor, .* q\.values\(\)\[None\], and cu_seqlens=q\.offsets\(\)"):
        describe(x, "q")


def test_torch_tangent():
    torch = pytest.importorskip("torch")
    import torch.autograd.forward_ad as forward_ad

    x = torch.zeros(2, 3)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=r"^k: has a tangent.*forward-mode derivatives.*k\.detach\(\)"):
            describe(forward_ad.make_dual(x, x), "k")
        describe(x, "k")


def test_torch_without_memory():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="^v: must lie in host or CUDA memory: device='meta'"):
        describe(torch.zeros(2, 3, device="meta"), "v")
    with pytest.raises(TypeError, match=r"^v: must be dense, as v\.to_dense\(\) is: v\.layout=torch\.sparse_coo"):
        describe(torch.eye(3).to_sparse(), "v")
    rows = []
    with pytest.raises(TypeError, match=r"^v: stands for many gradients at once.*torch\.func\.vjp and torch\.vmap"):
        x = torch.ones(3, requires_grad=True) * 1
        x.register_hook(lambda g: rows.append(describe(g, "v")))
        torch.autograd.grad(x, x, torch.eye(3), is_grads_batched=True)
    assert not rows


def test_torch_views_whose_numbers_are_not_what_lies_in_memory():
    """torch negates and conjugates some views when they are read: an address says nothing of it."""
    torch = pytest.importorskip("torch")
    x = torch.complex(torch.zeros(4, 8), torch.ones(4, 8))
    with pytest.raises(TypeError, match=r"^sin: torch negates this view as it is read; pass sin\.resolve_neg\(\)"):
        describe(x.conj().imag, "sin")
    with pytest.raises(TypeError, match=r"^x: torch conjugates this view as it is read; pass x\.resolve_conj\(\)"):
        describe(x.conj(), "x")
    assert describe(x.conj().imag.resolve_neg(), "sin").form.shape == (4, 8)
    read = kind_of(x, "x").reader({"x": True, "y": False})
    assert read(x.imag, None)[0] != read(x.conj().imag, None)[0] == read(x.conj().imag, None)[0]
    assert read(x.imag, None)[1] == read(x.conj().imag, None)[1]


def test_torch_stream(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 1000 + ordinal, raising=False)
    host = describe(torch.zeros(2), "x")
    assert current_stream(host) == 0
    assert current_stream(host._replace(form=c_ordered((2,), "float32", 5))) == 1005


# ---- CuPy, by a stand-in ---------------------------------------------------------------------------------------------
class FakeCuPy:
    """Enough of cupy.ndarray; the class's name and module are CuPy's."""

    def __init__(self, x, device=2):
        self.x, self.shape, self.strides, self.dtype, self.itemsize = x, x.shape, x.strides, x.dtype, x.itemsize
        self.data, self.device = SimpleNamespace(ptr=x.ctypes.data), SimpleNamespace(id=device)


FakeCuPy.__module__, FakeCuPy.__name__ = "cupy", "ndarray"


def test_cupy(monkeypatch):
    entered = []

    class CupyDevice:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def __enter__(self):
            entered.append(self.ordinal)

        def __exit__(self, *exc):
            entered.append("left")

    cuda = SimpleNamespace(get_current_stream=lambda ordinal: SimpleNamespace(ptr=100 + ordinal), Device=CupyDevice)
    empty = lambda shape, dtype: FakeCuPy(np.empty(shape, dtype))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, empty=empty))
    x = FakeCuPy(sample("bfloat16"))
    array = describe(x, "x")
    assert facts(array) == (x.shape, x.strides, "bfloat16", 2)
    assert current_stream(array) == 102
    out = made_like(array, (4, 8), "float16")
    assert type(out.owner) is FakeCuPy and facts(out) == ((4, 8), (16, 2), "float16", 2)
    assert entered == [2, "left"]


# ---- __cuda_array_interface__ ----------------------------------------------------------------------------------------
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


def test_numpy_masked():
    """A class of NumPy's that is an array, too: what its mask hides would be computed with."""
    with pytest.raises(TypeError, match="^q: masked arrays are not supported"):
        describe(np.ma.masked_array(np.ones(3), [0, 1, 0]), "q")
    assert describe(np.ones(3).view(type("Mine", (np.ndarray,), {})), "q").shape == (3,)


def test_numba_class_has_the_interface():
    """A Numba device array is taken by its interface, which needs no GPU to see."""
    devicearray = pytest.importorskip("numba.cuda.cudadrv.devicearray")
    assert hasattr(devicearray.DeviceNDArray, "__cuda_array_interface__")


# ---- __dlpack__, JAX -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", [(1, 0), None])  # None: capsules as they were before DLPack 1.0
def test_dlpack(version):
    x = sample("float16")[:, 1::2]
    array = describe(Exporter(x, max_version=version), "x")
    assert facts(array) == (x.shape, x.strides, "float16", None)
    assert array.pointer == x.ctypes.data
    np.testing.assert_array_equal(view_of(array), x)


def test_dlpack_bfloat16():
    torch = pytest.importorskip("torch")
    x = torch.arange(12).reshape(3, 4).bfloat16().T
    array = describe(Exporter(x), "x")
    assert facts(array) == ((4, 3), (2, 8), "bfloat16", None)
    np.testing.assert_array_equal(view_of(array).astype(float), x.double().numpy())


def test_dlpack_readonly():
    x = sample("float16")
    x.flags.writeable = False
    assert describe(Exporter(x), "x").readonly


def test_dlpack_keeps_the_memory(collect):
    exporter = Exporter(np.full(1000, 3, np.float16))
    view = view_of(describe(exporter, "x"))
    exporter.x = None
    collect()
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
    np.testing.assert_array_equal(view_of(array), np.asarray(x))


def test_jax_result_is_written_before_it_is_seen():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((4, 8), jax.numpy.bfloat16)
    first, second = (made_like(describe(x, "x"), (4, 8), "bfloat16") for _ in range(2))
    assert first.pointer != second.pointer and not first.readonly
    for array, value in ((first, 2), (second, 3)):
        view_of(array)[...] = value
        finish(array, 0)
    assert isinstance(first.owner, jax.Array)
    assert float(first.owner.sum()) == 64 and float(second.owner.sum()) == 96 and float(x.sum()) == 32


def test_jax_waits_for_the_stream(fake_cuda):
    kind = object.__new__(frameworks.Jax)
    device, host = (frameworks.Array(0, c_ordered((1,), "float32", where), None, kind) for where in (0, None))
    finish(device, 5)
    finish(host, 6)
    assert fake_cuda == [5]


def test_jax_tracer_is_no_array():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match="^q: "):
        jax.jit(lambda x: describe(x, "q"))(jax.numpy.ones(3))


# ---- memory of a stream ----------------------------------------------------------------------------------------------
class Entered(list):
    """Which context managers a stand-in of a framework has given out that were entered, with their arguments; and left."""

    def manager(self, name):
        @contextlib.contextmanager
        def enter(*args, **options):
            self.append((name, *args, options))
            yield
            self.append(name)

        return enter


@pytest.mark.parametrize("stream, handle", [(77, 77), (frameworks.LEGACY_STREAM, 0), (0, 0)])
def test_torch_makes_memory_for_a_stream(stream, handle):
    """torch's allocator reuses memory by the stream that is current when it is asked for it."""
    entered = Entered()
    cuda = SimpleNamespace(ExternalStream=lambda handle, device: ("stream", handle, device), stream=entered.manager("stream"))
    kind = object.__new__(frameworks.Torch)
    kind.torch = SimpleNamespace(cuda=cuda)
    with kind.stream_context(stream, 3):
        assert entered == [("stream", ("stream", handle, 3), {})]
    assert entered.pop() == "stream"


def test_cupy_makes_memory_for_a_stream(monkeypatch):
    entered = Entered()
    cuda = SimpleNamespace(Device=entered.manager("device"), ExternalStream=entered.manager("stream"))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    with frameworks.CuPy().stream_context(77, 2):
        assert entered == [("device", 2, {}), ("stream", 77, {})]
    assert entered[2:] == ["stream", "device"]


@pytest.mark.parametrize("kind", [frameworks.NumPy, frameworks.CudaArrayInterface, frameworks.DLPack])
def test_others_know_no_memory_of_a_stream(kind):
    with kind().stream_context(77, 0) as nothing:
        assert nothing is None


# ---- without frameworks, and with a card -----------------------------------------------------------------------------
def test_importing_imports_no_framework():
    check = "import sys, tiles.calls.program; sys.exit(any(m in sys.modules for m in ('torch', 'cupy', 'jax')))"
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
    fill_array(describe(x[:, ::2], "x"), 2, current_stream(array))
    assert x[:, ::2].eq(2).all() and x[:, 1].eq(0).all()


@pytest.mark.gpu
def test_numba_on_the_card():
    cuda = pytest.importorskip("numba.cuda")
    host = sample("bfloat16")
    x = cuda.to_device(host.view(np.uint16)).view(host.dtype)  # Numba's copies know no bf16
    array = describe(x, "x")
    assert facts(array) == (x.shape, x.strides, "bfloat16", 0)
    out = made_like(array, (2, 3), "float32")
    fill_array(out, -np.inf, current_stream(array))
    assert np.isneginf(out.owner.copy_to_host()).all()
    assert describe(cuda.device_array((0, 3), np.float16), "x").device == 0


@pytest.mark.gpu
def test_jax_on_the_card():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((4, 8), jax.numpy.bfloat16)
    if next(iter(x.devices())).platform == "cpu":
        pytest.skip("this JAX has no GPU")
    out = made_like(describe(x, "x"), (4, 8), "bfloat16")
    fill_array(out, 3, 0)
    finish(out, 0)
    assert out.device == 0 and float(out.owner.sum()) == 96 and float(x.sum()) == 32
