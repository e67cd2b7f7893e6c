"""attention.short_conv, the causal convolution along a few tokens that stands before recurrent layers, and its gradients."""

from typing import Any

from tiles.calls import torch_op
from tiles.calls.plan import Plan
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema

from ..names import suggests_argument_names
from ..options import check_flag
from ..plans.recurrent.recurrent_derivative import RecurrentDerivative, choose_optional_gradients, no_second_derivatives
from ..plans.recurrent.short_conv import plan_short_conv, plan_short_conv_gradients
from ..plans.requires_grad import recurrent_autograd, refuse_with_gradients, requires_grad, without_gradients

TOKENS = """
    x              (batch, seqlen, channels)      tile
    weight         (channels, width)              real
    bias           (channels)                     real  optional
    cu_seqlens     (ends)                         ends  optional
    initial_state  (sequences, channels, window)  real  optional
"""
RESULTS = """
    out    (batch, seqlen, channels)      tile  output
    state  (sequences, channels, window)  tile  output  return_state
"""
GRADIENTS = """
    dstate          (sequences, channels, window)  real     optional
    dx              (batch, seqlen, channels)      tile     output
    dweight         (channels, width)              float32  output
    dbias           (channels)                     float32  output  grads:dbias
    dinitial_state  (sequences, channels, window)  float32  output  grads:dinitial_state
"""


def _window(extents):
    """How many tokens before the first one a convolution of this width reads."""
    return extents["width"] - 1


SHORT_CONV = Schema("short_conv", TOKENS + RESULTS, window=_window)
SHORT_CONV_BACKWARD = Schema(
    "short_conv_backward", "    dout  (batch, seqlen, channels)  tile" + TOKENS + GRADIENTS, window=_window
)


def check_activation(activation: Any) -> str | None:
    """None, or "silu", which is also called "swish". ValueError: it is neither."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f'activation: must be None or "silu" (also called swish): {activation=}')
    return activation and "silu"


@suggests_argument_names
def short_conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    return_state: bool = False,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """A causal convolution of width W along the tokens, each channel by itself. For every sequence, and its tokens t,

        z_t = bias + sum_(i<W) weight[:, W - 1 - i] x_(t-i)        y_t = z_t, or with activation="silu" z_t sigmoid(z_t)

    x, out: (B, S, C), bfloat16 or float16; channels contiguous, any other strides: q, k and v may be views of one projection.
    weight: (C, W), W from 2 to 4 (a torch.nn.Conv1d's weight[:, 0]); bias: (C,); float32, bfloat16 or float16. Sums are
    float32. Any S and C; it runs at memory speed where C is a multiple of 8, and addresses and strides of 16 bytes.

    initial_state: (B, C, W - 1), the tokens before the first, the latest of them last; 0 by default. float32, bfloat16 or
    float16, any strides. With return_state=True the last W - 1 tokens of each sequence are returned in the same order, in x's
    dtype, and begin with those of initial_state if the sequence is shorter. A step of decoding is a call with S = 1.

    cu_seqlens: (N + 1,) int32 or int64, on x's device: N packed sequences in a batch of 1, as in attention.linear; states are
    (N, C, W - 1). Tokens after cu_seqlens[-1] are padding: they are not read, and their outputs are 0.

    | here                               | causal_conv1d                          | flash-linear-attention, ShortConvolution |
    | ---------------------------------- | -------------------------------------- | ---------------------------------------- |
    | x (B, S, C)                        | x (B, C, S), either axis contiguous    | the same                                 |
    | weight (C, W)                      | the same                               | weight (C, 1, W)                         |
    | activation=None, "silu", "swish"   | the same                               | the same                                 |
    | initial_state, state (B, C, W - 1) | initial_states, final_states_out: same | cache (B, C, W): its first column is one |
    |                                    |                                        | more token, which nothing needs          |
    | cu_seqlens                         | seq_idx                                | the same                                 |

    transformers' conv_states are (B, C, W), as flash-linear-attention's: pass conv_states[..., 1:].

    Returns `out`, the same kind of array as x, or with return_state=True `(out, state)`. On GPUs since Ampere. Gradients:
    short_conv_backward, which torch's autograd and jax.grad call. Arrays, `stream` and errors are those of
    attention.forward."""
    activation, return_state = check_activation(activation), check_flag("return_state", return_state)
    if requires_grad(*(differentiable := (x, weight, bias, initial_state))) or torch_op.is_mapped_with_grad(differentiable):
        refuse_with_gradients(out=out, stream=stream)
        inputs = x, weight, bias, cu_seqlens, initial_state
        return recurrent_autograd().call_with_gradients("short_conv", inputs, (activation, return_state))
    return _short_conv(stream, (x, weight, bias, cu_seqlens, initial_state, out, None), (activation, return_state))


@suggests_argument_names
@without_gradients
def short_conv_backward(
    dout: Any,
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    initial_state: Any = None,
    dstate: Any = None,
    cu_seqlens: Any = None,
    dx: Any = None,
    dweight: Any = None,
    dbias: Any = None,
    dinitial_state: Any = None,
    stream: Any = None,
) -> tuple[Any, ...]:
    """Gradients of attention.short_conv. For a loss L, dout = dL/dout and dstate = dL/dstate, of the window that it returns,

        dz_t = act'(z_t) dout_t        dx_t = sum_(i<W) weight[:, W - 1 - i] dz_(t+i), and the part of dstate
        dweight[:, W - 1 - i] = sum_t dz_t x_(t-i)        dbias = sum_t dz_t

    dout: as out. dstate: (B, C, W - 1), float32, bfloat16 or float16, None where L does not depend on it. The others are what
    short_conv was called with.

    dx, dweight, dbias, dinitial_state: arrays to write to instead of new ones. dx has the dtype and shape of x, the others are
    float32. dbias and dinitial_state: False where they are not wanted; dinitial_state=True where it is and there is no initial
    state. All sums are made in float32 and in a fixed order: the same bits every time. Nothing that forward computed is read.

    Returns (dx, dweight), followed, in this order, by dbias if there is a bias, and dinitial_state if there is an initial
    state, unless they are False. Arrays and errors are those of short_conv."""
    grads, optional_gradients = choose_optional_gradients(dbias=(bias, dbias), dinitial_state=(initial_state, dinitial_state))
    arrays = dout, x, weight, bias, cu_seqlens, initial_state, dstate, dx, dweight, *optional_gradients
    return _short_conv_backward(stream, arrays, (check_activation(activation), grads))


@program(SHORT_CONV_BACKWARD, no_gradient=no_second_derivatives("attention.short_conv"))
def _short_conv_backward(problem: Problem, activation: str | None, grads: str) -> Plan:
    """The Plan of a call of short_conv_backward. grads: the names of gradients to compute besides dx and dweight."""
    requested = {name: name in grads.split() for name in ("dbias", "dinitial_state")}
    return plan_short_conv_gradients(problem, activation is not None, requested)


SHORT_CONV_DERIVATIVE = RecurrentDerivative("attention.short_conv", _short_conv_backward, "x", ("x",))


@SHORT_CONV_DERIVATIVE.make_program(SHORT_CONV)
def _short_conv(problem: Problem, activation: str | None, return_state: bool) -> Plan:
    """The Plan of a call of short_conv. The schema's `state` is a result, which a caller cannot pass."""
    return plan_short_conv(problem, activation is not None, return_state)
