"""Prefill: attention.decode with many query tokens, by forward's kernels, whose tiles have more rows, of one head each, over
keys in a cache (key_sources.py, sequences.py)."""

import math
from dataclasses import replace
from typing import Any

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand

from ...families import HOPPER_FAMILY, uses_hopper_kernels
from ...parts.key_sources import IndexedCache, OneBuffer, PagedKeys
from ...parts.sequences import KvCacheLayout, PackedKvCacheLayout
from ..softmax.forward_launches import bind_launch, config_for_16_bits, load_bias_by_tma, variant_arguments
from ..softmax.variant_spec import VariantSpec

BOX_ROWS = 8  # TMA loads a tile in boxes of a multiple of so many rows


def plan_launch(
    problem: Problem, spec: VariantSpec, family: str | None, queries: Operand, max_keys: int, args: dict[str, Any]
) -> Step:
    """The launch of forward's kernel for a variant. max_keys: of a sequence. args: the kernel's arguments for lengths and
    output. ValueError: the family cannot serve the call."""
    packed, paged = "cu_seqlens" in problem, "pages" in problem
    seq_layout = PackedKvCacheLayout if packed else KvCacheLayout
    fields: dict[str, Any] = {"seq_layout": seq_layout, "axes": spec.axes}
    cached = packed or "batch_index" in problem
    fields["kv_source"] = PagedKeys(1, "left" in spec.variant.params) if paged else IndexedCache() if cached else OneBuffer()
    hopper_spec = spec._replace(variant=load_bias_by_tma(problem, spec.variant))
    hopper, parts = config_for_16_bits(problem, hopper_spec, True, max_keys, **fields), 1
    if paged:
        part = math.gcd(hopper.kv, int(problem.extents["seqlen_k"]))
        parts = 0 if part % BOX_ROWS or "leftpad" in problem else hopper.kv // part
    if family == HOPPER_FAMILY and not parts:
        raise ValueError(
            f"family: 'sm_90' needs a page size that is a multiple of {BOX_ROWS}, and no leftpad where pages is passed: "
            f"k.shape={problem.shape('k')}, {family=} (the default, None, serves any)"
        )
    tma = uses_hopper_kernels(problem, family, problem.by_tma and parts > 0)
    config = hopper if tma else config_for_16_bits(problem, spec, False, max_keys, **fields)
    if tma and paged:
        config = replace(hopper, kv_source=PagedKeys(parts, "left" in spec.variant.params))
    arrays = {"gQ": queries, "gK": problem["k"], "gV": problem["v"], "leftpad": problem["leftpad"]}
    arrays |= {"ends": problem["cu_seqlens"]} if packed else {"q_len": problem.extents["seqlen_q"]}
    arrays |= {"pages": problem["pages"], "page_size": problem.extents["seqlen_k"]} if paged else {}
    arrays |= {"batch_index": problem["batch_index"]} if isinstance(config.kv_source, IndexedCache) else {}
    args = arrays | args | variant_arguments(problem, spec) | spec.aux_args
    return bind_launch(problem, hopper_spec if tma else spec, config, max_keys, **args)
