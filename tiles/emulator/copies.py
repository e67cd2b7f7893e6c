"""Asynchronous copies: cp.async, TMA's loads and stores by tensor maps, st.async. The emulator completes them as late as the
waits allow."""

import math

import ml_dtypes
import numpy as np

from ..interpreter.shadow import VALID, Event
from ..layout import LANES
from .barriers import mbarrier, only_lane
from .moves import address
from .table import TYPES, means, operand

SIZES = {"FLOAT32": 4, "TFLOAT32": 4, "BFLOAT16": 2, "FLOAT16": 2, "UINT8": 1, "INT32": 4}
ELEMENTS = {"FLOAT32": np.float32, "TFLOAT32": np.float32, "BFLOAT16": ml_dtypes.bfloat16, "FLOAT16": np.float16}
ELEMENTS |= {"INT32": np.int32, "UINT8": np.uint8}
FOLDS = {"add": np.add, "min": np.fmin, "max": np.fmax}
TENSOR_ALIGN = 128  # bytes: the alignment of a tensor copy's address in shared memory (PTX ISA, "cp.async.bulk.tensor")
SWIZZLE_BITS = {"NONE": 0, "32B": 1, "64B": 3, "128B": 7}  # which bits of a chunk's number a swizzle changes


# ---- cp.async ------------------------------------------------------------------------------------------------------
@means(r"cp\.async\.(ca|cg)\.shared(?:::cta)?\.global(?:\.L2::\w+)?")
def _(match, w, instr):
    dst, source, size, *used = instr.operands
    size = int(size.text)
    if match[1] == "cg" and size != 16:
        raise w.hazard(f"cp.async.cg copies 16 bytes, not {size}", "language")
    owner, lanes, cells = w._cells(address(w, dst, np.uint32), size)
    counts = operand(used[0], np.uint32)(w)[lanes].astype(np.int64) if used else np.full(len(lanes), size)
    if (counts > size).any():
        raise w.hazard(f"cp.async of {counts.max()} bytes into {size}")
    sources, memory = address(w, source)[lanes], w.block.cluster.memory
    if (sources % np.uint64(size))[counts > 0].any():
        raise w.hazard(
            f"cp.async of {size} bytes from an address that is no multiple of {size}: copy fewer at once (vector_bytes=)"
        )
    w._check_access(owner.shadow.unwritable(w.knowledge(lanes), cells), "copies into shared memory")
    for n in {int(n) for n in counts} - {0}:
        memory.locate(w, sources[counts == n], 1), memory.locate(w, sources[counts == n] + np.uint64(n - 1), 1)

    def complete():
        arrived = np.zeros(cells.shape, np.uint8)
        for n in {int(n) for n in counts} - {0}:
            copies_of_n = counts == n
            inside, source = memory.locate(w, sources[copies_of_n], 1)
            arrived[copies_of_n, :n] = inside[source + np.arange(n)]
        owner.shadow.bytes[cells] = arrived
        owner.shadow.state[cells] = VALID

    copy = w.block.cluster.start(complete, "the copy into shared memory", cells.size, w.place())
    copy.awaited = False
    w.copies.append(copy)
    event = Event("copy", f"the end of {copy.operation}", copy.place)
    owner.shadow.start_filling((w.copier + lanes)[:, None], len(w.groups) + 1, cells, event)


@means(r"cp\.async\.commit_group")
def _(_, w, instr):
    w.converged("cp.async.commit_group")
    w.groups.append(w.copies)
    w.copies = []


@means(r"cp\.async\.wait_(group|all)")
def _(match, w, instr):
    w.converged("cp.async.wait_group")
    if match[1] == "all":
        w.groups.append(w.copies)
        w.copies = []
    newer = int(instr.operands[0].text) if instr.operands else 0
    done = max(0, len(w.groups) - newer)
    copies = [copy for group in w.groups[:done] for copy in group if not copy.awaited]
    w.wait_until(lambda: all(copy.done for copy in copies), lambda: "its copies")
    for copy in copies:
        copy.awaited = True
    lanes = np.arange(LANES)
    w.clocks[lanes, w.copier + lanes] = np.maximum(w.clocks[lanes, w.copier + lanes], done)


# ---- tensor maps ---------------------------------------------------------------------------------------------------
class TensorMap:
    """The arguments of cuTensorMapEncodeTiled for an array at an address, and the bytes of a box that follow from them."""

    def __init__(self, encoding, pointer):
        self.encoding, self.pointer, self.size = encoding, pointer, SIZES[encoding.dtype]
        self.steps = (self.size, *encoding.strides)
        self.nbytes = math.prod(encoding.box) * self.size

    def box(self, coordinates):
        """(byte offsets of the elements of the box at these coordinates from the array's first element, which of them lie
        inside the array), innermost axis last."""
        offset, inside = np.zeros((), np.int64), np.ones((), bool)
        for start, extent, count, step in zip(
            coordinates, self.encoding.box, self.encoding.extents, self.steps
        ):  # innermost first
            index = np.arange(extent) + start
            offset, inside = offset[..., None] if offset.ndim else offset, inside
            offset = np.add.outer(index * step, offset) if offset.ndim else index * step
            inside = (
                np.logical_and.outer((index >= 0) & (index < count), inside) if inside.ndim else (index >= 0) & (index < count)
            )
        return offset, inside

    def cells(self, first):
        """The addresses in shared memory of the bytes of each element of a box that begins at `first`: rows one after the
        other, chunks of 16 bytes swizzled by their address."""
        inner = self.encoding.box[0] * self.size
        rows = self.nbytes // inner
        addresses = first + np.arange(rows)[:, None] * inner + np.arange(inner)
        addresses = addresses ^ (addresses >> 7 & SWIZZLE_BITS[self.encoding.swizzle]) << 4
        return addresses.reshape(-1, self.size)


