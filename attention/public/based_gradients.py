"""attention.based_backward: the gradients of attention.based."""

from typing import Any

from ops.for_attention.taylor_features import BASE, FEATURES
from tiles.calls.plan import Plan
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema

from ..families import uses_hopper_kernels
from ..names import suggests_argument_names
from ..options import check_flag, check_number
from ..plans.recurrent import recurrent_checks
from ..plans.recurrent.based_gradients import plan_based_gradients
from ..plans.recurrent.recurrent_derivative import RecurrentDerivative, choose_optional_gradients, no_second_derivatives
from ..plans.requires_grad import without_gradients

BASED_BACKWARD = Schema(
    "based_backward",
    """
    dout            (batch, seqlen, heads, value_dim)        tile
    q               (batch, seqlen, heads_k, key_dim)        tile
    k               (batch, seqlen, heads_k, key_dim)        tile
    v               (batch, seqlen, heads, value_dim)        tile
    cu_seqlens      (ends)                                   ends     optional
    initial_state   (sequences, heads, features, value_dim)  float32  optional
    initial_z       (sequences, heads, features)             float32  optional
    dstate          (sequences, heads, features, value_dim)  float32  optional
    dz              (sequences, heads, features)             float32  optional
    dq              (batch, seqlen, heads_k, key_dim)        tile     output
    dk              (batch, seqlen, heads_k, key_dim)        tile     output
    dv              (batch, seqlen, heads, value_dim)        tile     output
    dinitial_state  (sequences, heads, features, value_dim)  float32  output  grads:dinitial_state
    dinitial_z      (sequences, heads, features)             float32  output  grads:dinitial_z
    """,
    features=FEATURES,
)


@suggests_argument_names
@without_gradients
def based_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    normalize: bool = True,
    initial_state: Any = None,
    dstate: Any = None,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dinitial_state: Any = None,
    stream: Any = None,
) -> tuple[Any, ...]:
    """Gradients of attention.based. For a loss L, dout = dL/dout and dstate = dL/dstate, of the state that it returns. Based is
    linear(f(scale q), f(k), v, scale=1), where f has 160 features and the squares of f(k) are halved. So its gradients are
    those of attention.linear_backward, and from the gradient df of features that of a row x is

        dx_i = df_i + sum over j of df_ij x_j

    for the features x_i and x_i x_j. dout: as out. dstate: as the state, float32, None where L does not depend on it; with
    normalize=True a pair, one of which may be None. q, k, v, scale, normalize, initial_state, cu_seqlens, layout: what based
    was called with.

    dq, dk, dv, dinitial_state: arrays to write to instead of new ones. The first three have the dtype and shape of q, k and v;
    dinitial_state: as initial_state; False where it is not wanted, True where it is and there is no initial state. Heads that
    share a key head add to its gradients. Tokens after cu_seqlens[-1] have gradients of 0.

    On Hopper, where Dv is at most 64, two walks over the chunks of a head compute all gradients, and read and write only q, k,
    v, dout, the gradients and two numbers for each token and head. Otherwise features and their gradients, 10 times the size of
    q and k, are written to memory in q's dtype, the three scans of linear attention pad them to 256 channels, and
    normalize=True adds two walks token by token, which is slow. In float16 features, their gradients and the elements of states
    must stay below 65504. All sums are made in a fixed order: the same bits every time.

    Returns (dq, dk, dv), followed by dinitial_state if there is an initial state, unless it is False. On GPUs since Ampere.
    Arrays, `stream` and errors are those of based."""
    normalize = check_flag("normalize", normalize)
    grads, (dinitial_state_out,) = choose_optional_gradients(dinitial_state=(initial_state, dinitial_state))
    grads += " dinitial_z" * (normalize and bool(grads))
    states = recurrent_checks.split_states(normalize, initial_state, dstate, dinitial_state_out)
    arrays = dout, q, k, v, cu_seqlens, *states.inputs, dq, dk, dv, *states.gradients
    results = _based_backward(stream, arrays, (check_number("scale", scale), normalize, grads), layout)
    return (*results[:-2], results[-2:]) if "dinitial_z" in grads else results


@program(BASED_BACKWARD, no_gradient=no_second_derivatives("attention.based"))
def _based_backward(problem: Problem, scale: float | None, normalize: bool, grads: str) -> Plan:
    """The Plan of a call of based_backward. grads: the names of gradients to compute besides dq, dk and dv."""
    recurrent_checks.check_extents(problem)
    scale = recurrent_checks.resolve_scale(problem, scale)
    if problem.extents["key_dim"] != BASE:
        raise ValueError(f"q: key_dim must be {BASE}: key_dim={problem.extents['key_dim']}, q.shape={problem.shape('q')}")
    if problem.extents["features"] != FEATURES:
        name = next(name for name in ("initial_state", "initial_z", "dstate", "dz") if name in problem)
        raise ValueError(f"{name}: must have {FEATURES} features: {name}.shape={problem.shape(name)}")
    if any(name in problem for name in ("dstate", "dz")) and problem.extents["batch"] and not problem.extents["seqlen"]:
        raise ValueError(f"q: must have a token, for dstate: q.shape={problem.shape('q')}")
    vector_bytes = 0 if uses_hopper_kernels(problem, None) else problem.bytes_at_once()
    return plan_based_gradients(problem, scale, normalize, "dinitial_state" in grads, vector_bytes)


BASED_DERIVATIVE = RecurrentDerivative("attention.based", _based_backward)
