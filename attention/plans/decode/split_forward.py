"""Calls of forward with few queries and many keys, as of one token of a long context: decode's kernels serve them. There the
query heads that share a key head are rows of one tile, and multiprocessors work on different parts of the keys."""

from tiles.calls.plan import Plan
from tiles.calls.schema import Problem
from tiles.launching.devices import machine

from ...kernels.decode import decode_ampere, decode_hopper
from ...kernels.softmax.forward_hopper import MANY_PER_SM
from ...options import ScoreOptions
from ...parts.decode.cache_loaders import DenseLoader
from ..softmax.planning import resolve_scale
from .decode_launches import TILES, AppendPlan, CacheAccess, DecodeOptions, plan_split_kv, prefers_split_kv
from .decode_norms import DecodeNorms

LEAST = 1024  # keys: with fewer, tiles of one consumer do as well


def serves(problem: Problem) -> bool:
    """Do decode's kernels serve this call? It has fewer queries than keys, and asks for no family."""
    batch, queries, heads, kv_heads, keys = problem("batch", "seqlen_q", "heads", "heads_k", "seqlen_k")
    if keys < LEAST or 0 in problem("batch", "seqlen_q", "heads"):
        return False
    rows = queries * (heads // kv_heads)
    if rows <= (decode_hopper.Config.tile_rows if problem.by_tma else decode_ampere.TALL_ROWS):
        many_sequences = (
            batch * heads >= MANY_PER_SM * machine(problem.device).processors
        )  # forward has tiles of one consumer for these
        return heads > kv_heads or not many_sequences
    return prefers_split_kv(problem, queries, keys)


def plan_by_decode(problem: Problem, causal: bool, scale: float | None, return_lse: bool) -> Plan:
    """The Plan of such a call, by decode's kernels. All keys are in use."""
    keys = problem.extents["seqlen_k"]
    options = DecodeOptions(ScoreOptions(causal), resolve_scale(problem, scale))
    append, norms = AppendPlan([], [], problem["q"], {"keys": keys}), DecodeNorms()
    cache = CacheAccess(DenseLoader(problem.bytes_at_once(*TILES)), keys, {})
    lse = problem["lse"] if return_lse else None
    return plan_split_kv(problem, options, append, norms, cache, problem["out"], lse)
