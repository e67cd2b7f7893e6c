"""What four warps do together. A warpgroup's tile of 64 rows is four rt(16, n), one a warp.

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

from dataclasses import dataclass

import numpy as np
from numba.cuda import types

from tiles import layout, ptx
from tiles.dtypes import bf16, fp16, fp32
from tiles.interpreter import here
from tiles.interpreter.block import WARPGROUP
from tiles.layout import LANES
from tiles.op import integer, lowers, op
from tiles.plumbing import compile_time, i64, void
from tiles.shared import check_tensor, elected
from tiles.types import pending, rt, st
from tiles.values import Pending

from . import make, mask, memory

THREADS = WARPGROUP * LANES
ROWS = 64
INPUTS = (bf16, fp16)
ONE_THREAD = 2**18  # multiplications up to which OpenBLAS starts no threads


def rank(b):
    """This warp's place in its warpgroup, as the lowering of `16 * rank` needs it."""
    return b.and_(b.lshr(b.special("tid.x"), b.u32(5)), b.u32(WARPGROUP - 1))


def first_row(spec):
    """Where this warp's rows of a warpgroup's tile begin."""
    return lambda b: b.mul(rank(b), b.u32(getattr(spec, "rows", None) or spec.length))


@op
def id():
    """Which warpgroup of the block this is."""
    return here().group


@lowers(id)
def _():  # through a shuffle, so that ptxas knows it is uniform: 4 % fewer instructions in a loop that depends on it
    return types.int32, lambda b: ptx.uniform(b, b.lshr(b.special("tid.x"), b.u32(7)))


# ---- registers -----------------------------------------------------------------------------------------------------
@op
def claim_registers(n):
    """Give every thread of this warpgroup n registers (setmaxnreg.inc); waits until others have released enough."""
    here().set_registers(n, more=True)


@op
def release_registers(n):
    """Keep n registers per thread, free the rest for other warpgroups (setmaxnreg.dec)."""
    here().set_registers(n, more=False)


def _register_count(name, more):
    def rule(n: int):
        if n % 8 or not 24 <= n <= 256:
            raise TypeError(f"{name}: a multiple of 8 from 24 to 256, got {n}")
        return void, lambda b, _: ptx.set_registers(b, n, more)

    return rule


lowers(claim_registers)(_register_count("claim_registers", True))
lowers(release_registers)(_register_count("release_registers", False))


# ---- matrix multiplication -----------------------------------------------------------------------------------------
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


# ---- masks and indices ---------------------------------------------------------------------------------------------
causal, tril, triu, lower_fill, upper_fill = (
    mask.through_warpgroup(face, first_row, lambda tile: tile.rows * here().rank)
    for face in (mask.causal, mask.tril, mask.triu, mask.lower_fill, mask.upper_fill)
)


@op
def bounds(tile, rows, cols, value):
    """tile, with `value` in every row from `rows` on, counted through the warpgroup's 64, and every column from `cols` on."""
    return mask.bounds_array(tile, rows, cols, value, tile.rows * here().rank)


lowers(bounds)(mask.bounds_rule("warpgroup.bounds", first_row))


@op
def row_index(shape):
    """ops.row_index, with the rows of the four warps one below the other: 0 to 63 for rt(16, n)."""
    return make.index_array(shape, 0, shape.shape[0] * here().rank)


@lowers(row_index)
def _(shape: type):
    return make.index_rule("warpgroup.row_index", shape, 0, first_row(shape))


# ---- memory --------------------------------------------------------------------------------------------------------
@op
def store(target, value, at=None, rows=-2, cols=-1, aligned=False):
    """target[...] = value, as ops.store, with the rows of the four warps one below the other."""
    memory.store_rows(target, value, at, rows, cols, aligned, here().rank)


@lowers(store)
def _(target, value, at, rows: int, cols: int, aligned: int):
    memory.check_store("warpgroup.store", target, value, at, rows, cols, aligned, WARPGROUP)
    return void, memory.lower_store(target, value, rows, cols, aligned, first_row(value))


@op
def load(source, spec, at=None, rows=-2, cols=-1):
    """The type `spec` from source, as ops.load, with the rows of the four warps one below the other."""
    return memory.load_rows(source, spec, at, rows, cols, here().rank)


@lowers(load)
def _(source, spec: type, at, rows: int, cols: int):
    memory.check_load("warpgroup.load", source, spec, at, rows, cols, WARPGROUP)
    if isinstance(source, st):
        return spec, memory.lower_shared_load(source, spec, first_row(spec))
    return spec, memory.lower_global_load(source, spec, rows, cols, first_row(spec))


def _meet(warp):
    warp.fence_async()
    warp.block.named(LAST_NAMED - warp.group, THREADS).meet(warp, THREADS, what="the warpgroup's meeting: ")


