"""Ops: one name with two meanings, written side by side.

    @op
    def row_max(tile):
        '''Greatest element of each row, as tile.col_vec.'''
        return tile.array.max(axis=1, keepdims=True)          # what it means, on NumPy arrays

    @lowers(row_max)
    def _(tile):                                              # what it becomes: sees types, e.g. rt(16, 64, fp32)
        return tile.col_vec, lambda b, v: ...                 # the result's type, and LLVM from the builder b

The decorated lowering is at once the typing rule of both backends: Numba calls it when a kernel is compiled, and the
interpreter calls it before it runs the NumPy meaning. So a mistake is refused with the same words on a laptop and on a
GPU. Types arrive as the frozen objects of tiles (rt, st, ring, ...), numbers as Numba scalar types. A parameter annotated
`int` arrives as the integer itself, or None if that is its default: it must be known when the kernel is compiled. One
annotated `type` takes the name of a tile type (`zeros(rt(16, 64, fp32))`); all others take values, and the name of a type is
no value.

A rule raises TypeError, or returns None for arguments that are no tiles (`1 + 2`). A meaning returns an
array or number, which is wrapped into the rule's result type; any other value is returned unchanged.
"""

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import numpy as np

from .numba_names import types

OPS: dict = {}  # {the function, operator or dtype that kernels call: its Op}
P = ParamSpec("P")  # an op keeps the parameters of its meaning, for editors and type checkers; not what it returns, an array
F = TypeVar("F", bound=Callable)
TYPE = type  # inside Op, `type` is a method


class TypeArgument(NamedTuple):
    """An argument that is itself a tile type, not a value of it."""

    type: object

    def __str__(self):
        return str(self.type)


class Op:
    """An op. op_function: the function, operator or dtype that kernels call. meaning: its NumPy meaning. rule: None until
    `lowers` registers it."""

    def __init__(self, op_function, meaning, takes_pending=False, takes_operands=False, takes_sums=False):
        self.op_function, self.meaning = op_function, meaning
        self.takes_pending, self.takes_operands, self.takes_sums = takes_pending, takes_operands, takes_sums
        self.name = getattr(op_function, "__qualname__", None) or str(op_function)
        self.signature = inspect.signature(operator.add if not callable(meaning) or isinstance(meaning, np.ufunc) else meaning)
        self.rule, self.known, self.agreed, self.bindings = None, {}, {}, {}
        self.of_arrays = False  # does it take NumPy arrays outside kernels?
        self.keeps_integers = False  # are results of integer arrays integers there, so that they index other arrays?
        OPS[op_function] = self

    def __repr__(self):
        return f"<op {self.name}>"

    @functools.cached_property
    def wants(self):
        """For each parameter `int`, `type` or something else, as the rule is annotated. TypeError: the rule is not the op's."""
        if self.rule is None:
            raise TypeError(f"{self.name}: has no rule: write one under @lowers({self.name})")
        parameters = inspect.signature(self.rule).parameters
        if len(parameters) != len(self.parameters):
            theirs, ours = ", ".join(parameters), ", ".join(self.parameters)
            raise TypeError(f"{self.name}: its rule must have the op's parameters, ({ours}), and has ({theirs})")
        return tuple(p.annotation for p in parameters.values())

    @functools.cached_property
    def defaults(self):
        """The default of each parameter, Parameter.empty if it has none."""
        return tuple(p.default for p in self.signature.parameters.values())

    def _bound(self, args, kwargs):
        """An argument for each parameter. Binding costs more than most ops, so each pattern of arguments is bound once."""
        form = len(args), *kwargs
        if form not in self.bindings:
            try:
                self.bind(args, kwargs)
            except TypeError as error:
                from .interpreter import hazard_line

                raise TypeError(f"{error}{hazard_line()}") from None
            named = {name: len(args) + k for k, name in enumerate(kwargs)}
            default = len(form) - 1 + len(args)
            places = [k if k < len(args) else named.get(name, default + k) for k, name in enumerate(self.parameters)]
            self.bindings[form] = operator.itemgetter(*places) if len(places) > 1 else lambda all_: (all_[places[0]],)
        return self.bindings[form]((*args, *kwargs.values(), *self.defaults))

    def bind(self, args, kwargs):
        """inspect.BoundArguments of the op's parameters. TypeError names the op."""
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}; it takes ({', '.join(self.parameters)})") from None

    def type(self, *specs):
        """(result type, emit) for argument types, or None; TypeError: the op does not take them."""
        entry = self.known.get(specs, UNKNOWN)
        return self._typed(specs) if entry is UNKNOWN else entry

    def _typed(self, specs):
        from .dtypes import OPERANDS, SUMS
        from .types import pending, rt, rv

        for spec, parameter, want in zip(specs, self.signature.parameters, self.wants, strict=True):
            if isinstance(spec, TypeArgument) and want is not TYPE:
                raise TypeError(f"{self.name}: {parameter} must be a value, got the type {spec}")
            if isinstance(spec, pending) and not self.takes_pending:
                raise TypeError(f"{self.name}: this tile is still in flight: {spec}; take it with warpgroup.wait(...) first")
            if isinstance(spec, (rt, rv)) and spec.dtype in OPERANDS and not self.takes_operands:
                use = (
                    "tiles of {} are only for products" if isinstance(spec, rt) else "vectors of {} are only loaded and stored"
                )
                raise TypeError(f"{self.name}: {use.format(spec.dtype)}: convert it, fp32(x); got {spec}")
            if isinstance(spec, rt) and spec.dtype in SUMS and not self.takes_sums:
                raise TypeError(f"{self.name}: tiles of {spec.dtype} are sums of products: convert it, fp32(x); got {spec}")
            optional = spec is None and self.signature.parameters[parameter].default is None
            if want is int and not isinstance(spec, int) and not optional:
                raise TypeError(f"{self.name}: {parameter} must be known when the kernel is compiled, got {spec}")
        typed = self.rule(*(s.type if isinstance(s, TypeArgument) else s for s in specs))
        if typed is not None and not (isinstance(typed, tuple) and len(typed) == 2):
            raise TypeError(f"{self.name}: its rule must return (result, emit), or None where it has no meaning, got {typed}")
        if not any(isinstance(spec, types.Dispatcher) for spec in specs):  # a user's function, which may go
            self.known[specs] = typed
        return typed

    def __call__(self, *args, **kwargs):
        """The NumPy meaning, after the rule has agreed."""
        if self.of_arrays and any([type(x) is np.ndarray for x in args]):
            return self._of_arrays(*args, **kwargs)
        spec_of, wrap, getcurrent, record_op, of_a_type = _interpreted()
        if kwargs or len(args) != len(self.defaults):
            args = self._bound(args, kwargs)
        try:
            specs = [a.spec if a.__class__ in of_a_type else spec_of(a, fixed) for a, fixed in zip(args, self.fixed)]
            result, global_accesses, _ = self.agreed.get(tuple(map(id, specs))) or self._agree(tuple(specs))
        except TypeError as error:
            for x in args:
                if hasattr(x, "noted"):  # what stands for a value, of a function that is run to be read
                    return x.noted(self, args)
            from .interpreter import hazard_line

            raise TypeError(f"{error}{hazard_line()}") from None
        warp = getcurrent()
        if global_accesses and (note_access := getattr(warp, "note_access", None)):
            for place, access in global_accesses:
                note_access(args[place], access)
        recorded = getattr(warp, "steps", None) is not None
        value = record_op(self, tuple(specs), result, args) if recorded else self.meaning(*args)
        try:
            return wrap(result, value)
        except TypeError as error:
            from .interpreter import hazard_line

            raise TypeError(f"{self.name}: {error}{hazard_line()}") from None

    def _of_arrays(self, *args, **kwargs):
        """The NumPy meaning outside kernels. There integers index arrays; in kernels whole numbers of fp32 do."""
        result = self.meaning(*args, **kwargs)
        kinds = {np.asarray(x).dtype.kind for x in (*args, *kwargs.values())}
        return result.astype(int) if self.keeps_integers and kinds <= set("biu") else result

    @functools.cached_property
    def parameters(self):
        """The names of its parameters."""
        return tuple(self.signature.parameters)

    @functools.cached_property
    def fixed(self):
        """For each parameter: is it an integer that must be known at compile time?"""
        return tuple(want is int for want in self.wants)

    def _agree(self, specs):
        """(result type, the accesses to global arrays, specs), stored for rules whose answer is stored, by the ids of specs,
        whose hashes take as long as many ops. The stored tuple keeps them alive."""
        from .interpreter import global_accesses

        typed = self.type(*specs)
        if typed is None:
            raise TypeError(f"{self.name}: no meaning for {', '.join(map(str, specs))}")
        agreed = typed[0], global_accesses(self.parameters, specs, typed[0]), specs
        if specs in self.known:
            if len(self.agreed) == MAX_AGREED:
                self.agreed.clear()
            self.agreed[tuple(map(id, specs))] = agreed
        return agreed


