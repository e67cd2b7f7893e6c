"""ring.release(j, after=vector): its meaning does not change, and its condition is always true. ring(..., once=True)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from numba import cuda
from numba.cuda import types

import tiles
from ops import cluster, exp2, load, row_max, row_sum, store, warpgroup, zeros
from tiles import Hazard, bf16, fp16, fp32, ring, rt, st, tensor
from tiles.compiling import sass
from tiles.compiling.builder import i32
from tiles.compiling.compiler import Lowered, compile_kernel
from tiles.compiling.ptx import wait_for_registers
from tiles.emulator import emulate
from tiles.launching.arguments import parameter
from tiles.op import lowers, op
from tiles.testing import blank, meaning, ptx

S, T = st(64, 64, bf16), rt(16, 64, fp32)
MARK = 0x7FEDCBA9  # the NaN that no arithmetic makes


@pytest.mark.parametrize("dtype", [fp32, bf16, fp16])
def test_slots_go_round(run, sample, dtype):
    """Three stages, eleven tiles, vectors of every dtype with infinities and NaN: the producer gets each slot back."""
    count, V = 11, rt(16, 64, dtype)
    smem = tiles.shared(x=ring(S, 3, readers=4))

    @cuda.jit
    def body(x, out):
        (a,) = smem.open()
        if warpgroup.id() == 1:
            for j in range(count):
                a.fill(j, x, (j,))
        else:
            for j in range(count):
                m = row_max(warpgroup.load(a.wait(j), V))
                a.release(j, after=m)
                warpgroup.store(out, m, (j, 0))

    x, out = sample((64 * count, 64), bf16), blank((count, 64), dtype)
    x[5], x[70, 3], x[130] = np.nan, np.inf, -np.inf
    run(body, tensor(x, S), out, warps=8, shared=smem)
    want = np.fmax.reduce(x.astype(np.float32).reshape(count, 64, 64), axis=2).astype(dtype.np)
    assert np.array_equal(out.astype(np.float32), want.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("once,blocks", [(False, 1), (True, 1), (True, 2)])
def test_what_is_read_once_leaves_the_cache_first(run, sample, once, blocks):
    """Copies of such a ring have createpolicy's evict_first, those of other rings have none; both load the same."""
    smem = tiles.shared(x=ring(S, 2, readers=4, blocks=blocks, once=once))

    @cuda.jit
    def body(x, out):
        (a,) = smem.open()
        if warpgroup.id() == 1:
            for j in range(3):
                a.fill(j, x, (j, 0))
        else:
            for j in range(3):
                tile = warpgroup.load(a.wait(j), T)
                a.release(j)
                if cluster.rank() == blocks - 1:
                    warpgroup.store(out, tile, (64 * j, 0))
        cluster.sync()

    x, out = sample((3 * 64, 64), bf16), blank((3 * 64, 64))
    part = ring(S, 2, blocks=blocks).part
    run(body, tensor(x, part), out, warps=8, shared=smem, cluster=blocks)
    assert np.array_equal(out, x.astype(np.float32))
    types = tuple(parameter("argument", a).type for a in (tensor(x, part), out))
    copies = [line for line in Lowered(body, types, "sm_90a").ptx().splitlines() if "cp.async.bulk.tensor" in line]
    assert copies and all(("L2::cache_hint" in line) == once for line in copies)


def test_what_warps_write_is_in_no_cache():
    with pytest.raises(ValueError, match="ring: what warps write is in no cache, got self.writers=4 and self.once=True"):
        ring(S, 2, writers=4, once=True)


SPECIAL = [
    0x00000000,
    0x80000000,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0xFFC00000,
    0x7FFFFFFF,
    0x7F800001,
    0x00000001,
    0xFFFFFFFF,
]


@op
def said(vector):
    """The value of `computed` in each lane for its registers of a vector."""


@lowers(said)
def _(vector):
    return types.int32, lambda b, vector: b.zext(wait_for_registers(b, b.unpack(vector)), i32)


@cuda.jit
def says(bits, out):
    out[cuda.threadIdx.x] = said(load(bits, T.col_vec, (0,)))


@settings(deadline=None)
@given(some.lists(some.one_of(some.integers(0, 2**32 - 1), some.sampled_from([*SPECIAL, MARK])), min_size=16, max_size=16))
def test_always_true(bits):
    """For any bits in a lane's registers (rows g and g + 8, g = lane // 4), except the mark."""
    bits, out = np.array(bits, np.uint32), np.full(32, 7, np.int32)
    emulate(says, (1, 1, 1), 32, [bits.view(np.float32), out])
    row = np.arange(32) // 4
    assert (out == ((bits[row] != MARK) & (bits[row + 8] != MARK))).all()


def test_no_arithmetic_makes_the_mark():
    """The mark is a NaN that no operation returns here; the GPU's own is 0x7FFFFFFF."""
    with np.errstate(all="ignore"):
        result = np.array([np.inf], np.float32) * np.float32(0)
    assert np.isnan(np.array([MARK], np.uint32).view(np.float32)).all()
    assert result.view(np.uint32)[0] not in (MARK, 0)


