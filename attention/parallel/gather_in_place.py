"""Scheme "gather" without putting keys together: other ranks' keys and values are received in arrays of their own, and
attention reads this rank's own where they are. Such a call costs the host little time (bench/test_host_ranks.py)."""

from __future__ import annotations

import math
from typing import Any

from ..families import family_block_kv, family_name
from ..softmax import remote_keys
from ..softmax.key_sources import BLOCK
from .moves import Redistribution, StridedView, made_like, strided
from .orders import Span, Spans
from .peers import Peers
from .pieces import CallPiece, ForwardCall

SUPPORTED_OPTIONS = {"causal", "scale", "deterministic", "family"}  # the options that such a call may have


def supports_options(call: ForwardCall) -> bool:
    """Are its options those of such a call?"""
    return call.options.keys() <= SUPPORTED_OPTIONS and family_name(call.options.get("family")) != "sm_80"


ALIGNMENT = 16  # bytes: addresses that TMA reads are multiples of this


class InPlaceGather:
    """What calls of one form have in common. own: the spans of this rank's keys. its: the Way to all keys that its queries see.
    piece: the one launch."""

    def __init__(self, k: Any, v: Any, own: Spans, its: Redistribution, piece: CallPiece, call: ForwardCall):
        self.lengths, self.placement = piece.options["lengths_k"], build_key_placement(piece, own, call)
        rows = piece.keys.stop - count_keys_before(own, piece.keys.stop)
        self.of_keys, self.of_values = (_MessagePlan(x, rows, own, its) for x in (k, v))

    @staticmethod
    def of(k: Any, v: Any, queries: Spans, own: Spans, its: Redistribution, call: ForwardCall) -> InPlaceGather | None:
        """The object for calls of this form; None if they cannot be served like this."""
        piece = call.joined(queries, k.shape[0], least=1) if call.plain and supports_options(call) else None
        at_blocks = all([end % BLOCK == 0 or end == call.keys for span in own for end in span])
        if piece is None or not (its.by_rows and its.receives and at_blocks and len(own) <= 2 and k.shape[0] == 1):
            return None
        return InPlaceGather(k, v, own, its, piece, call) if remote_keys.serves(k.device, *call.head_dims) else None

    def attend(self, peers: Peers, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """(out, lse) of this rank's queries."""
        of_keys, of_values = self.of_keys, self.of_values
        keys, values = of_keys.make(), of_values.make()
        sends = [(rank, strided(k, *part) if part else k) for rank, part in of_keys.sends]
        sends += [(rank, strided(v, *part) if part else v) for rank, part in of_values.sends]
        receives = [(rank, strided(keys, *part) if part else keys) for rank, part in of_keys.receives]
        receives += [(rank, strided(values, *part) if part else values) for rank, part in of_values.receives]
        peers.exchange(sends, receives).wait()
        return remote_keys.forward_two_buffers(q, keys, values, self.lengths, k, v, self.placement)


class _MessagePlan:
    """The parts of keys, or of values: the function that makes the array for other ranks' rows, and what is sent of x and
    received in that array, each as (rank, which part); a part that is None is all of it."""

    def __init__(self, x: Any, rows: int, own: Spans, its: Redistribution):
        self.make, each = made_like(x, rows), math.prod(x.shape[2:])

        def part(first: int, n: int, of: int) -> StridedView | None:
            return None if n == of else ((1, n, *x.shape[2:]), (of * each, *x.stride()[1:]), first * each)

        parts = [[views.rows.ranges[n] for n in views.of_all_heads or ()] for views in (its.here, its.there)]
        here, there = parts[0][its.own :], parts[1][its.own :]
        self.sends = [(rank, part(*one, x.shape[1])) for rank, one in zip(its.sends, here)]
        before = [first - count_keys_before(own, first) for first, _ in there]
        self.receives = [(rank, part(first, n, rows)) for rank, first, (_, n) in zip(its.receives, before, there)]


def build_key_placement(piece: CallPiece, own: Spans, call: ForwardCall) -> remote_keys.KeyPlacement:
    """The numbers that such a call takes."""
    end = piece.keys.stop
    first, second = (own + (Span(end, end),) * 2)[:2]
    spans = first.start, first.stop, second.start, second.stop
    return remote_keys.KeyPlacement(
        end, *spans, bool(call.options.get("causal")), call.options.get("scale"), family_block_kv(call.options.get("family"))
    )


def count_keys_before(spans: Spans, key: int) -> int:
    """How many keys of the spans come before this key."""
    return sum([len(span.within(Span(0, key))) for span in spans])


def adjacent(*arrays: Any) -> bool:
    """Are these arrays contiguous, at addresses that TMA takes?"""
    return all([x.is_contiguous() and not x.data_ptr() % ALIGNMENT for x in arrays])
