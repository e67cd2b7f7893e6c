"""tiles/launching/arguments.py: how arguments are typed and packed."""

import ml_dtypes
import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

import tiles
from tiles import bf16, fp16, fp32, st, sv
from tiles.compiling.numba_types import Value
from tiles.launching.arguments import (
    DATA,
    ENDS,
    FLOAT,
    INT,
    array,
    array_slots,
    array_type,
    declared,
    parameter,
    parameters,
    signature,
    tiled,
)
from tiles.launching.arrays import c_ordered
from tiles.types import gl
from tiles.values import tensor

BOX, LINE = st(64, 64, bf16), sv(64, fp32)


@pytest.mark.parametrize(
    ("tile", "given", "axes"),
    [(BOX, (), (1, 3)), (BOX, (3,), (1, 2)), (BOX, (2,), (0, 1)), (BOX, (5,), (3, 4)), (BOX, (3, 0), (0, 2)),
     (BOX, (4, -2, -1), (2, 3)), (LINE, (), (None, 3)), (LINE, (3,), (None, 2)), (LINE, (1,), (None, 0))],
)  # fmt: skip
def test_axes_of_a_tiled_array(tile, given, axes):
    """Those that are said; otherwise of (B, S, H, D) the second and last, and of other ranks the last two, as of tensor."""
    of = tiled(tile, *given)
    assert (of.rows, of.cols) == axes and of.unit == tile.rows
    if given[1:] == () and (rank := of.rank) != 4:
        assert of == tensor(np.zeros((64,) * rank, tile.dtype.np), tile).spec


@pytest.mark.parametrize(
    ("tile", "given", "message"),
    [
        (BOX, (1,), "TMA takes arrays of 2 to 5 axes for st(64, 64, bf16), got rank=1"),
        (LINE, (0,), "TMA takes arrays of 1 to 5 axes"),
        (BOX, (6,), "got rank=6"),
        (BOX, (3, 1, 3), "different axes of an array of 3, got rows=1, cols=3"),
        (BOX, (3, 1, 1), "got rows=1, cols=1"),
        (BOX, (3, -1, 2), "got rows=-1, cols=2"),
        (BOX, (3, None, 2), "got rows=None, cols=2"),
        (LINE, (3, 1, 2), "runs along cols: rows must be None, got rows=1"),
        (LINE, (2, None, 2), "got rows=None, cols=2"),
    ],
)
def test_axes_that_a_tiled_array_does_not_have(tile, given, message):
    with pytest.raises(ValueError, match="^tiled: ") as refused:
        tiled(tile, *given)
    assert message in str(refused.value)


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


@cuda.jit
def numbered(x: array(1, fp32), n: INT, s: FLOAT):
    x[0], x[1] = n // 4, s * n


