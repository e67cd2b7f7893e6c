"""ops/matmul/mma.py: the products of one warp, from registers and from shared memory, and the table of supported products."""

import itertools

import numpy as np
import pytest
from banks import ways
from numba import cuda, types

import ops
import tiles
from ops import commit_group, copy_async, load, matmul, store, wait_group, zeros
from ops.matmul.product import product
from ops.matmul.supported import TRANSPOSED, cells, sums_of, transposed_in
from tiles import bf16, fp8e4m3, fp8e5m2, fp16, fp32, int8, int32, rt, st, tf32
from tiles.compiling.compiler import compile_kernel
from tiles.compiling.sass import main_loop
from tiles.launching.arguments import parameter
from tiles.testing import EPS, blank, close, ptx, wide

SHAPES = {  # (m, n, k), by the size of elements
    2: [(16, 16, 32), (16, 48, 64), (16, 64, 32), (48, 16, 32)],
    1: [(32, 32, 32), (32, 32, 64), (32, 64, 32)],
    4: [(16, 16, 32), (32, 16, 16), (16, 48, 16)],
}

ALIKE = [(fp8e4m3, fp8e4m3), (fp8e5m2, fp8e5m2)]
MIXED = [(fp8e4m3, fp8e5m2), (fp8e5m2, fp8e4m3)]


def exact(a, b, acc):
    """acc + a @ b, and the error that fp32 sums may have."""
    A, B = wide(a), wide(b)
    return A @ B + acc, (np.abs(A) @ np.abs(B) + np.abs(acc)).max() * EPS[fp32] * (A.shape[1] + 2)


def kernel_of(name, m, n, k, dtypes, placed):
    """acc + a b by the op `name`, with a and b in registers ("r") or shared memory ("s"), and its shared memory."""
    op, form = getattr(ops, name), transposed_in(name)
    left, right = (m, k)[:: -1 if form.left else 1], (k, n)[:: -1 if form.right else 1]
    A, B, C = rt(*left, dtypes[0], form.layouts[0]), rt(*right, dtypes[1], form.layouts[1]), rt(m, n, sums_of(dtypes[0]))
    smem = tiles.shared(a=st(*left, dtypes[0]), b=st(*right, dtypes[1]))
    a_shared, b_shared = (place == "s" for place in placed)

    @cuda.jit
    def body(ga, gb, gc, out):
        a, b = smem.open()
        left, right = load(ga, A, (0, 0)), load(gb, B, (0, 0))
        store(a, left)
        store(b, right)
        cuda.syncthreads()
        acc = load(gc, C, (0, 0))
        if a_shared and b_shared:
            acc = op(acc, a, b)
        elif a_shared:
            acc = op(acc, a, right)
        elif b_shared:
            acc = op(acc, left, b)
        else:
            acc = op(acc, left, right)
        store(out, fp32(acc), (0, 0))

    return body, smem, left, right


def products():
    """Every place of the operands in every form, dtypes and shapes in turn: (op, dtypes of a and b, places, (m, n, k))."""
    turns = [
        itertools.cycle(actual) for actual in (((bf16, bf16), (fp16, fp16)), [(tf32, tf32)], MIXED + ALIKE, [(int8, int8)])
    ]
    shapes = {itemsize: itertools.cycle(actual) for itemsize, actual in SHAPES.items()}
    for form in TRANSPOSED:
        actual = cells(f"mma_{form}")
        for turn in turns:
            for left, right in itertools.product(*actual[next(turn)]):
                dtypes = next(turn)
                yield f"mma_{form}", dtypes, left.__name__[0] + right.__name__[0], next(shapes[dtypes[0].itemsize])


@pytest.mark.parametrize(("name", "dtypes", "placed", "shape"), [*products()], ids=str)
def test_products(run, sample, name, dtypes, placed, shape):
    m, n, k = shape
    body, smem, left, right = kernel_of(name, *shape, dtypes, placed)
    a, b, c = sample(left, dtypes[0]), sample(right, dtypes[1]), sample((m, n))
    if dtypes[0] is int8:
        c = np.rint(1e5 * c)
    out = blank((m, n))
    run(body, a, b, c, out, shared=smem)
    form = transposed_in(name)
    want, atol = exact(a.T if form.left else a, b.T if form.right else b, wide(c))
    close(out, want, atol=0 if dtypes[0] is int8 else atol)


def test_sums_of_int8_are_exact(run):
    """Where fp32 would round them; they become fp32 by one rounding."""
    T, O = rt(16, 64, int8), rt(16, 16, int32)

    @cuda.jit
    def body(a, b, out, n):
        acc = zeros(O)
        for _ in range(n):
            acc = ops.mma_ABt(acc, load(a, T, (0, 0)), load(b, T, (0, 0)))
        store(out, fp32(acc), (0, 0))

    a, b = np.full((16, 64), 127, np.int8), np.full((16, 64), 127, np.int8)
    a[:, 0], out = np.arange(16), blank((16, 16))
    run(body, a, b, out, 101)
    assert (out == (101 * (a.astype(np.int64) @ b.T.astype(np.int64))).astype(np.float32)).all()


