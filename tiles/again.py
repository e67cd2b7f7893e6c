"""Calls of torch's tensors in a form that came before: a function is written for them that asks torch once what it compares.

Reading a tensor's dtype, device, shape and strides takes half a microsecond, and looking them up as much as two tensors. But
most calls have the form of the last one with the same options. So where a form comes again there is made, for decode say,

    def again(stream, numbers, q, k, v, lengths, pages, .., out, lse):
        if stream is not None or not (pages is .. is lse is None) or q.is_nested or .. or not alike(q, k, v, lengths): return OTHER
        at_q, .. = q.data_ptr(), ..
        if (at_q | ..) & PAST or not (at_q and ..): return OTHER
        ..
        run0(handle, addresses)
        return out

`alike` is what torch.compile guards its graphs with: class, dispatch keys with those of the thread (inference mode, autocast,
transforms), dtype, device, requires_grad, sizes and strides, of all tensors at once. It keeps none alive. Where torch has it not,
every call is read.

Such a function serves no call that differs in any of this, or has an explicit stream, or arrays at other addresses than
multiples of ALIGNMENT: it gives OTHER, before anything is done, and the call is read as ever."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .arrays import ALIGNMENT

if TYPE_CHECKING:
    from .program import Known

OTHER = object()  # what a function gives of a call that is not for it


def made(names: Sequence[str], known: Known, arrays: Sequence[Any], lengths: Sequence[Any]) -> Callable[..., Any] | None:
    """The function of (stream, numbers, *arrays) for calls of the form of this one; None: there is none. names: the schema's.
    lengths: what was read of these arrays (Program._read)."""
    present = tuple([x is not None for x in arrays])
    ways = known.kind.alike([x for x in arrays if x is not None]) if known.device is not None else None
    if ways is None or any([x is not None and x[2] for x in lengths]):  # an address that is no multiple of 16 bytes, or 0
        return None
    alike, busy, stream_of = ways
    places = tuple([place for place, _ in known.makers])
    sources = tuple([source for source, _ in known.parts])
    apart = tuple([(a, b) for a, b, _, _ in known.apart])
    make = _written(tuple(names), present, places, sources, len(known.beyond), apart, len(known.steps))
    values = [*[make for _, make in known.makers], *[offset for _, offset in known.parts], *known.beyond]
    values += [end for *_, low, high in known.apart for end in (low, high)]
    return make(alike, busy, stream_of, known.device, known.give, *values, *[step.run for step in known.steps])


@functools.lru_cache(1024)
def _written(
    names: tuple[str, ...],
    present: tuple[bool, ...],
    places: tuple[int, ...],
    sources: tuple[int, ...],
    beyond: int,
    apart: tuple[tuple[int, int], ...],
    steps: int,
) -> Callable[..., Callable]:
    """A function that makes such functions of the values that forms differ in. present: which arrays are given. places, sources:
    of what is made, and of parts. beyond: how many more scratch arrays there are. apart: the places of arrays that must be."""
    given = [name for name, is_there in zip(names, present) if is_there]
    absent = [name for name, is_there in zip(names, present) if not is_there]
    every, at = [*names], [f"at_{name}" if is_there else "0" for name, is_there in zip(names, present)]
    lines = [f"at_{name} = {name}.data_ptr()" for name in given]
    lines += [f"if ({' | '.join(at[n] for n, is_there in enumerate(present) if is_there)}) & PAST: return OTHER"]
    lines += [f"if not ({' and '.join(f'at_{name}' for name in given)}): return OTHER"]
    for n, (a, b) in enumerate(apart):
        if present[a] and present[b]:
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
    for n, source in enumerate(sources):
        lines += [f"part{n} = {at[source]} + offset{n}"]
        at[len(names) + n] = f"part{n}"
    at += [f"{at[-1]} + beyond{n}" for n in range(beyond)]
    lines += [f"addresses = ({', '.join(at)}, *numbers)"]
    lines += [f"run{n}(handle, addresses)" for n in range(steps)]
    values = [f"make{n}" for n in range(len(places))] + [f"offset{n}" for n in range(len(sources))]
    values += [f"beyond{n}" for n in range(beyond)] + [f"{end}{n}" for n in range(len(apart)) for end in ("low", "high")]
    values += [f"run{n}" for n in range(steps)]
    none = [f"not ({' is '.join(absent)} is None)"] if absent else []
    others = ["stream is not None", *none, *[f"{name}.is_nested" for name in given]]  # of which `alike` asks what ends the process
    others += ["busy()", f"not alike({', '.join(given)})"]
    asked = ["try:", f"    if {' or '.join(others)}: return OTHER", "except AttributeError: return OTHER"]  # of no tensor
    body = "\n        ".join([*asked, *lines, f"return give(({', '.join(every)},))"])
    source = (
        f"def make(alike, busy, stream_of, device, give, {', '.join(values)}):\n"
        f"    def again(stream, numbers, {', '.join(names)}):\n        {body}\n    return again\n"
    )
    space = {"OTHER": OTHER, "PAST": ALIGNMENT - 1}
    exec(compile(source, "<again>", "exec"), space)
    return space["make"]  # type: ignore[return-value]
