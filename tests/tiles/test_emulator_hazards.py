"""Kernels that are right as they are written, and wrong as compiled: their PTX, edited (edited_copies.py, edited_products.py).
The emulator must name the kind of mistake, the instruction with its line in the text, and the line of Python that it comes from
(`# guilty`)."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from broken import guilty
from edited_copies import bring
from edited_kernels import CASES, R, X, Y, arguments, instead, numbers
from edited_products import product
from numba import cuda

from ops import commit_group, copy_async, load, raw, store, subtile
from tiles import Hazard, barrier, fp32, shared, sv, tensor
from tiles.compiling.compiler import Lowered
from tiles.emulator import emulate
from tiles.emulator.text import read
from tiles.launching.arguments import parameter


def compiled(kernel, args):
    return Lowered(kernel, tuple(parameter("argument", a).type for a in args), "sm_90a", lines=True).ptx()


@pytest.mark.parametrize(("kernel", "edit", "kinds", "cause", "instruction", "warps", "plan", "blocks"), CASES)
def test_broken_as_compiled(kernel, edit, kinds, cause, instruction, warps, plan, blocks):
    jitted, args, cluster = cuda.jit(kernel), arguments(kernel), (blocks, 1, 1)
    text = edit(compiled(jitted, args))
    with pytest.raises(Hazard) as caught:
        emulate(jitted, cluster, 32 * warps, args, plan, None, cluster, lowered=SimpleNamespace(ptx=lambda: text))
    hazard, said = caught.value, str(caught.value)
    assert hazard.kind in kinds and re.search(cause, hazard.cause), said
    python, number, shown = re.fullmatch(r"(.*), PTX line (\d+) `([^`]*)`", hazard.line).groups()
    assert shown.removeprefix("@p ").startswith(instruction), said
    assert shown[:20] in " ".join(text.splitlines()[int(number) - 1].split()), said
    assert python in guilty(kernel) and hazard.line in said, said


@pytest.mark.parametrize(("kernel", "warps", "plan", "blocks"), {(c.values[0], *c.values[5:]) for c in CASES}, ids=lambda v: "")
@pytest.mark.parametrize("seed", [None, 1])
def test_right_as_it_was(kernel, warps, plan, blocks, seed):
    args, cluster = arguments(kernel), (blocks, 1, 1)
    emulate(cuda.jit(kernel), cluster, 32 * warps, args, plan, seed, cluster)


def test_a_tensor_copy_begins_at_a_multiple_of_128_bytes():
    """Vectors of 64 bytes may lie side by side for warps, not for TMA."""
    plan = shared(pair=sv(32, fp32), full=barrier(1))

    @cuda.jit
    def bring_the_second(x):
        pair, full = plan.open()
        raw.expect(full, 64)
        raw.tma_load(subtile(pair, 16, 1), x, (0,), full)
        raw.wait(full, 1)

    with pytest.raises(Hazard, match="the TMA load: shared memory at .* no multiple of 128"):
        emulate(bring_the_second, (1, 1, 1), 32, [tensor(np.zeros(16, np.float32), sv(16, fp32))], plan)


@pytest.mark.parametrize("fence", ["fence.proxy.async", "fence.proxy.async.shared::cta"])
def test_a_fence_of_shared_memory_is_one_of_barriers_too(fence):
    """For copies by the same block (CUDA C++ Programming Guide, on bulk copies)."""
    kernel = cuda.jit(bring)
    args = arguments(bring)
    text = instead("fence.mbarrier_init.release.cluster", fence)(compiled(kernel, args))
    emulate(kernel, (1, 1, 1), 32, args, X, lowered=SimpleNamespace(ptx=lambda: text))


def test_lines_are_found_for_what_fails():
    """A kernel is compiled without a table of lines: which line of Python is guilty is asked of one that has it."""

    def skip_the_wait(source, out):
        x, _ = X.open()
        copy_async(x, source, (0, 0))
        commit_group()
        store(out, load(x, R), (0, 0))  # guilty

    jitted, args = cuda.jit(skip_the_wait), arguments(skip_the_wait)
    with pytest.raises(Hazard) as caught:
        emulate(jitted, (1, 1, 1), 32, args, X)
    python, number = re.fullmatch(r"(.*), PTX line (\d+) `ld[^`]*`", caught.value.line).groups()
    assert python in guilty(skip_the_wait)
    assert compiled(jitted, args).splitlines()[int(number) - 1].strip().startswith("ld")


def test_lines_of_other_code_are_not_shown():
    """Nothing promises that a kernel with a table of lines is the same instructions."""
    text = compiled(cuda.jit(product), [numbers(64), np.zeros((64, 64), np.float32)])
    plain, other = read(text), read(text)
    plain.with_lines = lambda: other.code[1:]
    assert plain.listing is plain.code
    other.with_lines = lambda: plain.code
    assert other.listing is plain.code


def test_a_wgmma_that_subtracts():
    """Its scale of B says so."""
    x, out = numbers(64), np.zeros((64, 64), np.float32)
    text = compiled(cuda.jit(product), [x, out])
    edited, times = re.subn(r"\bp, 1, 1,", "p, 1, -1,", text)
    assert times == 4
    emulate(cuda.jit(product), (1, 1, 1), 128, [x, out], Y, lowered=SimpleNamespace(ptx=lambda: edited))
    np.testing.assert_allclose(out, -(x.astype(np.float64) @ x.astype(np.float64)), rtol=1e-5, atol=1e-4)
