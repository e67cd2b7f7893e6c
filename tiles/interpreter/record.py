"""What warps do, step by step, for whoever asks how long it would take (tiles/profile): a warp that has a list of `steps` keeps
them, all others only find that they have none.

A step names what others wait for by any value that can be looked up: (barrier, phase), a copy, a product."""

from typing import Any, NamedTuple

from greenlet import getcurrent

from .hazard import WarpPlace


class Did(NamedTuple):
    """An op's work in the warp itself: its name, the types of its arguments, that of its result."""

    place: WarpPlace
    name: str
    takes: tuple
    gives: Any


class Touched(NamedTuple):
    """An ordinary access to global memory: the NumPy view, and whether it was written."""

    place: WarpPlace
    view: Any
    written: bool


class Started(NamedTuple):
    """A copy that goes on without the warp, between shared memory and this view of global memory."""

    place: WarpPlace
    work: Any
    how: str
    view: Any
    written: bool


class Issued(NamedTuple):
    """The warp's part of a product of its warpgroup, which starts when all four have issued it."""

    place: WarpPlace
    mma: Any


class Feeds(NamedTuple):
    """`work`, when it is done, counts for `what`."""

    place: WarpPlace
    work: Any
    what: Any


class Arrived(NamedTuple):
    """The warp counts for `what`."""

    place: WarpPlace
    what: Any


class Waited(NamedTuple):
    """The warp went on when all of these had happened; `why` names what for."""

    place: WarpPlace
    what: tuple
    why: str


def note(step, *facts):
    """A step of the running warp, if it keeps a record."""
    warp = getcurrent()
    steps = getattr(warp, "steps", None)
    if steps is not None:
        steps.append(step(warp.place(), *facts))


def recording():
    """Does the running warp keep a record?"""
    return getattr(getcurrent(), "steps", None) is not None


def record(op, takes, gives, args):
    """What the op means, and a step that says it was done; an op inside another is part of that one."""
    warp = getcurrent()
    outermost, warp.in_op = not warp.in_op, True
    try:
        result = op.meaning(*args)
    finally:
        warp.in_op = not outermost
    if outermost:
        note(Did, op.name, takes, gives)
    return result
