"""Launching: `tiles.launch(kernel, grid, block, shared=smem)(*args)`, with shared memory, tensor maps, clusters and PDL.

    launch(kernel, grid, block)(q, k, out, 3, 0.5)        once, on the caller's current stream
    bound = launch(kernel, grid, block).bind(q, k, out, 3, 0.5)
    bound(stream, q2.data_ptr(), k2.data_ptr(), out2.data_ptr())     again and again, for other arrays of the same form

and, for kernels that declare their parameters (arguments.py), `Kernel`: machine code is looked up once,
and binding it to lengths, strides and addresses writes numbers into a parameter block.

Where it runs: arrays in device memory on their GPU, arrays in host memory (and a kernel that takes no array) in the
interpreter. TILES_INTERPRET=1 sends device arrays to the interpreter, too: they are copied to the host, and what changed is
copied back; TILES_INTERPRET=ptx runs what kernels are compiled to instead (docs/emulator.md). TILES_SEED=n makes either's order
random, by that seed. TILES_CHECK says how much is checked, TILES_JOBS how many processes run blocks (docs/debugging.md).

How arguments are typed: arrays of rank n as Numba's array(dtype, n, "A"), so strides never cost a compilation; `tensor` as
its TMA map, by value; bool as it is, int as int32, float as float32, so a growing value never costs one either; NumPy's
scalars as their own type, so np.int64(n) where 32 bits are too few.
"""

import functools
import math
import struct
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..compiling.numba_types import Value
from ..types import gl
from . import tensor_maps
from .arguments import (
    DATA,
    Record,
    array_type,
    declared,
    dtype_name,
    encode_form,
    encode_map,
    encode_number,
    find_common_device,
    group_values,
    parameters,
    signature,
    struct_format,
    types_of,
)
from .arrays import ABSENT, Form, Number, Operand, c_ordered
from .bound_launch import BoundKernel, BoundLaunch, FramePool
from .devices import device
from .frameworks import current_stream, finish, stream_handle
from .interpreted_launch import InterpretedLaunch, interprets_all
from .lengths import Length, watched_call
from .loaded_code import LoadedKernel, load
from .recording import RecordedStep
from .recording import now as recording_now

THREADS_END = 1024  # most threads of a block
MAX_CLUSTER = 8  # blocks, on every GPU that has clusters
KERNELS = 1024  # that families' planners remember


watchers: list = []  # functions of (kernel, Numba types, threads, shared), called before each launch


def _notify_watchers(kernel, types, threads, shared):
    for watcher in watchers:
        watcher(kernel, types, threads, shared)


TILES = "tiles"  # the elements of an array that is cut into tiles


def _elements(declared_type):
    """The elements of a declared parameter: TILES, an array's elements by name, or "" for a number."""
    return TILES if isinstance(declared_type, gl) else dtype_name(declared_type.dtype) if hasattr(declared_type, "ndim") else ""


class ParameterPlace(NamedTuple):
    """The place of a declared parameter in the parameter block. type: its Numba type, or the TmaBox of an array that is cut
    into tiles. elements: see `_elements`. place: the slot of its address or number, or the index of its tensor map. first, end:
    the range of its numbers among those of a block, which those of tensor maps end."""

    type: Any
    elements: str
    place: int
    first: int
    end: int


