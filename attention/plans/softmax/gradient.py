"""The gradients of a call of forward: for torch's autograd (autograd.py), and for JAX (tiles/calls/jax_call.py).

Arrays have flat names here, those of forward's schema: a norm (weights, bias) is q_norm and q_norm_bias, aux is aux0 ..."""

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import attention

from ...options import ScoreOptions, check_number, split_norm
from ...parts.block_masks import FIELDS
from .call_options import AUX, check_aux, score_arguments
from .prepared_lists import BlockLists

NORMS = "q_norm", "k_norm"
NORM_NAMES = "q_norm", "q_norm_bias", "k_norm", "k_norm_bias"
AUX_NAMES = tuple([f"aux{n}" for n in range(AUX)])
ON_REQUEST = "bias", "alibi", *AUX_NAMES  # arrays whose gradients backward computes on request
DIFFERENTIABLE = "q", "k", "v", "bias", "alibi", "sink", *AUX_NAMES, *NORM_NAMES  # in the order of backward's results
BLOCKS = *FIELDS, "lists", "marks"  # the arrays of blocks=
GROUPED = frozenset((*NORM_NAMES, *AUX_NAMES))  # arrays that share an argument
ARRAYS = frozenset("q k v alibi sink bias cu_seqlens cu_seqlens_k lengths_k".split())  # arrays that are arguments by themselves
# Arguments that hold several arrays, or maybe one, or that change nothing without another argument
PARTLY_ARRAYS = frozenset((*NORMS, "aux", "norm_eps", "dropout", "seed"))
NO_SECOND_DERIVATIVES = "attention.forward: has no second derivatives"
STOP_GRADIENT_HINT = "put jax.lax.stop_gradient around"


def compute_gradients(
    dout: Any, dlse: Any, inputs: dict[str, Any], out: Any, lse: Any, options: dict[str, Any], requested: Sequence[str]
) -> dict[str, Any]:
    """{name: gradient} of a call of forward with these arrays and options, which returned out and lse, by attention.backward.
    dlse: None if lse has no gradient. requested: the names of the arrays whose gradients are needed; the result may have
    more."""
    arrays = group_arrays(inputs)
    q, k, v = (arrays.pop(name) for name in "qkv")
    requests: dict[str, Any] = {f"d{name}": True for name in ("bias", "alibi") if name in requested}
    if any([name in requested for name in AUX_NAMES]):
        requests["daux"] = [True if name in requested else None for name in AUX_NAMES if name in inputs]
    grads = attention.backward(dout, q, k, v, out, lse, dlse=dlse, **arrays, **options, **requests)
    names = [name for name in DIFFERENTIABLE if name in inputs and (name in requested or name not in ON_REQUEST)]
    results = [x for one in grads for x in (one if isinstance(one, tuple) else (one,))]
    return dict(zip(names, results, strict=True))


def unsupported_arguments(names: Iterable[str]) -> list[str]:
    """The arguments of forward among these that attention.backward does not take."""
    supported = backward_parameters()
    return [name for name in names if name not in supported]


def backward_parameters() -> tuple[str, ...]:
    """The names of attention.backward's arguments."""
    return _parameters()


@functools.cache
def _parameters() -> tuple[str, ...]:
    return tuple(signature(attention.backward).parameters)


backward_parameters._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile does not look inside


def group_arrays(arrays: dict[str, Any]) -> dict[str, Any]:
    """{argument of forward: array or tuple of arrays} from {flat name: array}."""
    if GROUPED.isdisjoint(arrays):
        return {**arrays}
    grouped = {name: x for name, x in arrays.items() if name not in GROUPED}
    for name in NORMS:
        if name in arrays:
            grouped[name] = (arrays[name], arrays[f"{name}_bias"]) if f"{name}_bias" in arrays else arrays[name]
    if aux := tuple([arrays[name] for name in AUX_NAMES if name in arrays]):
        grouped["aux"] = aux
    return grouped


