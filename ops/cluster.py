"""Blocks of a cluster, launched by tiles.launch(..., cluster=n): they run at the same time, close together, and reach into each
other's shared memory. Rings with `blocks=n` share the tiles that TMA loads; see tiles.ring. For what the blocks compute:

    peer = cluster.rank() ^ 1
    theirs = cluster.map(tile, peer)          # the peer's shared tile of the same name
    cluster.store(theirs, x)                  # by one warp; theirs may also be loaded from
    cluster.sync()                            # a barrier of all blocks of the cluster, after which all see earlier writes
    ...
    cluster.sync()                            # at the end: no block exits while a peer may still access its shared memory

or, from one warp to those that wait for it, with barriers of shared storage:

    cluster.store_async(theirs, x, cluster.map(full, peer))     # its bytes count on the peer's barrier
    cluster.signal(cluster.map(empty, peer))                    # one arrival there
    cluster.receive(full, 1)                                    # phase 1 of one's own is complete
"""

import numpy as np

from tiles.compiling import ptx
from tiles.compiling.numba_types import void
from tiles.dtypes import fp32
from tiles.interpreter import current_warp
from tiles.layout import LANES
from tiles.numba_names import types
from tiles.op import integer, lowers, op
from tiles.ring import elected
from tiles.types import barrier, remote, rt, rv, st, sv
from tiles.values import Remote, SharedTile

from .memory import lane_order, shared_tiles, shared_vectors

BLOCK_ADDRESS = 2**18 - 1  # the bits of an address within a block's shared memory


# ---- who, and when -------------------------------------------------------------------------------------------------
@op
def rank():
    """Which block of its cluster this is: 0, 1, ..., along x first."""
    return current_warp().block.rank


@lowers(rank)
def _():
    return types.int32, lambda b: ptx.uniform(b, b.special("cluster_ctarank"))


@op
def arrive():
    """This warp arrives at the cluster's barrier. What it wrote before, to any shared memory of the cluster, is visible to
    those that `wait`. Every warp of every block of the cluster arrives, then waits, in turn."""
    current_warp().block.cluster.barrier.arrive(current_warp())


@op
def wait():
    """Wait until all warps of the cluster have arrived."""
    current_warp().block.cluster.barrier.wait(current_warp())


@op
def sync():
    """All warps of the cluster meet: arrive, and wait."""
    current_warp().block.cluster.barrier.arrive(current_warp())
    current_warp().block.cluster.barrier.wait(current_warp())


lowers(arrive)(lambda: (void, ptx.cluster_arrive))
lowers(wait)(lambda: (void, ptx.cluster_wait))


@lowers(sync)
def _():
    def emit(b):
        ptx.cluster_arrive(b)
        ptx.cluster_wait(b)

    return void, emit


# ---- where ---------------------------------------------------------------------------------------------------------
@op
def map(item, rank):
    """What block number `rank` of the cluster has where this one has the shared tile, vector or barrier `item`."""
    warp, blocks = current_warp(), current_warp().block.cluster.blocks
    if not 0 <= rank < len(blocks):
        raise warp.hazard(f"there is no block {rank} in a cluster of {len(blocks)} blocks")
    owner = blocks[rank]
    owner.check_reachable(warp, "reaches for shared memory")
    if not isinstance(item, SharedTile):
        item = owner.shared_members[next(name for name, tile in warp.block.shared_members.items() if tile is item)]
    return Remote(item, owner)


@lowers(map)
def _(item, rank):
    if not isinstance(item, (st, sv, barrier)) or not integer(rank):
        raise TypeError(f"cluster.map: takes a shared tile, vector or barrier, and a number, got {item} and {rank}")
    return remote(item), lambda b, address, rank: ptx.map_shared(b, address, b.u32(rank))


# ---- tiles and vectors ---------------------------------------------------------------------------------------------
@op
def unmap(tile):
    """A shared tile of this block, by an address without the number of the block. A warpgroup's product needs this for a right
    operand that has several panels and whose rows run along k: its descriptor has the distance of the panels where an
    address in a cluster has the number of the block, from bit 24 on."""
    _shared(tile.spec)
    return tile


def _shared(tile):
    if not isinstance(tile, st):
        raise TypeError(f"cluster.unmap: takes a shared tile of this block, got {tile}")
    return tile


@lowers(unmap)
def _(tile):
    return _shared(tile), lambda b, address: b.and_(address, b.u32(BLOCK_ADDRESS))


@op(takes_operands=True)
def store(target, value):
    """A peer's shared tile or vector = value, rounded to its dtype, by one warp. The peer sees it after cluster.sync(), or once
    it has received this warp's signal."""
    current_warp().write(target.item, value.array.reshape(-1, *target.shape[1:]), owner=target.block)


@op
def load(source, spec):
    """The register tile or vector of type `spec` from a peer's shared tile or vector, by one warp."""
    return current_warp().read(source.item, owner=source.block).astype(np.float32).reshape(spec.shape)


@op(takes_operands=True)
def store_async(target, value, bar):
    """Store a tile to a peer, as `store` does, without waiting for it (st.async): its bytes count on a barrier of that peer,
    which expects them (raw.expect) and reads the tile with ordinary loads once it has received them."""
    if bar.block is not target.block:
        raise current_warp().hazard(f"stores to {target}, and counts on {bar.item.name} of block {bar.block.index}", "bytes")
    current_warp().write_async(target.item, value.array.reshape(-1, *target.shape[1:]), bar.item)


