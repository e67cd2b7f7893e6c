"""tiles/launching/tensor_maps.py: what TMA is told of an array, as a pure function; and the maps, with a driver that only
takes notes."""

import ctypes
import itertools

import numpy as np
import pytest
from cuda.bindings import driver
from hypothesis import given
from hypothesis import strategies as strategy
from kernels import copies

import tiles
from tiles import bf16, fp16, fp32, st, sv, tensor
from tiles.launching import tensor_maps
from tiles.launching.arrays import Form, c_ordered
from tiles.launching.frameworks import describe
from tiles.types import gl

TILE = st(64, 64, bf16)


def encoded(array, tile, rows=-2, cols=-1):
    return tensor_maps.encode_form(tensor_maps.tma_box(tensor(array, tile, rows, cols).spec), describe(array, "x").form)


def test_of_an_attention_input():
    q = np.zeros((2, 1000, 3, 128), bf16.np)
    e = encoded(q, st(64, 128, bf16), rows=1)
    assert e.dtype == "BFLOAT16" and e.swizzle == "128B"
    assert e.extents == (128, 3, 1000, 2)
    assert e.strides == (128 * 2, 3 * 128 * 2, 1000 * 3 * 128 * 2)
    assert e.box == (64, 1, 64, 1)


def test_l2_fetches_no_more_than_a_row():
    assert encoded(np.zeros((1, 100, 3, 64), bf16.np), TILE, rows=1).promotion == "L2_128B"
    assert encoded(np.zeros((1, 100, 3, 128), bf16.np), st(64, 128, bf16), rows=1).promotion == "L2_256B"


@pytest.mark.parametrize("cols, dtype, panel, swizzle", [(64, fp16, 64, "128B"), (32, bf16, 32, "64B"), (8, fp32, 8, "32B")])
def test_the_box_is_one_panel(cols, dtype, panel, swizzle):
    e = encoded(np.zeros((100, 200), dtype.np), st(16, cols, dtype))
    assert (e.box, e.swizzle) == ((panel, 16), swizzle)


def test_an_axis_of_extent_1_may_have_any_stride():
    x = np.zeros((4, 8, 64), bf16.np)
    odd = np.lib.stride_tricks.as_strided(x, (1, 8, 64), (7, 128, 2))
    assert encoded(odd, TILE).strides == (128, 128)
    column = np.lib.stride_tricks.as_strided(x, (8, 1), (128, 6))
    assert encoded(column, TILE).strides == (128,)
    assert encoded(np.zeros((1, 4), bf16.np), TILE).strides == (16,)


def test_rows_may_be_one():
    x = np.broadcast_to(np.zeros((1, 64), bf16.np), (8, 64))
    assert encoded(x, TILE).strides == (0,)


class Box:
    """TMA, by the encoding: the elements of the box at some coordinates, zeros outside the array."""

    def __init__(self, encoding, array):
        self.encoding, self.array = encoding, array

    def __call__(self, at):
        e, flat = self.encoding, np.frombuffer(np.ascontiguousarray(self.array.base).data, np.uint8)
        start = self.array.__array_interface__["data"][0] - self.array.base.__array_interface__["data"][0]
        size = self.array.itemsize
        out = np.zeros(e.box[::-1], self.array.dtype)
        for index in itertools.product(*map(range, e.box)):
            place = [a + i for a, i in zip(at, index)]
            if all(0 <= p < n for p, n in zip(place, e.extents)):
                offset = start + sum(p * s for p, s in zip(place, (size, *e.strides)))
                out[index[::-1]] = flat[offset : offset + size].view(self.array.dtype)[0]
        return out.reshape(-1) if out.size == 1 else out.squeeze()


@given(strategy.data())
def test_a_box_holds_what_the_tile_holds(data):
    """For arrays of any rank, order of axes and extent: the encoding, read as TMA reads it, gives the interpreter's tile."""
    rank = data.draw(strategy.integers(2, 5))
    order = [*data.draw(strategy.permutations(range(rank - 1))), rank - 1]
    shape = [data.draw(strategy.integers(1, 4)) for _ in order[:-1]] + [8 * data.draw(strategy.integers(1, 3))]
    base = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    view = base.transpose(np.argsort(order))  # the last axis stays last
    inner = data.draw(strategy.integers(1, view.shape[-1]))
    view = view[..., :inner]
    rows = data.draw(strategy.integers(0, rank - 2))
    tile = st(8, 8, fp32)
    source = tensor(view, tile, rows)
    at = [data.draw(strategy.integers(0, n - 1)) for n in view.shape]
    at[rows], at[-1] = at[rows] // 8, at[-1] // 8
    origin = source.spec.origin(at)
    box = Box(tensor_maps.encode_form(tensor_maps.tma_box(source.spec), describe(view, "x").form), view)
    coordinates = [origin[axis] for axis in tensor_maps.tma_axes(source.spec)]
    np.testing.assert_array_equal(np.reshape(box(coordinates), (8, 8)), source.load(at))


