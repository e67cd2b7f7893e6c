"""flash-linear-attention's functions of whole sequences: `from attention.compat.fla import chunk_gla`.

| flash-linear-attention                                | here                                                             |
| ----------------------------------------------------- | ---------------------------------------------------------------- |
| chunk_linear_attn(q, k, v)                            | linear(q, k, v, normalize=True)                                  |
| chunk_retention, chunk_lightning_attn                 | retention, lightning                                             |
| chunk_simple_gla(.., g) or (.., g_gamma)              | linear(.., decay=(B, S, H)) or decay=(H,)                        |
| chunk_gla(.., g)                                      | gla(.., decay)                                                   |
| chunk_delta_rule(.., beta)                            | delta_rule(.., beta)                                             |
| chunk_gated_delta_rule (chunk_gdn), chunk_kda         | delta_rule(.., beta, decay=g)                                    |
| use_qk_l2norm_in_kernel=True                          | qk_l2norm=True                                                   |
| use_gate_in_kernel=True, A_log, dt_bias               | decay=gates.softplus(g, A_log, dt_bias)                          |
| the same with lower_bound                             | decay=gates.sigmoid(g, A_log, dt_bias, lower=lower_bound)        |
| use_beta_sigmoid_in_kernel, allow_neg_eigval          | beta=gates.beta(beta, doubled=allow_neg_eigval)                  |
| output_final_state=True                               | return_state=True                                                |
| z (N, 1, H, Dk) of normalize=True                     | z (N, H, Dk)                                                     |
| (o, None) without output_final_state                  | o                                                                |
| state_v_first=True: states (N, H, Dv, Dk)             | the same states with their last two axes swapped                 |
| fused_recurrent_gated_delta_rule(q, k, v, g=, beta=)  | chunk_gated_delta_rule of the same keywords; so are the others   |
| fused_recurrent_gla(q, k, v, gk)                      | gla(.., decay=gk); gv and reverse are refused                    |
| head_first=True, which newer versions dropped         | layout="bhsd"                                                    |
| chunk_size, cu_seqlens_cpu, chunk_indices             | ignored: chunks have 64 tokens                                   |

scale, initial_state and cu_seqlens are the same. States are (N, H, Dk, Dv) float32. One token of decoding is fastest by
attention.linear_step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attention

from .arguments import ERRORS, drop_none, refuse, rename_arguments

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
]


def chunk_linear_attn(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Any = None,
    *,
    head_first: bool = False,
) -> tuple[Any, Any]:
    """(o, state): S_t = S + k v^T, o divided by the sum of the weights, for which the state is a pair (S, z)."""
    if normalize and isinstance(initial_state, tuple):
        initial_state = initial_state[0], initial_state[1][:, 0]
    o, state = _call(attention.linear, (q, k, v), scale, initial_state, output_final_state, cu_seqlens, head_first,
                     normalize=normalize)  # fmt: skip
    return o, (state[0], state[1][:, None]) if normalize and output_final_state else state


def chunk_retention(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    *,
    head_first: bool = False,
    chunk_size: int | None = None,
) -> tuple[Any, Any]:
    """(o, state): S_t = (1 - 2^(-5 - h)) S + k v^T."""
    return _call(attention.retention, (q, k, v), scale, initial_state, output_final_state, cu_seqlens, head_first)


def chunk_lightning_attn(
    q: Any,
    k: Any,
    v: Any,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    *,
    head_first: bool = False,
    chunk_size: int | None = None,
) -> tuple[Any, Any]:
    """(o, state): S_t = exp(-8 h / H (1 - layer_idx / num_layers)) S + k v^T."""
    arrays = q, k, v, layer_idx, num_layers
    return _call(attention.lightning, arrays, scale, initial_state, output_final_state, cu_seqlens, head_first)


def chunk_simple_gla(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    g_gamma: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    *,
    head_first: bool = False,
    chunk_size: int | None = None,
) -> tuple[Any, Any]:
    """(o, state): S_t = exp(g[b, t, h]) S + k v^T, or exp(g_gamma[h]) for all tokens."""
    if g is not None and g_gamma is not None:
        raise ValueError("g: must be None if g_gamma is given: pass one decay")
    decay = drop_none(decay=g_gamma if g is None else g)
    return _call(attention.linear, (q, k, v), scale, initial_state, output_final_state, cu_seqlens, head_first, state_v_first,
                 **decay)  # fmt: skip


def chunk_gla(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    *,
    head_first: bool = False,
) -> tuple[Any, Any]:
    """(o, state): S_t = diag(exp(g[b, t, h])) S + k v^T."""
    return _call(attention.gla, (q, k, v, g), scale, initial_state, output_final_state, cu_seqlens, head_first, state_v_first)


def chunk_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    *,
    head_first: bool = False,
    chunk_size: int = 64,
) -> tuple[Any, Any]:
    """(o, state): S_t = S + k (beta (v - S^T k))^T."""
    return _call(attention.delta_rule, (q, k, v, beta), scale, initial_state, output_final_state, cu_seqlens, head_first,
                 qk_l2norm=bool(use_qk_l2norm_in_kernel))  # fmt: skip


def chunk_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    chunk_indices: Any = None,
    cp_context: Any = None,
    *,
    head_first: bool = False,
    chunk_size: int = 64,
    use_gate_in_kernel: bool = False,
    A_log: Any = None,
    dt_bias: Any = None,
) -> tuple[Any, Any]:
    """(o, state): S_t = exp(g[b, t, h]) S, and then the delta rule with beta."""
    _refuse_context(cp_context)
    if use_gate_in_kernel:
        g = attention.gates.softplus(g, _check_rates(A_log), dt_bias)
    arrays = q, k, v, _raw_beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _call(attention.delta_rule, arrays, scale, initial_state, output_final_state, cu_seqlens, head_first, state_v_first,
                 decay=g, qk_l2norm=bool(use_qk_l2norm_in_kernel))  # fmt: skip


chunk_gdn = chunk_gated_delta_rule


def chunk_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    cp_context: Any = None,
    *,
    head_first: bool = False,
    chunk_size: int = 64,
    A_log: Any = None,
    dt_bias: Any = None,
) -> tuple[Any, Any]:
    """(o, state): S_t = diag(exp(g[b, t, h])) S, and then the delta rule with beta. safe_gate and lower_bound belong to a gate
    that the kernel computes: with lower_bound it is a sigmoid. safe_gate chooses a kernel there, and nothing here."""
    _refuse_context(cp_context)
    refuse(
        "return_intermediate_states",
        return_intermediate_states,
        "call it once per chunk of tokens, each time with the state so far",
    )
    if use_gate_in_kernel:
        g = _raw_channel_gate(g, A_log, dt_bias, lower_bound, safe_gate, head_first)
    arrays = q, k, v, _raw_beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _call(attention.delta_rule, arrays, scale, initial_state, output_final_state, cu_seqlens, head_first, state_v_first,
                 decay=g, qk_l2norm=bool(use_qk_l2norm_in_kernel))  # fmt: skip


# ---- token by token there, by chunks here ---------------------------------------------------------------------------
def _recurrent(chunked: Callable) -> Callable:
    """The function of flash-linear-attention that goes from token to token, with the arguments of `chunked` by name, for their
    order is another in each version."""

    def call(q: Any, k: Any, v: Any, **arguments: Any) -> tuple[Any, Any]:
        return chunked(q, k, v, **arguments)

    call.__name__ = call.__qualname__ = chunked.__name__.replace("chunk_", "fused_recurrent_")
    call.__doc__ = f"""{chunked.__name__}, whose arguments behind q, k and v it takes by name."""
    return call


fused_recurrent_delta_rule = _recurrent(chunk_delta_rule)
fused_recurrent_gated_delta_rule = _recurrent(chunk_gated_delta_rule)
fused_recurrent_kda = _recurrent(chunk_kda)
fused_recurrent_lightning_attn = _recurrent(chunk_lightning_attn)
fused_recurrent_linear_attn = _recurrent(chunk_linear_attn)
fused_recurrent_retention = _recurrent(chunk_retention)
fused_recurrent_simple_gla = _recurrent(chunk_simple_gla)


def fused_recurrent_gla(
    q: Any, k: Any, v: Any, gk: Any = None, gv: Any = None, *, reverse: bool = False, **arguments: Any
) -> tuple[Any, Any]:
    """(o, state) of chunk_gla with g=gk, whose arguments behind g it takes by name; without gk, of attention.linear.
    NotImplementedError: gv, decays of the values' columns, and reverse."""
    refuse("gv", gv is not None, "decays are those of the keys' columns, gk")
    refuse("reverse", reverse, "flip all arrays along the sequence before the call, and its output after it: x.flip(1)")
    return chunk_simple_gla(q, k, v, **arguments) if gk is None else chunk_gla(q, k, v, gk, **arguments)


