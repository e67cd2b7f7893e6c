"""Where there are many query tokens: forward's kernels serve them, whose tiles have more rows, of one head each, over keys that
are held in caches (key_sources.py, sequences.py)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tiles.arrays import Operand
from tiles.plan import Step
from tiles.schema import Problem

from ...families import choose_family
from ..assembled import VariantSpec
from ..key_sources import IndexedCache, OneBuffer, PagedKeys
from ..launches import Shape, config_of, launch, variant_arrays
from ..sequences import KvCacheLayout, PackedKvCacheLayout

EIGHT = 8  # rows that TMA's parts of a tile are a multiple of


def planned(
    problem: Problem,
    spec: VariantSpec,
    family: str | None,
    queries: Operand,
    most_keys: int,
    aux: Sequence[Operand],
    told: dict[str, Any],
) -> Step:
    """The Plan with the launch of an assembled variant, by forward's kernels. most_keys: of a sequence. aux: the arrays that
    functions read. told: the kernel's arguments for lengths and output. ValueError: the family cannot serve the call."""
    packed, paged = "cu_seqlens" in problem, "pages" in problem
    seq_layout = PackedKvCacheLayout if packed else KvCacheLayout
    kind: dict[str, Any] = {"seq_layout": seq_layout, "axes": tuple(len(x.form.shape) for x in aux)}
    cached = packed or "batch_index" in problem
    kind["kv_source"] = PagedKeys(1, "left" in spec.variant.params) if paged else IndexedCache() if cached else OneBuffer()
    hopper, parts = config_of(problem, spec, True, most_keys, **kind), 1
    if paged:
        part = math.gcd(hopper.kv, int(problem("T")[0]))
        parts = 0 if part % EIGHT or "leftpad" in problem else hopper.kv // part
    if family == "sm_90" and not parts:
        raise ValueError(
            f"family: sm_90 takes pages of a multiple of {EIGHT} keys, and no leftpad where there are pages: "
            f"k.shape={problem.shape('k')}, {family=} (the default, None, takes them)"
        )
    tma = choose_family(problem, family, problem.by_tma and parts > 0) == "sm_90"
    config: Shape = hopper if tma else config_of(problem, spec, False, most_keys, **kind)
    if tma and paged:
        config = replace(hopper, kv_source=PagedKeys(parts, "left" in spec.variant.params))
    arrays = {"gQ": queries, "gK": problem["k"], "gV": problem["v"], "leftpad": problem["leftpad"]}
    arrays |= {"ends": problem["cu_seqlens"]} if packed else {"q_len": problem("S")[0]}
    arrays |= {"pages": problem["pages"], "page_size": problem("T")[0]} if paged else {}
    arrays |= {"batch_index": problem["batch_index"]} if isinstance(config.kv_source, IndexedCache) else {}
    arrays |= {f"aux{n}": x for n, x in enumerate(aux)}
    read = {
        name: x for name, x in variant_arrays(problem).items() if name in spec.variant.params
    }  # q may be normalised already
    return launch(problem, spec, config, most_keys, **arrays, **told, **spec.numbers, **read)
