"""The recurrent layers of transformers' hybrid models on our kernels: gated delta rules (Qwen3-Next), Kimi delta attention,
Mamba-2 (Bamba), the convolutions before them and the gated norms behind them.

Such layers call functions of the module in which the model is defined: those of flash-linear-attention, mamba_ssm and
causal_conv1d if these are installed, otherwise transformers' own in torch. All are replaced here, and so is what its classes of
gated norms and of gates do:

| transformers                                      | here                                                       |
| ------------------------------------------------- | ---------------------------------------------------------- |
| torch_chunk_gated_delta_rule                      | compat.fla's chunk_gated_delta_rule                        |
| chunk_kimi_delta_attention                        | the same, with a decay for each channel                    |
| torch_recurrent_gated_delta_rule, recurrent_kimi_ | linear_step, which updates the cache's state in place      |
| delta_attention, of one token                     |                                                            |
| use_qk_l2norm_in_kernel=True                      | qk_l2norm=True, with the same epsilon                      |
| mamba2_chunk_scan, mamba2_selective_state_update  | mamba2, for one token with the cache's state               |
| mamba2_split_conv1d_scan_combined                 | None: then the layer calls the functions it is made of     |
| causal_conv1d_fn, causal_conv1d_update            | short_conv, for one token with the cache's window          |
| forward of Qwen3NextRMSNormGated and the like     | gated_rms_norm                                             |
| forward of KimiLinearForgetGate and the like      | gates.softplus or gates.sigmoid of its projection          |
| cu_seq_lens_q, seq_idx                            | packed sequences, which neither states nor windows connect |

Kernels compute a gate from what is projected where the layer has a module for it (Kimi Linear, GLM-5, Bailing), or passes dt
(Mamba-2), in training, too. Qwen3-Next's layers and those like it compute gates themselves, in torch, before they call a
function, and all compute beta: kernels get those as arrays. A layer made by attention.nn.from_transformers has raw ones.

Gradients of whole sequences are ours. The original function is called for single tokens that need a gradient, and where our
kernels do not support the call: float32 without autocast, or head dims that are no multiples of 16."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

import attention

from .. import gates
from ..gates import RawGate
from ..nn.layers import normalize_by_kernel
from ..parts.short_conv import WIDTHS
from ..plans.recurrent.packed_tokens import pack_batches
from .fla import chunk_gated_delta_rule


def linear_layers(model: Any) -> Any:
    """Make the recurrent layers of the model, and of all models defined in the same module, use our kernels. Returns the model.
    Calling it again changes nothing. ValueError: the model has no such layers."""
    modules = {sys.modules[type(layer).__module__] for layer in model.modules()}
    functions = [(module, name) for module in modules for name in REPLACEMENTS if hasattr(module, name)]
    if not functions:
        raise ValueError(f"model: has no layers that call one of {', '.join(REPLACEMENTS)}: {type(model).__name__}")
    serve: dict[tuple[Any, str], Callable] = {(home, name): REPLACEMENTS[name] for home, name in functions}
    serve |= {(kind, "forward"): function for module in modules for kind, function in replaced_classes(module).items()}
    for (home, name), function in serve.items():
        original = getattr(home, name)
        if not hasattr(original, "replaces"):
            setattr(home, name, _replace_function(original, function))
    return model


def replaced_classes(module: Any) -> dict[type, Callable]:
    """The classes of gated norms and of gates that a module defines, and what serves for their `forward`."""
    kinds = [(name, x) for name, x in vars(module).items() if isinstance(x, type) and x.__module__ == module.__name__]
    return {x: function for name, x in kinds for end, function in FORWARDS.items() if name.endswith(end)}


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
    """(out, state) of whole sequences, as transformers' torch_chunk_gated_delta_rule returns them; of several packed ones the
    state of each, or with seq_idx of each batch's last."""
    options: dict[str, Any] = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    if not _supports(query, key, value):
        return original(query, key, value, g=_evaluated(g), beta=beta, initial_state=initial_state, **options, **others)
    options["initial_state"] = None if initial_state is None else initial_state.float()
    ends, seq_idx = sequence_ends(others), others.get("seq_idx")
    query, key, value = _contiguous_rows(query, key, value)
    if ends is not None or seq_idx is None:
        return chunk_gated_delta_rule(query, key, value, g, beta, **options | {"cu_seqlens": ends})
    batches = pack_batches(seq_idx, query, None)
    joined = map(batches.join, (query, key, value, _evaluated(g), beta), ("query", "key", "value", "g", "beta"))
    out, state = chunk_gated_delta_rule(*joined, **options | {"cu_seqlens": batches.cu_seqlens})
    return batches.split(out), None if state is None else batches.last_states(state)


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
    raw = isinstance(g, RawGate)
    arrays = query, key, value, beta, initial_state, *(g.arrays if raw else [g])
    if not single or not _supports(query, key, value) or need_gradient(*arrays):
        options = {"initial_state": initial_state, "output_final_state": output_final_state}
        options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        return original(query, key, value, g=_evaluated(g), beta=beta, **options, **others)
    token, gate = _contiguous_rows(query[:, 0], key[:, 0], value[:, 0]), g._replace(x=g.x[:, 0]) if raw else g[:, 0]
    out = attention.linear_step(initial_state, *token, decay=gate, beta=beta[:, 0], qk_l2norm=use_qk_l2norm_in_kernel)
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
    if dt_limit[0] < 0 or not _supports(hidden_states, B, C):
        options |= {"initial_states": initial_states, "dt_limit": dt_limit}
        return original(hidden_states, dt, A, B, C, chunk_size, **options, **others)
    options |= {"initial_states": None if initial_states is None else initial_states.float()}
    x, B, C = _contiguous_rows(hidden_states, B, C)
    ends = sequence_ends(others)
    options |= {"cu_seqlens": ends, "seq_idx": others.get("seq_idx") if ends is None else None}
    return attention.mamba2(x, dt, A, B, C, **options, dt_limit=(dt_limit[0], dt_limit[1]))


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
    gradient = need_gradient(hidden_states, B, C, z, state, *of_heads)
    if gradient or any(x.stride(-1) for x in of_heads) or not _supports(hidden_states, B, C):
        return original(state, hidden_states, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, **others)
    x, dt, B, C, z = (None if x is None else x[:, None] for x in (hidden_states, dt[..., 0], B, C, z))
    D, dt_bias = (None if x is None else x[:, 0] for x in (D, dt_bias))
    options = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "initial_states": state.float()}
    x, B, C = _contiguous_rows(x, B, C)
    out, new = attention.mamba2(x, dt, A[:, 0, 0], B, C, **options, return_final_states=True)
    state.copy_(new)
    return out[:, 0]


