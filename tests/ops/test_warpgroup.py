"""ops/warpgroup.py: wgmma in all its forms, TMA stores, meetings and turns."""

import numpy as np
import pytest
from numba import cuda
from sweep import EPS, blank, close, code, gpu, guarded, meaning, pairs, wide

import tiles
from ops import load, raw, row_sum, store, warpgroup, zeros
from tiles import bf16, fp16, fp32, ring, rt, st, tensor

EVERY_N = range(16, 257, 16)
EVERY_K = [16, 32, 48, 64, 80, 112, 128, 192, 256]


def widths(cols):
    """The panel widths that divide a row of `cols` 2-byte elements, widest first."""
    return [w for w in (128, 64, 32) if cols * 2 % w == 0]


def products(form):
    """Every n once, every k, dtype and width in turn, and by turns with a from registers in the plain product and from shared
    memory in the one that adds, or the other way round: (form, n, k, dtype, width of b, width of a, plain from registers)."""
    for i, (n, k, dtype) in enumerate(pairs(EVERY_N, EVERY_K, [bf16, fp16])):
        b, a = widths(n if form == "AB" else k), widths(k)
        yield form, n, k, dtype, b[i % len(b)], a[(i + 1) % len(a)], i % 2 == (form == "AB")


def exact(a, b, acc=0.0):
    """(the product in float64, how wrong fp32 sums of it may be)"""
    return acc + wide(a) @ wide(b), (np.abs(acc) + np.abs(wide(a)) @ np.abs(wide(b))) * EPS[fp32] * 8


@pytest.mark.parametrize(
    ("form", "n", "k", "dtype", "width", "left_width", "registers_first"), [*products("ABt"), *products("AB")], ids=str
)
def test_products(run, sample, form, n, k, dtype, width, left_width, registers_first):
    """a @ b.T or a @ b, alone and added to an accumulator, a from shared memory and from registers."""
    mm, mma = getattr(warpgroup, f"mm_{form}"), getattr(warpgroup, f"mma_{form}")
    A, B = st(64, k, dtype, left_width), st(*((k, n) if form == "AB" else (n, k)), dtype, width)
    T, O = rt(16, k, dtype), rt(16, n, fp32)
    smem = tiles.shared(a=ring(A, 1), b=ring(B, 1))

    @cuda.jit
    def body(gA, gB, C, plain, added):
        a, b = smem.open()
        a.fill(0, gA, (0, 0))
        b.fill(0, gB, (0, 0))
        left, right = a.wait(0), b.wait(0)
        if registers_first:
            warpgroup.store(plain, warpgroup.wait(mm(warpgroup.load(left, T), right)), (0, 0))
            warpgroup.store(added, warpgroup.wait(mma(warpgroup.load(C, O, (0, 0)), left, right)), (0, 0))
        else:
            warpgroup.store(plain, warpgroup.wait(mm(left, right)), (0, 0))
            acc = warpgroup.load(C, O, (0, 0))
            warpgroup.store(added, warpgroup.wait(mma(acc, warpgroup.load(left, T), right)), (0, 0))

    a, b, c = sample(A.shape, dtype), sample(B.shape, dtype), sample((64, n))
    plain, added = blank((64, n)), blank((64, n))
    run(body, tensor(a, A), tensor(b, B), c, plain, added, warps=4, shared=smem)
    for out, acc in ((plain, 0.0), (added, wide(c))):
        want, atol = exact(a, b if form == "AB" else b.T, acc)
        close(out, want, atol=atol)


@pytest.mark.parametrize("form, from_registers", [("AB", False), ("ABt", True), ("AB", True), ("ABt", False)])
def test_accumulator_in_flight(run, sample, form, from_registers):
    """A sum over five tiles whose mmas follow each other without a wait, and one more that starts from registers."""
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
        exact(x, y if form == "AB" else y.T)
        for x, y in zip(np.split(a, steps, axis=1), np.split(b, steps, axis=1), strict=True)
    ]
    want, atol = (parts[0][k] + 2 * sum(p[k] for p in parts[1:]) for k in (0, 1))
    close(out, want, atol=2 * atol)
    close(added, c + 2 * parts[-1][0], atol=2 * parts[-1][1] + np.abs(c) * EPS[fp32])


def test_two_in_flight_and_what_ordinary_stores_wrote(run, sample):
    """The attention pattern: S and O in flight together, S waited for first; operands written by stores, seen after sync."""
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


TMA = pairs([bf16, fp32, fp16, bf16], [128, 64, 32], [(37, 72), (64, 64), (130, 8), (9, 200), (70, 4), (1, 136)])


