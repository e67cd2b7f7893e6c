"""What the tests of tiles share."""

import ctypes

import pytest


@pytest.fixture
def fake_cuda(monkeypatch):
    """A driver with a device 3 whose memory is the host's: memset works, and streams that are waited for are listed."""
    from cuda.bindings import driver

    waited = []

    def memset(itemsize):
        def call(pointer, pitch, bits, width, height, stream):
            for row in range(height):
                data = bits.to_bytes(itemsize, "little") * width
                ctypes.memmove(pointer + row * pitch, data, len(data))
            return (driver.CUresult.CUDA_SUCCESS,)

        return call

    monkeypatch.setattr(driver, "cuMemsetD2D16Async", memset(2))
    monkeypatch.setattr(driver, "cuMemsetD2D32Async", memset(4))
    monkeypatch.setattr(driver, "cuStreamSynchronize", lambda s: (driver.CUresult.CUDA_SUCCESS, waited.append(s))[:1])
    monkeypatch.setattr(driver, "cuPointerGetAttribute", lambda attribute, p: (driver.CUresult.CUDA_SUCCESS, 3))
    monkeypatch.setattr(driver, "cuCtxGetDevice", lambda: (driver.CUresult.CUDA_SUCCESS, 1))
    return waited