class Kernel:
    """A kernel that declares its arguments (arguments.py), on one GPU or, with no ordinal, in the interpreter: all that
    determines its machine code. It is compiled when it is first bound, and again for arrays of other dtypes than declared.
    TILES_INTERPRET is read once, because reading it costs a call of a new form a microsecond.
    overlaps_previous: see `launch`. cluster: the number of blocks of a cluster."""

    def __init__(self, kernel, threads: int, shared, ordinal: int | None, overlaps_previous: bool = False, cluster: int = 1):
        self.kernel, self.threads, self.shared, self.ordinal = kernel, threads, shared, ordinal
        self.overlaps_previous = overlaps_previous
        self.interpreted = ordinal is None or interprets_all()
        self.title = kernel.py_func.__name__
        self.parameters: dict[str, ParameterPlace] = {}
        self.blank: list[Any] = []  # the numbers of a block without operands
        codes, slots = "<", 0
        maps: dict[str, int] = {}  # {parameter: its slot}
        for name, declared_type in declared(kernel.py_func).items():
            elements, code, first_number = _elements(declared_type), struct_format(declared_type), len(self.blank)
            if elements is TILES:
                self.parameters[name] = ParameterPlace(tensor_maps.tma_box(declared_type), elements, len(maps), 0, 0)
                maps[name] = slots
            else:
                self.blank += [0] * (2 + 2 * declared_type.ndim) if elements else [None]
                self.parameters[name] = ParameterPlace(
                    declared_type, elements, slots + DATA * bool(elements), first_number, len(self.blank)
                )
            codes, slots = codes + code, slots + struct.calcsize("<" + code) // 8
        ranks = []
        for name in maps:
            ranks.append(rank := declared(kernel.py_func)[name].rank)
            first_number, count = len(self.blank), tensor_maps.count_numbers(rank)
            self.parameters[name] = self.parameters[name]._replace(first=first_number, end=first_number + count)
            self.blank += [0] * count
            codes += "Q" * count
        self.format, self.frames = struct.Struct(codes), FramePool(slots, [*maps.values()], ranks)
        self.frames.kernel = self
        self.nbytes = shared.nbytes if shared else 0
        self.cluster = (cluster, 1, 1) if cluster > 1 else None
        self.codes: dict[
            tuple, LoadedKernel
        ] = {}  # {((parameter, dtype), ...) of the arrays with other dtypes than declared: code}

    def bind(self, grid, **operands: Any) -> "BoundLaunch | InterpretedLaunch":
        """The launch of so many blocks. operands: an Operand, a number or a Number for each parameter by its name. An array
        that is not passed is absent: all loads from it are 0, and stores are left out. ValueError, TypeError that name the
        parameter: TMA cannot take an array, a number is missing, there is no such parameter."""
        grid = grid if isinstance(grid, tuple) else (grid, 1, 1)
        if watchers:
            _notify_watchers(self.kernel, signature(self.kernel), self.threads, self.shared)
        if self.interpreted:
            return self._bind_interpreted(grid, operands)
        numbers, plain, maps = self.blank.copy(), [], []
        other_dtypes: tuple[tuple[str, str], ...] = ()
        for name, value in operands.items():
            if name not in self.parameters:
                raise TypeError(f"{self.title} has no parameter {name}")
            declared_type, elements, place, first, end = self.parameters[name]
            if isinstance(value, Number):
                plain.append((place, value.source))
                numbers[first] = 0
            elif not elements:
                numbers[first] = value
            elif value is None:
                continue
            elif elements is TILES:
                encoding = encode_map(name, declared_type, value.form)
                maps.append((place, value.source, encoding.constants))
                numbers[first:end] = encoding.numbers
            else:
                form = value.form
                if form.dtype != elements:
                    other_dtypes += ((name, form.dtype),)
                plain.append((place, value.source))
                numbers[first:end] = encode_form(form)
        try:
            block = watched_call(self.format.pack, *numbers)
        except (struct.error, OverflowError):
            self._check_numbers(operands)
            raise
        code = self.codes.get(other_dtypes) or self._load(other_dtypes)
        shape = (self.threads, 1, 1), self.cluster
        kernel = BoundKernel(code, self.title, *shape, self.nbytes, self.frames, plain, maps, self.overlaps_previous)
        return watched_call(BoundLaunch, kernel, grid, block)

    def bind_declared(self, grid, arrays: Mapping[str, Any], **numbers: Any) -> "BoundLaunch | InterpretedLaunch":
        """`bind` with those of `arrays`, by the names of parameters, that the kernel declares: for a plan of several launches
        that read and write the same arrays."""
        return self.bind(grid, **numbers, **{name: arrays[name] for name in self.parameters if name in arrays})

    def read_arguments(self, bound: "BoundLaunch") -> dict[str, Any]:
        """The arguments that a launch of this kernel was bound to, read from its parameter block: numbers, and an Operand for
        each array, by the parameters' names."""
        numbers, plain = self.format.unpack(bound.block), dict(bound.kernel.plain)
        maps, arguments = {place: source for place, source, _ in bound.kernel.maps}, {}
        other_dtypes = next((dict(other_dtypes) for other_dtypes, code in self.codes.items() if code is bound.kernel.code), {})
        for name, (declared_type, elements, place, first, end) in self.parameters.items():
            if not elements:
                arguments[name] = Number(plain[place]) if place in plain else numbers[first]
            elif elements is TILES and place in maps:
                form = tensor_maps.decode_form(declared_type, numbers[first:end], self.ordinal)
                arguments[name] = Operand(maps[place], form)
            elif elements is not TILES and place in plain:
                _, size, *extents = numbers[first:end]
                shape, strides = tuple(extents[: declared_type.ndim]), tuple(extents[declared_type.ndim :])
                arguments[name] = Operand(
                    plain[place], Form(shape, strides, other_dtypes.get(name, elements), self.ordinal, size)
                )
        return arguments

    def _check_numbers(self, operands):
        """TypeError, OverflowError that name the parameter: a number that is missing, or does not fit."""
        for name, (declared_type, elements, *_) in self.parameters.items():
            if not elements and not isinstance(operands.get(name), Number):
                encode_number(name, declared_type, operands.get(name))

    def _load(self, other_dtypes):
        dtypes = dict(other_dtypes)
        types = [
            array_type(dtypes[name], declared_type.ndim)
            if name in dtypes
            else Value(declared_type)
            if isinstance(declared_type, gl)
            else declared_type
            for name, declared_type in declared(self.kernel.py_func).items()
        ]
        types = group_values(self.kernel, types, Record.type)
        code = load(self.kernel, types, device(self.ordinal), self.nbytes, later=True)
        if code is not None:
            self.codes[other_dtypes] = code
        return code

    def _bind_interpreted(self, grid, operands):
        """The launch as bound for the interpreter, with the errors that binding for a GPU raises."""
        if unknown := operands.keys() - self.parameters.keys():
            raise TypeError(f"{self.title} has no parameter {', '.join(unknown)}")
        self._check_numbers(operands)
        bound = []
        for name, (declared_type, elements, *_) in self.parameters.items():
            value = operands.get(name)
            if value is None and elements is not TILES:
                value = Operand(ABSENT, c_ordered((0,) * declared_type.ndim, elements, None))
            elif value is not None and elements is TILES:
                encode_map(name, declared_type, value.form)
            bound.append((value, declared_type.spec if elements is TILES else None))
        launch = Launch(self.kernel, grid, self.threads, self.shared, None, self.cluster, self.overlaps_previous)
        return InterpretedLaunch(launch, bound, None if self.ordinal is None else device(self.ordinal))


