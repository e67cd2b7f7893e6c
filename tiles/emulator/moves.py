"""What moves data: mov, ld and st of all spaces, shuffles and votes."""

import numpy as np

from ..layout import LANES
from .memory import BASE, GENERIC_BYTES, LOCAL, SHARED, WINDOW
from .table import TYPES, into, means, operand
from .text import BYTES, Address, Imm, Reg, Symbol


# ---- mov -----------------------------------------------------------------------------------------------------------
@means(r"mov\.([subf](?:16|32|64)|pred)")
def _(match, w, at):
    to, source = at.operands
    kind = TYPES[match[1]]
    if isinstance(to, list):  # to the parts of a register
        octets, at_byte = w.get(source)[:, None].view(np.uint8), 0
        for part in to:
            if isinstance(part, Reg):
                value = np.ascontiguousarray(octets[:, at_byte : at_byte + part.width])
                w.set(part, value.view(f"u{part.width}")[:, 0])
                at_byte += part.width
            else:
                at_byte += octets.shape[1] // len(to)
    elif isinstance(source, list):
        width = to.width // len(source)
        w.set(to, np.stack([operand(part, f"u{width}")(w) for part in source], 1).view(f"u{to.width}")[:, 0])
    elif isinstance(source, Reg):
        w.move(to, source)
    elif isinstance(source, Imm):
        value = operand(source, kind)(w).copy()  # a new one: fences tell values by their identity
        into(w, to, value.view(f"u{value.itemsize}"))
    else:
        into(w, to, _special(w, source.name, to.width))


def _special(w, name, width):
    block = w.block
    if name in w.program.parameters:
        return np.full(LANES, w.block.cluster.block_address + w.program.parameters[name][0], f"u{width}")
    if name in w.program.dynamic:
        return np.full(LANES, block.rank << WINDOW | BASE, f"u{width}")
    if name in w.program.shared:
        return np.full(LANES, block.rank << WINDOW | block.declared + w.program.shared[name], f"u{width}")
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
def _(match, w, at):
    """Convert between a space's addresses and generic ones, which differ for shared memory alone."""
    source_operand = (
        operand(at.operands[1], np.uint64)(w) if isinstance(at.operands[1], Reg) else _special(w, at.operands[1].name, 8)
    )
    shift = np.uint64(SHARED if match[2] == "shared" else 0)
    w.set(at.operands[0], source_operand - shift if match[1] else source_operand + shift)


# ---- ld, st --------------------------------------------------------------------------------------------------------
def address(w, source_operand: Address, kind=np.uint64):
    """The address that each lane names."""
    if isinstance(source_operand.base, Symbol):
        base = _special(w, source_operand.base.name, np.dtype(kind).itemsize)
    else:
        base = operand(source_operand.base, kind)(w)
    return base + np.array(source_operand.offset).astype(kind) if source_operand.offset else base


def _targets(source_operand):
    return source_operand if isinstance(source_operand, list) else [source_operand]


KINDS = r"(?:\.(v2|v4))?\.([subf](?:8|16|32|64))"
ORDER = r"(?:\.(?:weak|volatile|relaxed|acquire|release|cta|gpu|sys|cluster))*(?:\.nc)?(?:\.L\d::\w+)*"


@means(r"ld\.param" + KINDS)
def _(match, w, at):
    targets, kind = _targets(at.operands[0]), TYPES[match[2]]
    start, size = w.program.parameters[at.operands[1].base.name][0] + at.operands[1].offset, np.dtype(kind).itemsize
    for k, to in enumerate(targets):
        value = w.block.cluster.parameters[start + k * size : start + (k + 1) * size]
        into(w, to, np.full(LANES, np.frombuffer(value, kind)[0]).view(_raw(kind)))


def _in_spaces(w, space, where):
    """Yields (space, addresses there) with those active lanes that reach into it: of a generic address, which names no space,
    the lanes may reach into several, and take turns."""
    if space or not np.count_nonzero((where - np.uint64(LOCAL) < SHARED + GENERIC_BYTES - LOCAL)[w.mask]):
        yield space or ".global", where
        return
    active, full = w.mask, w.full
    # unsigned: what is less is far above
    shared, local = where - np.uint64(SHARED) < GENERIC_BYTES, where - np.uint64(LOCAL) < GENERIC_BYTES
    for space, lanes, addresses in (
        (".global", ~(shared | local), where), (".local", local, where), (".shared", shared, where - np.uint64(SHARED)),
    ):  # fmt: skip
        if (mine := active & lanes).any():
            w.mask, w.full = mine, bool(mine.all())
            yield space, addresses
    w.mask, w.full = active, full


def _reach(w, space, source_operand):
    """(space, addresses) that an operand reaches, as _in_spaces gives them."""
    if space and space.startswith(".shared"):
        return [(".shared", address(w, source_operand, np.uint32))]
    return _in_spaces(w, space, address(w, source_operand))


def _raw(kind):
    kind = np.dtype(kind)
    return kind if kind.kind in "iu" else np.dtype(f"u{kind.itemsize}")


