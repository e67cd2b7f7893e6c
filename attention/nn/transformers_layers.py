"""transformers' recurrent layers, taken apart by the names of their parameters, as layers of ours. transformers is not
imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .delta_nets import GatedDeltaNet
from .recurrent_layer import RecurrentLayer


def from_transformers(layer: nn.Module) -> RecurrentLayer:
    """The layer of ours that computes what a recurrent layer of transformers does, with a copy of its weights, in its dtype and
    on its device: of the gated delta networks of Qwen3-Next (in_proj_qkvz, in_proj_ba) and Qwen3.5 (in_proj_qkv, in_proj_z,
    in_proj_b, in_proj_a). TypeError: it is none of these."""
    names = {name for name, _ in layer.named_children()}
    for projections, join in ((("in_proj_qkvz", "in_proj_ba"), _grouped), (QWEN3_5, _separate)):
        if names >= {*projections, "conv1d", "norm", "out_proj"}:
            return _gated_delta_net(layer, *join(layer))
    known = "in_proj_qkvz and in_proj_ba, or " + ", ".join(QWEN3_5)
    raise TypeError(f"layer: must have {known}, beside conv1d, norm and out_proj: {type(layer).__name__} has {sorted(names)}")


QWEN3_5 = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"


def _gated_delta_net(layer: Any, qkvz: torch.Tensor, ba: torch.Tensor) -> GatedDeltaNet:
    """The GatedDeltaNet with these projections and the layer's other parameters. ValueError: the layer's activation is another
    one than SiLU."""
    if layer.activation not in ("silu", "swish"):
        raise ValueError(f"layer: its activation must be SiLU: {layer.activation!r}")
    conv, eps = layer.conv1d, getattr(layer.norm, "variance_epsilon", getattr(layer.norm, "eps", 1e-6))
    made = GatedDeltaNet(
        layer.out_proj.out_features,
        num_heads=layer.num_k_heads,
        num_v_heads=layer.num_v_heads,
        head_dim=layer.head_k_dim,
        expand_v=layer.head_v_dim / layer.head_k_dim,
        conv_size=conv.weight.shape[-1],
        conv_bias=conv.bias is not None,
        norm_eps=eps,
        dtype=qkvz.dtype,
        device=qkvz.device,
    )
    parameters = {"in_proj_qkvz.weight": qkvz, "in_proj_ba.weight": ba, "conv1d.weight": conv.weight.squeeze(1)}
    parameters |= {} if conv.bias is None else {"conv1d.bias": conv.bias}
    parameters |= {"A_log": layer.A_log, "dt_bias": layer.dt_bias}
    parameters |= {f"{name}.weight": getattr(layer, name).weight for name in ("norm", "out_proj")}
    made.load_state_dict({name: x.detach() for name, x in parameters.items()})
    return made.train(layer.training)


def _separate(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of q, k, v, z; rows of b, a) of projections of their own."""
    qkv, z, b, a = (getattr(layer, name).weight for name in QWEN3_5)
    return torch.cat([qkv, z]), torch.cat([b, a])


def _grouped(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of projections in which the rows of each head of keys, and of the heads of values that share it, stand
    together."""
    groups, shared = layer.num_k_heads, layer.num_v_heads // layer.num_k_heads
    keys, values = layer.head_k_dim, shared * layer.head_v_dim

    def by_kind(weight: torch.Tensor, rows: list[int]) -> torch.Tensor:
        return torch.cat([part.flatten(0, 1) for part in weight.unflatten(0, (groups, -1)).split(rows, 1)])

    qkvz, ba = layer.in_proj_qkvz.weight, layer.in_proj_ba.weight
    return by_kind(qkvz, [keys, keys, values, values]), by_kind(ba, [shared, shared])