def of(*axes, form):
    return tensor_maps.encode_form(tensor_maps.tma_box(gl(TILE, *axes)), form)


BASE = np.zeros((4, 64, 128), bf16.np)
LONG = c_ordered((2**32, 64), "bfloat16", 0)
FAR, LATE = Form((9, 64), (2**40, 2), "bfloat16", 0, 2), Form((9, 64), (128, 2), "bfloat16", 0, 2, 8)
REFUSED = {
    "dtype": (lambda: encoded(BASE.astype(np.float32), TILE), TypeError, "bfloat16, got float32"),
    "rank": (lambda: of(4, 2, 3, form=describe(BASE, "x").form), TypeError, r"4 axes, got shape \(4, 64, 128\)"),
    "empty": (lambda: encoded(BASE[:0], TILE), ValueError, r"got shape \(0, 64, 128\)"),
    "rows": (lambda: encoded(BASE, st(264, 64, bf16)), ValueError, r"at most 256 rows.*264"),
    "two columns": (lambda: encoded(BASE[..., :4:2], TILE), ValueError, r"axis 2.*contiguous.*\(16384, 256, 4\)"),
    "columns": (lambda: encoded(BASE[..., ::2], TILE), ValueError, r"axis 2.*contiguous.*\(16384, 256, 4\)"),
    "stride": (lambda: encoded(np.zeros((4, 64, 132), bf16.np), TILE), ValueError, r"multiples of 16.*264, 2"),
    "negative": (lambda: encoded(BASE[:, ::-1], TILE), ValueError, r"multiples of 16 bytes below.*-256"),
    "extent": (lambda: of(2, 0, 1, form=LONG), ValueError, "4294967296"),
    "far": (lambda: of(2, 0, 1, form=FAR), ValueError, r"below 2\*\*40.*1099511627776"),
    "form": (lambda: of(2, 0, 1, form=LATE), ValueError, "multiple of 16 bytes, and is 8 past one"),
    "address": (lambda: tensor_maps.refuse_address(4104), ValueError, "multiple of 16 bytes, got 0x1008"),
}


def test_the_longest_axis():
    assert of(2, 0, 1, form=c_ordered((2**32 - 1, 64), "bfloat16", 0)).extents == (64, 2**32 - 1)


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    make, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        make()


# ---- maps, with a driver that takes notes ----------------------------------------------------------------------------
class MapInMemory:
    """The driver's object of a map that lies somewhere. The first 8 of its 128 bytes are the array's address."""

    def __init__(self, _ptr):
        self.bytes = (ctypes.c_uint64 * 16).from_address(_ptr)


@pytest.fixture
def place():
    """Memory for a map, and its address."""
    memory = (ctypes.c_uint64 * 16)(4096, *range(15))
    return memory, ctypes.addressof(memory)


def written(encoding, pointer, address):
    """Have the map of the array at `pointer` written to this address."""
    numbers = (ctypes.c_uint64 * len(encoding.numbers))(*encoding.numbers)
    start = ctypes.addressof(numbers)
    places = address, start, start + 8 * len(encoding.extents)
    tensor_maps.write_maps([(0, 0, encoding.constants)], [pointer], tensor_maps.MapPlaces([tensor_maps.MapPlace(*places)]))


@pytest.fixture
def notes(monkeypatch):
    """What the driver is asked to encode, as a list of its arguments, and the addresses it is asked to move a map to."""
    options, u32, u64 = [], ctypes.c_uint32, ctypes.c_uint64
    pointers = [ctypes.c_void_p] * 5

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, u32, *pointers, *[ctypes.c_int] * 4)
    def encode(to, dtype, rank, pointer, extents, strides, box, steps, *words):
        read = [(u64, extents, rank), (u64, strides, max(rank - 1, 1)), (u32, box, rank), (u32, steps, rank)]
        options.append((dtype, rank, pointer, *[list((of * n).from_address(at)) for of, at, n in read], *words))
        u64.from_address(to).value = pointer
        return 0

    def move(tensor_map, pointer):
        options.append(pointer)
        tensor_map.bytes[0] = pointer
        return (driver.CUresult.CUDA_SUCCESS,)

    def find(name, version, flags):
        assert name == b"cuTensorMapEncodeTiled"
        return driver.CUresult.CUDA_SUCCESS, ctypes.cast(encode, ctypes.c_void_p).value, 0

    monkeypatch.setattr(driver, "cuGetProcAddress", find)
    monkeypatch.setattr(driver, "cuTensorMapReplaceAddress", move)
    tensor_maps._map_encoder.cache_clear()
    yield options
    tensor_maps._map_encoder.cache_clear()


