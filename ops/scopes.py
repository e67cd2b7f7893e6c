"""Who does an op: a warp (`ops`), a warpgroup (`ops.warpgroup`), a block (`ops.block`) or a cluster (`ops.cluster`).

Asked for in a scope where it has no meaning, an op says where it has one: a TypeError with the kernel's line, as for every
other mistake that types show. A name that no scope has is looked for by people who know another library's.
"""

import sys
from functools import partial
from inspect import isfunction

from tiles.compiling.numba_types import kernel_line
from tiles.interpreter import hazard_line
from tiles.op import OPS

SCOPES = {  # module: (who works there, how its ops are called)
    "ops": ("a warp", "each warp calls ops.{} on its own tile"),
    "ops.warpgroup": ("a warpgroup", "its four warps together call warpgroup.{}"),
    "ops.block": ("a block", "all its warps together call block.{}"),
    "ops.cluster": ("a cluster", "all its blocks together call cluster.{}"),
}


class NoMeaning(TypeError, AttributeError):
    """This scope has no such op. Also an AttributeError, by which Python knows that a module lacks a name."""


def _refuse(module, name):
    if name.startswith("_"):  # asked for by Numba and others who look what an object is: no message is read
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules[module])
    scopes = {other: vars(sys.modules[other]).get(name) for other in SCOPES}
    others = [SCOPES[other] for other, op_function in scopes.items() if isfunction(op_function) and op_function in OPS]
    if others:
        meanings = "; ".join(f"of {scope}: {template.format(name)}" for scope, template in others)
        raise NoMeaning(
            f"{name} has no meaning for {SCOPES[module][0]}. It is an op {meanings}{kernel_line() or hazard_line()}"
        )
    lists = f"dir({module}) has them all, and the documentation's page Coming from those that stand for other libraries'"
    line = kernel_line() or hazard_line()
    raise AttributeError(f"module {module!r} has no attribute {name!r}; {lists}{line}", name=name, obj=sys.modules[module])


def refuse_others():
    """Let each scope's module refuse the ops of the others. (From here, so that editors and type checkers do not see modules
    that have every name.)"""
    for module in SCOPES:
        sys.modules[module].__getattr__ = partial(_refuse, module)
