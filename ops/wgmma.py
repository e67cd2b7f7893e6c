"""Matrix products of a warpgroup, by wgmma (sm_90), and waiting for them. Their public names are in ops.warpgroup.

wgmma is asynchronous: `mm_*` and `mma_*` return a *pending* tile, and only `wait` turns it into one that can be used.
A pending accumulator may be handed to the next `mma_*` (the tensor cores keep the order), and to nothing else:

    acc = warpgroup.mm_AB(a.wait(0), b.wait(0))
    for j in range(1, steps):
        acc = warpgroup.mma_AB(acc, a.wait(j), b.wait(j))
        warpgroup.wait(newer=1)         # mma j may go on; those before it are done,
        a.release(j - 1)                # so what they read can be given back
        b.release(j - 1)
    acc = warpgroup.wait(acc)
"""

import numpy as np

from tiles import layout, ptx
from tiles.dtypes import bf16, fp16, fp32
from tiles.interpreter import here
from tiles.interpreter.block import WARPGROUP
from tiles.op import lowers, op
from tiles.plumbing import i64, void
from tiles.types import pending, rt, st
from tiles.values import Pending

ROWS = 64  # of a warpgroup's tile
INPUTS = (bf16, fp16)
ONE_THREAD = 2**18  # multiplications up to which OpenBLAS starts no threads


def _matmul(a, b):
    """a @ b, in parts that BLAS computes on one thread: more threads make a product this small up to 600 times slower when
    the cores are busy."""
    rows = a.shape[0] // WARPGROUP
    step = ONE_THREAD // (rows * b.shape[1])
    return np.concatenate(
        [
            sum(a[r : r + rows, k : k + step] @ b[k : k + step] for k in range(0, a.shape[1], step))
            for r in range(0, a.shape[0], rows)
        ]
    )


def _product(name, transposed, accumulates):
    """The op `name`: acc + a @ b or a @ b, with b as stored or transposed."""

    def meaning(acc, a, b):
        warp, from_shared = here(), not hasattr(a, "array")
        tile = _result(name, None if acc is None else acc.spec, a.spec, b.spec, transposed)
        if isinstance(acc, Pending):
            warp.hand_on(acc)
        slab = (acc, None if from_shared else a.array)

        def compute(slabs):
            left = read(a) if from_shared else np.concatenate([x for _, x in slabs]).astype(np.float32)
            right = read(b)
            out = _matmul(left, right.T if transposed else right)
            return out if acc is None else out + np.concatenate([part(c, rank) for rank, (c, _) in enumerate(slabs)])

        def part(c, rank):
            return c.part(rank) if isinstance(c, Pending) else c.array

        def read(shared):
            return warp.block.shadow.get(shared).astype(np.float32)

        mma, group = warp.issue(compute, slab, *([a, b] if from_shared else [b]))
        return Pending(tile, mma, group)

    def rule(acc, a, b):
        out = _result(name, acc, a, b, transposed)
        return pending(out), lambda builder, *v: _emit(builder, out, acc, a, b, transposed, *v)

    return meaning, rule


def _result(name, acc, a, b, transposed):
    """The type of the product, or what is wrong."""
    right = "st(n, k)" if transposed else "st(k, n)"
    ok = isinstance(a, (rt, st)) and isinstance(b, st) and a.dtype == b.dtype and a.dtype in INPUTS
    n, k = ((b.rows, b.cols) if transposed else (b.cols, b.rows)) if ok else (0, 0)
    ok = ok and (a.rows == ROWS if isinstance(a, st) else a == rt(16, k, a.dtype)) and a.cols == k and k % 16 == 0
    ok = ok and n % 16 == 0 and 16 <= n <= 256
    if not ok or acc not in (None, rt(16, n, fp32), pending(rt(16, n, fp32))):
        only = "; only the accumulator may be in flight" * name.startswith("mma")
        given = ", ".join(str(x) for x in (acc, a, b) if x is not None)
        accumulator = "rt(16, n, fp32), " * name.startswith("mma")
        raise TypeError(
            f"{name}: takes {accumulator}st(64, k) or rt(16, k), and {right}, of one dtype (bf16 or fp16), "
            f"n and k multiples of 16, n up to 256{only}; got {given}"
        )
    return rt(16, n, fp32)


