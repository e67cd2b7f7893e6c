"""Measurements on a GPU: how long launches take, and what the card could do at most; and a launch's work as the interpreter
counts it."""

import contextlib
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver

from ..launching.arguments import group_values
from ..launching.arrays import ABSENT, Form, Operand
from ..launching.devices import Device, check
from ..launching.interpreted_launch import InterpretedLaunch, byte_range, resolve_number
from ..launching.launch import BoundLaunch, Launch
from ..targets import TENSOR_FLOP
from ..values import tensor
from .counts import SAMPLE, choose_clusters, count_clusters

_ATTRIBUTE, _FUNCTION = driver.CUdevice_attribute, driver.CUfunction_attribute
FLUSH = 256 * 2**20  # bytes that are written before each call: more than any L2, and time for the host to queue the launches


class Peaks(NamedTuple):
    """What a card does at most: FLOP/s of 16-bit products at its highest clock, bytes/s of its memory; None: unknown."""

    flop: float | None
    bandwidth: float


def peaks(gpu: Device) -> Peaks:
    """The Peaks of this GPU, from the attributes that its driver reports."""
    clock = gpu.attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_CLOCK_RATE) * 1e3
    memory = gpu.attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE) * 1e3
    width = gpu.attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)
    each = TENSOR_FLOP.get(gpu.target.capability)
    return Peaks(each and each * clock * gpu.processors, 2 * memory * width / 8)


class Code(NamedTuple):
    """What a launch's machine code takes: registers a thread, bytes of local memory a thread (spills), blocks that a
    multiprocessor holds at once."""

    registers: int
    local: int
    ctas_per_sm: int


def code(bound: BoundLaunch) -> Code:
    """The registers, local memory and resident blocks of a launch."""
    kernel = bound.kernel
    function, threads = kernel.code.function, int(np.prod(kernel.threads))
    with kernel.code.gpu.current():
        registers = check(driver.cuFuncGetAttribute(_FUNCTION.CU_FUNC_ATTRIBUTE_NUM_REGS, function))
        local = check(driver.cuFuncGetAttribute(_FUNCTION.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function))
        ctas_per_sm = check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, kernel.nbytes))
    return Code(registers, local, ctas_per_sm)


class Clock:
    """Times every launch of some calls by events before and behind it."""

    def __init__(self, gpu: Device):
        self.gpu = gpu
        with gpu.current():
            self.flush_buffer = check(driver.cuMemAlloc(FLUSH))

    def close(self):
        """Free the card's memory that the profile allocated."""
        with self.gpu.current():
            check(driver.cuMemFree(self.flush_buffer))

    def event(self, stream):
        """An event on the stream, now."""
        event = check(driver.cuEventCreate(0))
        check(driver.cuEventRecord(event, stream))
        return event

    def time_call(self, function, run) -> list[float]:
        """Seconds of each launch of a call, which finds its inputs in memory, not in L2. run: what runs a launch."""
        pairs = []

        def timed(bound, stream, addresses):
            with self.gpu.current():
                before = self.event(stream)
            run(bound, stream, addresses)
            with self.gpu.current():
                pairs.append((before, self.event(stream)))

        with self.gpu.current():
            for _ in range(2):  # on the default stream, for which others wait, unless they say that they do not
                check(driver.cuMemsetD8Async(self.flush_buffer, 0, FLUSH, 0))
        with replace_methods(BoundLaunch, run=timed):
            function()
        seconds = []
        with self.gpu.current():
            check(driver.cuCtxSynchronize())
            for before, after in pairs:
                seconds.append(check(driver.cuEventElapsedTime(before, after)) / 1e3)
                check(driver.cuEventDestroy(before))
                check(driver.cuEventDestroy(after))
        return seconds

    def time_sequence(self, runs) -> float:
        """Seconds of some launches, one after the other: (a bound launch, its stream, addresses) each. They find their inputs
        in memory, and the host is done before the first one begins."""
        with self.gpu.current():
            for _ in range(4):
                check(driver.cuMemsetD8Async(self.flush_buffer, 0, FLUSH, 0))
            before = self.event(runs[0][1])
        for bound, stream, addresses in runs:
            bound.run(stream, addresses)
        with self.gpu.current():
            after = self.event(runs[0][1])
            check(driver.cuCtxSynchronize())
            seconds = check(driver.cuEventElapsedTime(before, after)) / 1e3
            check(driver.cuEventDestroy(before))
            check(driver.cuEventDestroy(after))
        return seconds


