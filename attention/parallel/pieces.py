"""A call of attention.forward on part of the queries and part of the keys, with the positions that they have in the whole
sequence.

attention.forward counts from the ends: query i stands at key i + Sk - Sq. Let query i stand at key i + past in the whole.
Queries [a, b) beside keys [c, d) then see the same keys as in the whole, if the options become:

    causal       d = b + past: keys behind the last query are left out; or all of [c, d) lies before the first, and all is seen
    window       (left + e, right - e), e = d - b - past
    cu_seqlens   both clamped to [a, b) and [c, d): documents that do not meet have no rows, and each keeps its number
    lengths_k    less Sq - b, where the whole ends behind the last query
    mask, score  are asked at i + a, j + c and h + the first head, which come as one more array of aux

Nothing here waits for the device: the numbers in cu_seqlens are not read."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..families import family_block_kv
from ..softmax import ampere, hopper
from ..softmax.algebra import slopes_of
from ..softmax.planning import window_of
from ..softmax.python_functions import known, named
from .orders import Span, Spans, merge_spans
from .placed import key_lengths, piece_offsets, sequence_offsets, shift_mask, shift_score

PLACED = frozenset("mask score bias blocks cu_seqlens cu_seqlens_k lengths_k".split())  # depend on the position of each query
TILE = 128  # rows of a tile of queries in backward; a tile may have twice as many
WHOLE = 384  # a multiple of the rows of a tile in every kernel for windows
WINDOW_END = 2**30  # see call_options.ends_of
SEEDS = 2**63
MIXED = 0x9E3779B97F4A7C15  # odd, with random-looking bits, so that the seeds of different pieces differ in all bits


class CallPiece(NamedTuple):
    """Some queries beside some keys. rows: those of the queries that see any key. keys: those of the keys that are seen.
    options: those with which attention.forward gives what these queries see of these keys. at: where the rows lie among the
    rows of a bias. placed: whether there is one more array of aux, before the caller's."""

    rows: Span
    keys: Span
    options: dict[str, Any]
    at: int
    placed: bool


