"""Ranges that a profiler shows: with Nsight Systems each public call stands over its kernels, by name.

They are made where one of NVIDIA's profilers asks for them (it sets NVTX_INJECTION64_PATH) or TILES_NVTX=1 does; TILES_NVTX=0
forbids them. That is settled when this library is imported, so that calls pay nothing for ranges that nobody looks at."""

import functools
import os
import warnings
from collections.abc import Callable


def wants_ranges() -> bool:
    """Are ranges wanted, by a profiler or by TILES_NVTX=1?"""
    said = os.environ.get("TILES_NVTX", "")
    return said != "0" if said else "NVTX_INJECTION64_PATH" in os.environ


def _backend():
    """(push(name), pop()) of the package nvtx, else of torch; None if neither is there."""
    try:
        import nvtx

        return nvtx.push_range, nvtx.pop_range
    except ImportError:
        pass
    try:
        from torch.cuda import nvtx

        nvtx.range_push("tiles")
        nvtx.range_pop()
    except (ImportError, RuntimeError):  # RuntimeError: of a torch without CUDA
        return None
    return nvtx.range_push, nvtx.range_pop


@functools.cache
def backend():
    """The functions that open and close NVTX ranges, None if there are none; looked up once."""
    module = _backend() if wants_ranges() else None
    if wants_ranges() and module is None:
        warnings.warn(
            "ranges were asked for (TILES_NVTX), and neither nvtx nor a torch with CUDA is installed: pip install nvtx",
            stacklevel=2,
        )
    return module


def call_in_range(name: str, function: Callable, push: Callable, pop: Callable) -> Callable:
    """A function that calls this one inside a range of that name."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        push(name)
        try:
            return function(*args, **kwargs)
        finally:
            pop()

    return call
