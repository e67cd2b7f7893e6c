"""Masks and scores of the whole sequence, shifted to a subcall's position, and the small arrays that hold it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tiles import inlined


@functools.lru_cache(256)
def shift_mask(mask: Callable, packed: bool) -> Callable:
    """The mask evaluated at i + offsets[1], j + offsets[2] and h + offsets[0]: the first query, key and head of a subcall.
    packed: the offsets are those of each sequence."""

    inner = inlined(mask)

    def shifted_mask(b, h, i, j, offsets, *aux):
        return inner(b, h + offsets[0], i + offsets[1], j + offsets[2], *aux)

    def shifted_mask_of_sequence(b, h, i, j, offsets, *aux):
        return inner(b, h + offsets[0, b], i + offsets[1, b], j + offsets[2, b], *aux)

    return shifted_mask_of_sequence if packed else shifted_mask


@functools.lru_cache(256)
def shift_score(score: Callable, packed: bool) -> Callable:
    """The score evaluated at shifted positions, like `shift_mask`."""

    inner = inlined(score)

    def shifted_score(s, b, h, i, j, offsets, *aux):
        return inner(s, b, h + offsets[0], i + offsets[1], j + offsets[2], *aux)

    def shifted_score_of_sequence(s, b, h, i, j, offsets, *aux):
        return inner(s, b, h + offsets[0, b], i + offsets[1, b], j + offsets[2, b], *aux)

    return shifted_score_of_sequence if packed else shifted_score


@functools.lru_cache(4096)
def subcall_offsets(head: int, row: int, key: int, device: Any) -> Any:
    """The (head, query, key) at which a subcall begins, as an array. Cached, because a copy to the device takes time."""
    return torch.tensor([head, row, key], dtype=torch.int32, device=device)


def sequence_offsets(head: int, row: int, key: int, ends: Any) -> Any:
    """subcall_offsets for each of several packed sequences, (3, sequences)."""
    starts = ends[:-1]
    heads, rows, keys = (torch.full_like(starts, offset) for offset in (head, row, key))
    return torch.stack([heads, (rows - starts).clamp(min=0), (keys - starts).clamp(min=0)])


@functools.lru_cache(4096)
def key_lengths(ends: tuple[int, ...], batch: int, device: Any) -> Any:
    """attention.forward's lengths_k for parts of queries: `ends` for each batch, (B, parts)."""
    return torch.tensor([ends] * batch, dtype=torch.int32, device=device)
