"""The kernel language as the interpreter speaks it: what `cuda`, `print` and global arrays mean to a whole warp."""

import builtins
import inspect
import operator
import types as python

import numpy as np
from greenlet import getcurrent
from numba import cuda

from ..compiling.numba_members import plain_function
from ..compiling.numba_types import member
from ..compiling.unsupported import REFUSED, check_print, refuse_values
from ..layout import LANES
from ..numba_names import cuda_target
from ..op import OPS
from ..types import is_static
from ..values import Tile
from .accesses import READ, WRITE
from .record import AccessStep, is_recording, note
from .warp import InterpretedWarp


def current_warp() -> InterpretedWarp:
    """The warp that is running."""
    warp = getcurrent()
    if not isinstance(warp, InterpretedWarp):
        raise RuntimeError("this op has a meaning only inside a kernel: run it with tiles.launch")
    return warp


class Lanes:
    """A number for each lane of the warp, such as cuda.threadIdx.x. If all lanes have the same number, it becomes a plain
    one."""

    __array_ufunc__ = None

    def __init__(self, values):
        self.values = values

    @classmethod
    def from_values(cls, values):
        """`values`, one per lane, or the one value that all lanes have."""
        return cls(values) if (values != values[0]).any() else values[0].item()

    def __str__(self):
        return f"a number per lane ({self.values[0]} .. {self.values[-1]})"

    __repr__ = __str__

    def _refuse(self, use):
        instead = "; branch on the warp, cuda.threadIdx.x // 32, or choose by tiles, where" if use == "a branch" else ""
        cause = f"{use} takes one number for the whole warp, and this one differs from lane to lane: {self}{instead}"
        raise current_warp().hazard(cause, "divergence")

    @property
    def spec(self):
        """The type of this argument, which ops read."""
        return self._refuse("an op")

    def __bool__(self):
        return self._refuse("a branch")

    def __index__(self):
        return self._refuse("an index, a range or a conversion")

    __int__ = __float__ = __index__
    __hash__ = None  # type: ignore[assignment]


def _lanewise(name):
    def apply(self, *other):
        if not all(isinstance(o, (Lanes, int, float, np.number)) for o in other):
            return NotImplemented
        return Lanes.from_values(getattr(self.values, name)(*(getattr(o, "values", o) for o in other)))

    return apply


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_OTHERS = ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "invert", "abs")
for _name in (*_BINARY, *[f"r{name}" for name in _BINARY], *_OTHERS):
    setattr(Lanes, f"__{_name}__", _lanewise(f"__{_name}__"))


def _xyz(x, y, z):
    return python.SimpleNamespace(x=x, y=y, z=z)


INSTEAD_OF_CUDA = {
    "shared": "lay it out on the host, smem = shared(name=st(...)), and open it, smem.open()",
    "grid": "use tiles and ops, or run it lane by lane, TILES_INTERPRET=ptx",
    "atomic": "add a shared tile to global memory by warpgroup.tma_add, or sums that ops.load_fragment reads by "
    "ops.add_fragment; count by ops.count_up",
}


class Cuda:
    """The object that replaces `numba.cuda` inside an interpreted kernel."""

    laneid = property(lambda self: Lanes(np.arange(LANES)))
    threadIdx = property(lambda self: _xyz(Lanes(LANES * current_warp().index + np.arange(LANES)), 0, 0))
    blockIdx = property(lambda self: _xyz(*current_warp().block.index))
    gridDim = property(lambda self: _xyz(*current_warp().block.grid))
    blockDim = property(lambda self: _xyz(LANES * current_warp().block.size, 1, 1))

    def syncthreads(self):
        """Every thread of the block meets here."""
        block = current_warp().block
        block.named(0, LANES * block.size).sync(current_warp(), LANES * block.size, description="syncthreads: ")

    def syncwarp(self, mask=-1):
        """The lanes of a warp meet. Here they never diverge, so nothing is to be done."""

    def __getattr__(self, name):
        instead = INSTEAD_OF_CUDA.get(name, "use tiles and ops")
        raise current_warp().hazard(f"cuda.{name} has no meaning for a whole warp; {instead}", "language")


