"""What the tests of tiles share."""

import contextlib
import ctypes
import gc
import itertools
import sys
import textwrap
from types import SimpleNamespace

import pytest
from host_driver import encoded, gpu  # noqa: F401

from tiles.launching import arrays

numbers = itertools.count()


@pytest.fixture
def collect():
    """collect() finds what garbage the test has made. What others left stays: to go through that takes three seconds."""
    gc.freeze()
    return gc.collect


@pytest.fixture
def module(tmp_path, monkeypatch):
    """module(source) imports this source under a fresh name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(source, name=None):
        name = name or f"written_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        sys.modules.pop(name, None)
        return __import__(name)

    return load


@pytest.fixture
def fake_cuda(monkeypatch):
    """A driver with a device 3 whose memory is the host's: memset works, and streams that are waited for are listed."""
    from cuda.bindings import driver

    waited = []

    def memset(itemsize):
        def call(pointer, pitch, bits, width, height, stream):
            assert pitch >= 0 and width > 0 and height > 0  # the driver takes sizes, and nothing less
            for row in range(height):
                data = bits.to_bytes(itemsize, "little") * width
                ctypes.memmove(pointer + row * pitch, data, len(data))
            return (driver.CUresult.CUDA_SUCCESS,)

        return call

    monkeypatch.setattr(arrays, "device", lambda ordinal: SimpleNamespace(current=contextlib.nullcontext))
    monkeypatch.setattr(driver, "cuMemsetD2D16Async", memset(2))
    monkeypatch.setattr(driver, "cuMemsetD2D32Async", memset(4))
    monkeypatch.setattr(driver, "cuStreamSynchronize", lambda s: (driver.CUresult.CUDA_SUCCESS, waited.append(s))[:1])
    monkeypatch.setattr(driver, "cuPointerGetAttribute", lambda attribute, p: (driver.CUresult.CUDA_SUCCESS, 3))
    monkeypatch.setattr(driver, "cuCtxGetDevice", lambda: (driver.CUresult.CUDA_SUCCESS, 1))
    return waited
