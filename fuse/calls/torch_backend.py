"""fuse as a backend of torch.compile. It fuses the subgraphs that it can, and gives the rest of the graph to inductor.

    model = torch.compile(model, backend=fuse.backend)

Torch's partitioner groups adjacent nodes whose targets are in `targets`. Each group becomes a definition, and stays fused if
templates compute it in fewer kernels than it has products and reductions. Casts are ignored, because kernels compute in fp32;
so a group whose results have another dtype than its first array goes to inductor. Torch is imported by whoever compiles."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from ..language import functions, graph
from ..language.trace import ANY, Shape, trace_definition
from ..planning.candidates import candidates
from ..planning.cost import card
from .fused import Fused
from .program import FLOATS

Targets = dict[Any, Callable]


def _reduce_rows(function: Callable) -> Callable:
    """torch's form of a reduction that keeps its axis. TypeError: it is along another axis, or does not keep it."""

    def reduce(x, dim=None, keepdim=False, **other):
        (axis,) = dim if isinstance(dim, (tuple, list)) else (dim,)
        if axis not in (-1, x.ndim - 1) or not keepdim or any(v is not None for v in other.values()):
            raise TypeError(f"{function.__name__}: must be along the last axis and keep it, got {dim=}, {keepdim=}")
        return function(x)

    return reduce


def _linear(x, weight, bias=None):
    y = x @ functions.transpose(weight)
    return y if bias is None else y + bias


def _rms_norm(x, shape, weight=None, eps=None):
    if eps is None:
        raise TypeError("rms_norm: eps must be given: torch's default depends on the dtype")
    y = x * functions.rsqrt(functions.mean(x * x) + eps)
    return y if weight is None else y * weight


def _layer_norm(x, shape, weight=None, bias=None, eps=1e-5, *_):
    centred = x - functions.mean(x)
    y = centred * functions.rsqrt(functions.mean(centred * centred) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _softmax(x, dim=-1, **_):
    return functions.softmax(x, dim)


def _ignore_cast(x, *_, **__):
    return x


def _gelu(x, approximate="none"):
    if approximate != "none":
        raise TypeError(f"gelu: must have approximate='none', got {approximate=}")
    return functions.gelu(x)


def targets() -> Targets:
    """{torch function, operator or name of a method: the function of a definition that computes the same}."""
    import torch

    F = torch.nn.functional
    table: Targets = {
        F.linear: _linear, F.rms_norm: _rms_norm, F.layer_norm: _layer_norm, F.gelu: _gelu, F.softmax: _softmax,
        torch.rms_norm: _rms_norm, torch.layer_norm: _layer_norm,
        F.silu: lambda x, inplace=False: functions.silu(x), F.relu: lambda x, inplace=False: functions.relu(x),
        torch.softmax: _softmax, "softmax": _softmax, torch.t: functions.transpose, "t": functions.transpose,
        torch.square: lambda x: x * x, "square": lambda x: x * x,
    }  # fmt: skip
    table |= dict.fromkeys(["float", "to", "type_as", "bfloat16", "half"], _ignore_cast)
    for name, reduce in {"mean": functions.mean, "sum": functions.sum, "amax": functions.max}.items():
        table |= dict.fromkeys([name, getattr(torch, name)], _reduce_rows(reduce))
    for name in ("matmul", "neg", "pow", "truediv"):
        function, torchs = getattr(operator, name), name.replace("true", "")
        table |= dict.fromkeys([function, torchs, getattr(torch, torchs)], function)
    for name in ("add", "mul", "sub"):
        function = getattr(operator, name)
        table |= {function: function, getattr(operator, f"i{name}"): function, getattr(torch, name): function, name: function}
    for name in ("abs", "exp", "exp2", "log", "rsqrt", "sigmoid", "sqrt", "tanh", "maximum", "minimum", "where"):
        table |= {getattr(torch, name): getattr(functions, name), name: getattr(functions, name)}
    return table


def backend(graph: Any, inputs: Sequence[Any]) -> Callable:
    """The backend for torch.compile(model, backend=fuse.backend), which splits the graph between fuse and inductor (see the
    module)."""
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
            node._dynamo_source = sources[node.name]  # the partitioner drops it, and inductor reads it
        if node.op == "call_module" and node.target.startswith("fused_"):
            part = getattr(fused, node.target)
            fused_function = fuse_part(str(node.target), part, known)
            if fused_function is not None:
                setattr(fused, node.target, _module(fused_function))
                # Inductor's cache on disk hashes the whole graph. Our functions have no hash,
                # which it would report at length.
                patches = {"config_patches": {"fx_graph_cache": False}}
    return lookup_backend("inductor")(fused, list(inputs), **patches)


def fuse_part(name: str, part: Any, known: Targets) -> Fused | None:
    """A subgraph as a fused function; None if inductor should compile it."""
    nodes = list(part.graph.nodes)
    names = [node.name for node in nodes if node.op == "placeholder"]

    def definition(*arrays):
        values = dict(zip(names, arrays))

        def value(x):
            return values[x.name] if hasattr(x, "graph") else x

        for node in nodes:
            if node.op == "output":
                result = node.args[0]
                return tuple(map(value, result)) if isinstance(result, (tuple, list)) else value(result)
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
    arrays, results = [x for x in samples if x.dim()], [_example_value(node) for node in nodes[-1].all_input_nodes]
    if any(x is None or x.dtype != arrays[0].dtype for x in results):
        return None
    try:
        shapes = [Shape(tuple(1 if n == 1 else ANY for n in x.shape[-2:]), _dtype(x)) for x in samples]
        traced = trace_definition(definition, tuple(names), tuple(shapes))
        work = sum(x.operation in ("matmul", "sum", "max") for x in graph.walk(*traced.roots))
        ranked = candidates(traced, card(None))
    except (TypeError, ValueError):
        return None
    return Fused(definition) if ranked and len(ranked[0].plan.kernels) < max(2, work) else None


def _example_value(node: Any) -> Any:
    value = node.meta.get("example_value", node.meta.get("val"))
    return value if hasattr(value, "shape") else None


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _is_supported(node: Any) -> bool:
    """Is the node's value an array that kernels can take, of two axes or more and of FLOATS?"""
    value = _example_value(node)
    return value is not None and value.dim() >= 2 and _dtype(value) in FLOATS


def _module(fused: Fused) -> Any:
    """A torch module that calls the fused function."""
    import torch

    module = torch.nn.Module()
    module.forward = fused.__call__
    return module
