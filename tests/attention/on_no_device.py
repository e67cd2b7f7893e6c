"""A simulated GPU: arrays that claim to lie on it, and a driver that records what launches read."""

import contextlib
import ctypes
import functools
import itertools
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

from cuda.bindings import driver

from tiles.calls import program as programs
from tiles.calls.plan import LruTable
from tiles.compiling.compiler import Compiled
from tiles.launching import arrays as in_memory
from tiles.launching import bound_launch, devices, frameworks, loaded_code, tensor_maps
from tiles.launching.arrays import ITEMSIZE, Array, Form, contiguous
from tiles.launching.frameworks import KIND_OF, Framework
from tiles.targets import HOPPER

launching = sys.modules["tiles.launching.launch"]
MEMORY, ROOM = 2**44, 2**42  # where an array may lie: nobody reads it


class Lent:
    """An array with a given form that claims to lie on a GPU; it has the attributes of a tensor."""

    is_nested = False

    def __init__(self, pointer, form):
        self.pointer, self.form = pointer, form

    def data_ptr(self):
        return self.pointer

    @property
    def shape(self):
        return self.form.shape

    def stride(self):
        return tuple([stride // self.form.itemsize for stride in self.form.strides])


class RecordingAllocator(Framework):
    """An allocator whose arrays lie one after the other. Indexing them gives elements, as with tensors."""

    def __init__(self):
        self.made = []

    def describe(self, x, name):
        return Array(x.pointer, x.form, x, self)

    def reader(self, needed):
        def read(*arrays):
            sort = [x and (x.form.dtype, x.form.device, x.form.readonly) for x in arrays]
            lengths = [x and (x.form.shape, x.stride(), x.form.misalignment if x.pointer else -1) for x in arrays]
            return tuple(sort), tuple(lengths), [x.pointer if x else 0 for x in arrays], None

        return read

    def build_guard(self, arrays, shapes, strides):
        sorts = [x.form.dtype for x in arrays]

        def same(expected, actual):
            return len(expected) == len(actual) and all(n in (None, m) for n, m in zip(expected, actual))

        def check(*others):
            return [x.form.dtype for x in others] == sorts and all(
                same(shape, x.form.shape) and same(steps, x.stride()) for x, shape, steps in zip(others, shapes, strides)
            )

        return check, bool, SimpleNamespace(_current_level=-1), lambda device: 0

    def allocator(self, home, shape, dtype):
        return lambda: self.made.append((shape, dtype)) or Lent(2**60 + len(self.made) * 2**50, None)

    address = staticmethod(Lent.data_ptr)


@contextlib.contextmanager
def noting_driver(monkeypatch):
    """A simulated Hopper GPU whose driver records launches in `.launches`. `.call(program, arrays, options, layout)` returns
    what a call allocated and launched, or its error."""
    ok, kind = driver.CUresult.CUDA_SUCCESS, RecordingAllocator()
    gpu = SimpleNamespace(
        ordinal=0, target=HOPPER, processors=132, cache_bytes=50 * 2**20, shared_bytes=227 * 1024, arch="sm_90a"
    )
    gpu.current = contextlib.nullcontext
    launches, slots_of = [], {}
    monkeypatch.setitem(KIND_OF, Lent, kind)
    for table in ("GUARDED_CALLS", "REMEMBERED"):
        monkeypatch.setattr(programs, table, LruTable(programs.ENTRIES))
    monkeypatch.setattr(programs, "WATCHED_PLANS", LruTable(programs.PLAN_KINDS))
    for module in devices, launching, in_memory:
        monkeypatch.setattr(module, "device", lambda ordinal: gpu)
    monkeypatch.setattr(
        loaded_code, "LoadedKernel", lambda compiled, gpu: SimpleNamespace(allow=lambda n: 0, function=kind, gpu=gpu)
    )
    monkeypatch.setattr(loaded_code, "machine_code", lambda *_: Compiled(b"", "k", ""))
    monkeypatch.setattr(loaded_code, "uncaptured", contextlib.nullcontext)
    monkeypatch.setattr(loaded_code, "_loaded", loaded_code.weakref.WeakKeyDictionary())
    launching._kernel_for.cache_clear()

    def encode(maps, addresses, places):
        for number, source, (dtype, rank, box, steps, words) in maps:
            place, pointer = places.places[number], addresses[source]
            if pointer % 16:
                tensor_maps.refuse_address(pointer)
            numbers = ctypes.string_at(place.extents, 8 * rank), ctypes.string_at(place.strides, 8 * max(rank - 1, 1))
            hashed = hash((dtype, rank, *box, *steps, *words, *numbers))
            ctypes.c_int64.from_address(place.address).value = hashed
            ctypes.c_uint64.from_address(place.address + 8).value = pointer

    monkeypatch.setattr(tensor_maps, "write_maps", encode)
    monkeypatch.setattr(driver, "CUtensorMap", lambda _ptr: _ptr)
    monkeypatch.setattr(
        tensor_maps, "set_address", lambda place, pointer: ctypes.c_uint64.from_address(place + 8).__setattr__("value", pointer)
    )
    real = bound_launch.ParameterFrame

    def frame(frames, config):
        new = real(frames, config)
        slots_of[new.pointers] = frames
        return new

    def launch(config, function, address, extra):
        frames = slots_of[address]
        pointers = (ctypes.c_void_p * frames.slots).from_address(address)
        sizes = [16 if slot in frames.maps else 8 for slot in range(frames.slots)]
        slots = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes)]
        launches.append((config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.sharedMemBytes, slots))
        return (ok,)

    def memset(pointer, pitch, bits, width, height, stream):
        if len(launches) == 1000:  # 2 ** 31 tokens that lie apart would fill all memory with notes
            raise OverflowError("too many pieces")
        launches.append((pointer, pitch, bits, width, height))
        return (ok,)

    monkeypatch.setattr(bound_launch, "ParameterFrame", frame)
    monkeypatch.setattr(driver, "cuLaunchKernelEx", launch)
    monkeypatch.setattr(driver, "cuMemsetD2D16Async", memset)
    monkeypatch.setattr(driver, "cuMemsetD2D32Async", memset)

    def call(program, arrays, options, layout):
        launches.clear(), kind.made.clear()
        try:
            program(None, arrays, options, layout)
        except (TypeError, ValueError, OverflowError) as error:
            return type(error), str(error)
        return list(launches), list(kind.made)

    yield SimpleNamespace(call=call, launches=launches)
    launching._kernel_for.cache_clear()