def kernel_for(family, config, ordinal: int | None) -> Kernel:
    """The Kernel of a module's configuration: `family.make(config)` gives a kernel and its shared memory, or None. One whose
    `overlaps_previous` is true is launched so, one with a `cluster` in clusters of so many blocks. Every thread gets the same
    Kernel for a configuration."""
    with _planning:
        return _kernel_for(family, config, ordinal)


_planning = threading.RLock()


@functools.lru_cache(KERNELS)
def _kernel_for(family, config, ordinal):
    kernel, smem = family.make(config)
    options = getattr(config, "overlaps_previous", False), getattr(config, "cluster", 1)
    return Kernel(kernel, config.threads, smem, ordinal, *options)


class Launch:
    """A kernel with grid, block and shared memory: call it with the kernel's arguments, or bind it to them."""

    def __init__(self, kernel, grid, block, shared, stream, cluster, overlaps_previous=False):
        if not hasattr(kernel, "py_func"):
            raise TypeError(f"launch: kernel must be a @cuda.jit function, got {kernel!r}")
        self.kernel, self.shared, self.stream, self.overlaps_previous = kernel, shared, stream, overlaps_previous
        self.grid, self.block = _extents("grid", grid), _extents("block", block)
        self.cluster = cluster and _extents("cluster", cluster)
        threads = self.block[0] * self.block[1] * self.block[2]
        limit = (kernel.targetoptions.get("launch_bounds") or (THREADS_END,))[0]
        if threads > limit:
            raise ValueError(f"launch: block={block} has {threads} threads, but {self.title} is made for up to {limit}")
        if shared is not None and not hasattr(shared, "nbytes"):
            raise TypeError(f"launch: shared must be a tiles.shared(...), got {shared!r}")
        if self.cluster and any(g % c for g, c in zip(self.grid, self.cluster)):
            raise ValueError(f"launch: {cluster=} must divide {grid=}")
        blocks = math.prod(self.cluster or (1,))
        if blocks > MAX_CLUSTER:
            raise ValueError(f"launch: a cluster has at most {MAX_CLUSTER} blocks, got {cluster=}")
        if shared is not None and shared.blocks not in (1, blocks):
            raise ValueError(f"launch: {shared} is for clusters of {shared.blocks} blocks, got {cluster=}")

    @property
    def title(self):
        """The kernel's name, as errors give it."""
        return self.kernel.py_func.__name__

    def __str__(self):
        return f"launch({self.title}, {self.grid}, {self.block})"

    def bind(self, *args) -> "BoundLaunch | InterpretedLaunch":
        """This launch with its arguments, to be repeated with other arrays of the same forms: see Bound. Whether it runs on the
        GPU or in the interpreter is decided here: arrays in host memory, or TILES_INTERPRET=1, mean the interpreter."""
        return self._bind(parameters(self.kernel, args))

    def _bind(self, params, notified=False):
        if watchers and not notified:
            _notify_watchers(self.kernel, types_of(self.kernel, params), math.prod(self.block), self.shared)
        place = find_common_device(params)
        if place is None or interprets_all():
            arrays = iter(range(len(params)))
            values = [
                (p.value if p.array is None else Operand(next(arrays), p.array.form), p.value.spec if p.encoding else None)
                for p in params
            ]
            return InterpretedLaunch(self, values, None if place is None else device(place))
        nbytes = self.shared.nbytes if self.shared else 0
        code = load(self.kernel, types_of(self.kernel, params), device(place), nbytes)
        slots: list[Any] = []
        map_numbers: list[int] = []
        plain, maps, places, ranks, arrays = [], [], [], [], 0
        for p in params:
            if p.encoding:
                maps.append((len(places), arrays, p.encoding.constants))
                places.append(len(slots))
                ranks.append(len(p.encoding.extents))
                map_numbers += p.encoding.numbers
            elif p.array is not None:
                plain.append((len(slots) + p.place, arrays))
            arrays += p.array is not None
            slots.extend(p.slots)
        numbers = *slots, *map_numbers
        block, frames = watched_call(struct.Struct(f"<{len(numbers)}Q").pack, *numbers), FramePool(len(slots), places, ranks)
        kernel = BoundKernel(code, self.title, self.block, self.cluster, nbytes, frames, plain, maps)
        return watched_call(BoundLaunch, kernel.overlapping() if self.overlaps_previous else kernel, self.grid, block)

    def __call__(self, *args, **named) -> None:
        if named:
            raise TypeError(f"{self.title} takes its arguments in their order, without names; got {', '.join(named)}=")
        params = parameters(self.kernel, args)
        bound = self._bind(params)
        arrays = [p.array for p in params if p.array is not None]
        if (recording := recording_now()) is not None:
            sources = [array.pointer for array in arrays]
            launch_value = bound.value if isinstance(bound, Length) else bound
            overlaps = self.overlaps_previous and isinstance(launch_value, BoundLaunch)  # no InterpretedLaunch overlaps another
            return recording.steps.append(RecordedStep.from_places(bound, sources, overlaps))
        if self.stream is not None:
            stream = stream_handle(self.stream)
        else:
            stream = current_stream(arrays[0]) if arrays else 0
        bound.run(stream, [a.pointer for a in arrays])
        for array in arrays:
            finish(array, stream)


