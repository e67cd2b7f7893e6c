"""The one place that teaches Numba: frozen tile types become Numba types, ops become intrinsics (builder.py has their words).

Two Numba types carry everything: `Value(spec)` is a run-time value of that type (registers, or an address), `Static(spec)`
the frozen object itself, closed over by a kernel and known when it is compiled. Kernel authors see neither.
"""

import contextlib
import dataclasses
import functools
import inspect
import sys
import weakref

import numpy as np
from llvmlite import ir
from numba.cuda import dispatcher, types
from numba.cuda.core import typeinfer
from numba.cuda.core.base import OverloadSelector
from numba.cuda.cudadrv.error import CudaSupportError
from numba.cuda.cudaimpl import registry
from numba.cuda.descriptor import cuda_target
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.extending import core_models, infer, infer_getattr, register_model
from numba.cuda.typeconv import Conversion
from numba.cuda.typing import signature
from numba.cuda.typing.templates import AbstractTemplate, AttributeTemplate, infer_global
from numba.cuda.typing.typeof import typeof_impl

from .builder import Builder, f32, i32, i64
from .dtypes import bf16, dtype, fp8e4m3, fp8e5m2, fp16, fp32
from .lines import from_op
from .op import OPS, Name
from .typed import typed
from .types import barrier, gl, is_static, pending, rt, rv, st, sv

TENSOR_MAP = ir.LiteralStructType([ir.ArrayType(i64, 16)])  # 128 bytes that only TMA understands
void = types.void


class Byte(types.Type):
    """An element of an fp8 array, which kernels only load and store by tiles."""


register_model(Byte)(lambda manager, ty: core_models.PrimitiveModel(manager, ty, ir.IntType(8)))
SCALARS = {types.float32: fp32, types.float16: fp16, types.bfloat16: bf16}
SCALARS |= {Byte(str(d)): d for d in (fp8e4m3, fp8e5m2)}
CAPTURED = "this array is no argument of the kernel, which Numba has copied into it: pass it to the launch"  # if immutable


class Value(types.Type):
    """A value in a kernel whose type is a frozen object: Value(rt(16, 64, fp32))."""

    def __init__(self, spec):
        self.spec = spec
        super().__init__(str(spec))

    @property
    def key(self):
        return self.spec

    def unify(self, context, other):
        """A tile may join a pending tile that a loop carries, never the reverse."""
        return self if isinstance(other, Value) and pending(other.spec) == self.spec else None

    def can_convert_to(self, context, other):
        return Conversion.safe if isinstance(other, Value) and pending(self.spec) == other.spec else None


class Static(types.Dummy):
    """The frozen object itself: known at compile time, no bits at run time."""

    def __init__(self, spec):
        self.spec = spec
        super().__init__(f"type[{spec}]")

    @property
    def mangling_args(self):  # names of functions are not to grow with what an object holds
        return type(self.spec).__name__ if is_static(self.spec) else self.name, ()

    @property
    def key(self):
        return self.spec


register_model(Static)(core_models.OpaqueModel)
registry.lower_constant(Static)(lambda context, builder, ty, value: context.get_dummy_value())
registry.lower_cast(Value, Value)(lambda context, builder, have, want, value: value)


