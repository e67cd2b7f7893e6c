"""tiles/compiling/compiler.py: what lies in a kernel's parameters."""

import re
import struct

import numpy as np
import pytest
from kernels import copies
from numba import cuda
from numba.cuda import types
from numba.cuda.compiler import CUDANativeLowering

import tiles
from ops import warpgroup
from tiles import bf16, inlined, ring, shared, st
from tiles.compiling import sass
from tiles.compiling.compiler import check_types, compile_kernel
from tiles.compiling.numba_types import Value

TILE = st(64, 64, bf16)
BANK = 0x210  # where parameters begin in sm_90's constant bank 0
TENSOR = Value(tiles.tensor(np.zeros((64, 64), bf16.np), TILE).spec)


def parameters(cubin):
    """(address in the constant bank, bytes) of each parameter of a cubin's one kernel, from its EIATTR_KPARAM_INFO records."""
    records = re.findall(rb"\x04\x17\x0c\x00(.{12})", cubin, re.DOTALL)
    actual = sorted(struct.unpack("<IHHI", record) for record in records)  # index, ordinal, offset, flags
    return [(BANK + offset, flags >> 18) for _, _, offset, flags in actual]


plan = shared(a=ring(TILE, 2))


@cuda.jit
def between(n, source, x):
    """A map among other arguments."""
    (a,) = plan.open()
    a.fill(0, source, (n, n))
    a.wait(0)
    x[0] = n


def test_a_map_is_one_parameter_of_128_bytes_on_a_multiple_of_64():
    kernel, _ = copies(TILE, 2, 0)
    compiled = compile_kernel(kernel, (TENSOR, TENSOR, types.int32, types.int32), "sm_90a")
    first, second, *numbers = parameters(compiled.cubin)
    assert first[0] % 64 == second[0] % 64 == 0 and [size for _, size in (first, second, *numbers)] == [128, 128, 4, 4]
    array = types.Array(types.float32, 1, "A")
    _, source, *parts = parameters(compile_kernel(between, (types.int32, TENSOR, array), "sm_90a").cubin)
    assert source[0] % 64 == 0 and source[1] == 128 and [size for _, size in parts] == [8] * 7


@inlined
def fetch(a, source, k):
    a.fill(k, source, (k, k))


@cuda.jit(device=True)
def pick(a, first, second, k):
    """Which tensor it is, only the GPU knows."""
    fetch(a, first if k % 2 else second, k)


@cuda.jit
def through_helpers(first, second, n):
    (a,) = plan.open()
    for k in range(n):
        pick(a, first, second, k)
        warpgroup.tma_store(second, (k, k), a.wait(k))
    warpgroup.store_wait()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_maps_are_read_where_the_parameters_lie(arch):
    """Through helpers too: nothing is copied to the stack, for either dialect of NVVM."""
    compiled = compile_kernel(through_helpers, (TENSOR, TENSOR, types.int32), arch)
    opcodes = sass.instructions(compiled.cubin)
    assert opcodes["UTMALDG"] and opcodes["UTMASTG"]
    assert compiled.spill_bytes == 0 and compiled.local_bytes < 128


@inlined
def twice(a, k):
    """Numba has not compiled this before."""
    return fetch_of(a, k) + fetch_of(a, k)


@inlined
def fetch_of(a, k):
    return a[k]


@cuda.jit
def doubled(a):
    a[0] = twice(a, 1)


def test_what_is_only_checked_is_not_lowered(monkeypatch):
    """Neither the kernel nor the helpers that it calls; and they are, when the kernel is compiled afterwards."""
    lowered, run = [], CUDANativeLowering.run_pass
    monkeypatch.setattr(
        CUDANativeLowering, "run_pass", lambda self, state: lowered.append(state.func_id.func_name) or run(self, state)
    )
    array = types.Array(types.float32, 1, "A")
    check_types(doubled, (array,), "sm_90a")
    assert lowered == []
    assert compile_kernel(doubled, (array,), "sm_90a").registers
    assert lowered == ["fetch_of", "twice", "doubled"]
    check_types(doubled, (array,), "sm_90a")
    assert len(lowered) == 3