def flatten_arrays(arguments: Mapping[str, Any], known: frozenset[str] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """({flat name: array}, {argument: value}) of forward's arguments, without those that change nothing, such as None.
    TypeError: a norm is no array or pair, aux is no sequence of up to AUX arrays, or the name of an argument is not in
    `known`."""
    if known is not None and not arguments.keys() <= known:
        raise TypeError(f"takes no argument {min(arguments.keys() - known)}")
    arrays: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, x in arguments.items():
        if x is None:
            continue
        if name in ARRAYS:
            arrays[name] = x
        elif name not in PARTLY_ARRAYS:
            others[name] = x
        elif name in NORMS:
            weights, bias = split_norm(name, x)
            arrays |= {name: weights} if bias is None else {name: weights, f"{name}_bias": bias}
        elif name == "aux":
            arrays |= {f"aux{n}": y for n, y in enumerate(check_aux(x))}
        elif name == "norm_eps":
            others |= {} if all([arguments.get(norm) is None for norm in NORMS]) else {name: x}
        elif check_number("dropout", arguments.get("dropout")):  # of dropout and seed
            is_number = name != "seed" or isinstance(x, int)  # Dynamo cannot ask its symbolic integers for a shape
            (arrays if not is_number and hasattr(x, "shape") else others)[name] = x
    return arrays, others


# ---- for programs ----------------------------------------------------------------------------------------------------
def program_gradient(names: Sequence[str], options: dict[str, Any], layout: str) -> Callable[..., dict[str, Any]]:
    """The gradient of forward's programs for JAX, as `tiles.calls.program` takes it. NotImplementedError: an argument in
    `names` has no gradient, or there is none with another argument of the call."""
    for name in names:
        if name not in DIFFERENTIABLE:
            raise NotImplementedError(f"{name}: has no gradient yet; {STOP_GRADIENT_HINT} it")
    return partial(_gradients, options=options, layout=layout, requested=names)


def _gradients(
    inputs: dict[str, Any],
    results: dict[str, Any],
    doutputs: dict[str, Any],
    options: dict[str, Any],
    layout: str,
    requested: Sequence[str],
) -> dict[str, Any]:
    """{name: gradient} of a program's arrays. doutputs: {result: its gradient}. requested: the names that are needed."""
    if not doutputs:
        return {}
    arguments, arrays = _forward_arguments(inputs, options), {name: x for name, x in inputs.items() if name not in BLOCKS}
    if refused := unsupported_arguments([*arguments, *group_arrays(arrays)]):
        raise NotImplementedError(f"{refused[0]}: there is no backward pass with it yet; {STOP_GRADIENT_HINT} q, k and v")
    dout, dlse = (doutputs.get(name) for name in ("out", "lse"))
    if dout is None:  # the loss depends on lse alone
        dout = sys.modules["jax"].numpy.zeros_like(results["out"])
    return compute_gradients(dout, dlse, arrays, results["out"], results["lse"], arguments | {"layout": layout}, requested)


def _forward_arguments(inputs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """A program's options as arguments of forward, without those that are None. TypeError: the gradient would ignore one."""
    rest = {**options}
    scores = ScoreOptions(**{name: rest.pop(name) for name in ScoreOptions._fields if name in rest})
    arguments = score_arguments(scores) | {name: rest.pop(name, None) for name in ("scale", "family", "dropout")}
    arguments["seed"] = rest.pop("seed_value", None)
    size, prepared_for = (rest.pop("block_rows", None), rest.pop("block_cols", None)), rest.pop("prepared_for", None)
    norm_eps, _ = rest.pop("norm_eps", None), rest.pop("return_lse", None)
    if rest:
        raise TypeError(f"{min(rest)}: is an option of forward that no gradient knows")
    if "lists" in inputs:
        arguments["blocks"] = BlockLists(inputs["lists"], prepared_for, inputs.get("marks"), size)
    elif "kv_indices" in inputs:
        arguments["blocks"] = SimpleNamespace(**{name: inputs.get(name) for name in FIELDS}, BLOCK_SIZE=size)
    arguments |= {"norm_eps": norm_eps} if {*NORMS} & inputs.keys() else {}
    return {name: value for name, value in arguments.items() if value is not None}
