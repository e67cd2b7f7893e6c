"""transformers' recurrent layers, taken apart by the names of their parameters, as layers of ours. transformers is not
imported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .delta_nets import GatedDeltaNet
from .layers import GatedRMSNorm
from .mamba import Mamba2
from .recurrent_layer import RecurrentLayer


def from_transformers(layer: nn.Module) -> RecurrentLayer:
    """The layer of ours that computes what a recurrent layer of transformers does, with a copy of its weights, in its dtype and
    on its device.

    | transformers' layer of              | told by its                                    | here          |
    | ----------------------------------- | ---------------------------------------------- | ------------- |
    | Qwen3-Next                          | in_proj_qkvz, in_proj_ba                       | GatedDeltaNet |
    | Qwen3.5                             | in_proj_qkv, in_proj_z, in_proj_b, in_proj_a   | GatedDeltaNet |
    | OLMo hybrid                         | q_proj, k_proj, v_proj, g_proj, b_proj, a_proj | GatedDeltaNet |
    | Bamba, Nemotron-H, Zamba-2, Mamba-2 | in_proj, with A_log, D and dt_bias             | Mamba2        |

    Mamba-2's time_step_limit is dt_limit here. TypeError: it is none of these. ValueError: its activation is another one than
    SiLU."""
    names = {name for name, _ in (*layer.named_children(), *layer.named_parameters(recurse=False))}
    for parts, convert in CONVERSIONS:
        if names >= {*parts, "conv1d", "A_log", "dt_bias"}:
            if layer.activation not in ("silu", "swish"):
                raise ValueError(f"layer: its activation must be SiLU: {layer.activation!r}")
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
    qkvz, ba = (_join_rows(layer, names) for names in (OLMO[:4], OLMO[4:6]))
    return _gated_delta_net(layer, qkvz, ba, layer.o_norm, layer.o_proj)


def _convert_mamba2(layer: Any) -> Mamba2:
    """The Mamba2 of a layer."""
    columns, hidden_size = layer.in_proj.out_features, layer.out_proj.out_features
    inner, norm, factory = layer.out_proj.in_features, layer.norm, _factory(layer.in_proj.weight)
    state = (columns - 2 * inner - layer.num_heads) // (2 * layer.n_groups)
    result = Mamba2(
        hidden_size,
        d_state=state,
        d_conv=layer.conv1d.weight.shape[-1],
        expand=inner / hidden_size,
        headdim=layer.head_dim,
        ngroups=layer.n_groups,
        dt_limit=getattr(layer, "time_step_limit", None) or (0.0, math.inf),
        bias=layer.in_proj.bias is not None,
        conv_bias=layer.conv1d.bias is not None,
        **factory,
    )
    groups = inner // getattr(norm, "group_size", inner)
    result.norm = GatedRMSNorm(inner, _epsilon(norm), "silu", norm_before_gate=False, groups=groups, **factory)
    return _load(result, layer, {"in_proj": layer.in_proj, "norm": norm, "out_proj": layer.out_proj, "D": layer.D})


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
        norm_eps=_epsilon(norm),
        **_factory(qkvz),
    )
    parts = {"in_proj_qkvz.weight": qkvz, "in_proj_ba.weight": ba, "norm": norm, "out_proj": out_proj}
    return _load(result, layer, parts)


def _load(result: Any, layer: Any, parts: dict[str, Any]) -> Any:
    """`result` with these parameters, those of these modules, and the layer's convolution and gates."""
    parameters = {"conv1d.weight": layer.conv1d.weight.squeeze(1), "A_log": layer.A_log, "dt_bias": layer.dt_bias}
    parameters |= {} if layer.conv1d.bias is None else {"conv1d.bias": layer.conv1d.bias}
    for name, part in parts.items():
        modules = isinstance(part, nn.Module)
        parameters |= {f"{name}.{key}": x for key, x in part.named_parameters()} if modules else {name: part}
    result.load_state_dict({name: x.detach() for name, x in parameters.items()})
    return result


def _join_rows(layer: Any, names: tuple[str, ...]) -> torch.Tensor:
    """The rows of these projections, one below the other."""
    return torch.cat([getattr(layer, name).weight for name in names])


def _epsilon(norm: Any) -> float:
    """The epsilon of one of transformers' gated norms, or of the fused one that it may take instead."""
    return getattr(norm, "variance_epsilon", None) or norm.eps


def _factory(weight: torch.Tensor) -> dict[str, Any]:
    return {"dtype": weight.dtype, "device": weight.device}


QWEN3_5 = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
OLMO = "q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", "o_norm", "o_proj"
CONVERSIONS: tuple[tuple[tuple[str, ...], Callable[[Any], RecurrentLayer]], ...] = (
    (("in_proj_qkvz", "in_proj_ba", "norm", "out_proj"), _convert_grouped),
    ((*QWEN3_5, "norm", "out_proj"), _convert_separate),
    (OLMO, _convert_olmo),
    (("in_proj", "D", "norm", "out_proj"), _convert_mamba2),
)
