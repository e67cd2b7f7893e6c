"""Tile shapes of forward_hopper.py: consumers, keys of a block, stages and grid, by head dim, variant and number of keys.
bench/notes/forward.md has the figures that they were chosen by."""

import math
from typing import Any

from ...parts.variant import Variant


def shape(consumers: int, kv: int, **overrides: Any) -> dict[str, Any]:
    """The fields of a Config for so many consumers, and blocks of `kv` keys. Two CTAs of one consumer share an SM."""
    fields = {"kv": kv, "consumers": consumers, "stages": 2, "weights_in_shared": False}
    if consumers == 1:
        fields |= {"persistent": False, "q_stages": 1, "tma_store": False, "ping_pong": False, "ctas_per_sm": 2}
    return fields | overrides


# {padded head_dim: fields} of plain attention, and the entries that differ for variants that need registers for something else
SHAPES = {64: shape(3, 128), 96: shape(2, 128), 128: shape(2, 128), 192: shape(2, 112), 256: shape(2, 80)}
RANDOM = {64: shape(2, 128), 192: shape(2, 96), 256: shape(2, 64)}  # dropout
PAGED = {64: shape(2, 128)}  # the producer looks up pages
BIAS_LOADED = {64: shape(2, 128), 96: shape(2, 96), 128: shape(2, 96), 192: shape(2, 64), 256: shape(2, 48)}
BIAS_BY_COLUMN = BIAS_LOADED | {64: shape(3, 96), 128: shape(2, 128)}  # a bias with one row
BIAS_BY_TMA = {64: shape(3, 96), 96: shape(2, 128), 128: shape(2, 128), 192: shape(2, 80), 256: shape(2, 64)}
SCORED = {128: shape(3, 80, stages=3)}  # scores are changed: two consumers do that while one has the tensor cores
NARROW = {(192, 128): shape(2, 128)}  # values have fewer columns than keys; other such pairs use the larger dim's shape
# {padded head_dim, causal: {up to so many keys: the fields that differ}}. Short tiles gain from a persistent grid, often of
# another shape. A persistent kernel's consumer skips key blocks that none of its rows sees, so at 64, causal, smaller blocks
# save more.
PERSISTENT = {"persistent": True}
IN_SHARED = shape(3, 128, weights_in_shared=True)
BY_LENGTH: dict[tuple[int, bool], dict[float, dict[str, Any]]] = {
    (64, False): {4096: PERSISTENT | {"stages": 3, "q_stages": 2, "tma_store": True}},
    (64, True): {
        2048: PERSISTENT | {"kv": 64, "consumers": 4, "stages": 4, "q_stages": 2},
        4096: PERSISTENT | {"q_stages": 2, "tma_store": True},
    },
    (96, False): {1024: PERSISTENT | {"q_stages": 2}, math.inf: IN_SHARED},
    (96, True): {1024: PERSISTENT | {"q_stages": 2}, 2048: PERSISTENT | IN_SHARED, math.inf: IN_SHARED},
    (128, False): {
        2048: PERSISTENT | {"q_stages": 2, "tma_store": True},
        math.inf: IN_SHARED | {"ping_pong": False},
    },
    (128, True): {2048: PERSISTENT | {"q_stages": 2}},
    (256, True): {2048: PERSISTENT | {"ping_pong": False}},
}
SOFTCAP_BY_LENGTH = {1024: PERSISTENT | IN_SHARED, math.inf: IN_SHARED}
ALIBI_BY_LENGTH = {1024: PERSISTENT, math.inf: IN_SHARED}
SCORED_BY_LENGTH = {  # by padded head_dim, and whether the change of scores is nonlinear
    (96, True): SOFTCAP_BY_LENGTH,
    (128, True): SOFTCAP_BY_LENGTH,
    (128, False): ALIBI_BY_LENGTH,
}
ONE_CONSUMER = {64: shape(1, 64, stages=4), 96: shape(1, 64), 128: shape(1, 64)}  # for many sequences of up to 64 queries
TABLES = SHAPES, SCORED, BIAS_LOADED, BIAS_BY_COLUMN, BIAS_BY_TMA, RANDOM, ONE_CONSUMER
WINDOW: dict[int, dict[str, Any]] = {128: {"q_stages": 2, "ping_pong": False}}  # for windows of up to 2048 keys
DEFAULT_BY_LENGTH: dict[float, dict[str, Any]] = {2048: PERSISTENT}


def variant_shape(padded: int, variant: Variant) -> dict[str, Any]:
    """The fields of the Config for a variant, whatever the lengths."""
    if variant.reads_score_matrix or variant.tma_bias:
        shapes = BIAS_LOADED
        if not variant.uses_random:
            shapes = BIAS_BY_TMA if variant.tma_bias else BIAS_BY_COLUMN if variant.prefetches_columns else BIAS_LOADED
    else:
        shapes = RANDOM if variant.uses_random else SCORED if variant.changes_scores else SHAPES
    return shapes.get(padded, SHAPES[padded])


def shapes_by_length(padded: int, variant: Variant) -> dict[float, dict[str, Any]]:
    """{up to so many keys: the fields of the Config that differ} for a variant."""
    if variant.cheap_mask:
        return BY_LENGTH.get((padded, variant.monotonic), DEFAULT_BY_LENGTH)
    if variant.changes_scores and variant.starts_at_zero and not (variant.reads_score_matrix or variant.tma_bias):
        return SCORED_BY_LENGTH.get((padded, variant.nonlinear), DEFAULT_BY_LENGTH)
    if variant.starts_at_zero or variant.changes_scores:
        return DEFAULT_BY_LENGTH
    return {2048: PERSISTENT | WINDOW.get(padded, {})}
