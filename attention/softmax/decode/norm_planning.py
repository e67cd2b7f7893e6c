"""The norms of a call of attention.decode: the objects for queries and keys, and the arrays that they read."""

from typing import Any, NamedTuple

from tiles.schema import Problem

from ..launches import norm_arrays, norm_of
from ..norm_parts import Layer, Normed
from ..variants import Variant
from .norms import AS_THEY_ARE, AsTheyAre, ByLayer, ByRms, LayerOfRows, NormedRows, RmsOfRows


class Norms(NamedTuple):
    """The norms that attention's kernels apply. queries: (variant, numbers) if the rows of a tile belong to one head. rows:
    the variant if they belong to several. Both are empty without a norm. keys: what is done with keys. of_queries, of_keys:
    the kernel's arguments."""

    queries: list[tuple[Variant, dict[str, Any]]]
    rows: list[Variant]
    keys: AsTheyAre
    of_queries: dict[str, Any]
    of_keys: dict[str, Any]


def norms_of(problem: Problem, norm_eps: float) -> Norms:
    """The Norms of a call: of queries, if these were not normalised before they were rotated, and of the cache's keys.
    ValueError: the arrays do not fit."""
    numbers: dict[str, Any] = {"norm_eps": norm_eps, "columns": problem("D")[0]}
    found = Norms([], [], AS_THEY_ARE, {}, {})
    q_norm, k_norm = (norm_of(problem, name) for name in ("q_norm", "k_norm"))
    if q_norm is not None and "cos" not in problem:
        alike = all(problem.axes(name) == "D" for name in ("q_norm", "q_norm_bias") if name in problem)
        rows = (LayerOfRows if isinstance(q_norm, Layer) else RmsOfRows)(alike)
        told = norm_arrays(problem, "q_norm", "HD") | numbers
        found = found._replace(queries=[(Normed(q_norm), numbers)], rows=[NormedRows(rows)], of_queries=told)
    if k_norm is not None:
        told = {name.replace("norm", "k"): x for name, x in norm_arrays(problem, "k_norm", "GD").items()}
        found = found._replace(keys=ByLayer() if isinstance(k_norm, Layer) else ByRms(), of_keys=told | numbers)
    return found
