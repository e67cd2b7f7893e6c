"""Kernels that say what they take, launched with a driver that runs in host memory."""

import ctypes
import sys
from typing import NamedTuple

import numpy as np
import pytest
from host_driver import on_device, takes
from kernels import scale
from numba import cuda

import tiles
from ops import load, store, zeros
from tiles import fp16, fp32, rt, st
from tiles.compiling.compiler import Compiled
from tiles.launching import bound_launch as bound_launches
from tiles.launching import loaded_code
from tiles.launching.arguments import ENDS, FLOAT, INT, array, array_type, parameters, record, signature, tiled
from tiles.launching.arrays import Operand, c_ordered
from tiles.profile.card import count_on_host, launch_origin

launching = sys.modules["tiles.launching.launch"]


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


def test_launches_of_other_lengths_take_turns_with_frames(gpu, encoded, monkeypatch):
    """Of each other they get a frame, and write all of it anew: extents of maps, numbers, the grid."""
    monkeypatch.setattr(bound_launches, "RECENT", 1)
    gpu.count, kernel = 19, declared_kernel()
    launches = [kernel.bind(n, **given(gQ=operand("q", (64 * n, 64), "float16"), n=n)) for n in (1, 2)]
    for turn, n in enumerate((1, 1, 2, 2, 1, 1, 2, 1)):
        launches[n - 1].run(0, (0, 0, 0, 16 * turn))
        _, slots, config = gpu.launches[-1]
        assert (slots[0], slots[17], config.gridDimX) == (16 * turn, n, n)
        for frame in kernel.frames.recent.values():
            if frame.launch is launches[n - 1]:
                assert [*(ctypes.c_uint64 * 4).from_address(frame.map_places.places[0].address)] == [16 * turn, 64, 64 * n, 0]


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
    (frame,) = bound.kernel.frames.idle
    pointers = (ctypes.c_uint64 * 19).from_address(frame.pointers)
    assert [ctypes.c_uint64.from_address(place).value for place in pointers][1:] == [0] * 16 + [7, 0x3F800000]


def test_a_kernel_takes_what_it_declares(gpu, encoded):
    """Of a plan's arrays those with the names of its parameters; a number or an array by a name that it lacks is an error."""
    gpu.count, kernel, arguments = 19, declared_kernel(), given()
    arrays = {name: arguments.pop(name) for name in ("gX", "gQ", "gEnds")}
    bound = kernel.bind_declared(6, arrays | {"gY": operand("x", (2,), "float32")}, **arguments)
    assert kernel.read_arguments(bound) == given()
    with pytest.raises(TypeError, match="^declares has no parameter m"):
        kernel.bind_declared(6, arrays, **arguments, m=1)


WRONG = {
    "unknown": (given(gY=None), TypeError, "^declares has no parameter gY"),
    "no number": (given(n=None), TypeError, "^n: must be an integer: n=None"),
    "too large": (given(n=2**31), OverflowError, "^n: 2147483648 does not fit int32, as which the kernel declares it"),
    "no integer": (given(n=2.0), TypeError, "^n: must be an integer: n=2.0"),
    "NumPy's, no integer": (given(n=np.float64(2)), TypeError, r"^n: must be an integer: n=np.float64\(2.0\)"),
    "words": (given(s="1"), TypeError, "^s: must be a number: s='1'"),
    "an array": (given(s=np.ones(1)), TypeError, r"^s: must be a number: s=array\(\[1.\]\)"),
    "no float32": (given(s=np.float64(1e300)), OverflowError, "^s: 1e.300 does not fit float32"),
    "dtype": (given(gQ=operand("q", (64, 64), "bfloat16")), TypeError, "^gQ: .*of float16, got bfloat16"),
    "address": (
        given(gQ=operand("q", (64, 64), "float16", misalignment=8)),
        ValueError,
        "^gQ: the address must be a multiple of 16",
    ),
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
    assert kernel.read_arguments(kernel.bind(6, **arguments)) == {name: x for name, x in arguments.items() if x is not None}


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
    counts, record = count_on_host(bound, None, addresses)
    assert (counts.read, counts.counted, list(record)) == (10 * 1024 + 4 * 4, 4, [((0, 0, 0), 0)])
    assert counts.once == x.nbytes + ends.nbytes
    counts, _ = count_on_host(bound, None, addresses, sample=1)
    assert (counts.read, counts.counted, counts.clusters) == (4 * (3 * 1024 + 4), 1, 4)
    by_hand, y = tiles.launch(scale, 1, 32), on_device(16, 16)
    parts = parameters(scale, (y, y, 2.0))
    counts, _ = count_on_host(by_hand._bind(parts), launch_origin(by_hand, parts), [y.array.ctypes.data] * 2)
    assert (counts.read, counts.written, counts.once) == (1024, 1024, 2048)
    with pytest.raises(LookupError, match="was bound before it was profiled"):
        count_on_host(by_hand.bind(on_device(16, 16), on_device(16, 16), 2.0), None, (1, 2))


def test_other_elements_are_other_code(gpu, monkeypatch):
    """Decays in bf16, int64 ends: compiled for them, each once."""
    compiled = []
    monkeypatch.setattr(loaded_code, "machine_code", lambda _, types, *of: compiled.append(types) or Compiled(b"", "k", ""))
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
    with pytest.raises(TypeError, match="^takes: q, x, k, n must be annotated"):
        launching.Kernel(takes, 32, None, 0)


def test_a_kernel_is_made_once_for_a_configuration():
    result = []

    class Config(NamedTuple):
        threads: int

    class Family:
        make = staticmethod(lambda config: result.append(config) or (declares, None))

    kernels = [launching.kernel_for(Family, Config(96), ordinal) for ordinal in (0, 0, None, None)]
    assert kernels[0] is kernels[1] is not kernels[2] is kernels[3] and len(result) == 2
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


def test_frames_know_which_launch_they_are_of(gpu):
    """Of two launches of one kernel that differ in a number, at the same addresses."""
    kernel, gpu.count, heard = declared_kernel(), 19, []

    def launched(bound):
        bound.run(0, ())
        _, slots, config = gpu.launches[-1]  # the frame's own, which the next launch may write to
        heard.append((slots[17], config.gridDimX))

    for n in (5, 6, 5, 6):
        launched(kernel.bind(n, n=n, s=1.0))
    first, second = (kernel.bind(n, n=n, s=1.0) for n in (7, 8))
    for bound in (first, second, first, second):
        launched(bound)
    assert heard == [(n, n) for n in (5, 6, 5, 6, 7, 8, 7, 8)]
