"""Fast paths for torch tensors: when a call has the same form as an earlier one, a specialised function is generated that
serves such calls, and compares all their tensors in one call of torch.

Reading a tensor's dtype, device, shape and strides takes half a microsecond, and looking up what is known of them takes as long
as reading two tensors. But most calls have the form of the last one and the same options. So when a form comes a second time,
a function like this one is generated (here for decode):

    def call_again(stream, numbers, q, k, v, lengths, pages, .., out, lse):
        if stream is not None or not (pages is .. is lse is None) or .. or not alike(q, k, v, lengths): return NOT_SERVED
        at_q, .. = q.data_ptr(), ..
        if (at_q | ..) & ODD or not (at_q and ..): return NOT_SERVED
        ..
        step0.run(handle, addresses)
        return out

`alike` is the check with which torch.compile guards its graphs: it compares class, dispatch keys with those of the thread
(inference mode, autocast, transforms), dtype, device, requires_grad, sizes and strides, of all tensors at once. It keeps no
tensor alive. If this torch does not have it, no such function is generated. It does not see a tensor's tangent, so no call is
served this way while torch computes forward-mode derivatives. It refuses a tensor that comes twice: where a call passes one
tensor for several arguments, the function asks for that, and has it compared once.

A call that differs in any of this, that names a stream, or whose arrays do not all lie at multiples of ALIGNMENT, gets
NOT_SERVED before anything is done, and then goes through Program._read. Some extents and strides may be left out of the
comparison (watched_plans.py): those are read on each call, and the plans of the last few values are kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..launching.arrays import ALIGNMENT
from .plan import PreparedCall

NOT_SERVED = object()  # what such a function returns for a call that it does not serve
SHAPE, STRIDES, MISALIGNMENT = 0, 1, 2  # places of the tuple that Program._read returns for an array
READS = "{}.shape[{}]", "{}.stride()[{}]"  # half of what size(axis) and stride(axis) take
RECENT = 16  # values of the extents and strides left out of the comparison, whose plans a function keeps


def build_guarded_call(
    names: Sequence[str],
    prepared: PreparedCall,
    arrays: Sequence[Any],
    lengths: Sequence[Any],
    free: Sequence[tuple[int, int, int]] = (),
    plan: Callable[..., tuple | None] | None = None,
) -> Callable[..., Any] | None:
    """The function of (stream, numbers, *arrays) that serves calls of the same form as this one, or None if there can be none.

    names: of the arrays, from the schema. lengths: the shapes, strides and misalignments that Program._read returns for these
    arrays. free: (the array's place, SHAPE or STRIDES, axis) of each extent or stride in which calls may differ. plan: a
    function from the values of these to the `values` of such calls, or to None if the generated function does not serve
    them."""
    present = [place for place, x in enumerate(arrays) if x is not None]
    if prepared.device is None or any([lengths[place][MISALIGNMENT] for place in present]):  # some address is 0 or not aligned
        return None
    passed_for: dict[int, list[int]] = {}  # {a tensor: the places of the arguments that it is passed for}
    for place in present:
        passed_for.setdefault(id(arrays[place]), []).append(place)
    aliases = tuple([(place, first) for first, *others in passed_for.values() for place in others])
    distinct = [first for first, *_ in passed_for.values()]
    fixed: list[Any] = [[[*lengths[place][part]] for place in distinct] for part in (SHAPE, STRIDES)]
    for number, same in enumerate(passed_for.values()):
        for place, part, axis in free:
            if place == same[0] and all([(other, part, axis) in free for other in same]):
                fixed[part][number][axis] = None
    checks = prepared.kind.build_guard([arrays[place] for place in distinct], *fixed)
    if checks is None:
        return None
    places = tuple([place for place, _ in prepared.allocators])
    sources = tuple([source for source, _ in prepared.parts])
    disjoint = tuple([(a, b) for a, b, _, _ in prepared.disjoint])
    shape = tuple(names), tuple(present), aliases, places, sources, len(prepared.scratch_offsets), disjoint, len(prepared.steps)
    if plan is None:
        return _make_factory(*shape)(*checks, prepared.device, *plan_values(prepared))
    free_values = tuple([lengths[place][part][axis] for place, part, axis in free])
    return _make_factory(*shape, tuple(free))(*checks, prepared.device, {free_values: plan_values(prepared)}, plan)


def plan_values(prepared: PreparedCall) -> tuple:
    """The values that differ between forms that are the same except for lengths, in the order of `_make_factory`'s
    parameters."""
    ends = [end for *_, low, high in prepared.disjoint for end in (low, high)]
    allocators, offsets = [make for _, make in prepared.allocators], [offset for _, offset in prepared.parts]
    return *allocators, *offsets, *prepared.scratch_offsets, *ends, *prepared.steps, prepared.make_result


@functools.lru_cache(1024)
def _make_factory(
    names: tuple[str, ...],
    present: tuple[int, ...],
    aliases: tuple[tuple[int, int], ...],
    places: tuple[int, ...],
    sources: tuple[int, ...],
    scratch_offsets: int,
    disjoint: tuple[tuple[int, int], ...],
    steps: int,
    free: tuple[tuple[int, int, int], ...] = (),
) -> Callable[..., Callable]:
    """Generates the source for one kind of call and returns its factory: a function of (what Framework.build_guard returns, the
    device, values) that makes the function `call_again`. With `free`, the factory takes a table {free extents and strides:
    values} and a function that computes a missing row of it in place of the values.

    present: the places of the arrays that are passed. aliases: (the place of an argument that is the same tensor as an earlier
    one, that one's place). places: those of the arrays to allocate. sources: the array that each part lies in.
    scratch_offsets: how many scratch arrays follow the last part. disjoint: pairs of arrays that must not overlap."""
    array_names, address_names = [*names], [f"at_{name}" if place in present else "0" for place, name in enumerate(names)]
    passed, absent = [names[place] for place in present], [name for place, name in enumerate(names) if place not in present]
    values = [f"make{n}" for n in range(len(places))] + [f"offset{n}" for n in range(len(sources))]
    values += [f"scratch_offset{n}" for n in range(scratch_offsets)]
    values += [f"{end}{n}" for n in range(len(disjoint)) for end in ("low", "high")]
    values += [*[f"step{n}" for n in range(steps)], "make_result"]
    conditions = ["stream is not None", *([f"not ({' is '.join(absent)} is None)"] if absent else [])]
    conditions += [f"{names[place]} is not {names[first]}" for place, first in aliases]
    distinct = [names[place] for place in present if place not in dict(aliases)]
    conditions += [f"{name}.is_nested" for name in distinct]  # `alike` would crash the process on a nested tensor
    conditions += ["busy()", "forward_ad._current_level >= 0", f"not alike({', '.join(distinct)})"]
    lines = ["try:", f"    if {' or '.join(conditions)}: return NOT_SERVED"]
    lines += ["except AttributeError: return NOT_SERVED"]  # an argument is no tensor
    lines += [f"at_{name} = {name}.data_ptr()" for name in passed]
    lines += [f"if ({' | '.join(address_names[place] for place in present)}) & {ALIGNMENT - 1}: return NOT_SERVED"]
    lines += [f"if not ({' and '.join(address_names[place] for place in present)}): return NOT_SERVED"]
    if free:
        free_values = "".join([f"{READS[part].format(names[place], axis)}, " for place, part, axis in free])
        lines += [f"free_values = ({free_values})", "values = recent.get(free_values)", "if values is None:"]
        lines += [
            f"    if len(recent) >= {RECENT}: recent.clear()",
            "    values = recent[free_values] = plan(*free_values) or ()",
        ]
        lines += ["if not values: return NOT_SERVED", f"{', '.join(values)} = values"]
    for n, (a, b) in enumerate(disjoint):  # Program.run refuses overlaps, and names the arrays
        lines += [f"if low{n} < {address_names[b]} - {address_names[a]} < high{n}: return NOT_SERVED"]
    lines += ["handle = stream_of(device)"]
    address_names += [""] * len(sources)
    for n, place in enumerate(places):
        name = names[place] if place < len(names) else f"scratch{place}"
        lines += [f"{name} = make{n}()", f"at_{name} = {name}.data_ptr()"]
        if place < len(names):
            address_names[place] = f"at_{name}"
        else:
            array_names.append(name)
            address_names.append(f"at_{name}")
    for n, source_place in enumerate(sources):
        lines += [f"part{n} = {address_names[source_place]} + offset{n}"]
        address_names[len(names) + n] = f"part{n}"
    address_names += [f"{address_names[-1]} + scratch_offset{n}" for n in range(scratch_offsets)]
    lines += [f"addresses = ({', '.join(address_names)}, *numbers)", *[f"step{n}.run(handle, addresses)" for n in range(steps)]]
    parameters = ["recent", "plan"] if free else values
    body = "\n        ".join([*lines, f"return make_result(({', '.join(array_names)},))"])
    source = (
        f"def make(alike, busy, forward_ad, stream_of, device, {', '.join(parameters)}):\n"
        f"    def call_again(stream, numbers, {', '.join(names)}):\n        {body}\n    return call_again\n"
    )
    space: dict[str, Any] = {"NOT_SERVED": NOT_SERVED}
    exec(compile(source, "<call_again>", "exec"), space)
    return space["make"]
