"""attention.forward for attention.parallel, on Hopper: some queries, with keys and values in two places, a rank's own and those
that came from other ranks, which are not put together (key_sources.Apart). The latter may still be on their way: then a thread
block waits, before it reads a block of keys, until the block has arrived (key_sources.Arriving). Blocks of keys are the same as
in forward, and in the same order, so the bits are the same, too."""

from dataclasses import replace
from typing import Any, NamedTuple

from tiles.device import machine
from tiles.plan import Plan
from tiles.program import program
from tiles.schema import Problem, Schema
from tiles.targets import is_hopper

from ..families import require_hopper
from .assembled import build_variant
from .gradient import ONCE
from .key_sources import BLOCK, Apart, Arriving
from .launches import config_of, launch, sequences_of
from .planning import check_extents, scale_of

ARRAYS = """
    q          BSHD  tile
    k          BTGD  tile
    v          BTGV  tile
    lengths_k  BZ    index
    own_k      BAGD  tile
    own_v      BAGV  tile
"""
COMING = """\
    arrived    O     index
    awaits     y     index
"""
RESULTS = """\
    out        BSHV  tile     made
    lse        BHS   float32  made
"""
APART, ARRIVING = Schema("forward_apart", ARRAYS + RESULTS), Schema("forward_arriving", ARRAYS + COMING + RESULTS)


class Seen(NamedTuple):
    """What calls are told. keys: how many there are. first, end, second, second_end: the two spans of them, from .. to, of
    which own_k and own_v have the rows, one span behind the other; k and v have those of all others. Spans begin and end at
    multiples of key_sources.BLOCK, or where keys end. causal, scale: as forward's. kv: how many keys a block has where one GPU
    has all queries (families.FamilyAndBlock)."""

    keys: int
    first: int
    end: int
    second: int
    second_end: int
    causal: bool = False
    scale: float | None = None
    kv: int | None = None


def apart(q: Any, k: Any, v: Any, lengths_k: Any, own_k: Any, own_v: Any, seen: Seen) -> tuple[Any, Any]:
    """(out, lse) of forward of parts of queries, (B, parts) of lengths_k, beside all these keys."""
    return _apart(None, (q, k, v, lengths_k, own_k, own_v, None, None), seen, "bshd")


def arriving(
    q: Any, k: Any, v: Any, lengths_k: Any, own_k: Any, own_v: Any, arrived: Any, awaits: Any, seen: Seen
) -> tuple[Any, Any]:
    """The same while k and v are copied to. arrived: (1) of int32, how many copies are done; it grows meanwhile. awaits:
    (blocks + 1) of int32, how many of them must be before each block of key_sources.BLOCK keys is here, and how many there
    are."""
    return _arriving(None, (q, k, v, lengths_k, own_k, own_v, arrived, awaits, None, None), seen, "bshd")


def serves(device: Any, head_dim: int, value_dim: int) -> bool:
    """Are these functions for a device of torch's, and heads of which blocks of keys are parts of key_sources.BLOCK?"""
    return is_hopper(machine(device.index).capability) and max(head_dim, value_dim) <= BLOCK


@program(APART, no_gradient=ONCE)
def _apart(
    problem: Problem,
    keys: int,
    first: int,
    end: int,
    second: int,
    second_end: int,
    causal: bool,
    scale: float | None,
    kv: int | None,
) -> Plan:
    """How calls of this form are done."""
    require_hopper(problem)
    check_extents(problem)
    spec, (lie, where) = build_variant(scale_of(problem, scale), causal), sequences_of(problem)
    config = config_of(problem, spec, True, keys, kv, lie=lie, axes=(), by_list=False)
    held = Arriving if "arrived" in problem else Apart
    config = replace(config, held=held(config.key, config.value))
    params = {name: problem[name] for name in ("own_k", "own_v", "arrived", "awaits") if name in problem}
    params |= {"own_first": first, "own_end": end, "own_second": second, "own_second_end": second_end}
    arrays = {"gQ": problem["q"], "gK": problem["k"], "gV": problem["v"], "gO": problem["out"], "gLse": problem["lse"]}
    return Plan([launch(problem, spec, config, keys, **arrays, **where, **spec.numbers, **params)])


_arriving = program(ARRIVING, no_gradient=ONCE)(_apart.planner)
