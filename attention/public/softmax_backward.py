"""attention.backward: the public function, and the programs that plan its launches."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tiles.calls.argument import REAL
from tiles.calls.plan import Plan
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema

from ..kernels.softmax.query_tile_lists import MAX_SURVEY_QUERIES
from ..names import suggests_argument_names
from ..options import (
    DEFAULTS,
    AttentionArguments,
    ListOptions,
    RandomOptions,
    ScoreOptions,
    check_accumulators,
    check_flag,
    check_number,
    check_positive,
    show_argument,
)
from ..plans.requires_grad import without_gradients
from ..plans.softmax import norm_gradients
from ..plans.softmax.backward_launches import plan_launches
from ..plans.softmax.call_options import AUX, AUX_ROWS, BLOCK_MASK_ROWS, block_options, dropout_options, score_options
from ..plans.softmax.gradient import AUX_NAMES, NO_SECOND_DERIVATIVES, NORM_NAMES, flatten_arrays
from ..plans.softmax.planning import build_scores, check_extents, dropout_part, resolve_scale
from ..plans.softmax.score_gradients import GRADIENTS, reads_of
from ..plans.softmax.variant_spec import build_variant
from ..scoring.python_functions import find_function
from ..scoring.score_derivative import differentiate, scored_with_grad

if TYPE_CHECKING:
    from typing_extensions import Unpack

BACKWARD_ARGUMENTS = frozenset(AttentionArguments.__annotations__)
DAUX_CREATED = "".join([f"    daux{n}  =aux{n}  float32  output  grads:daux{n}\n" for n in range(AUX)])
DAUX_ACCUMULATED = "".join([f"    daux{n}  =aux{n}  float32  updated?\n" for n in range(AUX)])
FORWARD_ROWS = """
    dout  (batch, seqlen_q, heads, head_dim_v)    tile
    q     (batch, seqlen_q, heads, head_dim)      tile
    k     (batch, seqlen_k, heads_k, head_dim)    tile
    v     (batch, seqlen_k, heads_k, head_dim_v)  tile
    out   (batch, seqlen_q, heads, head_dim_v)    tile
    lse   (batch, heads, seqlen_q)                float32
    dlse  (batch, heads, seqlen_q)                float32  optional
"""
INPUT_GRADIENT_ROWS = """
    dq  (batch, seqlen_q, heads, head_dim)      tile  output
    dk  (batch, seqlen_k, heads_k, head_dim)    tile  output
    dv  (batch, seqlen_k, heads_k, head_dim_v)  tile  output
