"""Functions that are called often: what decides a call is looked up, and only launches are left. docs/calls.md follows a call
through the tables (of known shapes, of plans for new sequence lengths) and says what each of them saves.

    SCALED = Schema("scaled", '''
        x    (seqlen, head_dim)  float32
        out  (seqlen, head_dim)  float32  made
    ''')

    @program(SCALED)
    def _scaled(problem, factor) -> Plan:
        ...  # further checks, and launches: ValueError, TypeError
        return Plan([kernel.bind(blocks, gX=problem["x"], gOut=problem["out"], factor=factor)])

    def scaled(x, *, factor=1.0, out=None, stream=None):
        return _scaled(stream, (x, out), (factor,))

The *forms* of a call's arrays (shape, strides, dtype, device, alignment) and its options determine everything but addresses:
what is computed, by which launches, what is created, and what is returned. So a call of a known form reads its arrays, looks up
the form, writes the addresses into the launches' parameter blocks and calls the driver. A call of a new form is checked and
planned; a refusal is never remembered. A framework that traces the call instead of making it (torch.compile, jax.jit) gets an
op that stands for it (torch_op.py, jax_call.py).

A **program** is its launches, one after the other on the caller's stream, and the scratch memory between them, which comes
from the caller's allocator. Nothing waits for the device, so all of it may be captured in a CUDA graph.

Shapes and strides are lengths. A form that differs from a known one only in these is not planned again. A function that was
made while the planner was watched (lengths.py) serves it: it checks what the planner checks, and takes the same turns as the
planner did. If it cannot, the call is planned.

Any number of threads may call at once: what is remembered does not change, and what two of them forget is made anew.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import numpy as np

from ..launching import nvtx, recording
from ..launching.arrays import ITEMSIZE, Array, Form, Number, ascending, c_ordered
from ..launching.checks import check_options
from ..launching.frameworks import describe, kind_of, stream_handle
from ..launching.lengths import Trace
from ..launching.loaded_code import together
from . import jax_call, remembered_calls, torch_op
from .plan import ArrayView, Plan, PreparedCall, Recent
from .planner_options import option_types, to_records
from .remembered_calls import OTHER
from .schema import Schema
from .watched_plans import TracedPlan, Variable

ENTRIES = 4096  # forms of calls that are remembered, of all programs together: 4 to 12 KB each, by the launches they take
PLAN_KINDS = 1024  # kinds of forms, alike but for lengths, that are remembered, and options of calls with guarded functions
PLANS_PER_KIND = 32  # traced plans of each kind
EXPECTED = 3  # guarded functions that are tried before a call is read, of those with the same options: each takes 0.3 us
SCRATCH_ALIGNMENT = 256  # bytes: scratch arrays of one allocation begin at multiples of this, as allocated ones do


GUARDED_CALLS, REMEMBERED, TRACED_PLANS = Recent(PLAN_KINDS), Recent(ENTRIES), Recent(PLAN_KINDS)


def program(
    schema: Schema,
    gradient: Callable | None = None,
    no_gradient: str | None = None,
    meanwhile: Callable[[dict[str, Array], dict[str, Form], dict[str, Any], str], None] | None = None,
) -> Callable[[Callable[..., Plan]], Program]:
    """Make a planner a function of (stream, arrays, options, layout), the arrays being those of the schema.

    The planner is called with the Problem and the options, which it may take as records (planner_options.py); it raises
    ValueError or TypeError, or returns a Plan.

    gradient: gradient(names, options=, layout=) refuses what it cannot differentiate, with respect to these arguments of the
    schema, or returns f(forms, made, gradients) -> {name: gradient}, all by the schema's names: the arguments, all results,
    and the gradients of those that have one. JAX asks it (jax_call.py). no_gradient: what is said where there is none, or
    none of second order.

    meanwhile: meanwhile(arrays, made, options, layout), the Arrays that are given, the forms of results and the options by
    their names, is called in a thread of its own while the machine code of a call is made: what will be called next may be
    prepared. Its errors are not heard of."""
    return lambda planner: Program(schema, planner, gradient, no_gradient, meanwhile)


class Program:
    """What `program` makes: `function(stream, arrays, options, layout)`.

    stream: a handle or a stream object; None is the current one of the first array's framework. What is made belongs to the
    stream as if it were the current one. arrays: one for each name of the schema, or None. options: a tuple of what else
    decides a call; those that are equal must mean the same (True, 1 and 1.0 are equal). An option that the planner says is a
    `Number | None` decides nothing but whether there is one: it goes to the kernels with the addresses."""

    def __init__(
        self,
        schema: Schema,
        planner: Callable[..., Plan],
        gradient: Callable | None = None,
        no_gradient: str | None = None,
        meanwhile: Callable[[dict[str, Array], dict[str, Form], dict[str, Any], str], None] | None = None,
    ):
        self.schema, self.planner, self.names = schema, planner, schema.names
        self.gradient, self.no_gradient, self.meanwhile = gradient, no_gradient, meanwhile
        self.needed = {name: argument.needed for name, argument in schema.arguments.items()}
        self.readers: dict[type, Callable] = {}
        self.compiling = torch_op.asks_dynamo()
        self.op = torch_op.registered(self)
        self.option_types = option_types(planner)
        self.options = tuple(self.option_types)
        places = [place for place, kind in enumerate(self.option_types.values()) if kind == Number | None]
        self.numbers = [(place, Number(n - len(places))) for n, place in enumerate(places)]
        if ranges := nvtx.backend():
            vars(self)["run"] = nvtx.ranged(f"{planner.__module__.partition('.')[0]}.{schema.name}", self.run, *ranges)
            self.compiling = lambda: True  # so that each call comes to `run`

    def __call__(self, stream: Any, arrays: tuple, options: tuple, layout: str = "bshd") -> Any:
        if not self.compiling():
            returned = self.of_known_form(stream, arrays, options, layout)
            if returned is not OTHER:
                return returned
        if torch_op.traced(arrays[0]):
            return torch_op.call(self, stream, arrays, options, layout)
        try:
            return self.run(stream, arrays, options, layout, True)
        except TypeError:  # it may be that these are no arrays yet
            ways = [way for way in (recording, torch_op, jax_call) if way.serves(arrays, self)]
            if not ways:
                raise
        return ways[0].call(self, stream, arrays, options, layout)

    def of_known_form(self, stream: Any, arrays: tuple, options: tuple, layout: str = "bshd") -> Any:
        """The result of a call that a guarded function serves; otherwise OTHER, and nothing is done. Dynamo must not trace
        it: see `compiling`."""
        numbers, key_options = self._numbers(options) if self.numbers else ((), options)
        try:
            # guarded functions for the forms that came last with these options
            expected = GUARDED_CALLS.get((self, key_options, layout))
        except TypeError:  # an option that cannot be looked up, such as a list
            return OTHER
        for call in expected or ():
            returned = call(stream, numbers, *arrays)
            if returned is not OTHER:
                if call is not expected[0]:
                    GUARDED_CALLS.put((self, key_options, layout), (call, *[other for other in expected if other is not call]))
                return returned
        return OTHER

    def run(self, stream: Any, arrays: tuple, options: tuple, layout: str, eager: bool = False) -> Any:
        """A call on arrays in memory. eager: no framework stands between it and the user, so that the next one may be made
        by a function that is written for its form (remembered_calls.py)."""
        read = self.readers.get(type(arrays[0])) or self._reader(arrays[0])
        try:
            kinds, lengths, addresses, described = read(*arrays)
        except (AttributeError, RuntimeError, TypeError):  # not all are tensors in memory: `describe` says what is wrong
            kinds, lengths, addresses, described = self._read(*arrays)
        numbers, options = self._numbers(options) if self.numbers else ((), options)
        try:
            remembered = REMEMBERED.get((self, kinds, lengths, options, layout))
        except TypeError:  # an option that cannot be looked up, such as a list
            prepared = self._planned(described or self._described(arrays), options, layout)
        else:
            if remembered is None:
                prepared = self._prepared(arrays, kinds, lengths, described, options, layout, eager and stream is None)
            else:
                prepared, call, traced = remembered
                if eager and stream is None and call is not False:
                    self._guard(call, prepared, traced, arrays, kinds, lengths, options, layout)
        current = 0 if prepared.device is None else prepared.kind.stream(arrays[0], prepared.device)
        handle = current if stream is None else stream_handle(stream)
        for a, b, low, high in prepared.disjoint:
            if low < addresses[b] - addresses[a] < high:
                self._check_apart(self._described(arrays), a, b)
        all_arrays: Sequence[Any] = arrays
        if prepared.makers or prepared.parts:
            all_arrays, addresses = [*arrays], [*addresses, *prepared.parts]
            for place, make in prepared.makers:
                new = make() if handle == current else prepared.kind.make_on(handle, prepared.device, make)
                if place < len(arrays):
                    all_arrays[place], addresses[place] = new, prepared.kind.address(new)
                else:  # scratch: kept until all steps are on the stream
                    all_arrays.append(new)
                    addresses.append(prepared.kind.address(new))
            for place, (source, offset) in enumerate(prepared.parts, len(arrays)):
                addresses[place] = addresses[source] + offset
        if prepared.beyond:
            start = addresses[-1]
            addresses += [start + far for far in prepared.beyond]
        addresses = (*addresses, *numbers)
        for step in prepared.steps:
            step.run(handle, addresses)
        if prepared.kind.waits and prepared.device is not None:
            prepared.kind.finish(handle)
        return prepared.give(all_arrays)

    def _numbers(self, options: tuple) -> tuple[list, tuple]:
        """(the numbers among the options, for the kernels; the options with a Number for each of them that was forms)"""
        key_options = [*options]
        for place, number in self.numbers:
            key_options[place] = None if key_options[place] is None else number
        return [options[place] or 0 for place, _ in self.numbers], tuple(key_options)

    def _guard(
        self,
        call: Callable | None,
        prepared: PreparedCall,
        traced: TracedPlan | None,
        arrays: tuple,
        kinds: Any,
        lengths: tuple,
        *call_key: Any,
    ) -> None:
        """A call of a form that came before, of these options and this layout. call: what was written for it, None if nothing
        was yet. If it was asked, and declined, it is for another mode of this thread. If more forms take turns than are
        expected, a function of their lengths serves them, if there is one. traced: the plan of that function."""
        expected = GUARDED_CALLS.get((self, *call_key)) or ()
        if traced and len(expected) == EXPECTED and (several := traced.grow(self.names, prepared, arrays, lengths, expected)):
            return self._expect(several, *call_key)
        if call is None or call in expected:
            call = remembered_calls.guarded(self.names, prepared, arrays, lengths)
            REMEMBERED.put((self, kinds, lengths, *call_key), (prepared, call or False, traced))
        if call:
            self._expect(call, *call_key)

    def _expect(self, call: Callable, *call_key: Any) -> None:
        """That the next call of these options and this layout may be for this function."""
        before = GUARDED_CALLS.get((self, *call_key)) or ()
        if call not in before:
            GUARDED_CALLS.put((self, *call_key), (call, *before[: EXPECTED - 1]))

    def _described(self, arrays: tuple) -> list:
        """An Array for each, or None; TypeError that names one that is no array, or is missing."""
        described: list[
            Any
        ] = []  # which an error's traceback keeps: cuda.core's views forget an error that is raised as they go
        for x, (name, needed) in zip(arrays, self.needed.items(), strict=True):
            if isinstance(x, (bool, int, float)):
                raise TypeError(self.schema.of_a_number(name, x))
            described.append(None if x is None and not needed else describe(x, name))
        return described

    def _read(self, *arrays: Any) -> tuple:
        """What is read of every call: (what these arrays share with others of their kinds, their lengths, their addresses, what
        must live until the call has ended). Lengths, of each: shape, strides, and how far its address is past a multiple of
        ALIGNMENT, negative for one that lies nowhere."""
        described = self._described(arrays)
        first = described[0]
        kinds = first.kind, first.kind.home(first), *[a and (a.dtype, a.device, a.form.itemsize, a.readonly) for a in described]
        lengths = tuple([a and (a.shape, a.strides, a.form.past if a.pointer else -1) for a in described])
        return kinds, lengths, [a.pointer if a else 0 for a in described], described

    def _reader(self, first: Any) -> Callable:
        """How calls with a first array of this type are read."""
        reader = kind_of(first, self.names[0]).reader(self.needed)
        return self.readers.setdefault(type(first), reader or self._read)

    def _prepared(
        self, arrays: tuple, kinds: Any, lengths: tuple, described: list | None, options: tuple, layout: str, eager: bool
    ) -> PreparedCall:
        """What calls of this form have in common: from a function of lengths, or planned, and watched for the next time."""
        key = self, kinds, options, layout
        traced_plans: tuple[TracedPlan, ...] = TRACED_PLANS.get(key) or ()
        traced: TracedPlan | None
        for traced in traced_plans:
            prepared = traced.function(lengths)
            if prepared:
                if traced is not traced_plans[0]:  # lengths that grow ask for the same one again
                    TRACED_PLANS.put(key, (traced, *[other for other in traced_plans if other is not traced]))
                if eager and described is None:
                    declined = GUARDED_CALLS.get((self, options, layout)) or ()
                    if call := traced.grow(self.names, prepared, arrays, lengths, declined):
                        self._expect(call, options, layout)
                break
        else:
            read_one_by_one = described is not None
            described = described or self._described(arrays)
            prepared, traced = self._planned(described, options, layout), None
            if len(traced_plans) < PLANS_PER_KIND and self._of_lengths(described, prepared):
                with suppress(TypeError, ValueError):  # of a planner that takes numbers, but not to be watched: Untraceable
                    traced = self._watched(described, not read_one_by_one, options, layout)
                    traced.last = lengths
                    TRACED_PLANS.put(key, (*traced_plans, traced))
        REMEMBERED.put((self, kinds, lengths, options, layout), (prepared, None, traced))
        return prepared

    def _planned(self, described: list, options: tuple, layout: str) -> PreparedCall:
        """The plan for these arrays alone."""
        forms = {name: array.form for name, array in zip(self.names, described) if array}
        with together() as coming:
            prepared = self._plan(forms, described[0], options, layout)
            if coming and self.meanwhile:
                threading.Thread(target=_unheard, args=(self._prepare_next, described, options, layout)).start()
        return self._plan(forms, described[0], options, layout) if coming else prepared

    def _prepare_next(self, described: list, options: tuple, layout: str) -> None:
        """Call `meanwhile`, in a thread of its own, with the forms of a call's arrays and of its results."""
        assert self.meanwhile is not None
        arrays, named = {name: x for name, x in zip(self.names, described) if x}, dict(zip(self.options, options))
        problem = self.schema.problem({name: x.form for name, x in arrays.items()}, layout)
        results = {name: c_ordered(*problem.made(name), problem.device) for name in self.schema.results(named)}
        self.meanwhile(arrays, results, named, layout)

    def prepare(self, forms: dict[str, Form], options: tuple, layout: str = "bshd") -> None:
        """Have the machine code for calls with arrays of these forms, by the schema's names, on a device."""
        with together():
            self.steps(forms, next(iter(forms.values())).device, options, layout)

    def _plan(self, forms: dict[str, Form], first: Array, options: tuple, layout: str) -> PreparedCall:
        """ValueError or TypeError: the schema or the planner refuses these forms."""
        problem, (steps, scratch, give), results = self.steps(forms, first.device, options, layout)
        order, kind = self.schema.places, first.kind
        home = kind.home(first)
        makers = [(order[name], kind.watched_maker(home, *problem.made(name))) for name in results if name not in forms]
        parts: Any = [x for x in scratch if isinstance(x, ArrayView)]
        memory: Any = scratch[len(parts) :]
        memory, beyond = (memory, []) if give or first.device is None else _joined(memory)
        makers += [(place, kind.watched_maker(home, *what)) for place, what in enumerate(memory, len(order) + len(parts))]
        disjoint = []
        for a, b in self.schema.apart(forms):
            (first_at, mine), (last_at, its) = ascending(forms[a]), ascending(forms[b])
            shift = first_at - last_at
            disjoint.append((order[a], order[b], shift - its.extent, shift + mine.extent))
        give = give or itemgetter(*[order[name] for name in results])
        return PreparedCall(kind, first.device, makers, parts, beyond, disjoint, steps, give)

    def steps(self, forms: dict[str, Form], device: int | None, options: tuple, layout: str) -> tuple:
        """Plan a call with arrays of these forms: (the Problem, the Plan with what is checked before, the names of the
        results)."""
        problem = self.schema.problem(forms, layout)
        plan = self.planner(problem, *to_records(self.planner)(options))
        if (device is None or check_options().values) and (check := self.schema.check(problem, forms)):
            plan = plan._replace(steps=[check, *plan.steps])
        return problem, plan, self.schema.results(dict(zip(self.options, options)))

    def _of_lengths(self, described: list, prepared: PreparedCall) -> bool:
        """Can this plan be one for other lengths, too? On a device; in the interpreter planning takes no time that counts."""
        return (
            prepared.device is not None
            and all(getattr(step, "of_lengths", False) for step in prepared.steps)
            and all(array.pointer for array in described if array)
        )

    def _watched(self, described: list, in_elements: bool, options: tuple, layout: str) -> TracedPlan:
        """The function of lengths that plans as the planner does for these arrays."""
        trace, names, forms = Trace(), [], {}
        variables: list[Variable] = []

        def variable(value: int, *where: int) -> Any:
            variables.append(Variable(f"n{len(variables)}", *where))
            return trace.variable(variables[-1].name, value)

        for place, (name, array) in enumerate(zip(self.names, described)):
            if array is None:
                names.append("_")
                continue
            form = array.form
            unit = form.itemsize if in_elements else 1
            shape = [variable(n, place, remembered_calls.SHAPE, axis) for axis, n in enumerate(form.shape)]
            strides = [
                variable(stride // unit, place, remembered_calls.STRIDES, axis) for axis, stride in enumerate(form.strides)
            ]
            past = variable(form.past, place, remembered_calls.PAST)
            names.append(f"({_pattern(shape)}, {_pattern(strides)}, {past.text})")
            past = max(past, 0)  # so that the function is none for arrays that lie nowhere
            full_form = form._replace(shape=tuple(shape), strides=tuple([unit * stride for stride in strides]), past=past)
            forms[name] = self.schema.with_lengths(name, full_form, layout)
        return TracedPlan(trace, f"{', '.join(names)},", variables, self._plan(forms, described[0], options, layout))

    def _check_apart(self, described: list, a: int, b: int) -> None:
        """ValueError if the arrays in these places share memory."""
        x, y = described[a], described[b]
        self.schema.check_apart(self.names[a], self.names[b], (x.pointer, y.pointer), (x.form, y.form))


def _unheard(call: Callable, *args: Any) -> None:
    """The call, whatever becomes of it."""
    with suppress(Exception):
        call(*args)


def _joined(scratch: Sequence[tuple[tuple[int, ...], str]]) -> tuple[Sequence[tuple[tuple[int, ...], str]], list[int]]:
    """The same memory as one array, for each costs the host a microsecond, and where in it the second and further ones begin.
    On a device: in the interpreter an access past one of them must not be one of the next."""
    if len(scratch) < 2:
        return scratch, []
    ends = [0]
    for shape, dtype in scratch:
        size = ITEMSIZE.get(dtype) or np.dtype(dtype).itemsize
        ends.append(ends[-1] + -(-math.prod(shape) * size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT)
    return [((ends[-1],), "uint8")], ends[1:-1]


def _pattern(variables: list[Any]) -> str:
    """What a tuple of numbers is assigned to."""
    return f"({''.join(f'{one.text}, ' for one in variables)})"
