"""Lines to and from global arrays: a lane moves its part, 4, 8 or 16 bytes, by one access, and a warp so many times 32 adjacent
bytes. Only a kernel's promise (`aligned=True`) leads here, that rows are from 0 to 2 GiB apart, too; without it a line goes
element by element (global_elements.py)."""

from tiles.compiling import ptx
from tiles.compiling.builder import f32, i32, i64, struct
from tiles.compiling.numba_types import SCALARS
from tiles.dtypes import fp32

from .global_elements import GUARD

BYTES = (4, 8, 16)  # of a lane's part


def part_bytes(spec):
    """The bytes of a lane's part of a line."""
    return spec.elements * spec.dtype.itemsize


def check(name, array, spec, aligned):
    """TypeError if the kernel cannot promise `aligned` for lines of type `spec` and this array."""
    if aligned is not True or spec.dtype is not SCALARS[array.dtype] or part_bytes(spec) not in BYTES:
        parts = ", ".join(map(str, BYTES))
        raise TypeError(
            f"{name}: aligned=True takes lines of the array's dtype of which a lane has {parts} bytes, got {spec}, {array}, "
            f"{aligned=}"
        )


def _access(b, ty, spec, array, at, rows, cols):
    """(does this lane's part lie inside the array, as a register, its address). Extents are below 2**31, and so are the bytes
    from row to row, so that an address in a loop over rows is one instruction, and a comparison another."""
    data, extents, strides = b.array(ty, array)
    at, rows, cols = b.unpack(at), rows % ty.ndim, cols % ty.ndim
    narrow = lambda x: b.trunc(x, i32) if x.type.width > 32 else x
    column = b.add(narrow(at[cols]), b.mul(b.lane(), b.u32(spec.elements)))
    for axis, index in enumerate(at):
        if axis not in (rows, cols):
            data = b.add(data, b.mul(b.sext(index, i64) if index.type.width < 64 else index, strides[axis]))
    data = ptx.opaque(b, b.add(data, b.zext(b.mul(column, b.u32(spec.dtype.itemsize)), i64)))
    row = narrow(at[rows])
    fits = [b.icmp_unsigned("<", x, narrow(extents[axis])) for x, axis in ((row, rows), (column, cols))]
    return b.zext(b.and_(*fits), i32), b.add(data, b.mul(b.zext(row, i64), b.zext(narrow(strides[rows]), i64)))


def _registers(words):
    """The operands of an access of so many words in PTX: a vector of $0 and so on."""
    names = ", ".join(f"${k}" for k in range(words))
    return f"{{{names}}}" if words > 1 else names


def _kind(words):
    return f"v{words}.b32" if words > 1 else "b32"


def lower_load(ty, spec, rows, cols):
    """The lowering of a load of a line."""
    words = part_bytes(spec) // 4
    guard = f".reg .pred p;\nsetp.ne.u32 p, ${words + 1}, 0;\n" + "".join(f"mov.b32 ${k}, 0;\n" for k in range(words))
    text = f"{{{guard}@p ld.global.{_kind(words)} {_registers(words)}, [${words}];}}"

    def lower(b, array, _, at, *__):
        inside, address = _access(b, ty, spec, array, at, rows, cols)
        kind = struct([i32] * words) if words > 1 else i32
        loaded = b.asm(kind, text, "=&r," * words + "l,r", address, inside)
        registers = b.unpack(loaded) if words > 1 else [loaded]
        return b.pack([b.bitcast(x, f32) if spec.dtype is fp32 else x for x in registers])

    return lower


def lower_store(ty, spec, rows, cols):
    """The lowering of a store of a line."""
    words = part_bytes(spec) // 4
    guard = GUARD.replace("$2", f"${words + 1}")
    text = f"{{{guard}@p st.global.{_kind(words)} [${words}], {_registers(words)};}}"

    def lower(b, array, value, at, *_):
        inside, address = _access(b, ty, spec, array, at, rows, cols)
        b.do(text, *[b.bitcast(x, i32) for x in b.unpack(value)], address, inside)

    return lower
