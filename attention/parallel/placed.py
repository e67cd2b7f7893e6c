"""Masks and scores of the whole, asked where a piece lies, and the small arrays that say where that is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tiles import inlined


@functools.lru_cache(256)
def shift_mask(mask: Callable, packed: bool) -> Callable:
    """The mask, shifted to where the heads, queries and keys of a piece begin; `packed`: in each sequence."""

    within = inlined(mask)

    def mask_in_its_place(b, h, i, j, begins, *aux):
        return within(b, h + begins[0], i + begins[1], j + begins[2], *aux)

    def mask_in_its_sequence(b, h, i, j, begins, *aux):
        return within(b, h + begins[0, b], i + begins[1, b], j + begins[2, b], *aux)

    return mask_in_its_sequence if packed else mask_in_its_place


@functools.lru_cache(256)
def shift_score(score: Callable, packed: bool) -> Callable:
    """The same for a score."""

    within = inlined(score)

    def score_in_its_place(s, b, h, i, j, begins, *aux):
        return within(s, b, h + begins[0], i + begins[1], j + begins[2], *aux)

    def score_in_its_sequence(s, b, h, i, j, begins, *aux):
        return within(s, b, h + begins[0, b], i + begins[1, b], j + begins[2, b], *aux)

    return score_in_its_sequence if packed else score_in_its_place


@functools.lru_cache(4096)
def piece_offsets(head: int, row: int, key: int, device: Any) -> Any:
    """The (head, query, key) with which a piece begins, as an array. Made once, because a copy to the device takes time."""
    return torch.tensor([head, row, key], dtype=torch.int32, device=device)


def sequence_offsets(head: int, row: int, key: int, ends: Any) -> Any:
    """The same of packed sequences: (head, query, key) of each."""
    first = ends[:-1]
    heads, rows, keys = (torch.full_like(first, one) for one in (head, row, key))
    return torch.stack([heads, (rows - first).clamp(min=0), (keys - first).clamp(min=0)])


@functools.lru_cache(4096)
def key_lengths(ends: tuple[int, ...], batch: int, device: Any) -> Any:
    """Keys of parts of queries: see attention.forward's lengths_k."""
    return torch.tensor([ends] * batch, dtype=torch.int32, device=device)
