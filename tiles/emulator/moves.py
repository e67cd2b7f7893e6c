"""Instructions that move data: mov, ld and st of all state spaces, red, shuffles, votes, movmatrix."""

import numpy as np

from ..layout import LANES
from .memory import BASE, GENERIC_BYTES, LOCAL, RANK_SHIFT, SHARED
from .table import TYPES, means, operand, write_register
from .text import BYTES, Address, Imm, Reg, Symbol


# ---- mov -----------------------------------------------------------------------------------------------------------
@means(r"mov\.([subf](?:16|32|64)|pred)")
def _(match, w, instr):
    dst, source = instr.operands
    dtype = TYPES[match[1]]
    if isinstance(dst, list):  # unpacks a register into several
        octets, at_byte = w.get(source)[:, None].view(np.uint8), 0
        for part in dst:
            if isinstance(part, Reg):
                value = np.ascontiguousarray(octets[:, at_byte : at_byte + part.width])
                w.set(part, value.view(f"u{part.width}")[:, 0])
                at_byte += part.width
            else:
                at_byte += octets.shape[1] // len(dst)
    elif isinstance(source, list):
        width = dst.width // len(source)
        w.set(dst, np.stack([operand(part, f"u{width}")(w) for part in source], 1).view(f"u{dst.width}")[:, 0])
    elif isinstance(source, Reg):
        w.move(dst, source)
    elif isinstance(source, Imm):
        value = operand(source, dtype)(w).copy()  # a new one: fences tell values by their identity
        write_register(w, dst, value.view(f"u{value.itemsize}"))
    else:
        write_register(w, dst, symbol_value(w, source.name, dst.width))


def symbol_value(w, name, width):
    """The value of a special register, or the address of a variable or a parameter, in all lanes, as an unsigned integer of
    `width` bytes."""
    block = w.block
    if name in w.program.parameters:
        return np.full(LANES, w.block.cluster.block_address + w.program.parameters[name][0], f"u{width}")
    if name in w.program.dynamic:
        return np.full(LANES, block.rank << RANK_SHIFT | BASE, f"u{width}")
    if name in w.program.shared:
        return np.full(LANES, block.rank << RANK_SHIFT | block.declared + w.program.shared[name], f"u{width}")
    if name in w.program.local:
        return np.full(LANES, LOCAL + w.program.local[name], f"u{width}")
    if name == "%tid.x":
        return np.arange(LANES, dtype=np.uint32) + np.uint32(LANES * w.index)
    if name == "%laneid":
        return np.arange(LANES, dtype=np.uint32)
    cluster = block.cluster
    numbers = {"%ntid": (LANES * block.size, 1, 1), "%ctaid": block.index, "%nctaid": block.grid, "%tid": (0, 0, 0)}
    numbers |= {"%cluster_ctarank": (block.rank,), "%cluster_nctarank": (cluster.size,), "%dynamic_smem_size": (block.dynamic,)}
    register, _, axis = name.partition(".")
    if register not in numbers:
        raise NotImplementedError(f"no meaning for the special register {name}")
    return np.full(LANES, numbers[register]["xyz".index(axis or "x")], np.uint32)


@means(r"cvta(\.to)?\.(param|global|shared|local)\.u64")
def _(match, w, instr):
    """Convert an address in a state space to a generic address, or back with `.to`. The two differ for shared memory alone."""
    source_operand = (
        operand(instr.operands[1], np.uint64)(w)
        if isinstance(instr.operands[1], Reg)
        else symbol_value(w, instr.operands[1].name, 8)
    )
    shift = np.uint64(SHARED if match[2] == "shared" else 0)
    w.set(instr.operands[0], source_operand - shift if match[1] else source_operand + shift)


# ---- ld, st --------------------------------------------------------------------------------------------------------
def address(w, source_operand: Address, dtype=np.uint64):
    """The address [base + offset] of an operand in each lane, as integers of this type."""
    if isinstance(source_operand.base, Symbol):
        base = symbol_value(w, source_operand.base.name, np.dtype(dtype).itemsize)
    else:
        base = operand(source_operand.base, dtype)(w)
    return base + np.array(source_operand.offset).astype(dtype) if source_operand.offset else base