@pytest.mark.parametrize("ptx", [False, True])
@pytest.mark.parametrize(
    "n, s",
    [(7, 2), (np.int64(7), np.float16(2)), (np.uint8(7), np.float64(2)), (7, True), (True, np.int8(2)), (np.bool_(1), 2.0)],
)
def test_numbers_are_what_the_kernel_declares(n, s, ptx, monkeypatch):
    """Whatever they come as: they are no arrays, though NumPy's have a shape."""
    monkeypatch.setenv("TILES_INTERPRET", "ptx" if ptx else "0")
    x = np.zeros(2, np.float32)
    tiles.launch(numbered, 1, 32)(x, n, s)
    assert list(x) == [n // 4, float(s) * int(n)]
    assert [p.type for p in parameters(numbered, (x, n, s))[1:]] == [types.int32, types.float32]


@pytest.mark.parametrize(
    "n, s, error, words",
    [
        (2.5, 1.0, TypeError, "^n: must be an integer: n=2.5"),
        (np.float64(2), 1.0, TypeError, "^n: must be an integer"),
        (np.array(2), 1.0, TypeError, "^n: must be an integer"),
        ("3", 1.0, TypeError, "^n: must be an integer: n='3'"),
        (None, 1.0, TypeError, "^n: must be an integer: n=None"),
        (2**31, 1.0, OverflowError, "^n: 2147483648 does not fit int32, as which the kernel declares it"),
        (2, 1j, TypeError, "^s: must be a number: s=1j"),
        (2, np.float64(1e300), OverflowError, "^s: 1e.300 does not fit float32"),
    ],
)
def test_a_number_that_is_not_what_the_kernel_declares(n, s, error, words):
    with pytest.raises(error, match=words):
        tiles.launch(numbered, 1, 32)(np.zeros(2, np.float32), n, s)


def test_an_array_is_passed_as_numba_takes_it():
    x = np.zeros((3, 4, 5), np.float16)[:, ::2, ::-1]
    p = parameter("x", x)
    assert p.type == types.Array(types.float16, 3, "A")
    address = x.__array_interface__["data"][0]
    assert p.slots == (0, 0, 3 * 2 * 5, 2, address, 3, 2, 5, 40, 20, 2**64 - 2) and p.place == DATA == 4
    assert p.slots == array_slots(p.array.form, address)
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
    "text": ("a", TypeError, r"x: must be an array or a number: x='a'; .* a kernel closes over: def make"),
    "a type": (bf16, TypeError, r"x: must be an array or a number: x=bf16; "),
    "nothing": (None, TypeError, r"x: must be an array or a number: x=None; "),
    "a list": ([1], TypeError, "x: must be an array, not a list: .*torch.tensor"),
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


def test_defaults_are_not_filled_in():
    kernel = cuda.jit(lambda x, n=3: None)
    with pytest.raises(TypeError, match=r"takes 2 arguments \(x, n\), got 1, and a launch fills in no defaults"):
        parameters(kernel, (1,))


# ---- what kernels say themselves -------------------------------------------------------------------------------------
QUERY = st(64, 128, bf16)


@cuda.jit
def declares(
    gQ: tiled(QUERY), gO: array(4, bf16), gLse: array(3), gEnds: ENDS, gS: tiled(sv(64, fp32), 2, None, 1), n: INT, s: FLOAT
):
    unused = n


def test_a_kernel_says_what_it_takes():
    """Names in order, and the types that arrays of these elements have when they are passed."""
    said = declared(declares.py_func)
    assert list(said) == ["gQ", "gO", "gLse", "gEnds", "gS", "n", "s"]
    assert said["gQ"] == gl(QUERY, 4, 1, 3) == tiles.tensor(np.zeros((1, 64, 1, 128), bf16.np), QUERY, 1).spec
    assert said["gO"] == array_type("bfloat16", 4) and said["gLse"] == array_type("float32", 3) and said["gS"].rank == 2
    assert said["gEnds"] == array_type("int32", 1) and (said["n"], said["s"]) == (types.int32, types.float32)
    expected = [Value(x) if isinstance(x, gl) else x for x in said.values()]
    assert signature(declares) == tuple(expected)


def test_the_types_are_those_of_arguments():
    """A kernel compiled with no array at hand is the one that is launched: the same key on disk."""
    q, o, lse = np.zeros((1, 64, 1, 128), bf16.np), np.zeros((1, 64, 1, 128), bf16.np), np.zeros((1, 1, 64), np.float32)
    given = tiles.tensor(q, QUERY, 1), o, lse, np.zeros(3, np.int32), tiles.tensor(lse[0], sv(64, fp32), None, 1), 3, 0.5
    names = list(declared(declares.py_func))
    assert signature(declares) == tuple(parameter(name, value).type for name, value in zip(names, given, strict=True))


def test_a_kernel_that_says_nothing_of_a_parameter():
    @cuda.jit
    def silent(x: array(2), y, n: INT, z):
        pass

    with pytest.raises(TypeError, match=r"^silent: y, z must be annotated with array\(...\), tiled\(...\), INT or FLOAT"):
        declared(silent.py_func)


@pytest.mark.parametrize("of", [bf16, fp16, fp32])
def test_elements_by_name(of):
    """array(rank, of) is the type of an array whose form has that name."""
    assert array(2, of) == array_type(c_ordered((2, 3), of.np.name, None).dtype, 2)
