"""The one place that knows Numba: frozen tile types become Numba types, ops become intrinsics.

Two Numba types carry everything: `Value(spec)` is a run-time value of that type (registers, or an address), `Static(spec)`
the frozen object itself, closed over by a kernel and known when it is compiled. Kernel authors see neither.
"""

import inspect
import sys

from llvmlite import ir
from numba.cuda import types
from numba.cuda.core import typeinfer
from numba.cuda.cudaimpl import registry
from numba.cuda.descriptor import cuda_target
from numba.cuda.extending import core_models, infer, infer_getattr, register_model
from numba.cuda.typeconv import Conversion
from numba.cuda.typing import signature
from numba.cuda.typing.templates import AbstractTemplate, AttributeTemplate, infer_global
from numba.cuda.typing.typeof import typeof_impl

from . import constants as _constants  # registers itself  # noqa: F401
from .dtypes import bf16, dtype, fp8e4m3, fp8e5m2, fp16, fp32, tf32
from .op import OPS, Name
from .types import barrier, gl, pending, rt, rv, st, sv

i1, i32, i64, f32 = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
TENSOR_MAP = ir.LiteralStructType([ir.ArrayType(i64, 16)])  # 128 bytes that only TMA understands
void = types.void


class Byte(types.Type):
    """An element of an fp8 array, which kernels only load and store by tiles."""


register_model(Byte)(lambda manager, ty: core_models.PrimitiveModel(manager, ty, ir.IntType(8)))
SCALARS = {types.float32: fp32, types.float16: fp16, types.bfloat16: bf16}
SCALARS |= {Byte(str(d)): d for d in (fp8e4m3, fp8e5m2)}


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
    return cls


for _cls in (rt, rv, st, sv, barrier):
    compile_time(_cls)


