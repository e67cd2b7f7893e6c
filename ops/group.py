"""Warps that meet: the four of a warpgroup or all of a block, and reductions across them.

    most = warpgroup.reduce_max(col_max(tile), scratch)        of 64 rows: each warp has reduced its own sixteen
    size = block.reduce_sum(tile_sum(tile * tile), scratch)
    if block.reduce_any(tile_any(greater(tile, limit))): ...

Each warp brings a vector or a number, and every warp gets the result. `scratch` is an fp32 shared vector with a part for each
warp. They meet before they write to it, so that it may be used again and again, and before they read.
"""

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
from numba.cuda import types

from tiles import ptx
from tiles.dtypes import fp32
from tiles.interpreter import here
from tiles.layout import LANES, WARPGROUP
from tiles.op import lowers, number
from tiles.plumbing import void
from tiles.ring import elected
from tiles.types import rv, sv

from . import vectors
from .reduce import FOLDS

# Who meets at which of a block's 16 named barriers: all its warps at 0, warpgroups that take `turns` at those before TOGETHER,
# several warpgroups at TOGETHER, warpgroup g by itself at LAST_NAMED - g.
LAST_NAMED, MOST_GROUPS = 15, 8
TOGETHER = LAST_NAMED - MOST_GROUPS
THREADS = WARPGROUP * LANES
CELL = 4  # elements of a number's part: warps write no cell of 16 bytes that another does
NEUTRAL = {"max": -np.inf, "min": np.inf, "sum": 0.0, "prod": 1.0}


@dataclass(frozen=True)
class Group:
    """A scope of several warps. `warps`: how many, None if that is the launch's to say."""

    name: str
    warps: int | None

    # -- what its warps do
    def size(self, warp):
        """How many warps there are."""
        return self.warps or warp.block.size

    def rank(self, warp):
        """The warp's place among them."""
        return warp.index % self.size(warp)

    def barrier(self, warp):
        """The named barrier where they meet."""
        return warp.block.named(LAST_NAMED - warp.group if self.warps else 0, LANES * self.size(warp))

    def meet(self, warp):
        """All of them come here. What they wrote to shared memory is then visible to all, and to the asynchronous proxy."""
        warp.fence_async()
        self.barrier(warp).meet(warp, LANES * self.size(warp), what=f"the {self.name}'s meeting: ")

    # -- what they become
    def emit_warps(self, b):
        """How many warps there are."""
        return b.u32(self.warps) if self.warps else b.udiv(b.special("ntid.x"), b.u32(LANES))

    def emit_rank(self, b):
        """The warp's place among them."""
        return b.and_(b.warp(), b.u32(self.warps - 1)) if self.warps else b.warp()

    def emit_barrier(self, b):
        """(number, threads) of the named barrier where they meet."""
        if self.warps:
            return b.sub(b.u32(LAST_NAMED), b.warpgroup()), b.u32(LANES * self.warps)
        return b.u32(0), b.special("ntid.x")

    def emit_meet(self, b):
        """The same meeting."""
        ptx.fence_async(b)
        ptx.named_barrier(b, *self.emit_barrier(b))

    # -- reductions
    def reduce(self, kind, x, scratch):
        """What a reduction means: of the parts that the warps bring, element by element."""
        warp, ufunc, room = here(), FOLDS[kind][0], _room(x)
        own, size = self.rank(warp), self.size(warp)
        if size * room > scratch.length:
            raise warp.hazard(f"{size} warps bring {room} elements each, and scratch is {scratch.spec}")
        self.meet(warp)
        warp.write(scratch, np.broadcast_to(_wide(x), room), range(room * own, room * (own + 1)))
        self.meet(warp)
        parts = warp.read(scratch, range(room * size), fence=False).reshape(size, room)
        out = ufunc.reduce(parts, axis=0)
        return out.reshape(x.spec.shape) if hasattr(x, "spec") else out[0]

    def vote(self, decide, flag):
        """What any and all mean: decide(the flags of all warps)."""
        warp = here()
        barrier = self.barrier(warp)
        flags = VOTES.setdefault(barrier, {}).setdefault(barrier.opened, [])
        flags.append(bool(flag))
        barrier.meet(warp, LANES * self.size(warp), what=f"the {self.name}'s vote: ")
        return decide(flags)

    def lower(self, *faces):
        """Complete the ops of this scope: reduce_max, ..., reduce_any, reduce_all, sync."""
        for face in faces:
            name, kind = face.__name__, face.__name__.removeprefix("reduce_")
            lowers(face)(_sync(self) if name == "sync" else (_reduction if kind in FOLDS else _vote)(self, name, kind))


FOUR_WARPS, ALL_WARPS = Group("warpgroup", WARPGROUP), Group("block", None)
VOTES: WeakKeyDictionary = WeakKeyDictionary()  # barrier: {how often it had opened: the flags brought since}


def _wide(x):
    return x.array.astype(np.float32).ravel() if hasattr(x, "array") else np.float32(x)


def _room(x):
    """The elements of a warp's part of scratch."""
    return x.length if hasattr(x, "length") else CELL


def _sync(group):
    def rule():
        return void, group.emit_meet

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
        room = _room(x)
        if not (isinstance(scratch, sv) and scratch.dtype is fp32 and scratch.length >= room * (group.warps or 1)):
            least = f"{group.warps} x {room} elements or more" if group.warps else f"{room} elements a warp"
            raise TypeError(f"{group.name}.{name}: scratch must be an fp32 shared vector of {least}, got {scratch}")
        held = replace(x, dtype=fp32) if isinstance(x, rv) else None
        parts = group.warps or scratch.length // room

        def at(b, address, part):
            return b.add(address, b.mul(b.u32(part), b.u32(room * fp32.itemsize)))

        def lower(b, value, address):
            group.emit_meet(b)
            own = at(b, address, group.emit_rank(b))
            if held:
                vectors.lower_store(scratch, held, lambda b: b.u32(0))(b, own, b.pack(b.elements(x, value)))
            else:
                with b.if_then(elected(b, LANES)):
                    b.do("st.shared.f32 [$0], $1;", own, b.real(value))
            group.emit_meet(b)
            size, folded = group.emit_warps(b), None
            for k in range(parts):
                found = at(b, address, k)
                found = vectors.read(b, scratch, held, found, b.u32(0)) if held else vectors.load_elements(b, fp32, 1, found)
                if not group.warps:  # scratch may have room for more warps than there are
                    present = b.icmp_unsigned(">", size, b.u32(k))
                    found = [b.select(present, e, b.real(NEUTRAL[kind])) for e in found]
                folded = [combine(b, e, f) for e, f in zip(folded, found, strict=True)] if folded else found
            return b.from_elements(x, folded) if held else folded[0]

        return x if held else types.float32, lower

    return rule
