"""fuse as a backend of torch.compile: what it can fuse it takes out of a graph, the rest goes to inductor.

    model = torch.compile(model, backend=fuse.backend)

Torch's partitioner gathers what stands next to each other and that `targets` knows; each part becomes a definition, and stays
if templates compute it in fewer kernels than it has products and reductions. Conversions of dtype are left out, for kernels
compute in fp32; so a part whose results have another dtype than its first array goes to inductor, too. Torch is imported by
whoever compiles."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from . import graph, language
from .candidates import candidates
from .cost import card
from .fused import Fused
from .program import FLOATS
from .trace import ANY, Shape, trace_definition

Targets = dict[Any, Callable]


def _reduce_rows(function: Callable) -> Callable:
    """A reduction as torch's, that keeps its axis."""

    def reduce(x, dim=None, keepdim=False, **other):
        (axis,) = dim if isinstance(dim, (tuple, list)) else (dim,)
        if axis not in (-1, x.ndim - 1) or not keepdim or any(v is not None for v in other.values()):
            raise TypeError(f"{function.__name__}: of {dim=}, {keepdim=}")
        return function(x)

    return reduce


def _linear(x, weight, bias=None):
    found = x @ language.transpose(weight)
    return found if bias is None else found + bias


def _rms_norm(x, shape, weight=None, eps=None):
    if eps is None:
        raise TypeError("rms_norm: without eps it is torch's, which depends on the dtype")
    found = x * language.rsqrt(language.mean(x * x) + eps)
    return found if weight is None else found * weight


def _layer_norm(x, shape, weight=None, bias=None, eps=1e-5, *_):
    centred = x - language.mean(x)
    found = centred * language.rsqrt(language.mean(centred * centred) + eps)
    found = found if weight is None else found * weight
    return found if bias is None else found + bias


def _softmax(x, dim=-1, **_):
    return language.softmax(x, dim)


def _ignore_cast(x, *_, **__):
    return x


def _gelu(x, approximate="none"):
    if approximate != "none":
        raise TypeError(f"gelu: {approximate=}")
    return language.gelu(x)


def targets() -> Targets:
    """{torch's function, operator or method: the function that says the same in a definition}."""
    import torch

    F = torch.nn.functional
    found: Targets = {
        F.linear: _linear, F.rms_norm: _rms_norm, F.layer_norm: _layer_norm, F.gelu: _gelu, F.softmax: _softmax,
        torch.rms_norm: _rms_norm, torch.layer_norm: _layer_norm,
        F.silu: lambda x, inplace=False: language.silu(x), F.relu: lambda x, inplace=False: language.relu(x),
        torch.softmax: _softmax, "softmax": _softmax, torch.t: language.transpose, "t": language.transpose,
        torch.square: lambda x: x * x, "square": lambda x: x * x,
    }  # fmt: skip
    found |= dict.fromkeys(["float", "to", "type_as", "bfloat16", "half"], _ignore_cast)
    for name, reduce in {"mean": language.mean, "sum": language.sum, "amax": language.max}.items():
        found |= dict.fromkeys([name, getattr(torch, name)], _reduce_rows(reduce))
    for name in ("matmul", "neg", "pow", "truediv"):
        function, torchs = getattr(operator, name), name.replace("true", "")
        found |= dict.fromkeys([function, torchs, getattr(torch, torchs)], function)
    for name in ("add", "mul", "sub"):
        function = getattr(operator, name)
        found |= {function: function, getattr(operator, f"i{name}"): function, getattr(torch, name): function, name: function}
    for name in ("abs", "exp", "exp2", "log", "rsqrt", "sigmoid", "sqrt", "tanh", "maximum", "minimum", "where"):
        found |= {getattr(torch, name): getattr(language, name), name: getattr(language, name)}
    return found


def backend(graph: Any, inputs: Sequence[Any]) -> Callable:
    """The backend for torch.compile(model, backend=fuse.backend): see the module."""
    from torch._dynamo import lookup_backend
    from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
    from torch.fx.passes.operator_support import OperatorSupportBase

    known = targets()

    class FusibleOperators(OperatorSupportBase):
        def is_node_supported(self, submodules, node):
            return node.op in ("call_function", "call_method") and node.target in known and _is_supported(node)

    sources = {node.name: getattr(node, "_dynamo_source", None) for node in graph.graph.nodes}
    partitioner = CapabilityBasedPartitioner(graph, FusibleOperators(), allows_single_node_partition=False)
    parts = partitioner.propose_partitions()
    fused = partitioner.fuse_partitions(parts, prefix="fused_")
    patches: dict[str, Any] = {}
    for node in list(fused.graph.nodes):
        if sources.get(node.name) is not None:
            node._dynamo_source = sources[node.name]  # the partitioner leaves it behind, and inductor asks for it
        if node.op == "call_module" and node.target.startswith("fused_"):
            part = getattr(fused, node.target)
            made = fuse_part(str(node.target), part, known)
            if made is not None:
                setattr(fused, node.target, _module(made))
                # Inductor keeps what it makes of a graph on disk, under a name of all that the graph holds: of our functions
                # there is none, which it would say at length.
                patches = {"config_patches": {"fx_graph_cache": False}}
    return lookup_backend("inductor")(fused, list(inputs), **patches)


def fuse_part(name: str, part: Any, known: Targets) -> Fused | None:
    """A part of a graph as a fused function; None if it is better left as it is."""
    nodes = list(part.graph.nodes)
    names = [node.name for node in nodes if node.op == "placeholder"]

    def definition(*given):
        values = dict(zip(names, given))

        def value(x):
            return values[x.name] if hasattr(x, "graph") else x

        for node in nodes:
            if node.op == "output":
                found = node.args[0]
                return tuple(map(value, found)) if isinstance(found, (tuple, list)) else value(found)
            if node.op != "placeholder":
                args, options = [value(x) for x in node.args], {key: value(x) for key, x in node.kwargs.items()}
                values[node.name] = known[node.target](*args, **options)
        raise AssertionError("a graph ends with its output")

    definition.__name__ = definition.__qualname__ = name
    definition.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(one, inspect.Parameter.POSITIONAL_OR_KEYWORD) for one in names]
    )
    samples = [_example_value(node) for node in nodes if node.op == "placeholder"]
    if any(x is None or (x.dim() and _dtype(x) not in FLOATS) for x in samples):
        return None
    given, results = [x for x in samples if x.dim()], [_example_value(node) for node in nodes[-1].all_input_nodes]
    if any(x is None or x.dtype != given[0].dtype for x in results):
        return None
    try:
        shapes = [Shape(tuple(1 if n == 1 else ANY for n in x.shape[-2:]), _dtype(x)) for x in samples]
        found = trace_definition(definition, tuple(names), tuple(shapes))
        work = sum(x.operation in ("matmul", "sum", "max") for x in graph.walk(*found.roots))
        every = candidates(found, card(None))
    except (TypeError, ValueError):
        return None
    return Fused(definition) if every and len(every[0].plan.kernels) < max(2, work) else None


def _example_value(node: Any) -> Any:
    found = node.meta.get("example_value", node.meta.get("val"))
    return found if hasattr(found, "shape") else None


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _is_supported(node: Any) -> bool:
    """Is the node's value an array that kernels can take?"""
    found = _example_value(node)
    return found is not None and found.dim() >= 2 and _dtype(found) in FLOATS


def _module(fused: Fused) -> Any:
    """A torch module that calls the fused function."""
    import torch

    module = torch.nn.Module()
    module.forward = fused.__call__
    return module
