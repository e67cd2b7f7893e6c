"""Scheme "gather" without concatenating keys: other ranks' keys and values are received in a separate buffer, and attention
reads this rank's own where they are. Such a call takes little host time (bench/test_host_ranks.py)."""

from __future__ import annotations

import math
from typing import Any

from ..families import AMPERE_FAMILY, family_block_kv, family_name
from ..parts.key_sources import BLOCK
from ..plans.softmax import remote_keys
from .orders import Span, Spans
from .peers import Peers
from .redistribution import Redistribution, StridedView, array_maker, strided_view
from .subcalls import ForwardCall, SubCall

SUPPORTED_OPTIONS = {"causal", "scale", "deterministic", "family"}
ALIGNMENT = 16  # bytes: TMA reads addresses that are multiples of this


def supports_options(call: ForwardCall) -> bool:
    """Can kernels that read two buffers of keys serve a call with these options?"""
    return call.options.keys() <= SUPPORTED_OPTIONS and family_name(call.options.get("family")) != AMPERE_FAMILY


class InPlaceGather:
    """The messages and the launch for all calls with one signature. local_keys: the spans of this rank's keys. plan: the
    Redistribution that brings all keys that its queries see. subcall: the only launch."""

    def __init__(self, k: Any, v: Any, local_keys: Spans, plan: Redistribution, subcall: SubCall, call: ForwardCall):
        self.lengths, self.placement = subcall.options["lengths_k"], build_key_placement(subcall, local_keys, call)
        rows = subcall.keys.stop - count_keys_before(local_keys, subcall.keys.stop)
        self.key_messages, self.value_messages = (_MessagePlan(x, rows, local_keys, plan) for x in (k, v))

    @staticmethod
    def create(
        k: Any, v: Any, queries: Spans, local_keys: Spans, plan: Redistribution, call: ForwardCall
    ) -> InPlaceGather | None:
        """The object for calls with this signature; None if they need concatenated keys."""
        subcall = call.join_spans(queries, k.shape[0], least=1) if call.plain and supports_options(call) else None
        at_blocks = all([end % BLOCK == 0 or end == call.keys for span in local_keys for end in span])
        if subcall is None or not (plan.only_rows and plan.receives and at_blocks and len(local_keys) <= 2 and k.shape[0] == 1):
            return None
        return InPlaceGather(k, v, local_keys, plan, subcall, call) if remote_keys.serves(k.device, *call.head_dims) else None

    def attend(self, peers: Peers, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """(out, lse) of this rank's queries."""
        of_keys, of_values = self.key_messages, self.value_messages
        keys, values = of_keys.make(), of_values.make()
        sends = [(rank, strided_view(k, *part) if part else k) for rank, part in of_keys.sends]
        sends += [(rank, strided_view(v, *part) if part else v) for rank, part in of_values.sends]
        receives = [(rank, strided_view(keys, *part) if part else keys) for rank, part in of_keys.receives]
        receives += [(rank, strided_view(values, *part) if part else values) for rank, part in of_values.receives]
        peers.exchange(sends, receives).wait()
        return remote_keys.forward_two_buffers(q, keys, values, self.lengths, k, v, self.placement)


class _MessagePlan:
    """The messages for keys, or for values. make: makes the buffer for other ranks' rows. sends, receives: (rank, view of x to
    send, or of the buffer to receive in); a view that is None is the whole array."""

    def __init__(self, x: Any, rows: int, local_keys: Spans, plan: Redistribution):
        self.make, row_size = array_maker(x, rows), math.prod(x.shape[2:])

        def view(first: int, n: int, total: int) -> StridedView | None:
            return None if n == total else ((1, n, *x.shape[2:]), (total * row_size, *x.stride()[1:]), first * row_size)

        sources, targets = (
            [views.rows.ranges[n] for n in views.all_head_rows or ()][plan.num_local :]
            for views in (plan.source_views, plan.target_views)
        )
        self.sends = [(rank, view(*one, x.shape[1])) for rank, one in zip(plan.sends, sources)]
        firsts = [first - count_keys_before(local_keys, first) for first, _ in targets]
        self.receives = [(rank, view(first, n, rows)) for rank, first, (_, n) in zip(plan.receives, firsts, targets)]


def build_key_placement(subcall: SubCall, local_keys: Spans, call: ForwardCall) -> remote_keys.KeyPlacement:
    """Which keys are this rank's, and the call's options, for kernels that read two buffers of keys."""
    end = subcall.keys.stop
    first, second = (local_keys + (Span(end, end),) * 2)[:2]
    spans = first.start, first.stop, second.start, second.stop
    return remote_keys.KeyPlacement(
        end, *spans, bool(call.options.get("causal")), call.options.get("scale"), family_block_kv(call.options.get("family"))
    )


def count_keys_before(spans: Spans, key: int) -> int:
    """How many keys of the spans come before this key."""
    return sum([len(span.intersect(Span(0, key))) for span in spans])


def fits_tma(*arrays: Any) -> bool:
    """Are these arrays contiguous, at addresses that TMA supports?"""
    return all([x.is_contiguous() and not x.data_ptr() % ALIGNMENT for x in arrays])
