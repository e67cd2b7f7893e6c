"""The steps of warps, from which tiles/profile computes a timeline. A warp with a list `steps` records them; others have none.

An event that warps wait for is named by any hashable value: (barrier, phase), a copy, a product."""

from typing import Any, NamedTuple

from greenlet import getcurrent

from .hazard import WarpPlace


class OpStep(NamedTuple):
    """An op that the warp itself executed: its name, the types of its arguments and of its result."""

    place: WarpPlace
    name: str
    argument_types: tuple
    result_type: Any


class AccessStep(NamedTuple):
    """An ordinary access to global memory: the NumPy view, and whether it was written."""

    place: WarpPlace
    view: Any
    written: bool


class CopyStep(NamedTuple):
    """An asynchronous copy that the warp started, between shared memory and this view of global memory."""

    place: WarpPlace
    work: Any
    method: str
    view: Any
    written: bool


class MmaStep(NamedTuple):
    """The warp's part of a product of its warpgroup, which starts when all four have issued it."""

    place: WarpPlace
    mma: Any


class SignalStep(NamedTuple):
    """When the asynchronous `work` is done, it arrives for the event."""

    place: WarpPlace
    work: Any
    event: Any


class ArriveStep(NamedTuple):
    """The warp arrives for the event."""

    place: WarpPlace
    event: Any


class WaitStep(NamedTuple):
    """The warp waited until all of these events had happened. why: their name in the timeline."""

    place: WarpPlace
    events: tuple
    why: str


def note(step, *facts):
    """Record a step of the running warp, if it records its steps."""
    warp = getcurrent()
    steps = getattr(warp, "steps", None)
    if steps is not None:
        steps.append(step(warp.place(), *facts))


def is_recording():
    """Does the running warp record its steps?"""
    return getattr(getcurrent(), "steps", None) is not None


def record_op(op, argument_types, result_type, args):
    """Execute an op's meaning, and record an OpStep; an op inside another one belongs to that one's step."""
    warp = getcurrent()
    outermost, warp.in_op = not warp.in_op, True
    try:
        result = op.meaning(*args)
    finally:
        warp.in_op = not outermost
    if outermost:
        note(OpStep, op.name, argument_types, result_type)
    return result
