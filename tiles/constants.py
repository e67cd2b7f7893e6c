"""`STAGES - 2` and `T.cols // 2`, of names outside the kernel, are known when it is compiled, and count as numbers there: an op
that must know its argument may be given them. Numba alone would compute them when the kernel runs."""

import operator

from numba.cuda.core import ir
from numba.cuda.core.rewrites import Rewrite, register_rewrite

FOLDED = {getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift")}


def known(function, variable):
    """What a variable of Numba's IR is, if that does not depend on the kernel's run; else None."""
    try:
        definition = function.get_definition(variable)
    except KeyError:  # it has several
        return None
    if isinstance(definition, (ir.Const, ir.Global, ir.FreeVar)):
        return definition.value
    if not isinstance(definition, ir.Expr):
        return None
    if definition.op == "getattr":
        return getattr(known(function, definition.value), definition.attr, None)
    if definition.op == "binop" and definition.fn in FOLDED:
        x, y = known(function, definition.lhs), known(function, definition.rhs)
        if type(x) is type(y) is int and (y or definition.fn not in (operator.floordiv, operator.mod)):
            return definition.fn(x, y)
    return None


@register_rewrite("before-inference")
class FoldIntegers(Rewrite):
    """Writes a number in place of such a sum, difference, product or quotient of integers."""

    def match(self, func_ir, block, typemap, calltypes):
        """Are there any in the block?"""
        self.block, self.found = block, {}
        for assignment in block.find_insts(ir.Assign):
            if isinstance(assignment.value, ir.Expr) and assignment.value.op == "binop":
                value = known(func_ir, assignment.target)
                if value is not None:
                    self.found[assignment] = value
        return bool(self.found)

    def apply(self):
        """The block with numbers in their places."""
        block = self.block.copy()
        block.clear()
        for statement in self.block.body:
            if statement in self.found:
                number = ir.Const(self.found[statement], statement.loc)
                statement = ir.Assign(number, statement.target, statement.loc)
            block.append(statement)
        return block
