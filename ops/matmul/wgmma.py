"""Matrix products of a warpgroup, by wgmma (sm_90), and waiting for them. Their public names are in ops.warpgroup.

wgmma is asynchronous: `mm_*` and `mma_*` return a *pending* tile, and only `wait` turns it into one that can be used.
A pending accumulator may be handed to the next `mma_*` (the tensor cores keep the order), and to nothing else:

    acc = warpgroup.mm_AB(a.wait(0), b.wait(0))
    for j in range(1, steps):
        acc = warpgroup.mma_AB(acc, a.wait(j), b.wait(j))
        warpgroup.wait(newer=1)         # mma j may go on; those before it are done,
        a.release(j - 1)                # so the tiles that they read can be released
        b.release(j - 1)
    acc = warpgroup.wait(acc)

A in registers is read until then, too. A loop that makes the next A before it waits for the product of the last one writes the
registers that this one reads: compiling warns of it (tiles/compiling/wgmma_overwrites.py).
"""

import numpy as np

from tiles import layout
from tiles.compiling import ptx
from tiles.compiling.builder import f32, i32, i64
from tiles.compiling.numba_types import void
from tiles.dtypes import int32, tf32
from tiles.interpreter import TileCells, current_warp
from tiles.op import lowers, op
from tiles.types import pending, rt
from tiles.values import PendingTile

from ..threads.lanes import spread
from .product import product
from .supported import SLICE, check, sums_of, transposed_in

ROWS = 64  # of a warpgroup's tile


def _meaning(name, acc, a, b):
    """Issue the product `name`, computed when it is waited for: its operands are in use until then."""
    transposed, warp, from_shared = transposed_in(name), current_warp(), not hasattr(a, "array")
    tile = _result(name, None if acc is None else acc.spec, a.spec, b.spec)
    if isinstance(acc, PendingTile):
        warp.chain(acc)
    slab = (acc, None if from_shared else a.array)

    def compute(slabs):
        left = read(a, transposed.left) if from_shared else np.concatenate([x for _, x in slabs])
        out = product(left, read(b, transposed.right))
        return out if acc is None else out + np.concatenate([part(c, rank) for rank, (c, _) in enumerate(slabs)])

    def part(c, rank):
        return c.part(rank) if isinstance(c, PendingTile) else c.array

    def read(shared, is_transposed):
        array = warp.block.shadow.get(shared)
        return array.T if is_transposed else array

    rows = range(16 * warp.rank, 16 * warp.rank + 16)  # its rows of the product
    left = [(a, TileCells(a, cols=rows) if transposed.left else TileCells(a, rows))] if from_shared else []
    mma, group = warp.issue(compute, slab, *left, (b, TileCells(b)))
    return PendingTile(tile, mma, group)


def _result(name, acc, a, b):
    """The type of the product; TypeError if there is no such product of these operands."""
    m, n, _ = check(f"warpgroup.{name}", acc, a, b)
    return rt(m, n, sums_of(a.dtype))


def _operand(b, tile, address, rows_are_k):
    """k -> the descriptor of a shared operand's slice that begins at `k` of the contracted axis."""
    low = b.zext(b.lshr(address, b.u32(4)), i64)
    start = b.or_(low, i64(layout.descriptor(tile.parent_rows, tile.width, rows_are_k)))
    return lambda k: b.add(start, i64(layout.k_step(k, tile.parent_rows, tile.dtype.itemsize, tile.width, rows_are_k) >> 4))


def _left_registers(b, a, value):
    """The registers of a left operand in wgmma's order: of tf32, elements t and t + 4 of eight, where a lane has 2t and 2t +
    1."""
    registers = b.unpack(value)
    if a.dtype is not tf32:
        return registers
    pairs = [spread(b, *registers[k : k + 2]) for k in range(0, len(registers), 2)]
    return [b.bitcast(pair[i], i32) for k in range(0, len(pairs), 2) for i in (0, 1) for pair in pairs[k : k + 2]]


