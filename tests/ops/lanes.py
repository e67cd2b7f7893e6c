"""Runs what ops *compile to*, without a GPU: every lowering is executed on NumPy arrays with one entry a thread.

The ops of a kernel called through `run` emit their code as for Numba, but into a builder whose instructions act at once.
LLVM's instructions are one line each, PTX is the table of isa.py. So a wrong lane, address or rounding in a lowering fails
here, on any machine. All threads run in step: for kernels whose warps all do the same.
"""

import contextlib
import ctypes
import re
from functools import partial
from unittest import mock

import numpy as np
from isa import LLVM, PTX, TYPES, Register, Struct
from llvmlite import ir
from numba import cuda
from numba.cuda import types

from tiles import pipeline, ring
from tiles.builder import Builder, f32, i1, i32, i64
from tiles.op import OPS, Op, operator
from tiles.shared import shared as Plan
from tiles.values import spec_of, tensor

COMPARE = {s: getattr(operator, n) for s, n in zip("< <= == > >= !=".split(), "lt le eq gt ge ne".split(), strict=True)}
SIGNED = {i32: np.int32, i64: np.int64}
BASE = 1024  # where a block's tiles begin in shared memory


class Value:
    """What a kernel holds: a type of tiles and the registers of all threads."""

    __array_ufunc__ = None

    def __init__(self, spec, registers):
        self.spec, self.registers = spec, registers

    def __getattr__(self, name):
        member = getattr(type(self.spec), name, None)
        return partial(member, self) if member in OPS else getattr(self.spec, name)


for _name in ("add", "sub", "mul", "truediv"):
    _face = getattr(operator, _name)
    setattr(Value, f"__{_name}__", lambda self, other, face=_face: OPS[face](self, other))
    setattr(Value, f"__r{_name}__", lambda self, other, face=_face: OPS[face](other, self))
Value.__neg__ = lambda self: OPS[operator.neg](self)


class Phi(Register):
    """A register that is what the last block through which a thread came says."""

    def add_incoming(self, value, block):
        self.array = np.where(block, value.array, self.array)


