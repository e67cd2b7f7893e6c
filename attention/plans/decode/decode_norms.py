"""The norms of a call of attention.decode: the objects for queries and keys, and the arrays that they read."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from tiles.calls.schema import Problem

from ...parts.decode.norms import (
    PLAIN_KEYS,
    LayerNormedKeys,
    MultiHeadLayerNorm,
    MultiHeadQueryNorm,
    MultiHeadRmsNorm,
    PlainKeys,
    RmsNormedKeys,
)
from ...parts.norms import LayerNorm, QueryNorm
from ...parts.variant import Variant
from ..softmax.forward_launches import choose_norm, norm_arrays


class DecodeNorms(NamedTuple):
    """The norms that attention's kernels apply. queries: [(variant, its numbers)] for tiles whose rows belong to one head.
    rows: the same for tiles whose rows belong to several heads. Both are empty without a norm. keys: of the cache's keys, with
    the kernel's arguments key_args."""

    queries: Sequence[tuple[Variant, dict[str, Any]]] = ()
    rows: Sequence[tuple[Variant, dict[str, Any]]] = ()
    keys: PlainKeys = PLAIN_KEYS
    key_args: Mapping[str, Any] = MappingProxyType({})


def select_norms(problem: Problem, norm_eps: float) -> DecodeNorms:
    """The norms of a call: of queries, unless these are normalised before they are rotated, and of the cache's keys.
    ValueError: the arrays do not fit."""
    numbers: dict[str, Any] = {"norm_eps": norm_eps, "columns": problem.extents["head_dim"]}
    norms = DecodeNorms()
    q_norm, k_norm = (choose_norm(problem, name) for name in ("q_norm", "k_norm"))
    if q_norm is not None and "cos" not in problem:
        same_weights = all(problem.axes(name) == ("head_dim",) for name in ("q_norm", "q_norm_bias") if name in problem)
        norm = (MultiHeadLayerNorm if isinstance(q_norm, LayerNorm) else MultiHeadRmsNorm)(same_weights)
        norms = norms._replace(queries=[(QueryNorm(q_norm), numbers)], rows=[(MultiHeadQueryNorm(norm), numbers)])
    if k_norm is not None:
        args = {name.replace("norm", "k"): x for name, x in norm_arrays(problem, "k_norm", ("heads_k", "head_dim")).items()}
        keys = LayerNormedKeys() if isinstance(k_norm, LayerNorm) else RmsNormedKeys()
        norms = norms._replace(keys=keys, key_args=args | numbers)
    return norms
