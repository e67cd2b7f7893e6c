"""The recurrent layers of transformers' hybrid models, gated delta rules (Qwen3-Next) and Mamba-2 (Bamba), on our kernels.

Such layers call functions of the module in which the model is defined: those of flash-linear-attention and mamba_ssm if these
are installed, otherwise transformers' own in torch. The latter are replaced here:

| transformers                                      | here                                                       |
| ------------------------------------------------- | ---------------------------------------------------------- |
| torch_chunk_gated_delta_rule                      | compat.fla's chunk_gated_delta_rule                        |
| torch_recurrent_gated_delta_rule of one token     | linear_step, which updates the cache's state in place      |
| use_qk_l2norm_in_kernel=True                      | qk_l2norm=True, with the same epsilon                      |
| mamba2_chunk_scan, mamba2_selective_state_update  | mamba2, for one token with the cache's state               |

The original function is called for calls that need a gradient, and where our kernels do not support the call: float32, or
head dims that are no multiples of 16."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

import attention

from .fla import chunk_gated_delta_rule


def linear_layers(model: Any) -> Any:
    """Make the recurrent layers of the model, and of all models defined in the same module, use our kernels. Returns the model.
    Calling it again changes nothing. ValueError: the model has no such layers."""
    homes = {sys.modules[type(layer).__module__] for layer in model.modules()}
    functions = [(home, name) for home in homes for name in REPLACEMENTS if hasattr(home, name)]
    if not functions:
        raise ValueError(f"model: has no layers that call one of {', '.join(REPLACEMENTS)}: {type(model).__name__}")
    for home, name in functions:
        original = getattr(home, name)
        if not hasattr(original, "replaces"):
            setattr(home, name, _replace_function(original, REPLACEMENTS[name]))
    return model


def _replace_function(original: Callable, serve: Callable) -> Callable:
    """A function that calls serve(original, ...) in place of the original, and has the original as its attribute `replaces`."""

    @functools.wraps(original)
    def replacement(*args: Any, **options: Any) -> Any:
        return serve(original, *args, **options)

    vars(replacement)["replaces"] = original
    return replacement


def chunk_delta(
    original: Callable,
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> Any:
    """(out, state) of whole sequences, as transformers' torch_chunk_gated_delta_rule returns them."""
    options = {"initial_state": initial_state, "output_final_state": output_final_state}
    if not _supports(query, key, value, g, beta):
        options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        return original(query, key, value, g=g, beta=beta, **options, **others)
    query, key, value = _contiguous_rows(query, key, value)
    options |= {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": others.get("cu_seqlens")}
    return chunk_gated_delta_rule(query, key, value, g=g, beta=beta, **options)


def step_delta(
    original: Callable,
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> Any:
    """(out, state) of one token; initial_state is updated in place and returned as the state."""
    single = query.shape[1] == 1 and initial_state is not None and initial_state.dtype == torch.float32
    if not single or not _supports(query, key, value, g, beta):
        options = {"initial_state": initial_state, "output_final_state": output_final_state}
        options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        return original(query, key, value, g=g, beta=beta, **options, **others)
    token = _contiguous_rows(query[:, 0], key[:, 0], value[:, 0])
    out = attention.linear_step(initial_state, *token, decay=g[:, 0], beta=beta[:, 0], qk_l2norm=use_qk_l2norm_in_kernel)
    return out[:, None], initial_state if output_final_state else None


def scan_mamba(
    original: Callable,
    hidden_states: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    chunk_size: int,
    D: Any = None,
    dt_bias: Any = None,
    initial_states: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    z: Any = None,
    **others: Any,
) -> Any:
    """out, or (out, states), of whole sequences, as transformers' mamba2_chunk_scan returns them."""
    options = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "return_final_states": return_final_states}
    if dt_limit[0] < 0 or not _supports(hidden_states, B, C, dt, A, D, dt_bias):
        options |= {"initial_states": initial_states, "dt_limit": dt_limit}
        return original(hidden_states, dt, A, B, C, chunk_size, **options, **others)
    options |= {"initial_states": None if initial_states is None else initial_states.float()}
    x, B, C = _contiguous_rows(hidden_states, B, C)
    return attention.mamba2(x, dt, A, B, C, **options, dt_limit=(dt_limit[0], dt_limit[1]), seq_idx=others.get("seq_idx"))


def step_mamba(
    original: Callable,
    state: Any,
    hidden_states: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    z: Any = None,
    **others: Any,
) -> Any:
    """out (B, H, P) of one token; the state is updated in place. dt, A, D and dt_bias hold one number for each head,
    expanded."""
    of_heads = [x for x in (dt, A, D, dt_bias) if x is not None]
    if any(x.stride(-1) for x in of_heads) or not _supports(hidden_states, B, C, *of_heads, state):
        return original(state, hidden_states, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, **others)
    x, dt, B, C, z = (None if x is None else x[:, None] for x in (hidden_states, dt[..., 0], B, C, z))
    D, dt_bias = (None if x is None else x[:, 0] for x in (D, dt_bias))
    options = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "initial_states": state.float()}
    x, B, C = _contiguous_rows(x, B, C)
    out, new = attention.mamba2(x, dt, A[:, 0, 0], B, C, **options, return_final_states=True)
    state.copy_(new)
    return out[:, 0]


REPLACEMENTS: dict[str, Callable] = {
    "torch_chunk_gated_delta_rule": chunk_delta,
    "torch_recurrent_gated_delta_rule": step_delta,
    "mamba2_chunk_scan": scan_mamba,
    "mamba2_selective_state_update": step_mamba,
}


def _supports(q: Any, k: Any, v: Any, *others: Any) -> bool:
    """Do our kernels support these arrays?"""
    tiles = q, k, v
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tiles, *others)):
        return False
    halves = all(x.dtype == q.dtype in (torch.bfloat16, torch.float16) for x in tiles)
    return halves and all(x.shape[-1] % 16 == 0 and x.shape[-1] <= 256 for x in tiles)


def _contiguous_rows(*arrays: Any) -> list[Any]:
    """The arrays with contiguous rows: after a convolution the token axis is the contiguous one."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in arrays]
