"""What Numba is taught: frozen tile types become Numba types, ops become intrinsics (builder.py has their words). The functions
that are compiled into kernels are in numba_helpers.py, attributes and methods of values in numba_members.py.

Two Numba types carry everything: `Value(spec)` is a run-time value of that type (registers, or an address), `Static(spec)`
the frozen object itself, closed over by a kernel and known when it is compiled. Kernel authors see neither.
"""

import inspect
import sys

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.core import typeinfer
from numba.cuda.cudaimpl import registry
from numba.cuda.extending import core_models, infer, register_model
from numba.cuda.typeconv import Conversion
from numba.cuda.typing import signature
from numba.cuda.typing.templates import AbstractTemplate, infer_global
from numba.cuda.typing.typeof import typeof_impl

from ..dtypes import bf16, dtype, fp8e4m3, fp8e5m2, fp16, fp32, int8, int32
from ..op import TypeArgument
from ..types import barrier, gl, is_static, pending, rt, rv, st, sv
from .builder import Builder, f32, i32, i64
from .line_table import from_op
from .source_lines import statement_at

TENSOR_MAP = ir.LiteralStructType([ir.ArrayType(i64, 16)])  # 128 bytes that only TMA understands
void = types.void


class Byte(types.Type):
    """An element of an fp8 array, which kernels only load and store by tiles."""


register_model(Byte)(lambda manager, ty: core_models.PrimitiveModel(manager, ty, ir.IntType(8)))
SCALARS = {types.float32: fp32, types.float16: fp16, types.bfloat16: bf16, types.int8: int8}
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


class StaticType(types.Dummy):
    """The frozen object itself: known at compile time, no bits at run time."""

    def __init__(self, spec):
        self.spec = spec
        super().__init__(f"type[{spec}]")

    @property
    def mangling_args(self):  # the mangled names of functions must not grow with what an object holds
        return type(self.spec).__name__ if is_static(self.spec) else self.name, ()

    @property
    def key(self):
        return self.spec


register_model(StaticType)(core_models.OpaqueModel)
registry.lower_constant(StaticType)(lambda context, builder, ty, value: context.get_dummy_value())
registry.lower_cast(Value, Value)(lambda context, builder, have, want, value: value)


def llvm_type(spec):
    """Registers of a tile (of 4 bytes) or vector (one fp32 an element); otherwise an address: in shared memory, or of a
    tensor's map."""
    match spec:
        case pending(tile):
            return llvm_type(tile)
        case rt(dtype=d):
            return ir.LiteralStructType(
                [f32 if d.itemsize == 4 and d is not int32 else i32] * (spec.elements * d.itemsize // 4)
            )
        case rv():
            return ir.LiteralStructType([f32] * spec.elements)
        case gl():
            return i64
        case _:
            return i32


@register_model(Value)
class _Model(core_models.PrimitiveModel):
    """The bits of a Value. A tensor is the address of its tensor map; as a kernel's argument it is a pointer, so that the
    kernel can take the map itself by value (compiler.py)."""

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
    typeof_impl.register(cls)(lambda value, context: StaticType(value))
    FROZEN.add(cls)
    return cls


FROZEN: set = set()  # the classes that are decorated so
FIELDS = (type(None), bool, int, float, str, np.generic, dtype, tuple)


def member(value, name, missing=None):
    """An attribute of a compile-time object as kernels see it: floats of static objects, also those in their tuples, are fp32.
    TypeError: the attribute of a static object is nothing that kernels can read."""
    attribute = getattr(value, name, missing)
    if attribute is missing or not is_static(value):
        return attribute
    if not (isinstance(attribute, FIELDS) or is_static(attribute) or type(attribute) in FROZEN or callable(attribute)):
        raise TypeError(
            f"{type(value).__qualname__}.{name}: kernels read None, numbers, strings, dtypes, types of tiles and rings, shared "
            f"storage, functions, static objects and tuples of these, got {attribute!r}"
        )
    return _single(attribute)


def _single(value):
    if type(value) is tuple:
        return tuple(map(_single, value))
    return np.float32(value) if isinstance(value, float) else value


for _cls in (rt, rv, st, sv, barrier):
    compile_time(_cls)


def spec_of(ty):
    """The type that a rule sees for an argument's Numba type."""
    if isinstance(ty, StaticType) and isinstance(ty.spec, (rt, rv, st, sv)):
        return TypeArgument(ty.spec)
    if isinstance(ty, (Value, StaticType)):
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
    if isinstance(spec, tuple):
        return types.BaseTuple.from_types([numba_type(s) for s in spec], type(spec) if hasattr(spec, "_fields") else None)
    return Value(spec)


_STATEMENTS = tuple(getattr(typeinfer, f"{name}Constraint") for name in ("Call", "GetAttr", "SetItem", "StaticSetItem"))


def kernel_line():
    """file:line of the statement that Numba is typing, for the end of an error message. Rules raise a plain TypeError with it,
    which reaches the user as it is; a TypingError would drown in Numba's list of candidates."""
    frame = sys._getframe()
    while frame and not isinstance(frame.f_locals.get("self"), _STATEMENTS):
        frame = frame.f_back
    return "\n" + statement_at(frame.f_locals["self"].loc) if frame else ""


def teach_numba(op):
    """Make the op's function, operator or dtype callable in kernels."""

    def lower(context, builder, sig, values):
        result, emit = op.type(*map(spec_of, sig.args))
        with from_op(builder, op):
            out = emit(Builder(builder, context), *values)
        if out is None and isinstance(result, (rt, rv)):
            raise TypeError(f"{op.name}: emit must return the value of {result}, and returned None")
        return context.get_dummy_value() if out is None else out

    class CallTemplate(AbstractTemplate):
        key, prefer_literal, metadata = op.op_function, True, {"target": "cuda"}

        def generic(self, args, kws):
            try:
                bound = op.bind(args, kws)
                args = tuple(
                    bound.arguments[p.name] if p.name in bound.arguments else types.Omitted(p.default)
                    for p in op.signature.parameters.values()
                )
                typed = op.type(*(spec_of(a) for a in args))
            except TypeError as error:
                raise TypeError(f"{error}{kernel_line()}") from None
            if typed is None:
                return None
            if not is_ours and args not in resolved:
                resolved.add(args)
                registry.lower(op.op_function, *args)(lower)
            return signature(numba_type(typed[0]), *args).replace(pysig=op.signature)

        def get_impl_key(self, sig):
            return lower

    resolved: set = set()
    is_ours = inspect.isfunction(op.op_function)  # an operator is registered for each of our types by itself
    for key in (lower, op.op_function) if is_ours else (lower,):
        registry.lower(key, types.VarArg(types.Any))(lower)
    infer(CallTemplate)
    infer_global(op.op_function, types.Function(CallTemplate))
    op.template = CallTemplate


def refuse(op_function, check):
    """Let `check(*specs)` refuse calls of a foreign function (`operator.gt`, `math.exp`) with a TypeError."""

    class RefusalTemplate(AbstractTemplate):
        key, metadata = op_function, {"target": "cuda"}

        def generic(self, args, kws):
            try:
                check(*map(spec_of, args))
            except TypeError as error:
                raise TypeError(f"{error}{kernel_line()}") from None

    infer(RefusalTemplate)
    infer_global(op_function, types.Function(RefusalTemplate))
