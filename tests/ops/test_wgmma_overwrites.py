"""tiles/compiling/wgmma_overwrites.py: the registers of a wgmma's A that the next iteration writes before the wait."""

import pytest
from numba import cuda

import tiles
from ops import warpgroup
from tiles import Hazard, bf16, ring, rt, st, tensor
from tiles.compiling.compiler import compile_kernel
from tiles.compiling.sass import SassInstruction
from tiles.compiling.wgmma_overwrites import _destination, overwritten
from tiles.emulator import emulate
from tiles.launching.arguments import parameters, types_of
from tiles.testing import blank, close, meaning, wide

STEPS = 5
TILE, T = st(64, 64, bf16), rt(16, 64, bf16)
plan = tiles.shared(a=ring(TILE, STEPS), b=ring(TILE, STEPS))


@cuda.jit
def ahead(gA, gB, out, steps):
    """The next A is loaded while the product that reads the last one may be in flight."""
    a, b = plan.open()
    for j in range(STEPS):
        a.fill(j, gA, (0, j))
        b.fill(j, gB, (j, 0))
    acc = warpgroup.mm_AB(warpgroup.load(a.wait(0), T), b.wait(0))
    for j in range(1, steps):
        left = warpgroup.load(a.wait(j), T)
        acc = warpgroup.mma_AB(warpgroup.wait(acc), left, b.wait(j))
    warpgroup.store(out, warpgroup.wait(acc), (0, 0))


@cuda.jit
def after(gA, gB, out, steps):
    """It is loaded after the wait."""
    a, b = plan.open()
    for j in range(STEPS):
        a.fill(j, gA, (0, j))
        b.fill(j, gB, (j, 0))
    acc = warpgroup.mm_AB(warpgroup.load(a.wait(0), T), b.wait(0))
    for j in range(1, steps):
        acc = warpgroup.wait(acc)
        acc = warpgroup.mma_AB(acc, warpgroup.load(a.wait(j), T), b.wait(j))
    warpgroup.store(out, warpgroup.wait(acc), (0, 0))


@cuda.jit
def by_turns(gA, gB, out, steps):
    """Two products in flight, each with registers of its own."""
    a, b = plan.open()
    for j in range(STEPS):
        a.fill(j, gA, (0, j))
        b.fill(j, gB, (j, 0))
    acc = warpgroup.mm_AB(warpgroup.load(a.wait(0), T), b.wait(0))
    for j in range(1, steps, 2):
        left = warpgroup.load(a.wait(j), T)
        acc = warpgroup.mma_AB(acc, left, b.wait(j))
        warpgroup.wait(newer=1)
        right = warpgroup.load(a.wait(j + 1), T)
        acc = warpgroup.mma_AB(acc, right, b.wait(j + 1))
        warpgroup.wait(newer=1)
    warpgroup.store(out, warpgroup.wait(acc), (0, 0))


@pytest.fixture
def given(sample):
    """(the arguments, the expected result)"""
    a, b = sample((64, 64 * STEPS), bf16), sample((64 * STEPS, 64), bf16)
    return (tensor(a, TILE), tensor(b, TILE), blank((64, 64)), STEPS), wide(a) @ wide(b)


def emulated(kernel, args):
    """Run the kernel as compiled, in the emulator, whatever the check of the machine code reports."""
    emulate(kernel, (1, 1, 1), 128, args, plan, None, (1, 1, 1), "sm_90a")


def test_a_is_loaded_ahead(given):
    """The emulator gives the intended result, a GPU may not; the check of the machine code and its text report it."""
    args, want = given
    meaning(ahead, *args, warps=4, shared=plan)
    close(args[2], want, atol=1e-2)
    actual = compile_kernel(ahead, types_of(ahead, parameters(ahead, args)), "sm_90a")
    (said,) = actual.warnings
    assert "test_wgmma_overwrites.py" in said and "`left = warpgroup.load(a.wait(j), T)`" in said and "mma_AB in" in said
    pairs = overwritten(actual.cubin)
    assert {mma.mnemonic for mma, _ in pairs} == {"HGMMA"} and "LDSM" in {other.mnemonic for _, other in pairs}
    with pytest.raises(Hazard, match="in flight: A's registers were written") as hazard:
        emulated(ahead, args)
    assert "mma_AB" in str(hazard.value)


def test_no_disassembler(given, monkeypatch):
    """Without one nothing is reported, and the kernel compiles."""

    def missing(cubin):
        raise FileNotFoundError("nvdisasm")

    monkeypatch.setattr("tiles.compiling.sass.listing", missing)
    assert compile_kernel(ahead, types_of(ahead, parameters(ahead, given[0])), "sm_90a").warnings == []


@pytest.mark.parametrize("kernel", [after, by_turns], ids=lambda kernel: kernel.__name__)
def test_a_is_left_alone(kernel, given):
    args, want = given
    assert compile_kernel(kernel, types_of(kernel, parameters(kernel, args)), "sm_90a").warnings == []
    emulated(kernel, args)
    close(args[2], want, atol=1e-2)


@pytest.mark.parametrize("text, register", [
    ("LDSM.16.M88.4 R100, [R4]", 100), ("LOP3.LUT P0, R8, R3, RZ, 0xfc, !PT", 8), ("SHFL.BFLY PT, R7, R6, 0x2, 0x1f", 7),
    ("ISETP.GE.AND P0, PT, R12, R3, PT", None), ("STS.128 [R8], R12", None), ("R2UR UR4, R8", None), ("BRX R2 -0x10", None),
    ("IMAD.MOV.U32 RZ, RZ, RZ, R4", None),
])  # fmt: skip
def test_what_is_written(text, register):
    opcode, operands = text.split(" ", 1)
    assert _destination(SassInstruction(0, "", opcode, operands)) == register