class Bounded(np.ndarray):
    """A global array that stops the kernel at an index outside it. (Indices that are vectors or tiles are an op: gather.)"""

    def __getitem__(self, index):
        if any(isinstance(i, Tile) for i in (index if isinstance(index, tuple) else (index,))):
            return OPS[operator.getitem](self, index)
        item = super().__getitem__(index := self._inside(index, READ))
        if isinstance(item, np.ndarray):
            return item
        self._touched(index, False)
        return int(item) if isinstance(item, np.integer) else item  # kernels compute with 64 bits, whatever the array holds

    def __setitem__(self, index, value):
        index = self._inside(index, WRITE)
        if isinstance(warp := getcurrent(), InterpretedWarp):
            warp.put(np.asarray(self)[tuple([*index, ...])], value)
        else:
            super().__setitem__(index, value)
        self._touched(index, True)

    def _touched(self, index, written):
        if is_recording():
            note(AccessStep, np.asarray(self)[tuple([*index, ...])], written)

    def _inside(self, index, access):
        warp = getcurrent()
        if not isinstance(warp, InterpretedWarp):
            return index
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > self.ndim or not all(isinstance(i, (slice, Lanes)) or hasattr(i, "__index__") for i in index):
            cause = f"index {index} for an array of shape {self.shape}: integers and slices, one per axis"
            raise current_warp().hazard(cause, "language")
        index = tuple(i if isinstance(i, slice) else operator.index(i) for i in index)
        for axis, (i, size) in enumerate(zip(index, self.shape)):
            if not isinstance(i, slice) and not 0 <= i < size:
                raise current_warp().hazard(f"index {i} is out of range for axis {axis} of an array of shape {self.shape}")
        if access == WRITE or not any(isinstance(i, slice) for i in index):  # what a slice gives is a view
            warp.note_access(self, access)
        return index


class Captured(Bounded):
    """An array that a kernel captures. Numba copies it into the kernel, and it is only read there."""

    captured = True


def print_as_warp(*values, **options):
    """Do a kernel's print(), by one warp."""
    refuse_values(check_print, *values)
    builtins.print(f"[block {current_warp().block.index}, warp {current_warp().index}]", *values, **options)


class Module:
    """A module seen from a kernel: `helpers.step`, `numba.cuda.blockIdx`."""

    def __init__(self, module, rebound):
        self.__dict__.update(_module=module, _rebound=rebound)

    def __getattr__(self, name):
        value = self.__dict__[name] = _swap(getattr(self._module, name), self._rebound)
        return value


class InterpretedStatic:
    """A static object (static.py) as an interpreted kernel sees it: its fields and properties, and its methods rebound (see
    `rebind`). To all other code it is equal to the object itself."""

    def __init__(self, value, rebound):
        self.__dict__.update(_InterpretedStatic__value=value, _InterpretedStatic__rebound=rebound)

    __class__ = property(lambda self: type(self.__value))

    def __getattr__(self, name):
        op_function = inspect.getattr_static(type(self.__value), name, None)
        if isinstance(op_function, python.FunctionType) and name not in vars(self.__value):
            call = rebind(op_function, self.__rebound) if hasattr(op_function, "dispatcher") else _plain(op_function)
            attribute = python.MethodType(call, self)
        else:
            getattr(self.__value, name)  # its own AttributeError
            try:
                attribute = member(self.__value, name)
            except TypeError as error:
                raise TypeError(f"{error}\n  at {current_warp()}") from None
            is_code = isinstance(attribute, python.FunctionType) and attribute not in OPS
            attribute = rebind(attribute, self.__rebound) if is_code else _swap(attribute, self.__rebound)
        self.__dict__[name] = attribute
        return attribute

    def __setattr__(self, name, value):
        setattr(self.__value, name, value)  # raises: the object is frozen

    def __eq__(self, other):
        return self.__value == getattr(other, "_InterpretedStatic__value", other)

    def __hash__(self):
        return hash(self.__value)

    def __str__(self):
        return str(self.__value)

    __repr__ = __str__


