"""attention.forward of parts of queries whose keys and values lie elsewhere than in two arrays that have all of them: for
attention.parallel, on Hopper. The bits are those of forward, as blocks of keys are the same, in the same order.

Own keys, and those that came from others, are read where they are (held.Apart), so that nobody puts them together. Or all lie
in memory into which some are still being copied, and a thread block waits, before it reads a block of keys, until that has come
(held.Arriving); they are read from the last to the first."""

from dataclasses import replace
from typing import Any

from tiles.device import hopper, machine
from tiles.program import Plan, program
from tiles.schema import Problem, Schema

from ..families import needs_hopper
from .assembled import assembled
from .gradient import ONCE
from .held import BLOCK, Apart, Arriving
from .launches import config_of, launch, sequences_of
from .planning import check_extents, scale_of

ARRAYS = """
    q          BSHD  tile
    k          BTGD  tile
    v          BTGV  tile
    lengths_k  BZ    index
"""
RESULTS = """
    out        BSHV  tile     made
    lse        BHS   float32  made
"""
ARRIVING = Schema("forward_arriving", f"{ARRAYS}    arrived    O     index\n    awaits     y     index{RESULTS}")
APART = Schema("forward_apart", f"{ARRAYS}    own_k      BAGD  tile\n    own_v      BAGV  tile{RESULTS}")


def arriving(
    q: Any, k: Any, v: Any, lengths_k: Any, arrived: Any, awaits: Any, causal: bool = False, scale: float | None = None
) -> tuple[Any, Any]:
    """(out, lse) of forward(q, k, v, lengths_k=lengths_k, causal=causal, scale=scale) of parts of queries, (B, parts).

    arrived: (1) of int32, how many copies of keys and values are done; it grows meanwhile. awaits: (blocks + 1) of int32, how
    many of them must be before each block of held.BLOCK keys is here, and how many there are."""
    return _arriving(None, (q, k, v, lengths_k, arrived, awaits, None, None), (causal, scale), "bshd")


def apart(
    q: Any,
    k: Any,
    v: Any,
    lengths_k: Any,
    own_k: Any,
    own_v: Any,
    spans: tuple[int, int, int, int],
    keys: int,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Any, Any]:
    """The same of `keys` keys, of which own_k and own_v have two spans, spans[0] to spans[1] and spans[2] to spans[3], and k
    and v all others. Spans begin and end at multiples of held.BLOCK, or where keys end; see `serves`."""
    return _apart(None, (q, k, v, lengths_k, own_k, own_v, None, None), (causal, scale, keys, *spans), "bshd")


def serves(device: Any, head_dim: int, value_dim: int) -> bool:
    """Are these functions for a device of torch's, and heads of which blocks of keys are parts of held.BLOCK?"""
    return hopper(machine(device.index).capability) and max(head_dim, value_dim) <= BLOCK


@program(ARRIVING, no_gradient=ONCE)
def _arriving(problem: Problem, causal: bool, scale: float | None) -> Plan:
    """How calls of this form are done."""
    (keys,) = problem("T")
    given = {name: problem[name] for name in ("arrived", "awaits")}
    return _planned(problem, causal, scale, keys, lambda config: Arriving(), **given)


@program(APART, no_gradient=ONCE)
def _apart(
    problem: Problem, causal: bool, scale: float | None, keys: int, first: int, end: int, second: int, second_end: int
) -> Plan:
    """How calls of this form are done."""
    spans = {"own_first": first, "own_end": end, "own_second": second, "own_second_end": second_end}
    given = {name: problem[name] for name in ("own_k", "own_v")}
    return _planned(problem, causal, scale, keys, lambda config: Apart(config.key, config.value), **given, **spans)


def _planned(problem: Problem, causal: bool, scale: float | None, keys: int, held: Any, **given: Any) -> Plan:
    """The launch, where keys are `held` as a function of the kernel's configuration says."""
    needs_hopper(problem)
    check_extents(problem)
    made, (lie, where) = assembled(scale_of(problem, scale), causal), sequences_of(problem)
    kind = {"lie": lie, "axes": (), "by_list": False, "unrounded": False, "joins": False}
    config = config_of(problem, made, True, keys, **kind)
    config = replace(config, held=held(config))
    arrays = {"gQ": problem["q"], "gK": problem["k"], "gV": problem["v"], "gO": problem["out"], "gLse": problem["lse"]}
    return Plan([launch(problem, made, config, keys, **arrays, **where, **made.numbers, **given)])
