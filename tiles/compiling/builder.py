"""LLVM's builder, with the few words more that lowerings are written in."""

from numbers import Number

from llvmlite import ir
from numba.cuda import cgutils, nvvmutils, types
from numba.cuda.descriptor import cuda_target

from ..dtypes import bf16, fp16, fp32, int8, int32, tf32
from ..layout import LANES, WARPGROUP
from ..types import rt, rv

i1, i8, i32, i64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)  # i32(5) is the constant 5
f32, f64 = ir.FloatType(), ir.DoubleType()
BuilderValue = ir.Value  # what rules compute with


def struct(types):
    """The type of several registers together, as one instruction gives them."""
    return ir.LiteralStructType([*types])


class Builder(ir.IRBuilder):
    """An IRBuilder that knows tiles, PTX and special registers."""

    def __init__(self, builder, context):
        self.__dict__ = builder.__dict__
        self.context = context

    def unpack(self, value):
        """The parts of a struct or a tuple: of one that `pack` has made the values themselves."""
        if (packed := getattr(value, "packed", None)) is not None:
            return [*packed]
        parts = value.type.count if isinstance(value.type, ir.ArrayType) else len(value.type.elements)
        return [self.extract_value(value, k) for k in range(parts)]

    def pack(self, values):
        """A struct of these values."""
        out = self.undefined(ir.LiteralStructType([v.type for v in values]))
        for k, v in enumerate(values):
            out = self.insert_value(out, v, k)
        if values:
            out.packed = values
        return out

    def elements(self, spec, value):
        """A tile's or vector's elements in this lane, as fp32."""
        parts = self.unpack(value)
        if spec.dtype is int32:
            return [self.sitofp(x, f32) for x in parts]
        if isinstance(spec, rv) or spec.dtype.itemsize == 4:
            return parts
        if spec.dtype is bf16:
            high = self.u32(0xFFFF0000)
            pairs = [(self.shl(r, self.u32(16)), self.and_(r, high)) for r in parts]
            return [self.bitcast(x, f32) for pair in pairs for x in pair]
        if spec.dtype.itemsize == 1:
            parts = [half for r in parts for half in self.widened(spec.dtype, r)]
        return [element for r in parts for element in self._fp16_pair(r)]

    def widened(self, dtype, register, to=fp16, order=(0, 1, 2, 3)):
        """The four elements of a register of one byte each as two registers of dtype `to`, fp16 or bf16: exactly, as these hold
        all numbers of fp8e4m3, fp8e5m2 and int8. order: which elements these are, (0, 1, 2, 3) or (0, 2, 1, 3)."""
        if dtype is int8:
            return [self._int8_pair(register, to, *two) for two in (order[:2], order[2:])]
        if order != (0, 1, 2, 3):
            register = self.permuted(register, register, 0x3120)
        text = "{{.reg .b16 lo, hi;\nmov.b32 {{lo, hi}}, $1;\ncvt.rn.f16x2.{}x2 $0, {};}}"
        halves = [self.asm(i32, text.format(dtype.ptx, part), "=r,r", register, effect=False) for part in ("lo", "hi")]
        return halves if to is fp16 else [self.pair(to, *self._fp16_pair(half)) for half in halves]

    def _fp16_pair(self, register):
        """The two fp16 elements of a register, as fp32."""
        halves = self.bitcast(register, ir.VectorType(ir.HalfType(), 2))
        return [self.fpext(self.extract_element(halves, self.u32(k)), f32) for k in (0, 1)]

    def _int8_pair(self, register, to, low, high):
        """The int8 elements x number `low` and `high` of a register of four, in `to`. A byte becomes the mantissa of a number
        whose unit is 1, and what that has too much is subtracted:

            fp16    x = (1024 + (x + 128)) - 1152                                   five instructions for four elements
            bf16    x = (128 + last seven bits of x) - (256 if x < 0 else 128)      eight

        since bf16 has no room for all eight bits."""
        place = 0x4040 | high << 8 | low  # the bytes, each below one of the exponent's
        if to is fp16:
            text, biased = "sub.rn.f16x2 $0, $1, $2;", self.xor(register, self.u32(0x80808080))
            return self.asm(
                i32, text, "=r,r,r", self.permuted(biased, self.u32(0x64646464), place), self.u32(0x64806480), effect=False
            )
        with_exponent = self.permuted(register, self.u32(0x43434343), place)
        bits, sign = self.and_(with_exponent, self.u32(0xFF7FFF7F)), self.and_(with_exponent, self.u32(0xFF80FF80))
        text = "fma.rn.bf16x2 $0, $1, $2, $3;"  # sign times -1: sm_80 has no sub of bf16x2
        return self.asm(i32, text, "=r,r,r,r", sign, self.u32(0xBF80BF80), bits, effect=False)

    def permuted(self, x, y, select):
        """Four of the eight bytes of two registers: `select` has four bits for each, the last ones for the lowest (prmt)."""
        return self.asm(i32, f"prmt.b32 $0, $1, $2, 0x{select:x};", "=r,r,r", x, y, effect=False)

    def from_elements(self, spec, elements):
        """The tile or vector with these fp32 elements, each rounded to its dtype."""
        if spec.dtype is fp32:
            return self.pack(elements)
        if spec.dtype is tf32:
            words = [self.asm(i32, "cvt.rna.tf32.f32 $0, $1;", "=r,f", e, effect=False) for e in elements]
            return self.pack([self.bitcast(word, f32) for word in words])
        if spec.dtype is int32:
            return self.pack([self.asm(i32, "cvt.rni.s32.f32 $0, $1;", "=r,f", e, effect=False) for e in elements])
        run, word = spec.dtype.run, self.pair if spec.dtype.run == 2 else self.quad
        if isinstance(spec, rv):
            words = [word(spec.dtype, *[e] * run) for e in elements]
            return self.pack([self.elements(rt(32, 32, spec.dtype), self.pack([word]))[0] for word in words])
        return self.pack([word(spec.dtype, *elements[k : k + run]) for k in range(0, len(elements), run)])

    def pair(self, dtype, low, high):
        """One register of two 2-byte elements, rounded from fp32."""
        return self.asm(i32, f"cvt.rn.{dtype.ptx}x2.f32 $0, $1, $2;", "=r,f,f", high, low, effect=False)

    def quad(self, dtype, *four):
        """One register of four elements of one byte, rounded from fp32, the first one lowest (fp8: sm_89 and later)."""
        if dtype is int8:
            rounded = "".join(f"cvt.rni.s32.f32 n{k}, ${k + 1};\n" for k in range(4))
            text = "cvt.pack.sat.s8.s32.b32 hi, n3, n2, 0;\ncvt.pack.sat.s8.s32.b32 $0, n1, n0, hi;"
            return self.asm(i32, f"{{.reg .b32 n<4>, hi;\n{rounded}{text}}}", "=r,f,f,f,f", *four, effect=False)
        to = f"cvt.rn.satfinite.{dtype.ptx}x2.f32"
        text = f"{{.reg .b16 lo, hi;\n{to} lo, $2, $1;\n{to} hi, $4, $3;\nmov.b32 $0, {{lo, hi}};}}"
        return self.asm(i32, text, "=r,f,f,f,f", *four, effect=False)

    def asm(self, ret, text, constraints, *args, effect=True, memory=True):
        """One PTX snippet; `effect` keeps it where it stands among others, with `memory` among all that use memory. ValueError:
        the constraints are those of more or fewer arguments."""
        inputs = [c for c in constraints.split(",") if c and c[0] not in "=~"]
        if len(inputs) != len(args):
            raise ValueError(f"asm: {constraints!r} has {len(inputs)} inputs, and {len(args)} are given to {text!r:.60}")
        ty = ir.FunctionType(ret, [a.type for a in args])
        parts = [c for c in (constraints, "~{memory}" if effect and memory else "") if c]
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

    def apply(self, function, value, *numbers):
        """function(*numbers) of fp32 numbers, for the Numba type of a function that kernels can call, or of a method, whose
        value is its object's. (A Python function is what the tests' builder calls.)"""
        sig = scalar_signature(function, len(numbers))
        this = (value,) if isinstance(function, types.BoundFunction) else ()
        result = self.context.get_function(function, sig)(self, (*this, *numbers))
        return self.context.cast(self, result, sig.return_type, types.float32)

    def u32(self, value):
        """A 32-bit integer, from a Python or LLVM integer of any width."""
        if isinstance(value, int):
            return ir.Constant(i32, value)
        width = value.type.width
        return value if width == 32 else self.trunc(value, i32) if width > 32 else self.zext(value, i32)

    def undefined(self, type):
        """A value of a type that nobody reads, which takes no instruction to make."""
        return ir.Constant(type, ir.Undefined)

    def real(self, value):
        """An fp32 number, from a Python or LLVM number."""
        if isinstance(value, (int, float)):
            return ir.Constant(f32, float(value))
        if isinstance(value, ir.Constant) and isinstance(value.constant, Number):
            return ir.Constant(f32, float(value.constant))
        if value.type == ir.DoubleType():
            return self.fptrunc(value, f32)
        return value if value.type == f32 else self.sitofp(value, f32)

    def scratch(self, type, count):
        """The address of memory for so many values, of each thread alone, allocated once a function."""
        return cgutils.alloca_once(self, ir.ArrayType(type, count))

    def vprintf(self, text, numbers):
        """Call printf with the fp64 numbers at this address."""
        text = self.context.insert_string_const_addrspace(self, text)
        self.call(nvvmutils.declare_vprint(self.module), [text, self.bitcast(numbers, i8.as_pointer())])

    def special(self, name, recompute=False):
        """A special register, e.g. tid.x. `recompute`: read here, so that what is computed from it is not kept in registers
        over the loop round it."""
        return self.asm(i32, f"mov.u32 $0, %{name};", "=r", effect=recompute)

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

    def lane(self, recompute=False):
        """This thread's lane in its warp."""
        return self.and_(self.special("tid.x", recompute), self.u32(LANES - 1))

    def warp(self):
        """This thread's warp in its block."""
        return self.lshr(self.special("tid.x"), self.u32(LANES.bit_length() - 1))

    def warpgroup(self):
        """This thread's warpgroup in its block."""
        return self.lshr(self.special("tid.x"), self.u32((WARPGROUP * LANES).bit_length() - 1))

    def row_address(self, tile, address, row):
        """(address of a row of a shared tile in its first panel, what the swizzle XORs into offsets inside the panel)."""
        offset = self.mul(row, self.u32(tile.width))
        return self.add(address, offset), self.and_(self.lshr(offset, self.u32(3)), self.u32(tile.width - 16))

    def array(self, ty, value):
        """A Numba array's (data address, extents, strides in bytes)."""
        array = self.context.make_array(ty)(self.context, self, value)
        return self.ptrtoint(array.data, i64), self.unpack(array.shape), self.unpack(array.strides)

    def constant(self, value):
        """The Python number that a value is, or None if it is known at run time only."""
        return value.constant if isinstance(value, ir.Constant) else None

    def choose(self, condition, compute, otherwise):
        """The values that compute() returns where the bit `condition` is set, by one side of a branch each, or by none:
        otherwise() returns as many, or is a list of values that are there already."""
        if not callable(otherwise):
            origin = self.block
            with self.if_then(condition):
                values, end = compute(), self.block
            return [self._merge((y, origin), (x, end)) for x, y in zip(values, otherwise, strict=True)]
        with self.if_else(condition) as (on_true, on_false):
            with on_true:
                values, end = compute(), self.block
            with on_false:
                other_values, other_end = otherwise(), self.block
        return [self._merge((x, end), (y, other_end)) for x, y in zip(values, other_values, strict=True)]

    def repeat(self, rounds, values, body):
        """The values after so many rounds of `values = body(number of the round, values)`: a loop that is not unrolled."""
        origin, loop, done = self.block, self.append_basic_block("round"), self.append_basic_block("after.rounds")
        self.branch(loop)
        self.position_at_end(loop)
        number, *during = phis = [self.phi(x.type) for x in (self.u32(0), *values)]
        after = body(number, during)
        next_number = self.add(number, self.u32(1))
        for phi, before, after_value in zip(phis, (self.u32(0), *values), (next_number, *after), strict=True):
            phi.add_incoming(before, origin)
            phi.add_incoming(after_value, self.block)
        disable = self.module.add_metadata(["llvm.loop.unroll.disable"])
        name = self.module.add_metadata([disable, i32(len(self.module.metadata))])
        name.operands = (name, disable)  # a loop's name begins with itself
        self.cbranch(self.icmp_unsigned("<", next_number, self.u32(rounds)), loop, done).set_metadata("llvm.loop", name)
        self.position_at_end(done)
        return after

    def _merge(self, *values):
        """The value of the block that was run, of (value, block), ..."""
        phi = self.phi(values[0][0].type)
        for value, block in values:
            phi.add_incoming(value, block)
        return phi

    def dynamic_shared(self, align):
        """The address of the shared memory that a launch adds, at a multiple of `align` bytes."""
        symbol = self.module.globals.get("dynamic_smem")
        if symbol is None:
            symbol = ir.GlobalVariable(self.module, ir.ArrayType(i8, 0), "dynamic_smem", addrspace=3)
            symbol.linkage, symbol.align = "external", align
        return self.and_(self.add(self.ptrtoint(symbol, i32), self.u32(align - 1)), self.u32(-align))

    def clipped(self, ty, value, axis, end):
        """The Numba array without what lies from index `end` on along `axis`."""
        array = self.context.make_array(ty)(self.context, self, value)
        zero, extent = i64(0), self.unpack(array.shape)[axis]
        end = self.select(self.icmp_signed("<", end, zero), zero, end)
        end = self.select(self.icmp_signed("<", end, extent), end, extent)
        array.shape = self.insert_value(array.shape, end, axis)
        return array._getvalue()


def scalar_signature(function, count):
    """How a function that kernels can call takes `count` fp32 numbers."""
    return cuda_target.typing_context.resolve_function_type(function, (types.float32,) * count, {})