class Builder(ir.IRBuilder):
    """LLVM's builder plus the few words that lowerings use."""

    def __init__(self, builder, context):
        self.__dict__ = builder.__dict__
        self.context = context

    def unpack(self, value):
        """The parts of a struct or a tuple."""
        parts = value.type.count if isinstance(value.type, ir.ArrayType) else len(value.type.elements)
        return [self.extract_value(value, k) for k in range(parts)]

    def pack(self, values):
        """A struct of these values."""
        out = ir.Constant(ir.LiteralStructType([v.type for v in values]), ir.Undefined)
        for k, v in enumerate(values):
            out = self.insert_value(out, v, k)
        return out

    def elements(self, spec, value):
        """A tile's or vector's elements in this lane, as fp32."""
        parts = self.unpack(value)
        if isinstance(spec, rv) or spec.dtype.itemsize == 4:
            return parts
        if spec.dtype is bf16:
            high = self.u32(0xFFFF0000)
            pairs = [(self.shl(r, self.u32(16)), self.and_(r, high)) for r in parts]
            return [self.bitcast(x, f32) for pair in pairs for x in pair]
        if spec.dtype.itemsize == 1:
            parts = [self._halves(spec.dtype, r, part) for r in parts for part in ("lo", "hi")]
        halves = [self.bitcast(r, ir.VectorType(ir.HalfType(), 2)) for r in parts]
        return [self.fpext(self.extract_element(h, self.u32(k)), f32) for h in halves for k in (0, 1)]

    def _halves(self, dtype, register, part):
        """Two fp8 elements, the lower or the upper ones of a register, as fp16."""
        text = f"{{.reg .b16 lo, hi;\nmov.b32 {{lo, hi}}, $1;\ncvt.rn.f16x2.{dtype.ptx}x2 $0, {part};}}"
        return self.asm(i32, text, "=r,r", register, effect=False)

    def from_elements(self, spec, elements):
        """The tile or vector with these fp32 elements, each rounded to its dtype."""
        if spec.dtype is fp32:
            return self.pack(elements)
        if spec.dtype is tf32:
            words = [self.asm(i32, "cvt.rna.tf32.f32 $0, $1;", "=r,f", e, effect=False) for e in elements]
            return self.pack([self.bitcast(word, f32) for word in words])
        if isinstance(spec, rv):
            tile = rt(16, 16, spec.dtype)
            pairs = [self.elements(tile, self.pack([self.pair(spec.dtype, e, e)]))[0] for e in elements]
            return self.pack(pairs)
        run, word = spec.dtype.run, self.pair if spec.dtype.run == 2 else self.quad
        return self.pack([word(spec.dtype, *elements[k : k + run]) for k in range(0, len(elements), run)])

    def pair(self, dtype, low, high):
        """One register of two 2-byte elements, rounded from fp32."""
        return self.asm(i32, f"cvt.rn.{dtype.ptx}x2.f32 $0, $1, $2;", "=r,f,f", high, low, effect=False)

    def quad(self, dtype, *four):
        """One register of four fp8 elements, rounded from fp32, the first one lowest (sm_89 and later)."""
        to = f"cvt.rn.satfinite.{dtype.ptx}x2.f32"
        text = f"{{.reg .b16 lo, hi;\n{to} lo, $2, $1;\n{to} hi, $4, $3;\nmov.b32 $0, {{lo, hi}};}}"
        return self.asm(i32, text, "=r,f,f,f,f", *four, effect=False)

    def asm(self, ret, text, constraints, *args, effect=True):
        """One PTX snippet; `effect` keeps it where it stands among memory operations."""
        ty = ir.FunctionType(ret, [a.type for a in args])
        parts = [c for c in (constraints, "~{memory}" if effect else "") if c]
        return self.call(ir.InlineAsm(ty, text, ",".join(parts), side_effect=effect), args)

    def do(self, text, *args):
        """A PTX statement with no result."""
        letters = {i64: "l", f32: "f"}
        self.asm(ir.VoidType(), text, ",".join(letters.get(a.type, "r") for a in args), *args)

    def llvm(self, name, *args):
        """A call of an LLVM or libdevice function whose result has its first argument's type."""
        fn = self.module.globals.get(name) or ir.Function(
            self.module, ir.FunctionType(args[0].type, [a.type for a in args]), name
        )
        return self.call(fn, args)

    def apply(self, function, _, x):
        """function(x) of an fp32 number, for the Numba type of a function that kernels can call. (Its Python function is what
        the tests' builder calls.)"""
        sig = scalar_signature(function)
        return self.context.cast(self, self.context.get_function(function, sig)(self, [x]), sig.return_type, types.float32)

    def u32(self, value):
        """A 32-bit integer, from a Python or LLVM integer of any width."""
        if isinstance(value, int):
            return ir.Constant(i32, value)
        width = value.type.width
        return value if width == 32 else self.trunc(value, i32) if width > 32 else self.zext(value, i32)

    def real(self, value):
        """An fp32 number, from a Python or LLVM number."""
        if isinstance(value, (int, float)):
            return ir.Constant(f32, float(value))
        if value.type == ir.DoubleType():
            return self.fptrunc(value, f32)
        return value if value.type == f32 else self.sitofp(value, f32)

    def special(self, name, anew=False):
        """A special register, e.g. tid.x. `anew`: read here, so that what is computed from it is not kept in registers over the
        loop round it."""
        return self.asm(i32, f"mov.u32 $0, %{name};", "=r", effect=anew)

    def since(self, arch):
        """Is the code for sm_`arch` or later? NVVM knows when it links, and leaves nothing of the other branch."""
        byte, name = ir.IntType(8), b"__CUDA_ARCH\0"
        text = self.module.globals.get("name_of_arch")
        if text is None:
            text = ir.GlobalVariable(self.module, ir.ArrayType(byte, len(name)), "name_of_arch", addrspace=4)
            text.initializer, text.linkage = ir.Constant(text.type.pointee, bytearray(name)), "internal"
            text.global_constant = True
        generic = self.addrspacecast(self.bitcast(text, byte.as_pointer(4)), byte.as_pointer())
        reflect = self.module.globals.get("__nvvm_reflect") or ir.Function(
            self.module, ir.FunctionType(i32, [byte.as_pointer()]), "__nvvm_reflect"
        )
        return self.icmp_signed(">=", self.call(reflect, [generic]), self.u32(10 * arch))

    def lane(self, anew=False):
        """This thread's lane in its warp."""
        return self.and_(self.special("tid.x", anew), self.u32(31))

    def array(self, ty, value):
        """A Numba array's (data address, extents, strides in bytes)."""
        array = self.context.make_array(ty)(self.context, self, value)
        return self.ptrtoint(array.data, i64), self.unpack(array.shape), self.unpack(array.strides)

    def clipped(self, ty, value, axis, end):
        """The Numba array without what lies from index `end` on along `axis`."""
        array = self.context.make_array(ty)(self.context, self, value)
        zero, extent = i64(0), self.unpack(array.shape)[axis]
        end = self.select(self.icmp_signed("<", end, zero), zero, end)
        end = self.select(self.icmp_signed("<", end, extent), end, extent)
        array.shape = self.insert_value(array.shape, end, axis)
        return array._getvalue()


