"""attention.hedgehog: softmax attention to the newest keys, and linear attention with learned features to all older ones (Zhang
et al. 2024; LoLCATS)."""

from typing import Any

from tiles.calls import torch_op
from tiles.calls.plan import Plan
from tiles.calls.schema import Problem, Schema
from tiles.launching.launch import kernel_for

from ..families import require_hopper
from ..kernels.recurrent import hedgehog_hopper
from ..names import suggests_argument_names
from ..parts.recurrent.gates import LOG2_E
from ..plans.recurrent import recurrent_checks
from ..plans.requires_grad import recurrent_autograd, refuse_with_gradients, requires_grad
from .hedgehog_gradients import HEDGEHOG_DERIVATIVE, check_shapes, check_window

HEDGEHOG = Schema(
    "hedgehog",
    """
    q           (batch, seqlen, heads_k, key_dim)  tile
    k           (batch, seqlen, heads_k, key_dim)  tile
    v           (batch, seqlen, heads, value_dim)  tile
    q_map       (heads_k, key_dim, features)       tile
    k_map       (heads_k, key_dim, features)       tile
    alphas      (heads)                            float32
    betas       (heads)                            float32
    cu_seqlens  (ends)                             ends     optional
    out         (batch, seqlen, heads, value_dim)  tile     output
    """,
)


@suggests_argument_names
def hedgehog(
    q: Any,
    k: Any,
    v: Any,
    q_map: Any,
    k_map: Any,
    alphas: Any,
    betas: Any,
    *,
    window: int = 64,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Softmax attention to the newest keys and linear attention with learned features to all older ones. For head h,

        w[i, j] = betas[h] * exp((q[i] . k[j] - m[i]) / sqrt(D))       j <= i in the `window`-block of i, or the one before it
        w[i, j] = alphas[h] * f(q[i], q_map[h]) . f(k[j], k_map[h])     j in older blocks
        o[i]    = sum_j w[i, j] v[j] / (sum_j w[i, j] + 1e-6)
        f(x, M) = max((softmax(x M), softmax(-x M)), 1e-6)              128 features

    where m[i] is the largest q[i] . k[j] of the first line. This is ThunderKittens' hedgehog kernel (LoLCATS), except for
    the floor of 1e-6, which only its reference has.

    q, k: (B, S, Hk, D). v, out: (B, S, H, Dv). For layout="bhsd" sequence and head are swapped. D and Dv: multiples of 16 up
    to 128; any S. q_map, k_map: (Hk, D, 64). All bfloat16 or all float16. Hk divides H: value head h reads key head
    h // (H // Hk). alphas, betas: (H,) float32. window: 64. cu_seqlens (N + 1,), int32 or int64: B is 1, and sequence n is
    the tokens cu_seqlens[n] to cu_seqlens[n + 1].

    It takes and returns no state: later tokens would need the keys and values of up to two blocks as well as the sums of
    features.

    On Hopper, with addresses and strides that are multiples of 16 bytes. Returns `out`, the same kind of array as q. Arrays,
    `stream` and errors are those of attention.forward. out has gradients, in torch and JAX: `hedgehog_backward`."""
    check_window(window)
    arrays = q, k, v, q_map, k_map, alphas, betas, cu_seqlens
    if requires_grad(*arrays[:-1]) or torch_op.is_mapped_with_grad(arrays[:-1]):
        refuse_with_gradients(out=out, stream=stream)
        return recurrent_autograd().call_with_gradients("hedgehog", arrays, (), layout)
    return _hedgehog(stream, (*arrays, out), (), layout)


@HEDGEHOG_DERIVATIVE.make_program(HEDGEHOG)
def _hedgehog(problem: Problem) -> Plan:
    """The Plan of a call of hedgehog."""
    check_shapes(problem)
    batch, length, heads, key_heads, key_dim, sequences = problem("batch", "seqlen", "heads", "heads_k", "key_dim", "sequences")
    require_hopper(problem)
    if not (batch and length and heads):
        return Plan([])
    config = hedgehog_hopper.Config(recurrent_checks.DTYPES[problem.dtype], recurrent_checks.is_varlen(problem))
    launch = kernel_for(hedgehog_hopper, config, problem.device).bind(
        sequences * heads,
        gQ=problem["q"],
        gK=problem["k"],
        gV=problem["v"],
        gQMap=problem["q_map"],
        gKMap=problem["k_map"],
        gAlphas=problem["alphas"],
        gBetas=problem["betas"],
        gO=problem["out"],
        gCuSeqlens=problem["cu_seqlens"],
        length=length,
        heads=heads,
        group=heads // key_heads,
        scale=key_dim**-0.5 * LOG2_E,
    )
    return Plan([launch])
