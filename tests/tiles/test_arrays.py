"""tiles/launching/arrays.py: forms, NumPy views of an array, fills, where elements lie among each other; results and
streams."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import DTYPES, Exporter, bytes_of, facts, made_like, sample, windows

from tiles.launching.arrays import (
    ALIGNMENT,
    Form,
    Operand,
    ascending,
    c_ordered,
    contiguous,
    fill,
    numpy_view,
    overlap,
    overlaps_itself,
)
from tiles.launching.frameworks import describe, stream_handle


def form_of(x):
    return describe(x, "x").form


def view_of(array):
    """The described array's elements, as a NumPy array that shares its memory."""
    return numpy_view(array.pointer, array.form, array)


# ---- forms -----------------------------------------------------------------------------------------------------------
def test_equal_forms_are_equal():
    """They are keys of what is remembered: nothing is interned."""
    a, b = form_of(np.zeros((2, 3), np.float16)), form_of(np.ones((2, 3), np.float16))
    assert a == b and hash(a) == hash(b) and a != form_of(np.zeros((2, 3), np.int16))


@pytest.mark.parametrize("offset", range(0, 2 * ALIGNMENT, 2))
def test_a_form_says_how_far_its_address_is_past_a_multiple_of_16(offset):
    memory = np.zeros(64, np.float16)
    x = memory[(-memory.ctypes.data % ALIGNMENT + offset) // 2 :]
    assert form_of(x).misalignment == offset % ALIGNMENT


def test_a_form_says_whether_it_may_be_written():
    x = np.zeros(3)
    before = form_of(x)
    x.flags.writeable = False
    assert form_of(x) == before._replace(readonly=True) != before


def test_extent():
    flipped = describe(np.zeros((2, 16), np.float16)[::-1], "x")  # with signed strides, first to last is 0 bytes
    assert (flipped.strides, flipped.form.extent) == ((-32, 2), 64)
    assert describe(np.zeros((2, 0, 3)), "x").form.extent == 0


@pytest.mark.parametrize(
    ("shape", "strides", "past", "at_once"),
    [
        ((3, 5), (32, 2), 0, 32),
        ((3, 5), (32, 2), 8, 8),
        ((3, 5), (36, 2), 8, 4),
        ((3, 5), (-48, 2), 0, 16),
        ((1, 5), (6, 2), 0, None),  # no step is taken along the first axis
        ((3, 5), (0, 2), 4, 4),
    ],
)
def test_the_lowest_bit_says_how_much_can_be_moved_at_once(shape, strides, past, at_once):
    bits = Form(shape, strides, "float16", None, 2, past).bits
    assert (bits & -bits or None) == at_once


def test_contiguous():
    assert contiguous((2, 3, 4), 2) == (24, 8, 2) and contiguous((5,), 4) == (4,) and contiguous((), 2) == ()
    for dtype, size in (("bfloat16", 2), ("float32", 4), ("int64", 8), ("uint8", 1)):
        assert c_ordered((2, 3, 4), dtype, 1) == Form((2, 3, 4), (12 * size, 4 * size, size), dtype, 1, size)


def test_axes_in_another_order_and_one_more():
    x = np.zeros((2, 3, 5), np.float16)
    operand = Operand("x", form_of(x))
    assert operand.permuted((2, 0, 1)) == ("x", form_of(x.transpose(2, 0, 1)))
    for axis in range(4):
        wide = np.broadcast_to(np.expand_dims(x, axis), (*x.shape[:axis], 7, *x.shape[axis:]))
        assert operand.spread(axis, 7).form == form_of(wide)._replace(readonly=False)


# ---- views -----------------------------------------------------------------------------------------------------------


def test_numpy_readonly():
    x = sample()
    x.flags.writeable = False
    view = view_of(describe(x, "x"))
    assert describe(x, "x").readonly and not view.flags.writeable
    np.testing.assert_array_equal(view, x)


@given(st.data())
def test_view_is_the_same_memory(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    x = sample(data.draw(st.sampled_from(list(DTYPES))), shape)
    index = tuple(slice(None, None, data.draw(st.sampled_from([1, 2, -1, -2]))) for _ in shape)
    x = x[index].transpose(data.draw(st.permutations(range(x.ndim))))
    view = view_of(describe(x, "x"))
    assert (view.shape, view.dtype) == (x.shape, x.dtype)
    np.testing.assert_array_equal(view, x)
    view[...] = 7
    assert (x == 7).all()


def test_view_keeps_the_owner_alive(collect):
    class Owner(np.ndarray):  # a plain ndarray has no weak references to watch
        pass

    x = np.ones(8, np.float32).view(Owner)
    alive = weakref.ref(x)
    view = view_of(describe(x, "x"))
    del x
    collect()
    assert alive() is not None and (view == 1).all()
    del view
    collect()
    assert alive() is None


def test_view_of_device_memory_is_refused():
    with pytest.raises(ValueError, match="form.device=0"):
        numpy_view(4096, c_ordered((2,), "float16", 0))


def test_an_empty_array_may_lie_nowhere():
    assert numpy_view(0, c_ordered((2, 0), "float32", None)).shape == (2, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_on_the_host(dtype):
    torch = pytest.importorskip("torch")
    anyones = Exporter(sample("float16"))
    for caller, kind in ((sample(), np.ndarray), (torch.zeros(2, 3), torch.Tensor), (anyones, np.ndarray)):
        out = made_like(describe(caller, "x"), (2, 3, 8), dtype)
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
@given(
    st.tuples(*[st.integers(0, 3)] * 4),
    st.permutations(range(3)),
    st.sampled_from([1, 2, -1, -2]),
    st.sampled_from([1, 2, -2]),
    st.sampled_from(list(DTYPES)),
)
def test_fill_reaches_every_element_and_no_other(fake_cuda, shape, order, step, across, dtype):
    memory = np.zeros([2 * n for n in shape], DTYPES[dtype])
    first, second, third, columns = shape
    x = memory[::step, ::step, ::step, ::across][:first, :second, :third, :columns].transpose(*order, 3)
    array = describe(x, "x")
    for device, value in ((None, 1.0), (0, -np.inf)):
        memory[...] = 0
        fill(array.pointer, array.form._replace(device=device), value, 0)
        assert (x == value).all() and (memory != 0).sum() == x.size


def test_fill_of_contiguous_memory_is_one_call(fake_cuda, monkeypatch):
    from cuda.bindings import driver

    calls, success = [], (driver.CUresult.CUDA_SUCCESS,)
    monkeypatch.setattr(driver, "cuMemsetD2D32Async", lambda *call: calls.append(call) or success)
    fill(4096, c_ordered((2, 3, 5), "float32", 0), -np.inf, 9)
    assert [call[2:] for call in calls] == [(0xFF800000, 30, 1, 9)]


# ---- where elements lie among each other -------------------------------------------------------------------------------
@given(windows(), windows())
def test_overlap_is_exact(a, b):
    (at, mine), (behind, its) = ((x.pointer, x.form) for x in (describe(a, "a"), describe(b, "b")))
    assert overlap(mine, its, behind - at) == bool(set(bytes_of(a)) & set(bytes_of(b)))


def test_what_is_too_hard_to_decide_counts_as_overlapping(monkeypatch):
    def too_hard(*_, max_work):
        raise np.exceptions.TooHardError

    monkeypatch.setattr(np, "shares_memory", too_hard)
    comb = Form((50, 50), (400, 4), "float16", None, 2)  # which no other test has: what was decided is remembered
    assert overlap(comb, comb, 2) and not overlap(comb, comb, comb.extent)


@given(windows())
def test_ascending_has_the_same_elements(x):
    start, up = ascending(form_of(x))
    assert min(up.strides) >= 0
    if x.size:
        assert sorted(bytes_of(numpy_view(describe(x, "x").pointer + start, up))) == sorted(bytes_of(x))


@given(windows())
def test_overlaps_itself_never_misses(x):
    collides = len(set(bytes_of(x))) < len(bytes_of(x))
    assert overlaps_itself(form_of(x)) or not collides


@given(st.permutations(range(4)), st.tuples(*[st.integers(1, 3)] * 4))
def test_no_view_of_a_plain_array_overlaps_itself(order, shape):
    assert not overlaps_itself(form_of(np.zeros(shape)[::2, ::-1].transpose(order)))
