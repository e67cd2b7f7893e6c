"""transformers' recurrent layers, taken apart by the names of their parameters, as layers of ours. transformers is not
imported."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .delta_nets import GatedDeltaNet, KimiDeltaAttention
from .layers import GatedRMSNorm
from .mamba import Mamba2
from .recurrent_layer import RecurrentLayer


def from_transformers(layer: nn.Module) -> RecurrentLayer:
    """The layer of attention.nn that computes what a recurrent layer of transformers does, with a copy of its weights, in its
    dtypes and on its device.

    | transformers' layer of                 | recognised by its                                  | here               |
    | -------------------------------------- | -------------------------------------------------- | ------------------ |
    | Qwen3-Next                             | in_proj_qkvz, in_proj_ba                           | GatedDeltaNet      |
    | Qwen3.5, Qwen4, Lara                   | in_proj_qkv, in_proj_z, in_proj_b, in_proj_a       | GatedDeltaNet      |
    | OLMo hybrid                            | q_proj, k_proj, v_proj, g_proj, b_proj, a_proj     | GatedDeltaNet      |
    | Kimi Linear, GLM-5, Ling (Bailing)     | q_proj, k_proj, v_proj, b_proj, forget_gate        | KimiDeltaAttention |
    | Bamba, Nemotron-H, Zamba-2, Mamba-2,   | in_proj, D                                         | Mamba2             |
    | Falcon-H1, Granite 4                   |                                                    |                    |

    Mamba-2's time_step_limit is dt_limit here; transformers leaves it out for single tokens. Falcon-H1's multipliers become
    part of in_proj. Where transformers' layers take an attention_mask of padding, those here take packed sequences: cu_seqlens.
    TypeError: it is none of these. ValueError: its activation is not SiLU, or its output gate neither SiLU nor a sigmoid."""
    names = {name for name, _ in (*layer.named_children(), *layer.named_parameters(recurse=False))}
    for parts, convert in CONVERSIONS:
        if names >= {*parts, "conv1d"}:
            _activation("its activation", layer.activation, ("silu",))
            return convert(layer).train(layer.training)
    known = "; or ".join(", ".join(parts) for parts, _ in CONVERSIONS)
    raise TypeError(f"layer: must have {known}: {type(layer).__name__} has {sorted(names)}")


def _convert_grouped(layer: Any) -> GatedDeltaNet:
    """The GatedDeltaNet of a layer whose projections have the rows of each head of keys, and of the heads of values that share
    it, together."""
    groups, shared = layer.num_k_heads, layer.num_v_heads // layer.num_k_heads
    keys, values = layer.head_k_dim, shared * layer.head_v_dim

    def by_kind(weight: torch.Tensor, rows: list[int]) -> torch.Tensor:
        return torch.cat([part.flatten(0, 1) for part in weight.unflatten(0, (groups, -1)).split(rows, 1)])

    qkvz = by_kind(layer.in_proj_qkvz.weight, [keys, keys, values, values])
    return _gated_delta_net(layer, qkvz, by_kind(layer.in_proj_ba.weight, [shared, shared]), layer.norm, layer.out_proj)


def _convert_separate(layer: Any) -> GatedDeltaNet:
    """The GatedDeltaNet of a layer with four projections: of q, k and v, of z, of b and of a."""
    qkvz, ba = (_join_rows(layer, names) for names in (QWEN3_5[:2], QWEN3_5[2:]))
    return _gated_delta_net(layer, qkvz, ba, layer.norm, layer.out_proj)


def _convert_olmo(layer: Any) -> GatedDeltaNet:
    """The GatedDeltaNet of a layer with a projection for each of its inputs."""
    qkvz, ba = (_join_rows(layer, names) for names in (OLMO[:4], OLMO[4:]))
    return _gated_delta_net(layer, qkvz, ba, layer.o_norm, layer.o_proj)


def _gated_delta_net(layer: Any, qkvz: torch.Tensor, ba: torch.Tensor, norm: Any, out_proj: Any) -> GatedDeltaNet:
    """The GatedDeltaNet with these projections and the layer's other parameters."""
    result = GatedDeltaNet(
        out_proj.out_features,
        num_heads=layer.num_k_heads,
        num_v_heads=layer.num_v_heads,
        head_dim=layer.head_k_dim,
        expand_v=layer.head_v_dim / layer.head_k_dim,
        allow_neg_eigval=getattr(layer, "allow_neg_eigval", False),
        conv_size=layer.conv1d.weight.shape[-1],
        conv_bias=layer.conv1d.bias is not None,
        **_factory(qkvz),
    )
    result.norm, result.out_proj = _gated_norm(norm), copy.deepcopy(out_proj)
    return _load(result, layer, layer, {"in_proj_qkvz.weight": qkvz, "in_proj_ba.weight": ba})


