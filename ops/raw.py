"""The instructions without their guards, for experts and for the broken kernels of the tests.

Here nothing fences, elects a thread or counts phases for you. A barrier or shared tile comes from shared storage:
`smem = shared(x=st(64, 64, bf16), full=barrier(1))`. The interpreter checks what these ops do all the same.
"""

import inspect

from tiles.compiling import ptx
from tiles.compiling.numba_types import void
from tiles.interpreter import current_warp
from tiles.layout import LANES
from tiles.numba_names import types
from tiles.op import integer, lowers, op
from tiles.ring import elected
from tiles.types import barrier, gl, st, sv


def _lowers(op_function, *kinds, emit, check=lambda name, *specs: None):
    """A rule by kinds: a type, or `int` for any integer; `emit(b, specs, *values)`. check(name, *specs): refuses what else is
    wrong."""

    def rule(*specs):
        for spec, kind in zip(specs, kinds, strict=True):
            if not (integer(spec) if kind is int else isinstance(spec, kind)):
                names = ", ".join(getattr(k, "__name__", str(k)) for k in kinds)
                raise TypeError(f"raw.{op_function.__name__}: takes {names}, got {', '.join(map(str, specs))}")
        check(f"raw.{op_function.__name__}", *specs)
        return void, lambda b, *values: emit(b, specs, *values)

    rule.__signature__ = inspect.signature(op_function)
    lowers(op_function)(rule)


def _one_lane(instruction):
    def emit(b, specs, *values):
        with b.if_then(elected(b, LANES)):
            instruction(b, *values)

    return emit


@op
def arrive(bar):
    """One arrival of this warp on a barrier."""
    bar.arrive(current_warp())


@op
def expect(bar, nbytes):
    """One arrival of this warp on a barrier, which then also waits for `nbytes` bytes of copies."""
    bar.arrive(current_warp(), nbytes)


@op
def wait(bar, phases):
    """Wait until `phases` phases of a barrier are complete. The hardware sees only the parity of this number."""
    bar.wait(current_warp(), phases)


@op
def tma_load(tile, source, at, bar):
    """Copy source[at] into a shared tile; its bytes count on the barrier, which must expect them."""
    current_warp().load_async(tile, bar, source, at)


@op
def tma_store(target, at, tile):
    """Copy a shared tile to target[at], with no fence before. It writes whole chunks of 16 bytes: of a row of the array that is
    no multiple of them, the tile's own values up to the next multiple past its end."""
    current_warp().store_async(target, at, tile)


@op
def store_wait():
    """Wait until this warp's bulk stores have read their shared tiles."""
    current_warp().wait_stores()


@op
def fence_async():
    """This warp's ordinary accesses to shared memory become visible to wgmma and TMA."""
    current_warp().fence_async()


@op
def named_sync(number, threads):
    """bar.sync: until `threads` threads have arrived on a named barrier."""
    current_warp().block.named(number, threads).sync(current_warp(), threads)


@op
def named_arrive(number, threads):
    """bar.arrive: arrive on a named barrier without waiting."""
    current_warp().block.named(number, threads).sync(current_warp(), threads, wait=False)


def _check_copy(name, tensor, at, tile):
    """TypeError if TMA copies other tiles, or has no such index."""
    if not (1 <= len(at) <= tensor.rank and all(map(integer, at))):
        raise TypeError(f"{name}: `at` must be up to {tensor.rank} integers, got {', '.join(map(str, at))}")
    if tensor.tile.unsliced != tile.unsliced:
        raise TypeError(f"{name}: the array is cut into {tensor.tile}, got {tile}")


def _check_load(name, tile, tensor, at, _):
    _check_copy(name, tensor, at, tile)


def _emit_load(b, specs, tile, source, at, bar):
    with b.if_then(elected(b, LANES)):
        ptx.tma_load(b, specs[1], tile, source, b.unpack(at), bar, specs[0])


def _emit_store(b, specs, target, at, tile):
    with b.if_then(elected(b, LANES)):
        ptx.tma_store(b, specs[0], target, b.unpack(at), specs[2], tile)


_lowers(arrive, barrier, emit=_one_lane(ptx.mbarrier_arrive))
_lowers(expect, barrier, int, emit=_one_lane(lambda b, bar, n: ptx.mbarrier_expect(b, bar, b.u32(n))))
_lowers(wait, barrier, int, emit=lambda b, _, bar, n: ptx.mbarrier_wait(b, bar, b.and_(b.sub(b.u32(n), b.u32(1)), b.u32(1))))
_lowers(tma_load, st | sv, gl, types.BaseTuple, barrier, emit=_emit_load, check=_check_load)
_lowers(tma_store, gl, types.BaseTuple, st | sv, emit=_emit_store, check=_check_copy)
_lowers(store_wait, emit=_one_lane(ptx.tma_store_wait))
_lowers(fence_async, emit=lambda b, _: ptx.fence_async(b))
_lowers(named_sync, int, int, emit=lambda b, _, n, t: ptx.named_barrier(b, b.u32(n), b.u32(t)))
_lowers(named_arrive, int, int, emit=lambda b, _, n, t: ptx.named_barrier(b, b.u32(n), b.u32(t), sync=False))
