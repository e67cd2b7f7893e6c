"""The programs of attention.forward (tiles/calls/program.py): the schema of each, and the planner of its launches.

Most calls have no options that are arrays, and use FORWARD. The other programs differ in their arrays, so that torch's op and
JAX's call of each have a fixed type: variants, lists of key blocks, float32 results, accumulated results, fp8."""

from collections.abc import Sequence
from typing import Any

from tiles.calls.plan import Plan, Step
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema
from tiles.launching.arrays import Array, Form, Number

from ...options import ListOptions, RandomOptions, ResultOptions, ScoreOptions
from ...parts.block_masks import MAX_WARP_ROWS
from ...parts.variant import Variant
from ...scoring.algebra import score_variant
from ..requires_grad import autograd, needs_gradient
from .call_options import AUX_ROWS, BLOCK_MASK_ROWS
from .forward_launches import choose_config, plan_forward
from .fp8_checks import FP8_SCHEMA, INT8_REMEDY, check_output, fp8_cache_schema
from .gradient import NO_SECOND_DERIVATIVES, program_gradient
from .planning import build_scores, check_extents, norm_and_dropout_parts, resolve_scale
from .variant_spec import VariantSpec, build_variant

FORWARD = Schema(
    "forward",
    """
    q    (batch, seqlen_q, heads, head_dim)      tile
    k    (batch, seqlen_k, heads_k, head_dim)    tile
    v    (batch, seqlen_k, heads_k, head_dim_v)  tile
    out  (batch, seqlen_q, heads, head_dim_v)    tile     in_place
    lse  (batch, heads, seqlen_q)                float32  output  return_lse
    """,
    remedies=INT8_REMEDY,
)
INPUTS = f"""
    q             (batch, seqlen_q, heads, head_dim)               tile
    k             (batch, seqlen_k, heads_k, head_dim)             tile
    v             (batch, seqlen_k, heads_k, head_dim_v)           tile
    alibi         (heads)|(alibi_batch, heads)                     float32      optional
    sink          (heads)                                          float32      optional
    bias          (bias_batch, bias_heads, bias_seqlen, seqlen_k)  real         optional
    cu_seqlens    (ends)                                           ends_q       optional
    cu_seqlens_k  (ends)                                           ends_k       optional
    lengths_k     (sequences)|(batch, parts)                       key_lengths  optional
    q_norm        (head_dim)|(heads, head_dim)                     real         optional
    q_norm_bias   (head_dim)|(heads, head_dim)                     real         optional
    k_norm        (head_dim)|(heads_k, head_dim)                   real         optional
    k_norm_bias   (head_dim)|(heads_k, head_dim)                   real         optional
    seed          (1)                                              index        optional
{BLOCK_MASK_ROWS}
    lists         *                                                any          optional
    marks         *                                                any          optional
{AUX_ROWS}
"""
OUTPUTS = """
    out  (batch, seqlen_q, heads, head_dim_v)  tile     in_place
    lse  (batch, heads, seqlen_q)              float32  output  return_lse
"""
FLOAT32_OUTPUTS = """
    out  (batch, seqlen_q, heads, head_dim_v)  float32  output
    lse  (batch, heads, seqlen_q)              float32  output  return_lse
"""
ACCUMULATED_OUTPUTS = """
    out  (batch, seqlen_q, heads, head_dim_v)  float32  updated
    lse  (batch, heads, seqlen_q)              float32  updated
"""
FEWER = 2  # times as many keys as queries, for decode's kernels: bits of self-attention never depend on the number of heads
REMEDIES = INT8_REMEDY | {"seed": "of a key of JAX one is jax.random.randint(key, (1,), 0, 2**31 - 1)"}
VARIANTS, LISTS = Schema("forward_variant", INPUTS + OUTPUTS, remedies=REMEDIES), Schema("block_lists", INPUTS)
IN_FLOAT32 = Schema("forward_unrounded", INPUTS + FLOAT32_OUTPUTS, remedies=REMEDIES)
INTO = Schema("forward_joined", INPUTS + ACCUMULATED_OUTPUTS, remedies=REMEDIES)
FP8_CACHE = Schema("forward_fp8_cache", fp8_cache_schema(INPUTS + OUTPUTS), remedies=REMEDIES)


def _prepare_gradient(arrays: dict[str, Array], results: dict[str, Form], options: dict[str, Any], layout: str) -> None:
    """Compile the kernels of a call's backward pass, if it may have one, while those of the call are compiled (`prepare_next`
    of tiles.calls.program)."""
    if needs_gradient(*arrays.values()):
        forms = {name: arrays[name].form for name in "qkv"} | {name: results[name] for name in ("out", "lse")}
        autograd().prepare_backward(forms, options["causal"], options["scale"], options["family"], layout)