@op(takes_operands=True)
def store_fragment_async(target, value, bar):
    """Store a warp's tile to a peer as `store_async` does, but in the order in which its lanes hold it, 16 bytes at a time.
    target: rows of a tile of its dtype (fp32, bf16, fp16) whose rows have 128 bytes, from which the peer's warp of the same
    number in its warpgroup gets it by warpgroup.load_shared_fragment."""
    if bar.block is not target.block:
        raise current_warp().hazard(f"stores to {target}, and counts on {bar.item.name} of block {bar.block.index}", "bytes")
    current_warp().write_async(target.item, lane_order.in_lane_order(value), bar.item)


def _check(name, verb, target, value):
    if not (isinstance(target, remote) and isinstance(target.item, (st, sv))):
        raise TypeError(f"{name}: takes a peer's shared tile or vector (cluster.map), got {target}")
    if not isinstance(value, (rt, rv)) or getattr(value, "partial", False):
        raise TypeError(f"{name}: takes a register tile or whole vector, got {value}")
    (shared_tiles if isinstance(target.item, st) else shared_vectors).check(name, target.item, verb, value, None, 1)
    if isinstance(value, rt) and value.dtype.run != target.item.dtype.run:
        raise TypeError(f"{name}: {target.item} does not {verb} {value}: fp8 tiles are converted in registers")


def _step(spec):
    """How many elements that are adjacent in memory a lane has in adjacent registers."""
    if isinstance(spec, rv):
        return 1 if spec.by_quad else 2
    return spec.dtype.run if spec.layout == "row" else 1


def _accesses(b, item, spec, address):
    """The elements that a lane moves at once, neighbours in memory, and where they lie."""
    if isinstance(item, sv):
        return shared_vectors.addresses(b, item, spec, address, b.u32(0))
    step = _step(spec)
    addresses = shared_tiles.lane_addresses(b, item, spec, address, b.u32(0), step)
    return ((slice(k, k + step), at) for k, at in zip(range(0, spec.elements, step), addresses, strict=True))


def _lower_store(item, spec, instruction):
    """The lowering of a store by `instruction`, whose last operand is the barrier if there is one."""

    def lower(b, address, value, *bars):
        elements = b.elements(spec, value)
        is_holder = b.icmp_unsigned("==", b.and_(b.lane(), b.u32(getattr(spec, "holders", 0))), b.u32(0))
        with b.if_then(is_holder):
            for together, at in _accesses(b, item, spec, address):
                shared_vectors.store_elements(b, item.dtype, elements[together], at, instruction, *bars)

    return lower


@lowers(store)
def _(target, value):
    _check("cluster.store", "take", target, value)
    return void, _lower_store(target.item, value, "st.shared::cluster")


@lowers(store_async)
def _(target, value, bar):
    _check("cluster.store_async", "take", target, value)
    if not (isinstance(bar, remote) and isinstance(bar.item, barrier)):
        raise TypeError(f"cluster.store_async: takes a peer's barrier (cluster.map), got {bar}")
    if _step(value) * target.item.dtype.itemsize < 4:
        raise TypeError(f"cluster.store_async: stores no less than 4 bytes, and lanes hold {_step(value)} of {value} together")
    return void, _lower_store(target.item, value, "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes")


@lowers(store_fragment_async)
def _(target, value, bar):
    name = "cluster.store_fragment_async"
    if not (isinstance(target, remote) and isinstance(bar, remote) and isinstance(bar.item, barrier)):
        raise TypeError(f"{name}: takes a peer's shared tile and barrier (cluster.map), got {target} and {bar}")
    lane_order.check_shared(name, target.item, value, 1, lane_order.FRAGMENT_DTYPES)
    kind = "f32" if value.dtype is fp32 else "b32"
    text = f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.{kind} [$0], {{$1, $2, $3, $4}}, [$5];"

    def emit(b, address, registers, bar_address):
        registers = b.unpack(registers)
        for four, at in lane_order.shared_places(b, target.item, value, address, lambda b: b.u32(0)):
            b.do(text, at, *registers[four], bar_address)

    return void, emit


@lowers(load)
def _(source, spec: type):
    _check("cluster.load", "hold", source, spec)
    item = source.item

    def emit(b, address, _):
        out = []
        for together, at in _accesses(b, item, spec, address):
            out += shared_vectors.load_elements(b, item.dtype, together.stop - together.start, at, "shared::cluster")
        ptx.reads_done(b)
        return b.from_elements(spec, out)

    return spec, emit


# ---- barriers ------------------------------------------------------------------------------------------------------
@op
def signal(bar):
    """One arrival of this warp on a peer's barrier. Those that receive it see what the warp wrote before."""
    bar.item.arrive(current_warp())


@lowers(signal)
def _(bar):
    if not (isinstance(bar, remote) and isinstance(bar.item, barrier)):
        raise TypeError(f"cluster.signal: takes a peer's barrier (cluster.map), got {bar}")

    def emit(b, address):
        ptx.warp_sync(b)
        with b.if_then(elected(b, LANES)):
            ptx.mbarrier_arrive_remote(b, address, publish=True)

    return void, emit


@op
def receive(bar, phases):
    """Wait until `phases` phases of a barrier of this block are complete; the hardware sees only the parity of this number.
    What peers wrote before they signalled, or stored to count on the barrier, is then visible."""
    bar.wait(current_warp(), phases)


@lowers(receive)
def _(bar, phases):
    if not (isinstance(bar, barrier) and integer(phases)):
        raise TypeError(f"cluster.receive: takes a barrier of this block and a number of phases, got {bar} and {phases}")

    def emit(b, address, phases):
        ptx.mbarrier_wait(b, address, b.and_(b.sub(b.u32(phases), b.u32(1)), b.u32(1)), ".acquire.cluster")

    return void, emit