class Machine(Builder):
    """A builder whose instructions act on all threads at once."""

    def __init__(self, threads, arch=90, place=(0, 1)):
        self.arch, self.threads, self.active, self.place = arch, threads, np.ones(threads, bool), place
        self.tid = np.arange(threads)
        self.shared = np.full(1 << 18, 0xFF, np.uint8)
        self.ranges, self.tensors = [], []  # global arrays: addresses of their first byte and their end; TMA's tensors
        self.ways = {}  # instruction -> the worst number of accesses to one bank in one pass
        self.context = self

    # -- values
    def const(self, x):
        """A register of an llvmlite constant."""
        if isinstance(x, Register):
            return x
        bits = int(x.constant) % 2**x.type.width if isinstance(x.type, ir.IntType) else x.constant
        return Register(x.type, np.full(self.threads, TYPES[x.type](bits)))

    def argument(self, x):
        """What a lowering gets for a value of the kernel."""
        if isinstance(x, Value):
            return x.registers
        if isinstance(x, tuple):
            return Struct([self.argument(v) for v in x])
        if isinstance(x, tensor):
            self.tensors.append(x)
            return self.const(ir.Constant(i64, len(self.tensors) - 1))
        if isinstance(x, (float, np.floating)):
            return self.const(ir.Constant(f32, float(np.float32(x))))
        return self.const(ir.Constant(i64, x)) if isinstance(x, (int, np.integer)) else x

    def unpack(self, value):
        return list(value.parts)

    def pack(self, values):
        return Struct([self.const(v) for v in values])

    def extract_value(self, value, k):
        return value.parts[k]

    def array(self, ty, value):
        numbers = [self.const(ir.Constant(i64, n)) for n in (value.ctypes.data, *value.shape, *value.strides)]
        return numbers[0], numbers[1 : 1 + value.ndim], numbers[1 + value.ndim :]

    def clipped(self, ty, value, axis, end):
        (end,) = set(end.array.astype(np.int64).tolist())
        return value[(slice(None),) * axis + (slice(0, max(end, 0)),)]

    # -- LLVM
    def _same(f):
        def instruction(self, x, y, flags=()):
            x, y = self.const(x), self.const(y)
            assert x.type == y.type, f"{f}: {x.type} and {y.type}"
            return Register(x.type, f(x.array, y.array))

        return instruction

    add, sub, mul = _same(np.add), _same(np.subtract), _same(np.multiply)
    fadd, fsub, fmul = _same(np.add), _same(np.subtract), _same(np.multiply)
    and_, or_, xor = _same(np.bitwise_and), _same(np.bitwise_or), _same(np.bitwise_xor)
    udiv, urem = _same(np.floor_divide), _same(np.remainder)
    shl, lshr = _same(np.left_shift), _same(np.right_shift)

    def _compare(self, sign, x, y):
        return Register(i1, COMPARE[sign](x, y))

    def icmp_unsigned(self, sign, x, y):
        x, y = self.const(x), self.const(y)
        assert x.type == y.type
        return self._compare(sign, x.array, y.array)

    def icmp_signed(self, sign, x, y):
        x, y = self.const(x), self.const(y)
        assert x.type == y.type
        return self._compare(sign, x.array.view(SIGNED[x.type]), y.array.view(SIGNED[y.type]))

    def fcmp_ordered(self, sign, x, y):
        return self._compare(sign, self.const(x).array, self.const(y).array)

    def fcmp_unordered(self, sign, x, y):
        x, y = self.const(x), self.const(y)
        return Register(i1, self._compare(sign, x.array, y.array).array | np.isnan(x.array) | np.isnan(y.array))

    def not_(self, x):
        return Register(i1, ~x.array)

    def since(self, arch):
        return Register(i1, np.full(self.threads, self.arch >= arch))

    def phi(self, type):
        return Phi(type, np.zeros(self.threads, TYPES[type]))

    @property
    def block(self):
        """Where the threads are: a basic block is named by those that run it."""
        return self.active

    def make_tuple(self, _, type, values):
        return self.pack(values)

    def select(self, condition, x, y):
        x, y = self.const(x), self.const(y)
        return Register(x.type, np.where(condition.array, x.array, y.array))

    def zext(self, x, to):
        return Register(to, self.const(x).array.astype(TYPES[to]))

    fpext = fptrunc = zext

    def trunc(self, x, to):
        return Register(to, (self.const(x).array & 2**to.width - 1).astype(TYPES[to]))

    def sext(self, x, to):
        return Register(to, self.const(x).array.view(SIGNED[x.type]).astype(SIGNED[to]).view(TYPES[to]))

    def sitofp(self, x, to):
        return Register(to, self.const(x).array.view(SIGNED[x.type]).astype(TYPES[to]))

    def bitcast(self, x, to):
        if isinstance(to, ir.VectorType):
            halves = self.const(x).array[:, None].view(np.float16)
            return Struct([Register(ir.HalfType(), halves[:, k]) for k in (0, 1)])
        return Register(to, self.const(x).array.view(TYPES[to]))

    def extract_element(self, vector, k):
        return vector.parts[k.constant]

    @contextlib.contextmanager
    def if_then(self, condition):
        before, self.active = self.active, self.active & condition.array
        yield
        self.active = before

    def llvm(self, name, *args):
        return Register(f32, LLVM[name](*(self.const(x).array for x in args)))

    def apply(self, _, function, *numbers):
        return Register(f32, [function(*e) for e in zip(*(self.const(x).array for x in numbers), strict=True)])

    def call(self, inline, args):
        return self.asm(inline.type, inline.asm, inline.constraint, *args)

    def asm(self, ret, text, constraints, *args, effect=True):
        args = [self.const(a) for a in args]
        _agree(text, constraints, ret, args)
        for pattern, meaning in PTX.items():
            if match := re.search(pattern, text):
                return meaning(self, match, *args)
        raise NotImplementedError(f"no meaning for the PTX {text!r}")

    # -- memory
    def reach(self, address, size):
        """The bytes from which a global array's elements are taken, and where in it these addresses (uint64) lie."""
        first, last = (int(f(address)) for f in (np.min, np.max))
        for low, high in self.ranges:
            if low <= first and last + size <= high:
                memory = (ctypes.c_uint8 * (high - low)).from_address(low)
                return np.ctypeslib.as_array(memory), (address - low).astype(np.int64)
        raise IndexError(f"a global access outside all arrays: {first:#x} .. {last:#x}")

    def passes(self, name, addresses, size):
        """Count how often the busiest bank of a pass (128 bytes) is asked for different words by the active lanes."""
        if not self.active.any():
            return
        lanes = min(32, 128 // size)
        for first in range(0, len(addresses), lanes):
            own = addresses[first : first + lanes][self.active[first : first + lanes]]
            words = {int(a) // 4 + k for a in own for k in range(max(1, size // 4))}
            banks = np.bincount([w % 32 for w in words], minlength=32)
            self.ways[name] = max(self.ways.get(name, 0), int(banks.max()))


def _agree(text, constraints, ret, args):
    """The operands of a PTX snippet are of the types that its constraints promise LLVM."""
    letters = {"r": i32, "l": i64, "f": f32}
    names = [c for c in constraints.split(",") if c and not c.startswith("~")]
    outs = () if isinstance(ret, ir.VoidType) else ret.elements if isinstance(ret, ir.LiteralStructType) else (ret,)
    want = [letters[c[-1]] for c in names if c.startswith("=")]
    want += [want[int(c)] if c.isdigit() else letters[c] for c in names if not c.startswith("=")]
    assert want == [*outs, *(a.type for a in args)], f"{text!r} with {constraints!r}: {outs} from {[str(a.type) for a in args]}"


# ---- kernels -------------------------------------------------------------------------------------------------------
def _open(machine, plan):
    starts = [item.start if isinstance(item, (ring, pipeline)) else plan.starts[name] for name, item in plan.items.items()]
    place = lambda item, start: BASE if isinstance(item, (ring, pipeline)) else BASE + start
    return tuple(
        Value(item, machine.const(ir.Constant(i32, place(item, start))))
        for item, start in zip(plan.items.values(), starts, strict=True)
    )


def _call(machine, operation, *args, **kwargs):
    bound = operation.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    args = tuple(getattr(a, "py_func", a) for a in bound.arguments.values())
    if operation is OPS[Plan.open]:
        return _open(machine, args[0])
    fixed = [want is int for want in operation.wants]
    specs = [a.spec if isinstance(a, Value) else spec_of(a, known) for a, known in zip(args, fixed, strict=True)]
    result, emit = operation.type(*specs)
    with np.errstate(all="ignore"):
        out = emit(machine, *map(machine.argument, args))
    if isinstance(result, types.Integer):
        return int(out.array[0])
    if isinstance(result, types.BaseTuple):
        return tuple(int(part.array[0]) for part in out.parts)
    if isinstance(result, types.Float):
        return float(out.array[0])
    if isinstance(result, types.Boolean):
        return bool(out.array[0])
    return None if result is types.void else Value(result, out)


def run(kernel, args, threads=32, arch=90, place=(0, 1)):
    """Run a kernel's own source on what its ops compile to for sm_`arch`, as block place[0] of place[1]; returns the machine,
    for its counts."""
    machine = Machine(threads, arch, place)
    for a in args:
        if isinstance(a, np.ndarray) and a.size:
            machine.ranges.append(np.lib.array_utils.byte_bounds(a))
    ours = mock.patch.object(Op, "__call__", lambda self, *a, **k: _call(machine, self, *a, **k))
    with ours, mock.patch.object(cuda, "syncthreads", lambda: None):
        kernel.py_func(*args)
    return machine