def convolve(
    original: Callable, hidden_states: Any, weight: Any, bias: Any = None, activation: str | None = None, **others: Any
) -> Any:
    """The convolution of hidden_states (B, C, S) along the tokens."""
    if not _supports_convolution(hidden_states, weight, activation):
        return original(hidden_states, weight, bias, activation=activation, **others)
    (rows,), activation = _contiguous_rows(hidden_states.transpose(1, 2)), activation and "silu"
    ends, seq_idx = sequence_ends(others), others.get("seq_idx")
    if ends is not None or seq_idx is None:
        return attention.short_conv(rows, weight, bias, activation=activation, cu_seqlens=ends).transpose(1, 2)
    batches = pack_batches(seq_idx, rows, None)
    joined = batches.join(rows, "hidden_states")
    out = attention.short_conv(joined, weight, bias, activation=activation, cu_seqlens=batches.cu_seqlens)
    return batches.split(out).transpose(1, 2)


def convolve_token(
    original: Callable, hidden_states: Any, conv_state: Any, weight: Any, bias: Any = None, activation: str | None = None
) -> Any:
    """The convolution of one token, (B, C, 1). conv_state: the tokens before it, at least W - 1, updated in place."""
    gradient = need_gradient(hidden_states, conv_state, weight, bias)
    if gradient or hidden_states.shape[-1] != 1 or not _supports_convolution(hidden_states, weight, activation):
        return original(hidden_states, conv_state, weight, bias, activation)
    (row,), window = _contiguous_rows(hidden_states.transpose(1, 2)), conv_state[..., 1 - weight.shape[1] :]
    out = attention.short_conv(row, weight, bias, activation=activation and "silu", initial_state=window)
    conv_state.copy_(torch.cat([conv_state[..., 1:], hidden_states], -1))
    return out.transpose(1, 2)


