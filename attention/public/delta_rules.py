"""attention.delta_rule: the delta rule, with or without decays.

| delta_rule(q, k, v, beta, ..) | flash-linear-attention              | S_t =                                                |
| ----------------------------- | ----------------------------------- | ---------------------------------------------------- |
|                               | chunk_delta_rule(q, k, v, beta)     | S + k (beta (v - S^T k))^T                           |
| decay=(H,) or (B, S, H)       | chunk_gated_delta_rule(.., g, beta) | the same of exp(decay) S: gated delta networks       |
| decay=(B, S, H, Dk)           | chunk_kda(.., g, beta)              | the same of diag(exp(decay)) S: Kimi delta attention |

Both have the same default scale (Dk^-1/2), the same layout of states, (N, H, Dk, Dv) float32, and q and k heads that value
heads share (but for chunk_delta_rule). Their g is (B, T, H) or (B, T, H, Dk), for each token; g and decay are logarithms. Their
use_qk_l2norm_in_kernel=True is qk_l2norm=True, use_beta_sigmoid_in_kernel=True beta=gates.beta(b), use_gate_in_kernel=True
decay=gates.softplus(g, A_log, dt_bias) (attention.gates)."""

from typing import Any

from tiles.calls import jax_call, torch_op
from tiles.calls.plan import Plan, Step
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema

from ..families import HOPPER_FAMILY, choose_family, uses_hopper_kernels
from ..kernels.delta import delta_hopper, delta_states_hopper
from ..names import suggests_argument_names
from ..options import check_flag, check_number
from ..parts.recurrent.channel_config import DELTA_KEY_DIMS
from ..plans.delta.delta_channel_walk import plan_channel_walk, serves_channel_walk
from ..plans.delta.delta_chunks import plan_delta_chunks, serves_delta_chunks
from ..plans.delta.delta_records import (
    FIELDS,
    RESULT_ROWS,
    check_record,
    choose_record,
    join_record,
    record_fields,
    record_schema,
)
from ..plans.delta.delta_scans import plan_channel_scans, scan_chunks
from ..plans.delta.delta_training import plan_forward_with_record
from ..plans.delta.delta_walk import plan_walk, serves_walk
from ..plans.recurrent import recurrent_checks, recurrent_chunks, token_loop
from ..plans.recurrent.chunk_states import check_memory
from ..plans.recurrent.raw_inputs import (
    NO_RAW_GRADIENT,
    NOT_RAW,
    RAW_GATES,
    RawOptions,
    by_tma,
    formula_arrays,
    gate_operand,
    is_raw,
    prepare_rows,
    split_raw,
)
from ..plans.requires_grad import recurrent_autograd, refuse_with_gradients, requires_grad
from .delta_gradients import DELTA_DERIVATIVE

INPUTS = """
    q              (batch, seqlen, heads_k, key_dim)                               tile
    k              (batch, seqlen, heads_k, key_dim)                               tile
    v              (batch, seqlen, heads, value_dim)                               tile
    beta           (batch, seqlen, heads)                                          real
    decay          (heads)|(batch, seqlen, heads)|(batch, seqlen, heads, key_dim)  log      optional
    cu_seqlens     (ends)                                                          ends     optional
    initial_state  (sequences, heads, key_dim, value_dim)                          float32  optional
"""
RESULTS = """
    out            (batch, seqlen, heads, value_dim)                               tile     output
    state          (sequences, heads, key_dim, value_dim)                          float32  output  return_state
"""
DELTA_RULE = record_schema("delta_rule", INPUTS + RESULTS + RESULT_ROWS)
RAW_DELTA_RULE = Schema("delta_rule_raw", INPUTS + RAW_GATES + RESULTS)

DELTA_STATES = Schema(
    "delta_rule_states",
    """
    k              (batch, seqlen, heads_k, key_dim)           tile
    v              (batch, seqlen, heads, value_dim)           tile
    beta           (batch, seqlen, heads)                      real
    decay          (heads)|(batch, seqlen, heads)              log      optional
    cu_seqlens     (ends)                                      ends     optional
    initial_state  (sequences, heads, key_dim, state_columns)  float32
    skipped        (sequences, heads, 1)                       float32  optional
    state          (sequences, heads, key_dim, state_columns)  float32  output
    """,
)

NO_RAW_RECORD = "return_chunk_states: takes decays and beta, not what a layer projects, and no qk_l2norm"


