"""tiles/arrays.py: NumPy views of an array, results, streams, fills, overlaps."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import DTYPES, Exporter, bytes_of, facts, sample, windows

from tiles.arrays import Array, Kind, describe, empty_like_caller, fill, form, numpy_view, overlaps, stream_handle


def test_numpy_readonly():
    x = sample()
    x.flags.writeable = False
    view = numpy_view(describe(x, "x"))
    assert describe(x, "x").readonly and not view.flags.writeable
    np.testing.assert_array_equal(view, x)


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
    array = Array(4096, form((2,), (2,), "float16", 0, 2), None, Kind())
    with pytest.raises(ValueError, match="array.device=0"):
        numpy_view(array)


def test_an_empty_array_may_lie_nowhere():
    array = describe(np.zeros((2, 0), np.float32), "x")._replace(pointer=0)
    assert numpy_view(array).shape == (2, 0)


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
    fill(Array(4096, form((2, 3, 5), (60, 20, 4), "float32", 0, 4), None, Kind()), -np.inf, 9)
    assert [call[2:] for call in calls] == [(0xFF800000, 30, 1, 9)]


@given(windows(), windows())
def test_overlaps_is_exact(a, b):
    assert overlaps(describe(a, "a"), describe(b, "b")) == bool(set(bytes_of(a)) & set(bytes_of(b)))
