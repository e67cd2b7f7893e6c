"""attention.delta_rule_backward: the gradients of attention.delta_rule, with decays of any kind."""

from typing import Any

from tiles.calls.plan import Plan
from tiles.calls.program import program
from tiles.calls.schema import Problem

from ..names import suggests_argument_names
from ..options import check_flag, check_number
from ..plans.delta.delta_gradients import plan_delta_gradients
from ..plans.delta.delta_records import ARGUMENT_ROWS, FIELDS, STORED_NAMES, record_schema, split_record
from ..plans.recurrent import recurrent_checks, recurrent_chunks, recurrent_gradients
from ..plans.recurrent.aligned_inputs import align_for_hopper
from ..plans.recurrent.gradient_accumulation import accumulating_schema, add_gradients, make_accumulating_program
from ..plans.recurrent.raw_inputs import refuse_raw
from ..plans.recurrent.recurrent_derivative import RecurrentDerivative, choose_optional_gradients, no_second_derivatives
from ..plans.requires_grad import without_gradients

ARRAYS = (
    """
    dout            (batch, seqlen, heads, value_dim)                               tile
    q               (batch, seqlen, heads_k, key_dim)                               tile
    k               (batch, seqlen, heads_k, key_dim)                               tile
    v               (batch, seqlen, heads, value_dim)                               tile
    beta            (batch, seqlen, heads)                                          real
    decay           (heads)|(batch, seqlen, heads)|(batch, seqlen, heads, key_dim)  log      optional
    cu_seqlens      (ends)                                                          ends     optional
    initial_state   (sequences, heads, key_dim, value_dim)                          float32  optional
    dstate          (sequences, heads, key_dim, value_dim)                          float32  optional
"""
    + ARGUMENT_ROWS
    + """
    dq              (batch, seqlen, heads_k, key_dim)                               tile     output
    dk              (batch, seqlen, heads_k, key_dim)                               tile     output
    dv              (batch, seqlen, heads, value_dim)                               tile     output
    dbeta           (batch, seqlen, heads)                                          float32  output
    ddecay          =decay                                                          float32  output  grads:ddecay
    dinitial_state  (sequences, heads, key_dim, value_dim)                          float32  output  grads:dinitial_state
    """
)
DELTA_RULE_BACKWARD = record_schema("delta_rule_backward", ARRAYS)
GRADIENTS = "dq", "dk", "dv", "dbeta", "ddecay", "dinitial_state"


