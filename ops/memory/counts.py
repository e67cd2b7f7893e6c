"""Numbers in global memory by which the blocks of a grid do something one after the other:

    wait_count(turns, (pair, tile), n)          until n warps or more have had their turn there
    tma_add(sums, (pair, tile), part)
    stores_done()
    count_stored(turns, (pair, tile))           the next one's turn: it adds behind these

A block may only wait for what blocks with lower numbers do, or its own other warps: blocks begin in the order of their numbers,
but nobody knows how many of them there is room for at a time. In the interpreter, which runs blocks one after the other, a wait
for a later one is a deadlock at once. The numbers must be 0 before the grid begins, and only these ops may access them.

A grid that begins while the one before it runs (ops/grid.py) may wait for what that one counts: `grid.wait_count`. Where nobody
could set such a number to 0 before, the block that counts it does so itself, before it releases that grid: `reset_count`."""

import numpy as np

from tiles.compiling import ptx
from tiles.compiling.builder import i64
from tiles.compiling.numba_types import void
from tiles.interpreter import AccessStep, current_warp, note
from tiles.layout import LANES
from tiles.numba_names import types
from tiles.op import integer, lowers, op
from tiles.ring import elected

from .shared_tiles import describe_index


def _check_device(counts, at):
    """The number, as a view of one element; a Hazard if there is none."""
    if not all(0 <= i < size for i, size in zip(at, counts.shape, strict=True)):
        raise current_warp().hazard(f"index {at} is out of range for an array of shape {counts.shape}")
    return np.asarray(counts)[tuple(slice(int(i), int(i) + 1) for i in at)]


@op
def wait_count(counts, at, n):
    """Wait until counts[at] is n or more. What those that counted wrote before is then visible to this warp, and to TMA."""
    wait_for_count(counts, at, n)


def wait_for_count(counts, at, n):
    """What `wait_count` means to the interpreter."""
    count = _check_device(counts, at)
    description = (
        f"the count at {tuple(map(int, at))}, which is to be {n}; blocks that come later in the grid may not be waited for"
    )
    current_warp().wait_until(lambda: count.item() >= n, lambda: description)
    note(AccessStep, count, False)
    current_warp().block.cluster.waits_for_count = True
    current_warp().fence_async()


@op
def reset_count(counts, at):
    """counts[at] = 0, for the whole GPU before whatever this warp does next. For a count that only this warp, or those that
    synchronise with it now, will count up."""
    warp = current_warp()
    warp.put(_check_device(counts, at), 0)
    warp.block.note_reset(warp)


@op
def count_up(counts, at):
    """counts[at] += 1, after what this warp has written to global memory is there. For bulk stores the warp must make sure of
    that first (`stores_done`)."""
    _count(counts, at)
    current_warp().overwritten = None


@op
def count_stored(counts, at):
    """counts[at] += 1 where the warp has written by `tma_add` only, and those that wait will add, too, but not read. Additions
    that are done (`stores_done`) have reached the place where those of the whole GPU meet, so this waits for nothing.
    (`count_up` waits until everything is there that the warp's multiprocessor has under way.) If the warp replaced what was
    there, no addition may overtake it: use `count_up`."""
    _count(counts, at)
    if current_warp().overwritten:
        raise current_warp().hazard(f"counts {current_warp().overwritten} as if it had added: count_up", "wait")


def _count(counts, at):
    warp = current_warp()
    if warp.stored < warp.stores:
        raise warp.hazard(
            f"counts up, and nobody has waited until {warp.sent[warp.stored].operation} was done: stores_done", "wait"
        )
    count = _check_device(counts, at)
    count += 1
    note(AccessStep, count, True)


def _address(b, counts, value, at):
    data, _, strides = b.array(counts, value)
    for index, stride in zip(b.unpack(at), strides, strict=True):
        data = b.add(data, b.mul(b.sext(index, i64) if index.type.width < 64 else index, stride))
    return data


def _check(name, counts, at, *integers):
    if not (isinstance(counts, types.Array) and counts.dtype == types.int32):
        raise TypeError(f"{name}: takes a global array of int32, got {counts}")
    if not (isinstance(at, types.BaseTuple) and len(at) == counts.ndim and all(map(integer, at))):
        raise TypeError(
            f"{name}: `at` must be {counts.ndim} integers for an array of {counts.ndim} axes, got {describe_index(at)}"
        )
    if not all(map(integer, integers)):
        raise TypeError(f"{name}: takes an integer, got {', '.join(map(str, integers))}")


@lowers(wait_count)
def lower_wait_count(counts, at, n):
    """How `wait_count` is typed and lowered."""
    _check("wait_count", counts, at, n)

    def emit(b, value, vat, vn):
        with b.if_then(elected(b, LANES)):
            ptx.wait_global(b, _address(b, counts, value, vat), b.u32(vn))
        ptx.warp_sync(b)

    return void, emit


@lowers(reset_count)
def _(counts, at):
    _check("reset_count", counts, at)

    def emit(b, value, vat):
        with b.if_then(elected(b, LANES)):
            ptx.reset_global(b, _address(b, counts, value, vat))
        ptx.warp_sync(b)

    return void, emit


def _counting(name, order):
    """The rule of an op that adds to a count, with this memory order."""

    def rule(counts, at):
        _check(name, counts, at)

        def emit(b, value, vat):
            ptx.warp_sync(b)
            with b.if_then(elected(b, LANES)):
                ptx.count_global(b, _address(b, counts, value, vat), order)

        return void, emit

    return rule


lowers(count_up)(_counting("count_up", "release"))
lowers(count_stored)(_counting("count_stored", "relaxed"))