# ---- shared helpers ------------------------------------------------------------------------------------------------
def _call(
    function: Callable,
    arrays: tuple,
    scale: Any,
    initial_state: Any,
    final: bool,
    cu_seqlens: Any,
    head_first: bool,
    state_v_first: bool = False,
    **fixed_options: Any,
) -> tuple[Any, Any]:
    """(o, state) of one of our functions, or (o, None) unless `final`. Errors name flash-linear-attention's arguments."""
    if state_v_first and initial_state is not None:
        initial_state = initial_state.swapaxes(-1, -2)
    options = drop_none(scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, layout="bhsd" if head_first else None)
    try:
        result = function(*arrays, **options, **fixed_options, return_state=bool(final))
    except ERRORS as error:
        rename_arguments(error, {"decay": "g"})
        raise
    if not final:
        return result, None
    o, state = result
    return o, state.swapaxes(-1, -2) if state_v_first else state


def _refuse_context(cp_context: Any) -> None:
    refuse(
        "cp_context",
        cp_context is not None,
        "it must be None; attention.parallel.delta_rule spreads a sequence over several GPUs",
    )


def _raw_beta(beta: Any, sigmoid: bool, doubled: bool) -> Any:
    """beta as our function takes it. allow_neg_eigval (`doubled`) belongs to a sigmoid that the kernel computes."""
    refuse(
        "allow_neg_eigval",
        bool(doubled) and not sigmoid,
        "pass 2 * beta, or use_beta_sigmoid_in_kernel=True with beta before its sigmoid",
    )
    return attention.gates.beta(beta, doubled=bool(doubled)) if sigmoid else beta


