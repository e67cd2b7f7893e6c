"""compute_now: when a tile is computed. Compilers move a computation to where its result is first used."""

from tiles.compiling import ptx
from tiles.op import lowers, op
from tiles.types import rt, rv


@op(takes_operands=True)
def compute_now(x):
    """x, a register tile or vector, computed before what follows: beside a product that is waited for next, say, where the
    compiler would leave its computation behind the wait."""
    return x.array


@lowers(compute_now)
def _(x):
    if not isinstance(x, (rt, rv)):
        raise TypeError(f"compute_now: takes a register tile or vector, got {x}")
    return x, lambda b, value: ptx.pass_through(b, value, "")