def _map(w, operand_, operation):
    pointer = int(address(w, operand_)[w.mask][0])
    tensor_map = w.block.cluster.maps.get(pointer)
    if tensor_map is None:
        raise w.hazard(f"{operation}: no tensor map lies at {pointer:#x}", "storage")
    return tensor_map


def _box(w, target, operation):
    lane = only_lane(w, operation)
    tensor_map = _map(w, target, operation)
    coordinates = [int(operand(x, np.int32)(w)[lane]) for x in target.coordinates]
    if len(coordinates) != len(tensor_map.encoding.box):
        raise w.hazard(
            f"{operation}: {len(coordinates)} coordinates for a tensor map of {len(tensor_map.encoding.box)} axes", "storage"
        )
    offsets, inside = (x.reshape(-1) for x in tensor_map.box(coordinates))
    return lane, tensor_map, offsets, inside


def _check_box_start(w, first, operation):
    """Raises a Hazard unless a box may begin at this address of shared memory."""
    if first % TENSOR_ALIGN:
        raise w.hazard(f"{operation}: shared memory at {first}, which is no multiple of {TENSOR_ALIGN}")


@means(
    r"cp\.async\.bulk\.tensor\.(\d)d\.shared::(cta|cluster)\.global(?:\.tile)?\.mbarrier::complete_tx::bytes"
    r"(\.multicast::cluster)?(?:\.L2::cache_hint)?"
)
def _(match, w, instr):
    dst, source, bar, *mask = instr.operands
    operation = "the TMA load"
    lane, tensor_map, offsets, inside = _box(w, source, operation)
    first, bar_address = int(address(w, dst, np.uint32)[lane]), int(address(w, bar, np.uint32)[lane])
    block, first = w.find_owner(first)
    bar_block, bar_address = w.find_owner(bar_address)
    if match[3]:
        ranks = [k for k in range(16) if int(operand(mask[0], np.uint32)(w)[lane]) >> k & 1]
        if any(k >= len(block.cluster.blocks) for k in ranks):
            raise w.hazard(f"{operation}: the cluster has no block {max(ranks)}")
        owners = [block.cluster.blocks[k] for k in ranks]
    elif bar_block is not block:
        raise w.hazard(f"{operation} writes to one block and signals another's mbarrier", "storage")
    else:
        owners = [block]
    _check_box_start(w, first, operation)
    low, memory = _array(w, tensor_map, offsets, inside, operation)
    for owner in owners:
        _load(w, lane, owner, tensor_map, first, bar_address, tensor_map.pointer + offsets - low, inside, memory, operation)


def _array(w, tensor_map, offsets, inside, operation):
    if not inside.any():
        return tensor_map.pointer, np.zeros(0, np.uint8)
    addresses = tensor_map.pointer + offsets[inside]
    try:
        return w.block.cluster.memory.find_array(int(addresses.min()), int(addresses.max()) + tensor_map.size)
    except IndexError as error:
        raise w.hazard(f"{operation}: {error}") from None


def _load(w, lane, owner, tensor_map, first, bar_address, places, inside, memory, operation):
    thread, shadow = w.threads[lane], owner.shadow
    cells = tensor_map.cells(first)
    extent = slice(first, first + tensor_map.nbytes)
    w.check_range(first, first + tensor_map.nbytes, 1, owner)
    owner.check_reachable(thread, operation)
    bar = mbarrier(w, owner, bar_address, w.lane_knowledge(lane, True))
    w._check_access(shadow.unwritable(w.lane_knowledge(lane, True), extent), operation)

    def complete():
        arrived = np.zeros((len(cells), tensor_map.size), np.uint8)
        arrived[inside] = memory[places[inside][:, None] + np.arange(tensor_map.size)]
        if tensor_map.encoding.dtype == "TFLOAT32":
            arrived = _to_tf32(arrived)
        shadow.bytes[cells] = arrived
        shadow.state[extent] = VALID
        bar.end_copy(copy)

    copy = w.block.cluster.start(complete, operation, tensor_map.nbytes, w.place())
    time = bar.begin_copy(thread, copy)
    for waiting in () if owner is w.block else w.block.mbarriers:  # a wait for the copy also learns what the copy waited for
        bar.clock[waiting.agent] = max(bar.clock[waiting.agent], thread.clock[waiting.agent])
    shadow.start_filling(bar.agent, time, extent, Event("copy", f"the end of {operation}", copy.place))


