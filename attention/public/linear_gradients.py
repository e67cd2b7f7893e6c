"""attention.linear_backward: the gradients of attention.linear, and so of retention, lightning and gla, which call linear."""

import functools
from typing import Any

from tiles.calls.plan import Plan, return_none
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema

from ..families import uses_hopper_kernels
from ..names import suggests_argument_names
from ..options import check_accumulators, check_flag, check_number
from ..plans.recurrent import recurrent_checks, recurrent_chunks, recurrent_gradients
from ..plans.recurrent.aligned_inputs import align_for_hopper
from ..plans.recurrent.normalizer_gradients import plan_normalized_gradients
from ..plans.recurrent.raw_inputs import refuse_raw
from ..plans.recurrent.recurrent_derivative import RecurrentDerivative, choose_optional_gradients, no_second_derivatives
from ..plans.recurrent.token_loop_gradients import plan_linear_gradients
from ..plans.requires_grad import without_gradients

INPUTS = """
    dout            (batch, seqlen, heads, value_dim)                               tile
    q               (batch, seqlen, heads_k, key_dim)                               tile
    k               (batch, seqlen, heads_k, key_dim)                               tile
    v               (batch, seqlen, heads, value_dim)                               tile
    decay           (heads)|(batch, seqlen, heads)|(batch, seqlen, heads, key_dim)  log      optional
    cu_seqlens      (ends)                                                          ends     optional
    initial_state   (sequences, heads, key_dim, value_dim)                          float32  optional
    initial_z       (sequences, heads, key_dim)                                     float32  optional
    dstate          (sequences, heads, key_dim, value_dim)                          float32  optional
    dfinal_z        (sequences, heads, key_dim)                                     float32  optional
    chunk_states    (batch, chunks, heads, value_dim, key_dim)                      tile     optional
"""
RESULTS = """
    dq              (batch, seqlen, heads_k, key_dim)                               tile     output
    dk              (batch, seqlen, heads_k, key_dim)                               tile     output
    dv              (batch, seqlen, heads, value_dim)                               tile     output
    ddecay          =decay                                                          float32  output  grads:ddecay
    dinitial_state  (sequences, heads, key_dim, value_dim)                          float32  output  grads:dinitial_state
    dinitial_z      (sequences, heads, key_dim)                                     float32  output  grads:dinitial_z
"""
LINEAR_BACKWARD = Schema("linear_backward", INPUTS + RESULTS, chunks=recurrent_chunks.count_chunks)
LINEAR_BACKWARD_FROM_SEGMENTS = Schema(
    "linear_backward_from_segments",
    INPUTS + recurrent_chunks.SEGMENT_RESULTS + RESULTS,
    chunks=recurrent_chunks.count_chunks,
)
LINEAR_BACKWARD_INTO = Schema(
    "linear_backward_into",
    INPUTS
    + """
    dq              (batch, seqlen, heads_k, key_dim)                               float32  updated
    dk              (batch, seqlen, heads_k, key_dim)                               float32  updated
    dv              (batch, seqlen, heads, value_dim)                               float32  updated
    ddecay          =decay                                                          float32  updated?
    dinitial_state  (sequences, heads, key_dim, value_dim)                          float32  updated?
    dinitial_z      (sequences, heads, key_dim)                                     float32  updated?
    """,
    chunks=recurrent_chunks.count_chunks,
)


GRADIENTS = "dq", "dk", "dv", "ddecay", "dinitial_state", "dinitial_z"


