"""Programs: functions whose plan for a form of call is stored, so that repeated calls only launch. docs/calls.md follows a call
through the tables (of known shapes, of plans for new sequence lengths) and says what each of them saves.

    SCALED = Schema("scaled", '''
        x    (seqlen, head_dim)  float32
        out  (seqlen, head_dim)  float32  output
    ''')

    @program(SCALED)
    def _scaled(problem, factor) -> Plan:
        ...  # further checks, and launches: ValueError, TypeError
        return Plan([kernel.bind(blocks, gX=problem["x"], gOut=problem["out"], factor=factor)])

    def scaled(x, *, factor=1.0, out=None, stream=None):
        return _scaled(stream, (x, out), (factor,))

The *forms* of a call's arrays (shape, strides, dtype, device, alignment) and its options determine everything but addresses:
the launches, the arrays that are allocated, and the results. So a call of a known form reads its arrays, looks up
the form, writes the addresses into the launches' parameter blocks and calls the driver. A call of a new form is checked and
planned; a refusal is never remembered. A framework that traces the call instead of making it (torch.compile, jax.jit) gets an
op that stands for it (torch_op.py, jax_call.py).

A **program** is its launches, one after the other on the caller's stream, and the scratch memory between them, which comes
from the caller's allocator. Nothing waits for the device, so all of it may be captured in a CUDA graph.

Shapes and strides are lengths. A form that differs from a known one only in these is not planned again. A function that was
generated while the planner was watched (lengths.py) serves it: it makes the planner's checks, and takes the same branches. If
it cannot, the call is planned.

Any number of threads may call at once: stored values do not change, and a lost one is computed again.
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
from ..launching.loaded_code import compile_together, wait_for_numba
from . import jax_call, remembered_calls, torch_op
from .plan import ArrayView, LruTable, Plan, PreparedCall
from .planner_options import group_options, option_types
from .remembered_calls import NOT_SERVED
from .schema import Schema
from .watched_plans import Variable, WatchedPlan

ENTRIES = 4096  # forms of calls that are remembered, of all programs together: 4 to 12 KB each, by the launches they take
PLAN_KINDS = 1024  # kinds of forms, alike but for lengths, that are remembered, and options of calls with guarded functions
PLANS_PER_KIND = 32  # watched plans of each kind
EXPECTED = 8  # guarded functions that are tried before a call is read: one that declines takes 0.3 to 2 us, reading 20 to 50
SCRATCH_ALIGNMENT = 256  # bytes: scratch arrays of one allocation begin at multiples of this, as allocated ones do


GUARDED_CALLS, REMEMBERED, WATCHED_PLANS = LruTable(PLAN_KINDS), LruTable(ENTRIES), LruTable(PLAN_KINDS)


def program(
    schema: Schema,
    gradient: Callable | None = None,
    no_gradient: str | None = None,
    prepare_next: Callable[[dict[str, Array], dict[str, Form], dict[str, Any], str], None] | None = None,
) -> Callable[[Callable[..., Plan]], Program]:
    """Make a planner a function of (stream, arrays, options, layout), the arrays being those of the schema.

    The planner is called with the Problem and the options, which it may take in groups (planner_options.py); it raises
    ValueError or TypeError, or returns a Plan.

    gradient: gradient(names, options=, layout=) refuses what it cannot differentiate, with respect to these arguments of the
    schema, or returns f(forms, results, gradients) -> {name: gradient}, all by the schema's names: the arguments, all results,
    and the gradients of those that have one. JAX asks it (jax_call.py). no_gradient: the error message where there is none, or
    none of second order.

    prepare_next: prepare_next(arrays, results, options, layout), with the Arrays that are passed, the forms of results and the
    options by their names, is called in a thread of its own while a call's kernels are compiled, to compile those of the call
    that probably follows. Its errors are ignored."""
    return lambda planner: Program(schema, planner, gradient, no_gradient, prepare_next)


class Program:
    """The callable that `program` makes of a planner: `function(stream, arrays, options, layout)`.

    stream: a handle or a stream object; None is the current one of the first array's framework. New arrays belong to the
    stream as if it were the current one. arrays: one for each name of the schema, or None. options: a tuple of all else that
    the plan depends on; equal ones must mean the same (True, 1 and 1.0 are equal). Of an option that the planner annotates as
    `Number | None` the plan depends only on whether it is None: its value goes to the kernels with the addresses."""

    def __init__(
        self,
        schema: Schema,
        planner: Callable[..., Plan],
        gradient: Callable | None = None,
        no_gradient: str | None = None,
        prepare_next: Callable[[dict[str, Array], dict[str, Form], dict[str, Any], str], None] | None = None,
    ):
        self.schema, self.planner, self.names = schema, planner, schema.names
        self.gradient, self.no_gradient, self.prepare_next = gradient, no_gradient, prepare_next
        self.needed = {name: argument.needed for name, argument in schema.arguments.items()}
        self.absent = dict.fromkeys(self.names)
        self.readers: dict[type, Callable] = {}
        self.compiling = torch_op.choose_is_compiling()
        self.op = torch_op.register_op(self)
        self.option_types = option_types(planner)
        self.options = tuple(self.option_types)
        places = [place for place, kind in enumerate(self.option_types.values()) if kind == Number | None]
        self.numbers = [(place, Number(n - len(places))) for n, place in enumerate(places)]
        if ranges := nvtx.backend():
            vars(self)["run"] = nvtx.call_in_range(f"{planner.__module__.partition('.')[0]}.{schema.name}", self.run, *ranges)
            self.compiling = lambda: True  # so that each call comes to `run`

    def __call__(self, stream: Any, arrays: tuple, options: tuple, layout: str = "bshd") -> Any:
        if not self.compiling():
            returned = self.call_guarded(stream, arrays, options, layout)
            if returned is not NOT_SERVED:
                return returned
        if torch_op.is_traced(arrays[0]):
            return torch_op.call(self, stream, arrays, options, layout)
        try:
            return self.run(stream, arrays, options, layout, True)
        except TypeError:  # these may be tracers or Operands
            ways = [way for way in (recording, torch_op, jax_call) if way.serves(arrays, self)]
            if not ways:
                raise
        return ways[0].call(self, stream, arrays, options, layout)

    def in_order(self, arrays: dict[str, Any]) -> tuple:
        """The arrays of a call by their names, as the call takes them: in the schema's order, None where there is none.
        KeyError: the schema has no array of this name."""
        by_name = self.absent | arrays
        if len(by_name) > len(self.absent):
            raise KeyError(f"{self.schema.name} has no array {min(arrays.keys() - self.absent.keys())}")
        return tuple(by_name.values())

    def call_guarded(self, stream: Any, arrays: tuple, options: tuple, layout: str = "bshd") -> Any:
        """The result of a call that a guarded function serves; otherwise NOT_SERVED, and nothing is done. Dynamo must not trace
        it: see `compiling`."""
        numbers, key_options = self._split_numbers(options) if self.numbers else ((), options)
        try:
            # guarded functions for the forms that came last with these options
            expected = GUARDED_CALLS.get((self, key_options, layout))
        except TypeError:  # an option that cannot be looked up, such as a list
            return NOT_SERVED
        for call in expected or ():
            returned = call(stream, numbers, *arrays)
            if returned is not NOT_SERVED:
                if call is not expected[0]:
                    GUARDED_CALLS.put((self, key_options, layout), (call, *[other for other in expected if other is not call]))
                return returned
        return NOT_SERVED

    def run(self, stream: Any, arrays: tuple, options: tuple, layout: str, eager: bool = False) -> Any:
        """A call on arrays in memory. eager: no framework stands between it and the user, so that a function generated for its
        form may serve the next one (remembered_calls.py)."""
        read = self.readers.get(type(arrays[0])) or self._choose_reader(arrays[0])
        try:
            kinds, lengths, addresses, descriptions = read(*arrays)
        except (AttributeError, RuntimeError, TypeError):  # not all are tensors in memory: `describe` says what is wrong
            kinds, lengths, addresses, descriptions = self._read(*arrays)
        numbers, options = self._split_numbers(options) if self.numbers else ((), options)
        try:
            remembered = REMEMBERED.get((self, kinds, lengths, options, layout))
        except TypeError:  # an option that cannot be looked up, such as a list
            for name, option in zip(self.options, options, strict=True):
                if getattr(option, "shape", ()):
                    raise TypeError(f"{name}: must not be an array: {name}={option!r:.60}") from None
            prepared = self._plan_and_compile(descriptions or self._describe_arrays(arrays), options, layout)
        else:
            if remembered is None:
                prepared = self._prepare_call(arrays, kinds, lengths, descriptions, options, layout, eager and stream is None)
            else:
                prepared, call, watched_plan = remembered
                if eager and stream is None and call is not False:
                    self._guard(call, prepared, watched_plan, arrays, kinds, lengths, options, layout)
        current = 0 if prepared.device is None else prepared.kind.stream(arrays[0], prepared.device)
        handle = current if stream is None else stream_handle(stream)
        for a, b, low, high in prepared.disjoint:
            if low < addresses[b] - addresses[a] < high:
                self._check_overlap(self._describe_arrays(arrays), a, b)
        all_arrays: Sequence[Any] = arrays
        if prepared.allocators or prepared.parts:
            all_arrays, addresses = [*arrays], [*addresses, *prepared.parts]
            for place, make in prepared.allocators:
                new = make() if handle == current else prepared.kind.allocate_on(handle, prepared.device, make)
                if place < len(arrays):
                    all_arrays[place], addresses[place] = new, prepared.kind.address(new)
                else:  # scratch: kept until all steps are on the stream
                    all_arrays.append(new)
                    addresses.append(prepared.kind.address(new))
            for place, (source, offset) in enumerate(prepared.parts, len(arrays)):
                addresses[place] = addresses[source] + offset
        if prepared.scratch_offsets:
            start = addresses[-1]
            addresses += [start + far for far in prepared.scratch_offsets]
        addresses = (*addresses, *numbers)
        for step in prepared.steps:
            step.run(handle, addresses)
        if prepared.kind.waits and prepared.device is not None:
            prepared.kind.finish(handle)
        return prepared.make_result(all_arrays)

    def _split_numbers(self, options: tuple) -> tuple[list, tuple]:
        """(the numbers among the options, for the kernels; the options with a Number for each of them that was forms)"""
        key_options = [*options]
        for place, number in self.numbers:
            key_options[place] = None if key_options[place] is None else number
        return [options[place] or 0 for place, _ in self.numbers], tuple(key_options)

    def _guard(
        self,
        call: Callable | None,
        prepared: PreparedCall,
        watched_plan: WatchedPlan | None,
        arrays: tuple,
        kinds: Any,
        lengths: tuple,
        *call_key: Any,
    ) -> None:
        """Generate a guarded function for a call whose form, options and layout came before. call: the function that was
        generated for it, None if there is none yet. If it was tried, and declined, it is for another mode of this thread. If
        more than EXPECTED forms alternate, a function of their lengths serves them, if there is one. watched_plan: the plan of
        that function."""
        expected = GUARDED_CALLS.get((self, *call_key)) or ()
        if (
            watched_plan
            and len(expected) == EXPECTED
            and (several := watched_plan.write_guarded_call(self.names, prepared, arrays, lengths, expected))
        ):
            return self._expect(several, *call_key)
        if call is None or call in expected:
            call = remembered_calls.build_guarded_call(self.names, prepared, arrays, lengths)
            REMEMBERED.put((self, kinds, lengths, *call_key), (prepared, call or False, watched_plan))
        if call:
            self._expect(call, *call_key)

    def _expect(self, call: Callable, *call_key: Any) -> None:
        """Try this function first in the next call with these options and this layout."""
        before = GUARDED_CALLS.get((self, *call_key)) or ()
        if call not in before:
            GUARDED_CALLS.put((self, *call_key), (call, *before[: EXPECTED - 1]))

    def _describe_arrays(self, arrays: tuple) -> list:
        """An Array for each, or None; TypeError that names one that is no array, or is missing."""
        descriptions: list[
            Any
        ] = []  # which an error's traceback keeps: cuda.core's views forget an error that is raised as they go
        for x, (name, needed) in zip(arrays, self.needed.items(), strict=True):
            if isinstance(x, (bool, int, float)):
                raise TypeError(self.schema.number_message(name, x))
            descriptions.append(None if x is None and not needed else describe(x, name))
        return descriptions

    def _read(self, *arrays: Any) -> tuple:
        """(kinds, lengths, addresses, the Arrays, which must live until the call has ended) of a call's arrays. Kinds:
        framework, device and dtypes. Lengths, of each: shape, strides, and how far its address is past a multiple of ALIGNMENT,
        negative for an array without memory."""
        descriptions = self._describe_arrays(arrays)
        first = descriptions[0]
        kinds = (
            first.kind,
            first.kind.placement(first),
            *[a and (a.dtype, a.device, a.form.itemsize, a.readonly) for a in descriptions],
        )
        lengths = tuple([a and (a.shape, a.strides, a.form.misalignment if a.pointer else -1) for a in descriptions])
        return kinds, lengths, [a.pointer if a else 0 for a in descriptions], descriptions

    def _choose_reader(self, first: Any) -> Callable:
        """The function that reads calls whose first array has this type: see `_read`."""
        reader = kind_of(first, self.names[0]).reader(self.needed)
        return self.readers.setdefault(type(first), reader or self._read)

    def _prepare_call(
        self, arrays: tuple, kinds: Any, lengths: tuple, descriptions: list | None, options: tuple, layout: str, eager: bool
    ) -> PreparedCall:
        """The PreparedCall of this form: from a function of lengths, or planned, and traced for other lengths."""
        key = self, kinds, options, layout
        cached_plans: tuple[WatchedPlan, ...] = WATCHED_PLANS.get(key) or ()
        watched_plan: WatchedPlan | None
        for watched_plan in cached_plans:
            prepared = watched_plan.function(lengths)
            if prepared:
                if watched_plan is not cached_plans[0]:  # growing lengths use the same one again
                    WATCHED_PLANS.put(key, (watched_plan, *[other for other in cached_plans if other is not watched_plan]))
                if eager and descriptions is None:
                    declined = GUARDED_CALLS.get((self, options, layout)) or ()
                    if call := watched_plan.write_guarded_call(self.names, prepared, arrays, lengths, declined):
                        self._expect(call, options, layout)
                break
        else:
            read_one_by_one = descriptions is not None
            descriptions = descriptions or self._describe_arrays(arrays)
            prepared, watched_plan = self._plan_and_compile(descriptions, options, layout), None
            if len(cached_plans) < PLANS_PER_KIND and self._is_function_of_lengths(descriptions, prepared):
                with suppress(TypeError, ValueError):  # Untraceable: the planner works on numbers, but not on Lengths
                    watched_plan = self._trace_plan(descriptions, not read_one_by_one, options, layout)
                    watched_plan.last = lengths
                    WATCHED_PLANS.put(key, (*cached_plans, watched_plan))
        REMEMBERED.put((self, kinds, lengths, options, layout), (prepared, None, watched_plan))
        return prepared

    def _plan_and_compile(self, descriptions: list, options: tuple, layout: str) -> PreparedCall:
        """The PreparedCall of these arrays, planned, with all its kernels compiled at once."""
        forms = {name: array.form for name, array in zip(self.names, descriptions) if array}
        with compile_together() as compiles_later:
            prepared = self._plan(forms, descriptions[0], options, layout)
            compiles_later.start()
            if compiles_later and self.prepare_next:
                threading.Thread(target=_call_ignoring_errors, args=(self._prepare_next, descriptions, options, layout)).start()
        return self._plan(forms, descriptions[0], options, layout) if compiles_later else prepared

    def _prepare_next(self, descriptions: list, options: tuple, layout: str) -> None:
        """Call `prepare_next`, in a thread of its own, with the forms of a call's arrays and of its results. Before Numba is
        done with the call, what this imports and plans would only delay it."""
        assert self.prepare_next is not None
        wait_for_numba()
        arrays, named = {name: x for name, x in zip(self.names, descriptions) if x}, dict(zip(self.options, options))
        problem = self.schema.problem({name: x.form for name, x in arrays.items()}, layout)
        results = {name: c_ordered(*problem.result_form(name), problem.device) for name in self.schema.results(named)}
        self.prepare_next(arrays, results, named, layout)

    def prepare(self, forms: dict[str, Form], options: tuple, layout: str = "bshd") -> None:
        """Compile and load the kernels for calls with arrays of these forms, by the schema's names, on a device."""
        with compile_together():
            self.steps(forms, next(iter(forms.values())).device, options, layout)

    def _plan(self, forms: dict[str, Form], first: Array, options: tuple, layout: str) -> PreparedCall:
        """ValueError or TypeError: the schema or the planner refuses these forms."""
        problem, (steps, scratch, make_result), results = self.steps(forms, first.device, options, layout)
        order, kind = self.schema.places, first.kind
        placement = kind.placement(first)
        allocators = [
            (order[name], kind.watched_allocator(placement, *problem.result_form(name)))
            for name in results
            if name not in forms
        ]
        parts: Any = [x for x in scratch if isinstance(x, ArrayView)]
        memory: Any = scratch[len(parts) :]
        memory, scratch_offsets = (memory, []) if make_result or first.device is None else _join_scratch(memory)
        allocators += [
            (place, kind.watched_allocator(placement, *result_form))
            for place, result_form in enumerate(memory, len(order) + len(parts))
        ]
        disjoint = []
        for a, b in self.schema.disjoint_pairs(forms):
            (first_at, form_a), (last_at, form_b) = ascending(forms[a]), ascending(forms[b])
            shift = first_at - last_at
            disjoint.append((order[a], order[b], shift - form_b.extent, shift + form_a.extent))
        make_result = make_result or itemgetter(*[order[name] for name in results])
        return PreparedCall(kind, first.device, allocators, parts, scratch_offsets, disjoint, steps, make_result)

    def steps(self, forms: dict[str, Form], device: int | None, options: tuple, layout: str) -> tuple:
        """Plan a call with arrays of these forms: (the Problem, the Plan with the step that checks values first, the names of
        the results)."""
        problem = self.schema.problem(forms, layout)
        plan = self.planner(problem, *group_options(self.planner)(options))
        if (device is None or check_options().values) and (check := self.schema.check(problem, forms)):
            plan = plan._replace(steps=[check, *plan.steps])
        return problem, plan, self.schema.results(dict(zip(self.options, options)))

    def _is_function_of_lengths(self, descriptions: list, prepared: PreparedCall) -> bool:
        """Can a function of lengths make this plan? On a device only; in the interpreter the time of planning does not
        matter."""
        return (
            prepared.device is not None
            and all(getattr(step, "of_lengths", False) for step in prepared.steps)
            and all(array.pointer for array in descriptions if array)
        )

    def _trace_plan(self, descriptions: list, in_elements: bool, options: tuple, layout: str) -> WatchedPlan:
        """The WatchedPlan of the planner's run for these arrays, with their lengths as variables."""
        trace, names, forms = Trace(), [], {}
        variables: list[Variable] = []

        def variable(value: int, *where: int) -> Any:
            variables.append(Variable(f"n{len(variables)}", *where))
            return trace.variable(variables[-1].name, value)

        for place, (name, array) in enumerate(zip(self.names, descriptions)):
            if array is None:
                names.append("_")
                continue
            form = array.form
            unit = form.itemsize if in_elements else 1
            shape = [variable(n, place, remembered_calls.SHAPE, axis) for axis, n in enumerate(form.shape)]
            strides = [
                variable(stride // unit, place, remembered_calls.STRIDES, axis) for axis, stride in enumerate(form.strides)
            ]
            misalignment = variable(form.misalignment, place, remembered_calls.MISALIGNMENT)
            names.append(f"({_pattern(shape)}, {_pattern(strides)}, {misalignment.text})")
            misalignment = max(misalignment, 0)  # arrays without memory have -1, and the function does not serve them
            full_form = form._replace(
                shape=tuple(shape), strides=tuple([unit * stride for stride in strides]), misalignment=misalignment
            )
            forms[name] = self.schema.with_lengths(name, full_form, layout)
        return WatchedPlan(trace, f"{', '.join(names)},", variables, self._plan(forms, descriptions[0], options, layout))

    def _check_overlap(self, descriptions: list, a: int, b: int) -> None:
        """ValueError if the arrays in these places share memory."""
        x, y = descriptions[a], descriptions[b]
        self.schema.check_overlap(self.names[a], self.names[b], (x.pointer, y.pointer), (x.form, y.form))


def _call_ignoring_errors(call: Callable, *args: Any) -> None:
    """Call a function, and ignore its errors."""
    with suppress(Exception):
        call(*args)


def _join_scratch(scratch: Sequence[tuple[tuple[int, ...], str]]) -> tuple[Sequence[tuple[tuple[int, ...], str]], list[int]]:
    """(the scratch arrays joined to one, because each costs the host a microsecond; where in it the second and further ones
    begin). For devices only: in the interpreter an access past the end of an array must not hit the next one."""
    if len(scratch) < 2:
        return scratch, []
    ends = [0]
    for shape, dtype in scratch:
        size = ITEMSIZE.get(dtype) or np.dtype(dtype).itemsize
        ends.append(ends[-1] + -(-math.prod(shape) * size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT)
    return [((ends[-1],), "uint8")], ends[1:-1]


def _pattern(variables: list[Any]) -> str:
    """The text of a tuple of variables, as the target of an assignment."""
    return f"({''.join(f'{one.text}, ' for one in variables)})"