def _check_rates(A_log: Any) -> Any:
    """A_log itself. ValueError: there is none, and a gate that the kernel computes needs it."""
    if A_log is None:
        raise ValueError("A_log: must be given with use_gate_in_kernel=True: A_log=None")
    return A_log


def _reshape(name: str, x: Any, *shape: int) -> Any:
    """The argument of this name as an array of this shape. ValueError: it has another number of elements."""
    if math.prod(x.shape) != math.prod(shape):
        raise ValueError(f"{name}: must have {' x '.join(map(str, shape))} elements: {name}.shape={tuple(x.shape)}")
    return x.reshape(shape)


def _raw_channel_gate(g: Any, A_log: Any, dt_bias: Any, lower_bound: float | None, safe: bool, head_first: bool) -> Any:
    """The gate of chunk_kda. A_log has H elements in any shape, dt_bias H Dk."""
    heads, key_dim = g.shape[1 if head_first else 2], g.shape[-1]
    A_log = _reshape("A_log", _check_rates(A_log), heads)
    dt_bias = dt_bias if dt_bias is None else _reshape("dt_bias", dt_bias, heads, key_dim)
    if lower_bound is not None:
        return attention.gates.sigmoid(g, A_log, dt_bias, lower=lower_bound)
    if safe:
        raise ValueError("lower_bound: must be given with safe_gate=True and use_gate_in_kernel=True: lower_bound=None")
    return attention.gates.softplus(g, A_log, dt_bias)