@suggests_argument_names
@without_gradients
def linear_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    dstate: Any = None,
    chunk_states: Any = None,
    normalize: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    ddecay: Any = None,
    dinitial_state: Any = None,
    accumulate: bool = False,
    stream: Any = None,
    family: str | None = None,
) -> tuple[Any, ...]:
    """Gradients of attention.linear. For a loss L, dout = dL/dout and dstate = dL/dstate, of the state that it returns. With
    P_tj = exp(decay_(j+1) + .. + decay_t) dout_t . v_j where j <= t, and states S_t and their gradients dS_t,

        dS_t = exp(decay_(t+1)) dS_(t+1) + scale q_(t+1) dout_(t+1)^T, after the last token dstate
        dq_t = scale S_t dout_t = scale sum_(j<=t) P_tj k_j + ..    dk_t = dS'_t v_t    dv_t = dS'_t^T k_t
        ddecay_t = sum_(i>=t) (q_i . dq_i - k_i . dk_i) + <state, dstate>    dinitial_state = dS_0

    where dS'_t = dS_t + scale q_t dout_t^T. dout: as out. dstate: (B, H, Dk, Dv) float32, None where L does not depend on the
    state. q, k, v, decay, scale, initial_state, normalize, cu_seqlens, layout: what linear was called with. chunk_states: what
    linear(.., return_chunk_states=True) returned last, so that states need not be computed again.

    normalize: with n_t = scale z_t . q_t + 1e-10, these are gradients for dout_t / n_t in place of dout_t, to which those of n
    are added; dn_t = -(q_t . dq_t) / n_t. initial_state, dstate and dinitial_state are pairs then, of S and of z; one of dstate
    may be None.

    dq, dk, dv, ddecay, dinitial_state: arrays to write to instead of new ones; the first three have the dtype and shape of q, k
    and v. ddecay: as decay, float32; False where it is not wanted. For a decay of each head it is the sum over all tokens. A
    decay below -100, as -inf, counts as -inf and has a gradient of 0. dinitial_state: as initial_state; False where it is not
    wanted, True where it is and there is no initial state. Heads that share a key head add to its gradients. Tokens after
    cu_seqlens[-1] have gradients of 0. accumulate: gradients are added to what these arrays hold. Then all that are wanted must
    be passed, as float32 arrays; accumulation takes as much memory again, and one more pass over it.

    Gradients are computed by three scans like attention.linear's, two of them from the last token to the first. On Hopper, with
    ddecay or chunk_states and Dk and Dv up to 128, one walk from the last chunk of 64 tokens to the first computes all of them.
    It reads the states before chunks, in q's dtype: chunk_states, or states that are computed again. Other kernels do not read
    chunk_states. All sums are made in float32, in a fixed order: the same bits every time. Where two heads of more than 64
    columns share a key head, what dq and dk of each take is rounded before it is added. ddecay is summed from products of
    unrounded gradients, chunk by chunk. float16: scale q . k, P and the elements of states and their gradients are rounded to
    float16, and infinite beyond 65504.

    With decays of channels gradients are computed by chunks, too. On Hopper, for float32 decays, Dk above 64 and up to 128, and
    Dv up to 128, by a walk, and by a second kernel for chunks of 64 tokens in which a channel's decays sum to less than about
    -144 over half of the tokens (float16: -11) or one of them is below -100
    (attention/kernels/recurrent/channel_gradients_hopper.py). Otherwise, for Dk up to 128, by three launches
    (attention/parts/recurrent/channel_chunks.py), which round the scores scale q . k to q's dtype, too, as sums of two numbers.
    They need 163 KiB of shared memory. If Dk is above 64, inputs that are not aligned to 16 bytes are copied for them, and dq,
    dk and dv must be aligned. Where no kernel takes Dv above 128, a head counts as several, with copies of its gates and
    states. All other calls are computed token by token: correct, and slow. normalize=True adds two walks token by token, which
    are slow, too. stream, family: as in linear.

    Returns (dq, dk, dv), followed, in this order, by ddecay if there is a decay, and dinitial_state if there is an initial
    state, unless they are False. Arrays and errors are those of linear. Source: each of the three is linear attention itself
    (Katharopoulos et al. 2020, 3.3.1), with decays as derived in attention/parts/recurrent/gradients.py."""
    normalize = check_flag("normalize", normalize)
    refuse_raw(decay=decay)
    grads, (ddecay_out, dinitial_state_out) = choose_optional_gradients(
        ddecay=(decay, ddecay), dinitial_state=(initial_state, dinitial_state)
    )
    grads += " dinitial_z" * (normalize and "dinitial_state" in grads)
    states = recurrent_checks.split_states(normalize, initial_state, dstate, dinitial_state_out)
    arrays = dout, q, k, v, decay, cu_seqlens, *states.inputs, chunk_states, dq, dk, dv, ddecay_out, *states.gradients
    options = check_number("scale", scale), grads, normalize, family
    if check_flag("accumulate", accumulate):
        gradients = dict(zip(GRADIENTS, (dq, dk, dv, ddecay_out, *states.gradients)))
        requested = {name: x for name, x in gradients.items() if name in GRADIENTS[:3] or name in grads.split()}
        check_accumulators(requested)
        _linear_backward_into(stream, arrays, options, layout)
        results = tuple(requested.values())
    else:
        results = _linear_backward(stream, arrays, options, layout)
    return (*results[:-2], results[-2:]) if "dinitial_z" in grads else results


