"""ops/memory/tma.py: TMA adds, takes minima and maxima, prefetches; waits for all stores but the newest."""

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import load, prefetch, store, store_wait, tma_add, tma_store, warpgroup, zeros
from tiles import Hazard, bf16, fp16, fp32, ring, rt, st, sv, tensor
from tiles.interpreter import interpret
from tiles.testing import blank, meaning, pairs, ptx

Y = tiles.shared(x=st(64, 64, bf16), y=st(64, 64, bf16))
FOLDS = {warpgroup.tma_add: np.add, warpgroup.tma_min: np.fmin, warpgroup.tma_max: np.fmax}


@pytest.mark.parametrize(
    ("fold", "dtype"),
    [(warpgroup.tma_add, fp32), (warpgroup.tma_add, bf16), *pairs([*FOLDS], [fp16, bf16, fp16])],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_folds(run, sample, fold, dtype):
    """Twice onto a ragged array; memory outside is left alone."""
    S, T = st(64, 128, dtype), rt(16, 128, dtype)
    smem = tiles.shared(first=st(8, 64, dtype), a=S)

    @cuda.jit
    def body(x, y):
        _, a = smem.open()
        warpgroup.store(a, warpgroup.load(x, T, (0, 0)))
        fold(y, (0, 0), a)
        fold(y, (1, 0), a)
        warpgroup.store_wait()

    x, whole = sample(S.shape, dtype), sample((120, 128), dtype)
    before = whole.copy()
    run(body, x, tensor(whole[:100, :120], S), warps=4, shared=smem)
    want = before.copy()
    for first, rows in ((0, 64), (64, 36)):
        part = want[first : first + rows, :120]
        part[...] = FOLDS[fold](part, x[:rows, :120])
    assert (whole == want).all()


def test_vectors_add_up(run, sample):
    S, V = sv(128, fp32), rt(32, 16, fp32).col_vec
    smem = tiles.shared(a=S)

    @cuda.jit
    def body(x, y):
        (a,) = smem.open()
        warpgroup.store(a, warpgroup.load(x, V, (0,)))
        for i in range(3):
            warpgroup.tma_add(y, (i, 0), a)
        warpgroup.store_wait()

    x, y = sample(128), sample((3, 100))
    want = y + x[:100]
    run(body, x, tensor(y, S), warps=4, shared=smem)
    assert (y == want).all()


def test_one_warp_adds_what_others_hand_it(run, sample):
    """A warp adds a ring's tiles, twice each, of which it wrote none."""
    S, T = st(64, 64, fp32), rt(16, 64, fp32)
    smem = tiles.shared(sums=ring(S, 2, 1, 4))

    @cuda.jit
    def body(x, y):
        (sums,) = smem.open()
        if warpgroup.id() == 0:
            for j in range(4):
                warpgroup.store(sums.claim(j), warpgroup.load(x, T, (64 * j, 0)))
                sums.publish(j)
        elif warpgroup.rank() == 2:
            for j in range(4):
                tma_add(y, (j % 2, 0), sums.wait(j))
                tma_add(y, (j % 2, 0), sums.wait(j))
                store_wait()
                sums.release(j)

    x, y = np.round(sample((256, 64)) * 4), np.round(sample((100, 64)) * 4)
    want = y + 2 * (x[:128] + x[128:])[:100]
    run(body, x, tensor(y, S), warps=8, shared=smem)
    assert (y == want).all()


@pytest.mark.parametrize("send", [tma_store, tma_add], ids=lambda f: f.__name__)
def test_one_warp_sends_what_it_wrote(run, sample, send):
    """It needs no fence of its own between the store and the copy."""
    S, T = st(16, 64, fp32), rt(16, 64, fp32)
    smem = tiles.shared(a=S)

    @cuda.jit
    def body(x, y):
        (a,) = smem.open()
        store(a, load(x, T, (0, 0)))
        send(y, (0, 0), a)
        store_wait()

    x, y = np.round(sample((16, 64)) * 4), np.round(sample((16, 64)) * 4)
    want = x if send is tma_store else x + y
    run(body, x, tensor(y, S), shared=smem)
    assert (y == want).all()


@pytest.mark.parametrize("missing", ["wait", "publish"])
def test_a_tile_that_is_not_handed_on(missing):
    """A tile is released while TMA still reads it, or taken before it is written."""
    S, T = st(64, 64, fp32), rt(16, 64, fp32)
    smem = tiles.shared(sums=ring(S, 1, 1, 4))

    @cuda.jit
    def body(x, y):
        (sums,) = smem.open()
        if warpgroup.id() == 0:
            for j in range(2):
                warpgroup.store(sums.claim(j), warpgroup.load(x, T, (0, 0)))
                sums.publish(j)
        elif warpgroup.rank() == 0:
            for j in range(2):
                tma_add(y, (0, 0), sums.wait(j) if missing == "wait" else sums.wait(0))
                if missing != "wait":
                    store_wait()
                sums.release(j)

    x, y = np.zeros((64, 64), np.float32), np.zeros((64, 64), np.float32)
    with pytest.raises(Hazard):
        meaning(body, x, tensor(y, S), warps=8, shared=smem)


def test_prefetch_changes_nothing(run, sample):
    S = st(64, 64, bf16)
    smem = tiles.shared(r=ring(S, 2), out=S)

    @cuda.jit
    def body(x, y):
        r, out = smem.open()
        prefetch(x, (0, 0))
        prefetch(x, (1, 0))
        for j in range(2):
            r.fill(j, x, (j, 0))
            warpgroup.tma_store(y, (j, 0), r.wait(j))
        warpgroup.store_wait()

    x, y = sample((100, 64), bf16), blank((100, 64), bf16)
    run(body, tensor(x, S), tensor(y, S), warps=4, shared=smem)
    assert (y == x).all()


def test_all_but_the_newest(run, sample):
    """Two tiles in turn: each is written again after its own store is done, while the other's may still run."""
    S, T = st(64, 64, fp32), rt(16, 64, fp32)
    smem = tiles.shared(a=S, b=S)

    @cuda.jit
    def body(x, y):
        a, b = smem.open()
        for i in range(4):
            warpgroup.store_wait(1)
            warpgroup.sync()
            warpgroup.store(a, warpgroup.load(x, T, (128 * i, 0)))
            warpgroup.tma_store(y, (2 * i, 0), a)
            warpgroup.store_wait(1)
            warpgroup.sync()
            warpgroup.store(b, warpgroup.load(x, T, (128 * i + 64, 0)))
            warpgroup.tma_store(y, (2 * i + 1, 0), b)
        warpgroup.store_wait()

    x, y = sample((512, 64)), blank((512, 64))
    run(body, x, tensor(y, S), warps=4, shared=smem)
    assert (y == x).all()


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("newer", [1, 2])
def test_too_many_stay_in_flight(newer, seed):
    """With one tile stored repeatedly, its own store is the newest."""
    S, T = st(64, 64, bf16), rt(16, 64, bf16)

    def kernel(x, y):
        a, _ = Y.open()
        for i in range(2):
            warpgroup.store_wait(newer)
            warpgroup.sync()
            warpgroup.store(a, load(x, T, (64 * i, 0)))
            warpgroup.tma_store(y, (i, 0), a)
        warpgroup.store_wait()

    x = np.zeros((128, 64), bf16.np)
    with pytest.raises(Hazard, match="writes shared tile 'x', and nothing orders this after the TMA store"):
        interpret(cuda.jit(kernel), (1, 1, 1), 128, [x, tensor(x.copy(), S)], Y, seed)


def test_ends_with_the_newest_in_flight():
    S = st(64, 64, bf16)

    def kernel(y):
        a, b = Y.open()
        for t in (a, b):
            warpgroup.store(t, tiles_of_zeros())
            warpgroup.tma_store(y, (0, 0), t)
        warpgroup.store_wait(1)

    @tiles.inlined
    def tiles_of_zeros():
        return zeros(rt(16, 64, bf16))

    with pytest.raises(Hazard, match="nobody has waited for the TMA store of shared tile 'y'"):
        interpret(cuda.jit(kernel), (1, 1, 1), 128, [tensor(np.zeros((64, 64), bf16.np), S)], Y)


@pytest.mark.parametrize("backend", [meaning, ptx])
@pytest.mark.parametrize("fold", [warpgroup.tma_min, warpgroup.tma_max], ids=["min", "max"])
def test_what_tma_cannot_fold(backend, fold):
    S = st(64, 64, fp32)
    smem = tiles.shared(a=S)

    @cuda.jit
    def body(y):
        (a,) = smem.open()
        fold(y, (0, 0), a)

    with pytest.raises(TypeError, match=r"tma_(min|max): TMA does this for fp16, bf16, got gl\(st\(64, 64, fp32\)"):
        backend(body, tensor(np.zeros((64, 64), np.float32), S), warps=4, shared=smem)


def test_tiles_that_begin_at_any_row(run, sample):
    """`unit` rows at a time, as for a chunk of one of many sequences in an array."""
    S, T = st(64, 64, bf16), rt(16, 64, bf16)
    smem = tiles.shared(x=ring(S, 1))

    @cuda.jit
    def body(x, y):
        (a,) = smem.open()
        a.fill(0, x, (7, 0))
        warpgroup.store(y, warpgroup.load(a.wait(0), T), (0, 0))

    x, y = sample((100, 64), bf16), blank((64, 64), bf16)
    run(body, tensor(x, S, unit=1), y, warps=4, shared=smem)
    assert (y == x[7:71]).all()
