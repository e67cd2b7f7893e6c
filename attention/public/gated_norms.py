"""attention.gated_rms_norm, the norm with an output gate that stands behind recurrent layers, and its gradients."""

from typing import Any, cast

from tiles.calls import torch_op
from tiles.calls.plan import Plan
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema

from ..names import suggests_argument_names
from ..options import check_flag, check_positive, show_argument
from ..plans.recurrent.gated_norm import plan_gated_norm, plan_gated_norm_gradients
from ..plans.recurrent.recurrent_derivative import RecurrentDerivative, no_second_derivatives
from ..plans.requires_grad import recurrent_autograd, refuse_with_gradients, requires_grad, without_gradients

ACTIVATIONS = "silu", "sigmoid"
ROWS = """
    x       (batch, seqlen, heads, head_dim)  tile
    weight  (head_dim)|(heads, head_dim)      real
    gate    (batch, seqlen, heads, head_dim)  tile  optional
"""
RESULTS = """
    out     (batch, seqlen, heads, head_dim)  tile  output
"""
GRADIENTS = """
    dx       (batch, seqlen, heads, head_dim)  tile     output
    dweight  =weight                           float32  output
    dgate    (batch, seqlen, heads, head_dim)  tile     output  grads:dgate
"""
GATED_NORM = Schema("gated_rms_norm", ROWS + RESULTS)
GATED_NORM_BACKWARD = Schema("gated_rms_norm_backward", "    dout  (batch, seqlen, heads, head_dim)  tile" + ROWS + GRADIENTS)


def check_options(eps: Any, activation: Any, norm_before_gate: Any) -> tuple[float, str, bool]:
    """(eps, activation, norm_before_gate) of a call. ValueError, TypeError: one of them has no such value or type."""
    if activation not in (*ACTIVATIONS, "swish"):
        raise ValueError(f'activation: must be "silu" (also called swish) or "sigmoid": {activation=}')
    activation = "silu" if activation == "swish" else activation
    return cast(float, check_positive("eps", eps)), activation, check_flag("norm_before_gate", norm_before_gate)


@suggests_argument_names
def gated_rms_norm(
    x: Any,
    weight: Any,
    gate: Any = None,
    *,
    eps: float = 1e-5,
    activation: str = "silu",
    norm_before_gate: bool = True,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """The RMS norm of each head's rows, and an output gate:

        y = norm(x) act(gate), or with norm_before_gate=False norm(x act(gate)), with norm(u) = weight u / sqrt(mean(u^2) + eps)

    x, gate, out: (B, S, H, D), bfloat16 or float16, D a multiple of 32 up to 8192; the heads of a token must be contiguous, all
    other strides are free: the gate may be a view of a projection. weight: (D), the same for all heads, or (H, D); float32,
    bfloat16 or float16. Groups of a row that have means of their own (Mamba-2) are heads. activation: act, "silu" (Qwen,
    Mamba-2) or "sigmoid" (Kimi). Without a gate this is the norm alone. It is computed in float32, and rounded once.

    Returns `out`, the same kind of array as x, at memory speed, on GPUs since Ampere. Gradients: gated_rms_norm_backward, which
    torch's autograd and jax.grad call. Arrays, `stream` and errors are those of attention.forward."""
    options = check_options(eps, activation, norm_before_gate)
    if requires_grad(*(differentiable := (x, weight, gate))) or torch_op.is_mapped_with_grad(differentiable):
        refuse_with_gradients(out=out, stream=stream)
        return recurrent_autograd().call_with_gradients("gated_rms_norm", differentiable, options)
    return _gated_norm(stream, (x, weight, gate, out), options)


@suggests_argument_names
@without_gradients
def gated_rms_norm_backward(
    dout: Any,
    x: Any,
    weight: Any,
    gate: Any = None,
    *,
    eps: float = 1e-5,
    activation: str = "silu",
    norm_before_gate: bool = True,
    dx: Any = None,
    dweight: Any = None,
    dgate: Any = None,
    stream: Any = None,
) -> tuple[Any, ...]:
    """Gradients of attention.gated_rms_norm, from dout = dL/dout of a loss L. With n = u / sqrt(mean(u^2) + eps), where u is x,
    or x act(gate) if the gate comes first,

        du = (dn - n mean(dn n)) / sqrt(mean(u^2) + eps), where dn = dout weight, times act(gate) if the gate comes after
        dweight = sum dout n, times act(gate) likewise

    dout: as out. The others are what gated_rms_norm was called with. dx, dweight, dgate: arrays to write to instead of new
    ones; dweight is float32. dgate: False if it is not wanted. Sums are made in float32 and in a fixed order: the same bits
    every time. Nothing that forward computed is read.

    Returns (dx, dweight), followed by dgate if there is a gate, unless it is False. Arrays and errors are those of
    gated_rms_norm."""
    if gate is None and dgate is not None and dgate is not False:
        raise ValueError(f"dgate: must be None where there is no gate: {show_argument('dgate', dgate)}")
    grads = "dgate" if gate is not None and dgate is not False else ""
    dgate_out = None if isinstance(dgate, bool) else dgate
    options = *check_options(eps, activation, norm_before_gate), grads
    return _gated_norm_backward(stream, (dout, x, weight, gate, dx, dweight, dgate_out), options)


@program(GATED_NORM_BACKWARD, no_gradient=no_second_derivatives("attention.gated_rms_norm"))
def _gated_norm_backward(problem: Problem, eps: float, activation: str, norm_before_gate: bool, grads: str) -> Plan:
    """The Plan of a call of gated_rms_norm_backward. grads: "dgate" if it is wanted."""
    return plan_gated_norm_gradients(problem, eps, activation, norm_before_gate, "dgate" in grads.split())


GATED_NORM_DERIVATIVE = RecurrentDerivative("attention.gated_rms_norm", _gated_norm_backward, "x", ("x", "gate"), of_rows=True)


@GATED_NORM_DERIVATIVE.make_program(GATED_NORM)
def _gated_norm(problem: Problem, eps: float, activation: str, norm_before_gate: bool) -> Plan:
    """The Plan of a call of gated_rms_norm."""
    return plan_gated_norm(problem, eps, activation, norm_before_gate)
