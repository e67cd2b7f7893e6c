"""y = x @ w + (x @ a) @ b = [x, x a] @ [w; b]: x (M, K), w (K, N), a (K, 16), b (16, N), y (M, N), for many rows.

`xa`, scratch (M, 16), gets x a from a kernel of its own (in this loop it would cost a fifth), and is one more step along k. A
tile of y leaves a quarter at a time, under the first products of the next one."""

from narrow_product import narrow_product
from numba import cuda
from numpy import int32

import tiles
from ops import columns, persistent_tile, rasterize, subtile, warpgroup, zeros
from tiles import bf16, inlined, ring, rt, shared, st
from tiles.device import machine
from tiles.frameworks import describe

CONSUMERS, STAGES, GROUP = 2, 4, 16
PRODUCER, ROWS, PART = CONSUMERS, 64, 64  # a consumer's rows of y, and the columns that leave at once
THREADS, READERS = (CONSUMERS + 1) * warpgroup.THREADS, CONSUMERS * warpgroup.WARPGROUP
X, W, Y = st(CONSUMERS * ROWS, 64, bf16), st(64, 256, bf16), st(CONSUMERS * ROWS, PART, bf16)
TILE, Y_PART = rt(16, W.cols, bf16), st(ROWS, PART, bf16)
smem = shared(x=ring(X, STAGES, READERS), w=ring(W, STAGES, READERS), y=Y)


@inlined
def step(acc, x, w, i, me):  # adds the i-th tiles' product, in flight, and gives the tiles before back
    acc = warpgroup.mma_AB(acc, subtile(x.wait(i), ROWS, me), w.wait(i))
    warpgroup.wait(newer=1)
    x.release(i - 1)
    w.release(i - 1)
    return acc


@cuda.jit(launch_bounds=(THREADS, 1))
def product(gX, gXA, gW, gB, gY, rows, cols, steps):
    x, w, y = smem.open()
    me, r, j = warpgroup.id(), int32(0), int32(0)  # r tiles of y and j steps along k so far
    if me == PRODUCER:
        warpgroup.release_registers(40)
        while persistent_tile(r) < rows * cols:
            row, col = rasterize(persistent_tile(r), rows, cols, GROUP)
            for i in range(steps - 1):
                x.fill(j + i, gX, (row, i))
                w.fill(j + i, gW, (i, col))
            r, j = int32(r + 1), int32(j + steps)
            x.fill(j - 1, gXA, (row, 0))
            w.fill(j - 1, gB, (0, col))
    else:
        warpgroup.claim_registers(232)
        y = subtile(y, ROWS, me)
        last, row, col = zeros(TILE), rows, int32(0)  # as if of a tile below y, where nothing is written
        while persistent_tile(r) < rows * cols:
            acc = warpgroup.mm_AB(subtile(x.wait(j), ROWS, me), w.wait(j))
            warpgroup.send(gY, (CONSUMERS * row + me, 4 * col), y, columns(last, PART, 0))
            acc = step(step(acc, x, w, j + 1, me), x, w, j + 2, me)
            warpgroup.send(gY, (CONSUMERS * row + me, 4 * col + 1), y, columns(last, PART, 1))
            acc = step(step(acc, x, w, j + 3, me), x, w, j + 4, me)
            warpgroup.send(gY, (CONSUMERS * row + me, 4 * col + 2), y, columns(last, PART, 2))
            acc = step(step(acc, x, w, j + 5, me), x, w, j + 6, me)
            warpgroup.send(gY, (CONSUMERS * row + me, 4 * col + 3), y, columns(last, PART, 3))
            row, col = rasterize(persistent_tile(r), rows, cols, GROUP)
            for i in range(int32(j + 7), int32(j + steps)):
                acc = step(acc, x, w, i, me)
            last = bf16(warpgroup.wait(acc))
            r, j = int32(r + 1), int32(j + steps)
            x.release(j - 1)
            w.release(j - 1)
        warpgroup.send(gY, (CONSUMERS * row + me, 4 * col), y, columns(last, PART, 0))
        warpgroup.send(gY, (CONSUMERS * row + me, 4 * col + 1), y, columns(last, PART, 1))
        warpgroup.send(gY, (CONSUMERS * row + me, 4 * col + 2), y, columns(last, PART, 2))
        warpgroup.send(gY, (CONSUMERS * row + me, 4 * col + 3), y, columns(last, PART, 3))
        warpgroup.store_wait()


def lora_linear(x, w, a, b, y, xa):
    narrow_product(x, a, xa)
    (m, k), n = x.shape, y.shape[1]
    rows, cols, steps = -(-m // X.rows), -(-n // W.cols), max(7, -(-k // X.cols) + 1)
    grid = min(rows * cols, machine(describe(y, "y").device).processors)
    operands = *(tiles.tensor(i, X) for i in (x, xa)), *(tiles.tensor(i, W) for i in (w, b)), tiles.tensor(y, Y_PART)
    tiles.launch(product, grid, THREADS, shared=smem)(*operands, rows, cols, steps)