@program(LINEAR_BACKWARD, no_gradient=no_second_derivatives("attention.linear"))
def _linear_backward(problem: Problem, scale: float | None, grads: str, normalize: bool, family: str | None) -> Plan:
    """The Plan of a call of linear_backward. grads: the names of gradients to compute besides dq, dk and dv."""
    recurrent_checks.check_extents(problem)
    scale = recurrent_checks.resolve_scale(problem, scale)
    if not problem.extents["heads"]:
        raise problem.error("v", "must have at least one head", "v")
    arrays = recurrent_gradients.gradient_arrays(problem, *(name in grads.split() for name in ("ddecay", "dinitial_state")))
    arrays |= {name: problem[name] for name in ("chunk_states", "local_state", "total_decay")}
    scratch = recurrent_chunks.ScratchAllocator(problem)
    recurrent_checks.check_normalizer(problem, family, normalize)
    if recurrent_checks.has_channel_decay(problem) and not normalize:
        tma, problem, arrays, copies = align_for_hopper(problem, family, arrays, scratch)
    else:
        tma, copies = uses_hopper_kernels(problem, family), []
    vector_bytes = 0 if tma else problem.bytes_at_once()
    plan = plan_normalized_gradients if normalize else plan_linear_gradients
    if normalize:
        arrays |= {name: problem[name] for name in ("initial_z", "dfinal_z")}
        arrays["dinitial_z"] = problem["dinitial_z"] if arrays["dinitial_state"] else None
    if problem.member == LINEAR_BACKWARD_INTO.name:
        plan = functools.partial(recurrent_gradients.plan_accumulation, plan)
        return Plan([*copies, *plan(problem, arrays, scale, vector_bytes, scratch)], scratch.shapes, return_none)
    return Plan([*copies, *plan(problem, arrays, scale, vector_bytes, scratch)], scratch.shapes)


_linear_backward_from_segments = program(LINEAR_BACKWARD_FROM_SEGMENTS)(_linear_backward.planner)


def gradients_from_segments(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    local_state: Any = None,
    total_decay: Any = None,
    decay: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    dstate: Any = None,
    chunk_states: Any = None,
    cu_seqlens: Any = None,
    ddecay: Any = None,
    dinitial_state: Any = None,
    family: str | None = None,
) -> tuple[Any, ...]:
    """linear_backward, to which the gradients of the states before segments are known, as linear_family.segment_states(q, q,
    dout, reverse=True) returns them, times the scale. Kernels that need them do not compute them again. ddecay,
    dinitial_state: are they wanted?"""
    options: dict[str, Any] = {"decay": decay, "scale": scale, "initial_state": initial_state, "dstate": dstate}
    if local_state is None:
        options |= {"chunk_states": chunk_states, "cu_seqlens": cu_seqlens, "ddecay": ddecay, "dinitial_state": dinitial_state}
        return linear_backward(dout, q, k, v, family=family, **options)
    grads, outputs = choose_optional_gradients(ddecay=(decay, ddecay), dinitial_state=(initial_state, dinitial_state))
    states = recurrent_checks.split_states(False, initial_state, dstate, outputs[1])
    arrays = dout, q, k, v, decay, cu_seqlens, *states.inputs, chunk_states, local_state, total_decay, *[None] * 6
    return _linear_backward_from_segments(None, arrays, (check_number("scale", scale), grads, False, family))


LINEAR_DERIVATIVE = RecurrentDerivative("attention.linear", _linear_backward, stored=("chunk_states",))
_linear_backward_into = program(LINEAR_BACKWARD_INTO)(_linear_backward.planner)
