"""What a kernel's machine code depends on, digested: the key under which cache.py keeps it.

The key digests: the sources of ops/ and of what in tiles/ takes part in compiling; the kernel's own text (function_text.py),
the values it closes over and the globals it loads, and so on through every helper it reaches; lowerings that were registered
outside tiles/ and ops/, of ops that it reaches and of ours; the argument types, the kernel's options and the architecture;
NUMBA_* settings; the versions of all that takes part in compiling. What cannot be digested makes a kernel uncached, never
wrongly cached. To make a key, no kernel is compiled.

So a kernel has one key on every machine, on every path, in every version of Python. Only of a function that has no text, such
as one typed in Python's REPL, the bytecode is digested, and the key holds for this version of Python.

Not seen: tiles/, ops/ or Numba changed in memory (`ops.raw.wait = ...`), or an `overload` of somebody's for a function of
Numba's or Python's own.
"""

import builtins
import contextlib
import dis
import enum
import functools
import hashlib
import importlib.util
import inspect
import logging
import struct
import sys
import sysconfig
import types as python
from pathlib import Path

import numpy as np
from numba.cuda import types

from ..op import OPS, Op
from ..types import is_static
from . import sources, toolchain
from .function_text import function_text
from .toolchain import VERSIONED

log = logging.getLogger(__name__)
STDLIB = Path(sysconfig.get_path("stdlib"))


class Undigestible(Exception):
    """A kernel is made from something whose content we cannot digest, so it is not cached."""


def key(kernel, signature, arch) -> str | None:
    """The name under which machine code for this `@cuda.jit` kernel, Numba argument types and architecture is kept, or None
    if it must not be."""
    try:
        digest, subject = Digest(), (arch, tuple(signature), kernel)
        parts = [digest(part) for part in (_sources(), toolchain.settings(), toolchain.compilers(), *subject)]
        foreign = [op for op in list(OPS.values()) if _foreign(op) and not _foreign_face(op)]  # as sources of ours may use them
        parts += sorted(digest.rule(op) for op in foreign)
        return _hash("key", *parts).hex()
    except Undigestible as error:
        log.debug("%s is not cached: %s", kernel, error)
        return None


@functools.cache
def _sources():
    """A digest of the files of tiles/ and ops/ that take part in compiling."""
    content = sources.content()
    if content is None or content != sources.IMPORTED:
        raise Undigestible("a source of tiles/ or ops/ has changed since it was imported")
    return content


def _hash(*parts) -> bytes:
    """A digest of these parts; their lengths go in, so that ("ab", "c") and ("a", "bc") differ."""
    combined = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        combined.update(len(part).to_bytes(8, "little") + part)
    return combined.digest()


def is_covered(name) -> bool:
    """Does the key cover this module already, by its source or its version? Functions made by exec name no module: for them the
    answer is no."""
    if not isinstance(name, str):
        return False
    return _covered(name, getattr(sys.modules.get(name), "__file__", None), tuple(sources.FOLDERS))


@functools.lru_cache(4096)  # asked a thousand times for each key
def _covered(name, file, folders):
    root = name.partition(".")[0]
    if file and sources.takes_part(file):
        return True
    if root in ("tiles", "ops"):  # somebody else's package of that name
        return False
    if any(f"{name}.".startswith(f"{known}.") for known in VERSIONED):
        return True
    if root == "cuda":  # a namespace that cuda.core and cuda.bindings share
        return False
    if root not in sys.stdlib_module_names or root == "__main__":
        return False
    return not file or (STDLIB in Path(file).parents and not {"site-packages", "dist-packages"} & set(Path(file).parts))


def _named(value):
    """Whether a function or class is what a covered module holds under its name, so that digesting the name is enough."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not is_covered(module):
        return False
    named: object = sys.modules.get(module)
    for part in name.split("."):
        named = getattr(named, part, None)
    return named is value


def _with_bases(cls, part):
    """The digest of a class: its name, and part(name, value) for each attribute of it and its bases. Of a class whose name is
    enough, only the name."""
    parts = [cls.__qualname__]
    for base in cls.__mro__:
        if _named(base):
            parts += [base.__module__, base.__qualname__]
        else:
            parts += [text for attribute in sorted(vars(base).items()) for text in part(*attribute)]
    return parts


def _foreign_face(op):
    """Is the op somebody else's? Then only sources that are digested name it."""
    return isinstance(op.op_function, python.FunctionType) and not is_covered(op.op_function.__module__)


def _foreign(op):
    """Was some part of this op's lowering written outside tiles/ and ops/?"""
    if op.rule is None:
        return False
    cells = [c.cell_contents for c in op.rule.__closure__ or () if isinstance(c.cell_contents, python.FunctionType)]
    return not all(is_covered(f.__module__) for f in (op.rule, *cells, op.op_function) if isinstance(f, python.FunctionType))