def normalize(original: Callable, norm: Any, hidden_states: Any, gate: Any = None) -> Any:
    """The gated norm of hidden_states' last axis. norm: the module, of which Mamba-2's gate before they normalise groups, and
    those of delta rules normalise before they gate."""
    columns = len(norm.weight)
    groups = getattr(norm, "n_groups", columns // getattr(norm, "group_size", columns))
    options = {"eps": norm.variance_epsilon, "activation": getattr(norm, "activation", "silu")}
    options["norm_before_gate"] = getattr(norm, "norm_before_gate", hasattr(norm, "activation"))
    out = normalize_by_kernel(hidden_states, norm.weight, gate, groups, **options)
    return original(norm, hidden_states, gate) if out is None else out


def raw_gate(original: Callable, gate: Any, hidden_states: Any) -> Any:
    """The gate of channels as attention.gates has it, before its formula. gate: the module, whose projection is one or the
    product of two."""
    projections = [getattr(gate, name) for name in ("f_a_proj", "f_b_proj", "f_proj") if hasattr(gate, name)]
    if not projections:
        return original(gate, hidden_states)
    x = functools.reduce(lambda x, projection: projection(x), projections, hidden_states)
    heads = gate.A_log.numel()
    x, A_log, dt_bias = x.unflatten(-1, (heads, -1)), gate.A_log.flatten(), gate.dt_bias.view(heads, -1)
    bound = getattr(gate, "safe_gate_lower_bound", None)  # GLM's
    if getattr(gate, "safe_gate", False):  # Bailing's
        bound = gate.lower_bound
    return gates.softplus(x, A_log, dt_bias) if bound is None else gates.sigmoid(x, A_log, dt_bias, lower=bound)


def no_fused_layer(original: Callable, *args: Any, **options: Any) -> None:
    """Return None: the layer then calls the functions that it is made of, as without a fused one."""


REPLACEMENTS: dict[str, Callable] = {
    "torch_chunk_gated_delta_rule": chunk_delta,
    "torch_recurrent_gated_delta_rule": step_delta,
    "chunk_kimi_delta_attention": chunk_delta,
    "recurrent_kimi_delta_attention": step_delta,
    "mamba2_chunk_scan": scan_mamba,
    "mamba2_selective_state_update": step_mamba,
    "mamba2_split_conv1d_scan_combined": no_fused_layer,
    "causal_conv1d_fn": convolve,
    "causal_conv1d_update": convolve_token,
}


FORWARDS: dict[str, Callable] = {"RMSNormGated": normalize, "ForgetGate": raw_gate}  # by the end of a class's name


def _evaluated(g: Any) -> Any:
    """A gate as an array."""
    return gates.evaluate(g) if isinstance(g, RawGate) else g


def _supports(*tiles: Any) -> bool:
    """Do our kernels support these arrays?"""
    halves = all(x.dtype == tiles[0].dtype in (torch.bfloat16, torch.float16) for x in tiles)
    return halves and all(x.shape[-1] % 16 == 0 and x.shape[-1] <= 256 for x in tiles)


def _supports_convolution(x: Any, weight: Any, activation: str | None) -> bool:
    """Does our kernel support the convolution of x (B, C, S) with this weight?"""
    halves = x.dtype in (torch.bfloat16, torch.float16)
    return halves and weight.shape[1] in WIDTHS and activation in (None, "silu", "swish") and x.numel() > 0


def need_gradient(*arrays: Any) -> bool:
    """Does one of these arrays need a gradient?"""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays)


def sequence_ends(others: dict[str, Any]) -> Any:
    """The ends of packed sequences among a layer's other arguments, by either name, or None."""
    ends = others.get("cu_seqlens")
    return others.get("cu_seq_lens_q") if ends is None else ends


def _contiguous_rows(*arrays: Any) -> list[Any]:
    """The arrays with contiguous rows: after a convolution the token axis is the contiguous one."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in arrays]
