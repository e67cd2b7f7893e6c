"""A call of attention.forward on part of the queries and part of the keys, with the positions that these have in the whole
sequence.

attention.forward aligns the last query with the last key: query i is at key i + Sk - Sq. In the whole sequence query i is at
key i + key_offset. Queries [a, b) with keys [c, d) see the same keys as in the whole sequence if the options become:

    causal       d = b + key_offset: keys after the last query are left out; or all of [c, d) is before the first, and is seen
    window       (left + e, right - e), e = d - b - key_offset
    cu_seqlens   both clamped to [a, b) and [c, d): documents without common rows are empty, and each keeps its number
    lengths_k    less Sq - b, if the whole sequence ends after the last query
    mask, score  evaluated at i + a, j + c and h + the first head, which are passed as one more array of aux

Nothing here waits for the device: the values of cu_seqlens are not read."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..families import family_block_kv
from ..kernels.softmax import forward_ampere, forward_hopper_shapes
from ..plans.softmax.planning import window_of_mask
from ..scoring.algebra import alibi_slope_of
from ..scoring.python_functions import find_function, register_function
from .orders import Span, Spans, merge_spans
from .positions import key_lengths, sequence_offsets, shift_mask, shift_score, subcall_offsets

# options that depend on queries' positions
POSITIONAL = frozenset("mask score bias blocks cu_seqlens cu_seqlens_k lengths_k".split())
TILE = 128  # rows of a query tile of the backward pass; some tiles have twice as many
TILE_MULTIPLE = 384  # a multiple of the rows of a query tile in every kernel for windows
WINDOW_END = 2**30  # see call_options.window_ends
SEED_COUNT = 2**63
SEED_FACTOR = 0x9E3779B97F4A7C15  # odd, with random-looking bits, so that the seeds of different subcalls differ in many bits


class SubCall(NamedTuple):
    """A call of attention.forward on some queries and some keys. rows: the queries that see any key. keys: the keys that are
    seen. options: attention.forward's for these. bias_row: the first of the bias's rows. has_offsets: is the array of offsets
    (positions.py) before the caller's arrays in aux?"""

    rows: Span
    keys: Span
    options: dict[str, Any]
    bias_row: int
    has_offsets: bool