def llvm_type(spec):
    """Registers of a tile (of 4 bytes) or vector (one fp32 an element); otherwise an address: in shared memory, or of a
    tensor's map."""
    match spec:
        case pending(tile):
            return llvm_type(tile)
        case rt(dtype=d):
            return ir.LiteralStructType([f32 if d.itemsize == 4 else i32] * (spec.elements * d.itemsize // 4))
        case rv():
            return ir.LiteralStructType([f32] * spec.elements)
        case gl():
            return i64
        case _:
            return i32


@register_model(Value)
class _Model(core_models.PrimitiveModel):
    """A tensor is the address of its map. As an argument that is a pointer, so that a kernel can take the map itself, by value
    (compiler.py)."""

    def __init__(self, manager, ty):
        super().__init__(manager, ty, llvm_type(ty.spec))
        self.is_tensor = isinstance(ty.spec, gl)

    def get_argument_type(self):
        return TENSOR_MAP.as_pointer() if self.is_tensor else self.be_type

    def as_argument(self, builder, value):
        return builder.inttoptr(value, self.get_argument_type()) if self.is_tensor else value

    def from_argument(self, builder, value):
        return builder.ptrtoint(value, self.be_type) if self.is_tensor else value


def compile_time(cls):
    """Class decorator: kernels may close over instances, which are frozen and compared by value."""
    typeof_impl.register(cls)(lambda value, context: Static(value))
    FROZEN.add(cls)
    return cls


FROZEN: set = set()  # these classes
FIELDS = (type(None), bool, int, float, str, np.generic, dtype, tuple)


def member(value, name, missing=None):
    """An attribute of an object that is known when a kernel is compiled, as kernels see it: the floats of static objects, and
    those in their tuples, are fp32. TypeError: a static object holds there what kernels cannot read."""
    found = getattr(value, name, missing)
    if found is missing or not is_static(value):
        return found
    if not (isinstance(found, FIELDS) or is_static(found) or type(found) in FROZEN or callable(found)):
        raise TypeError(
            f"{type(value).__qualname__}.{name}: kernels read None, numbers, strings, dtypes, types of tiles, rings and plans, "
            f"functions, static objects and tuples of these, got {found!r}"
        )
    return _single(found)


def _single(value):
    if type(value) is tuple:
        return tuple(map(_single, value))
    return np.float32(value) if isinstance(value, float) else value


for _cls in (rt, rv, st, sv, barrier):
    compile_time(_cls)


def spec_of(ty):
    """What a rule sees of an argument's Numba type."""
    if isinstance(ty, Static) and isinstance(ty.spec, (rt, rv, st, sv)):
        return Name(ty.spec)
    if isinstance(ty, (Value, Static)):
        return ty.spec
    if isinstance(ty, types.Function) and isinstance(ty.typing_key, dtype):
        return ty.typing_key
    if isinstance(ty, types.Literal):
        return ty.literal_value
    if isinstance(ty, types.NoneType):
        return None
    return ty.value if isinstance(ty, types.Omitted) else ty


def numba_type(spec):
    """The Numba type of a result that a rule announces."""
    if isinstance(spec, types.Type):
        return spec
    return types.BaseTuple.from_types([numba_type(s) for s in spec]) if isinstance(spec, tuple) else Value(spec)


_STATEMENTS = tuple(getattr(typeinfer, f"{name}Constraint") for name in ("Call", "GetAttr", "SetItem", "StaticSetItem"))


def kernel_line():
    """file:line of the statement that Numba is typing. A plain TypeError with it reaches the user as it is; Numba's TypingError
    would drown in candidates."""
    frame = sys._getframe()
    while frame and not isinstance(frame.f_locals.get("self"), _STATEMENTS):
        frame = frame.f_back
    return "\n" + frame.f_locals["self"].loc.strformat() if frame else ""


def teach_numba(op):
    """Make the op's face callable in kernels."""

    def lower(context, builder, sig, values):
        found, emit = op.type(*map(spec_of, sig.args))
        with from_op(builder, op):
            out = emit(Builder(builder, context), *values)
        if out is None and isinstance(found, (rt, rv)):
            raise TypeError(f"{op.name}: emit must return the value of {found}, and returned None")
        return context.get_dummy_value() if out is None else out

    class Template(AbstractTemplate):
        key, prefer_literal, metadata = op.face, True, {"target": "cuda"}

        def generic(self, args, kws):
            try:
                bound = op.bind(args, kws)
                args = tuple(
                    bound.arguments[p.name] if p.name in bound.arguments else types.Omitted(p.default)
                    for p in op.signature.parameters.values()
                )
                found = op.type(*(spec_of(a) for a in args))
            except TypeError as error:
                raise TypeError(f"{error}{kernel_line()}") from None
            if found is None:
                return None
            if not is_ours and args not in seen:
                seen.add(args)
                registry.lower(op.face, *args)(lower)
            return signature(numba_type(found[0]), *args).replace(pysig=op.signature)

        def get_impl_key(self, sig):
            return lower

    seen: set = set()
    is_ours = inspect.isfunction(op.face)  # an operator means other things of other arguments: ours are told one by one
    for key in (lower, op.face) if is_ours else (lower,):
        registry.lower(key, types.VarArg(types.Any))(lower)
    infer(Template)
    infer_global(op.face, types.Function(Template))
    op.template = Template


def refuse(face, check):
    """Let `check(*specs)` refuse calls of a foreign face (`operator.gt`, `math.exp`) with a TypeError."""

    class Template(AbstractTemplate):
        key, metadata = face, {"target": "cuda"}

        def generic(self, args, kws):
            try:
                check(*map(spec_of, args))
            except TypeError as error:
                raise TypeError(f"{error}{kernel_line()}") from None

    infer(Template)
    infer_global(face, types.Function(Template))


def inline(function):
    """Compile a plain function into its callers: its Numba type, which Numba asks it for, is a call that LLVM inlines."""
    from numba import cuda

    if not hasattr(function, "dispatcher"):
        function.dispatcher = cuda.jit(device=True, forceinline=True, fastmath=True)(function)
        function.dispatcher.__class__ = _Inlined
        function._numba_type_ = types.Dispatcher(function.dispatcher)  # a type holds its dispatcher weakly
    return function._numba_type_


class _Inlined(CUDADispatcher):
    """The function, compiled for each types of arguments; in each form apart."""

    def compile_device(self, args, return_type=None):
        self.targetoptions["lineinfo"] = _form == "lines"
        self.overloads = self.__dict__.setdefault("forms", {}).setdefault(_form, {})
        if args not in self.overloads:
            if is_local(self.py_func) or any(map(_passes, args)):
                _passing_forms.append((self.overloads, args))
            if _form == "types":
                cc = dispatcher.get_current_device().compute_capability
                self.overloads[args] = typed(self.py_func, args, return_type, cc)
        return super().compile_device(args, return_type)


WITHOUT_GPU = "`kernel[grid, block](...)` is Numba's launch and takes a GPU; tiles.launch(kernel, grid, block)(...) takes none"


def _teach_launch(call):
    """Numba's launch, which says where a kernel runs if there is no driver to run it."""

    @functools.wraps(call)
    def launch(self, *args, **kwargs):
        try:
            return call(self, *args, **kwargs)
        except CudaSupportError as error:
            said = str(error).rstrip(": \n")
            raise (error if WITHOUT_GPU in said else CudaSupportError(f"{said}\n{WITHOUT_GPU}")) from None

    return launch


CUDADispatcher.call = _teach_launch(CUDADispatcher.call)
_form = "code"  # how they are compiled


@contextlib.contextmanager
def helpers_as(form):
    """Inside, what is compiled into a kernel is "code", code with a table of its "lines", or only has its "types"."""
    global _form
    before, _form = _form, form
    try:
        yield
    finally:
        _form = before


def _passes(ty):
    """Is this the type of something that may go: a static object, a local class, a method of theirs?"""
    if isinstance(ty, types.BoundFunction):
        return _passes(ty.this)
    if isinstance(ty, types.BaseTuple):
        return is_local(getattr(ty, "instance_class", None)) or any(map(_passes, ty))
    return isinstance(ty, Static) and is_static(ty.spec)


def is_local(definition):
    """Was this function or class made by a function?"""
    return "<locals>" in getattr(definition, "__qualname__", "")


def forget():
    """Lets go of what a factory made and Numba would keep for ever: compiled forms of local functions, and of all functions
    for static objects. To be called when a kernel is compiled; the next one compiles what it needs."""
    while _passing_forms:
        forms, args = _passing_forms.pop()
        if (compiled := forms.pop(args, None)) and compiled.library:  # code
            cuda_target.target_context.remove_user_function(compiled.entry_point)
    while _passing:
        table, key = _passing.pop()
        table.pop(key, None)
    _bound.clear()


_bound: dict[tuple, types.BoundFunction] = {}  # (a value's type, the name of an op or a method): what calls it
_passing_forms: list[tuple] = []  # (forms, types of arguments): what is to go of functions' compiled forms
_passing: list[tuple] = []  # (table, key): and of Numba's own tables, noted as it gets there, for the tables are large


def _note_selected(find):
    """Of all an implementation is looked up for, by types of arguments."""

    @functools.wraps(find)
    def found(self, args):
        if any(map(_passes, args)):
            _passing.append((self._cache, args))
        return find(self, args)

    return found


class _Models(weakref.WeakKeyDictionary):
    """Numba's model of each type."""

    def __setitem__(self, ty, model):
        super().__setitem__(ty, model)
        if _passes(ty):
            _passing.append((self, ty))


OverloadSelector._find = _note_selected(OverloadSelector._find)
cuda_target.target_context.data_model_manager._cache = _Models(cuda_target.target_context.data_model_manager._cache)


def plain_function(name):
    """What is said of a function that kernels call and must not."""
    return f"{name} is a plain Python function, which a kernel cannot call: decorate it with @tiles.inlined"


def method_of(cls, name):
    """The @inlined method of that name, if the class has one. TypeError: it is a plain one."""
    face = inspect.getattr_static(cls, name, None)
    if inspect.isfunction(face) and not hasattr(face, "dispatcher"):
        raise TypeError(f"{plain_function(face.__qualname__.rpartition('<locals>.')[2])}{kernel_line()}")
    return face if inspect.isfunction(face) else None


class Method(types.BoundFunction):
    """An @inlined method of `this`, a static object or a value: a call with `this` before its other arguments."""

    def __init__(self, function, this):
        self.function, self.this = inline(function), this
        self.template = type("Template", (AbstractTemplate,), {"key": function, "this": this})  # Numba reads them
        types.Callable.__init__(self, f"{function.__qualname__} of {this}")

    @property
    def key(self):
        return self.function, self.this

    def get_call_type(self, context, args, kws):
        found = self.function.get_call_type(context, (self.this, *args), kws)
        return found and found.as_method()

    def get_call_signatures(self):
        return self.function.get_call_signatures()

    def get_impl_key(self, sig):
        return self.function.get_impl_key(sig)


register_model(Method)(lambda manager, ty: manager[ty.this])


class _Members(AttributeTemplate):
    """An attribute of a tile value is that of its frozen object: an op, or what is known when the kernel is compiled: a number,
    a type, a static object, a function."""

    def generic_resolve(self, this, name):
        if (this, name) not in _bound:
            found = self._resolved(this, name)
            if not isinstance(found, types.BoundFunction):
                return found
            _bound[this, name] = found  # for which a class is made, and that takes longer than the rest
        return _bound[this, name]

    def _resolved(self, this, name):
        face = inspect.getattr_static(type(this.spec), name, None)
        if inspect.isfunction(face) and face in OPS:
            template = OPS[face].template

            class Op(AbstractTemplate):
                key, prefer_literal = face, True

                def generic(self, args, kws):
                    sig = template(self.context).generic((this, *args), kws)
                    return sig and sig.as_method()

            return types.BoundFunction(Op, this)
        if is_static(this.spec) and name not in vars(this.spec) and (method := method_of(type(this.spec), name)):
            return Method(method, this)
        try:
            value = member(this.spec, name)
        except TypeError as error:
            raise TypeError(f"{error}{kernel_line()}") from None
        if isinstance(this, Static) and inspect.isfunction(value) and value not in OPS:
            return inline(value)
        if value is None:
            return types.none if hasattr(this.spec, name) else _refuse_attribute(this.spec, name)
        try:
            return self.context.resolve_value_type_prefer_literal(value)
        except ValueError:
            return None


INSTEAD: dict[str, str] = {}  # attributes that arrays have and tiles have not, and what to use: refused.py has the table


def instead_of(spec, name):
    """What to say where a tile, or a static object, is asked for an attribute that it has not; None of others."""
    if name.startswith("_"):  # Python asks for such by itself
        return None
    if isinstance(spec, (rt, rv, pending, st, sv, gl)):
        has = (attribute for attribute in ("rows", "cols", "length", "dtype", "col_vec", "row_vec") if hasattr(spec, attribute))
        an_op = any(inspect.isfunction(face) and op.name == name for face, op in OPS.items())
        instead = INSTEAD.get(name, f"{name}(t), which is an op" if an_op else None)
        remedy = f"use {instead}" if instead else f"it has {', '.join(has)}"
    elif is_static(spec):
        remedy = f"it has {', '.join(field.name for field in dataclasses.fields(spec))} and its @inlined methods"
    else:
        return None
    return f"{type(spec).__name__!r} object has no attribute {name!r}: {remedy}; got {spec}"


def _refuse_attribute(spec, name):
    if instead := instead_of(spec, name):
        raise TypeError(f"{instead}{kernel_line()}")


def _attribute(context, builder, ty, value, name):
    """Lowers it: the bits of a number, or none."""
    found = context.typing_context.resolve_getattr(ty, name)
    if isinstance(found, types.Callable):
        return context.get_dummy_value()
    return context.get_constant_generic(builder, types.unliteral(found), member(ty.spec, name))


for _t in (Value, Static):
    infer_getattr(type(f"{_t.__name__}Members", (_Members,), {"key": _t}))
    registry.lower_getattr_generic(_t)(_attribute)