def scalar_signature(function):
    """How a function that kernels can call takes one fp32 number."""
    return cuda_target.typing_context.resolve_function_type(function, (types.float32,), {})


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

    class Template(AbstractTemplate):
        key, prefer_literal, metadata, impls = op.face, True, {"target": "cuda"}, {}

        def generic(self, args, kws):
            try:
                bound = op.signature.bind(*args, **kws)
                args = tuple(
                    bound.arguments[p.name] if p.name in bound.arguments else types.Omitted(p.default)
                    for p in op.signature.parameters.values()
                )
                found = op.type(*(spec_of(a) for a in args))
            except TypeError as error:
                raise TypeError(f"{error}{kernel_line()}") from None
            if found is None:
                return None
            result, emit = found
            sig = signature(numba_type(result), *args).replace(pysig=op.signature)

            def lower(context, builder, sig, values):
                out = emit(Builder(builder, context), *values)
                return context.get_dummy_value() if out is None else out

            self.impls[args] = lower
            for key in (lower, op.face):
                registry.lower(key, *args)(lower)
            return sig

        def get_impl_key(self, sig):
            return self.impls[sig.args]

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
    """Compile a plain function into its callers."""
    from numba import cuda

    function.dispatcher = cuda.jit(device=True, forceinline=True, fastmath=True)(function)  # held weakly by its type
    infer_global(function, types.Dispatcher(function.dispatcher))


class _Members(AttributeTemplate):
    """An attribute of a tile value is that of its frozen object: an op, an integer known at compile time, or a type."""

    def generic_resolve(self, this, name):
        face = getattr(type(this.spec), name, None)
        if inspect.isfunction(face) and face in OPS:
            template = OPS[face].template

            class Method(AbstractTemplate):
                key, prefer_literal = face, True

                def generic(self, args, kws):
                    sig = template(self.context).generic((this, *args), kws)
                    return sig and sig.as_method()

            return types.BoundFunction(Method, this)
        value = getattr(this.spec, name, None)
        if isinstance(value, int):
            return types.literal(value)
        if isinstance(value, dtype):
            return self.context.resolve_value_type(value)
        return Static(value) if isinstance(value, (rt, rv, st, sv)) else None


def _attribute(context, builder, ty, value, name):
    member = getattr(ty.spec, name)
    return context.get_constant(types.int64, member) if isinstance(member, int) else context.get_dummy_value()


for _t in (Value, Static):
    infer_getattr(type(f"{_t.__name__}Members", (_Members,), {"key": _t}))
    registry.lower_getattr_generic(_t)(_attribute)
