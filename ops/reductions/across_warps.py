"""Reductions across the four warps of a warpgroup, or all warps of a block, of values that each warp has reduced itself.

    most = warpgroup.reduce_max(col_max(tile), scratch)        of 64 rows: each warp has reduced its own sixteen
    size = block.reduce_sum(tile_sum(tile * tile), scratch)
    if block.reduce_any(tile_any(greater(tile, limit))): ...

Each warp brings a vector or a number, and every warp gets the result. `scratch` is an fp32 shared vector with a part for each
warp. They meet before they write to it, so that it may be used again and again, and before they read.
"""

from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from tiles.compiling import ptx
from tiles.compiling.numba_types import void
from tiles.dtypes import fp32
from tiles.interpreter import current_warp
from tiles.layout import LANES
from tiles.numba_names import types
from tiles.op import lowers, number
from tiles.ring import elected
from tiles.types import rv, sv

from ..memory import shared_vectors
from .reduce import FOLDS

CELL = 4  # elements of a number's part: warps write no cell of 16 bytes that another does
NEUTRAL = {"max": -np.inf, "min": np.inf, "sum": 0.0, "prod": 1.0}
VOTES: WeakKeyDictionary = WeakKeyDictionary()  # barrier: {how often it had opened: the flags brought since}


def reduced(group, kind, x, scratch):
    """The meaning of a reduction across the group's warps, element by element."""
    warp, ufunc, elements = current_warp(), FOLDS[kind][0], _element_count(x)
    rank, size = group.rank(warp), group.size(warp)
    if size * elements > scratch.length:
        raise warp.hazard(f"{size} warps bring {elements} elements each, and scratch is {scratch.spec}")
    group.sync(warp, fence=False)
    warp.write(scratch, np.broadcast_to(_wide(x), elements), range(elements * rank, elements * (rank + 1)))
    group.sync(warp, fence=False)
    parts = warp.read(scratch, range(elements * size), fence=False).reshape(size, elements)
    out = ufunc.reduce(parts, axis=0)
    return out.reshape(x.spec.shape) if hasattr(x, "spec") else out[0]


def voted(group, decide, flag):
    """What any and all mean: decide(the flags of all warps)."""
    warp = current_warp()
    barrier = group.barrier(warp)
    flags = VOTES.setdefault(barrier, {}).setdefault(barrier.generation, [])
    flags.append(bool(flag))
    barrier.sync(warp, LANES * group.size(warp), description=f"the {group.name}'s vote: ", vote=True)
    return decide(flags)


def lower_scope(group, *op_functions):
    """Complete the ops of a scope: reduce_max, ..., reduce_any, reduce_all, sync."""
    for op_function in op_functions:
        name, kind = op_function.__name__, op_function.__name__.removeprefix("reduce_")
        lowers(op_function)(_sync(group) if name == "sync" else (_reduction if kind in FOLDS else _vote)(group, name, kind))


def _wide(x):
    return x.array.astype(np.float32).ravel() if hasattr(x, "array") else np.float32(x)


def _element_count(x):
    """The elements of a warp's part of scratch."""
    return x.length if hasattr(x, "length") else CELL


def _sync(group):
    def rule(fenced: int):
        return void, lambda b, _: group.emit_sync(b, fence=fenced)

    return rule


def _vote(group, name, kind):
    def rule(flag):
        if not isinstance(flag, types.Boolean):
            raise TypeError(f"{group.name}.{name}: takes a condition, such as tile_any(mask), got {flag}")

        def lower(b, value):
            return ptx.barrier_vote(b, *group.emit_barrier(b), {"any": "or", "all": "and"}[kind], b.u32(value))

        return types.boolean, lower

    return rule


def _reduction(group, name, kind):
    combine = FOLDS[kind][1]

    def rule(x, scratch):
        if not (number(x) or (isinstance(x, rv) and not x.partial)):
            raise TypeError(f"{group.name}.{name}: takes a number or a whole vector of each warp, got {x}")
        elements = _element_count(x)
        if not (isinstance(scratch, sv) and scratch.dtype is fp32 and scratch.length >= elements * (group.warps or 1)):
            least = f"{group.warps} x {elements} elements or more" if group.warps else f"{elements} elements a warp"
            raise TypeError(f"{group.name}.{name}: scratch must be an fp32 shared vector of {least}, got {scratch}")
        stored = replace(x, dtype=fp32) if isinstance(x, rv) else None
        parts = group.warps or scratch.length // elements

        def at(b, address, part):
            return b.add(address, b.mul(b.u32(part), b.u32(elements * fp32.itemsize)))

        def lower(b, value, address):
            group.emit_sync(b, fence=False)
            own_address = at(b, address, group.emit_rank(b))
            if stored:
                shared_vectors.lower_store(scratch, stored, lambda b: b.u32(0))(b, own_address, b.pack(b.elements(x, value)))
            else:
                with b.if_then(elected(b, LANES)):
                    b.do("st.shared.f32 [$0], $1;", own_address, b.real(value))
            group.emit_sync(b, fence=False)
            size, folded = group.emit_warps(b), None
            for k in range(parts):
                values = at(b, address, k)
                values = (
                    shared_vectors.read(b, scratch, stored, values, b.u32(0))
                    if stored
                    else shared_vectors.load_elements(b, fp32, 1, values)
                )
                if not group.warps:  # scratch may have room for more warps than there are
                    present = b.icmp_unsigned(">", size, b.u32(k))
                    values = [b.select(present, e, b.real(NEUTRAL[kind])) for e in values]
                folded = [combine(b, e, f) for e, f in zip(folded, values, strict=True)] if folded else values
            return b.from_elements(x, folded) if stored else folded[0]

        return x if stored else types.float32, lower

    return rule