def test_a_map_is_moved_to_a_multiple_of_16(notes, place):
    tensor_map = MapInMemory(place[1])
    tensor_maps.set_address(tensor_map, 8192)
    assert list(tensor_map.bytes) == [8192, *range(15)] and notes == [8192]
    with pytest.raises(ValueError, match="multiple of 16 bytes, got 0x1008"):
        tensor_maps.set_address(tensor_map, 4104)
    assert notes == [8192]


def test_what_the_driver_refuses_carries_its_name(notes, place, monkeypatch):
    wrong = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(driver, "cuTensorMapReplaceAddress", lambda *_: (wrong,))
    monkeypatch.setattr(driver, "cuGetErrorName", lambda s: (s, b"CUDA_ERROR_INVALID_VALUE"))
    monkeypatch.setattr(driver, "cuGetErrorString", lambda s: (s, b"invalid argument"))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE: invalid argument"):
        tensor_maps.set_address(MapInMemory(place[1]), 16)


def test_the_driver_hears_the_encoding(notes, place):
    memory, at = place
    e = encoded(np.zeros((2, 1000, 3, 128), bf16.np), st(64, 128, bf16), rows=1)
    written(e._replace(strides=(256, 768, 2**33)), 2**40, at)
    (args,) = notes
    assert args[0] == driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 and args[1:3] == (4, 2**40)
    assert args[3:7] == ([128, 3, 1000, 2], [256, 768, 2**33], [64, 1, 64, 1], [1] * 4)
    assert args[8] == driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    assert args[9] == driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    assert memory[0] == 2**40
    with pytest.raises(ValueError, match="multiple of 16 bytes, got 0x1008"):
        written(e, 4104, at)


def test_the_driver_wants_strides_of_one_axis_too(notes, place):
    """No address of them is CUDA_ERROR_INVALID_VALUE."""
    e = encoded(np.zeros(100, np.float32), sv(64, fp32))
    assert (e.extents, e.strides, e.box, e.swizzle) == ((100,), (), (64,), "NONE")
    written(e, 4096, place[1])
    assert notes[0][0] == driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32 and notes[0][4] == [16]


# ---- on the card -------------------------------------------------------------------------------------------------------
SHAPES = {  # shape, the axis that rows run along, tile
    "rank 2": ((150, 200), 0, TILE),
    "rank 3": ((3, 70, 72), 1, TILE),
    "rank 3, rows first": ((70, 3, 72), 0, TILE),
    "rank 4": ((2, 130, 3, 40), 1, st(128, 64, fp16)),
    "rank 5": ((2, 3, 65, 2, 24), 2, st(64, 32, fp32)),
    "narrow": ((9, 16), 0, st(64, 16, bf16)),
}


def round_trip(shape, rows, tile, to_device, to_host):
    """Copy an array through shared memory, tile by tile; y must be x to the last bit, and nothing beside it touched."""
    x = np.random.default_rng(0).standard_normal((*shape[:-1], shape[-1] + 8)).astype(tile.dtype.np)
    whole = to_device(np.full_like(x, np.nan))
    source, target = to_device(x)[..., : shape[-1]], whole[..., : shape[-1]]
    kernel, smem = copies(tile, len(shape), rows)
    others = [n for axis, n in enumerate(shape) if axis not in (rows, len(shape) - 1)] + [1, 1, 1]
    grid = -(-shape[rows] // tile.rows), -(-shape[-1] // tile.cols), int(np.prod(others))
    a, b = tiles.tensor(source, tile, rows), tiles.tensor(target, tile, rows)
    tiles.launch(kernel, grid, 128, shared=smem)(a, b, others[1], others[2])
    y = to_host(whole)
    assert np.isnan(y[..., shape[-1] :].astype(np.float32)).all()
    np.testing.assert_array_equal(y[..., : shape[-1]], x[..., : shape[-1]])


@pytest.mark.parametrize("case", SHAPES)
def test_round_trip(case):
    round_trip(*SHAPES[case], lambda x: x, lambda x: x)


@pytest.mark.gpu
@pytest.mark.smoke
@pytest.mark.parametrize("case", SHAPES)
def test_round_trip_on_the_card(case):
    torch = pytest.importorskip("torch")

    def to_device(x):
        bits = x.view(f"i{x.itemsize}")
        return (
            torch.from_numpy(bits).cuda().view({"bfloat16": torch.bfloat16}.get(x.dtype.name) or getattr(torch, x.dtype.name))
        )

    def to_host(t):
        tile = SHAPES[case][2]
        return t.view({2: torch.int16, 4: torch.int32}[t.element_size()]).cpu().numpy().view(tile.dtype.np)

    round_trip(*SHAPES[case], to_device, to_host)
