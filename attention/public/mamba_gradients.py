"""attention.mamba2_backward: the gradients of attention.mamba2."""

import functools
import math
from typing import Any

from tiles.calls.plan import Plan
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema

from ..families import uses_hopper_kernels
from ..names import suggests_argument_names
from ..options import check_flag
from ..plans.recurrent import recurrent_checks
from ..plans.recurrent.gradient_accumulation import accumulating_schema, add_gradients, make_accumulating_program
from ..plans.recurrent.mamba2_gradients import plan_mamba2_gradients
from ..plans.recurrent.recurrent_checks import MAMBA2_AXES, DtOptions
from ..plans.recurrent.recurrent_chunks import count_chunks
from ..plans.recurrent.recurrent_derivative import RecurrentDerivative, choose_optional_gradients, no_second_derivatives
from ..plans.requires_grad import without_gradients

ROWS = """
    dout             (batch, seqlen, heads, value_dim)         tile
    x                (batch, seqlen, heads, value_dim)         tile
    dt               (batch, seqlen, heads)                    real
    A                (heads)                                   rate
    B                (batch, seqlen, heads_k, key_dim)         tile
    C                (batch, seqlen, heads_k, key_dim)         tile
    D                (heads)|(heads, value_dim)                real     optional
    z                (batch, seqlen, heads, value_dim)         tile     optional
    dt_bias          (heads)                                   real     optional
    cu_seqlens       (ends)                                    ends     optional
    initial_states   (sequences, heads, value_dim, key_dim)    float32  optional
    dstates          (sequences, heads, value_dim, key_dim)    float32  optional
    chunk_states     (batch, chunks, heads, value_dim, key_dim)  tile   optional
    dx               (batch, seqlen, heads, value_dim)         tile     output
    ddt              (batch, seqlen, heads)                    float32  output
    dA               (heads)                                   float32  output
    dB               (batch, seqlen, heads_k, key_dim)         tile     output
    dC               (batch, seqlen, heads_k, key_dim)         tile     output
    dD               =D                                        float32  output  grads:dD
    dz               (batch, seqlen, heads, value_dim)         tile     output  grads:dz
    ddt_bias         (heads)                                   float32  output  grads:ddt_bias
    dinitial_states  (sequences, heads, value_dim, key_dim)    float32  output  grads:dinitial_states
"""
make_schema = functools.partial(Schema, chunks=count_chunks, axis_names=MAMBA2_AXES)
MAMBA2_BACKWARD = make_schema("mamba2_backward", ROWS)
OPTIONAL = "D", "z", "dt_bias", "initial_states"  # arrays with gradients that may be left out
GRADIENTS = "dx", "ddt", "dA", "dB", "dC", "dD", "dz", "ddt_bias", "dinitial_states"