@pytest.mark.parametrize("form", TRANSPOSED)
def test_tf32_of_what_lies_in_shared_memory_as_fp32(run, sample, form):
    """Loads round to tf32: operands of any form, from tiles that TMA or cp.async filled with fp32 numbers."""
    op, (left, right) = getattr(ops, f"mma_{form}"), transposed_in(form).layouts
    A, B = (
        (rows, cols)[:: -1 if turned else 1] for rows, cols, turned in zip((32, 32), (32, 16), TRANSPOSED[form], strict=True)
    )
    L, R, C, smem = rt(*A, tf32, left), rt(*B, tf32, right), rt(32, 16, fp32), tiles.shared(a=st(*A, fp32), b=st(*B, fp32))

    @cuda.jit
    def body(x, y, out):
        a, b = smem.open()
        copy_async(a, x, (0, 0))
        copy_async(b, y, (0, 0))
        commit_group()
        wait_group()
        store(out, op(zeros(C), load(a, L), load(b, R)), (0, 0))

    x, y, out = sample(A), sample(B), blank((32, 16))
    run(body, x, y, out, shared=smem)
    a, b = (z.T if turned else z for z, turned in zip((x, y), TRANSPOSED[form], strict=True))
    want, atol = exact(tf32.round(a), tf32.round(b), 0.0)
    close(out, want, atol=atol)


@pytest.mark.parametrize("form", TRANSPOSED)
def test_operands_in_shared_memory_are_read_without_conflicts(sample, form):
    body, smem, left, right = kernel_of(f"mma_{form}", 16, 64, 64, (bf16, bf16), "ss")
    counts = ptx(body, sample(left, bf16), sample(right, bf16), sample((16, 64)), blank((16, 64)), shared=smem)
    assert ways(counts, "ldmatrix") == {1}


@pytest.mark.parametrize("form", TRANSPOSED)
def test_operands_in_shared_memory_arrive_where_the_products_take_them(form):
    """At most two register moves per product, where ldmatrix loads the matrices in another order."""
    op, (left, right) = getattr(ops, f"mma_{form}"), TRANSPOSED[form]
    C, smem = rt(32, 64, fp32), tiles.shared(a=st(*((64, 32) if left else (32, 64)), bf16), b=st(64, 64, bf16))

    @cuda.jit
    def body(out, rounds):
        a, b = smem.open()
        acc = zeros(C)
        for _ in range(rounds):
            acc = op(acc, a, b)
        store(out, acc, (0, 0))

    cubin = compile_kernel(body, [parameter("out", blank((32, 64))).type, types.int32], "sm_80").cubin
    loop = main_loop(cubin, "HMMA")
    products, moves = (sum(kind in i.opcode for i in loop) for kind in ("HMMA", "MOV"))
    assert products >= 64 and moves <= products / 16


ARCHS = {"sm_80": ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"), "sm_89": ("sm_89", "sm_90a", "sm_100a", "sm_120a")}
CELLS = [  # each with one of the GPUs that have it, in turn: dtypes meet another with each op; CI has every fourth one
    pytest.param(name, dtypes, places, archs[(turn + k) % len(archs)], marks=[pytest.mark.release] * ((turn + k) % 4 > 0))
    for family, archs in ARCHS.items()
    for turn, (name, row) in enumerate(matmul.SUPPORTED[family].items())
    for k, (dtypes, places) in enumerate(row.items())
]


@pytest.mark.parametrize(("name", "dtypes", "places", "arch"), CELLS, ids=str)
def test_every_cell_compiles_for_every_gpu_that_has_it(name, dtypes, places, arch):
    """wgmma's rows of the table, which only Hopper has, are in test_wgmma.py."""
    placed = "".join(kinds[-1].__name__[0] for kinds in places)
    body, _, left, right = kernel_of(name, 32, 32, 32, dtypes, placed)
    arrays = blank(left, dtypes[0]), blank(right, dtypes[1]), blank((32, 32)), blank((32, 32))
    actual = compile_kernel(body, [parameter("x", a).type for a in arrays], arch)
    assert (actual.local_bytes, actual.spill_bytes, actual.warnings) == (0, 0, [])


@pytest.mark.parametrize(("m", "n", "k"), [(16, 80, 96), (64, 128, 256), (32, 256, 128)])
def test_a_rows_bits_do_not_depend_on_its_place(m, n, k):
    """This holds in the interpreter, whatever BLAS does: tests compare attention of part of the queries bit by bit."""
    a, b = (np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((m, k), (k, n)))
    actual = product(a, b)
    close(actual, a.astype(np.float64) @ b, atol=EPS[fp32] * (np.abs(a) @ np.abs(b)).max() * (k + 2))
    for by in range(1, m):
        assert np.array_equal(np.roll(product(np.roll(a, by, 0), b), -by, 0), actual), by