@functools.cache
def _interpreted():
    """The functions that run meanings, whose modules import this one: looked up once, because an import takes longer than most
    ops."""
    from greenlet import getcurrent

    from .interpreter.record import record_op
    from .values import OF_A_TYPE, spec_of, wrap

    return spec_of, wrap, getcurrent, record_op, OF_A_TYPE


UNKNOWN = object()  # no rule was called with these types yet
MAX_AGREED = 4096  # entries of Op.agreed: new types for each call must not fill the memory


@overload
def op(op_function: Callable[P, object]) -> Callable[P, Any]: ...
@overload
def op(
    *, takes_pending: bool = False, takes_operands: bool = False, takes_sums: bool = False
) -> Callable[[Callable[P, object]], Callable[P, Any]]: ...
def op(op_function=None, *, takes_pending=False, takes_operands=False, takes_sums=False):
    """Decorator: the function's body is an op's NumPy meaning. `lowers` completes it. takes_pending: it takes tiles in flight;
    takes_operands: it takes register tiles of dtypes that are only for products; takes_sums: of int32, the sums of products."""
    if op_function is None:
        return functools.partial(op, takes_pending=takes_pending, takes_operands=takes_operands, takes_sums=takes_sums)

    @functools.wraps(op_function)
    def call(*args, **kwargs):
        return operation(*args, **kwargs)

    operation = Op(call, op_function, takes_pending, takes_operands, takes_sums)
    operation.name = op_function.__qualname__.rpartition("<locals>.")[2]
    return call


def lowers(op_function, meaning=None, **takes):
    """Decorator: the function is the rule and lowering of the op `op_function`. Operators and dtypes (`operator.add`, fp32)
    come with their NumPy `meaning`, and the flags of `op`."""

    def register(rule):
        from .compiling.numba_types import teach_numba

        operation = OPS.get(op_function) or Op(op_function, meaning, **takes)
        operation.rule = rule
        teach_numba(operation)
        return rule

    return register


def inlined(function: F) -> F:
    """Decorator: a plain function of kernel code, compiled into its callers (through a real call, tiles would go through
    memory). Without a GPU it is simply called."""
    from .compiling.numba_helpers import inline

    inline(function)
    return function


def integer(spec) -> bool:
    """Is this the type of a run-time or compile-time integer?"""
    return isinstance(spec, (int, types.Integer))


def number(spec) -> bool:
    """Is this the type of a scalar?"""
    return isinstance(spec, (int, float, types.Number))