@suggests_argument_names
@without_gradients
def delta_rule_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    *,
    decay: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    dstate: Any = None,
    chunk_states: Any = None,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dbeta: Any = None,
    ddecay: Any = None,
    dinitial_state: Any = None,
    accumulate: bool = False,
    stream: Any = None,
    family: str | None = None,
) -> tuple[Any, ...]:
    """Gradients of attention.delta_rule. For a loss L, dout = dL/dout and dstate = dL/dstate, of the state that it returns.
    With a token's S' = exp(decay_t) S_(t-1), e_t = v_t - S'^T k_t, u_t = beta_t e_t and S_t = S' + k_t u_t^T, from the last
    token to the first, where dS is dstate at first,

        dS = dS + scale q_t dout_t^T    du_t = dS^T k_t    dv_t = beta_t du_t    dbeta_t = du_t . e_t
        dq_t = scale S_t dout_t         dk_t = dS u_t - S' dv_t
        dS = dS - k_t dv_t^T            ddecay_t = sum(S' * dS), over S' or over each of its rows
        dS = exp(decay_t) dS            which is dinitial_state at last

    dout: as out. dstate: (B, H, Dk, Dv) float32, None where L does not depend on the state. q, k, v, beta, decay, scale,
    initial_state, cu_seqlens, layout: what delta_rule was called with. chunk_states: what delta_rule(..,
    return_chunk_states=True) returned last, so that it need not be computed again.

    dq, dk, dv, dbeta, ddecay, dinitial_state: arrays to write to instead of new ones; the first three have the dtype and shape
    of q, k and v. dbeta: as beta, float32. ddecay: as decay, float32; False where it is not wanted. For a decay of each head it
    is the sum over all tokens. A decay below -100, as -inf, counts as -inf and has a gradient of 0. dinitial_state: as
    initial_state; False where it is not wanted, True where it is and there is no initial state. Heads that share a key head add
    to its gradients. Tokens after cu_seqlens[-1] have gradients of 0. accumulate: gradients are added to what these arrays
    hold. Then all that are wanted must be passed, as float32 arrays; those of q, k and v are rounded to q's dtype before. It
    takes scratch memory for all gradients, and one more pass over them.

    Of what forward computed chunk_states alone is read, on Hopper; gradients have the same bits with it. All sums are made in
    float32, in a fixed order: the same bits every time. Sequences are processed in chunks of 64 tokens, on tensor cores: states
    before each chunk, then gradients from the last chunk to the first. Relative errors of bfloat16 gradients are 2e-3 to 9e-3
    for keys at random; if all keys are the same 6e-3 for beta 1, and of dq 2e-2 for 1.9, 3e-2 for 2. float16 has an eighth of
    that; the elements of states and of their gradients are rounded to float16, and infinite beyond 65504. Dk above 128, and
    decays of channels on GPUs with less than 163 KiB of shared memory, are computed token by token, with all factors in
    float32: correct, and slow. Chunks need scratch memory: 184 KiB for each of a head with Dk = Dv = 128 if channels have
    decays, else 136, but on Hopper, for Dv up to 128, 153 and 65 (89 where there are fewer heads of sequences than
    multiprocessors), and where heads share a key head what dq and dk of each take, which are rounded before they are added;
    chunk_states has all but the latter, and but 32 KiB with decays of channels. On Hopper a head of more columns counts as
    several of up to 128; v, dout and dv are copied where their strides do not put these side by side, as with layout "bhsd".
    stream, family: as in delta_rule.

    Returns (dq, dk, dv, dbeta), followed, in this order, by ddecay if there is a decay, and dinitial_state if there is an
    initial state, unless they are False. Arrays and errors are those of delta_rule. Source: the equations for chunks are
    derived in attention/parts/delta/delta_chunks.py, from the UT transform (Yang et al. 2024)."""
    refuse_raw(beta=beta, decay=decay)
    grads, optional_gradients = choose_optional_gradients(
        ddecay=(decay, ddecay), dinitial_state=(initial_state, dinitial_state)
    )
    inputs = dout, q, k, v, beta, decay, cu_seqlens, initial_state, dstate, *split_record(chunk_states)
    gradients = dict(zip(GRADIENTS, (dq, dk, dv, dbeta, *optional_gradients)))
    options = check_number("scale", scale), grads, family
    if check_flag("accumulate", accumulate):
        return add_gradients(_delta_rule_backward_into, stream, inputs, gradients, options, grads, layout)
    return _delta_rule_backward(stream, (*inputs, *gradients.values()), options, layout)


@program(DELTA_RULE_BACKWARD, no_gradient=no_second_derivatives("attention.delta_rule"))
def _delta_rule_backward(problem: Problem, scale: float | None, grads: str, family: str | None) -> Plan:
    """The Plan of a call of delta_rule_backward. grads: the names of gradients to compute besides dq, dk, dv and
    dbeta."""
    recurrent_checks.check_extents(problem)
    scale = recurrent_checks.resolve_scale(problem, scale)
    if not problem.extents["heads"]:
        raise problem.error("v", "must have at least one head", "v")
    arrays = recurrent_gradients.gradient_arrays(problem, *(name in grads.split() for name in ("ddecay", "dinitial_state")))
    arrays |= {name: problem[name] for name in ("beta", "dbeta")}
    record = {field: problem[f"chunk_{field}"] for field in FIELDS}
    scratch = recurrent_chunks.ScratchAllocator(problem)
    on_hopper, problem, arrays, copies = align_for_hopper(problem, family, arrays, scratch)
    return Plan([*copies, *plan_delta_gradients(problem, arrays, scale, scratch, on_hopper, record)], scratch.shapes)


DELTA_DERIVATIVE = RecurrentDerivative("attention.delta_rule", _delta_rule_backward, stored=STORED_NAMES)
_delta_rule_backward_into = make_accumulating_program(
    _delta_rule_backward, accumulating_schema(DELTA_RULE_BACKWARD, ARRAYS, record_schema)
)