MAX_GRID_YZ = 65535  # along a grid's second and third axis: CUDA has no more


def _extents(name, value):
    """A grid, block or cluster as (x, y, z)."""
    extents = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(extents) <= 3 or not all(hasattr(n, "__index__") and n > 0 for n in extents):
        raise ValueError(f"launch: {name} must be a positive integer or a tuple of up to three, got {value!r}")
    if name == "grid" and any(n > MAX_GRID_YZ for n in extents[1:]):
        raise ValueError(f"launch: grid must have at most {MAX_GRID_YZ} blocks along its second and third axis, got {value!r}")
    return tuple([n if isinstance(n, Length) else int(n) for n in extents]) + (1,) * (3 - len(extents))


def launch(kernel, grid, block, *, shared=None, stream=None, cluster=None, overlaps_previous=False) -> Launch:
    """`launch(kernel, grid, block)(*args)` runs a `@cuda.jit` kernel. `.bind(*args)` prepares it to be run often.

    grid: blocks; block: threads; cluster: blocks of a cluster; each an integer or a tuple of up to three. shared: the
    `tiles.shared` storage that the kernel opens. stream: a handle or a stream object; by default the current stream of the
    first array's framework. A launch may be captured in a CUDA graph, even its first one.

    overlaps_previous: programmatic dependent launch (Triton's launch_pdl): the grid may begin before the previous one on the
    stream is done, if the GPU is sm_90 or later. The kernel must call ops.grid.wait() before it writes anything, or reads what
    the previous grid may have written.

    The kernel's arguments: arrays (anything with `__dlpack__` or `__cuda_array_interface__`, NumPy's included),
    `tiles.tensor(...)` for TMA, numbers. All arrays are on one GPU, or all in host memory: then the kernel runs in the
    interpreter.

    ValueError, TypeError: an argument is wrong. RuntimeError: the GPU lacks an instruction, or CUDA's own error by name.
    Hazard: the interpreter found a race, a deadlock or another fault, which the hardware would not report."""
    return Launch(kernel, grid, block, shared, stream, cluster, overlaps_previous)