def _emit_meet(b):
    ptx.fence_async(b)
    ptx.named_barrier(b, b.sub(b.u32(LAST_NAMED), b.lshr(b.special("tid.x"), b.u32(7))), THREADS)


LAST_NAMED = 15  # warpgroups take named barriers from here down, up to eight of them; 0 is the block's, `turns` count up
FREE_NAMED = LAST_NAMED - 7


@op
def sync():
    """The four warps meet. What they wrote to shared memory is then visible to all of them, to their wgmmas and to TMA."""
    _meet(here())


@lowers(sync)
def _():
    return void, _emit_meet


@op
def tma_store(target, at, tile):
    """target[at] = a shared tile, or a part of one, that this warpgroup wrote, by TMA; rows and columns outside the array are
    left out. Meets first, so that all four warps' stores are in it. Follow with `store_wait` before the end, and with
    `store_wait` and `sync` before the tile is written again. TMA writes 16 bytes at a time: TypeError for an array whose
    columns are not a multiple of that, since what lies behind them would be overwritten."""
    warp = here()
    _meet(warp)
    if warp.rank == 0:
        warp.store_async(target, at, tile)


@lowers(tma_store)
def _(target, at, tile):
    check_tensor("tma_store", target)
    if not (isinstance(tile, st) and target.tile.alone == tile.alone):
        raise TypeError(f"tma_store: the target takes {target.tile}, got {tile}")
    if not target.storable:
        raise TypeError(
            f"tma_store: TMA writes 16 bytes at a time, and would write past columns that are not a multiple of that: "
            f"{target}; use warpgroup.store, or an array with room"
        )
    if not (isinstance(at, types.BaseTuple) and 1 <= len(at) <= target.rank and all(map(integer, at))):
        raise TypeError(f"tma_store: `at` must be up to {target.rank} integers, got {memory.said(at)}")

    def emit(b, vtarget, vat, vtile):
        _emit_meet(b)
        with b.if_then(elected(b, THREADS)):
            ptx.tma_store(b, target, vtarget, b.unpack(vat), tile, vtile)

    return void, emit


@op
def store_wait():
    """Until the bulk stores that this warpgroup's first thread started have read their shared tiles."""
    if here().rank == 0:
        here().wait_stores()


@lowers(store_wait)
def _():
    def emit(b):
        with b.if_then(elected(b, THREADS)):
            ptx.tma_store_wait(b)

    return void, emit


# ---- taking turns --------------------------------------------------------------------------------------------------
@compile_time
@dataclass(frozen=True)
class turns:
    """`players` warpgroups, numbered from 0, take turns to issue their mmas, so that one's softmax runs under another's mma.
    Player i waits for named barrier `first` + i; more than one player."""

    players: int = 2
    first: int = 1

    def __post_init__(self):
        if self.players < 2 or self.first < 1 or self.first + self.players > FREE_NAMED:
            raise ValueError(
                f"turns: 2 or more players on named barriers 1 to {FREE_NAMED - 1}, got {self.players} from {self.first} on"
            )

    def __str__(self):
        return f"turns({self.players} players)"

    def _arrive(self, warp, player, sync):
        if not 0 <= player <= self.players:
            raise warp.hazard(f"{self} has no player {player}")
        player %= self.players
        what = f"the turn of player {player} (`begin` grants the first, `give` the next): "
        warp.block.named(self.first + player, 2 * THREADS).meet(warp, 2 * THREADS, sync, what)

    @op
    def begin(self, me):
        """Once, before the first `take`: the first turn is player 0's (unprimed, all would wait for ever)."""
        if me == self.players - 1:
            self._arrive(here(), 0, sync=False)

    @op
    def take(self, me):
        """Wait for my turn."""
        self._arrive(here(), me, sync=True)

    @op
    def give(self, me):
        """The next player's turn."""
        self._arrive(here(), me + 1, sync=False)


def _needs_player(name, me):
    if not integer(me):
        raise TypeError(f"{name}: the player's number must be an integer, got {me}")


@lowers(turns.begin)
def _(turn, me):
    _needs_player("begin", me)

    def emit(b, _, me):
        with b.if_then(b.icmp_unsigned("==", b.u32(me), b.u32(turn.players - 1))):
            ptx.named_barrier(b, b.u32(turn.first), 2 * THREADS, sync=False)

    return void, emit


@lowers(turns.take)
def _(turn, me):
    _needs_player("take", me)
    return void, lambda b, _, me: ptx.named_barrier(b, b.add(b.u32(me), b.u32(turn.first)), 2 * THREADS)


@lowers(turns.give)
def _(turn, me):
    _needs_player("give", me)

    def emit(b, _, me):
        last = b.icmp_unsigned("==", b.u32(me), b.u32(turn.players - 1))
        after = b.select(last, b.u32(turn.first), b.add(b.u32(me), b.u32(turn.first + 1)))
        ptx.named_barrier(b, after, 2 * THREADS, sync=False)

    return void, emit
