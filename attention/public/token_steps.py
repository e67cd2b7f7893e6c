"""attention.linear_step: one token of linear attention. The kernel reads and writes the state once."""

from typing import Any

from tiles.calls.plan import Plan
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema
from tiles.launching.arrays import ALIGNMENT, Operand

from ..names import suggests_argument_names
from ..options import check_flag, check_number
from ..plans.recurrent import recurrent_checks, token_loop
from ..plans.recurrent.raw_inputs import NO_RAW_GRADIENT, NOT_RAW, RawOptions, is_raw, split_raw

TOKEN = """
    q      (batch, heads_k, key_dim)                       tile
    k      (batch, heads_k, key_dim)                       tile
    v      (batch, heads, value_dim)                       tile
    state  (batch, heads, key_dim, value_dim)              float32  updated
    decay  (heads)|(batch, heads)|(batch, heads, key_dim)  log      optional
    beta   (batch, heads)                                  real     optional
"""
RAW_GATE = """
    gate     (batch, heads)|(batch, heads, key_dim)  real  optional
    A_log    (heads)                                 real  optional
    dt_bias  (heads)|(heads, key_dim)                real  optional
"""
OUT = """
    out    (batch, heads, value_dim)                       tile     output
"""
STEP, RAW_STEP = Schema("linear_step", TOKEN + OUT), Schema("linear_step_raw", TOKEN + RAW_GATE + OUT)


@suggests_argument_names
def linear_step(
    state: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    beta: Any = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """One token of linear attention; `state` is updated in place. For every sequence and head,

        S = exp(decay) S;  v = beta (v - S^T k);  S = S + k v^T;  o = scale S^T q

    state: (B, H, Dk, Dv) float32, its rows contiguous and aligned to 16 bytes: what the functions of whole sequences return
    with return_state=True. q, k: (B, Hk, Dk), bfloat16 or float16; value head h reads key head h // (H // Hk). v, out:
    (B, H, Dv). Dk and Dv: multiples of 16 up to 256. B and H: up to 65535.

    decay: log decays (<= 0), float32, bfloat16 or float16: None (linear attention), (H,) (retention, lightning), (B, H)
    (simple GLA, gated delta rule) or (B, H, Dk) (GLA, KDA). beta: None, or (B, H) for the delta rule. Both may be raw, as
    layers project them (attention.gates). scale: Dk^-1/2 by default. qk_l2norm: q and k are divided by their L2 norms first.

    Mamba-2's step is q=C, k=B, v=dt * x, decay=dt * A, scale=1, plus D * x; its state is transposed. There is no step with
    normalize=True. JAX arrays cannot be overwritten, so a state cannot be one.

    Returns `out`, the same kind of array as q. Arrays, `stream` and errors are those of attention.forward. There
    is no gradient."""
    scale = check_number("scale", scale)
    if is_raw(decay, beta, qk_l2norm):
        l2norm = check_flag("qk_l2norm", qk_l2norm)
        q, k, decay, beta, gate, raw = split_raw(q, k, decay, beta, l2norm, "bhsd", (v, state))
        if raw is not NOT_RAW:
            return _linear_step_raw(stream, (q, k, v, state, decay, beta, *gate, out), (scale, *raw))
    return _linear_step(stream, (q, k, v, state, decay, beta, out), (scale,))


@program(STEP)
def _linear_step(problem: Problem, scale: float | None) -> Plan:
    """The Plan of a call of linear_step."""
    return plan_step(problem, scale, NOT_RAW)


@program(RAW_STEP, no_gradient=NO_RAW_GRADIENT)
def _linear_step_raw(problem: Problem, scale: float | None, raw: RawOptions) -> Plan:
    """The Plan of a call of linear_step with raw inputs."""
    return plan_step(problem, scale, raw)


def plan_step(problem: Problem, scale: float | None, raw: RawOptions) -> Plan:
    """The Plan of a call of linear_step. raw: the formulas that the kernel applies to raw inputs."""
    recurrent_checks.check_extents(problem)
    scale, state = recurrent_checks.resolve_scale(problem, scale), problem["state"]
    recurrent_checks.has_channel_decay(problem)
    if 0 in problem["out"].form.shape:  # arrays without elements have no strides that matter
        return Plan([])
    if state.form.strides[-1] != state.form.itemsize or problem.bytes_at_once("state") < ALIGNMENT:
        raise ValueError(
            f"state: last axis must be contiguous, address and other strides multiples of {ALIGNMENT} bytes: "
            f"address {state.form.misalignment} past one, state.strides={state.form.strides} bytes, "
            f"state.shape={state.form.shape}"
        )
    arrays = {
        "gQ": "q",
        "gK": "k",
        "gV": "v",
        "gDecay": "decay" if "decay" in problem else "gate",
        "gBeta": "beta",
        "gOut": "out",
    }
    tokens = {parameter: _add_token_axis(problem[name]) for parameter, name in arrays.items()}
    return Plan([token_loop.launch(problem, tokens | {"gInitialState": state}, scale, single=True, raw=raw)])


def _add_token_axis(x: Operand | None) -> Operand | None:
    """The array with an axis of one token; a decay (H,), which has no such axis, as it is."""
    return x if x is None or len(x.form.shape) == 1 else x.spread(1, 1)
