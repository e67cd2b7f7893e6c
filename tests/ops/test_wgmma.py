"""ops/matmul/wgmma.py: all products of a warpgroup, waited for at once, together, or one after the other."""

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import warpgroup, zeros
from ops.matmul.supported import FP8, SUPPORTED, TRANSPOSED, sums_of
from tiles import bf16, fp16, fp32, int8, ring, rt, st, tensor, tf32
from tiles.testing import EPS, blank, close, pairs, wide

EVERY_N = range(16, 257, 16)
EVERY_K = [16, 32, 48, 64, 80, 112, 128, 192, 256]


def widths(cols, dtype):
    """The panel widths that divide a row of `cols` elements, widest first."""
    return [w for w in (128, 64, 32) if cols * dtype.itemsize % w == 0]


def products(form, pairs_of_dtypes, every_n, every_k):
    """Every n of those given once, every k, dtypes and width in turn, and a from registers where there is such a form, by
    turns in the plain product and in the one that adds: (form, n, k, dtypes, width of b, width of a, which product has a in
    registers)."""
    left, right = TRANSPOSED[form]
    for i, (n, k, dtypes) in enumerate(pairs(every_n, every_k, pairs_of_dtypes)):
        b, a = widths(k if right else n, dtypes[1]), widths(64 if left else k, dtypes[0])
        places = SUPPORTED["sm_90"][f"warpgroup.mma_{form}"][dtypes].a
        registers = ("plain", "added")[i % 2] if rt in places else None
        yield form, n, k, dtypes, b[i % len(b)], a[(i + 1) % len(a)], registers


def exact(a, b, acc=0.0):
    """(the product in float64, the error that its sums may have: in fp32, or for fp8 in the tensor cores' 13 bits, of which an
    H200 has missed 1.15 units in one of some 10^6 sums)"""
    unit = 1.5 * 2.0**-12 if a.itemsize == 1 else EPS[fp32] * 8
    return acc + wide(a) @ wide(b), (np.abs(acc) + np.abs(wide(a)) @ np.abs(wide(b))) * unit


CASES = [  # each n in two forms; as compiled each form with both dtypes, and with a from registers in both products
    (case, i in ((0, 3), (0, 7), (2, 3), (2, 3))[turn])
    for turn, form in enumerate(TRANSPOSED)
    for i, case in enumerate(products(form, [(bf16, bf16), (fp16, fp16)], EVERY_N[turn % 2 :: 2], EVERY_K))
]
WORDS = products("ABt", [(tf32, tf32)], [16, 256, 176, 64], [16, 32, 64, 48])
BYTES = products("ABt", [(int8, int8)], [16, 176, 256, 48], [32, 64, 128, 160])
CASES += [(case, i in (0, 3)) for cases in (WORDS, BYTES) for i, case in enumerate(cases)]
EIGHTS = enumerate(products("ABt", FP8, [16, 64, 176, 48, 80, 128, 32, 256], [32, 64, 96, 128, 160]))
CASES += [(case, i < len(FP8)) for i, case in EIGHTS]
RUNS = [
    pytest.param(way, *case, marks=[pytest.mark.gpu] if way == "gpu" else [])
    for case, compiled in CASES
    for way in ("meaning", "ptx", "gpu")
    if compiled or way != "ptx"
]


@pytest.mark.parametrize("run, form, n, k, dtypes, width, left_width, registers", RUNS, ids=str, indirect=["run"])
def test_products(run, sample, form, n, k, dtypes, width, left_width, registers):
    """All four forms, with and without an accumulator, a from shared memory and from registers."""
    mm, mma, (left_turned, turned) = getattr(warpgroup, f"mm_{form}"), getattr(warpgroup, f"mma_{form}"), TRANSPOSED[form]
    A = st(*((k, 64) if left_turned else (64, k)), dtypes[0], left_width)
    B = st(*((n, k) if turned else (k, n)), dtypes[1], width)
    T, O = rt(16, k, dtypes[0]), rt(16, n, sums_of(dtypes[0]))
    smem = tiles.shared(a=ring(A, 1), b=ring(B, 1))
    plain_from_registers, added_from_registers = registers == "plain", registers == "added"

    @cuda.jit
    def body(gA, gB, C, plain, added):
        a, b = smem.open()
        a.fill(0, gA, (0, 0))
        b.fill(0, gB, (0, 0))
        left, right = a.wait(0), b.wait(0)
        if plain_from_registers:
            product = mm(warpgroup.load(left, T), right)
        else:
            product = mm(left, right)
        warpgroup.store(plain, fp32(warpgroup.wait(product)), (0, 0))
        acc = warpgroup.load(C, O, (0, 0))
        if added_from_registers:
            total = mma(acc, warpgroup.load(left, T), right)
        else:
            total = mma(acc, left, right)
        warpgroup.store(added, fp32(warpgroup.wait(total)), (0, 0))

    a, b, c = sample(A.shape, dtypes[0]), sample(B.shape, dtypes[1]), sample((64, n))
    if dtypes[0] is int8:
        c = np.rint(1e5 * c)
    plain, added = blank((64, n)), blank((64, n))
    run(body, tensor(a, A), tensor(b, B), c, plain, added, warps=4, shared=smem)
    for out, acc in ((plain, 0.0), (added, wide(c))):
        want, atol = exact(a.T if left_turned else a, b.T if turned else b, acc)
        close(out, want, atol=0 if dtypes[0] is int8 else atol)