@means(rf"ld{ORDER}(\.global|\.local|\.shared(?:::cta|::cluster)?)?{ORDER}{KINDS}")
def _(match, w, at):
    space, vector, name = match.groups()
    targets, source = _targets(at.operands[0]), at.operands[1]
    kind, size = _raw(TYPES[name]), BYTES[name]
    result = np.zeros((LANES, size * len(targets)), np.uint8)
    for place, where in _reach(w, space, source):
        if place == ".shared":
            result[w.mask] = w.read_shared(where.astype(np.uint32), result.shape[1], plain=True)
        elif place == ".local":
            result[w.mask] = w.local[w.local_bytes_of(where, result.shape[1])]
        else:
            result[w.mask] = w.block.cluster.memory.load(w, where[w.mask], result.shape[1])
    for k, to in enumerate(targets):
        into(w, to, np.ascontiguousarray(result[:, k * size : (k + 1) * size]).view(kind)[:, 0])


@means(rf"st(\.global|\.local|\.shared(?:::cta|::cluster)?)?{ORDER}{KINDS}")
def _(match, w, at):
    space, vector, name = match.groups()
    to, values = at.operands[0], _targets(at.operands[1])
    values = np.concatenate([operand(v, f"u{BYTES[name]}")(w)[:, None].view(np.uint8) for v in values], 1)
    for place, where in _reach(w, space, to):
        if place == ".shared":
            w.write_shared(where.astype(np.uint32), values[w.mask])
        elif place == ".local":
            w.local[w.local_bytes_of(where, values.shape[1])] = values[w.mask]
        else:
            w.block.cluster.memory.store(w, where[w.mask], values[w.mask])


@means(rf"red{ORDER}\.global{ORDER}\.add\.(f32|u32)")
def _(match, w, at):
    kind, memory = TYPES[match[1]], w.block.cluster.memory
    for place, x in zip(address(w, at.operands[0])[w.mask][:, None], operand(at.operands[1], kind)(w)[w.mask]):
        total = memory.load(w, place, x.nbytes).view(kind) + x  # one by one, for lanes may name the same place
        memory.store(w, place, total.view(np.uint8))


@means(rf"red{ORDER}\.global{ORDER}\.add\.v4\.f32")
def _(match, w, at):
    memory = w.block.cluster.memory
    values = np.stack([operand(x, np.float32)(w) for x in at.operands[1]], -1)
    for place, four in zip(address(w, at.operands[0])[w.mask], values[w.mask]):
        if place % np.uint64(16):
            raise w.hazard(f"an addition to 16 bytes at {int(place):#x}, which is no multiple")
        places = (place + np.arange(0, 16, 4))[:, None]
        for one, x in zip(places, four):
            memory.store(w, one, (memory.load(w, one, 4).view(np.float32) + x).view(np.uint8))


# ---- lanes ---------------------------------------------------------------------------------------------------------
@means(r"shfl\.sync\.(bfly|idx|up|down)\.b32")
def _(match, w, at):
    to, *source_operand = at.operands
    value, by, clamp, members = (operand(x, np.uint32)(w) for x in source_operand)
    everyone(w, "shfl.sync", members)
    lane = np.arange(LANES)
    by, bound, segment = by.astype(np.int64) & 31, clamp.astype(np.int64) & 31, clamp.astype(np.int64) >> 8 & 31
    end = lane & segment | bound & ~segment
    source = {"bfly": lane ^ by, "idx": lane & segment | by & ~segment, "up": lane - by, "down": lane + by}[match[1]]
    valid = source >= end if match[1] == "up" else source <= end
    result = value[np.where(valid, source, lane)]
    if isinstance(to, list):
        w.set(to[1], valid)
        to = to[0]
    w.set(to, result)


@means(r"vote\.sync\.(ballot\.b32|any\.pred|all\.pred|uni\.pred)")
def _(match, w, at):
    to, flag, members = at.operands
    everyone(w, "vote.sync", operand(members, np.uint32)(w))
    flags = operand(flag, np.bool_)(w)
    if match[1] == "ballot.b32":
        w.set(to, np.full(LANES, flags @ (1 << np.arange(LANES)), np.uint32))
    else:
        count = flags.sum()
        w.set(to, np.full(LANES, {"any": count > 0, "all": count == LANES, "uni": count in (0, LANES)}[match[1][:3]]))


@means(r"elect\.sync")
def _(_, w, at):
    (_, chosen), members = at.operands
    everyone(w, "elect.sync", operand(members, np.uint32)(w))
    w.set(chosen, np.arange(LANES) == 0)


@means(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16")
def _(match, w, at):
    w.converged("movmatrix")
    x, lane = w.get(at.operands[1]), np.arange(LANES)
    matrix = np.zeros((8, 8), np.uint16)
    for h in (0, 1):
        matrix[lane // 4, lane % 4 * 2 + h] = x >> np.uint32(16 * h) & np.uint32(0xFFFF)
    low, high = (matrix[lane % 4 * 2 + h, lane // 4].astype(np.uint32) for h in (0, 1))
    w.set(at.operands[0], low | high << np.uint32(16))


def everyone(w, operation, members):
    """A Hazard unless all lanes are here, and meant."""
    w.converged(operation)
    if (members != np.uint32(0xFFFFFFFF)).any():
        raise w.hazard(f"{operation} with members {int(members[0]):#x}: only whole warps are emulated", "language")