def lent(draw, argument, shape, dtype, layout, pointer, gaps, past):
    """An array of a canonical shape inside a larger one, in the caller's order of axes. past: how far it begins beyond a
    multiple of ALIGNMENT; None: by one element."""
    size = ITEMSIZE[dtype]
    outer = [n + gap * (axis > 0) for axis, (n, gap) in enumerate(zip(shape, gaps))]
    if gaps[0] == 0:
        outer[-1] = shape[-1]
    strides = contiguous(tuple(map(max, outer, itertools.repeat(1))), size)
    (_, order) = argument.orders(layout)[len(shape)]
    back = [order.index(axis) for axis in range(len(order))] if order else range(len(shape))
    past = size if past is None else past
    form = Form(tuple(shape[axis] for axis in back), tuple(strides[axis] for axis in back), dtype, 0, size, past)
    return Lent(pointer + past, form)


def fresh(call, *inputs):
    """The result of the call with empty caches."""
    tables = {name: getattr(programs, name) for name in ("GUARDED_CALLS", "REMEMBERED", "WATCHED_PLANS")}
    vars(programs).update({name: LruTable(8) for name in tables})
    try:
        return call(*inputs)
    finally:
        vars(programs).update(tables)


@contextlib.contextmanager
def torch_on_gpu(monkeypatch):
    """`noting_driver`, and torch's CPU tensors said to lie on that GPU: calls on them are planned and launched there."""
    import torch

    def allocator(self, home, shape, dtype):
        return functools.partial(torch.empty, shape, dtype=getattr(torch, dtype))

    with noting_driver(monkeypatch) as noted:
        monkeypatch.setattr(frameworks, "_torch_words", lambda dtype, _: (str(dtype).removeprefix("torch."), dtype.itemsize, 0))
        monkeypatch.setattr(frameworks.Torch, "allocator", allocator)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 0, raising=False)
        # asked before a call is planned, a CPU tensor's own device is none: what is stored for gradients depends on it
        monkeypatch.setattr(devices, "INTERPRETER", devices.device(0))
        yield noted


LIBRARY = tuple([f"{Path(__file__).parents[2] / package}/" for package in ("attention", "fuse", "ops", "tiles")])
GENERATED = "<again>", "<lengths>"  # of remembered_calls.py and lengths.py


def library_calls(call):
    """How many Python functions of the library a call runs: what it costs the host, on a machine that may be busy."""
    count = 0

    def profile(frame, event, _):
        nonlocal count
        file = frame.f_code.co_filename
        count += event == "call" and (file.startswith(LIBRARY) or file in GENERATED)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def usual_calls(call, numbers, warm=20):
    """The median of `library_calls` of call(number), after the first ones."""
    return statistics.median([library_calls(functools.partial(call, n)) for n in numbers][warm:])