"""
INPUTS = f"""
{FORWARD_ROWS}
    alibi         (heads)|(alibi_batch, heads)                     float32      optional
    sink          (heads)                                          float32      optional
    bias          (bias_batch, bias_heads, bias_seqlen, seqlen_k)  real         optional
    cu_seqlens    (ends)                                           ends_q       optional
    cu_seqlens_k  (ends)                                           ends_k       optional
    lengths_k     (sequences)                                      key_lengths  optional
    seed          (1)                                              index        optional
{BLOCK_MASK_ROWS}
    marks         *                                                any          optional
{AUX_ROWS}
"""
CREATED_ROWS = f"""
{INPUT_GRADIENT_ROWS}
    dbias   =bias    float32  output  grads:dbias
    dalibi  =alibi   float32  output  grads:dalibi
    dsink   (heads)  float32  output  grads:dsink
{DAUX_CREATED}
"""
ACCUMULATED_ROWS = f"""
    dq      (batch, seqlen_q, heads, head_dim)      float32  updated
    dk      (batch, seqlen_k, heads_k, head_dim)    float32  updated
    dv      (batch, seqlen_k, heads_k, head_dim_v)  float32  updated
    dbias   =bias                                   float32  updated?
    dalibi  =alibi                                  float32  updated?
    dsink   (heads)                                 float32  updated?
{DAUX_ACCUMULATED}
"""
BACKWARD = Schema("backward", FORWARD_ROWS + INPUT_GRADIENT_ROWS)
VARIANTS, INTO = Schema("backward_variant", INPUTS + CREATED_ROWS), Schema("backward_into", INPUTS + ACCUMULATED_ROWS)


@suggests_argument_names
@without_gradients
def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    causal: bool = False,
    scale: float | None = None,
    deterministic: bool = False,
    accumulate: bool = False,
    layout: str = "bshd",
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dbias: Any = None,
    dalibi: Any = None,
    dsink: Any = None,
    daux: Any = None,
    dq_norm: Any = None,
    dk_norm: Any = None,
    stream: Any = None,
    family: str | None = None,
    **arguments: "Unpack[AttentionArguments]",
) -> tuple[Any, ...]:
    """Gradients of attention.forward. For a loss L, dout = dL/dout and dlse = dL/dlse: dq = dL/dq, dk = dL/dk and dv = dL/dv.

        P = exp(scale q k^T - lse)    dv = P^T dout
        dS = P (dout v^T - rowsum(dout out) + dlse)    dq = scale dS k    dk = scale dS^T q

    dout: as out. out, lse: what forward returned, with return_lse=True. dlse: as lse, float32; None where L does not depend on
    lse. It costs no time. For queries that see no key it may be anything, also inf or NaN. q, k, v, causal, scale, layout,
    arguments: what forward was called with; dS is then the gradient of q k^T, before all of these. The gradients of heads that
    share a key head are summed. Queries that see no key have gradients of 0, and so have keys that are not in use.

    dq, dk, dv, dsink, dq_norm, dk_norm: arrays to write to instead of new ones. accumulate: they must be float32 arrays, and
    the gradients are added to what they hold, unrounded; so must dbias, dalibi and daux, where they are wanted. dsink: False
    where it is not wanted.

    dbias, dalibi: True for the gradients of a bias (summed over axes of length 1) and of slopes; or an array to write to; False
    or None: not wanted. daux: True for the gradients of all arrays of aux that do not hold integers, as far as score reads
    them; or, for each array, True, an array to write to, or None or False. They are float32. Each is computed from the scores
    once more, in a fixed order: the same bits every time. With packed sequences, elements of a bias that belong to no sequence
    get 0.

    The derivative of score is computed by running it once on symbolic terms. So score may do all that it may in forward, except
    `map`. Query tiles that see no key of a block are skipped, as forward skips key blocks.

    deterministic: sums are computed in float32 and rounded once; but where few key blocks would leave multiprocessors idle, dk
    and dv are sums of several partial gradients, each of which is rounded. Key blocks add to dq in any order, so its last bits
    differ from call to call; with deterministic=True they add in a fixed order, and all bits are the same in every call on the
    same kind of GPU.

    q_norm, k_norm, norm_eps: norms of queries and keys, as forward has them. dq and dk are those of q and k before the
    norms; the gradients of the normalised rows are rounded to their dtype on the way, or kept in float32 with
    accumulate=True. The norms' own gradients are float32, have their shapes and come last: for each norm an array, or a
    pair (of the weights, of the bias). Their sums have a fixed order.

    forward's other options have no gradient yet. stream, family: as in forward.

    Returns (dq, dk, dv), followed, in this order, by dbias and dalibi, if asked for; dsink, if there is a sink; each of daux
    that is wanted; those of norms. They are the same kind of arrays as q, and have no derivatives themselves: torch tensors may
    require grad, and what is returned does not. Arrays and errors are those of forward."""
    arrays, options = flatten_arrays(arguments, BACKWARD_ARGUMENTS) if arguments else ({}, {})
    if not (arrays or options) and accumulate is False and dbias is dalibi is dsink is daux is dq_norm is dk_norm is None:
        simple = check_flag("causal", causal), check_number("scale", scale), check_flag("deterministic", deterministic), family
        return _backward(stream, (dout, q, k, v, out, lse, dlse, dq, dk, dv), simple, layout)
    q_norm, k_norm = arguments.get("q_norm"), arguments.get("k_norm")
    eps = check_positive("norm_eps", options.get("norm_eps", DEFAULTS["norm_eps"]))
    random = dropout_options(options, arrays)
    dsink = "sink" in arrays if dsink is None else dsink
    if dsink is not False and "sink" not in arrays:
        raise ValueError(f"dsink: must be None where there is no sink: {show_argument('dsink', dsink)}")
    norm_gradients.check_norm_gradient("q", q_norm, dq_norm)
    norm_gradients.check_norm_gradient("k", k_norm, dk_norm)
    daux = () if daux is None else aux_gradients(daux, [arrays[name] for name in AUX_NAMES if name in arrays])
    extra = {name: x for name, x in zip(GRADIENTS, (dbias, dalibi, dsink, *daux)) if not (x is None or x is False)}
    if check_flag("accumulate", accumulate):
        norms_of = {"dq_norm": (dq_norm, q_norm), "dk_norm": (dk_norm, k_norm)}
        check_accumulators(
            {"dq": dq, "dk": dk, "dv": dv} | {name: x for name, (x, norm) in norms_of.items() if norm is not None}
        )
        check_accumulators(extra)
    rows = ("q", q, q_norm), ("k", k, k_norm)
    normed_q, normed_k = (norm_gradients.normalise_rows(*x, eps, stream, layout) for x in rows)
    row_gradients = [dx if norm is None else None for dx, norm in ((dq, q_norm), (dk, k_norm))]
    if accumulate:
        buffers = ("q", q, q_norm, dq), ("k", k, k_norm, dk)
        row_gradients = [norm_gradients.gradient_buffer(*x, stream, layout) for x in buffers]
    list_options, lists = block_options(options.get("blocks"))
    extra_out = {name: x for name, x in extra.items() if x is not True}
    arrays |= {"dout": dout, "q": normed_q, "k": normed_k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    arrays |= {"dq": row_gradients[0], "dk": row_gradients[1], "dv": dv, **random.seeds, **lists, **extra_out}
    arrays.pop("lists", None)  # which are those of forward's tiles
    if not q_norm is k_norm is None:
        arrays = {name: x for name, x in arrays.items() if name not in NORM_NAMES}
    variant_options = (
        check_flag("causal", causal),
        *score_options(options),
        *list_options,
        random.dropout,
        random.seed,
        check_number("scale", scale),
        check_flag("deterministic", deterministic),
        " ".join(extra),
        family,
    )
    if accumulate:
        _accumulate(stream, _accumulate.in_order(arrays), variant_options, layout)
        gradients = *row_gradients, dv, *extra_out.values()
    else:
        gradients = _variant(stream, _variant.in_order(arrays), variant_options, layout)
    if q_norm is k_norm is None:
        return gradients
    dq, d_q_norm = norm_gradients.norm_gradients("q", q, gradients[0], q_norm, eps, dq, stream, layout, dq_norm, accumulate)
    dk, d_k_norm = norm_gradients.norm_gradients("k", k, gradients[1], k_norm, eps, dk, stream, layout, dk_norm, accumulate)
    return dq, dk, *gradients[2:], *d_q_norm, *d_k_norm


def backward_without_options(
    arrays: tuple, causal: bool, scale: float | None, deterministic: bool, family: str | None, layout: str
) -> tuple[Any, Any, Any]:
    """backward of the arrays (dout, q, k, v, out, lse, dlse) on the current stream, for calls that have no other options."""
    return _backward(None, (*arrays, None, None, None), (causal, scale, deterministic, family), layout)


def aux_gradients(daux: Any, aux: Sequence[Any]) -> tuple:
    """For each array of aux: True or an array to write to where its gradient is wanted, else None or False. TypeError: daux
    does not fit aux."""
    if isinstance(daux, bool):
        return tuple([daux and (True if is_floating(x) else None) for x in aux])
    count = len(aux)
    if not isinstance(daux, (tuple, list)) or len(daux) != count:
        must = f"must be True, or a tuple of True, an array or None for each of {count} arrays of aux"
        raise TypeError(f"daux: {must}: {show_argument('daux', daux)}")
    return tuple(daux)


def is_floating(x: Any) -> bool:
    """Is this an array of floating-point numbers, rather than of integers or booleans?"""
    return any(name in str(getattr(x, "dtype", "")) for name in REAL)


@program(BACKWARD, no_gradient=NO_SECOND_DERIVATIVES)
def _backward(problem: Problem, causal: bool, scale: float | None, deterministic: bool, family: str | None) -> Plan:
    """The launches of a call without other options."""
    check_extents(problem)
    scale = resolve_scale(problem, scale)
    return plan_launches(problem, build_variant(scale, ScoreOptions(causal)), scale, deterministic, family)


@program(VARIANTS, no_gradient=NO_SECOND_DERIVATIVES)
def _variant(
    problem: Problem,
    scores: ScoreOptions,
    lists: ListOptions,
    random: RandomOptions,
    scale: float | None,
    deterministic: bool,
    grads: str,
    family: str | None,
) -> Plan:
    """The launches of a call with any options. grads: the names of gradients to compute besides dq, dk and dv."""
    check_extents(problem)
    scale = resolve_scale(problem, scale)
    extra_parts = [dropout_part(problem, random.dropout, random.seed_value)] if random.dropout is not None else []
    spec, index_checks = build_scores(problem, scores, lists, MAX_SURVEY_QUERIES, scale, scored_with_grad, extra_parts, True)
    score_derivatives = differentiate(find_function(scores.score), spec.axes) if scores.score else None
    reads = {name: reads_of(problem, name, score_derivatives) for name in grads.split() if name != "dsink"}
    plan = plan_launches(problem, spec, scale, deterministic, family, reads, "dsink" in grads.split())
    return plan._replace(steps=[*index_checks, *plan.steps])


_accumulate = program(INTO, no_gradient=NO_SECOND_DERIVATIVES)(_variant.planner)
