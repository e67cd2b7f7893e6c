"""Fast paths for torch tensors: when a call has the same form as an earlier one, a specialised function is generated that
serves such calls, and compares all their tensors in one call of torch.

Reading a tensor's dtype, device, shape and strides takes half a microsecond, and looking up what is known of them takes as long
as reading two tensors. But most calls have the form of the last one and the same options. So when a form comes a second time,
a function like this one is generated (here for decode):

    def again(stream, numbers, q, k, v, lengths, pages, .., out, lse):
        if stream is not None or not (pages is .. is lse is None) or .. or not alike(q, k, v, lengths): return OTHER
        at_q, .. = q.data_ptr(), ..
        if (at_q | ..) & ODD or not (at_q and ..): return OTHER
        ..
        step0.run(handle, addresses)
        return out

`alike` is the check with which torch.compile guards its graphs: it compares class, dispatch keys with those of the thread
(inference mode, autocast, transforms), dtype, device, requires_grad, sizes and strides, of all tensors at once. It keeps no
tensor alive. If this torch does not have it, no such function is generated. It does not see a tensor's tangent, so no call is
served this way while torch computes forward-mode derivatives.

A call that differs in any of this, that names a stream, or whose arrays do not all lie at multiples of ALIGNMENT, gets OTHER
before anything is done, and then takes the usual way (Program._read). Some extents and strides may be left out of the
comparison (watched_plans.py): those are read on each call, and what follows from them is kept for the last few values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..launching.arrays import ALIGNMENT
from .plan import PreparedCall

OTHER = object()  # what such a function returns for a call that it does not serve
SHAPE, STRIDES, PAST = 0, 1, 2  # what Program._read reads of an array, by its place in the tuple
READS = "{}.size({})", "{}.stride({})"
RECENT = 16  # for how many values of the extents and strides left out of the comparison a function keeps what follows from them


def guarded(
    names: Sequence[str],
    known: PreparedCall,
    arrays: Sequence[Any],
    lengths: Sequence[Any],
    free: Sequence[tuple[int, int, int]] = (),
    plan: Callable[..., tuple | None] | None = None,
) -> Callable[..., Any] | None:
    """The function of (stream, numbers, *arrays) that serves calls of the same form as this one, or None if there can be none.

    names: of the arrays, from the schema. lengths: what Program._read read of these arrays. free: (the array's place, SHAPE or
    STRIDES, axis) of each extent or stride in which calls may differ. plan: a function from the values of these to the `values`
    of such calls, or to None if the generated function does not serve them."""
    present = [place for place, x in enumerate(arrays) if x is not None]
    if known.device is None or any([lengths[place][PAST] for place in present]):  # some address is 0 or not aligned
        return None
    fixed: list[Any] = [[[*lengths[place][part]] for place in present] for part in (SHAPE, STRIDES)]
    for place, part, axis in free:
        fixed[part][present.index(place)][axis] = None
    ways = known.kind.alike([arrays[place] for place in present], *fixed)
    if ways is None:
        return None
    places = tuple([place for place, _ in known.makers])
    sources = tuple([source for source, _ in known.parts])
    disjoint = tuple([(a, b) for a, b, _, _ in known.disjoint])
    shape = tuple(names), tuple(present), places, sources, len(known.beyond), disjoint, len(known.steps)
    if plan is None:
        return _factory(*shape)(*ways, known.device, *values(known))
    now = tuple([lengths[place][part][axis] for place, part, axis in free])
    return _factory(*shape, tuple(free))(*ways, known.device, {now: values(known)}, plan)


def values(known: PreparedCall) -> tuple:
    """What differs between forms that are the same except for lengths, in the order in which `_factory` takes it."""
    ends = [end for *_, low, high in known.disjoint for end in (low, high)]
    makers, offsets = [make for _, make in known.makers], [offset for _, offset in known.parts]
    return *makers, *offsets, *known.beyond, *ends, *known.steps, known.give


@functools.lru_cache(1024)
def _factory(
    names: tuple[str, ...],
    present: tuple[int, ...],
    places: tuple[int, ...],
    sources: tuple[int, ...],
    beyond: int,
    disjoint: tuple[tuple[int, int], ...],
    steps: int,
    free: tuple[tuple[int, int, int], ...] = (),
) -> Callable[..., Callable]:
    """Generates the source for one kind of call and returns its factory: a function of (what Kind.alike returns, the device,
    values) that makes the function `again`. With `free`, the factory takes a table {free extents and strides: values} and a
    function that computes a missing row of it in place of the values.

    present: the places of the arrays that are passed. places: those of the arrays to allocate. sources: the array that each
    part lies in. beyond: how many scratch arrays follow the last part. disjoint: pairs of arrays that must not overlap."""
    array_names, at = [*names], [f"at_{name}" if place in present else "0" for place, name in enumerate(names)]
    there, absent = [names[place] for place in present], [name for place, name in enumerate(names) if place not in present]
    values = [f"make{n}" for n in range(len(places))] + [f"offset{n}" for n in range(len(sources))]
    values += [f"beyond{n}" for n in range(beyond)] + [f"{end}{n}" for n in range(len(disjoint)) for end in ("low", "high")]
    values += [*[f"step{n}" for n in range(steps)], "give"]
    conditions = ["stream is not None", *([f"not ({' is '.join(absent)} is None)"] if absent else [])]
    conditions += [f"{name}.is_nested" for name in there]  # `alike` would crash the process on a nested tensor
    conditions += ["busy()", "forward_ad._current_level >= 0", f"not alike({', '.join(there)})"]
    lines = ["try:", f"    if {' or '.join(conditions)}: return OTHER", "except AttributeError: return OTHER"]  # no tensor
    lines += [f"at_{name} = {name}.data_ptr()" for name in there]
    lines += [f"if ({' | '.join(at[place] for place in present)}) & {ALIGNMENT - 1}: return OTHER"]
    lines += [f"if not ({' and '.join(at[place] for place in present)}): return OTHER"]
    if free:
        now = "".join([f"{READS[part].format(names[place], axis)}, " for place, part, axis in free])
        lines += [f"now = ({now})", "values = recent.get(now)", "if values is None:"]
        lines += [f"    if len(recent) >= {RECENT}: recent.clear()", "    values = recent[now] = plan(*now) or ()"]
        lines += ["if not values: return OTHER", f"{', '.join(values)} = values"]
    for n, (a, b) in enumerate(disjoint):
        lines += [f"if low{n} < {at[b]} - {at[a]} < high{n}: return OTHER"]  # the usual way refuses it, and names it
    lines += ["handle = stream_of(device)"]
    at += [""] * len(sources)
    for n, place in enumerate(places):
        name = names[place] if place < len(names) else f"scratch{place}"
        lines += [f"{name} = make{n}()", f"at_{name} = {name}.data_ptr()"]
        if place < len(names):
            at[place] = f"at_{name}"
        else:
            array_names.append(name)
            at.append(f"at_{name}")
    for n, whose in enumerate(sources):
        lines += [f"part{n} = {at[whose]} + offset{n}"]
        at[len(names) + n] = f"part{n}"
    at += [f"{at[-1]} + beyond{n}" for n in range(beyond)]
    lines += [f"addresses = ({', '.join(at)}, *numbers)", *[f"step{n}.run(handle, addresses)" for n in range(steps)]]
    parameters = ["recent", "plan"] if free else values
    body = "\n        ".join([*lines, f"return give(({', '.join(array_names)},))"])
    source = (
        f"def make(alike, busy, forward_ad, stream_of, device, {', '.join(parameters)}):\n"
        f"    def again(stream, numbers, {', '.join(names)}):\n        {body}\n    return again\n"
    )
    space: dict[str, Any] = {"OTHER": OTHER}
    exec(compile(source, "<again>", "exec"), space)
    return space["make"]
