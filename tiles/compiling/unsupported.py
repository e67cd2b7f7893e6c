"""What Python or NumPy would do with a tile and kernels cannot: one table says what to use instead, in both backends.

Operators and functions that tiles do have are not here (ops/elementwise/). Refused is by a TypeError.
"""

import builtins
import math
import operator
from dataclasses import dataclass

import numpy as np

from ..types import gl, pending, rt, rv, st, sv
from .numba_members import INSTEAD, instead_of
from .numba_types import refuse

TILES = (rt, rv, pending, st, sv, gl)
ARITHMETIC = ("matmul", "pow")  # operators that have forms `x op= y` and, in Python, `__rop__`


@dataclass(frozen=True)
class UnsupportedUse:
    """What is not done with tiles, what to use instead; by which operators and functions one would do it."""

    action: str
    instead: str
    operators: tuple[str, ...] = ()  # as the module `operator` names them
    functions: tuple = ()
    first_only: bool = False  # may it be done with a tile that is no first argument?

    @property
    def methods(self):
        """The special methods that Python calls for the operators, without their underscores: gt; pow and rpow."""
        return [*self.operators, *(f"r{name}" for name in self.operators if name in ARITHMETIC)]

    @property
    def op_functions(self):
        """The functions and operators, as Numba calls them, by which one would do it."""
        names = [*self.operators, *(f"i{name}" for name in self.operators if name in ARITHMETIC)]
        return [*(getattr(operator, name) for name in names), *self.functions]

    def check(self, *specs):
        """TypeError if there is a tile among these types."""
        tiles = [str(spec) for spec in specs[: 1 if self.first_only else None] if isinstance(spec, TILES)]
        if tiles:
            raise TypeError(f"a tile cannot be {self.action}: {self.instead}; got {' and '.join(tiles)}")


def _in_numpy(names):
    return tuple(getattr(np, name) for name in names.split())


REFUSED = (
    UnsupportedUse(
        "compared by these functions",
        "use <, <=, ==, ... and where, or maximum and minimum",
        (),
        (builtins.max, builtins.min, *_in_numpy("maximum minimum fmax fmin greater less equal")),
    ),
    UnsupportedUse(
        "indexed",
        "its elements are spread over the lanes; store it to an array, or reduce it (row_sum, tile_sum, ...)",
        ("getitem", "setitem"),
        (builtins.len, builtins.sum),
        first_only=True,
    ),
    UnsupportedUse(
        "multiplied with @", "use mma_AB(acc, a, b), or in a warpgroup mm_AB(a, b)", ("matmul",), _in_numpy("matmul")
    ),
    UnsupportedUse("raised to a power", "multiply, or use exp2(y * log2(x))", ("pow",), (math.pow, *_in_numpy("power"))),
    UnsupportedUse(
        "divided by these functions", "use // and %", (), (builtins.divmod, math.fmod, *_in_numpy("floor_divide mod fmod"))
    ),
    UnsupportedUse("made positive by these functions", "use abs", (), (math.fabs, *_in_numpy("absolute fabs"))),
    UnsupportedUse(
        "given to math or NumPy",
        "import the function from ops (exp, log, sqrt, tanh, ...)",
        (),
        (
            *(getattr(math, f) for f in "exp expm1 log log1p log2 log10 sqrt sin cos tan tanh sinh cosh floor ceil".split()),
            *_in_numpy("exp exp2 expm1 log log1p log2 log10 sqrt sin cos tan tanh sinh cosh floor ceil rint sign"),
            *_in_numpy("add subtract multiply true_divide negative"),
        ),
    ),
)


def check_branch(spec):
    """TypeError if a branch, `if x:`, is to depend on a tile."""
    if isinstance(spec, pending):
        raise TypeError(f"this tile is still in flight: {spec}; take it with warpgroup.wait(...) first")
    if isinstance(spec, TILES):
        join = "conditions are joined by & and |, and turned round by ==, as mask == 0.0"
        raise TypeError(f"a branch cannot depend on a tile: {spec}; use where, or ask tile_any or tile_all of it; {join}")


INSTEAD |= {
    "T": "transpose(t)",
    "sum": "row_sum(t), col_sum(t) or tile_sum(t)",
    "max": "row_max(t), col_max(t) or tile_max(t)",
    "min": "row_min(t), col_min(t) or tile_min(t)",
    "mean": "row_sum(t) / t.cols",
    **dict.fromkeys(("astype", "to"), "a dtype, called: bf16(t)"),
}


def check_print(*specs):
    """TypeError if print(...) does not take arguments of these types."""
    tiles = [spec for spec in specs if isinstance(spec, TILES)]
    if tiles and len(specs) > 1:
        raise TypeError(f"print: a tile is printed by itself, print(tile), got {tiles[0]} among other arguments")
    if tiles and (not isinstance(tiles[0], (rt, rv)) or getattr(tiles[0], "partial", False)):
        raise TypeError(f"print: takes a register tile or vector, got {tiles[0]}")


def refuse_attribute(spec, name):
    """AttributeError, with the kernel's line, if a value of an interpreted kernel is asked for what arrays have."""
    from ..interpreter import hazard_line

    if instead := instead_of(spec, name):
        raise AttributeError(f"{instead}{hazard_line()}") from None


def refuse_values(check, *values):
    """`check` the types of values of an interpreted kernel, and add the kernel's line to the error."""
    from ..interpreter import hazard_line
    from ..values import PendingTile, SharedTile, Tile, tensor

    try:
        check(*[v.spec if isinstance(v, (Tile, PendingTile, SharedTile, tensor)) else None for v in values])
    except TypeError as error:
        raise TypeError(f"{error}{hazard_line()}") from None


for _op_function in (bool, operator.not_):
    refuse(_op_function, check_branch)
for _row in REFUSED:
    for _op_function in _row.op_functions:
        refuse(_op_function, _row.check)
