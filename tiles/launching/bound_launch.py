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
    tensor maps.

    recent: the frames that no launch uses now, least recently used first. The key is (contents, stream, addresses); without
    tensor maps it is (contents, stream), for then writing the addresses is as quick as looking them up. A launch takes its
    frame out and puts it back at the end, so no two threads write to one frame, and alternating inputs find the maps that
    were encoded for them. There are RECENT frames, and as many more as threads launch at once.

    idle: frames for contents that were never launched before, which are those of a new length: most of them come once, and
    looking them up and evicting other frames would cost more than writing them."""

    def __init__(self, slots: int, maps: Sequence[int]):
        self.slots, self.maps = slots, maps
        self.kernel: Any = None  # the Kernel (launch.py), if it has declared its arguments
        self.memory = ctypes.c_uint64 * ((tensor_maps.MAP_ALIGNMENT + tensor_maps.MAP_BYTES * len(maps)) // 8 + 2 * slots)
        self.recent: dict[tuple, ParameterFrame] = {}  # an OrderedDict would take 0.3 us more
        self.idle: list[ParameterFrame] = []

    def take_idle(self) -> "ParameterFrame | None":
        """A frame of `idle`, if there is one."""
        try:
            return self.idle.pop()
        except IndexError:
            return None

    def choose_frame_to_overwrite(self, contents: "LaunchContents") -> "ParameterFrame | None":
        """The frame to overwrite: one that holds these contents, so that only addresses are written, or the one that was not
        used for the longest time. None as long as another may be made."""
        frame = None
        while len(self.recent) >= RECENT:
            try:
                for key in self.recent if contents.encoded is not None else ():
                    if key[0] is contents:
                        break
                else:
                    key = next(iter(self.recent))
                frame = self.recent.pop(key)
            except (KeyError, RuntimeError, StopIteration):  # another thread took one meanwhile, or added one
                continue
        return frame


class LaunchContents:
    """The contents of a launch's parameter block, without addresses; compared by identity. block: the kernel's arguments, in
    slots of 8 bytes. plain: (slot, place among the addresses) for each array, and each number that comes with the addresses.
    maps: (which of the frame's maps, place among the addresses, encoding) for each tensor. launched: was it launched before?
    encoded: the maps, each with some address, from the second launch on."""

    __slots__ = ("block", "encoded", "grid", "launched", "maps", "plain")

    def __init__(self, grid: tuple[int, int, int], block: bytes, plain: Sequence, maps: Sequence):
        self.grid, self.block, self.plain, self.maps = grid, block, plain, maps
        self.launched = False
        self.encoded: list[bytes] | None = None


class ParameterFrame:
    """The parameter block of a launch that is about to be made: tensor maps, 8-byte slots, and the addresses through which the
    driver copies both. It belongs to one thread at a time; the driver has copied it when a launch returns.

    contents: the LaunchContents that it holds. addresses: of the arrays. slots_view, map_views: views of its slots, and of its
    maps, which lie at `map_addresses`."""

    __slots__ = (
        "addresses", "config", "contents", "first", "grid", "map_addresses", "map_views", "maps", "memory", "pointers",
        "slots_view", "stream",
    )  # fmt: skip

    def __init__(self, frames: FramePool, config: driver.CUlaunchConfig):
        slots, count = frames.slots, len(frames.maps)
        self.memory = memory = frames.memory()
        start = ctypes.addressof(memory)
        aligned = -(-start // tensor_maps.MAP_ALIGNMENT) * tensor_maps.MAP_ALIGNMENT
        self.map_addresses = places = [aligned + tensor_maps.MAP_BYTES * n for n in range(count)]
        at = aligned + tensor_maps.MAP_BYTES * count  # of the slots
        self.pointers, self.first = at + 8 * slots, (at - start) // 8
        pointers = [at + 8 * n for n in range(slots)]
        for slot, place in zip(frames.maps, places):
            pointers[slot] = place
        memory[self.first + slots : self.first + 2 * slots] = pointers  # type: ignore[assignment]
        view = memoryview(memory).cast("B")
        self.slots_view = view[at - start : at - start + 8 * slots]
        self.map_views = [view[place - start : place - start + tensor_maps.MAP_BYTES] for place in places]
        self.maps = [driver.CUtensorMap(_ptr=place) for place in places]
        self.config, self.stream = config, -1
        self.contents: LaunchContents | None = None
        self.addresses: Sequence[int] = ()
        self.grid: Sequence[int] = ()

    def write(self, contents: LaunchContents, stream: int, addresses) -> None:
        """Fill the frame with the contents, the stream and the addresses. Some CUDA context must be current. After an error the
        frame must not be used."""
        config = self.config
        if self.contents is not contents:
            self.slots_view[:] = contents.block
            if self.grid != contents.grid:
                config.gridDimX, config.gridDimY, config.gridDimZ = self.grid = contents.grid
        if contents.encoded is None:
            for place, source, encoding in contents.maps:
                tensor_maps.write_map(encoding, addresses[source], self.map_addresses[place])
            if contents.launched:
                contents.encoded = [bytes(self.map_views[place]) for place, *_ in contents.maps]
        else:
            if self.contents is not contents:
                for one, encoded in zip(contents.maps, contents.encoded):  # unpacking would take longer
                    self.map_views[one[0]][:] = encoded
            for place, source, _ in contents.maps:
                tensor_maps.set_address(self.maps[place], addresses[source])
        self.contents = contents
        self.write_addresses(contents, addresses)
        if stream != self.stream:
            config.hStream, self.stream = driver.CUstream(stream), stream

    def write_addresses(self, contents: LaunchContents, addresses) -> None:
        """Write the addresses of the arrays that have no maps. The frame must hold these contents already."""
        memory, first = self.memory, self.first
        for slot, source in contents.plain:
            memory[first + slot] = addresses[source]
        self.addresses = tuple(addresses)


class BoundLaunch:
    """A launch that needs only a stream and addresses: `bound(stream, *addresses)`.

    stream: a handle. addresses: those of the arrays and of the tensors' arrays, in the order of the kernel's arguments; each
    must point to an array of the form that was bound, and a tensor's be a multiple of 16. Numbers stay as they were bound.
    Any number of threads may call it at once: each takes a frame that no other thread uses, or makes one.

    frames: the kernel's FramePool."""

    of_lengths = True
    __slots__ = ("cluster", "code", "contents", "frames", "nbytes", "overlaps_previous", "threads", "title")

    def __init__(
        self,
        code: LoadedKernel,
        title: str,
        threads,
        cluster,
        nbytes: int,
        contents: LaunchContents,
        frames: FramePool,
        overlaps_previous=False,
    ):
        self.code, self.title, self.threads, self.cluster, self.nbytes = code, title, threads, cluster, nbytes
        self.contents, self.frames, self.overlaps_previous = contents, frames, overlaps_previous

    def __call__(self, stream: int, *addresses: int) -> None:
        count = len(self.contents.plain) + len(self.contents.maps)
        if len(addresses) != count:
            raise TypeError(f"{self} takes {count} addresses, got {len(addresses)}")
        self.run(stream, addresses)

    def run(self, stream: int, addresses) -> None:
        """Launch, with a sequence of addresses from which each array of the launch takes the one at its place
        (Operand.source)."""
        frames, contents = self.frames, self.contents
        recent, key = frames.recent, None
        if contents.launched:
            key = (contents, stream, tuple(addresses)) if contents.maps else (contents, stream)
            frame = recent.pop(key, None)
            if frame is None:
                frame = self._write(frames.choose_frame_to_overwrite(contents), stream, addresses)
            elif not contents.maps and frame.addresses != addresses:
                frame.write_addresses(contents, addresses)
        else:
            frame = self._write(frames.take_idle(), stream, addresses)
            contents.launched = True
        (status,) = driver.cuLaunchKernelEx(frame.config, self.code.function, frame.pointers, 0)
        if status:
            self._relaunch_in_context(frame)
        if key is None:
            frames.idle.append(frame)
        else:
            recent[key] = frame

    def _write(self, frame, stream, addresses):
        """Write these addresses into the frame, or a new one, and return it. If another context, or none, is current on this
        thread, the driver refuses to encode maps: checking first would cost every call a quarter of a microsecond."""
        try:
            frame = frame or ParameterFrame(self.frames, self.configuration())
            frame.write(self.contents, stream, addresses)
        except RuntimeError:
            with self.code.gpu.current():
                frame = ParameterFrame(self.frames, self.configuration())
                frame.write(self.contents, stream, addresses)
        return frame

    def _relaunch_in_context(self, frame):
        """Launch once more, with the GPU's own context, after the driver has refused. RuntimeError: it refuses again."""
        with self.code.gpu.current():
            (status,) = driver.cuLaunchKernelEx(frame.config, self.code.function, frame.pointers, 0)
        try:
            check((status,))
        except RuntimeError as error:
            raise RuntimeError(f"{self} on {self.code.gpu}: {error}") from None

    def configuration(self):
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

    def __str__(self):
        return f"launch({self.title}, {self.contents.grid}, {self.threads})"


class LaunchWithoutOverlap(NamedTuple):
    """A launch that was bound with overlaps_previous=True, where it must wait for the previous launch. frames: for such
    launches of the kernel."""

    bound: BoundLaunch
    frames: FramePool

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on `stream`, with the arrays at these addresses (see Bound.run)."""
        bound = self.bound
        launch = BoundLaunch(bound.code, bound.title, bound.threads, bound.cluster, bound.nbytes, bound.contents, self.frames)
        launch.run(stream, addresses)
