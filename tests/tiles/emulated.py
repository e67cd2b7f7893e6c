"""What the tests of the emulator share: PTX that is written by hand, or that a kernel is compiled to and then edited."""

from types import SimpleNamespace

import numpy as np
import pytest
from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda

from tiles import Hazard
from tiles.compiling.compiler import Lowered
from tiles.emulator import emulate
from tiles.launching.arguments import parameter

SHARED = ".reg .b32 s, x; .reg .b64 d; mov.u32 s, dynamic_smem; mov.b32 x, 0;\n"  # PTX: s is where shared memory begins
POINTER = 4  # which of a Numba array's parameters says where it lies


def written(body, *ndims):
    """The PTX of a kernel of arrays: their addresses are %a0, %a1, ..., the thread's number is %t."""
    slots = [[f"a{k}_{s}" for s in range(5 + 2 * n)] for k, n in enumerate(ndims)]
    parameters = ",\n".join(f".param .u64 {name}" for names in slots for name in names)
    loads = "\n".join(f".reg .b64 %a{k};\nld.param.u64 %a{k}, [{names[POINTER]}];" for k, names in enumerate(slots))
    return f"""
.version 8.0
.target sm_90a
.address_size 64
.file 1 "by_hand.py"
.extern .shared .align 16 .b8 dynamic_smem[];
.visible .entry kernel(
{parameters})
{{
.reg .b32 %t;
mov.u32 %t, %tid.x;
{loads}
{body}
ret;
}}
"""


def execute(body, *arrays, warps=1, shared=None, blocks=1, seed=None, grid=None):
    """Run such a kernel; what it did is counted."""
    names = ", ".join(f"a{k}" for k in range(len(arrays)))
    kernel = cuda.jit(eval(f"lambda {names}: None"))
    text = written(body, *(a.ndim for a in arrays))
    lowered, cluster = SimpleNamespace(ptx=lambda: text), (blocks, 1, 1)
    return emulate(kernel, grid or cluster, 32 * warps, arrays, shared, seed, cluster, lowered=lowered)


def assemble(text):
    """What ptxas makes of it; an error, if this is no PTX."""
    code = ObjectCode.from_ptx(text.encode())
    return Linker(code, options=LinkerOptions(arch="sm_90a")).link("cubin")


def edited(kernel, args, edit, warps=1, shared=None, blocks=1, seed=None, arch="sm_90a"):
    """Run what a kernel is compiled to, after `edit` of its text. A kernel that has run is not compiled again."""
    text = Lowered(kernel, tuple(parameter("argument", a).type for a in args), arch, lines=True).ptx()
    assert edit(text) != text, text
    lowered, cluster = SimpleNamespace(ptx=lambda: edit(text)), (blocks, 1, 1)
    return emulate(kernel, cluster, 32 * warps, args, shared, seed, cluster, arch, lowered)


def stops(kind, cause, run, *args, **options):
    """A Hazard of this kind, with words that match; the Hazard."""
    with pytest.raises(Hazard, match=cause) as caught:
        run(*args, **options)
    assert caught.value.kind == kind, str(caught.value)
    return caught.value


def each_thread(kind, *names):
    """PTX: %p<name> is where a thread's own number of this many bytes lies in each array."""
    size = np.dtype(kind).itemsize
    return "\n".join(f".reg .b64 %p{n};\nmad.wide.u32 %p{n}, %t, {size}, %a{n};" for n in names)
