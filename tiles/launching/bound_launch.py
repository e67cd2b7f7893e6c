"""Launches that are bound to everything but addresses: parameter blocks, into which each call writes its addresses."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from cuda.bindings import driver

from . import tensor_maps
from .devices import check
from .loaded_code import LoadedKernel

RECENT = 16  # frames that a kernel keeps, of 3 KB each with four tensor maps


class FramePool:
    """Parameter blocks for one kernel's launches. slots: 8-byte slots of the kernel's arguments. maps: which of them stand for
    tensor maps. ranks: how many axes the array of each map has.

    recent: the frames that no launch uses now, least recently used first. The key is (launch, stream, addresses); without
    tensor maps it is (launch, stream), for then writing the addresses is as quick as looking them up. A launch takes its
    frame out and puts it back at the end, so no two threads write to one frame, and alternating inputs find the maps that
    were encoded for them. There are RECENT frames, and as many more as threads launch at once.

    idle: frames for launches that never ran before, which are those of a new length: most of them come once, and looking them
    up and evicting other frames would cost more than writing them."""

    def __init__(self, slots: int, maps: Sequence[int], ranks: Sequence[int]):
        self.slots, self.maps, self.ranks = slots, maps, ranks
        self.kernel: Any = None  # the Kernel (launch.py), if it has declared its arguments
        self.numbers = slots + sum(map(tensor_maps.count_numbers, ranks))  # of a block
        map_bytes = tensor_maps.MAP_ALIGNMENT + tensor_maps.MAP_BYTES * len(maps)
        self.memory = ctypes.c_uint64 * (map_bytes // 8 + self.numbers + slots)
        self.recent: dict[tuple, ParameterFrame] = {}  # an OrderedDict would take 0.3 us more
        self.idle: list[ParameterFrame] = []

    def like(self) -> "FramePool":
        """Another one for the same kernel."""
        other = FramePool(self.slots, self.maps, self.ranks)
        other.kernel = self.kernel
        return other

    def choose_frame_to_overwrite(self, launch: "BoundLaunch") -> "ParameterFrame | None":
        """The frame to overwrite: one that was written for this launch, so that only addresses are written, or the one that was
        not used for the longest time. None as long as another may be made."""
        frame = None
        while len(self.recent) >= RECENT:
            try:
                for key in self.recent if launch.encoded is not None else ():
                    if key[0] is launch:
                        break
                else:
                    key = next(iter(self.recent))
                frame = self.recent.pop(key)
            except (KeyError, RuntimeError, StopIteration):  # another thread took one meanwhile, or added one
                continue
        return frame


class ParameterFrame:
    """The parameter block of a launch that is about to be made: tensor maps, the block of numbers, and the addresses through
    which the driver copies maps and slots. It belongs to one thread at a time; the driver has copied it when a launch returns.

    launch: the BoundLaunch that it was written for. addresses: of the arrays. block_view, map_views: views of its block, and of
    its maps. map_places: of these maps."""

    __slots__ = (
        "addresses", "block_view", "config", "first", "grid", "launch", "map_places", "map_views", "maps", "memory", "pointers",
        "stream",
    )  # fmt: skip

    def __init__(self, frames: FramePool, config: driver.CUlaunchConfig):
        slots, count = frames.slots, len(frames.maps)
        self.memory = memory = frames.memory()
        start = ctypes.addressof(memory)
        aligned = -(-start // tensor_maps.MAP_ALIGNMENT) * tensor_maps.MAP_ALIGNMENT
        places = [aligned + tensor_maps.MAP_BYTES * n for n in range(count)]
        at = aligned + tensor_maps.MAP_BYTES * count  # of the block: slots, then the numbers of maps
        self.pointers, self.first = at + 8 * frames.numbers, (at - start) // 8
        pointers = [at + 8 * n for n in range(slots)]
        map_places, numbers_at = [], at + 8 * slots
        for slot, place, rank in zip(frames.maps, places, frames.ranks):
            pointers[slot] = place
            map_places.append(tensor_maps.MapPlace(place, numbers_at, numbers_at + 8 * rank))
            numbers_at += 8 * tensor_maps.count_numbers(rank)
        self.map_places = tensor_maps.MapPlaces(map_places)
        last = self.first + frames.numbers
        memory[last : last + slots] = pointers  # type: ignore[assignment]
        view = memoryview(memory).cast("B")
        self.block_view = view[at - start : self.pointers - start]
        self.map_views = [view[place - start : place - start + tensor_maps.MAP_BYTES] for place in places]
        self.maps = [driver.CUtensorMap(_ptr=place) for place in places]
        self.config, self.stream = config, -1
        self.launch: BoundLaunch | None = None
        self.addresses: Sequence[int] = ()
        self.grid: Sequence[int] = ()

    def write(self, launch: "BoundLaunch", stream: int, addresses) -> None:
        """Fill the frame with the launch's block, the stream and the addresses. Some CUDA context must be current. After an
        error the frame must not be used."""
        config, maps = self.config, launch.kernel.maps
        if self.launch is not launch:
            self.block_view[:] = launch.block
            if self.grid != launch.grid:
                config.gridDimX, config.gridDimY, config.gridDimZ = self.grid = launch.grid
        if launch.encoded is None:
            if maps:
                tensor_maps.write_maps(maps, addresses, self.map_places)
            if launch.launched:
                launch.encoded = [bytes(self.map_views[place]) for place, *_ in maps]
        else:
            if self.launch is not launch:
                for one, encoded in zip(maps, launch.encoded):  # unpacking would take longer
                    self.map_views[one[0]][:] = encoded
            for place, source, _ in maps:
                tensor_maps.set_address(self.maps[place], addresses[source])
        self.launch = launch
        self.write_addresses(launch, addresses)
        if stream != self.stream:
            config.hStream, self.stream = driver.CUstream(stream), stream

    def write_addresses(self, launch: "BoundLaunch", addresses) -> None:
        """Write the addresses of the arrays that have no maps. The frame must have been written for this launch already."""
        memory, first = self.memory, self.first
        for slot, source in launch.kernel.plain:
            memory[first + slot] = addresses[source]
        self.addresses = tuple(addresses)


class BoundKernel(NamedTuple):
    """A kernel, and all that its launches have in common whatever the lengths. frames: the kernel's FramePool. plain: (slot,
    place among the addresses) for each array, and each number that comes with the addresses. maps: (which of the frame's maps,
    place among the addresses, what it is encoded with) for each tensor. late: see `overlapping`."""

    code: LoadedKernel
    title: str
    threads: tuple[int, int, int]
    cluster: tuple[int, int, int] | None
    nbytes: int
    frames: FramePool
    plain: Sequence[tuple[int, int]]
    maps: Sequence[tuple[int, int, tensor_maps.MapConstants]]
    overlaps_previous: bool = False
    late: "BoundKernel | None" = None

    def overlapping(self) -> "BoundKernel":
        """This kernel for launches that overlap the previous one, of which some may have to wait for it (`without_overlap`). A
        frame has a configuration, so those have frames of their own."""
        return self._replace(frames=self.frames.like(), overlaps_previous=True, late=self)

    def configuration(self) -> driver.CUlaunchConfig:
        """The driver's launch configuration, without grid and stream, which ParameterFrame.write adds."""
        config = driver.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads
        config.sharedMemBytes = self.nbytes
        attributes = []
        if self.cluster:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimension = attributes[-1].value.clusterDim
            dimension.x, dimension.y, dimension.z = self.cluster
        if self.overlaps_previous and self.code.gpu.target.has_early_launch:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        if attributes:
            config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def write_frame(self, frame: ParameterFrame | None, launch: "BoundLaunch", stream: int, addresses) -> ParameterFrame:
        """Write a launch into the frame, or a new one, and return it. If another context, or none, is current on this thread,
        the driver refuses to encode maps: checking first would cost every call a quarter of a microsecond."""
        try:
            frame = frame or ParameterFrame(self.frames, self.configuration())
            frame.write(launch, stream, addresses)
        except RuntimeError:
            with self.code.gpu.current():
                frame = ParameterFrame(self.frames, self.configuration())
                frame.write(launch, stream, addresses)
        return frame

    def relaunch_in_context(self, frame: ParameterFrame) -> None:
        """Launch once more, with the GPU's own context, after the driver has refused. RuntimeError: it refuses again."""
        with self.code.gpu.current():
            (status,) = driver.cuLaunchKernelEx(frame.config, self.code.function, frame.pointers, 0)
        try:
            check((status,))
        except RuntimeError as error:
            raise RuntimeError(f"{frame.launch} on {self.code.gpu}: {error}") from None