def median_total(function, gpu: Device, repeat: int) -> float:
    """Seconds of all launches of a call, one after the other: the median of so many times. They are bound once."""
    runs, run = [], BoundLaunch.run

    def record_run(bound, stream, addresses):
        runs.append((bound, stream, tuple(addresses)))
        run(bound, stream, addresses)

    with replace_methods(BoundLaunch, run=record_run):
        function()
    clock = Clock(gpu)
    try:
        return float(np.median([clock.time_sequence(runs) for _ in range(repeat)]))
    finally:
        clock.close()


def median_times(function, run, gpu: Device, repeat: int) -> list[float]:
    """Seconds of each launch of a call, the median of so many calls. RuntimeError: the calls make different launches."""
    clock = Clock(gpu)
    try:
        rounds = [clock.time_call(function, run) for _ in range(repeat)]
    finally:
        clock.close()
    if len({len(times) for times in rounds}) > 1:
        raise RuntimeError("profile: the function does not make the same launches each time it is called")
    return [float(np.median(times)) for times in zip(*rounds)]


@contextlib.contextmanager
def replace_methods(kind, **methods):
    """A class with other methods for a while. So that launches can be watched, and pay nothing when nobody does."""
    before = {name: getattr(kind, name) for name in methods}
    try:
        for name, method in methods.items():
            setattr(kind, name, method)
        yield
    finally:
        for name, method in before.items():
            setattr(kind, name, method)


# ---- what a launch does, as the interpreter sees it ----------------------------------------------------------------
def count_on_host(bound: BoundLaunch, launch_origin, addresses, sample: int | None = SAMPLE, keep=None):
    """(LaunchCounts, a record) of a launch on a card, see counts.count_clusters: its integers copied, for they may decide how
    much work there is, its other arrays zeros. launch_origin: the launch and its values, if the kernel has not declared its
    arguments. LookupError: it was bound before anybody watched."""
    launch, values = launch_origin or _declared(bound)
    args: Any = []
    memory: dict[tuple, np.ndarray] = {}
    for value, spec in values:
        if isinstance(value, Operand):
            address = 0 if value.source == ABSENT else addresses[value.source]
            value = _stand_in(value.form, address, bound.kernel.code.gpu, memory)
        value = resolve_number(value, addresses)
        args.append(tensor(value, spec.tile, spec.rows, spec.cols, spec.unit) if spec and value is not None else value)
    args = group_values(launch.kernel, args)
    cluster = launch.cluster or (1, 1, 1)
    selection = choose_clusters(launch.grid, cluster, sample)
    return count_clusters(launch.kernel, launch.grid, launch.block[0], args, launch.shared, cluster, selection, keep)


def _declared(bound):
    kernel = bound.kernel.frames.kernel
    if kernel is None:
        raise LookupError(f"{bound} was bound before it was profiled: profile the launch, with its arguments")
    interpreted = kernel._bind_interpreted(bound.grid, kernel.read_arguments(bound))
    return interpreted.launch, interpreted.values


def launch_origin(launch: Launch, params):
    """(launch, its values) that `count_on_host` takes, of a launch with these parameters."""
    number, values = iter(range(len(params))), []
    for p in params:
        values.append((p.value if p.array is None else Operand(next(number), p.array.form), p.encoding and p.value.spec))
    InterpretedLaunch(launch, values, None)  # ValueError: the interpreter does not run such blocks
    return launch, values


def _stand_in(form: Form, address: int, gpu: Device, memory: dict):
    """An array of this form in host memory: integers and booleans copied, all else zeros, which take no room until a block
    writes there. memory: what stands for which bytes of the card, so that one array given twice is one."""
    dtype = np.dtype(form.dtype)
    bounds = byte_range(address, form)
    if bounds is None:
        return np.zeros(form.shape, dtype)
    if bounds not in memory:
        memory[bounds] = np.zeros(bounds[1] - bounds[0], np.uint8)
        if dtype.kind in "iub":
            with gpu.current():
                check(driver.cuMemcpyDtoH(memory[bounds].ctypes.data, bounds[0], bounds[1] - bounds[0]))
    return np.ndarray(form.shape, dtype, memory[bounds], address - bounds[0], form.strides)
