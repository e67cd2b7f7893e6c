"""transformers' recurrent layers, taken apart by the names of their parameters, as layers of ours. transformers is not
imported."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .delta_nets import GatedDeltaNet, KimiDeltaAttention
from .layers import GatedRMSNorm
from .mamba import Mamba2
from .recurrent_layer import RecurrentLayer


def from_transformers(layer: nn.Module) -> RecurrentLayer:
    """The layer of attention.nn that computes what a recurrent layer of transformers does, with a copy of its weights, in its
    dtypes and on its device; frozen ones stay frozen.

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
    build, projections = _recognise(layer)
    _activation("its activation", layer.activation, ("silu",))
    result = build(layer)
    for name, parts in _parameters(layer, projections).items():
        parameter = result.get_parameter(name).requires_grad_(any(x.requires_grad for x in parts))
        with torch.no_grad():
            parameter.copy_(torch.cat([x.reshape(-1, *parameter.shape[1:]) for x in parts]))
    return result.train(layer.training)


@torch.no_grad()
def to_transformers(layer: RecurrentLayer, theirs: nn.Module) -> nn.Module:
    """Copy the weights of `layer`, which from_transformers made, to a layer of transformers such as that which it was made of.
    Returns this. So what was trained with our layers is saved as transformers saves its own.

    TypeError: from_transformers does not know `theirs`. ValueError: the parameters of both have other sizes."""
    _, projections = _recognise(theirs)
    for name, parts in _parameters(theirs, projections).items():
        parameter = dict(layer.named_parameters()).get(name)
        if parameter is None or parameter.numel() != sum(x.numel() for x in parts):
            shape = None if parameter is None else tuple(parameter.shape)
            raise ValueError(f"layer: {name} must be {' and '.join(str(tuple(x.shape)) for x in parts)}, not {shape}")
        rows = [x.numel() // parameter[0].numel() for x in parts]
        for x, part in zip(parts, parameter.split(rows)):
            x.copy_(part.reshape(x.shape))
    for name, module in _modules(theirs).items():
        module.load_state_dict(layer.get_submodule(name).state_dict())
    if isinstance(layer, Mamba2):
        _scale_projection(theirs, theirs, lambda x, scale: x.div_(scale))
    return theirs


def recognises(layer: nn.Module) -> bool:
    """Does from_transformers know such a layer?"""
    try:
        return bool(_recognise(layer))
    except TypeError:
        return False


def _recognise(layer: Any) -> tuple[Callable, Callable]:
    """What makes our layer of this one, and what says where rows of its projections lie. TypeError: nothing does."""
    names = {name for name, _ in (*layer.named_children(), *layer.named_parameters(recurse=False))}
    for parts, build, projections in CONVERSIONS:
        if names >= {*parts, "conv1d"}:
            return build, projections
    known = "; or ".join(", ".join(parts) for parts, *_ in CONVERSIONS)
    raise TypeError(f"layer: must have {known}: {type(layer).__name__} has {sorted(names)}")


def _parameters(layer: Any, projections: Callable) -> dict[str, Sequence[torch.Tensor]]:
    """Our parameters by their names, each as the views of transformers' whose rows it has one below the other."""
    gate, conv, norm = getattr(layer, "forget_gate", layer), layer.conv1d, _first(layer, "norm", "o_norm")
    single = {"A_log": gate.A_log, "dt_bias": gate.dt_bias, "D": getattr(layer, "D", None), "conv1d.bias": conv.bias}
    single |= {"conv1d.weight": conv.weight, "norm.weight": getattr(norm, "weight", None)}
    return projections(layer) | {name: [x] for name, x in single.items() if x is not None}


def _modules(layer: Any) -> dict[str, nn.Module]:
    """transformers' modules whose copies our layer has, by the names that they have there."""
    if not hasattr(layer, "forget_gate"):
        in_proj = {"in_proj": layer.in_proj} if hasattr(layer, "in_proj") else {}
        return in_proj | {"out_proj": _first(layer, "out_proj", "o_proj")}
    lists = {"f_proj": _gate_modules(layer.forget_gate, "f"), "g_proj": _gate_modules(layer, "g")}
    parts = {f"{name}.{i}": x for name, modules in lists.items() for i, x in enumerate(modules)}
    return parts | {"b_proj": layer.b_proj, "out_proj": layer.o_proj}


def _grouped_rows(layer: Any) -> dict[str, Sequence[torch.Tensor]]:
    """Our projections as views of two that have the rows of each head of keys, and of the values that share it, together."""
    groups, shared = layer.num_k_heads, layer.num_v_heads // layer.num_k_heads
    keys, values = layer.head_k_dim, shared * layer.head_v_dim
    qkvz, ba = (x.weight.unflatten(0, (groups, -1)) for x in (layer.in_proj_qkvz, layer.in_proj_ba))
    return {"in_proj_qkvz.weight": qkvz.split([keys, keys, values, values], 1), "in_proj_ba.weight": ba.split(shared, 1)}


def _separate_rows(**names: tuple[str, ...]) -> Callable:
    """The function that returns our projections as the weights of several ones, by their names."""
    return lambda layer: {f"{name}.weight": [getattr(layer, x).weight for x in parts] for name, parts in names.items()}


def _gated_delta_net(layer: Any) -> GatedDeltaNet:
    """The GatedDeltaNet with the arguments of a layer of gated delta rules."""
    norm, out_proj = _first(layer, "norm", "o_norm"), _first(layer, "out_proj", "o_proj")
    result = GatedDeltaNet(
        out_proj.out_features,
        num_heads=layer.num_k_heads,
        num_v_heads=layer.num_v_heads,
        head_dim=layer.head_k_dim,
        expand_v=layer.head_v_dim / layer.head_k_dim,
        allow_neg_eigval=getattr(layer, "allow_neg_eigval", False),
        conv_size=layer.conv1d.weight.shape[-1],
        conv_bias=layer.conv1d.bias is not None,
        **_factory(_first(layer, "in_proj_qkvz", "in_proj_qkv", "q_proj").weight),
    )
    result.norm = _gated_norm(norm)
    return _with_modules(result, layer)


def _kimi_delta_attention(layer: Any) -> KimiDeltaAttention:
    """The KimiDeltaAttention of a layer with a module for its decay. Both gates are products of two projections, or one."""
    gate = layer.forget_gate
    bound = getattr(gate, "lower_bound", None) if getattr(gate, "safe_gate", True) else None  # Bailing's
    result = KimiDeltaAttention(
        layer.o_proj.out_features,
        num_heads=layer.num_heads,
        head_dim=layer.head_dim,
        lower_bound=getattr(gate, "safe_gate_lower_bound", bound),
        conv_size=layer.conv1d.weight.shape[-1],
        conv_bias=layer.conv1d.bias is not None,
        **_factory(layer.q_proj.weight),
    )
    result.f_proj, result.g_proj = (nn.Sequential(*_gate_modules(*x)) for x in ((gate, "f"), (layer, "g")))
    result.norm = _gated_norm(layer.o_norm)
    return _with_modules(result, layer)


def _mamba2(layer: Any) -> Mamba2:
    """attention.nn.Mamba2 with the arguments of a layer of Mamba-2's."""
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
    _with_modules(result, layer)
    _scale_projection(result, layer, lambda x, scale: x.mul_(scale))
    return result


@torch.no_grad()
def _scale_projection(module: Any, layer: Any, apply: Callable) -> None:
    """Apply Falcon-H1's multipliers, of the input and of each column of the projection, to in_proj of `module`."""
    scale = torch.as_tensor(getattr(layer, "mup_vector", 1.0), device=module.in_proj.weight.device).flatten()
    apply(module.in_proj.weight, scale[:, None] * getattr(layer, "ssm_in_multiplier", 1.0))
    if module.in_proj.bias is not None:
        apply(module.in_proj.bias, scale)


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


def _gate_modules(module: Any, letter: str) -> list[nn.Module]:
    """The projections of a gate of Kimi delta attention: two, or one."""
    pair = [f"{letter}_a_proj", f"{letter}_b_proj"]
    return [getattr(module, name) for name in (pair if hasattr(module, pair[0]) else [f"{letter}_proj"])]


def _first(layer: Any, *names: str) -> Any:
    """The first of these attributes that the layer has."""
    return next(getattr(layer, name) for name in names if hasattr(layer, name))


def _with_modules(result: Any, layer: Any) -> Any:
    """`result` with copies of the layer's modules, and its convolution in the layer's dtype."""
    for name, module in _modules(layer).items():
        result.set_submodule(name, copy.deepcopy(module))
    result.conv1d.to(layer.conv1d.weight.dtype)
    return result


def _factory(weight: torch.Tensor) -> dict[str, Any]:
    return {"dtype": weight.dtype, "device": weight.device}


QWEN3_5 = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
OLMO = "q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"
KIMI = "q_proj", "k_proj", "v_proj", "b_proj", "forget_gate"
GATES = "A_log", "dt_bias"
# the attributes by which a layer is recognised, what makes ours of it, where the rows of its projections lie
CONVERSIONS: tuple[tuple[tuple[str, ...], Callable[[Any], RecurrentLayer], Callable], ...] = (
    (("in_proj_qkvz", "in_proj_ba", *GATES, "norm", "out_proj"), _gated_delta_net, _grouped_rows),
    (
        (*QWEN3_5, *GATES, "norm", "out_proj"),
        _gated_delta_net,
        _separate_rows(in_proj_qkvz=QWEN3_5[:2], in_proj_ba=QWEN3_5[2:]),
    ),
    ((*OLMO, *GATES, "o_norm", "o_proj"), _gated_delta_net, _separate_rows(in_proj_qkvz=OLMO[:4], in_proj_ba=OLMO[4:])),
    ((*KIMI, "o_norm", "o_proj"), _kimi_delta_attention, _separate_rows(in_proj_qkv=KIMI[:3])),
    (("in_proj", "D", *GATES, "norm", "out_proj"), _mamba2, _separate_rows()),
)
