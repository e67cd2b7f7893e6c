"""attention.based: linear attention whose weights are the Taylor series of exp to the second order (Arora et al. 2024)."""

from typing import Any

from ops.for_attention.taylor_features import BASE, FEATURES
from tiles.calls import torch_op
from tiles.calls.plan import Plan
from tiles.calls.schema import Problem, Schema

from ..families import require_hopper
from ..names import suggests_argument_names
from ..options import check_flag, check_number
from ..plans.recurrent import recurrent_checks
from ..plans.recurrent.based_chunks import plan_based
from ..plans.requires_grad import recurrent_autograd, refuse_with_gradients, requires_grad
from .based_gradients import BASED_DERIVATIVE

BASED = Schema(
    "based",
    """
    q              (batch, seqlen, heads_k, key_dim)        tile
    k              (batch, seqlen, heads_k, key_dim)        tile
    v              (batch, seqlen, heads, value_dim)        tile
    cu_seqlens     (ends)                                   ends     optional
    initial_state  (sequences, heads, features, value_dim)  float32  optional
    initial_z      (sequences, heads, features)             float32  optional
    out            (batch, seqlen, heads, value_dim)        tile     output
    state          (sequences, heads, features, value_dim)  float32  output  return_state
    z              (sequences, heads, features)             float32  output  return_state  normalize
    """,
    features=FEATURES,
)


@suggests_argument_names
def based(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    normalize: bool = True,
    initial_state: Any = None,
    return_state: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Based's causal linear attention: the weights are the Taylor series of exp to the second order. For every head,

        P[i, j] = 1 + s + s ** 2 / 2,  s = scale * q[i] . k[j],  j <= i
        o[i]    = sum_j P[i, j] v[j], and divided by sum_j P[i, j] with normalize=True

    q, k: (B, S, Hk, 16). v, out: (B, S, H, Dv). For layout="bhsd" sequence and head are swapped. bfloat16 or float16; any S;
    Dv a multiple of 16 up to 256. Hk divides H: value head h reads key head h // (H // Hk). scale: Dk^-1/2, which is 1/4, by
    default. cu_seqlens (N + 1,), int32 or int64: B is 1, and sequence n is the tokens cu_seqlens[n] to cu_seqlens[n + 1].

    Sums over earlier chunks of 64 tokens are float32, and are rounded to q's dtype for products: with float16 they must stay
    below 65504, and so must P, k[i] k[j] and scale^2 q[i] q[j].

    initial_state, and what return_state=True returns as `(out, state)`: float32 (B, H, 160, Dv), or (N, ...), the sum of
    f(k)^T v over the tokens so far; with normalize=True a pair of that and the sum of f(k), (B, H, 160). f(x) has 160
    columns: x[i] * x[(i + d) % 16] in column 16 * d + i for d = 0 (halved) to 7; the same for d = 8 and i < 8; then 1, seven
    zeros, and x. (P is the product of f(k) and the same of scale * q, nothing halved: attention.linear_step takes these,
    with scale=1.)

    |         | here             | flash-linear-attention's fused_chunk_based | ThunderKittens' based |
    | ------- | ---------------- | ------------------------------------------ | --------------------- |
    | scale   | Dk^-1/2          | Dk^-1/2                                    | 1/4                   |
    | divisor | the sum          | the sum + 1e-6 (use_norm=True, default)    | none                  |
    | Dk, Dv  | 16, 16 to 256    | up to 16, any                              | 16, 64                |
    | order   | layout="bshd"    | (B, S, H, D)                               | (B, H, S, D)          |
    | state   | 160 features     | none                                       | 273, in bfloat16      |

    (The sum is never less than half the number of tokens.) On Hopper, with addresses and strides that are multiples of 16
    bytes. Returns `out`, the same kind of array as q. Arrays, `stream` and errors are those of attention.forward. out
    and state have gradients, in torch and JAX: `based_backward`."""
    normalize, return_state = check_flag("normalize", normalize), check_flag("return_state", return_state)
    state, z = recurrent_checks.split_state("initial_state", initial_state, normalize)
    options = check_number("scale", scale), normalize, return_state
    if requires_grad(*(differentiable := (q, k, v, state, z))) or torch_op.is_mapped_with_grad(differentiable):
        refuse_with_gradients(out=out, stream=stream)
        inputs = q, k, v, cu_seqlens, state, z
        results = recurrent_autograd().call_with_gradients("based", inputs, options, layout)
    else:
        arrays = q, k, v, cu_seqlens, state, z, out, None, None
        results = _based(stream, arrays, options, layout)
    return (results[0], results[1:]) if return_state and normalize else results


@BASED_DERIVATIVE.make_program(BASED)
def _based(problem: Problem, scale: float | None, normalize: bool, return_state: bool) -> Plan:
    """The Plan of a call of based. The schema's `state` and `z` are results, which a caller cannot pass."""
    recurrent_checks.check_extents(problem)
    scale = recurrent_checks.resolve_scale(problem, scale)
    batch, length, heads, key_dim, sequences = problem("batch", "seqlen", "heads", "key_dim", "sequences")
    if key_dim != BASE:
        raise ValueError(f"q: key_dim must be {BASE}: {key_dim=}, q.shape={problem.shape('q')}")
    if problem.extents["features"] != FEATURES:
        raise ValueError(f"initial_state: must have {FEATURES} features: initial_state.shape={problem.shape('initial_state')}")
    require_hopper(problem)
    if not (batch and length and heads):
        if return_state and sequences and heads:
            raise ValueError(f"return_state: there must be a token: q.shape={problem.shape('q')}")
        return Plan([])
    return plan_based(problem, scale, normalize, return_state)
