"""Static objects: frozen values with methods, known when a kernel is compiled.

    @static
    class Window:
        left: int
        causal: bool = False

        @inlined
        def mask(self, s, edge):                    # kernel code: a method that kernels call
            if self.causal:                         # decided at compile time
                s = causal(s, edge, -inf)
            return lower_fill(s, edge - self.left, -inf)

A kernel closes over such an object, finds it among its module's globals, or gets it from a factory. The object may be passed to
`@inlined` functions and be a field of another one. A kernel sees

- fields: None, bool, int, float, str, dtypes, the types of tiles and rings, shared storage, tuples of these, other static
  objects, and functions, whose bodies are kernel code without a decorator. Floats are fp32 in kernels;
- `@inlined` methods, those of bases too; a subclass of a static class is static, and overrides what it likes;
- properties, which run on the host: their value is a constant like a field's.

Two objects are equal if their fields are equal, and so is the code of their classes, of the functions in their fields, and of
everything that these reach. So an equal lambda, written twice, finds the kernel that was compiled before, in this process and
on disk.
"""

import contextlib
import functools
import typing
from collections import OrderedDict
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING

import numpy as np

from .compiling.digest import Digest, Undigestible, global_names, is_covered
from .compiling.numba_types import FROZEN, compile_time
from .dtypes import dtype
from .op import OPS
from .types import is_static

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # Python 3.10 lacks it
    dataclass_transform = getattr(typing, "dataclass_transform", lambda **_: lambda decorator: decorator)

PLAIN = {type(None), bool, int, str, bytes, dtype}
_fixed = functools.lru_cache(256)(is_covered)  # modules that stay as they are
REMEMBERED = 256  # digests, by what was digested, of the objects of one class


@dataclass_transform(frozen_default=True, eq_default=False)
def static(cls):
    """Class decorator: a frozen dataclass whose objects kernels know when they are compiled. Its subclasses are static, too."""
    if "__static__" in vars(cls):  # a subclass that says so itself
        return cls
    is_first = not hasattr(cls, "__static__")
    result = dataclass(frozen=True, eq=False)(cls)
    result.__static__, result.__eq__, result.__hash__ = True, _equal, _hash
    result.__digests__ = OrderedDict()  # {mark: digest}, the last one used last
    if is_first:
        compile_time(result)
        result.__init_subclass__ = classmethod(functools.partial(_subclass, result))
    return result


def _subclass(base, cls, **options):
    super(base, cls).__init_subclass__(**options)
    static(cls)


def identity(value):
    """The digest of a static object, a text, or what stands for one that cannot be digested: itself. Found once an object; of
    objects that differ in no more than the identity of functions' code, once."""
    name = vars(value).get("__identity__")
    if name is None:
        try:
            name = _digest(value)
        except Undigestible:
            name = object()
        object.__setattr__(value, "__identity__", name)
    return name


def _digest(value):
    known = type(value).__digests__
    try:
        mark = _mark(tuple(getattr(value, name) for name in type(value).__dataclass_fields__))
    except (TypeError, ValueError, RecursionError):  # a cell without a value, a helper that calls itself
        return Digest()(value)
    digest = known.pop(mark, None) or Digest()(value)
    known[mark] = digest  # last; another thread may have let it go meanwhile
    if len(known) > REMEMBERED:
        with contextlib.suppress(KeyError):
            known.popitem(last=False)
    return digest


def _mark(value):
    """Something hashable that is equal only for what has the same digest; a function is its code and the values that it names.
    TypeError: there is none."""
    if type(value) is tuple:
        return tuple(map(_mark, value))
    if is_static(value):
        return identity(value)
    if isinstance(value, (float, np.floating)):
        return type(value), repr(value)  # 0.0 == -0.0, and NaN is not NaN
    if isinstance(value, FunctionType) and value not in OPS:
        if value.__kwdefaults__:
            raise TypeError("defaults by name")
        space = value.__globals__
        used = tuple((name, _mark(space[name])) for name in global_names(value.__code__) if name in space)
        closed = tuple(_mark(cell.cell_contents) for cell in value.__closure__ or ())
        return value.__code__, used, closed, _mark(value.__defaults__)
    if type(value) in PLAIN or type(value) in FROZEN or isinstance(value, (FunctionType, BuiltinFunctionType)):
        return type(value), value
    if isinstance(value, (ModuleType, type)) and _fixed(value.__name__ if isinstance(value, ModuleType) else value.__module__):
        return type(value), value
    raise TypeError(f"{value!r} may change")


def _equal(self, other):
    return self is other or (hasattr(type(other), "__static__") and identity(self) == identity(other))


def _hash(self):
    return hash(identity(self))