def _emit(b, out, acc, a, right, transposed, vacc, va, vright):
    def describe(tile, address, rows_are_k):
        low = b.zext(b.lshr(address, b.u32(4)), i64)
        start = b.or_(low, i64(layout.descriptor(tile.whole, tile.width, rows_are_k)))
        return lambda k: b.add(start, i64(layout.k_step(k, tile.whole, tile.dtype.itemsize, tile.width, rows_are_k) >> 4))

    registers = b.unpack(va) if isinstance(a, rt) else []
    settled = isinstance(acc, rt)  # the registers of one in flight pass to the next wgmma untouched, not even by the fence
    parts = ptx.wgmma_fence(b, (b.unpack(vacc) if settled else []) + registers)
    c = parts[: out.elements] if settled else b.unpack(vacc) if acc else [b.real(0)] * out.elements
    registers = parts[len(parts) - len(registers) :]
    left = None if registers else describe(a, va, False)
    step = describe(right, vright, not transposed)
    for k in range(0, a.cols, 16):
        operand = registers[k // 4 : k // 4 + 4] if registers else [left(k)]
        c = ptx.wgmma(b, right.dtype, c, operand, step(k), out.cols, not transposed, accumulate=acc is not None or k > 0)
    ptx.wgmma_commit(b)
    return b.pack(c)


@op
def mm_ABt(a, b):
    """a @ b.T in fp32, pending. a: st(64, k) or the warps' rt(16, k); b: st(n, k); both bf16 or both fp16."""
    return _MM_ABT[0](None, a, b)


@op
def mm_AB(a, b):
    """a @ b in fp32, pending. a: st(64, k) or the warps' rt(16, k); b: st(k, n); both bf16 or both fp16."""
    return _MM_AB[0](None, a, b)


@op(takes_pending=True)
def mma_ABt(acc, a, b):
    """acc + a @ b.T in fp32, pending; acc: the warps' rt(16, n, fp32), in flight or not; a, b as for mm_ABt."""
    return _MMA_ABT[0](acc, a, b)


@op(takes_pending=True)
def mma_AB(acc, a, b):
    """acc + a @ b in fp32, pending; acc: the warps' rt(16, n, fp32), in flight or not; a, b as for mm_AB."""
    return _MMA_AB[0](acc, a, b)


_MM_ABT, _MM_AB = _product("mm_ABt", True, False), _product("mm_AB", False, False)
_MMA_ABT, _MMA_AB = _product("mma_ABt", True, True), _product("mma_AB", False, True)


def _without_acc(rule):
    def two(a, b):
        out, emit = rule(None, a, b)
        return out, lambda builder, va, vb: emit(builder, None, va, vb)

    return two


lowers(mm_ABt)(_without_acc(_MM_ABT[1]))
lowers(mm_AB)(_without_acc(_MM_AB[1]))
lowers(mma_ABt)(_MMA_ABT[1])
lowers(mma_AB)(_MMA_AB[1])


@op(takes_pending=True)
def wait(tile=None, newer=0):
    """The tile that a pending one promises. Waits for all mmas of this warpgroup but the `newer` youngest; without a tile that
    is all it does: what those mmas read from shared memory may then be released."""
    return here().complete(tile, newer)


@lowers(wait)
def _(tile, newer: int):
    if not (tile is None or isinstance(tile, pending)):
        raise TypeError(f"wait: takes a tile in flight (from mm_* or mma_*), got {tile}")
    if newer < 0:
        raise TypeError(f"wait: newer must be 0 or more, got {newer}")
    if tile is None:
        return void, lambda b, *_: b.do(f"wgmma.wait_group.sync.aligned {newer};")
    return tile.tile, lambda b, v, *_: ptx.wgmma_wait(b, v, tile.tile.elements, newer)
