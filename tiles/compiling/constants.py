"""Constants of a kernel: `STAGES - 2`, `T.cols // 2` and `self.causal` are known when it is compiled, and folded here.

So they can be given to ops that must know an argument at compile time, and a branch on one of them is decided: the side that is
not taken is not even typed. Numba alone would compute them when the kernel runs.
"""

import operator

import numpy as np
from numba.cuda.core import consts, ir
from numba.cuda.core.rewrites import Rewrite, register_rewrite

from ..dtypes import dtype
from ..types import is_static, rt, rv, st, sv
from .numba_types import StaticType, member

ARITHMETIC = {getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift")}
COMPARISONS = {getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "contains")}
IDENTITIES = {operator.is_, operator.is_not}
SCALARS = (bool, int, float, np.float32, str, type(None))  # constants that can be written into the code
COMPARED = (*SCALARS, tuple, dtype, rt, rv, st, sv)
UNKNOWN = object()


def known_value(function, variable, args):
    """The value of a variable of Numba's IR if it is known at compile time, else UNKNOWN. args: the types of the function's
    arguments."""
    try:
        return _value(function, function.get_definition(variable), args)
    except KeyError:  # it has several definitions
        return UNKNOWN


def _value(function, definition, args):
    """The value of the expression that defines a variable, or UNKNOWN."""
    if isinstance(definition, (ir.Const, ir.Global, ir.FreeVar)):
        return definition.value
    if isinstance(definition, ir.Arg):
        argument = args[definition.index] if args else None
        return argument.spec if isinstance(argument, StaticType) else UNKNOWN
    if not isinstance(definition, ir.Expr):
        return UNKNOWN
    if definition.op == "binop":
        return _binary(definition.fn, known_value(function, definition.lhs, args), known_value(function, definition.rhs, args))
    if definition.op == "build_tuple":
        items = tuple(known_value(function, item, args) for item in definition.items)
        return UNKNOWN if any(item is UNKNOWN for item in items) else items
    if definition.op not in ("getattr", "getitem", "static_getitem", "unary"):
        return UNKNOWN
    value = known_value(function, definition.value, args)
    if value is UNKNOWN:
        return UNKNOWN
    if definition.op == "getattr":
        try:
            return member(value, definition.attr, UNKNOWN)
        except TypeError:  # type inference reports it, with its line
            return UNKNOWN
    if definition.op == "unary":
        return not value if definition.fn is operator.not_ and isinstance(value, SCALARS) else UNKNOWN
    index = definition.index if definition.op == "static_getitem" else known_value(function, definition.index, args)
    fits = isinstance(value, tuple) and isinstance(index, int) and -len(value) <= index < len(value)
    return value[index] if fits else UNKNOWN


def _binary(operation, x, y):
    """The result of an operation on two values, or UNKNOWN if one of them is."""
    if x is UNKNOWN or y is UNKNOWN:
        return UNKNOWN
    try:
        if operation in ARITHMETIC and type(x) is type(y) is int:
            return operation(x, y)
        if operation in COMPARISONS and isinstance(x, COMPARED) and isinstance(y, COMPARED):
            return bool(operation(x, y))
    except (TypeError, ArithmeticError):  # the kernel's own mistake: Numba names it
        return UNKNOWN
    return operation(x, y) if operation in IDENTITIES and (x is None or y is None) else UNKNOWN


@register_rewrite("before-inference")
class FoldConstants(Rewrite):
    """Replaces arithmetic, comparisons, and reads from static objects and tuples by their values where these are known."""

    def __init__(self, state=None):
        self.args = state.args or ()  # unknown for the body of a closure that is being inlined

    def match(self, func_ir, block, typemap, calltypes):
        """Does the block contain anything that can be replaced?"""
        self.function, self.block, self.constants = func_ir, block, {}
        for assignment in block.find_insts(ir.Assign):
            if isinstance(assignment.value, ir.Expr) and self._folds(assignment.value):
                value = _value(func_ir, assignment.value, self.args)
                if isinstance(value, SCALARS):
                    self.constants[assignment] = value
        return bool(self.constants)

    def _folds(self, expression):
        """Attributes of modules and tiles are Numba's and numba_members.py's matter."""
        return expression.op != "getattr" or is_static(known_value(self.function, expression.value, self.args))

    def apply(self):
        """The block with the values in their places; the branches on them are pruned by Numba's next pass."""
        block = self.block.copy()
        block.clear()
        for statement in self.block.body:
            if statement in self.constants:
                value = ir.Const(self.constants[statement], statement.loc)
                definitions = self.function._definitions[statement.target.name]
                if len(definitions) == 1:  # of several definitions any may hold
                    definitions[0] = value
                statement = ir.Assign(value, statement.target, statement.loc)
            block.append(statement)
        self.function._consts = consts.ConstantInference(self.function)  # the old one would remember what it could not infer
        return block
