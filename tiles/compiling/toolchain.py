"""Versions and settings of what compiles kernels, as keys take them (digest.py): by content, not by path, time or Python."""

import functools
import hashlib
import os
import re

import cuda.bindings
import cuda.core
import llvmlite
import ml_dtypes
import numba
import numba_cuda
import numpy as np
from cuda.bindings import nvjitlink, nvvm
from cuda.pathfinder import load_nvidia_dynamic_lib
from numba.cuda import cuda_paths
from numba.cuda.cudadrv.libs import get_libdevice

VERSIONED = {m.__name__: m.__version__ for m in (numba, numba_cuda, llvmlite, np, ml_dtypes)}
VERSIONED |= {"cuda.core": cuda.core.__version__, "cuda.bindings": cuda.bindings.__version__}
IDLE = {  # settings of Numba's that no machine code depends on
    f"NUMBA_{name}"
    for name in """CACHE_DIR COLOR_SCHEME NUM_THREADS THREADING_LAYER THREADING_LAYER_PRIORITY CUDA_DRIVER CUDA_LOG_LEVEL
    CUDA_LOG_API_ARGS CUDA_LOW_OCCUPANCY_WARNINGS CUDA_WARN_ON_IMPLICIT_COPY CUDA_PER_THREAD_DEFAULT_STREAM""".split()
}
BUILD_ID = re.compile(rb"\x7fELF.*\x04\0{3}\x14\0{3}\x03\0{3}GNU\0(.{20})", re.DOTALL)  # a note of 20 bytes and its kind


def settings() -> dict[str, str]:
    """The environment's settings for Numba."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("NUMBA_") and name not in IDLE}


@functools.cache
def compilers():
    """Versions of all that takes part in compiling, and marks of the files where a version says too little. Of NumPy's, Numba
    asks for the first two numbers. Without __debug__, kernels have no assertions."""
    files = [load_nvidia_dynamic_lib(name).abs_path for name in ("nvvm", "nvJitLink")] + [find_libdevice()]
    versions = VERSIONED | {"numpy": ".".join(np.__version__.split(".")[:2])}
    marks = [mark_of_content(file) for file in files if file]
    return versions, tuple(nvvm.version()), tuple(nvjitlink.version()), marks, __debug__


def find_libdevice() -> str | None:
    """Where numba-cuda finds libdevice. Asked for that alone, it does not look for all of CUDA, which takes 10 ms."""
    find = getattr(cuda_paths, "_get_libdevice_path", None)
    return find().info if find else get_libdevice()


def mark_of_content(file) -> bytes:
    """A digest of what a file holds. The first page of a shared library tells its build, on Linux by a digest, on Windows
    by a checksum and sizes: to read all of it would take 0.1 s."""
    with open(file, "rb") as stream:
        head = stream.read(4096)
        if note := BUILD_ID.match(head):
            return note[1]
        rest = str(os.fstat(stream.fileno()).st_size).encode() if head.startswith(b"MZ") else stream.read()
        return hashlib.sha256(head + rest).digest()
