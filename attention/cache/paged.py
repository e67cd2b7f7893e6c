"""PagedCache: keys and values of many sequences in pages of one pool, shared where sequences begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .memory import DESCALES, Pools, memory_of

NONE = -1  # in a page table: no page. attention.append writes nothing there
OWN = {"k", "v", "lengths", "pages", "batch_index", "cu_seqlens", "layout"}  # what append is told by the cache
Layer = tuple[Any, Any]


class Full(RuntimeError):
    """There is no page or no place left for the request, and nothing has changed."""


class PagedCache:
    """Keys and values of many sequences, in pages of pools that the caller made, on a device or in host memory:

        cache = PagedCache([(k, v)], sequences=32, tokens=8192)     # k, v (pages, page size, Hk, D), a pair for each layer
        a = cache.add()                                             # a sequence, by its number
        q = cache.append([a], k_new, v_new, q=q, rotary=(cos, sin)) # lengths grow
        attention.decode(q, *cache.layers[0], lengths=cache.lengths, pages=cache.pages)
        b = cache.fork(a)                                           # shares a's pages
        cache.free(a)

    sequences: the largest number of sequences at a time. tokens: the largest number of tokens of each. layers: arrays of one
    framework, NumPy's, torch's, CuPy's or JAX's, all with the same number of pages of one size. The cache becomes the owner
    of JAX's: writing makes new ones.

    scaled: the pools are float8_e4m3fn, and the cache makes and keeps a descale for each token and head, which append
    computes. `descales`: for each layer, the arguments that attention.decode needs, by name; empty if not scaled:

        attention.decode(q, *cache.layers[0], **cache.descales[0], lengths=cache.lengths, pages=cache.pages)

    `layers` are the pools. `pages` (sequences, most pages), `lengths` and `starts` (sequences), int32, are on the device of
    the pools, with a row for each number that a sequence can have. lengths: the tokens of each, including the newest, as
    attention.decode takes them. starts: where the newest begin, as attention.append takes it; -1 if there are none. A number
    that is not in use has length 0 and no pages, which are -1. They stay the same arrays (except JAX's), so a CUDA graph may
    hold them. The methods change them on the current stream, and must not be captured themselves. `tables` returns the rows
    of some sequences.

    A page is free, or counts who shares it. A fork shares all pages that have tokens. Before a sequence writes into a page
    that others share (the last one, which is not full), it gets a copy. Full: there is no room, and nothing has changed.
    ValueError: a number belongs to no sequence, or anything else is wrong."""

    def __init__(self, layers: Sequence[Layer], *, sequences: int, tokens: int, scaled: bool = False):
        given = layers if isinstance(layers, (list, tuple)) else [layers]
        if not all(isinstance(layer, (list, tuple)) and len(layer) == 2 for layer in given):
            said = [type(layer).__name__ for layer in given]
            raise TypeError(f"layers: must be a list of pairs (k, v) of pools, a pair for each layer, got {said}")
        for name, count in ("sequences", sequences), ("tokens", tokens):
            if isinstance(count, bool) or not hasattr(count, "__index__"):
                raise TypeError(f"{name}: must be an integer: {name}={count!r}")
        self.layers: list[Layer] = [(k, v) for k, v in given]
        shapes = [tuple(x.shape) for layer in self.layers for x in layer]
        if not shapes or any(len(shape) != 4 or shape[:2] != shapes[0][:2] for shape in shapes):
            raise ValueError(
                f"layers: must be pairs of pools (pages, page size, Hk, D) with as many pages of one size: {shapes}"
            )
        count, self.page_size = shapes[0][:2]
        if min(count, self.page_size, sequences, tokens) < 1:
            raise ValueError(f"layers, sequences, tokens: must not be empty: {shapes[0]=}, {sequences=}, {tokens=}")
        self._memory = memory_of(self.layers[0][0])
        if scaled and any("float8_e4m3fn" not in str(x.dtype) for layer in self.layers for x in layer):
            raise TypeError(f"scaled: is for pools of float8_e4m3fn: layers[0][0].dtype={self.layers[0][0].dtype}")
        self.descales: list[dict[str, Any]] = [
            {name: self._memory.new(np.zeros(x.shape[:3], np.float32)) for name, x in zip(DESCALES, layer) if scaled}
            for layer in self.layers
        ]
        self._table = np.full((sequences, -(-tokens // self.page_size)), NONE, np.int32)
        self._lengths, self._starts = np.zeros(sequences, np.int32), np.full(sequences, NONE, np.int32)
        self._most = tokens
        self._held: dict[int, list[int]] = {}  # the pages of each sequence, in order
        self._sharers = [0] * count  # of each page
        self._free = list(range(count))[::-1]
        self._places = list(range(sequences))[::-1]
        self._rows: dict[tuple[int, ...], tuple[Any, Any, Any]] = {}  # that were asked for since something changed
        self.pages, self.lengths, self.starts = map(self._memory.new, (self._table, self._lengths, self._starts))

    # ---- what there is -----------------------------------------------------------------------------------------------
    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def sequences(self) -> list[int]:
        """The numbers in use."""
        return sorted(self._held)

    def length(self, sequence: int) -> int:
        """How many tokens a sequence has, without asking the device."""
        self._check([sequence])
        return int(self._lengths[sequence])

    def tables(self, sequences: Sequence[int]) -> tuple[Any, Any, Any]:
        """(pages, lengths, starts) of these sequences, in this order; the cache's own arrays if these are all its numbers."""
        self._check(sequences)
        chosen = tuple(sequences)
        if chosen == tuple(range(len(self._lengths))):
            return self.pages, self.lengths, self.starts
        if chosen not in self._rows:
            rows = list(chosen)
            pages, lengths, starts = (self._memory.new(x[rows]) for x in (self._table, self._lengths, self._starts))
            self._rows[chosen] = pages, lengths, starts
        return self._rows[chosen]

    # ---- sequences come and go ---------------------------------------------------------------------------------------
    def add(self) -> int:
        """Add a sequence without tokens; returns its number. Full: there are as many as there can be."""
        place = self._place()
        self._held[place] = []
        return place

    def fork(self, sequence: int) -> int:
        """Add a sequence with the same tokens, in the same pages; returns its number. Full: see add."""
        self._check([sequence])
        length, place = int(self._lengths[sequence]), self._place()
        self._held[place] = []
        for page in self._held[sequence][: self._pages_of(length)]:  # what is reserved behind them stays the other's
            self._sharers[page] += 1
            self._hold(place, page)
        self._lengths[place] = length
        self._publish()
        return place

    def free(self, sequence: int) -> None:
        """Forget a sequence; pages that nobody else shares are free."""
        self._check([sequence])
        self._drop(sequence, 0)
        del self._held[sequence]
        self._lengths[sequence], self._starts[sequence] = 0, NONE
        self._places.append(sequence)
        self._publish()

    def rewind(self, sequence: int, length: int) -> None:
        """Forget a sequence's tokens from `length` on, and what was reserved: those that a draft model got wrong."""
        self._check([sequence])
        if not 0 <= length <= self._lengths[sequence]:
            raise ValueError(
                f"length: must be from 0 to the {self._lengths[sequence]} tokens of sequence {sequence}: {length=}"
            )
        self._drop(sequence, self._pages_of(length))
        self._lengths[sequence], self._starts[sequence] = length, NONE
        self._publish()

    # ---- tokens come -------------------------------------------------------------------------------------------------
    def reserve(self, sequences: Sequence[int], tokens: int | Sequence[int]) -> None:
        """Reserve room for so many more tokens, of all sequences or of each; nobody else will write there. Full: there is not
        enough for all of them."""
        counts = self._counts(sequences, tokens)
        shared, needed, leaving = [], 0, dict[int, int]()
        for sequence, count in counts.items():
            length, held = int(self._lengths[sequence]), self._held[sequence]
            if length + count > self._most:
                raise Full(f"sequence {sequence} has room for {self._most} tokens: {length} are there, {count} to come")
            needed += max(0, self._pages_of(length + count) - len(held))
            if count and length % self.page_size:
                page = held[length // self.page_size]
                if self._sharers[page] - leaving.get(page, 0) > 1:  # the last one may keep it
                    leaving[page] = leaving.get(page, 0) + 1
                    shared.append(sequence)
        if needed + len(shared) > len(self._free):
            raise Full(f"{len(self._free)} pages of {len(self._sharers)} are free, {needed + len(shared)} are needed: {counts}")
        for sequence in shared:
            self._own(sequence, int(self._lengths[sequence]) // self.page_size)
        for sequence, count in counts.items():
            while len(self._held[sequence]) < self._pages_of(int(self._lengths[sequence]) + count):
                self._hold(sequence, self._taken())
        if needed or shared:
            self._publish()

    def extend(self, sequences: Sequence[int], tokens: int | Sequence[int]) -> None:
        """Extend sequences by so many new tokens, all or each, whose keys and values are to be written next, in all layers:
        lengths grow, and starts say where the new tokens begin. It reserves first. Full: see reserve."""
        counts = self._counts(sequences, tokens)
        self.reserve(sequences, tokens)
        self._starts[:] = NONE
        for sequence, count in counts.items():
            self._starts[sequence] = self._lengths[sequence]
            self._lengths[sequence] += count
        self._publish()

    def append(
        self,
        sequences: Sequence[int],
        k_new: Any,
        v_new: Any,
        *,
        layer: int = 0,
        tokens: Sequence[int] | None = None,
        **options: Any,
    ) -> Any:
        """attention.append to a layer, with its options rotary, interleaved, positions, q, causal, out and stream, and
        k_descale and v_descale if not `scaled`, and its result; for JAX arrays with rotary, interleaved and q. The call for
        the first layer extends the sequences; calls for the others are for the same sequences and tokens. Full: see reserve.

        k_new, v_new: (B, S, Hk, D) of as many sequences; or with `tokens`, the number of each sequence, all of them one
        after the other in a batch of 1."""
        if not hasattr(sequences, "__len__"):
            raise TypeError(f"sequences: must be a list of their numbers: {sequences=}")
        if self.descales[0] and (told := [name for name in DESCALES if name in options]):
            raise ValueError(f"{told[0]}: is the cache's own where it keeps descales: scaled=True")
        for name in OWN & options.keys():
            raise ValueError(f"{name}: is the cache's own, whose pools are (pages, page size, Hk, D)")
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer: there are {len(self.layers)}: {layer=}")
        ends, wanted = None, (len(sequences), int(k_new.shape[1]))
        if tokens is not None:
            if not hasattr(tokens, "__len__"):
                raise TypeError(f"tokens: must be a list, one for each sequence: {tokens=}")
            ends = np.cumsum([0, *tokens], dtype=np.int32)
            wanted = 1, int(ends[-1])
        if tuple(k_new.shape[:2]) != wanted:
            said = f"k_new.shape={tuple(k_new.shape)}, {sequences=}, {tokens=}"
            raise ValueError(f"k_new: must have {wanted} batches and tokens: {said}")
        counts = self._counts(sequences, wanted[1] if tokens is None else tokens)
        rows = list(counts)
        if layer == 0:
            self.extend(rows, list(counts.values()))
        elif (self._starts[rows] < 0).any() or (self._lengths - self._starts)[rows].tolist() != list(counts.values()):
            raise ValueError(f"layer: the first one was not extended by these tokens: {layer=}, {counts}")
        pages, _, starts = self.tables(rows)
        where = self._starts[rows], self._table[rows], ends
        try:
            pools, given = self._memory.write(self._pools(layer), (k_new, v_new), *where, (pages, starts), options)
        except Exception:
            for sequence in rows if layer == 0 else []:
                self.rewind(sequence, int(self._starts[sequence]))
            raise
        self._keep(layer, pools)
        return given

    # ---- pools -------------------------------------------------------------------------------------------------------
    def _pools(self, layer: int) -> Pools:
        """All pools of a layer: K, V, and the descales if there are any."""
        return *self.layers[layer], *self.descales[layer].values()

    def _keep(self, layer: int, pools: Pools) -> None:
        """Let these be the pools of a layer from now on."""
        k, v, *descales = pools
        self.layers[layer], self.descales[layer] = (k, v), dict(zip(DESCALES, descales))

    # ---- pages -------------------------------------------------------------------------------------------------------
    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _taken(self) -> int:
        """Take a free page, for one sequence."""
        page = self._free.pop()
        self._sharers[page] = 1
        return page

    def _left(self, page: int) -> None:
        """Note that one sequence fewer shares this page; the page is free after the last one."""
        self._sharers[page] -= 1
        if not self._sharers[page]:
            self._free.append(page)

    def _hold(self, sequence: int, page: int) -> None:
        """Give a sequence its next page."""
        held = self._held[sequence]
        self._table[sequence, len(held)] = page
        held.append(page)

    def _drop(self, sequence: int, keep: int) -> None:
        """Take all pages from a sequence but its first `keep`."""
        held = self._held[sequence]
        for page in held[keep:]:
            self._left(page)
        del held[keep:]
        self._table[sequence, keep:] = NONE

    def _own(self, sequence: int, which: int) -> None:
        """Give a sequence a copy, in all layers, of a page that it shares with others."""
        page, new = self._held[sequence][which], self._taken()
        for layer in range(len(self.layers)):
            self._keep(layer, tuple(self._memory.copy(pool, page, new) for pool in self._pools(layer)))
        self._left(page)
        self._held[sequence][which] = self._table[sequence, which] = new

    def _place(self) -> int:
        if not self._places:
            raise Full(f"there are {len(self._lengths)} sequences, as many as there can be")
        return self._places.pop()

    # ---- numbers -----------------------------------------------------------------------------------------------------
    def _check(self, sequences: Sequence[int]) -> None:
        for n in sequences:
            if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
                raise TypeError(f"sequences: must be numbers that `add` gave: {n!r}")
            if n not in self._held:
                raise ValueError(f"sequence {n} is not in use; those in use: {self.sequences}")

    def _counts(self, sequences: Sequence[int], tokens: int | Sequence[int]) -> dict[int, int]:
        """The number of tokens for each sequence."""
        self._check(sequences)
        each = [tokens] * len(sequences) if isinstance(tokens, (int, np.integer)) else tokens
        if not hasattr(each, "__len__") or not all(hasattr(n, "__index__") for n in each):
            raise TypeError(f"tokens: must be an integer, or one for each sequence: {tokens=}")
        counts = [int(n) for n in each]
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"sequences: must be different ones: {sequences=}")
        if len(counts) != len(sequences) or min(counts, default=0) < 0:
            raise ValueError(f"tokens: must be a number from 0 on for each sequence: {tokens=}, {sequences=}")
        return dict(zip(sequences, counts))

    def _publish(self) -> None:
        """Copy what the host knows of the sequences to the arrays where the pools lie."""
        self._rows.clear()
        self.pages = self._memory.put(self.pages, self._table)
        self.lengths, self.starts = self._memory.put(self.lengths, self._lengths), self._memory.put(self.starts, self._starts)
