"""Merges the subcalls of a ring step into fewer and larger calls, because at the end of each launch a part of the GPU idles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .positions import key_lengths
from .subcalls import POSITIONAL, ForwardCall, SubCall

UNMERGEABLE = POSITIONAL | {"alibi", "window", "seed"}  # options that depend on which queries and keys a subcall has
# rows of an array of queries, rows of an array of keys, and the subcall that these queries see of these keys
RingPart = tuple[slice, slice, SubCall]


def merge_parts(parts: Sequence[RingPart]) -> list[RingPart]:
    """Merge parts, so that there are fewer calls. Two parts are merged if the same queries see all keys of the first, and keys
    of the second that follow them; or if adjacent queries see all of the same keys. Parts with an option of UNMERGEABLE are not
    merged."""
    merged: list[RingPart] = []
    for one in parts:
        rows, keys, subcall = one
        last = merged[-1] if merged else one
        continues = (
            last[0] == rows and last[1].stop == keys.start and (_sees_all(one) or len(subcall.keys) >= len(subcall.rows))
        )
        if continues and _sees_all(last) and _have_same_options(last, one):
            keys = slice(merged.pop()[1].start, keys.stop)
        merged.append((rows, keys, subcall))
    parts, merged = merged, []
    for one in parts:
        rows, keys, subcall = one
        if merged and _sees_all(merged[-1]) and _sees_all(one) and merged[-1][1] == keys and merged[-1][0].stop == rows.start:
            rows = slice(merged.pop()[0].start, rows.stop)
        merged.append((rows, keys, subcall))
    return merged


def merge_by_lengths(parts: Sequence[RingPart], call: ForwardCall, batch: int) -> list[RingPart]:
    """Adjacent parts with the same number of queries each, which see keys from the same first key on, as one call with
    lengths_k, which has no backward pass. [] if that is not possible."""
    rows, keys = [rows for rows, _, _ in parts], [keys for _, keys, _ in parts]
    adjacent = all([previous_rows.stop == next_rows.start for previous_rows, next_rows in pairwise(rows)]) and not any(
        [x.start for x in keys]
    )
    if len(parts) < 2 or not adjacent or len({previous_rows.stop - previous_rows.start for previous_rows in rows}) > 1:
        return []
    if any([_is_unmergeable(subcall) or subcall.options != parts[0][2].options for _, _, subcall in parts]):
        return []
    lengths = key_lengths(tuple([previous_rows.stop for previous_rows in keys]), batch, call.device)
    all_rows, all_keys = slice(rows[0].start, rows[-1].stop), slice(0, max([previous_rows.stop for previous_rows in keys]))
    return [(all_rows, all_keys, parts[-1][2]._replace(options=parts[0][2].options | {"lengths_k": lengths}))]


def _is_unmergeable(subcall: SubCall) -> bool:
    """Does an option of the subcall depend on which queries and keys it has?"""
    return not UNMERGEABLE.isdisjoint(subcall.options)


def _sees_all(part: RingPart) -> bool:
    """Do all of its queries see all of its keys?"""
    return not _is_unmergeable(part[2]) and not part[2].options.get("causal")


def _have_same_options(one: RingPart, other: RingPart) -> bool:
    """Are all options of the two the same, except causal?"""
    return one[2].options | {"causal": True} == other[2].options | {"causal": True}