@suggests_argument_names
def delta_rule(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    *,
    decay: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    return_state: bool = False,
    return_chunk_states: bool = False,
    qk_l2norm: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    memory: str = "states",
    out: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """The delta rule: each token adds the difference between its value and what the state returns for its key. For every
    sequence and head, and its tokens t,

        S = exp(decay_t) S;  u_t = beta_t (v_t - S^T k_t);  S = S + k_t u_t^T;  o_t = scale S^T q_t

    q, k: (B, S, Hk, Dk). v, out: (B, S, H, Dv). beta: (B, S, H). For layout="bhsd" sequence and head are swapped. bfloat16
    or float16; beta and decay also float32. Dk and Dv: multiples of 16 up to 256; with decays of channels, or on
    GPUs that are not Hopper, Dk above 128 is slow. Hk divides H, and value head h reads key head h // (H // Hk). Any lengths.

    It is stable where beta |k|^2 is between 0 and 2. Relative errors of bfloat16 outputs are 4e-3 to 8e-3 for keys at random.
    They are greatest if all keys are the same, because the terms of the UT transform then cancel: 2e-2 for beta 1, 4e-2 to 0.5
    for 1.9, and no digit is left at 1.99; with decays of channels 4e-2, and 0.1 from 1.5 on. With family="sm_80", where the
    inverses and their factors have 16 bits, they are 2e-2 for beta 1 and 3e-2 to 5e-2 up to 2: use that for keys that repeat
    with beta near 2. Errors of float16 are an eighth of these; its range is that of attention.linear.

    decay: log decays, never positive: None; (H,), the same for all tokens; (B, S, H), for each token; or (B, S, H, Dk), for
    each token and channel of the keys. It and beta may be raw, as a layer projects them: attention.gates. scale: Dk^-1/2 by
    default. qk_l2norm: q and k are divided by their L2 norms first, sqrt(sum(x^2) + 1e-6). initial_state: (B, H, Dk, Dv)
    float32, 0 by default. out: written in place instead of a new array.

    cu_seqlens: (N + 1,) int32 or int64, on q's device: N packed sequences in a batch of 1, sequence n from cu_seqlens[n] to
    cu_seqlens[n + 1]; states are (N, H, Dk, Dv). It must ascend from 0 to S. For arrays in host memory this is checked, and so
    is that no decay is above 0; on a GPU only with TILES_CHECK=1, which makes the call wait for the device. Without a check,
    tokens after cu_seqlens[-1] are padding: they are not read, and their outputs are 0.

    memory: what forward stores for the backward pass. "states": in training, by torch's autograd or JAX's, what gradients read
    of each chunk of 64 tokens, in q's dtype: the state before it, the errors v - S^T k of its tokens, the inverse of its UT
    transform, and its beta and decays; with decays of channels also its scores and its decayed queries and keys. On Hopper, for
    Dk and Dv up to 128, and where that is faster: where heads of sequences are more than half of the multiprocessors, or an
    eighth if sequences are packed or channels have decays. With H = Hk and Dk = Dv = 128 it is 4/3 as large as q, k and v, with
    decays of channels 5/2. "recompute": nothing, and the backward pass computes it again. return_chunk_states: return it, too,
    as a named tuple for delta_rule_backward.

    Returns `out`, the same kind of array as q, or with return_state=True `(out, state)`. state is a new float32
    array (B, H, Dk, Dv), C-ordered: that of each sequence after its last token. With return_chunk_states=True what gradients
    read comes last; the last bits of `out` may then be others.

    On Hopper sequences are processed in chunks of 64 tokens, on tensor cores. A few long sequences with Dk up to 128 take two
    passes: the first computes everything that does not depend on the state, for all chunks at once, in scratch memory. Or they
    are cut into segments of chunks, which are processed at the same time (docs/linear_kernels.md). Inputs whose addresses or
    strides are not multiples of 16 bytes are copied first. With decays of channels, chunks in which a channel decays by more
    than exp(-119), or exp(-15) for float16, take up to 2.6 times as long as others (docs/speed.md).

    Calls on other GPUs, and those whose `out` has other addresses or strides, use mma.sync and cp.async, in two passes, too;
    their scratch memory is 25 KiB for each chunk of a head, 73 for Dk 128 with decays of channels. Dk above 128 is computed
    token by token there, and on Hopper if channels have decays: all factors and sums are float32; correct, and slow.

    Arrays, `stream`, `family` ("sm_80" is mma.sync and cp.async) and errors are those of attention.forward. out and state have
    gradients, in torch and JAX: `delta_rule_backward`. flash-linear-attention's names: attention.compat.fla."""
    return_state = check_flag("return_state", return_state)
    return_chunk_states = check_flag("return_chunk_states", return_chunk_states)
    check_memory(memory)
    options = check_number("scale", scale), return_state, family
    if is_raw(decay, beta, qk_l2norm):
        split_arguments = check_flag("qk_l2norm", qk_l2norm), layout, (v, initial_state)
        q, k, decay, beta, gate, raw = split_raw(q, k, decay, beta, *split_arguments)
        if raw is not NOT_RAW:
            if return_chunk_states:
                raise NotImplementedError(NO_RAW_RECORD)
            arrays = q, k, v, beta, decay, cu_seqlens, initial_state, *gate, out, None
            return _delta_rule_raw(stream, arrays, (*options, *raw), layout)
    if requires_grad(*(differentiable := (q, k, v, beta, decay, initial_state))) or torch_op.is_mapped_with_grad(
        differentiable
    ):
        refuse_with_gradients(out=out, stream=stream, return_chunk_states=return_chunk_states or None)
        inputs = q, k, v, beta, decay, cu_seqlens, initial_state
        training_options = *options, False, choose_record(memory, q, v, decay, cu_seqlens, layout, family)
        return recurrent_autograd().call_with_gradients("delta_rule", inputs, training_options, layout)
    fields = ""
    if return_chunk_states:
        fields = record_fields(q, v, decay, cu_seqlens, layout)
    elif not torch_op.is_compiling() and any(map(jax_call.is_jax_tracer, differentiable)):
        fields = choose_record(memory, q, v, decay, cu_seqlens, layout, family)
    arrays = q, k, v, beta, decay, cu_seqlens, initial_state, out, None, *[None] * len(FIELDS)
    results = _delta_rule(stream, arrays, (*options, return_chunk_states, fields), layout)
    if not return_chunk_states:
        return results
    first = len(results) - len(fields.split())
    return *results[:first], join_record(fields, results[first:])


@DELTA_DERIVATIVE.make_program(DELTA_RULE)
def _delta_rule(
    problem: Problem, scale: float | None, return_state: bool, family: str | None, return_chunk_states: bool, memory: str
) -> Plan:
    """The Plan of a call of delta_rule. The schema's `state` and what it stores of chunks are results, which a caller cannot
    pass. memory: the fields of a record that are stored, if return_chunk_states says so."""
    fields = memory.split() if return_chunk_states else ()
    record = {field: problem[f"chunk_{field}"] for field in FIELDS if field in fields}
    return plan_delta_rule(problem, scale, return_state, family, NOT_RAW, record)


@program(RAW_DELTA_RULE, no_gradient=NO_RAW_GRADIENT)
def _delta_rule_raw(problem: Problem, scale: float | None, return_state: bool, family: str | None, raw: RawOptions) -> Plan:
    """The Plan of a call of delta_rule with raw inputs."""
    return plan_delta_rule(problem, scale, return_state, family, raw)


def plan_delta_rule(
    problem: Problem,
    scale: float | None,
    return_state: bool,
    family: str | None,
    raw: RawOptions,
    record: recurrent_chunks.Arrays | None = None,
) -> Plan:
    """The Plan of a call of delta_rule. raw: the formulas that kernels apply to raw inputs. record: where to store what
    gradients read, by field (plans/delta/delta_records.py)."""
    recurrent_checks.check_extents(problem)
    scale, by_channel = recurrent_checks.resolve_scale(problem, scale), recurrent_checks.has_channel_decay(problem)
    batch, length, key_dim = problem("batch", "seqlen", "key_dim")
    max_key_dim = max(DELTA_KEY_DIMS if by_channel else delta_hopper.STAGES)
    if family == HOPPER_FAMILY and key_dim > max_key_dim:
        raise ValueError(f"family: sm_90 takes keys of at most {max_key_dim} columns: {family=}, q has {key_dim}")
    if recurrent_checks.has_nothing_to_compute(problem, return_state):
        choose_family(problem, family, tma=True)  # for its errors; arrays without elements have no address
        return Plan([])
    arrays = recurrent_checks.kernel_arrays(problem, return_state) | {"gBeta": problem["beta"]}
    gates, on_hopper = gate_operand(problem), uses_hopper_kernels(problem, family, by_tma(problem, "out"))
    if record:
        check_record(problem, on_hopper)
        scratch = recurrent_chunks.ScratchAllocator(problem)
        if batch * length:
            arrays |= {"gGates": gates, "gO": problem["out"]}
            return Plan(plan_forward_with_record(problem, arrays, scale, scratch, record), scratch.shapes)
    if on_hopper and key_dim <= max_key_dim and batch * length:
        arrays |= {"gGates": gates, "gO": problem["out"]} | formula_arrays(problem)
        return Plan(*_plan_chunks(problem, arrays, by_channel, scale, raw))
    if serves_delta_chunks(problem):
        scratch = recurrent_chunks.ScratchAllocator(problem)
        arrays |= {"gGates": gates, "gO": problem["out"]}
        return Plan(plan_delta_chunks(problem, arrays, scale, scratch, raw), scratch.shapes)
    return Plan([token_loop.launch(problem, arrays | {"gDecay": gates, "gOut": problem["out"]}, scale, raw=raw)])


def final_states(
    k: Any,
    v: Any,
    beta: Any,
    initial_state: Any,
    *,
    decay: Any = None,
    skipped: Any = None,
    cu_seqlens: Any = None,
    family: str | None = None,
) -> Any:
    """The state after each sequence under delta_rule, without outputs: (N, H, Dk, columns) in float32, with as many columns as
    initial_state. Columns beyond those of v have values of 0. decay: None, (H,) or (B, S, H).

    skipped: (N, H, 1) float32: how many chunks of 64 tokens to skip at the start of each sequence, together with the initial
    state, because their effect has decayed to nothing at its end."""
    return _final_states(None, (k, v, beta, decay, cu_seqlens, initial_state, skipped, None), (family,))


@program(DELTA_STATES)
def _final_states(problem: Problem, family: str | None) -> Plan:
    """The Plan of a call of final_states. The schema's `state` is a result."""
    recurrent_checks.check_extents(problem, "k", "v")
    batch, length, heads, key_dim, value_dim, columns = problem(
        "batch", "seqlen", "heads", "key_dim", "value_dim", "state_columns"
    )
    if columns < value_dim:
        raise problem.error("initial_state", "must have at least as many columns as v", "initial_state", "v")
    arrays = {"gK": problem["k"], "gV": problem["v"], "gBeta": problem["beta"], "gCuSeqlens": problem["cu_seqlens"]}
    arrays |= {"gInitialState": problem["initial_state"], "gFinalState": problem["state"]}
    if recurrent_checks.has_nothing_to_compute(problem, True):
        return Plan([])
    if uses_hopper_kernels(problem, family) and key_dim <= max(delta_states_hopper.KEY_DIMS) and batch * length:
        arrays |= {"gGates": problem["decay"], "gSkippedChunks": problem["skipped"]}
        return Plan([scan_chunks(problem, arrays, columns, delta_states_hopper, 1)])
    if serves_delta_chunks(problem):
        scratch = recurrent_chunks.ScratchAllocator(problem)
        arrays |= {"gGates": problem["decay"], "gQ": problem["k"], "gO": None}
        return Plan(plan_delta_chunks(problem, arrays, 0.0, scratch, columns=columns), scratch.shapes)
    outputs = (batch, length, heads, value_dim), "bfloat16"  # the token loop writes them, and nobody reads them
    arrays |= {"gQ": problem["k"], "gDecay": problem["decay"], "gOut": problem.scratch(0, *outputs)}
    return Plan([token_loop.launch(problem, arrays, 0.0, columns=columns)], [outputs])


def _plan_chunks(
    problem: Problem, arrays: dict, by_channel: bool, scale: float, raw: RawOptions
) -> tuple[list[Step], recurrent_chunks.ScratchShapes]:
    """(launches of Hopper's kernels, scratch memory between them): one of a kernel that computes everything itself, or those of
    a walk if sequences are few (delta_walk.py, delta_channel_walk.py), or with decays of channels three if sequences are
    cut into segments."""
    scratch = recurrent_chunks.ScratchAllocator(problem)
    # Do the kernels normalise queries and keys? See l2norm.py.
    kernel_normalizes = by_channel or problem.dtype == "bfloat16"
    steps, copies = prepare_rows(problem, scratch, raw.l2norm and not kernel_normalizes, channel_gates=by_channel)
    raw = raw._replace(l2norm=raw.l2norm and kernel_normalizes)
    arrays = arrays | copies
    if by_channel:
        plan = plan_channel_walk if serves_channel_walk(problem) else plan_channel_scans
        steps += plan(problem, arrays, scale, raw, scratch)
    elif serves_walk(problem):
        steps += plan_walk(problem, arrays, scale, raw, scratch)
    else:
        columns = problem.extents["value_dim"]
        steps.append(scan_chunks(problem, arrays, columns, delta_hopper, 1, raw=raw, segments=1, scale=scale))
    return steps, scratch.shapes
