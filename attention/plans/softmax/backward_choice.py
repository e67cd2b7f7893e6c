"""The choice of the main kernel of backward, and of its configuration, for a problem."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tiles.calls.schema import Problem
from tiles.launching.devices import machine

from ...families import FamilyAndBlock, family_name, uses_hopper_kernels
from ...kernels.softmax import (
    backward_ampere,
    backward_folded_hopper,
    backward_hopper,
    backward_narrow_hopper,
    backward_wide_hopper,
)
from ...parts.backward.recomputed_scores import BiasRead, SlopeRead
from ...parts.backward.slope_gradient import NO_SLOPE_GRADIENT, SLOPE_GRADIENT, NoSlopeGradient
from ...parts.sequences import BatchedLayout
from ...parts.variant import Variant
from .forward_launches import DTYPES, choose_layout, load_bias_by_tma, uses_block_lists
from .variant_spec import VariantSpec

LAST_BLOCK_STORES = {64: 1024, 128: 1024}  # by head_dim: up to how many keys dq_order.LastBlockStores is faster


class KernelChoice(NamedTuple):
    """The module of the main kernel, and its configuration. plain: is this a kernel for Hopper, for sequences of equal lengths,
    without lists, without arrays that functions in Python read, without dropout and without accumulation?"""

    module: Any
    config: Any
    plain: bool


def choose_kernel(
    problem: Problem,
    spec: VariantSpec,
    deterministic: bool,
    family: str | FamilyAndBlock | None,
    reads: Mapping[str, Sequence[BiasRead]],
) -> KernelChoice:
    """The KernelChoice for the variant `spec`; backward_launches.plan_launches documents the arguments."""
    q_len, head_dim, kv_len, value_dim = problem("seqlen_q", "head_dim", "seqlen_k", "head_dim_v")
    (seq_layout, _), dtype, variant = choose_layout(problem), DTYPES[problem.dtype], spec.variant
    accumulate = problem.schema.arguments["dq"].role == "updated"
    tma = uses_hopper_kernels(problem, family)
    plain = tma and seq_layout is BatchedLayout
    plain = plain and not (spec.aux or reads.keys() - {"dbias"} or spec.listing or accumulate or variant.uses_random)
    shape = None
    if plain and not reads:
        if backward_wide_hopper.serves(head_dim, variant, value_dim):
            wide_config = backward_wide_hopper.config_for(head_dim, dtype, variant, value_dim)
            return KernelChoice(backward_wide_hopper, wide_config, True)
        if not (deterministic or family_name(family)):  # deterministic parts of long sequences must have the bits of the whole
            shape = backward_ampere.short_shape(head_dim, value_dim, variant, q_len, kv_len)
            tma = plain = shape is None
    by_list = uses_block_lists(problem, spec)
    all_see_first = seq_layout is BatchedLayout and not by_list and all_see_first_block(variant, q_len, kv_len)
    max_keys = LAST_BLOCK_STORES.get(head_dim, 0) if plain and variant.monotonic else 0
    max_keys = max(max_keys, backward_hopper.block_of(head_dim, value_dim))
    stores_first = tma and all_see_first and (deterministic or kv_len <= max_keys)
    order: dict[str, Any] = {"deterministic": deterministic, "stores_first": stores_first}
    slope_gradient = NO_SLOPE_GRADIENT
    if "dalibi" in reads and (not tma or backward_hopper.computes_slopes(head_dim, value_dim, seq_layout)):
        slope_gradient = choose_slope_gradient(variant, reads["dalibi"][0])
    fields = {"axes": spec.axes, "by_list": by_list, "seq_layout": seq_layout}
    fields |= {"accumulate": accumulate, "slope_gradient": slope_gradient}
    if not tma:
        vector_bytes, target = problem.bytes_at_once(), machine(problem.device).target
        config = backward_ampere.config_for(head_dim, dtype, variant, vector_bytes, value_dim, target, shape, **fields, **order)
        return KernelChoice(backward_ampere, replace(config, single_block=all_see_first and kv_len <= config.kv), plain)
    tma_variant = load_bias_by_tma(problem, variant)
    for module in (backward_narrow_hopper, backward_folded_hopper) if plain else ():
        if module.serves(head_dim, tma_variant, value_dim):
            return KernelChoice(module, module.config_for(head_dim, dtype, tma_variant, value_dim, **order), plain)
    main_config = backward_hopper.config_for(head_dim, dtype, tma_variant, value_dim, **fields, **order)
    return KernelChoice(backward_hopper, main_config, plain)


def choose_slope_gradient(variant: Variant, read: BiasRead) -> NoSlopeGradient:
    """SLOPE_GRADIENT if the main kernel can compute the gradient of the slopes that `read` reads, else NO_SLOPE_GRADIENT: the
    slopes must be shared by all sequences, under a mask that hides later keys."""
    is_shared = isinstance(read, SlopeRead) and not read.per_batch
    return SLOPE_GRADIENT if is_shared and variant.has_row_offset and variant.fits_slope_gradient else NO_SLOPE_GRADIENT


def all_see_first_block(variant: Variant, queries: int, keys: int) -> bool:
    """Does each query see the first key? Then the first thread block that adds to a query tile can store its parts of dQ, so
    that nobody has to clear the sums: in a fixed order; where later queries see more and there are few keys
    (dq_order.LastBlockStores); or where a thread block has all keys, and stores dQ itself."""
    return variant.starts_at_zero and (variant.sees_all_keys or (variant.ends_at_last_key and queries <= keys))