class ForwardCall(NamedTuple):
    """A call of attention.forward. options: its arguments besides q, k and v, by name, without those that are None. length,
    keys: how many queries and keys the whole sequence has. heads, kv_heads: the heads of the arrays at hand. head_dims: of q
    and v. device: that of the arrays. plain: no option is an array, so that calls with one signature differ in nothing but q, k
    and v."""

    options: dict[str, Any]
    length: int
    keys: int
    heads: Span
    kv_heads: Span
    head_dims: tuple[int, int]
    device: Any
    plain: bool = False

    @property
    def key_offset(self) -> int:
        """Query i is at key i + key_offset."""
        return self.keys - self.length

    @property
    def window(self) -> tuple[int | None, int | None]:
        """(left, right): how many keys before and after its own position a query sees; None: all."""
        left, right = self.options.get("window") or (None, None)
        return left, 0 if self.options.get("causal") else right

    @property
    def kv_multiple(self) -> int:
        """A multiple of the keys in a block of every kernel. A range of keys that begins at such a multiple is divided into the
        same blocks as the whole, so sums have the same order."""
        kv = family_block_kv(self.options.get("family"))
        return common_kv_multiple(*self.head_dims) if kv is None else math.lcm(kv, TILE)

    def select_heads(self, heads: Span, kv_heads: Span) -> ForwardCall:
        """The call restricted to these heads."""
        if heads == self.heads:
            return self
        own_heads = slice(heads.start - self.heads.start, heads.stop - self.heads.start)
        options = dict(self.options)
        for name, axis in ("sink", 0), ("alibi", -1), ("bias", 1):
            if name in options and options[name].shape[axis] != 1:
                options[name] = options[name].movedim(axis, 0)[own_heads].movedim(0, axis)
        if "q_norm" in options:
            options["q_norm"] = _map_norm(options["q_norm"], lambda x: x[own_heads] if x.ndim == 2 else x)
        if (blocks := options.get("blocks")) is not None and blocks.kv_num_blocks.shape[1] != 1:
            options["blocks"] = _SlicedBlockMask(blocks, lambda x: x[:, own_heads])
        return self._replace(options=options, heads=heads, kv_heads=kv_heads)

    def select_key_heads(self, heads: Span) -> tuple[slice, ForwardCall]:
        """(the query heads that read these key heads, the same call for these heads)"""
        group = len(self.heads) // len(self.kv_heads)
        query_heads = Span(heads.start * group, heads.stop * group)
        spans = [
            Span(total.start + part.start, total.start + part.stop)
            for total, part in ((self.heads, query_heads), (self.kv_heads, heads))
        ]
        return slice(*query_heads), self.select_heads(*spans)

    def key_range(self, q: Span) -> Span:
        """The keys that these queries may see, from the beginning of a block of keys."""
        (left, right), options = self.window, self.options
        if not len(q) or "blocks" in options or "lengths_k" in options:
            return Span(0, self.keys if len(q) else 0)
        end = self.keys if right is None else max(0, min(self.keys, q.stop + self.key_offset + right))
        first = 0 if left is None or "cu_seqlens" in options else max(0, q.start + self.key_offset - left)
        first -= first % self.kv_multiple
        return Span(min(first, end), end)

    def first_local_query(self, run: Span) -> int:
        """The first of these queries, at the beginning of a query tile, from which on they see only keys with the same numbers
        as their own; the run's end if there is none."""
        first, block = run.start, self.kv_multiple
        if run.start > 0:
            first = -(-(-(-run.start // block) * block + (self.window[0] or 0)) // TILE_MULTIPLE) * TILE_MULTIPLE
        key_range = self.key_range(Span(first, run.stop))
        return first if first < run.stop and run.start <= key_range.start and key_range.stop <= run.stop else run.stop

    def query_range(self, k: Span) -> Span:
        """The queries that may see these keys, from the beginning of a query tile."""
        left, right = self.window
        first = 0 if right is None else max(0, k.start - self.key_offset - right)
        end = self.length if left is None else min(self.length, k.stop - self.key_offset + left)
        first -= first % TILE
        return Span(min(first, end), max(0, end)) if len(k) else Span(0, 0)

    def key_ranges(self, spans: Spans) -> Spans:
        """The keys that queries of several spans may see."""
        return merge_spans(tuple([one for one in map(self.key_range, spans) if len(one)]))

    def query_ranges(self, spans: Spans) -> Spans:
        """The queries that may see keys of several spans."""
        return merge_spans(tuple([one for one in map(self.query_range, spans) if len(one)]))

    def subcall(self, q: Span, k: Span, bias_row: int = 0) -> SubCall | None:
        """The call for queries q and keys k; None if no query sees a key. bias_row: the bias's row for the first query.
        NotImplementedError: an option depends on positions that the subcall cannot express."""
        (left, right), key_offset = self.window, self.key_offset
        if right is not None:
            k = Span(k.start, max(k.start, min(k.stop, q.stop + key_offset + right)))
        rows = q if left is None else Span(q.start, max(q.start, min(q.stop, k.stop - key_offset + left)))
        if not len(rows) or not len(k):
            return None
        bias_row += rows.start - q.start
        options = {name: x for name, x in self.options.items() if name not in ("causal", "window")}
        options |= self._visibility_options(rows, k) | self._bias(rows, k, bias_row)
        if rows == Span(0, self.length) and k == Span(0, self.keys) and self.heads.start == 0:
            return SubCall(rows, k, options, bias_row, False)
        offsets = self._offset_options(rows, k)
        return SubCall(rows, k, options | offsets, bias_row, "aux" in offsets)

    def join_spans(self, spans: Spans, batch: int, least: int = 2) -> SubCall | None:
        """The queries of several spans (at least `least` of them), packed, with all keys that they see, as one call, because at
        the end of each launch a part of the GPU idles. None if each span needs its own call."""
        key_ranges, (_, right) = [self.key_range(span) for span in spans], self.window
        equal = len(spans) >= least and len({len(span) for span in spans}) == 1 and right in (None, 0)
        if (
            not equal
            or self.options.get("dropout")
            or POSITIONAL & self.options.keys()
            or any([x.start or not len(x) for x in key_ranges])
        ):
            return None
        lengths = key_lengths(tuple([x.stop for x in key_ranges]), batch, self.device)
        rows, keys = Span(0, sum([len(span) for span in spans])), Span(0, max([x.stop for x in key_ranges]))
        return SubCall(rows, keys, self.options | {"lengths_k": lengths}, 0, False)

    def _visibility_options(self, q: Span, k: Span) -> dict[str, Any]:
        """The options of a subcall that decide which keys are seen: causal, window, and the ends of sequences."""
        (left, right), key_offset, options = self.window, self.key_offset, self.options
        is_whole, excess = q == Span(0, self.length) and k == Span(0, self.keys), k.stop - q.stop - key_offset
        aligned = excess == 0 or is_whole
        visibility: dict[str, Any] = {}
        ends = [name for name in ("cu_seqlens", "cu_seqlens_k", "lengths_k", "alibi") if name in options]
        if is_whole:
            return {name: options[name] for name in ("causal", "window") if name in options}
        if "cu_seqlens_k" in options or {"cu_seqlens", "lengths_k"} <= options.keys():
            raise NotImplementedError(f"{ends[1]}: packed sequences with other keys than queries need scheme='ulysses'")
        if {"bias", "cu_seqlens"} <= options.keys():
            raise NotImplementedError(
                "bias: with cu_seqlens, where each sequence reads it from its first row, it needs scheme='ulysses'"
            )
        if "blocks" in options and len(ends) > ("alibi" in options):
            raise NotImplementedError(f"blocks: together with {ends[0]} it needs scheme='ulysses'")
        before = right is not None and k.stop - 1 <= q.start + key_offset + right
        if "lengths_k" in options:
            if left is right is None:
                visibility["lengths_k"] = (options["lengths_k"] - k.start).clamp(0, len(k))
            elif right == 0 and k.start == 0:
                visibility["lengths_k"] = (options["lengths_k"] - (self.length - q.stop)).clamp(0)
                return visibility | {"causal": True, "window": None if left is None else (left, None)}
            else:
                raise NotImplementedError(
                    "lengths_k: with a window to the right, or with scheme='ring', it needs scheme='ulysses'"
                )
        if "cu_seqlens" in options:
            visibility["cu_seqlens"] = (options["cu_seqlens"] - q.start).clamp(0, len(q))
            visibility["cu_seqlens_k"] = (options["cu_seqlens"] - k.start).clamp(0, len(k))
            if not aligned and (left is not None or not (before or right is None)):
                raise NotImplementedError("window: with cu_seqlens it needs scheme='gather' or 'ulysses', and causal=True")
        if "alibi" in options and not aligned:
            raise NotImplementedError("alibi: with scheme='ring', or with keys after the last query, it needs scheme='ulysses'")
        if "blocks" in options:
            if left is not None or right is not None:
                raise NotImplementedError(
                    "blocks: together with causal or window it needs scheme='ulysses'; or express these in mask"
                )
            visibility["blocks"] = self._blocks(q, k)
        if right is not None and (aligned or not before):
            right -= excess
        elif before:
            right = None
        if left is not None and k.start < q.stop - 1 + key_offset - left:
            left += excess
        elif left is not None and not aligned:
            left = None
        if right == 0:
            visibility["causal"], right = True, None
        return visibility if left is right is None else visibility | {"window": (left, right)}

    def _bias(self, q: Span, k: Span, first: int) -> dict[str, Any]:
        bias = self.options.get("bias")
        if bias is None:
            return {}
        rows = bias if bias.shape[2] == 1 else bias[:, :, first : first + len(q)]
        return {"bias": rows[..., k.start : k.stop]}

    def _blocks(self, q: Span, k: Span) -> Any:
        blocks = self.options["blocks"]
        if not hasattr(blocks, "kv_num_blocks"):
            raise TypeError(
                "blocks: must be a BlockMask of the whole sequence; lists of attention.block_lists are for one call on one GPU"
            )
        size = blocks.BLOCK_SIZE
        rows = size[0] if isinstance(size, (tuple, list)) else size
        if k != Span(0, self.keys) or q.start % rows:
            raise NotImplementedError(
                f"blocks: needs scheme='gather' and spans that begin at a block of {rows} rows, got queries {q} and keys {k}"
            )
        own_heads = slice(q.start // rows, -(-q.stop // rows))
        return _SlicedBlockMask(blocks, lambda x: x[:, :, own_heads])

    def _offset_options(self, q: Span, k: Span) -> dict[str, Any]:
        """The options that count queries, keys and heads from 0, changed to count from the beginning of the subcall."""
        options = self.options
        shifted: dict[str, Any] = {}
        functions = [name for name in ("mask", "score") if options.get(name) is not None]
        if functions:
            at = self.heads.start, q.start, k.start
            offsets = (
                subcall_offsets(*at, self.device)
                if "cu_seqlens" not in options
                else sequence_offsets(*at, options["cu_seqlens"])
            )
            shifted["aux"] = (offsets, *options.get("aux", ()))
            for name in functions:
                shifted[name] = (shift_mask if name == "mask" else shift_score)(options[name], "cu_seqlens" in options)
        if options.get("dropout"):
            number = (self.heads.start * self.length + q.start) * self.keys + k.start
            shifted["seed"] = (options["seed"] ^ (number * SEED_FACTOR % SEED_COUNT)) if number else options["seed"]
        return shifted


def write_unseen(out: Any, lse: Any, call: ForwardCall) -> None:
    """Write the result of queries that see no key."""
    out.zero_()
    lse.copy_(call.options["sink"][:, None].expand(lse.shape[1:]) if "sink" in call.options else torch.tensor(-torch.inf))


def use_alibi(call: ForwardCall, batch: int) -> ForwardCall:
    """The call with `alibi` in place of a score that is equal to it. attention.forward recognises such a score by
    algebra, but not one that is shifted to a subcall's positions; for alibi it knows these, so the bits are those of the
    whole sequence."""
    options = call.options
    if options.get("score") is None or {"alibi", "bias"} & options.keys() or call.key_offset or call.window[1] != 0:
        return call
    aux = tuple(options.get("aux", ()))
    slope = _find_slopes(register_function("score", options["score"]), tuple([x.ndim for x in aux]))
    if slope is None:
        return call
    heads = torch.arange(call.heads.start, call.heads.stop, device=call.device)
    slopes = slope(torch.arange(batch, device=call.device)[:, None], heads[None], *aux).float()
    remaining = [name for name in options if name != "score" and (name != "aux" or options.get("mask") is not None)]
    return call._replace(
        options={name: options[name] for name in remaining} | {"alibi": slopes[0] if len(slopes) == 1 else slopes}
    )


def use_window(options: dict[str, Any], length: int, keys: int) -> dict[str, Any]:
    """The options of a call, with a window in place of a mask that is equal to it. attention.forward recognises such a mask by
    algebra, but not one that is shifted to a subcall's positions."""
    if options.get("mask") is None or {"blocks", "cu_seqlens", "lengths_k"} & options.keys():
        return options
    mask = find_function(register_function("mask", options["mask"]))
    window, axes = options.get("window") or (None, None), [x.ndim for x in options.get("aux", ())]
    equal_window = mask and window_of_mask(mask, axes, bool(options.get("causal")), window, length, keys)
    if not equal_window or not all([end is None or 0 <= end < WINDOW_END for end in equal_window]):
        return options
    return {name: x for name, x in options.items() if name not in ("mask", "causal")} | {"window": equal_window}


@functools.lru_cache(256)
def _find_slopes(score: str, axes: tuple[int, ...]) -> Callable | None:
    """The function that computes ALiBi's slopes of a score, by the score's name; None if the score is not ALiBi."""
    function = find_function(score)
    return function and alibi_slope_of(function, axes)


class _SlicedBlockMask:
    """A BlockMask with slices of its lists."""

    def __init__(self, blocks: Any, select: Callable[[Any], Any]):
        self.BLOCK_SIZE = blocks.BLOCK_SIZE
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            x = getattr(blocks, name)
            setattr(self, name, None if x is None else select(x))


@functools.lru_cache(64)
def common_kv_multiple(head_dim: int, value_dim: int) -> int:
    """A number of keys that is a multiple of the keys in a block of every kernel for these head dims."""
    padded = min(d for d in forward_hopper_shapes.SHAPES if d >= max(head_dim, value_dim))
    others: tuple[Any, ...] = (
        forward_ampere.SHAPES,
        forward_ampere.VARIED,
        forward_ampere.BIAS_LOADED,
        *forward_ampere.BY_SHARED_MEMORY.values(),
    )
    keys = [table[padded]["kv"] for table in forward_hopper_shapes.TABLES if padded in table]
    return math.lcm(*keys, *[table[padded][0] for table in others if padded in table])


def _map_norm(norm: Any, select: Callable[[Any], Any]) -> Any:
    """A norm's weights, or weights and bias, each changed by `select`."""
    return tuple(map(select, norm)) if isinstance(norm, tuple) else select(norm)