class Digest:
    """Digests of values, functions and what these reach. Equal digests mean equal content, in this process or another."""

    def __init__(self):
        self.done = {}  # id: (the object, which keeps its id, and its digest)
        self.depth = 0  # of what is being digested

    def __call__(self, value, device=True) -> bytes:
        """The digest of `value`. device: it is seen by kernel code, where a plain function means what Numba was taught, and not
        what its body says."""
        at = id(value), device
        if at not in self.done:
            self.done[at] = value, _hash("cycle", str(self.depth))  # met again while we are inside it
            self.depth += 1
            try:
                self.done[at] = value, _hash(type(value).__qualname__, *self._parts(value, device))
            except BaseException:
                del self.done[at]
                raise
            finally:
                self.depth -= 1
        return self.done[at][1]

    def rule(self, op):
        """The digest of an op's lowering."""
        return _hash(op.name, self(op.op_function if isinstance(op.op_function, np.ufunc) else op.name), self(op.rule, False))

    def _parts(self, value, device):
        kind = type(value)
        if value is None or value is ... or kind in (bool, int, str):
            return [repr(value)]
        if kind is bytes:
            return [value]
        if kind in (float, complex):
            z = complex(value)
            return [struct.pack("<dd", z.real, z.imag)]
        if isinstance(value, np.dtype):
            return [value.str, value.name] if value.fields is None else [repr(value)]
        if isinstance(value, (np.generic, np.ndarray)) and not value.dtype.hasobject:
            return [self(value.dtype), str(value.shape), value.tobytes()]
        if isinstance(value, enum.Enum):
            return [self(kind, device), value.name]
        if isinstance(value, (tuple, list)):
            return [self(kind, device), *(self(item, device) for item in value)]
        if kind in (set, frozenset):
            return sorted(self(item, device) for item in value)
        if kind is dict:
            return [self(item, device) for pair in value.items() for item in pair]
        if kind in (range, slice):
            return [str(value)]
        if kind is np.ufunc and getattr(np, name := value.__name__, None) is value:
            return [name]
        if isinstance(value, python.ModuleType) and is_covered(value.__name__):
            return [value.__name__]
        if isinstance(value, python.CodeType):
            return self._code(value, device)
        if isinstance(value, types.Type):
            if not hasattr(value, "spec") and " at 0x" in str(value):
                raise Undigestible(f"the type {value}")
            return [self(value.spec, device)] if hasattr(value, "spec") else [str(value)]
        if hasattr(value, "py_func") and hasattr(value, "targetoptions"):
            return self._dispatcher(value)
        if isinstance(value, (type, python.FunctionType, python.BuiltinFunctionType)):
            return self._definition(value, device)
        return self._static(value) if is_static(value) else self._instance(value, device)

    def _definition(self, value, device):
        """Digest the definition of a function or a class: its code, and what it refers to."""
        if _named(value):
            return [value.__module__, value.__qualname__]
        if isinstance(value, type):
            kernels = hasattr(value, "__static__") or (issubclass(value, tuple) and hasattr(value, "_fields"))
            return self._kernel_class(value) if kernels else self._class(value)
        if isinstance(value, python.BuiltinFunctionType):
            raise Undigestible(f"the built-in {value!r}")
        if value in OPS:
            return [value.__module__, value.__qualname__, *([self.rule(OPS[value])] if _foreign(OPS[value]) else [])]
        dispatcher = getattr(value, "dispatcher", None)
        if device and dispatcher is None and not is_covered(value.__module__):
            raise Undigestible(f"{value.__qualname__} is a plain function, and what Numba takes it for cannot be told")
        return self._function(value, device)

    def _dispatcher(self, value):
        options = {name: option for name, option in sorted(value.targetoptions.items()) if option not in (None, False, (), [])}
        for option in ("debug", "lineinfo", "link", "extensions"):
            if options.get(option):
                raise Undigestible(f"the option {option}={options[option]!r} of {value.py_func.__qualname__}")
        return [self(options), _hash(*self._function(value.py_func, True))]

    def _function(self, function, device):
        code, text = function.__code__, function_text(function)
        parts = [text or self(code, device), self(function.__defaults__, device), self(function.__kwdefaults__, device)]
        try:
            parts += [self(cell.cell_contents, device) for _, cell in sorted(zip(code.co_freevars, function.__closure__ or ()))]
        except ValueError:
            raise Undigestible(f"{function.__qualname__} closes over a name that has no value yet") from None
        names = set(_attributes(code))
        for name in global_names(code):
            value = function.__globals__.get(name, getattr(builtins, name, None))
            if isinstance(value, python.ModuleType) and not is_covered(value.__name__):
                parts += [name.encode(), *self._module(value, names, device)]
            else:
                parts += [name.encode(), self(value, device)]
        return parts

    def _module(self, module, names, device):
        """What code that names these attributes may read from a module of the user's."""
        parts = [module.__name__.encode()]
        for name in sorted(names & vars(module).keys()):
            value = vars(module)[name]
            if not isinstance(value, python.ModuleType):
                parts += [name.encode(), self(value, device)]
            elif is_covered(value.__name__):
                parts += [name.encode(), value.__name__.encode()]
            elif (id(value), "module") not in self.done:
                self.done[id(value), "module"] = value, b""
                parts += self._module(value, names, device)
        return parts

    def _code(self, code, device):
        facts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_names
        variables = code.co_varnames, code.co_freevars, code.co_cellvars
        parts = [code.co_name, code.co_code, self(facts), self(variables), self(code.co_consts, device)]
        return [importlib.util.MAGIC_NUMBER, *parts]

    def _class(self, cls):
        """A class of the user's: its attributes and those of its bases, with their code. Special methods are left out: what
        they do shows in the instances."""

        def part(name, value):
            value = getattr(value, "fget", getattr(value, "func", getattr(value, "__func__", value)))
            hidden = name.startswith("_" if members else "__") or name in members
            return () if hidden else (name, self(value, False))

        members = getattr(cls, "__members__", {}) if issubclass(cls, enum.Enum) else {}
        values = [part for name, member in members.items() for part in (name, self(member._value_, False))]
        return [*_with_bases(cls, part), *values]

    def _static(self, value):
        """A static object: what kernels see of it, and not what its other methods do on the host."""
        cls = type(value)
        fields = (part for name in cls.__dataclass_fields__ for part in (name, self._kernel_code(getattr(value, name))))
        properties = (name for name in dir(cls) if isinstance(inspect.getattr_static(cls, name), PROPERTIES))
        return [self(cls), *fields, *(part for name in properties for part in self._property(value, name))]

    def _kernel_class(self, cls):
        """The class of a static object or a named tuple: its @inlined methods, those of its bases too, and its other values."""

        def part(name, value):
            value = None if name in getattr(cls, "_fields", ()) else getattr(value, "__func__", value)
            if hasattr(value, "dispatcher"):
                return name, self(value)
            if name.startswith(("__", "_abc_")) or isinstance(value, ON_THE_HOST):
                return ()
            return name, self._kernel_code(value)

        return _with_bases(cls, part)

    def _property(self, value, name):
        """A property, by its value, because it runs on the host. If the value cannot be digested, no kernel can read it."""
        with contextlib.suppress(Exception):
            return [name, self(getattr(value, name))]
        return [name, b"none"]

    def _kernel_code(self, value):
        """A field, whose functions are kernel code even if nothing marks them."""
        if type(value) is tuple:
            return _hash("tuple", *map(self._kernel_code, value))
        if not isinstance(value, python.FunctionType) or value in OPS or _named(value):
            return self(value)
        return _hash("function", *self._function(value, True))

    def _instance(self, value, device):
        """Any other object: its class and its attributes, if that is all there is to it."""
        cls = type(value)
        plain = getattr(cls, "__dictoffset__", 0) and not hasattr(cls, "__array_interface__")
        if isinstance(value, Op) or not plain or cls.__basicsize__ > object.__basicsize__ + 2 * struct.calcsize("P"):
            raise Undigestible(f"{value!r} of type {cls.__module__}.{cls.__qualname__}")
        derived_fields = {
            name for name in vars(value) if isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)
        }
        items = ((name, item) for name, item in sorted(vars(value).items()) if name not in derived_fields)
        return [self(cls, False), *(part for name, item in items for part in (name, self(item, device)))]


PROPERTIES = (property, functools.cached_property)
ON_THE_HOST = (python.FunctionType, *PROPERTIES)


def _codes(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, python.CodeType):
            yield from _codes(constant)


@functools.lru_cache(1024)
def global_names(code) -> tuple[str, ...]:
    """Names that a code object, or one inside it, loads as globals."""
    return tuple(sorted({name for part in _codes(code) for name in _loaded_names(part)}))


LOADS = {dis.opmap["LOAD_NAME"]: 0, dis.opmap["LOAD_GLOBAL"]: int(sys.version_info >= (3, 11))}  # bits below the name's number


def _loaded_names(code):
    """The names that a code object loads. (dis finds them, too, in ten times as long.)"""
    extended = 0
    for op, low in zip(code.co_code[::2], code.co_code[1::2]):
        number = extended << 8 | low
        extended = number if op == dis.EXTENDED_ARG else 0
        if op in LOADS:
            yield code.co_names[number >> LOADS[op]]


def _attributes(code):
    """Names that may be attributes: `getattr(module, "name")` is one, too."""
    for part in _codes(code):
        yield from part.co_names
        yield from (constant for constant in part.co_consts if isinstance(constant, str))
