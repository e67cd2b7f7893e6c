"""attention.forward of parts of queries, while their keys and values are still being copied to where they are read.

One launch: a thread block waits, before it reads a block of keys, until that has come (held.Arriving). Blocks of keys are read
from the last to the first, so copies come in that order. The bits are those of forward."""

from typing import Any

from tiles.program import Plan, program
from tiles.schema import Problem, Schema

from .assembled import assembled
from .gradient import ONCE
from .launches import planned
from .planning import check_extents, scale_of

ARRIVING = Schema(
    "forward_arriving",
    """
    q          BSHD  tile
    k          BTGD  tile
    v          BTGV  tile
    lengths_k  BZ    key_lengths
    arrived    O     index
    awaits     y     index
    out        BSHV  tile     in_place
    lse        BHS   float32  made      return_lse
    """,
)


def arriving(
    q: Any, k: Any, v: Any, lengths_k: Any, arrived: Any, awaits: Any, causal: bool = False, scale: float | None = None
) -> tuple[Any, Any]:
    """(out, lse) of forward(q, k, v, lengths_k=lengths_k, causal=causal, scale=scale) of parts of queries, (B, parts).

    arrived: (1) of int32, how many copies of keys and values are done; it grows meanwhile. awaits: (blocks + 1) of int32, how
    many of them must be before each block of held.BLOCK keys is here, and how many there are. On Hopper."""
    return _arriving(None, (q, k, v, lengths_k, arrived, awaits, None, None), (causal, scale, True, "sm_90"), "bshd")


@program(ARRIVING, no_gradient=ONCE)
def _arriving(problem: Problem, causal: bool, scale: float | None, return_lse: bool, family: str | None) -> Plan:
    """How calls of this form are done."""
    check_extents(problem)
    return planned(problem, assembled(scale_of(problem, scale), causal), return_lse, family)