def _as_list(source_operand):
    """The registers of an operand {a, b, ...}, or the one register."""
    return source_operand if isinstance(source_operand, list) else [source_operand]


VECTOR_TYPE = r"(?:\.(v2|v4))?\.([subf](?:8|16|32|64))"
QUALIFIERS = r"(?:\.(?:weak|volatile|relaxed|acquire|release|cta|gpu|sys|cluster))*(?:\.nc)?(?:\.L\d::\w+)*"


@means(r"ld\.param" + VECTOR_TYPE)
def _(match, w, instr):
    targets, dtype = _as_list(instr.operands[0]), TYPES[match[2]]
    start, size = w.program.parameters[instr.operands[1].base.name][0] + instr.operands[1].offset, np.dtype(dtype).itemsize
    for k, dst in enumerate(targets):
        value = w.block.cluster.parameters[start + k * size : start + (k + 1) * size]
        write_register(w, dst, np.full(LANES, np.frombuffer(value, dtype)[0]).view(_integer_type(dtype)))


def _split_by_space(w, space, addresses):
    """Yields (state space, addresses in it). Without a space the addresses are generic, and the active lanes may access several
    spaces: then the warp's mask has, at each step, the lanes that access the space of that step."""
    if space or not np.count_nonzero((addresses - np.uint64(LOCAL) < SHARED + GENERIC_BYTES - LOCAL)[w.mask]):
        yield space or ".global", addresses
        return
    active, full = w.mask, w.full
    # Differences are unsigned: an address below a window becomes a number far above its size.
    shared, local = addresses - np.uint64(SHARED) < GENERIC_BYTES, addresses - np.uint64(LOCAL) < GENERIC_BYTES
    for space, lanes, in_space in (
        (".global", ~(shared | local), addresses),
        (".local", local, addresses),
        (".shared", shared, addresses - np.uint64(SHARED)),
    ):
        if (selected := active & lanes).any():
            w.mask, w.full = selected, bool(selected.all())
            yield space, in_space
    w.mask, w.full = active, full


def _addresses_by_space(w, space, source_operand):
    """The pairs (state space, addresses) of an address operand, as _split_by_space yields them."""
    if space and space.startswith(".shared"):
        return [(".shared", address(w, source_operand, np.uint32))]
    return _split_by_space(w, space, address(w, source_operand))


def _integer_type(dtype):
    """The type itself if it is an integer type, else the unsigned integers of its size."""
    dtype = np.dtype(dtype)
    return dtype if dtype.kind in "iu" else np.dtype(f"u{dtype.itemsize}")


@means(rf"ld{QUALIFIERS}(\.global|\.local|\.shared(?:::cta|::cluster)?)?{QUALIFIERS}{VECTOR_TYPE}")
def _(match, w, instr):
    space, vector, name = match.groups()
    targets, source = _as_list(instr.operands[0]), instr.operands[1]
    dtype, size = _integer_type(TYPES[name]), BYTES[name]
    result = np.zeros((LANES, size * len(targets)), np.uint8)
    for place, where in _addresses_by_space(w, space, source):
        if place == ".shared":
            result[w.mask] = w.read_shared(where.astype(np.uint32), result.shape[1], allow_unwritten=True)
        elif place == ".local":
            result[w.mask] = w.local[w.local_bytes_of(where, result.shape[1])]
        else:
            result[w.mask] = w.block.cluster.memory.load(w, where[w.mask], result.shape[1])
    for k, dst in enumerate(targets):
        write_register(w, dst, np.ascontiguousarray(result[:, k * size : (k + 1) * size]).view(dtype)[:, 0])


@means(rf"st{QUALIFIERS}(\.global|\.local|\.shared(?:::cta|::cluster)?)?{QUALIFIERS}{VECTOR_TYPE}")
def _(match, w, instr):
    space, vector, name = match.groups()
    dst, values = instr.operands[0], _as_list(instr.operands[1])
    values = np.concatenate([operand(v, f"u{BYTES[name]}")(w)[:, None].view(np.uint8) for v in values], 1)
    for place, where in _addresses_by_space(w, space, dst):
        if place == ".shared":
            w.write_shared(where.astype(np.uint32), values[w.mask])
        elif place == ".local":
            w.local[w.local_bytes_of(where, values.shape[1])] = values[w.mask]
        else:
            w.block.cluster.memory.store(w, where[w.mask], values[w.mask])