def _to_tf32(raw):
    """fp32 numbers, as bytes, rounded to tf32 as TMA does: ten bits of mantissa, ties to even."""
    bits = raw.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0xFFF + (bits >> np.uint64(13) & 1)) & np.uint64(0xFFFFE000)
    finite = bits >> np.uint64(23) & 0xFF != 0xFF
    return np.where(finite, rounded, bits).astype(np.uint32).view(np.uint8)


@means(
    r"cp(?:\.reduce)?\.async\.bulk\.tensor\.(\d)d\.global\.shared::cta(?:\.(add|min|max))?(?:\.tile)?\.bulk_group(?:\.L2::cache_hint)?"
)
def _(match, w, instr):
    target, source = instr.operands
    operation = "the TMA store"
    lane, tensor_map, offsets, inside = _box(w, target, operation)
    _, first = w.find_owner(int(address(w, source, np.uint32)[lane]))
    _check_box_start(w, first, operation)
    w.check_range(first, first + tensor_map.nbytes, 1)
    low, memory = _array(w, tensor_map, offsets, inside, operation)
    shadow, extent = w.block.shadow, slice(first, first + tensor_map.nbytes)
    w._check_access(shadow.unreadable(w.lane_knowledge(lane, True), extent), operation)
    cells, places = tensor_map.cells(first), tensor_map.pointer + offsets - low
    agent, dtype, fold = w.block.store_agents[w.index], ELEMENTS[tensor_map.encoding.dtype], match[2]

    def complete():
        octets = shadow.bytes[cells[inside]]
        targets = places[inside][:, None] + np.arange(tensor_map.size)
        if fold:
            old = np.ascontiguousarray(memory[targets]).view(dtype)
            octets = FOLDS[fold](old, octets.view(dtype)).astype(dtype).view(np.uint8)
        memory[targets] = octets

    store = w.block.cluster.start(complete, operation, tensor_map.nbytes, w.place())
    store.lane = lane
    shadow.note_read(agent, len(w.store_groups) + 1, extent, Event("read", operation, store.place))
    w.stores.append(store)


@means(r"cp\.async\.bulk\.commit_group")
def _(_, w, instr):
    lanes = np.flatnonzero(w.mask)
    if any(store.lane not in lanes for store in w.stores):
        return  # the stores are other lanes', which have not committed
    w.store_groups.append(w.stores)
    w.stores = []


@means(r"cp\.async\.bulk\.wait_group(\.read)?")
def _(match, w, instr):
    newer, lanes = int(instr.operands[0].text), np.flatnonzero(w.mask)
    group_numbers = [k for k, group in enumerate(w.store_groups, 1) if any(store.lane in lanes for store in group)]
    done = group_numbers[: len(group_numbers) - newer] if newer else group_numbers
    stores = [store for k in done for store in w.store_groups[k - 1]]
    w.wait_until(lambda: all(store.done for store in stores), lambda: "its TMA stores")
    if done:
        agent = w.block.store_agents[w.index]
        starters = sorted({store.lane for store in stores})
        for lane in starters:  # a lane learns nothing about the groups of other lanes
            if lane in lanes:
                w.clocks[lane, agent] = max(w.clocks[lane, agent], done[-1])
        w.stores_known = max(w.stores_known, done[-1])


# ---- st.async ------------------------------------------------------------------------------------------------------
@means(r"st\.async(?:\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes(?:\.(v2|v4))?\.([subf](?:32|64))")
def _(match, w, instr):
    dst, values, bar = instr.operands
    parts = values if isinstance(values, list) else [values]
    dtype = np.dtype(f"u{np.dtype(TYPES[match[2]]).itemsize}")
    octets = np.concatenate([operand(v, dtype)(w)[w.mask][:, None].view(np.uint8) for v in parts], 1)
    owner, lanes, cells = w._cells(address(w, dst, np.uint32), octets.shape[1])
    bar_addresses = {int(x) for x in address(w, bar, np.uint32)[w.mask]}
    if len(bar_addresses) != 1:
        raise w.hazard("the lanes of a st.async signal different mbarriers", "divergence")
    bar_owner, bar_address = w.find_owner(bar_addresses.pop())
    if bar_owner is not owner:
        raise w.hazard("st.async writes to one block and signals another's mbarrier", "storage")
    lane, shadow = int(lanes[0]), owner.shadow
    thread = w.threads[lane]
    owner.check_reachable(thread, "st.async")
    barrier = mbarrier(w, owner, bar_address, w.lane_knowledge(lane))
    w._check_access(shadow.unwritable(w.knowledge(lanes), cells), "st.async writes shared memory")

    def complete():
        shadow.bytes[cells] = octets
        shadow.state[cells] = VALID
        barrier.end_copy(copy)

    copy = w.block.cluster.start(complete, "the store", octets.size, w.place())
    time = barrier.begin_copy(thread, copy)
    for each in lanes:
        barrier.learn(w.clocks[each])
    shadow.start_filling(barrier.agent, time, cells, Event("copy", "the end of the store", copy.place))