class ForwardCall(NamedTuple):
    """A call of forward. told: its arguments besides q, k and v, by name, without those that are None. length, keys: the number
    of all queries and of all keys. heads, kv_heads: those of the arrays at hand. head_dims: of q and v. device: that of the
    arrays. plain: no argument in `told` is an array, so that calls of a form differ in nothing but q, k and v."""

    options: dict[str, Any]
    length: int
    keys: int
    heads: Span
    kv_heads: Span
    head_dims: tuple[int, int]
    device: Any
    plain: bool = False

    @property
    def past(self) -> int:
        """The offset of positions: query i stands at key i + past."""
        return self.keys - self.length

    @property
    def window(self) -> tuple[int | None, int | None]:
        """How many keys before and behind its own position a query sees."""
        left, right = self.options.get("window") or (None, None)
        return left, 0 if self.options.get("causal") else right

    @property
    def grain(self) -> int:
        """A number of keys that is a multiple of the blocks of the kernels. A part of the keys that begins at a multiple of it
        is cut into the same blocks as the whole, so sums have the same order."""
        kv = family_block_kv(self.options.get("family"))
        return common_kv_multiple(*self.head_dims) if kv is None else math.lcm(kv, TILE)

    def select_heads(self, heads: Span, kv_heads: Span) -> ForwardCall:
        """The same call for some of the heads."""
        if heads == self.heads:
            return self
        mine = slice(heads.start - self.heads.start, heads.stop - self.heads.start)
        options = dict(self.options)
        for name, axis in ("sink", 0), ("alibi", -1), ("bias", 1):
            if name in options and options[name].shape[axis] != 1:
                options[name] = options[name].movedim(axis, 0)[mine].movedim(0, axis)
        if "q_norm" in options:
            options["q_norm"] = _map_norm(options["q_norm"], lambda x: x[mine] if x.ndim == 2 else x)
        if (blocks := options.get("blocks")) is not None and blocks.kv_num_blocks.shape[1] != 1:
            options["blocks"] = _SlicedBlockMask(blocks, lambda x: x[:, mine])
        return self._replace(options=options, heads=heads, kv_heads=kv_heads)

    def select_key_heads(self, heads: Span) -> tuple[slice, ForwardCall]:
        """(the query heads that read these key heads, the same call for these)"""
        group = len(self.heads) // len(self.kv_heads)
        mine = Span(heads.start * group, heads.stop * group)
        at = [
            Span(every.start + one.start, every.start + one.stop)
            for every, one in zip((self.heads, self.kv_heads), (mine, heads))
        ]
        return slice(*mine), self.select_heads(*at)

    def key_range(self, q: Span) -> Span:
        """The keys that these queries may see, beginning with a whole block of keys."""
        (left, right), options = self.window, self.options
        if not len(q) or "blocks" in options or "lengths_k" in options:
            return Span(0, self.keys if len(q) else 0)
        end = self.keys if right is None else max(0, min(self.keys, q.stop + self.past + right))
        first = 0 if left is None or "cu_seqlens" in options else max(0, q.start + self.past - left)
        first -= first % self.grain
        return Span(min(first, end), end)

    def first_local_query(self, run: Span) -> int:
        """The first of these queries, at a whole tile, from which on they see no keys but those of their own numbers; its end
        if there is none."""
        first, block = run.start, self.grain
        if run.start > 0:
            first = -(-(-(-run.start // block) * block + (self.window[0] or 0)) // WHOLE) * WHOLE
        key_range = self.key_range(Span(first, run.stop))
        return first if first < run.stop and run.start <= key_range.start and key_range.stop <= run.stop else run.stop

    def query_range(self, k: Span) -> Span:
        """The queries that may see these keys, beginning with a whole tile of queries."""
        left, right = self.window
        first = 0 if right is None else max(0, k.start - self.past - right)
        end = self.length if left is None else min(self.length, k.stop - self.past + left)
        first -= first % TILE
        return Span(min(first, end), max(0, end)) if len(k) else Span(0, 0)

    def key_ranges(self, spans: Spans) -> Spans:
        """The keys that queries of several spans may see."""
        return merge_spans(tuple([one for one in map(self.key_range, spans) if len(one)]))

    def query_ranges(self, spans: Spans) -> Spans:
        """The queries that may see keys of several spans."""
        return merge_spans(tuple([one for one in map(self.query_range, spans) if len(one)]))

    def piece(self, q: Span, k: Span, at: int = 0) -> CallPiece | None:
        """Queries q beside keys k; None if none of them sees any. at: where q lies among the rows that a bias has.
        NotImplementedError: positions cannot be kept."""
        (left, right), past = self.window, self.past
        if right is not None:
            k = Span(k.start, max(k.start, min(k.stop, q.stop + past + right)))
        rows = q if left is None else Span(q.start, max(q.start, min(q.stop, k.stop - past + left)))
        if not len(rows) or not len(k):
            return None
        at += rows.start - q.start
        options = {name: x for name, x in self.options.items() if name not in ("causal", "window")}
        options |= self._sees(rows, k) | self._bias(rows, k, at)
        if rows == Span(0, self.length) and k == Span(0, self.keys) and self.heads.start == 0:
            return CallPiece(rows, k, options, at, False)
        placed = self._placed(rows, k)
        return CallPiece(rows, k, options | placed, at, "aux" in placed)

    def joined(self, spans: Spans, batch: int, least: int = 2) -> CallPiece | None:
        """The queries of several spans (at least `least` of them), one behind the other, beside all keys that they see, as one
        call: at the end of every launch a part of the GPU idles. None if each span needs a call of its own."""
        reaches, (_, right) = [self.key_range(span) for span in spans], self.window
        alike = len(spans) >= least and len({len(span) for span in spans}) == 1 and right in (None, 0)
        if (
            not alike
            or self.options.get("dropout")
            or PLACED & self.options.keys()
            or any([x.start or not len(x) for x in reaches])
        ):
            return None
        lengths = key_lengths(tuple([x.stop for x in reaches]), batch, self.device)
        rows, keys = Span(0, sum([len(span) for span in spans])), Span(0, max([x.stop for x in reaches]))
        return CallPiece(rows, keys, self.options | {"lengths_k": lengths}, 0, False)

    def _sees(self, q: Span, k: Span) -> dict[str, Any]:
        """The options of a piece that say which keys are seen: causal, window, and the ends of sequences."""
        (left, right), past, options = self.window, self.past, self.options
        whole, behind = q == Span(0, self.length) and k == Span(0, self.keys), k.stop - q.stop - past
        aligned = behind == 0 or whole
        found: dict[str, Any] = {}
        ends = [name for name in ("cu_seqlens", "cu_seqlens_k", "lengths_k", "alibi") if name in options]
        if whole:
            return {name: options[name] for name in ("causal", "window") if name in options}
        if "cu_seqlens_k" in options or {"cu_seqlens", "lengths_k"} <= options.keys():
            raise NotImplementedError(f"{ends[1]}: keys of packed sequences other than their queries need scheme='ulysses'")
        if {"bias", "cu_seqlens"} <= options.keys():
            raise NotImplementedError(
                "bias: of packed sequences, each of which begins at its first row, it needs scheme='ulysses'"
            )
        if "blocks" in options and len(ends) > ("alibi" in options):
            raise NotImplementedError(f"blocks: with {ends[0]} they need scheme='ulysses'")
        before = right is not None and k.stop - 1 <= q.start + past + right
        if "lengths_k" in options:
            if left is right is None:
                found["lengths_k"] = (options["lengths_k"] - k.start).clamp(0, len(k))
            elif right == 0 and k.start == 0:
                found["lengths_k"] = (options["lengths_k"] - (self.length - q.stop)).clamp(0)
                return found | {"causal": True, "window": None if left is None else (left, None)}
            else:
                raise NotImplementedError("lengths_k: with a window that looks ahead, or by ring, it needs scheme='ulysses'")
        if "cu_seqlens" in options:
            found["cu_seqlens"] = (options["cu_seqlens"] - q.start).clamp(0, len(q))
            found["cu_seqlens_k"] = (options["cu_seqlens"] - k.start).clamp(0, len(k))
            if not aligned and (left is not None or not (before or right is None)):
                raise NotImplementedError("window: of packed sequences it needs scheme='gather' or 'ulysses', and causal=True")
        if "alibi" in options and not aligned:
            raise NotImplementedError("alibi: by ring, or with keys behind the last query, it needs scheme='ulysses'")
        if "blocks" in options:
            if left is not None or right is not None:
                raise NotImplementedError("blocks: with causal or window they need scheme='ulysses': let mask say these")
            found["blocks"] = self._blocks(q, k)
        if right is not None and (aligned or not before):
            right -= behind
        elif before:
            right = None
        if left is not None and k.start < q.stop - 1 + past - left:
            left += behind
        elif left is not None and not aligned:
            left = None
        if right == 0:
            found["causal"], right = True, None
        return found if left is right is None else found | {"window": (left, right)}

    def _bias(self, q: Span, k: Span, at: int) -> dict[str, Any]:
        bias = self.options.get("bias")
        if bias is None:
            return {}
        rows = bias if bias.shape[2] == 1 else bias[:, :, at : at + len(q)]
        return {"bias": rows[..., k.start : k.stop]}

    def _blocks(self, q: Span, k: Span) -> Any:
        blocks = self.options["blocks"]
        if not hasattr(blocks, "kv_num_blocks"):
            raise TypeError(
                "blocks: must be a BlockMask of the whole sequence here; lists that block_lists made are of one call"
            )
        size = blocks.BLOCK_SIZE
        rows = size[0] if isinstance(size, (tuple, list)) else size
        if k != Span(0, self.keys) or q.start % rows:
            raise NotImplementedError(
                f"blocks: need scheme='gather' and parts that begin with a block of {rows} rows, got {q} beside keys {k}"
            )
        mine = slice(q.start // rows, -(-q.stop // rows))
        return _SlicedBlockMask(blocks, lambda x: x[:, :, mine])

    def _placed(self, q: Span, k: Span) -> dict[str, Any]:
        """The options that count queries, keys and heads from 0, changed to count from where the piece begins."""
        options = self.options
        found: dict[str, Any] = {}
        functions = [name for name in ("mask", "score") if options.get(name) is not None]
        if functions:
            at = self.heads.start, q.start, k.start
            begins = (
                piece_offsets(*at, self.device) if "cu_seqlens" not in options else sequence_offsets(*at, options["cu_seqlens"])
            )
            found["aux"] = (begins, *options.get("aux", ()))
            for name in functions:
                found[name] = (shift_mask if name == "mask" else shift_score)(options[name], "cu_seqlens" in options)
        if options.get("dropout"):
            number = (self.heads.start * self.length + q.start) * self.keys + k.start
            found["seed"] = (options["seed"] ^ (number * MIXED % SEEDS)) if number else options["seed"]
        return found


def nothing(out: Any, lse: Any, call: ForwardCall) -> None:
    """Write the result for queries that see no key."""
    out.zero_()
    lse.copy_(call.options["sink"][:, None].expand(lse.shape[1:]) if "sink" in call.options else torch.tensor(-torch.inf))


def use_alibi(call: ForwardCall, batch: int) -> ForwardCall:
    """The same call, with `alibi` in place of a score that is nothing else. attention.forward finds this out by algebra, but
    not for a score that is shifted to a piece's positions. For alibi it knows how positions count in a piece, so the bits are
    those of the whole."""
    options = call.options
    if options.get("score") is None or {"alibi", "bias"} & options.keys() or call.past or call.window[1] != 0:
        return call
    aux = tuple(options.get("aux", ()))
    slope = _slope_of(named("score", options["score"]), tuple([x.ndim for x in aux]))
    if slope is None:
        return call
    heads = torch.arange(call.heads.start, call.heads.stop, device=call.device)
    slopes = slope(torch.arange(batch, device=call.device)[:, None], heads[None], *aux).float()
    kept = [name for name in options if name != "score" and (name != "aux" or options.get("mask") is not None)]
    return call._replace(options={name: options[name] for name in kept} | {"alibi": slopes[0] if len(slopes) == 1 else slopes})


def use_window(options: dict[str, Any], length: int, keys: int) -> dict[str, Any]:
    """The options of a call, with a window in place of a mask that is nothing else. attention.forward finds this out by
    algebra, but not for a mask that is shifted to a piece's positions."""
    if options.get("mask") is None or {"blocks", "cu_seqlens", "lengths_k"} & options.keys():
        return options
    mask = known(named("mask", options["mask"]))
    window, axes = options.get("window") or (None, None), [x.ndim for x in options.get("aux", ())]
    found = mask and window_of(mask, axes, bool(options.get("causal")), window, length, keys)
    if not found or not all([end is None or 0 <= end < WINDOW_END for end in found]):
        return options
    return {name: x for name, x in options.items() if name not in ("mask", "causal")} | {"window": found}


@functools.lru_cache(256)
def _slope_of(score: str, axes: tuple[int, ...]) -> Callable | None:
    """See slopes_of: of the score of this name."""
    function = known(score)
    return function and slopes_of(function, axes)


class _SlicedBlockMask:
    """A BlockMask with other lists."""

    def __init__(self, blocks: Any, taken: Callable[[Any], Any]):
        self.BLOCK_SIZE = blocks.BLOCK_SIZE
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            x = getattr(blocks, name)
            setattr(self, name, None if x is None else taken(x))


@functools.lru_cache(64)
def common_kv_multiple(head_dim: int, value_dim: int) -> int:
    """A number of keys that is a multiple of the blocks of every kernel for these dims."""
    padded = min(d for d in hopper.SHAPES if d >= max(head_dim, value_dim))
    tables = hopper.TABLES
    others: tuple[Any, ...] = (ampere.SHAPES, ampere.BUSY, ampere.LOADED, *ampere.ROOMS.values())
    keys = [table[padded]["kv"] for table in tables if padded in table]
    return math.lcm(*keys, *[table[padded][0] for table in others if padded in table])


def _map_norm(norm: Any, taken: Callable[[Any], Any]) -> Any:
    """A norm's weights, or weights and bias, each changed."""
    return tuple(map(taken, norm)) if isinstance(norm, tuple) else taken(norm)