def _named(cls, rebound):
    """A class of named tuples with its methods rebound (see `rebind`)."""
    if cls not in rebound:
        new = rebound[cls] = type(cls.__name__, (cls,), {"__slots__": (), "__qualname__": cls.__qualname__})
        for name in dir(cls):
            op_function = inspect.getattr_static(cls, name)
            if isinstance(op_function, python.FunctionType) and hasattr(op_function, "dispatcher"):
                setattr(new, name, rebind(op_function, rebound))
            elif isinstance(op_function, python.FunctionType) and name[0] != "_":
                setattr(new, name, _plain(op_function))
    return rebound[cls]


def _guarded(function, row):
    def call(*args, **kwargs):
        refuse_values(row.check, *args)
        return function(*args, **kwargs)

    return call


GUARDED = {function: _guarded(function, row) for row in REFUSED for function in row.functions}


def _of_two_floats(function, instruction):
    """max or min: of two floats of one type it is an instruction, which gives the other one if one is NaN.
    Of more, or of other types, it compares one after the other, as Python does."""

    def call(*args, **kwargs):
        if len(args) == 2 and type(args[0]) is type(args[1]) and isinstance(args[0], (float, np.floating)):
            return type(args[0])(instruction(*args))
        return function(*args, **kwargs)

    return call


GUARDED |= {
    builtins.max: _of_two_floats(GUARDED[builtins.max], np.fmax),
    builtins.min: _of_two_floats(GUARDED[builtins.min], np.fmin),
}


def _super(*_):
    raise current_warp().hazard(
        "super() has no meaning in a kernel: give the base's method a second name, and call that", "language"
    )


BUILTINS = {name: GUARDED[getattr(builtins, name)] for name in ("divmod", "len", "max", "min", "sum")} | {"super": _super}


def _swap(value, rebound):
    if value is cuda:
        return Cuda()
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.ndarray):
        view = value.view(Captured)
        view.flags.writeable = False
        return view
    if isinstance(value, (python.BuiltinFunctionType, np.ufunc)) and value in GUARDED:
        return GUARDED[value]
    if isinstance(value, python.ModuleType):
        return Module(value, rebound)
    if is_static(value):
        return InterpretedStatic(value, rebound)
    if isinstance(value, tuple):
        items = (_swap(item, rebound) for item in value)
        return _named(type(value), rebound)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
        return _named(value, rebound)
    if hasattr(value, "py_func") or hasattr(value, "dispatcher"):
        return rebind(value, rebound)
    return value if not isinstance(value, python.FunctionType) or value in OPS or _known_to_numba(value) else _plain(value)


def _known_to_numba(function):
    context = cuda_target.typing_context
    context.refresh()
    try:
        return context.resolve_value_type(function) is not None
    except ValueError:
        return False


def _plain(function):
    def refuse(*_, **__):
        raise current_warp().hazard(plain_function(function.__qualname__.rpartition("<locals>.")[2]), "language")

    return refuse


def rebind(function, rebound):
    """The plain function with `cuda`, `print`, modules and every helper in its globals and closure replaced in turn.
    rebound: {plain function: replaced one}, to which it adds."""
    function = getattr(function, "py_func", function)
    if function in rebound:
        return rebound[function]
    space = {"__builtins__": builtins, "print": print_as_warp, **BUILTINS}
    cells = tuple(python.CellType() for _ in function.__closure__ or ())
    new = rebound[function] = python.FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
    new.__kwdefaults__ = function.__kwdefaults__
    for name in _names(function.__code__):
        if name in function.__globals__:
            space[name] = _swap(function.__globals__[name], rebound)
    for cell, old in zip(cells, function.__closure__ or ()):
        cell.cell_contents = _swap(old.cell_contents, rebound)
    return new


def _names(code):
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, python.CodeType):
            yield from _names(constant)