CHAINS = [("AB", False), ("ABt", True), ("AB", True), ("ABt", False), ("AtB", False), ("AtBt", False)]


@pytest.mark.parametrize("form, from_registers", CHAINS)
def test_accumulator_in_flight(run, sample, form, from_registers):
    """A sum over five tiles whose mmas are issued without a wait between them, and one more that starts from registers."""
    mm, mma, steps = getattr(warpgroup, f"mm_{form}"), getattr(warpgroup, f"mma_{form}"), 5
    A, B, T, O = st(64, 64, bf16), st(64, 64, bf16), rt(16, 64, bf16), rt(16, 64, fp32)
    smem = tiles.shared(a=ring(A, steps), b=ring(B, steps))

    @cuda.jit
    def body(gA, gB, C, out, added):
        a, b = smem.open()
        for j in range(steps):
            a.fill(j, gA, (0, j))
            b.fill(j, gB, (0, j))
        left = warpgroup.load(a.wait(0), T)
        acc = mm(left if from_registers else a.wait(0), b.wait(0))
        for j in range(1, steps):
            if from_registers:
                acc = warpgroup.wait(acc)
                acc = mma(acc, warpgroup.load(a.wait(j), T), b.wait(j))
                acc = mma(acc, warpgroup.load(a.wait(j), T), b.wait(j))
            else:
                acc = mma(acc, a.wait(j), b.wait(j))
                acc = mma(acc, a.wait(j), b.wait(j))
            warpgroup.wait(newer=1)
            a.release(j - 1)
            b.release(j - 1)
        warpgroup.store(out, warpgroup.wait(acc), (0, 0))
        chain = mma(warpgroup.load(C, O, (0, 0)), a.wait(steps - 1), b.wait(steps - 1))
        warpgroup.wait(newer=1)
        chain = mma(chain, a.wait(steps - 1), b.wait(steps - 1))
        warpgroup.wait()
        warpgroup.store(added, warpgroup.wait(chain), (0, 0))

    a, b, c = sample((64, 64 * steps), bf16), sample((64, 64 * steps), bf16), sample((64, 64))
    out, added = blank((64, 64)), blank((64, 64))
    run(body, tensor(a, A), tensor(b, B), c, out, added, warps=4, shared=smem)
    parts = [
        exact(x.T if TRANSPOSED[form].left else x, y.T if TRANSPOSED[form].right else y)
        for x, y in zip(np.split(a, steps, axis=1), np.split(b, steps, axis=1), strict=True)
    ]
    want, atol = (parts[0][k] + 2 * sum(p[k] for p in parts[1:]) for k in (0, 1))
    close(out, want, atol=2 * atol)
    close(added, c + 2 * parts[-1][0], atol=2 * parts[-1][1] + np.abs(c) * EPS[fp32])


def test_two_in_flight_and_what_ordinary_stores_wrote(run, sample):
    """The pattern of attention: S and O in flight together, S waited for first; operands written by stores, visible after
    sync."""
    K, V, T, O = st(64, 64, bf16), st(64, 96, bf16), rt(16, 64, bf16), rt(16, 96, fp32)
    W = rt(16, 96, bf16)
    smem = tiles.shared(q=K, k=K, v=V)

    @cuda.jit
    def body(Q, gK, gV, scores, out):
        q, k, v = smem.open()
        warpgroup.store(q, warpgroup.load(Q, T, (0, 0)))
        warpgroup.store(k, warpgroup.load(gK, T, (0, 0)))
        warpgroup.store(v, warpgroup.load(gV, W, (0, 0)))
        warpgroup.sync()
        p = bf16(warpgroup.wait(warpgroup.mm_ABt(q, k)))
        s = warpgroup.mm_ABt(q, k)
        o = warpgroup.mma_AB(zeros(O), p, v)
        warpgroup.store(scores, warpgroup.wait(s, 1) * 2.0, (0, 0))
        warpgroup.store(out, warpgroup.wait(o), (0, 0))

    q, k, v = sample((64, 64), bf16), sample((64, 64), bf16), sample((64, 96), bf16)
    scores, out = blank((64, 64)), blank((64, 96))
    run(body, q, k, v, scores, out, warps=4, shared=smem)
    want, atol = exact(q, k.T)
    close(scores, 2 * want, atol=2 * atol)
    size = np.abs(want) @ np.abs(wide(v))
    close(out, want @ wide(v), atol=size * EPS[bf16])  # p was rounded to bf16
