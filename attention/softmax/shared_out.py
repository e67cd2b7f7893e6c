"""Calls of forward with few queries and many keys, as of one token of a long context: decode's kernels serve them. There the
query heads that share a key head are rows of one tile, and multiprocessors work on different parts of the keys."""

from tiles.device import machine
from tiles.plan import Plan
from tiles.schema import Problem

from .decode import ampere, hopper
from .decode.caches import DenseLoader
from .decode.launches import TILES, AppendPlan, DecodeOptions, of_few, shared_out
from .decode.norms import AS_THEY_ARE, Norms
from .hopper import MANY
from .planning import scale_of

LEAST = 1024  # keys: with fewer, tiles of one consumer do as well
FEWER = 2  # times as many keys as queries at least, so that the bits of self-attention never depend on the number of heads


def serves(problem: Problem, family: str | None) -> bool:
    """Is this one of the calls that decode's kernels serve? A call that asks for a family never is."""
    batch, queries, heads, kv_heads, keys = problem("BSHGT")
    if family is not None or keys < LEAST or keys < FEWER * queries or 0 in problem("BSH"):
        return False
    rows = queries * (heads // kv_heads)
    if rows <= (hopper.Config.band if problem.by_tma else ampere.MOST):
        many = batch * heads >= MANY * machine(problem.device).processors  # forward has tiles of one consumer for these
        return heads > kv_heads or not many
    return shared_out(problem, queries, keys)


def planned(problem: Problem, causal: bool, scale: float | None, return_lse: bool) -> Plan:
    """The Plan of such a call, by decode's kernels. All keys are in use."""
    (keys,) = problem("T")
    options = DecodeOptions(causal, None, None, None, scale_of(problem, scale), None, None, [])
    before, norms = AppendPlan([], [], problem["q"], {"keys": keys}), Norms([], [], AS_THEY_ARE, {}, {})
    lse, cache = problem["lse"] if return_lse else None, DenseLoader(problem.bytes_at_once(*TILES))
    return of_few(problem, options, before, norms, cache, {}, keys, None, None, problem["out"], lse)
