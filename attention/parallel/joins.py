"""Pieces of a call of ring that become fewer, each as large as it can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .pieces import PLACED, CallPiece, ForwardCall
from .placed import key_lengths

ASKING = PLACED | {"alibi", "window", "seed"}  # depend on which queries and keys a piece has
# rows of an array of queries, rows of an array of keys, and what the former see of the latter
RingPart = tuple[slice, slice, CallPiece]


def fewer(parts: Sequence[RingPart]) -> list[RingPart]:
    """The same parts in fewer calls, because at the end of each call a part of the GPU idles. Joined are: keys of which queries
    see all, with the keys behind them that the same queries see; and queries that see all of the same keys. Nothing is joined
    if an option depends on which queries and keys these are."""
    found: list[RingPart] = []
    for one in parts:
        rows, seen, part = one
        last = found[-1] if found else one
        behind = last[0] == rows and last[1].stop == seen.start and (_whole(one) or len(part.keys) >= len(part.rows))
        if behind and _whole(last) and _alike(last, one):
            seen = slice(found.pop()[1].start, seen.stop)
        found.append((rows, seen, part))
    parts, found = found, []
    for one in parts:
        rows, seen, part = one
        if found and _whole(found[-1]) and _whole(one) and found[-1][1] == seen and found[-1][0].stop == rows.start:
            rows = slice(found.pop()[0].start, rows.stop)
        found.append((rows, seen, part))
    return found


def of_parts(parts: Sequence[RingPart], call: ForwardCall, batch: int) -> list[RingPart]:
    """Parts with the same number of queries each, one behind the other, which see keys from the same first key on, as one call,
    which has no gradients. [] if that is not possible."""
    every, keys = [rows for rows, _, _ in parts], [seen for _, seen, _ in parts]
    adjacent = all([one.stop == then.start for one, then in pairwise(every)]) and not any([seen.start for seen in keys])
    if len(parts) < 2 or not adjacent or len({rows.stop - rows.start for rows in every}) > 1:
        return []
    if any([_asks(part) or part.options != parts[0][2].options for _, _, part in parts]):
        return []
    lengths = key_lengths(tuple([seen.stop for seen in keys]), batch, call.device)
    rows, seen = slice(every[0].start, every[-1].stop), slice(0, max([seen.stop for seen in keys]))
    return [(rows, seen, parts[-1][2]._replace(options=parts[0][2].options | {"lengths_k": lengths}))]


def _asks(piece: CallPiece) -> bool:
    """Does any option of the piece depend on which queries and keys it has?"""
    return not ASKING.isdisjoint(piece.options)


def _whole(part: RingPart) -> bool:
    """Do all of its queries see all of its keys?"""
    return not _asks(part[2]) and not part[2].options.get("causal")


def _alike(one: RingPart, other: RingPart) -> bool:
    """Are all options of the two the same, except causal?"""
    return one[2].options | {"causal": True} == other[2].options | {"causal": True}