@means(rf"red{QUALIFIERS}\.global{QUALIFIERS}\.add\.(f32|u32)")
def _(match, w, instr):
    dtype, memory = TYPES[match[1]], w.block.cluster.memory
    for place, x in zip(address(w, instr.operands[0])[w.mask][:, None], operand(instr.operands[1], dtype)(w)[w.mask]):
        total = memory.load(w, place, x.nbytes).view(dtype) + x  # one by one, for lanes may name the same place
        memory.store(w, place, total.view(np.uint8))


@means(rf"red{QUALIFIERS}\.global{QUALIFIERS}\.add\.v4\.f32")
def _(match, w, instr):
    memory = w.block.cluster.memory
    values = np.stack([operand(x, np.float32)(w) for x in instr.operands[1]], -1)
    for place, four in zip(address(w, instr.operands[0])[w.mask], values[w.mask]):
        if place % np.uint64(16):
            raise w.hazard(f"red.global.add.v4.f32 at {int(place):#x}, which is no multiple of 16")
        places = (place + np.arange(0, 16, 4))[:, None]
        for one, x in zip(places, four):
            memory.store(w, one, (memory.load(w, one, 4).view(np.float32) + x).view(np.uint8))


# ---- lanes ---------------------------------------------------------------------------------------------------------
@means(r"shfl\.sync\.(bfly|idx|up|down)\.b32")
def _(match, w, instr):
    dst, *source_operand = instr.operands
    value, lane_operand, clamp, members = (operand(x, np.uint32)(w) for x in source_operand)
    check_whole_warp(w, "shfl.sync", members)
    lane = np.arange(LANES)
    lane_operand = lane_operand.astype(np.int64) & 31
    bound = clamp.astype(np.int64) & 31
    segment = clamp.astype(np.int64) >> 8 & 31
    end = lane & segment | bound & ~segment
    source = {
        "bfly": lane ^ lane_operand,
        "idx": lane & segment | lane_operand & ~segment,
        "up": lane - lane_operand,
        "down": lane + lane_operand,
    }[match[1]]
    valid = source >= end if match[1] == "up" else source <= end
    result = value[np.where(valid, source, lane)]
    if isinstance(dst, list):
        w.set(dst[1], valid)
        dst = dst[0]
    w.set(dst, result)


@means(r"vote\.sync\.(ballot\.b32|any\.pred|all\.pred|uni\.pred)")
def _(match, w, instr):
    dst, flag, members = instr.operands
    check_whole_warp(w, "vote.sync", operand(members, np.uint32)(w))
    flags = operand(flag, np.bool_)(w)
    if match[1] == "ballot.b32":
        w.set(dst, np.full(LANES, flags @ (1 << np.arange(LANES)), np.uint32))
    else:
        count = flags.sum()
        w.set(dst, np.full(LANES, {"any": count > 0, "all": count == LANES, "uni": count in (0, LANES)}[match[1][:3]]))


@means(r"elect\.sync")
def _(_, w, instr):
    (_, chosen), members = instr.operands
    check_whole_warp(w, "elect.sync", operand(members, np.uint32)(w))
    w.set(chosen, np.arange(LANES) == 0)


@means(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16")
def _(match, w, instr):
    w.converged("movmatrix")
    x, lane = w.get(instr.operands[1]), np.arange(LANES)
    matrix = np.zeros((8, 8), np.uint16)
    for h in (0, 1):
        matrix[lane // 4, lane % 4 * 2 + h] = x >> np.uint32(16 * h) & np.uint32(0xFFFF)
    low, high = (matrix[lane % 4 * 2 + h, lane // 4].astype(np.uint32) for h in (0, 1))
    w.set(instr.operands[0], low | high << np.uint32(16))


def check_whole_warp(w, operation, members):
    """Raises a Hazard unless all lanes execute this together, and its member mask names all of them."""
    w.converged(operation)
    if (members != np.uint32(0xFFFFFFFF)).any():
        raise w.hazard(
            f"{operation} with members {int(members[0]):#x}: the emulator takes only 0xffffffff, a whole warp", "language"
        )