@program(FORWARD, program_gradient, NO_SECOND_DERIVATIVES, _prepare_gradient)
def _forward(problem: Problem, causal: bool, scale: float | None, return_lse: bool, family: str | None) -> Plan:
    """The Plan of a call without options that are arrays: causal and scale alone."""
    check_extents(problem)
    if family is None and problem.extents["seqlen_k"] >= FEWER * problem.extents["seqlen_q"]:
        from ..decode import split_forward  # and with it all of decode's kernels, which training never needs

        if split_forward.serves(problem):
            return split_forward.plan_by_decode(problem, causal, scale, return_lse)
    return plan_forward(problem, build_variant(resolve_scale(problem, scale), ScoreOptions(causal)), return_lse, family)


# The parameters of these planners, and the fields of their records, are the parameters of torch's ops.
@program(VARIANTS, program_gradient, NO_SECOND_DERIVATIVES)
def _variant(
    problem: Problem, scores: ScoreOptions, lists: ListOptions, norm_eps: float, random: RandomOptions, result: ResultOptions
) -> Plan:
    """The Plan of a call with ScoreOptions, norms and dropout."""
    check_extents(problem)
    extra_parts = norm_and_dropout_parts(problem, norm_eps, *random)
    return plan_variant(problem, scores, lists, result, extra_parts, norm_eps)


_block_lists, _forward_float32 = program(LISTS)(_variant.planner), program(IN_FLOAT32)(_variant.planner)
_forward_accumulated = program(INTO)(_variant.planner)


@program(FP8_SCHEMA, no_gradient=NO_SECOND_DERIVATIVES)
def _forward_fp8(
    problem: Problem,
    scores: ScoreOptions,
    lists: ListOptions,
    q_unit: float,
    k_unit: float,
    v_unit: float,
    result: ResultOptions,
) -> Plan:
    """The Plan of a call with q, k and v of float8_e4m3fn. q_unit, k_unit and v_unit: the descales that are numbers."""
    check_extents(problem, 16)
    check_output(problem)
    numbers: dict[str, float | Number] = {"qk_descale": q_unit * k_unit, "v_descale": v_unit}
    return plan_variant(problem, scores, lists, result, numbers=numbers)


@program(FP8_CACHE, no_gradient=NO_SECOND_DERIVATIVES)
def _fp8_cache(
    problem: Problem,
    k_unit: float,
    v_unit: float,
    scores: ScoreOptions,
    lists: ListOptions,
    norm_eps: float,
    random: RandomOptions,
    result: ResultOptions,
) -> Plan:
    """The Plan of a call with q of 16 bits, and k and v of float8_e4m3fn, which are converted to q's dtype first. k_unit and
    v_unit: the descales that are numbers."""
    check_extents(problem)
    extra_parts = norm_and_dropout_parts(problem, norm_eps, *random)
    return plan_variant(problem, scores, lists, result, extra_parts, norm_eps, units=(k_unit, v_unit))


def plan_variant(
    problem: Problem,
    scores: ScoreOptions,
    lists: ListOptions,
    result: ResultOptions,
    extra_parts: Sequence[tuple[Variant, dict[str, float | Number]]] = (),
    norm_eps: float = 0.0,
    numbers: dict[str, float | Number] | None = None,
    units: tuple[float, float] = (1.0, 1.0),
) -> Plan:
    """The Plan of a variant. extra_parts: its further parts, with {argument of the kernel: number}. numbers: further numbers.
    units: the descales of keys and values that are converted first."""
    spec, index_checks = build_spec(problem, scores, lists, result.scale, extra_parts)
    spec = spec._replace(numbers=spec.numbers | (numbers or {}))
    plan = plan_forward(problem, spec, result.return_lse, result.family, norm_eps, units)
    return plan._replace(steps=[*index_checks, *plan.steps])


def find_kv_block_size(
    problem: Problem,
    scores: ScoreOptions,
    lists: ListOptions,
    scale: float | None,
    family: str | None,
    extra_parts: Sequence[tuple[Variant, dict]],
) -> int:
    """How many keys a block has in the kernel for a call of _variant, or for the same call of _forward."""
    spec, _ = build_spec(problem, scores, lists, scale, extra_parts)
    return choose_config(problem, spec, family)[1].kv


def build_spec(
    problem: Problem,
    scores: ScoreOptions,
    lists: ListOptions,
    scale: float | None,
    extra_parts: Sequence[tuple[Variant, dict[str, float | Number]]],
) -> tuple[VariantSpec, list[Step]]:
    """(the VariantSpec, the steps that check the indices of aux)"""
    if (scores.mask or scores.score) and "parts" in problem.extents:
        raise NotImplementedError("lengths_k: of shape (B, C) is not supported with mask or score")
    return build_scores(problem, scores, lists, MAX_WARP_ROWS, resolve_scale(problem, scale), score_variant, extra_parts)
