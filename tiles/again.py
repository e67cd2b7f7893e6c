"""Calls of torch's tensors in a form that came before: a function is written for them that asks torch once what it compares.

Reading a tensor's dtype, device, shape and strides takes half a microsecond, and looking them up as much as two tensors. But
most calls have the form of the last one with the same options. So where a form comes again there is made, for decode say,

    def again(stream, numbers, q, k, v, lengths, pages, .., out, lse):
        if stream is not None or not (pages is .. is lse is None) or .. or not alike(q, k, v, lengths): return OTHER
        at_q, .. = q.data_ptr(), ..
        if (at_q | ..) & ODD or not (at_q and ..): return OTHER
        ..
        step0.run(handle, addresses)
        return out

`alike` is what torch.compile guards its graphs with: class, dispatch keys with those of the thread (inference mode, autocast,
transforms), dtype, device, requires_grad, sizes and strides, of all tensors at once. It keeps none alive. Where torch has it
not, every call is read; also where torch computes forward-mode derivatives, for of a tensor's tangent nothing is seen there.

Such a function serves no call that differs in any of this, or has an explicit stream, or arrays at other addresses than
multiples of ALIGNMENT: it gives OTHER, before anything is done, and the call is read as ever. Some extents and strides may be
left out of the question (growing.py): then they are read, and what they decide is kept for the last few that there were."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .arrays import ALIGNMENT

if TYPE_CHECKING:
    from .program import Known

OTHER = object()  # what a function gives of a call that is not for it
SHAPE, STRIDES, PAST = 0, 1, 2  # the parts of what is read of an array: see Program._read
READS = "{}.size({})", "{}.stride({})"
RECENT = 16  # values of what was left out of the question for which a function keeps what follows from them


def made(
    names: Sequence[str],
    known: Known,
    arrays: Sequence[Any],
    lengths: Sequence[Any],
    free: Sequence[tuple[int, int, int]] = (),
    plan: Callable[..., Known | None] | None = None,
) -> Callable[..., Any] | None:
    """The function of (stream, numbers, *arrays) for calls of the form of this one; None: there is none. names: the schema's.
    lengths: what was read of these arrays. free: (array's place, SHAPE or STRIDES, axis) of what calls may differ in, and plan:
    what is known of calls where these have such values, None for those that it is not for."""
    given = [place for place, x in enumerate(arrays) if x is not None]
    if known.device is None or any([lengths[place][PAST] for place in given]):  # an address that is no multiple, or 0
        return None
    fixed: list[Any] = [[[*lengths[place][part]] for place in given] for part in (SHAPE, STRIDES)]
    for place, part, axis in free:
        fixed[part][given.index(place)][axis] = None
    ways = known.kind.alike([arrays[place] for place in given], *fixed)
    if ways is None:
        return None
    places = tuple([place for place, _ in known.makers])
    sources = tuple([source for source, _ in known.parts])
    apart = tuple([(a, b) for a, b, _, _ in known.apart])
    shape = tuple(names), tuple(given), places, sources, len(known.beyond), apart, len(known.steps)
    values: Any = _values(known)
    if plan is None:
        return _written(*shape)(*ways, known.device, *values)
    now = tuple([lengths[place][part][axis] for place, part, axis in free])
    return _written(*shape, tuple(free))(*ways, known.device, {now: values}, lambda *now: _values(plan(*now)) or ())


def _values(known: Known | None) -> tuple | None:
    """What forms that are alike but for lengths differ in, in the order of `_written`."""
    if known is None:
        return None
    ends = [end for *_, low, high in known.apart for end in (low, high)]
    makers, offsets = [make for _, make in known.makers], [offset for _, offset in known.parts]
    return *makers, *offsets, *known.beyond, *ends, *known.steps, known.give


@functools.lru_cache(1024)
def _written(
    names: tuple[str, ...],
    given: tuple[int, ...],
    places: tuple[int, ...],
    sources: tuple[int, ...],
    beyond: int,
    apart: tuple[tuple[int, int], ...],
    steps: int,
    free: tuple[tuple[int, int, int], ...] = (),
) -> Callable[..., Callable]:
    """A function that makes such functions of (what Kind.alike gives, the device, values); with `free` of (.., a table of the
    values that follow from those of what is free, a function that gives these of those). given: the places of arrays that are
    there. places, sources: of what is made, and of parts. beyond: how many more scratch arrays there are. apart: the places of
    arrays that must lie apart."""
    every, at = [*names], [f"at_{name}" if place in given else "0" for place, name in enumerate(names)]
    there, absent = [names[place] for place in given], [name for place, name in enumerate(names) if place not in given]
    values = [f"make{n}" for n in range(len(places))] + [f"offset{n}" for n in range(len(sources))]
    values += [f"beyond{n}" for n in range(beyond)] + [f"{end}{n}" for n in range(len(apart)) for end in ("low", "high")]
    values += [*[f"step{n}" for n in range(steps)], "give"]
    asked = ["stream is not None", *([f"not ({' is '.join(absent)} is None)"] if absent else [])]
    asked += [f"{name}.is_nested" for name in there]  # of such a tensor `alike` asks what ends the process
    asked += ["busy()", "forward_ad._current_level >= 0", f"not alike({', '.join(there)})"]
    lines = ["try:", f"    if {' or '.join(asked)}: return OTHER", "except AttributeError: return OTHER"]  # one is no tensor
    lines += [f"at_{name} = {name}.data_ptr()" for name in there]
    lines += [f"if ({' | '.join(at[place] for place in given)}) & {ALIGNMENT - 1}: return OTHER"]
    lines += [f"if not ({' and '.join(at[place] for place in given)}): return OTHER"]
    if free:
        now = "".join([f"{READS[part].format(names[place], axis)}, " for place, part, axis in free])
        lines += [f"now = ({now})", "values = recent.get(now)", "if values is None:"]
        lines += [f"    if len(recent) >= {RECENT}: recent.clear()", "    values = recent[now] = plan(*now)"]
        lines += ["if not values: return OTHER", f"{', '.join(values)} = values"]  # of other turns
    for n, (a, b) in enumerate(apart):
        lines += [f"if low{n} < {at[b]} - {at[a]} < high{n}: return OTHER"]  # it will be refused by name
    lines += ["handle = stream_of(device)"]
    at += [""] * len(sources)
    for n, place in enumerate(places):
        name = names[place] if place < len(names) else f"scratch{place}"
        lines += [f"{name} = make{n}()", f"at_{name} = {name}.data_ptr()"]
        if place < len(names):
            at[place] = f"at_{name}"
        else:
            every.append(name)
            at.append(f"at_{name}")
    for n, whose in enumerate(sources):
        lines += [f"part{n} = {at[whose]} + offset{n}"]
        at[len(names) + n] = f"part{n}"
    at += [f"{at[-1]} + beyond{n}" for n in range(beyond)]
    lines += [f"addresses = ({', '.join(at)}, *numbers)", *[f"step{n}.run(handle, addresses)" for n in range(steps)]]
    taken = ["recent", "plan"] if free else values
    body = "\n        ".join([*lines, f"return give(({', '.join(every)},))"])
    source = (
        f"def make(alike, busy, forward_ad, stream_of, device, {', '.join(taken)}):\n"
        f"    def again(stream, numbers, {', '.join(names)}):\n        {body}\n    return again\n"
    )
    space: dict[str, Any] = {"OTHER": OTHER}
    exec(compile(source, "<again>", "exec"), space)
    return space["make"]