@pytest.mark.parametrize(("dtype", "width", "shape"), [case for case in TMA if case[2][1] * case[0].itemsize % 16 == 0])
def test_tma_load_and_store_ragged(run, sample, dtype, width, shape):
    """Tiles over every edge: zeros come in, nothing goes out past the array, whose columns are a multiple of 16 bytes."""
    S, T = st(64, 64, dtype, width), rt(16, 64, dtype)
    smem = tiles.shared(x=ring(S, 2), y=S)
    down, right = -(-shape[0] // 64), -(-shape[1] // 64)

    @cuda.jit
    def body(x, seen, y):
        a, b = smem.open()
        for i in range(down):
            for j in range(right):
                n = i * right + j
                a.fill(n, x, (1, i, j))
                tile = warpgroup.load(a.wait(n), T)
                a.release(n)
                warpgroup.store(seen, tile, (64 * i, 64 * j))
                warpgroup.store(b, tile)
                warpgroup.tma_store(y, (2, i, j), b)
                warpgroup.store_wait()
                warpgroup.sync()

    room = 16 // dtype.itemsize  # a tensor map's strides and address are multiples of 16 bytes
    x = sample((3, *shape), dtype)
    root = np.full((4, shape[0] + 1, shape[1] + 2 * room), 7, dtype.np)
    y, seen = root[:, : shape[0], room:-room], blank((64 * down, 64 * right), dtype)
    run(body, tensor(x, S), seen, tensor(y, S), warps=4, shared=smem)
    assert (seen[: shape[0], : shape[1]] == x[1]).all()
    assert (seen[shape[0] :] == 0).all() and (seen[:, shape[1] :] == 0).all()
    assert (y[2] == x[1]).all()
    y[2] = 7
    assert (root == 7).all(), "memory around the array was written"


RAGGED = pairs([bf16, fp32, fp16], [128, 64, 32], [(37, 70), (64, 61), (130, 10), (9, 199)])


@pytest.mark.parametrize(("dtype", "width", "shape"), RAGGED)
def test_tma_load_of_part_of_a_chunk(run, sample, dtype, width, shape):
    """Columns that end inside 16 bytes: what lies behind them in memory is not loaded."""
    S, T = st(64, 64, dtype, width), rt(16, 64, dtype)
    smem = tiles.shared(x=ring(S, 2))
    down, right = -(-shape[0] // 64), -(-shape[1] // 64)

    @cuda.jit
    def body(x, seen):
        (a,) = smem.open()
        for i in range(down):
            for j in range(right):
                n = i * right + j
                a.fill(n, x, (1, i, j))
                warpgroup.store(seen, warpgroup.load(a.wait(n), T), (64 * i, 64 * j))
                a.release(n)

    root = np.full((3, shape[0], -(-shape[1] * dtype.itemsize // 16) * 16 // dtype.itemsize), np.nan, dtype.np)
    x, seen = root[:, :, : shape[1]], blank((64 * down, 64 * right), dtype)
    x[...] = sample(x.shape, dtype)
    run(body, tensor(x, S), seen, warps=4, shared=smem)
    assert (seen[: shape[0], : shape[1]] == x[1]).all()
    assert (seen[shape[0] :] == 0).all() and (seen[:, shape[1] :] == 0).all()


@pytest.mark.parametrize("backend", [meaning, code, pytest.param(gpu, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "cols"), [(bf16, 70), (fp16, 4), (fp32, 63)])
def test_tma_store_to_part_of_a_chunk_is_refused(backend, dtype, cols):
    """TMA writes 16 bytes at a time: what lies behind the array's columns would be overwritten."""
    S, T = st(64, 64, dtype), rt(16, 64, dtype)
    smem = tiles.shared(y=S)

    def body(y):
        (b,) = smem.open()
        warpgroup.store(b, zeros(T))
        warpgroup.tma_store(y, (0, 0), b)
        warpgroup.store_wait()

    root = np.full((64, 80), 7, dtype.np)
    words = (
        "tma_store: TMA writes 16 bytes at a time, and would write past columns that are not a multiple of that, the tile's "
    )
    with pytest.raises(TypeError) as error:
        backend(cuda.jit(body), tensor(root[:, :cols], S), warps=4, shared=smem)
    message = str(error.value)
    assert message.startswith(words + "own values up to the next one: gl(st(64, 64")
    assert "use warpgroup.store, or an array with room" in message
    assert (root == 7).all()


def test_a_raw_tma_store_to_part_of_a_chunk():
    """The instruction without its guard: the interpreter stops it, the card would write past the columns."""
    S = st(16, 64, bf16)
    smem = tiles.shared(y=S)

    @cuda.jit
    def body(y):
        (b,) = smem.open()
        store(b, zeros(rt_of_s))
        raw.fence_async()
        raw.tma_store(y, (0, 0), b)
        raw.store_wait()

    rt_of_s = rt(16, 64, bf16)
    with pytest.raises(tiles.Hazard, match="TMA writes 16 bytes at a time, and would write past the columns of gl"):
        meaning(body, tensor(np.zeros((16, 72), bf16.np)[:, :70], S), shared=smem)


@pytest.mark.parametrize("backend", [meaning, code])
def test_an_array_is_no_tensor(backend):
    """TMA takes tensors; of a plain array the message says how to make one."""
    S = st(64, 64, bf16)
    smem = tiles.shared(x=ring(S, 1), y=S)

    def filled(x):
        a, _ = smem.open()
        a.fill(0, x, (0, 0))

    def stored(x):
        _, b = smem.open()
        warpgroup.tma_store(x, (0, 0), b)

    def filled_from_a_tile(x):
        a, b = smem.open()
        a.fill(0, b, (0, 0))

    words = "TMA must be told how the array is cut: pass tiles.tensor(array, tile) to the launch, got array(float32, 2d, A)"
    for kernel, message in {
        filled: f"fill: {words}",
        stored: f"tma_store: {words}",
        filled_from_a_tile: "fill: takes a tiles.tensor, got st(64, 64, bf16)",
    }.items():
        with pytest.raises(TypeError) as error:
            backend(cuda.jit(kernel), np.zeros((64, 64), np.float32), warps=4, shared=smem)
        assert str(error.value).startswith(message)


def test_tma_along_any_axes(run, sample):
    """(B, S, H, D) as attention has it: rows along axis 1, columns along the last, the others indexed."""
    S, T = st(64, 64, bf16), rt(16, 64, bf16)
    smem = tiles.shared(x=ring(S, 1), y=S)

    @cuda.jit
    def body(x, y):
        a, b = smem.open()
        a.fill(0, x, (1, 1, 2))
        warpgroup.store(b, warpgroup.load(a.wait(0), T) * 2.0)
        warpgroup.tma_store(y, (0, 0, 1), b)
        warpgroup.store_wait()

    x, y = sample((2, 100, 3, 72), bf16), blank((1, 50, 2, 64), bf16)
    run(body, tensor(x, S, rows=1), tensor(y, S, rows=1), warps=4, shared=smem)
    want = np.zeros((50, 64), np.float32)
    want[:36] = 2 * x[1, 64:100, 2, :64].astype(np.float32)
    assert (y[0, :, 1] == want).all() and np.isnan(y[0, :, 0].astype(np.float32)).all()


@pytest.mark.parametrize("players", [2, 3])
def test_turns_order_the_players(run_apart, players):
    """Each player appends its number as a digit to base 4, in turn and without atomics."""
    turn, rounds = warpgroup.turns(players), 4
    digits = rt(16, 16, fp32).col_vec

    @cuda.jit
    def body(log):
        me = warpgroup.id()
        turn.begin(me)
        for _ in range(rounds):
            turn.take(me)
            if cuda.threadIdx.x % 128 < 32:
                store(log, load(log, digits, (0,)) * 4 + (me + 1), (0,))
            warpgroup.sync()
            turn.give(me)

    log = np.zeros(16, np.float32)
    run_apart(body, log, warps=4 * players)
    want = 0
    for _ in range(rounds):
        for player in range(players):
            want = 4 * want + player + 1
    assert (log == np.float32(want)).all() and want < 2**24


def test_producer_and_consumer(run_apart, sample):
    """A producer warpgroup fills a ring, two consumers with more registers sum its tiles' rows."""
    S, T, count = st(64, 64, bf16), rt(16, 64, fp32), 7
    smem = tiles.shared(x=ring(S, 3, readers=8))

    @cuda.jit(launch_bounds=(384, 1))
    def body(x, out):
        (a,) = smem.open()
        me = warpgroup.id()
        if me == 2:
            warpgroup.release_registers(24)
            for j in range(count):
                a.fill(j, x, (j,))
        else:
            warpgroup.claim_registers(240)
            total = zeros(T.col_vec)
            for j in range(count):
                total += row_sum(warpgroup.load(a.wait(j), T))
                a.release(j)
            warpgroup.store(out, total, (me, 0))

    x, out = sample((64 * count, 64), bf16), blank((2, 64))
    run_apart(body, tensor(x, S), out, warps=12, shared=smem)
    X = wide(x).reshape(count, 64, 64)
    close(out, [X.sum(axis=(0, 2))] * 2, atol=np.abs(X).sum(axis=(0, 2)) * EPS[fp32] * 8)


def test_two_warpgroups_meet_apart(run_apart, sample):
    """`sync` is each warpgroup's own: they pass through it different numbers of times."""
    S, T, whole = st(64, 64, fp16), rt(16, 64, fp16), rt(64, 64, fp16)
    smem = tiles.shared(a=S, b=S)

    @cuda.jit
    def body(x, y):
        a, b = smem.open()
        if warpgroup.id() == 0:
            warpgroup.store(a, warpgroup.load(x, T, (0, 0)))
            warpgroup.sync()
            store_reversed(a, y, 0)
        else:
            for _ in range(3):
                warpgroup.store(b, warpgroup.load(x, T, (64, 0)))
                warpgroup.sync()
            store_reversed(b, y, 64)

    @tiles.inlined
    def store_reversed(tile, y, row):
        if cuda.threadIdx.x % 128 < 32:
            store(y, load(tile, whole), (row, 0))

    x, (y, check) = sample((128, 64), fp16), guarded((128, 64), fp16)
    run_apart(body, x, y, warps=8, shared=smem)
    check()
    assert (y == x).all()
