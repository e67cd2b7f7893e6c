"""Memory that a stream of torch's keeps from call to call: what a launch writes and then reads itself, and no call makes.

All launches on a stream share it, one after the other. Its first COUNTS bytes are numbers that are 0 between launches: who
counts there leaves 0 behind (ops.count_around). What lies behind them may be anything. A launch that a CUDA graph is captured
with gets none, for graphs that were captured on one stream may be replayed on two at once; nor does one on a thread's own
default stream, whose handle is that of other threads' streams, too. It is never freed, as another thread may be about to launch
with it: so a stream keeps at most twice what it needs. It comes from the driver, not from torch, whose graphs refuse memory
that outlives a call."""

import threading

from cuda.bindings import driver

from .device import check, device, uncaptured

COUNTS = 2**16  # bytes of numbers
LEAST, MOST = 2**22, 2**25  # bytes that are made at first; that a launch may ask for
PER_THREAD = 2  # CUDA's handle of a thread's own default stream
FREE = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE

_memory: dict[tuple[int, int], tuple[int, int]] = {}  # of a device's stream: (address, bytes)
_growing = threading.Lock()


def kept(ordinal: int, stream: int, nbytes: int) -> int | None:
    """The address of so many bytes, for a launch on this stream; None: there are none for it."""
    if stream and _taken(ordinal, stream):  # nobody can capture the default stream, 0, and asking takes half a microsecond
        return None
    address, size = _memory.get((ordinal, stream), (0, 0))
    return address if size >= nbytes else _grown(ordinal, stream, nbytes)


def _taken(ordinal: int, stream: int) -> bool:
    """Is the stream captured, or another one's in each thread?"""
    status, captures = driver.cuStreamIsCapturing(stream)
    if status:  # this thread may have no context yet
        with device(ordinal).current():
            status, captures = driver.cuStreamIsCapturing(stream)
    return status != 0 or captures != FREE or stream == PER_THREAD


def _grown(ordinal: int, stream: int, nbytes: int) -> int | None:
    with _growing, uncaptured(), device(ordinal).current():
        address, size = _memory.get((ordinal, stream), (0, 0))
        if size < nbytes:
            size = max(LEAST, 1 << (nbytes - 1).bit_length())
            status, memory = driver.cuMemAlloc(size)
            if status:  # the card is full
                return None
            address = int(memory)
            check(driver.cuMemsetD8Async(address, 0, COUNTS, stream))
            _memory[ordinal, stream] = address, size
        return address
