"""Functions that are called often: what decides a call is looked up, and only the launch is left.

    @planned("q k v", "out")  # arrays that must be given; arrays that may be None
    def _scaled(q, k, v, out, scale):
        ...  # checks, and binds a launch: ValueError, TypeError
        return Plan(bound.prepare, {} if out else {"out": (q.shape, q.dtype)}, ("out",))

    def scaled(q, k, v, *, scale=1.0, out=None, stream=None):
        return _scaled(stream, (q, k, v, out), (scale,))

Describing four tensors, checking them and finding their launch costs the host more than the driver takes to launch. From the
*form* of a call (shape, strides, dtype and device of every array, and the options) follows what is computed, made and given
back; from the form, the stream and the *addresses* follows the rest: alignment, overlaps, tensor maps, the driver's
arguments. So there are two lookups, and whatever is missing from either goes the full way, through `describe` and the
planner, which refuse what is wrong. What was refused is never remembered.

Any number of threads may call at once: what is remembered does not change, and what two of them forget is made anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from .arrays import stream_handle
from .forms import FORMS
from .frameworks import Kind, Torch, describe, kind_of

READY = 4096  # launches that a form remembers: one for each stream and set of addresses


class Plan(NamedTuple):
    """How calls of one form are done.

    prepare(stream, *addresses) gives a function of no arguments that does it; `bound.prepare` is one. The addresses are those
    of the planner's arrays in their order, 0 where one was neither given nor made.
    make: {name: (shape, dtype)}, arrays to be made: uninitialised, C-ordered, of the first array's kind and on its device.
    give: what the caller gets back, one array by itself and several as a tuple."""

    prepare: Callable[..., Callable[[], None]]
    make: dict[str, tuple[tuple[int, ...], str]]
    give: tuple[str, ...]


class _Known(NamedTuple):
    """What calls of a form have in common. It keeps no array alive."""

    kind: Kind
    device: int | None
    makers: list[tuple[int, Callable[[], Any]]]  # which array, and what makes it
    give: Callable[[Sequence[Any]], Any]
    ready: dict[tuple[int, ...], Callable[[], None]]  # by stream and addresses

    def make_on(self, stream: int, make: Callable[[], Any]) -> Any:
        """What a maker gives, for a launch on another stream than the framework's current one: memory of that one might be
        reused by work that does not wait for the launch."""
        if self.device is None:
            return make()
        with self.kind.on(stream, self.device):
            return make()


def planned(needed: str, others: str = "") -> Callable[[Callable[..., Plan]], Planned]:
    """Make a planner a function of (stream, arrays, options). needed, others: the arrays' names; `others` may be None.

    The planner is called with an Array or None for each name, then the options; it raises ValueError or TypeError, or
    returns a Plan. It is called again when addresses are new, so what is costly there should be remembered."""
    return lambda planner: Planned(planner, needed.split(), others.split())


class Planned:
    """What `planned` makes: `function(stream, arrays, options)`.

    stream: a handle or a stream object; None is the current one of the first array's framework. What is made belongs to the
    stream as if it were the current one. arrays: one for each name, or None. options: a tuple of what else decides a call;
    those that are equal must mean the same (True, 1 and 1.0 are equal)."""

    def __init__(self, planner: Callable[..., Plan], needed: list[str], others: list[str]):
        self.planner, self.needed, self.names = planner, needed, needed + others
        self.readers: dict[type, Callable] = {}
        self.known: dict[tuple, _Known] = {}

    def __call__(self, stream: Any, arrays: tuple, options: tuple) -> Any:
        read = self.readers.get(type(arrays[0])) or self._reader(arrays[0])
        try:
            forms, addresses, held = read(*arrays)
        except (AttributeError, RuntimeError, TypeError):  # not all are tensors in memory: `describe` says what is wrong
            forms, addresses, held = self._read(*arrays)
        form, plan = (forms, options), None
        try:
            known = self.known.get(form)
        except TypeError:  # an option that cannot be looked up, such as a list
            known = None
        if known is None:
            plan = self._plan(arrays, options)
            known = self._learn(form, plan, arrays[0])
        current = 0 if known.device is None else known.kind.stream(arrays[0], known.device)
        handle = current if stream is None else stream_handle(stream)
        every: Sequence[Any] = arrays
        if known.makers:
            every, addresses = list(arrays), list(addresses)
            for place, make in known.makers:
                new = every[place] = make() if handle == current else known.make_on(handle, make)
                addresses[place] = known.kind.address(new)
        where = (handle, *addresses)
        run = known.ready.get(where)
        if run is None:
            plan = plan or self._plan(arrays, options)
            if len(known.ready) >= READY:
                known.ready.clear()
            run = known.ready[where] = plan.prepare(*where)
        run()
        if known.kind.waits and known.device is not None:
            known.kind.finish(handle)
        return known.give(every)

    def _described(self, arrays: tuple) -> list:
        """An Array for each, or None; TypeError that names one that is no array, or is missing."""
        named = zip(self.names, arrays, strict=True)
        return [None if x is None and name not in self.needed else describe(x, name) for name, x in named]

    def _read(self, *arrays: Any) -> tuple:
        """(what these arrays share with others of their forms, their addresses, what must live until the call has ended)."""
        described = self._described(arrays)
        forms = [a and (a.form, a.readonly) for a in described]
        first = described[0]
        return (first.kind, first.kind.home(first), *forms), [a.pointer if a else 0 for a in described], described

    def _reader(self, first: Any) -> Callable:
        """How calls with a first array of this type are read."""
        tensors = isinstance(kind_of(first, self.names[0]), Torch)
        return self.readers.setdefault(type(first), _reads_tensors(self.names) if tensors else self._read)

    def _plan(self, arrays: tuple, options: tuple) -> Plan:
        return self.planner(*self._described(arrays), *options)

    def _learn(self, form: tuple, plan: Plan, first: Any) -> _Known:
        array = describe(first, self.names[0])
        kind, home = array.kind, array.kind.home(array)
        makers = [(self.names.index(name), kind.maker(home, *what)) for name, what in plan.make.items()]
        give = itemgetter(*map(self.names.index, plan.give))
        if len(self.known) >= FORMS:
            self.known.clear()
        known = self.known[form] = _Known(kind, array.device, makers, give, {})
        return known


def _reads_tensors(names: list[str]) -> Callable:
    """`Planned._read` of torch's tensors: one expression over all of them, as a loop would take half as long again.

    A tensor that requires grad while grad mode is on has a form of its own, which `describe` refuses. The device is read as
    a number, which compares faster. Host tensors have -1, and so have those without memory that a kernel could read; these
    were never planned, and are at no address that was."""
    form = "None if {0} is None else ({0}.shape, {0}.stride(), {0}.dtype, {0}.get_device(), {0}.requires_grad and grads())"
    address = "0 if {0} is None else {0}.data_ptr()"
    forms, addresses = (", ".join(part.format(name) for name in names) for part in (form, address))
    grads = sys.modules["torch"].is_grad_enabled
    return eval(f"lambda {', '.join(names)}: (({forms},), ({addresses},), None)", {"grads": grads})