def _emit(b, name, out, acc, a, right, vacc, va, vright):
    transposed = transposed_in(name)
    registers = _left_registers(b, a, va) if isinstance(a, rt) else []
    settled = isinstance(acc, rt)  # the registers of one in flight pass to the next wgmma untouched, not even by the fence
    parts = ptx.wgmma_fence(b, (b.unpack(vacc) if settled else []) + registers)
    fresh = [
        b.undefined(i32 if out.dtype is int32 else f32)
    ] * out.elements  # without an accumulator the first product writes and does not read
    c = parts[: out.elements] if settled else b.unpack(vacc) if acc else fresh
    registers = parts[len(parts) - len(registers) :]
    left = None if registers else _operand(b, a, va, transposed.left)
    step = _operand(b, right, vright, not transposed.right)
    slices = SLICE // right.dtype.itemsize
    for k in range(0, right.shape[transposed.right], slices):
        operand = registers[4 * k // slices :][:4] if registers else [left(k)]
        across = transposed.left, not transposed.right  # these operands' rows run along k
        c = ptx.wgmma(b, (a.dtype, right.dtype), c, operand, step(k), out.cols, across, accumulate=acc is not None or k > 0)
    ptx.wgmma_commit(b)
    return b.pack(c)


@op(takes_operands=True)
def mm_AB(a, b):
    """a @ b in fp32, pending. a: st(64, k) or the warps' rt(16, k); b: st(k, n). Dtypes: ops.matmul.SUPPORTED; sums of fp8
    products keep some 13 bits on the tensor cores."""
    return _meaning("mm_AB", None, a, b)


@op(takes_operands=True)
def mm_ABt(a, b):
    """a @ b.T in fp32, of int8 in int32, pending. a: st(64, k) or the warps' rt(16, k); b: st(n, k)."""
    return _meaning("mm_ABt", None, a, b)


@op(takes_operands=True)
def mm_AtB(a, b):
    """a.T @ b in fp32, pending. a: st(k, 64); b: st(k, n)."""
    return _meaning("mm_AtB", None, a, b)


@op(takes_operands=True)
def mm_AtBt(a, b):
    """a.T @ b.T in fp32, pending. a: st(k, 64); b: st(n, k)."""
    return _meaning("mm_AtBt", None, a, b)


@op(takes_pending=True, takes_operands=True, takes_sums=True)
def mma_AB(acc, a, b):
    """acc + a @ b in fp32, pending; acc: the warps' rt(16, n, fp32), in flight or not; a, b as for mm_AB."""
    return _meaning("mma_AB", acc, a, b)


@op(takes_pending=True, takes_operands=True, takes_sums=True)
def mma_ABt(acc, a, b):
    """acc + a @ b.T in fp32, of int8 in int32, pending; acc as for mma_AB, of int32 if they are int8; a, b as for mm_ABt."""
    return _meaning("mma_ABt", acc, a, b)


@op(takes_pending=True, takes_operands=True, takes_sums=True)
def mma_AtB(acc, a, b):
    """acc + a.T @ b in fp32, pending; acc as for mma_AB; a, b as for mm_AtB."""
    return _meaning("mma_AtB", acc, a, b)


@op(takes_pending=True, takes_operands=True, takes_sums=True)
def mma_AtBt(acc, a, b):
    """acc + a.T @ b.T in fp32, pending; acc as for mma_AB; a, b as for mm_AtBt."""
    return _meaning("mma_AtBt", acc, a, b)


def _adding(name):
    def rule(acc, a, b):
        out = _result(name, acc, a, b)
        return pending(out), lambda builder, *values: _emit(builder, name, out, acc, a, b, *values)

    return rule


def _without_sum(name):
    def rule(a, b):
        out = _result(name, None, a, b)
        return pending(out), lambda builder, *values: _emit(builder, name, out, None, a, b, None, *values)

    return rule


for _mm, _mma in ((mm_AB, mma_AB), (mm_ABt, mma_ABt), (mm_AtB, mma_AtB), (mm_AtBt, mma_AtBt)):
    lowers(_mm)(_without_sum(_mm.__name__))
    lowers(_mma)(_adding(_mma.__name__))


@op(takes_pending=True)
def wait(tile=None, newer=0):
    """The tile that a pending one promises. It waits for all mmas of this warpgroup except the `newer` newest. Without a tile
    it only waits: shared tiles that those mmas read may then be released."""
    return current_warp().complete(tile, newer)


@lowers(wait)
def _(tile, newer: int):
    if not (tile is None or isinstance(tile, pending)):
        loops = (
            ": if a loop before makes it one in flight, it would be none after no rounds; begin with mm_* before the loop, or "
        )
        remedy = f"{loops}wait within it" if isinstance(tile, rt) else ""
        raise TypeError(f"wait: takes a tile in flight (from mm_* or mma_*), got {tile}{remedy}")
    if newer < 0:
        raise TypeError(f"wait: newer must be 0 or more, got {newer}")
    if tile is None:
        return void, lambda b, *_: b.do(f"wgmma.wait_group.sync.aligned {newer};")
    return tile.tile, lambda b, v, *_: ptx.wgmma_wait(b, v, newer)