class BoundLaunch:
    """A launch that needs only a stream and addresses: `bound(stream, *addresses)`.

    stream: a handle. addresses: those of the arrays and of the tensors' arrays, in the order of the kernel's arguments; each
    must point to an array of the form that was bound, and a tensor's be a multiple of 16. Numbers stay as they were bound.
    Any number of threads may call it at once: each takes a frame that no other thread uses, or makes one.

    block: the kernel's arguments without addresses, in slots of 8 bytes, and behind them the extents and strides of tensors.
    launched: did it run before? encoded: the tensor maps, each with some address, from the second time on. late: see
    `without_overlap`."""

    of_lengths = True
    __slots__ = ("block", "encoded", "grid", "kernel", "late", "launched")

    def __init__(self, kernel: BoundKernel, grid: tuple[int, int, int], block: bytes):
        self.kernel, self.grid, self.block = kernel, grid, block
        self.launched = False
        self.encoded: list[bytes] | None = None
        self.late: BoundLaunch | None = None

    def __call__(self, stream: int, *addresses: int) -> None:
        count = len(self.kernel.plain) + len(self.kernel.maps)
        if len(addresses) != count:
            raise TypeError(f"{self} takes {count} addresses, got {len(addresses)}")
        self.run(stream, addresses)

    def without_overlap(self) -> "BoundLaunch":
        """This launch, made to wait for the previous one. Few are asked for it, and those of a new length are made once."""
        if self.late is None and self.kernel.late:
            self.late = BoundLaunch(self.kernel.late, self.grid, self.block)
        return self.late or self

    def run(self, stream: int, addresses) -> None:
        """Launch, with a sequence of addresses from which each array of the launch takes the one at its place
        (Operand.source)."""
        kernel = self.kernel
        frames, key = kernel.frames, None
        if self.launched:
            key = (self, stream, tuple(addresses)) if kernel.maps else (self, stream)
            frame = frames.recent.pop(key, None)
            if frame is None:
                frame = kernel.write_frame(frames.choose_frame_to_overwrite(self), self, stream, addresses)
            elif not kernel.maps and frame.addresses != addresses:
                frame.write_addresses(self, addresses)
        else:
            try:
                frame = frames.idle.pop()
                frame.write(self, stream, addresses)
            except (IndexError, RuntimeError):  # none is idle, or see write_frame
                frame = kernel.write_frame(None, self, stream, addresses)
            self.launched = True
        (status,) = driver.cuLaunchKernelEx(frame.config, kernel.code.function, frame.pointers, 0)
        if status:
            kernel.relaunch_in_context(frame)
        if key is None:
            frames.idle.append(frame)
        else:
            frames.recent[key] = frame

    def __str__(self):
        return f"launch({self.kernel.title}, {self.grid}, {self.kernel.threads})"