@suggests_argument_names
@without_gradients
def mamba2_backward(
    dout: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    *,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Any = None,
    dstates: Any = None,
    chunk_states: Any = None,
    cu_seqlens: Any = None,
    dx: Any = None,
    ddt: Any = None,
    dA: Any = None,
    dB: Any = None,
    dC: Any = None,
    dD: Any = None,
    dz: Any = None,
    ddt_bias: Any = None,
    dinitial_states: Any = None,
    accumulate: bool = False,
    stream: Any = None,
    family: str | None = None,
) -> tuple[Any, ...]:
    """Gradients of attention.mamba2. For a loss L, dout = dL/dout and dstates = dL/dstates, of the states that it returns. With
    dt as it is after softplus and dt_limit, dy = dout silu(z) or dout without z, y the output before that gate, and the
    gradients dv and dg of v = dt x and g = dt A in linear(q=C, k=B, v, decay=g, scale=1), as of attention.linear_backward,

        dx = dt dv + D dy       dD[h] = sum dy . x        dz = dout y silu'(z)        dA[h] = sum dt dg
        ddt = (dv . x + A dg) softplus'(dt + dt_bias)     ddt_bias[h] = sum ddt

    and dC = dq, dB = dk. Where dt would be beyond a limit, ddt is 0. dout: as out. dstates: (B, H, P, N) float32, None where L
    does not depend on the states. chunk_states: what mamba2(.., return_chunk_states=True) returned last, so that states need
    not be computed again. All others up to cu_seqlens: what mamba2 was called with. (seq_idx: pass cu_seqlens.)

    dx to dinitial_states: arrays to write to instead of new ones. dx, dB, dC and dz have the dtype and shape of x, B, C and z;
    ddt, dA, dD and ddt_bias are float32 in the shapes of dt, A, D and dt_bias. dD, dz, ddt_bias, dinitial_states: False for a
    gradient that is not wanted; dinitial_states=True for one that is, where there are no initial states. A gate dt A below -100
    counts as -inf, and has a gradient of 0. Tokens after cu_seqlens[-1] have gradients of 0, whatever they hold. accumulate:
    gradients are added to what these arrays hold. Then all that are wanted must be passed, as float32 arrays; those of x, B, C
    and z are rounded to x's dtype before. It takes scratch memory for all gradients, and one more pass over them.

    For dz the outputs before the gate are computed once more, but for bf16 that is not packed in the next case. Where heads
    share B and C, on Hopper with N up to 128, two scans store the states before all chunks of 64 tokens, unless forward has,
    and their gradients in x's dtype, and one kernel computes the gradients of all chunks and adds those of B and C. Elsewhere
    dt x, dv and y are written to memory in x's dtype, and dB and dC of each head in float32, before those of heads that share B
    and C are summed. In float16 the elements of states, and there dt x, dv and y, must stay below 65504, unlike in forward. All
    sums are made in float32, in a fixed order: the same bits every time. Where P is above 128, and no heads share B and C (on
    Hopper with cu_seqlens alone), gradients are computed token by token, which is slow.

    Returns (dx, ddt, dA, dB, dC), followed, in this order, by dD, dz, ddt_bias and dinitial_states if there is such an array,
    unless they are False. Arrays, `stream`, `family` and errors are those of mamba2."""
    grads, optional_gradients = choose_optional_gradients(
        dD=(D, dD), dz=(z, dz), ddt_bias=(dt_bias, ddt_bias), dinitial_states=(initial_states, dinitial_states)
    )
    inputs = dout, x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_states, dstates, chunk_states
    gradients = dict(zip(GRADIENTS, (dx, ddt, dA, dB, dC, *optional_gradients)))
    options = *recurrent_checks.make_dt_options(dt_softplus, dt_limit), grads, family
    if check_flag("accumulate", accumulate):
        return add_gradients(_mamba2_backward_into, stream, inputs, gradients, options, grads, "bshd")
    return _mamba2_backward(stream, (*inputs, *gradients.values()), options)


@program(MAMBA2_BACKWARD, no_gradient=no_second_derivatives("attention.mamba2"))
def _mamba2_backward(problem: Problem, dt_options: DtOptions, grads: str, family: str | None) -> Plan:
    """The Plan of a call of mamba2_backward. grads: the names of gradients to compute besides those of x, dt, A, B
    and C."""
    recurrent_checks.check_extents(problem, "B", "x")
    if not problem.extents["heads"]:
        raise problem.error("x", "must have at least one head", "x")
    if problem["dstates"] and problem.extents["batch"] and not problem.extents["seqlen"]:
        raise ValueError(f"x: must have a token, for dstates: x.shape={problem.shape('x')}")
    vector_bytes = 0 if uses_hopper_kernels(problem, family) else problem.bytes_at_once()
    return plan_mamba2_gradients(problem, dt_options, vector_bytes, grads.split())


MAMBA2_DERIVATIVE = RecurrentDerivative("attention.mamba2", _mamba2_backward, "x", ("x", "B", "C", "z"), ("chunk_states",))
_mamba2_backward_into = make_accumulating_program(_mamba2_backward, accumulating_schema(MAMBA2_BACKWARD, ROWS, make_schema))
