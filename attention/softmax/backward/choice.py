"""Which kernels serve the gradients of a problem, in which configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tiles.arrays import Operand
from tiles.device import machine
from tiles.schema import Problem

from ...families import PartOf, choose, name_of
from ..assembled import Assembled
from ..launches import DTYPES, in_tiles, sequences_of
from ..prepared_lists import Listing
from ..sequences import Batched
from ..variants import Variant
from . import ampere, hopper, hopper_folded, hopper_narrow, hopper_wide, slopes
from .recomputed_scores import Added

FEW = {64: 1024, 128: 1024}  # by head_dim: up to how many keys those store dQ's parts first that have the last ones


class Choice(NamedTuple):
    """The module of the main kernel, and its configuration. plain: do Hopper's kernels serve nothing but a variant that is
    computed, of sequences that all have the same lengths?"""

    module: Any
    config: Any
    plain: bool


def chosen(
    problem: Problem,
    made: Assembled,
    ordered: bool,
    family: str | PartOf | None,
    aux: Sequence[Operand],
    listing: Listing | None,
    reads: Mapping[str, Sequence[Added]],
) -> Choice:
    """The Choice for an assembled variant: see launches.planned."""
    q_len, head_dim, kv_len, value_dim = problem("SDTV")
    (lie, _), dtype, variant = sequences_of(problem), DTYPES[problem.dtype], made.variant
    adds = problem.schema.arguments["dq"].role == "updated"
    tma = choose(problem, family) == "sm_90"
    plain = tma and lie is Batched and not (aux or reads.keys() - {"dbias"} or listing or adds or variant.draws)
    shape = None
    if plain and not reads:
        if hopper_wide.serves(head_dim, variant, value_dim):
            return Choice(hopper_wide, hopper_wide.config_for(head_dim, dtype, variant, value_dim), True)
        if not (ordered or name_of(family)):  # in order parts of sequences give the bits of the whole, which may be long
            shape = ampere.short(head_dim, value_dim, variant, q_len, kv_len)
            tma = plain = shape is None
    by_list = listing is not None and lie is Batched
    alike = lie is Batched and not by_list and each_sees(variant, q_len, kv_len)
    few, block = FEW.get(head_dim, 0) if plain and variant.rising else 0, hopper.block_of(head_dim, value_dim)
    in_order: dict[str, Any] = {"ordered": ordered, "stores": tma and alike and (ordered or kv_len <= max(few, block))}
    learns = slopes.UNASKED
    if "dalibi" in reads and (not tma or hopper.finds_slopes(head_dim, value_dim, lie)):
        learns = slopes.asked(variant, reads["dalibi"][0])
    kind = {"axes": tuple([len(x.form.shape) for x in aux]), "by_list": by_list, "lie": lie, "adds": adds, "learns": learns}
    if not tma:
        at_once, gpu = problem.bytes_at_once(), machine(problem.device).capability
        config = ampere.config_for(head_dim, dtype, variant, at_once, value_dim, gpu, shape, **kind, **in_order)
        return Choice(ampere, replace(config, alone=alike and kv_len <= config.kv), plain)
    by_tile = in_tiles(problem, variant)
    if plain and hopper_narrow.serves(head_dim, by_tile, value_dim):
        return Choice(hopper_narrow, hopper_narrow.config_for(head_dim, dtype, by_tile, value_dim, **in_order), plain)
    if plain and hopper_folded.serves(head_dim, variant, value_dim):
        return Choice(hopper_folded, hopper_folded.config_for(head_dim, dtype, variant, value_dim, **in_order), plain)
    return Choice(hopper, hopper.config_for(head_dim, dtype, by_tile, value_dim, **kind, **in_order), plain)


def each_sees(variant: Variant, queries: int, keys: int) -> bool:
    """Does each query see the first key? Then the first block of keys that has a part of a tile of queries can store it, so
    that nobody clears the sums: in order; where later queries see more and keys are few (dq_order.Heading); or where a block
    has all keys, and may even write dQ."""
    return variant.from_first and (variant.everything or (variant.within and queries <= keys))
