"""The derivative of forward's programs for frameworks that ask these for it (tiles/jax_call.py). Torch's is in autograd.py."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import attention

from .asked import AUX
from .python import known

DIFFERENTIABLE = "q", "k", "v", "sink"
ALIKE = "alibi", "sink", "bias", "cu_seqlens", "cu_seqlens_k", "lengths_k"  # arrays that backward has under the same names
ONCE = "attention.forward: has no second derivatives"
STOP = "put jax.lax.stop_gradient around it"


def gradient(names: Sequence[str], options: dict[str, Any], layout: str) -> Callable[..., dict[str, Any]]:
    """See tiles.program. NotImplementedError names an argument that has no gradient, or with which there is none."""
    for name in names:
        if name not in DIFFERENTIABLE:
            raise NotImplementedError(f"{name}: has no gradient yet; {STOP}")
    return partial(_gradients, options=options, layout=layout)


def _gradients(
    given: dict[str, Any], made: dict[str, Any], gradients: dict[str, Any], options: dict[str, Any], layout: str
) -> dict[str, Any]:
    """{name: gradient} of a call on these arrays that gave out and lse; `gradients` may have one of out."""
    if "lse" in gradients:
        raise NotImplementedError(f"lse: has no gradient; {STOP}")
    if not gradients:
        return {}
    told, taken = _told(given, options), signature(attention.backward).parameters
    if refused := [name for name in told if name not in taken]:
        raise NotImplementedError(f"{refused[0]}: there is no backward pass with it yet; {STOP.replace('it', 'q, k and v')}")
    found = attention.backward(
        gradients["out"], given["q"], given["k"], given["v"], made["out"], made["lse"], layout=layout, **told
    )
    return dict(zip(DIFFERENTIABLE, found))


def _told(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What forward was told, in its own words, but for what is as it is by default."""
    ends = options.get("left"), options.get("right")
    dropout = options.get("dropout")
    aux = tuple([given[f"aux{n}"] for n in range(AUX) if f"aux{n}" in given])
    told = {name: given.get(name) for name in ALIKE} | {name: options.get(name) for name in ("softcap", "scale", "family")}
    told |= {"causal": options["causal"] or None, "window": None if ends == (None, None) else ends, "aux": aux or None}
    told |= {name: known(options.get(name)) for name in ("mask", "score")}
    told |= {"dropout": dropout, "seed": None if dropout is None else given.get("seed", options.get("seed_value"))}
    told["blocks"] = True if {"kv_indices", "lists"} & given.keys() else None
    for name in "q_norm", "k_norm":
        bias = given.get(f"{name}_bias")
        told[name] = given.get(name) if bias is None else (given[name], bias)
    if told["q_norm"] is not None or told["k_norm"] is not None:
        told["norm_eps"] = options["norm_eps"]
    return {name: value for name, value in told.items() if value is not None}