def _convert_kimi(layer: Any) -> KimiDeltaAttention:
    """The KimiDeltaAttention of a layer with a module for its decay. Both gates are products of two projections, or one."""
    gate, qkv = layer.forget_gate, _join_rows(layer, KIMI[:3])
    bound = getattr(gate, "lower_bound", None) if getattr(gate, "safe_gate", True) else None  # Bailing's
    result = KimiDeltaAttention(
        layer.o_proj.out_features,
        num_heads=layer.num_heads,
        head_dim=layer.head_dim,
        lower_bound=getattr(gate, "safe_gate_lower_bound", bound),
        conv_size=layer.conv1d.weight.shape[-1],
        conv_bias=layer.conv1d.bias is not None,
        **_factory(qkv),
    )
    result.f_proj = _sequence(gate, ("f_a_proj", "f_b_proj"), ("f_proj",))
    result.g_proj = _sequence(layer, ("g_a_proj", "g_b_proj"), ("g_proj",))
    result.b_proj, result.norm, result.out_proj = (
        copy.deepcopy(layer.b_proj),
        _gated_norm(layer.o_norm),
        copy.deepcopy(layer.o_proj),
    )
    return _load(result, layer, gate, {"in_proj_qkv.weight": qkv})


def _convert_mamba2(layer: Any) -> Mamba2:
    """attention.nn.Mamba2 with the arguments and a copy of the weights of a layer of Mamba-2's."""
    columns, hidden_size = layer.in_proj.out_features, layer.out_proj.out_features
    inner, norm = layer.out_proj.in_features, layer.norm
    state = (columns - 2 * inner - layer.num_heads) // (2 * layer.n_groups)
    result = Mamba2(
        hidden_size,
        d_state=state,
        d_conv=layer.conv1d.weight.shape[-1],
        expand=inner / hidden_size,
        headdim=layer.head_dim,
        ngroups=layer.n_groups,
        dt_limit=getattr(layer, "time_step_limit", None) or (0.0, math.inf),
        conv_bias=layer.conv1d.bias is not None,
        **_factory(layer.in_proj.weight),
    )
    result.norm = None if isinstance(norm, nn.Identity) else _gated_norm(norm, getattr(norm, "norm_before_gate", False))
    result.in_proj, result.out_proj = copy.deepcopy(layer.in_proj), copy.deepcopy(layer.out_proj)
    with torch.no_grad():  # Falcon-H1's multipliers, of the input and of each column of the projection
        scale = torch.as_tensor(getattr(layer, "mup_vector", 1.0), device=layer.in_proj.weight.device).flatten()
        result.in_proj.weight *= scale[:, None] * getattr(layer, "ssm_in_multiplier", 1.0)
        if result.in_proj.bias is not None:
            result.in_proj.bias *= scale
    return _load(result, layer, layer, {"D": layer.D})


def _gated_norm(norm: Any, norm_before_gate: bool = True) -> GatedRMSNorm:
    """The GatedRMSNorm of one of transformers' gated norms, or of the fused one that it may take instead."""
    columns = len(norm.weight)
    activation = _activation("its norm's activation", getattr(norm, "activation", "silu"), ("silu", "sigmoid"))
    groups = getattr(norm, "n_groups", columns // getattr(norm, "group_size", columns))
    epsilon = getattr(norm, "variance_epsilon", None) or norm.eps
    result = GatedRMSNorm(columns, epsilon, activation, norm_before_gate, groups, **_factory(norm.weight))
    result.load_state_dict({"weight": norm.weight})
    return result


def _activation(role: str, name: Any, known: tuple[str, ...]) -> str:
    """The activation, by our name. ValueError: it is none of those known."""
    result = "silu" if name == "swish" else name
    if result not in known:
        raise ValueError(f"layer: {role} must be {' or '.join(known)}: {name!r}")
    return result


def _sequence(module: Any, *choices: tuple[str, ...]) -> nn.Sequential:
    """Copies of the modules of `module` with these names, the first choice that it has."""
    names = next(names for names in choices if hasattr(module, names[0]))
    return nn.Sequential(*(copy.deepcopy(getattr(module, name)) for name in names))


def _load(result: Any, layer: Any, gate: Any, parameters: dict[str, torch.Tensor]) -> Any:
    """`result` with these parameters, the layer's convolution, and A_log and dt_bias of `gate`."""
    result.conv1d.to(layer.conv1d.weight.dtype)
    parameters |= {"conv1d.weight": layer.conv1d.weight.squeeze(1), "A_log": gate.A_log.flatten(), "dt_bias": gate.dt_bias}
    parameters |= {} if layer.conv1d.bias is None else {"conv1d.bias": layer.conv1d.bias}
    result.load_state_dict(result.state_dict() | {name: x.detach() for name, x in parameters.items()})
    return result


def _join_rows(layer: Any, names: tuple[str, ...]) -> torch.Tensor:
    """The rows of these projections, one below the other."""
    return torch.cat([getattr(layer, name).weight for name in names])


def _factory(weight: torch.Tensor) -> dict[str, Any]:
    return {"dtype": weight.dtype, "device": weight.device}


QWEN3_5 = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
OLMO = "q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"
KIMI = "q_proj", "k_proj", "v_proj", "b_proj", "forget_gate"
GATES = "A_log", "dt_bias"
CONVERSIONS: tuple[tuple[tuple[str, ...], Callable[[Any], RecurrentLayer]], ...] = (
    (("in_proj_qkvz", "in_proj_ba", *GATES, "norm", "out_proj"), _convert_grouped),
    ((*QWEN3_5, *GATES, "norm", "out_proj"), _convert_separate),
    ((*OLMO, *GATES, "o_norm", "o_proj"), _convert_olmo),
    ((*KIMI, "o_norm", "o_proj"), _convert_kimi),
    (("in_proj", "D", *GATES, "norm", "out_proj"), _convert_mamba2),
)
