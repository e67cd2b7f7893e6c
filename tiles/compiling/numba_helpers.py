"""Functions that are compiled into kernels: `@inlined` helpers, in one of three forms, and what Numba must forget of them."""

import contextlib
import functools
import weakref

from numba.cuda import dispatcher, types
from numba.cuda.core.base import OverloadSelector
from numba.cuda.cudadrv.error import CudaSupportError
from numba.cuda.descriptor import cuda_target
from numba.cuda.dispatcher import CUDADispatcher

from ..types import is_static
from .numba_types import StaticType
from .type_inference import typed


def inline(function):
    """Have a plain function compiled into its callers. Numba asks it for its type, and gets that of a device function which
    LLVM inlines."""
    from numba import cuda

    if not hasattr(function, "dispatcher"):
        function.dispatcher = cuda.jit(device=True, forceinline=True, fastmath=True)(function)
        function.dispatcher.__class__ = _Inlined
        function._numba_type_ = types.Dispatcher(function.dispatcher)  # a type holds its dispatcher weakly
    return function._numba_type_


class _Inlined(CUDADispatcher):
    """The function as compiled for the types of its arguments, separately in each form (see `helpers_as`)."""

    def compile_device(self, args, return_type=None):
        self.targetoptions["lineinfo"] = _form == "lines"
        self.overloads = self.__dict__.setdefault("forms", {}).setdefault(_form, {})
        if args not in self.overloads:
            if is_local(self.py_func) or any(map(_is_transient, args)):
                _transient_forms.append((self.overloads, args))
            if _form == "types":
                cc = dispatcher.get_current_device().compute_capability
                self.overloads[args] = typed(self.py_func, args, return_type, cc)
        return super().compile_device(args, return_type)


WITHOUT_GPU = "`kernel[grid, block](...)` is Numba's launch and takes a GPU; tiles.launch(kernel, grid, block)(...) takes none"


def _teach_launch(call):
    """Numba's launch; where there is no CUDA driver, its error also says how to launch without a GPU."""

    @functools.wraps(call)
    def launch(self, *args, **kwargs):
        try:
            return call(self, *args, **kwargs)
        except CudaSupportError as error:
            message = str(error).rstrip(": \n")
            raise (error if WITHOUT_GPU in message else CudaSupportError(f"{message}\n{WITHOUT_GPU}")) from None

    return launch


CUDADispatcher.call = _teach_launch(CUDADispatcher.call)
_form = "code"  # the form in which helpers are compiled now: see helpers_as


@contextlib.contextmanager
def helpers_as(form):
    """Inside, what is compiled into a kernel is "code", code with a table of its "lines", or only has its "types"."""
    global _form
    before, _form = _form, form
    try:
        yield
    finally:
        _form = before


def _is_transient(ty):
    """Is this the type of something that lives no longer than a factory's kernels: a static object, a local class, a method of
    one of these? Numba would keep what it knows of such types for ever."""
    if isinstance(ty, types.BoundFunction):
        return _is_transient(ty.this)
    if isinstance(ty, types.BaseTuple):
        return is_local(getattr(ty, "instance_class", None)) or any(map(_is_transient, ty))
    return isinstance(ty, StaticType) and is_static(ty.spec)


def is_local(definition):
    """Was this function or class made by a function?"""
    return "<locals>" in getattr(definition, "__qualname__", "")


def forget():
    """Drop what Numba would keep for ever of what a factory made: the compiled forms of local functions, and those of all
    functions for static objects. Called after a kernel is compiled; the next kernel compiles what it needs."""
    while _transient_forms:
        forms, args = _transient_forms.pop()
        if (compiled := forms.pop(args, None)) and compiled.library:  # code
            cuda_target.target_context.remove_user_function(compiled.entry_point)
    while _transient:
        table, key = _transient.pop()
        table.pop(key, None)
    for table in _tables:
        table.clear()


def table_of_kernel() -> dict:
    """A table of what is known while one kernel is compiled, which is emptied afterwards."""
    _tables.append({})
    return _tables[-1]


_tables: list[dict] = []
BOUND: dict[tuple, types.BoundFunction] = table_of_kernel()  # (a value's type, the name of an op or a method): its type
_transient_forms: list[tuple] = []  # (a function's compiled forms, types of arguments) to drop
_transient: list[tuple] = []  # (table, key) to drop of Numba's own tables; noted as they come, because the tables are large


def _note_selected(find):
    """Numba's search for an implementation by the types of arguments, which notes those that are transient."""

    @functools.wraps(find)
    def find_and_note(self, args):
        if any(map(_is_transient, args)):
            _transient.append((self._cache, args))
        return find(self, args)

    return find_and_note


class _Models(weakref.WeakKeyDictionary):
    """Numba's table of the data model of each type; it notes the types that are transient."""

    def __setitem__(self, ty, model):
        super().__setitem__(ty, model)
        if _is_transient(ty):
            _transient.append((self, ty))


OverloadSelector._find = _note_selected(OverloadSelector._find)
cuda_target.target_context.data_model_manager._cache = _Models(cuda_target.target_context.data_model_manager._cache)
