"""Numba's compiler with less to do: what it does again and again is done once, and what nobody asks for is left out. While
tiles/compiling/compiler.py compiles, the functions of REPLACEMENTS stand in the place of Numba's. The code that comes out is
the same.

Of Numba's part of an attention kernel, two seconds, they save about half (bench/notes/host.md).

Those of its passes over a function stand in faster_passes.py, those of its search for types in faster_typing.py; here are
those of how it lowers functions, and all together.
"""

import contextlib
import functools
import importlib.util
import weakref
from collections import Counter

from numba.cuda import lowering, target
from numba.cuda.core import analysis, base, compiler, errors, ir, targetconfig
from numba.cuda.debuginfo import CUDADIBuilder
from numba.cuda.misc import firstlinefinder
from numba.cuda.np import linalg

from . import faster_passes, faster_typing


class _TableOfLines(CUDADIBuilder):
    """Numba's description of a function for debuggers, but for what nobody asks of a table of lines: types and variables. A
    tile is a struct of many fields, and to describe those of all calls took a third of the time."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._locations = {}

    def _di_subroutine_type(self, *_):
        return self.module.add_debug_info("DISubroutineType", {"types": self.module.add_metadata([])})

    def _di_location(self, line):
        at = len(self.subprograms), line
        if at not in self._locations:
            self._locations[at] = super()._di_location(line)
        return self._locations[at]

    def mark_variable(self, *_, **__):
        pass

    update_variable = mark_variable


_begins: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # code: {its file: the line where its function begins}


def _line_of_def(function):
    """Where a function begins; its source is parsed once. Numba itself fails at lambdas, and at bodies of nothing but a
    docstring."""
    code, line = function.__code__, None
    known = _begins.setdefault(code, {})
    if code.co_filename not in known:
        with contextlib.suppress(IndexError, SyntaxError):
            line = firstlinefinder.get_func_def_lineno(function)
        known[code.co_filename] = line or code.co_firstlineno
    return known[code.co_filename]


_defaults: dict[type, dict] = {}  # of each class of Numba's flags, what they say where nobody sets one


def _flags(self):
    """What all flags say; Numba asks for each by its name."""
    if type(self) not in _defaults:
        _defaults[type(self)] = {name: option.default for name, option in self.options.items()}
    return {**_defaults[type(self)], **self._values}


_sizes: dict[str, int] = {}  # of LLVM's types, in bytes
_size = base.BaseContext.get_abi_sizeof


def _size_of(self, ty):
    """An LLVM type's. Numba has LLVM read a module of its own for each variable, and tells debuggers."""
    name = str(ty)
    if name not in _sizes:
        _sizes[name] = _size(self, ty)
    return _sizes[name]


_NO_CONTEXT = contextlib.nullcontext()


_find_assigned_once = lowering.Lower._find_singly_assigned_variable


def _assigned_once(self):
    """Which variables stay in registers: those that are assigned once, and used in that block alone. Numba went through a
    block's statements for each of them."""
    if self.func_ir.func_id.is_generator:
        return _find_assigned_once(self)
    blocks, places = self.func_ir.blocks, self.func_ir.variable_lifetime.usedefs
    used = {name for names in places.usemap.values() for name in names}
    defined = Counter(name for names in places.defmap.values() for name in names)
    once = set()
    for label, names in places.defmap.items():
        assigned = Counter(x.target.name for x in blocks[label].find_insts(ir.assign_types))
        once |= {name for name in names if defined[name] == assigned[name] == 1 and name not in used}
    self._singly_assigned_vars = once - analysis.must_use_alloca(blocks)
    self._blk_local_varmap = {}
    return None


_keeps_variables = functools.cached_property(lowering.Lower._disable_sroa_like_opt.fget)  # asked several times a statement
_keeps_variables.__set_name__(lowering.Lower, "_disable_sroa_like_opt")


def _find_blas():
    """ImportError: there is no BLAS. Numba imports scipy.linalg to see that, for np.dot on the host: a sixth of a second."""
    if importlib.util.find_spec("scipy") is None:
        raise ImportError("scipy")


_compile = compiler.CompilerBase._compile_core


def _compiled(self):
    """What a function is compiled to. Its statements and variables, which nobody needs any more, hold on to each other, as does
    what `_Inferer` would leave. To let all that go took the collector of garbage a tenth of the time that Numba takes."""
    compiled = _compile(self)
    function = self.state.func_ir
    for block in function.blocks.values():
        vars(block.scope).clear()
    function.blocks.clear()
    function._definitions.clear()
    return compiled


REPLACEMENTS = [  # (owner, name, what stands in its place)
    *faster_passes.REPLACEMENTS,
    *faster_typing.REPLACEMENTS,
    (lowering, "get_func_def_lineno", _line_of_def),
    (target, "CUDADIBuilder", _TableOfLines),
    (targetconfig.TargetConfig, "values", _flags),
    (base.BaseContext, "get_abi_sizeof", _size_of),
    (lowering.Lower, "_disable_sroa_like_opt", _keeps_variables),
    (lowering.Lower, "_find_singly_assigned_variable", _assigned_once),
    (compiler.CompilerBase, "_compile_core", _compiled),
    (errors.WarningsFixer, "catch_warnings", lambda *_, **__: _NO_CONTEXT),  # Numba's own have their places in their words
    (linalg, "ensure_blas", _find_blas),
]
