"""attention.forward for attention.parallel, on Hopper: queries of one rank, with keys and values in two buffers, the rank's own
and those that came from other ranks (key_sources.TwoBuffers). The second buffer may still be filling: then a CTA waits, before
it loads a block of keys, until the block has arrived (key_sources.StreamingBuffers). Blocks of keys and their order are those
of forward, so the bits are the same."""

from dataclasses import replace
from typing import Any, NamedTuple

from tiles.calls.program import Plan, program
from tiles.calls.schema import Problem, Schema
from tiles.launching.devices import machine

from ...families import require_hopper
from ...options import ScoreOptions
from ...parts.key_sources import BLOCK, StreamingBuffers, TwoBuffers
from .forward_launches import bind_launch, choose_layout, config_for_16_bits
from .gradient import NO_SECOND_DERIVATIVES
from .planning import check_extents, resolve_scale
from .variant_spec import build_variant

ARRAYS = """
    q          (batch, seqlen_q, heads, head_dim)          tile
    k          (batch, seqlen_k, heads_k, head_dim)        tile
    v          (batch, seqlen_k, heads_k, head_dim_v)      tile
    lengths_k  (batch, parts)                              index
    local_k    (batch, seqlen_local, heads_k, head_dim)    tile
    local_v    (batch, seqlen_local, heads_k, head_dim_v)  tile
"""
PROGRESS = """
    arrived   (1)              index
    required  (blocks_plus_1)  index
"""
RESULTS = """
    out  (batch, seqlen_q, heads, head_dim_v)  tile     output
    lse  (batch, heads, seqlen_q)              float32  output
"""
TWO_BUFFERS = Schema("forward_two_buffers", ARRAYS + RESULTS)
STREAMING = Schema("forward_streaming", ARRAYS + PROGRESS + RESULTS)


class KeyPlacement(NamedTuple):
    """Which keys are in which buffer, and the options of a call. keys: how many there are. first, end, second, second_end: the
    two spans of keys whose rows are in local_k and local_v, one span after the other; k and v have the rows of all other keys.
    Spans begin and end at multiples of key_sources.BLOCK, or at the last key. causal, scale: as forward's. kv: how many keys a
    block has where one GPU has all queries (families.FamilyAndBlock)."""

    keys: int
    first: int
    end: int
    second: int
    second_end: int
    causal: bool = False
    scale: float | None = None
    kv: int | None = None


def forward_two_buffers(
    q: Any, k: Any, v: Any, lengths_k: Any, local_k: Any, local_v: Any, placement: KeyPlacement
) -> tuple[Any, Any]:
    """(out, lse) of forward for parts of queries, one for each element of lengths_k (B, parts), beside all these keys."""
    return _forward_two_buffers(None, (q, k, v, lengths_k, local_k, local_v, None, None), placement, "bshd")


def forward_streaming(
    q: Any, k: Any, v: Any, lengths_k: Any, local_k: Any, local_v: Any, arrived: Any, required: Any, placement: KeyPlacement
) -> tuple[Any, Any]:
    """(out, lse) like forward_two_buffers, while k and v are still being copied to. arrived: (1) of int32, the number of copies
    that are done; it grows meanwhile. required: (blocks + 1) of int32, how many copies must be done before each block of
    key_sources.BLOCK keys may be read, and then the number of all copies."""
    arrays = q, k, v, lengths_k, local_k, local_v, arrived, required, None, None
    return _forward_streaming(None, arrays, placement, "bshd")


def serves(device: Any, head_dim: int, value_dim: int) -> bool:
    """Do these functions serve a torch device, and heads whose key blocks divide key_sources.BLOCK?"""
    return machine(device.index).target.is_hopper and max(head_dim, value_dim) <= BLOCK


@program(TWO_BUFFERS, no_gradient=NO_SECOND_DERIVATIVES)
def _forward_two_buffers(problem: Problem, placement: KeyPlacement) -> Plan:
    """The Plan of a call of forward_two_buffers or forward_streaming: one launch of forward's kernel for Hopper."""
    require_hopper(problem)
    check_extents(problem)
    keys, first, end, second, second_end, causal, scale, kv = placement
    spec, (seq_layout, args) = build_variant(resolve_scale(problem, scale), ScoreOptions(causal)), choose_layout(problem)
    config = config_for_16_bits(problem, spec, True, keys, kv, seq_layout=seq_layout, axes=(), by_list=False)
    buffers = StreamingBuffers if "arrived" in problem else TwoBuffers
    config = replace(config, kv_source=buffers(config.key, config.value))
    args |= {name: problem[name] for name in ("local_k", "local_v", "arrived", "required") if name in problem}
    args |= {"span0_first": first, "span0_end": end, "span1_first": second, "span1_end": second_end}
    arrays = {"gQ": problem["q"], "gK": problem["k"], "gV": problem["v"], "gO": problem["out"], "gLse": problem["lse"]}
    return Plan([bind_launch(problem, spec, config, keys, **arrays, **args, **spec.numbers)])


_forward_streaming = program(STREAMING, no_gradient=NO_SECOND_DERIVATIVES)(_forward_two_buffers.planner)
