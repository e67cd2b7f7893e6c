"""The recurrent layers of transformers' hybrids, gated delta rules (Qwen3-Next) and Mamba-2 (Bamba), on our kernels.

transformers has such layers call functions of the module that a model is written in: flash-linear-attention's and mamba_ssm's,
or if these are not there its own. They are what is replaced here:

| transformers                                      | here                                                       |
| ------------------------------------------------- | ---------------------------------------------------------- |
| torch_chunk_gated_delta_rule                      | compat.fla's chunk_gated_delta_rule                        |
| torch_recurrent_gated_delta_rule of one token     | linear_step, which brings the cache's state up to date     |
| use_qk_l2norm_in_kernel=True                      | rows of q and k divided by their lengths before, in torch  |
| mamba2_chunk_scan, mamba2_selective_state_update  | mamba2, of one token with the cache's state                |

A call that we do not serve goes where it went: one that wants a gradient, float32, or columns that are no multiples of 16.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

import attention

from .fla import chunk_gated_delta_rule

EPS = 1e-6  # as transformers has it, of lengths


def linear_layers(model: Any) -> Any:
    """Have the recurrent layers of the model, and of all models that are written in the same module, run ours: the model. Call
    it again and nothing changes. ValueError: there are none."""
    homes = {sys.modules[type(layer).__module__] for layer in model.modules()}
    found = [(home, name) for home in homes for name in LAYERS if hasattr(home, name)]
    if not found:
        raise ValueError(f"model: has no layers that call one of {', '.join(LAYERS)}: {type(model).__name__}")
    for home, name in found:
        theirs = getattr(home, name)
        if not hasattr(theirs, "replaces"):
            setattr(home, name, _in_place_of(theirs, LAYERS[name]))
    return model


def _in_place_of(theirs: Callable, serve: Callable) -> Callable:
    """What is called instead of theirs, and knows it."""

    @functools.wraps(theirs)
    def ours(*args: Any, **options: Any) -> Any:
        return serve(theirs, *args, **options)

    vars(ours)["replaces"] = theirs
    return ours


def chunk_delta(
    theirs: Callable,
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
    """(out, state) of sequences, as transformers' torch_chunk_gated_delta_rule gives them."""
    options = {"initial_state": initial_state, "output_final_state": output_final_state}
    if not _served(query, key, value, g, beta):
        options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        return theirs(query, key, value, g=g, beta=beta, **options, **others)
    query, key, value = _rows(*_lengths(query, key, value, use_qk_l2norm_in_kernel))
    return chunk_gated_delta_rule(query, key, value, g=g, beta=beta, **options, cu_seqlens=others.get("cu_seqlens"))


def step_delta(
    theirs: Callable,
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
    """The same of one token, with initial_state as the state after it."""
    single = query.shape[1] == 1 and initial_state is not None and initial_state.dtype == torch.float32
    if not single or not _served(query, key, value, g, beta):
        options = {"initial_state": initial_state, "output_final_state": output_final_state}
        options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        return theirs(query, key, value, g=g, beta=beta, **options, **others)
    token = _rows(*_lengths(query[:, 0], key[:, 0], value[:, 0], use_qk_l2norm_in_kernel))
    out = attention.linear_step(initial_state, *token, decay=g[:, 0], beta=beta[:, 0])
    return out[:, None], initial_state if output_final_state else None


def scan_mamba(
    theirs: Callable,
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
    """out, or (out, states), of sequences, as transformers' mamba2_chunk_scan gives them."""
    options = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "return_final_states": return_final_states}
    if tuple(dt_limit) != (0.0, math.inf) or not _served(hidden_states, B, C, dt, A, D, dt_bias):
        options |= {"initial_states": initial_states, "dt_limit": dt_limit}
        return theirs(hidden_states, dt, A, B, C, chunk_size, **options, **others)
    options |= {"initial_states": None if initial_states is None else initial_states.float()}
    x, B, C = _rows(hidden_states, B, C)
    return attention.mamba2(x, dt, A, B, C, **options, seq_idx=others.get("seq_idx"))


def step_mamba(
    theirs: Callable,
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
    """out (B, H, P) of one token; the state is brought up to date. dt, A, D and dt_bias are a head's, expanded."""
    of_heads = [x for x in (dt, A, D, dt_bias) if x is not None]
    if any(x.stride(-1) for x in of_heads) or not _served(hidden_states, B, C, *of_heads, state):
        return theirs(state, hidden_states, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, **others)
    x, dt, B, C, z = (None if x is None else x[:, None] for x in (hidden_states, dt[..., 0], B, C, z))
    D, dt_bias = (None if x is None else x[:, 0] for x in (D, dt_bias))
    options = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "initial_states": state.float()}
    x, B, C = _rows(x, B, C)
    out, new = attention.mamba2(x, dt, A[:, 0, 0], B, C, **options, return_final_states=True)
    state.copy_(new)
    return out[:, 0]


LAYERS: dict[str, Callable] = {
    "torch_chunk_gated_delta_rule": chunk_delta,
    "torch_recurrent_gated_delta_rule": step_delta,
    "mamba2_chunk_scan": scan_mamba,
    "mamba2_selective_state_update": step_mamba,
}


def _served(q: Any, k: Any, v: Any, *others: Any) -> bool:
    """Do our kernels take these?"""
    tiles = q, k, v
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tiles, *others)):
        return False
    halves = all(x.dtype == q.dtype in (torch.bfloat16, torch.float16) for x in tiles)
    return halves and all(x.shape[-1] % 16 == 0 and x.shape[-1] <= 256 for x in tiles)


def _lengths(q: Any, k: Any, v: Any, one: bool) -> list[Any]:
    """With rows of q and k of length one, if that is asked; computed in float32."""
    if one:
        q, k = ((x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + EPS)).to(x.dtype) for x in (q, k))
    return [q, k, v]


def _rows(*arrays: Any) -> list[Any]:
    """With contiguous rows: behind a convolution its time is contiguous."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in arrays]
