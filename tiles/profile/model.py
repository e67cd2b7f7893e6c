"""What a step of a warp costs: a model, not a measurement.

A multiprocessor of Hopper as its makers and others describe it, in cycles, by one rule a kind of work. It leaves out a great
deal: registers and their banks, conflicts in shared memory, instructions for addresses, loops and branches, other blocks of the
same multiprocessor, other multiprocessors in the way. It is meant to show who waits for whom, and whether a pipeline has enough
stages. How long a kernel takes, only the GPU can say."""

from dataclasses import dataclass
from typing import NamedTuple

from ..interpreter import OpStep
from ..layout import LANES
from ..types import pending, remote, rt, rv, st, sv

SCHEDULERS = 4  # of a multiprocessor, each with its share of the warps, a tensor core, and units for special functions
HALF = 2  # bytes of the elements for which the tensor cores' rate is given


@dataclass(frozen=True)
class Model:
    """The figures, each in cycles or in so much a cycle; `dataclasses.replace` makes another card of it.

    tensor: FLOP of one of the four tensor cores, of products of 16-bit elements (NVIDIA: 989 TFLOP/s by 132 multiprocessors at
    1.83 GHz); of 8 bits twice as many, of tf32 half. mma_sync: what mma.sync gets of that (Luo et al. 2024: 0.63). special:
    lanes whose exp2, 1/x, ... a scheduler's units take (CUDA programming guide: 16 a multiprocessor). shared: bytes to and from
    shared memory; shared_latency: until the first are there. memory: bytes to and from a multiprocessor, if they come from L2;
    from HBM alone it would be 14 (H100) to 20 (H200). latency: until the first are there. barrier: what arriving, and finding a
    wait over, takes. least: of any op, for the next depends on it."""

    tensor: float = 1024
    mma_sync: float = 0.63
    special: float = 4
    shared: float = 128
    shared_latency: float = 30
    memory: float = 32
    latency: float = 700
    barrier: float = 20
    least: float = 6


class Price(NamedTuple):
    """What an op takes: the unit, for how many cycles it holds that, and how many more until the warp has the result; None if
    it waits for none."""

    unit: str
    cycles: float
    latency: float | None = 0


# ops whose work is in other steps of theirs, in what they start, or nowhere: a type's or a register's other name
FREE = set(
    "claim_registers columns commit_group copy_async full id neg_infty ones warp_rows pipeline.fill pipeline.wait pos_infty "
    "prefetch quarter rank release_registers ring.claim ring.fill ring.publish ring.release ring.wait rows rt shared.open "
    "store_wait subtile sync sync_several tma_add tma_load tma_max tma_min tma_store truncate wait wait_group zeros "
    "ping_pong.begin ping_pong.give ping_pong.take arrive expect fence_async named_arrive named_sync persistent_tile signal "
    "receive wait_count count_stored count_up stores_done copy_pages turned".split()
)
SPECIAL = set(
    "exp exp2 gelu gelu_tanh itruediv log log2 reciprocal rsqrt sigmoid silu softplus sqrt tanh truediv".split()
)  # ops with one special function an element
NARROW = set("bf16 fp16 fp8e4m3 fp8e5m2 int8".split())  # conversions, of two elements an instruction


def _values(specs):
    """The tiles and vectors in registers among types."""
    return [s for s in specs if isinstance(s, (rt, rv))]


def product(step: OpStep):
    """(FLOP of this warp, bytes of the wider operand's elements, is it wgmma's?) of a matrix product, else None."""
    if not step.name.startswith(("mm_", "mma_")):
        return None
    out, left, right = step.result_type, *step.argument_types[-2:]
    is_async = isinstance(out, pending)
    tile = out.tile if is_async else out
    k = right.shape[step.name.removesuffix("_unzipped").endswith("Bt")]
    return 2 * tile.rows * tile.cols * k, max(left.dtype.itemsize, right.dtype.itemsize), is_async


def specials(step: OpStep):
    """How many special functions an op takes."""
    values = _values([step.result_type, *step.argument_types])
    return values[0].elements * LANES if step.name in SPECIAL and values else 0


def price(step: OpStep, model: Model) -> Price | None:
    """The cost of an op for its warp; None: nothing."""
    if shape := product(step):
        flop, size, is_async = shape
        return None if is_async else Price("tensor", flop * size / HALF / model.tensor / model.mma_sync)
    if step.name in FREE or isinstance(step.result_type, (st, sv, remote)):  # a shared tile by another name
        return None
    values = _values([step.result_type, *step.argument_types])
    shared = [s.item if isinstance(s, remote) else s for s in step.argument_types]
    if tiles := [s for s in shared if isinstance(s, (st, sv))]:
        elements = values[0].elements * LANES if values else tiles[0].rows * tiles[0].cols
        return Price("shared", elements * tiles[0].dtype.itemsize / model.shared, model.shared_latency)
    if not values:
        return None
    if step.name in SPECIAL:
        return Price("special", values[0].elements * LANES / model.special)
    elements = max(value.elements for value in values)
    return Price("issue", max(model.least, elements / 2 if step.name in NARROW else elements))