def test_the_compiler_keeps_the_comparison():
    """The arrival comes after a comparison with the mark, which the compiler does not fold, and before the wait for the mma."""
    smem = tiles.shared(x=ring(S, 2))

    def kernel(after):
        @cuda.jit
        def body(x, out):
            (a,) = smem.open()
            a.fill(0, x, (0, 0))
            v = row_sum(exp2(warpgroup.load(a.wait(0), T)))
            if after:
                a.release(0, after=v)
            else:
                a.release(0)
            store(out, v, (0,))

        return body

    x, out = tensor(np.zeros((64, 64), bf16.np), S), blank(16)
    marked = []
    for after in (True, False):
        actual = compile_kernel(kernel(after), [parameter("x", x).type, parameter("out", out).type], "sm_90a")
        text = [str(i).lower() for i in sass.listing(actual.cubin)]
        marked.append(any(f"{MARK:#x}" in line for line in text))
    assert marked == [True, False]


@pytest.mark.parametrize("backend", [meaning, ptx])
def test_mistakes(backend):
    smem = tiles.shared(x=ring(S, 2))

    def after_a_tile(x):
        (a,) = smem.open()
        a.fill(0, x, (0, 0))
        a.wait(0)
        a.release(0, after=zeros(T))

    def after_a_number(x):
        (a,) = smem.open()
        a.fill(0, x, (0, 0))
        a.wait(0)
        a.release(0, after=1)

    for kernel, words in {after_a_tile: r"rt\(16, 64, fp32\)", after_a_number: "(1|int64)"}.items():
        with pytest.raises(TypeError, match=f"release: `after` must be a vector, got {words}"):
            backend(cuda.jit(kernel), tensor(np.zeros((64, 64), bf16.np), S), warps=4, shared=smem)


def test_the_meaning_does_not_change():
    """With `after` the interpreter sees the same mistakes."""
    smem = tiles.shared(x=ring(S, 2))

    @cuda.jit
    def body(x):
        (a,) = smem.open()
        a.fill(0, x, (0, 0))
        v = row_max(warpgroup.load(a.wait(0), T))
        a.release(0, after=v)
        warpgroup.load(a.wait(0), T)

    with pytest.raises(tiles.Hazard, match="which this warp has released"):
        meaning(body, tensor(np.zeros((64, 64), bf16.np), S), warps=4, shared=smem)


def test_the_slot_of_a_wait_is_uniform():
    """Also where the compiler cannot know that j is, as it comes from memory: without the shuffle in ring.wait the loop
    moves registers to uniform ones (R2UR) four times a product, for its descriptors; with it once a wait."""
    smem = tiles.shared(x=ring(S, 3), y=ring(S, 3))

    @cuda.jit
    def body(x, out, first, rounds):
        a, b = smem.open()
        start = first[cuda.threadIdx.x // 128]
        if warpgroup.id() == 1:
            for j in range(start, start + rounds):
                a.fill(j, x, (j, 0))
                b.fill(j, x, (j, 0))
        else:
            o = zeros(T)
            for j in range(start, start + rounds):
                o = warpgroup.wait(warpgroup.mma_AB(o, a.wait(j), b.wait(j)))
                a.release(j)
                b.release(j)
            warpgroup.store(out, o, (0, 0))

    args = tensor(np.zeros((64, 64), bf16.np), S), blank((64, 64)), np.zeros(2, np.int32), 3
    actual = compile_kernel(body, [parameter("argument", a).type for a in args], "sm_90a")
    loop = [i.mnemonic for i in sass.main_loop(actual.cubin)]
    products, moves = loop.count("HGMMA"), loop.count("R2UR")
    assert products % 4 == 0 and moves <= products // 2


@pytest.mark.parametrize("late", [False, True])
def test_a_fence_for_two_rings(sample, late):
    """A product reads both tiles: the fence of the one published first covers stores before it, not after."""
    T = rt(16, 64, bf16)
    smem = tiles.shared(a=ring(S, 1, 4, 4), b=ring(S, 1, 4, 4))

    @cuda.jit
    def body(x, y, late):
        a, b = smem.open()
        if warpgroup.id() == 0:
            if not late:
                warpgroup.store(b.claim(0), warpgroup.load(x, T, (0, 0)))
            warpgroup.store(a.claim(0), warpgroup.load(x, T, (0, 0)))
            a.publish(0)
            if late:
                warpgroup.store(b.claim(0), warpgroup.load(x, T, (0, 0)))
            b.publish(0, False)
        else:
            acc = warpgroup.wait(warpgroup.mm_ABt(a.wait(0), b.wait(0)))
            a.release(0)
            b.release(0)
            warpgroup.store(y, acc, (0, 0))

    x, y = sample((64, 64), bf16), blank((64, 64))
    if late:
        with pytest.raises(Hazard, match="fence"):
            meaning(body, x, y, late, warps=8, shared=smem)
    else:
        meaning(body, x, y, late, warps=8, shared=smem)
        assert np.allclose(y, x.astype(np.float32) @ x.astype(np.float32).T, atol=1e-3)
