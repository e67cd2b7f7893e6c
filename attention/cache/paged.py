"""PagedCache: keys and values of many sequences in pages of one pool; sequences with a common prefix share its pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..names import suggests_argument_names
from ..parts.cache_scales import QUANTIZED
from .memory import DESCALES, Pools, backend_of

NO_PAGE = -1  # entry of a page table; attention.append writes nothing there. In `starts`: no new tokens
SET_BY_CACHE = {"k", "v", "lengths", "pages", "batch_index", "cu_seqlens", "layout"}  # arguments of attention.append
Layer = tuple[Any, Any]


class Full(RuntimeError):
    """The cache has too few free pages or sequence numbers for the request; nothing has changed."""


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

    scaled: the pools are float8_e4m3fn or int8, and the cache makes and keeps a descale for each token and head, which append
    computes. `descales`: for each layer, the arguments that attention.decode needs, by name; empty if not scaled:

        attention.decode(q, *cache.layers[0], **cache.descales[0], lengths=cache.lengths, pages=cache.pages)

    `layers` are the pools. `pages` (sequences, most pages), `lengths` and `starts` (sequences), int32, are on the device of
    the pools, with a row for each sequence number. lengths: the tokens of each sequence, including the newest, as
    attention.decode takes them. starts: the length before the newest tokens, as attention.append takes it; -1 if there are
    none. An unused number has length 0, and -1 for every page. The arrays stay the same arrays (except JAX's), so a CUDA graph
    may hold them. The methods change them on the current stream, and must not be captured themselves. `tables` returns the rows
    of some sequences.

    Each page counts the sequences that share it (a reference count); a page with none is free. A fork shares all pages that
    have tokens. Before a sequence writes into a page that others share (its last one, which is not full), it gets a copy of its
    own. Full: there are too few free pages, and nothing has changed. ValueError: a number belongs to no sequence, or anything
    else is wrong."""

    @suggests_argument_names
    def __init__(self, layers: Sequence[Layer], *, sequences: int, tokens: int, scaled: bool = False):
        pairs = layers if isinstance(layers, (list, tuple)) else [layers]
        if not all(isinstance(layer, (list, tuple)) and len(layer) == 2 for layer in pairs):
            types = [type(layer).__name__ for layer in pairs]
            raise TypeError(f"layers: must be a list of pairs (k, v) of pools, a pair for each layer, got {types}")
        for name, count in ("sequences", sequences), ("tokens", tokens):
            if isinstance(count, bool) or not hasattr(count, "__index__"):
                raise TypeError(f"{name}: must be an integer: {name}={count!r}")
        self.layers: list[Layer] = [(k, v) for k, v in pairs]
        shapes = [tuple(x.shape) for layer in self.layers for x in layer]
        if not shapes or any(len(shape) != 4 or shape[:2] != shapes[0][:2] for shape in shapes):
            raise ValueError(
                f"layers: must be pairs of pools (pages, page size, Hk, D), all with the same first two axes: {shapes}"
            )
        count, self.page_size = shapes[0][:2]
        if min(count, self.page_size, sequences, tokens) < 1:
            raise ValueError(f"layers, sequences, tokens: must not be empty: {shapes[0]=}, {sequences=}, {tokens=}")
        self._backend = backend_of(self.layers[0][0])
        for n, (k, v) in enumerate(self.layers):
            if (k.dtype, k.shape[2]) != (v.dtype, v.shape[2]):
                pools = f"k.dtype={k.dtype}, v.dtype={v.dtype}, k.shape={tuple(k.shape)}, v.shape={tuple(v.shape)}"
                raise ValueError(f"layers[{n}]: k and v must have one dtype, and as many heads: {pools}")
        dtypes = {str(x.dtype).removeprefix("torch.") for layer in self.layers for x in layer}
        if scaled and not dtypes <= {*QUANTIZED}:
            raise TypeError(
                "scaled: must be False unless all pools are float8_e4m3fn or int8: "
                f"layers[0][0].dtype={self.layers[0][0].dtype}"
            )
        self.descales: list[dict[str, Any]] = [
            {name: self._backend.new(np.zeros(x.shape[:3], np.float32)) for name, x in zip(DESCALES, layer) if scaled}
            for layer in self.layers
        ]
        # the host's copies of pages, lengths and starts
        self._table = np.full((sequences, -(-tokens // self.page_size)), NO_PAGE, np.int32)
        self._lengths, self._starts = np.zeros(sequences, np.int32), np.full(sequences, NO_PAGE, np.int32)
        self._max_tokens = tokens
        self._sequence_pages: dict[int, list[int]] = {}  # of each sequence, in the order of its tokens
        self._ref_counts = [0] * count  # the number of sequences that share each page
        self._free_pages = list(range(count))[::-1]
        self._free_numbers = list(range(sequences))[::-1]
        self._cached_rows: dict[tuple[int, ...], tuple[Any, Any, Any]] = {}  # results of `tables` since the last change
        self.pages, self.lengths, self.starts = map(self._backend.new, (self._table, self._lengths, self._starts))

    # ---- queries -----------------------------------------------------------------------------------------------------
    @property
    def free_pages(self) -> int:
        """The number of pages that no sequence uses."""
        return len(self._free_pages)

    @property
    def sequences(self) -> list[int]:
        """The numbers of all sequences in the cache, ascending."""
        return sorted(self._sequence_pages)

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
        if chosen not in self._cached_rows:
            rows = list(chosen)
            pages, lengths, starts = (self._backend.new(x[rows]) for x in (self._table, self._lengths, self._starts))
            self._cached_rows[chosen] = pages, lengths, starts
        return self._cached_rows[chosen]

    # ---- adding and removing sequences -------------------------------------------------------------------------------
    def add(self) -> int:
        """Add a sequence without tokens; returns its number. Full: all `sequences` numbers are in use."""
        number = self._take_number()
        self._sequence_pages[number] = []
        return number

    def fork(self, sequence: int) -> int:
        """Add a sequence with the same tokens, in the same pages; returns its number. Full: all `sequences` numbers are in
        use."""
        self._check([sequence])
        length, number = int(self._lengths[sequence]), self._take_number()
        self._sequence_pages[number] = []
        for page in self._sequence_pages[sequence][: self._pages_for(length)]:  # pages reserved after these are not shared
            self._ref_counts[page] += 1
            self._add_page(number, page)
        self._lengths[number] = length
        self._publish()
        return number

    def free(self, sequence: int) -> None:
        """Remove a sequence; pages that no other sequence shares become free."""
        self._check([sequence])
        self._drop_pages(sequence, 0)
        del self._sequence_pages[sequence]
        self._lengths[sequence], self._starts[sequence] = 0, NO_PAGE
        self._free_numbers.append(sequence)
        self._publish()

    def rewind(self, sequence: int, length: int) -> None:
        """Remove a sequence's tokens from `length` on, and its reserved pages: as after rejected draft tokens (speculative
        decoding)."""
        self._check([sequence])
        if not 0 <= length <= self._lengths[sequence]:
            raise ValueError(
                f"length: must be from 0 to the {self._lengths[sequence]} tokens of sequence {sequence}: {length=}"
            )
        self._drop_pages(sequence, self._pages_for(length))
        self._lengths[sequence], self._starts[sequence] = length, NO_PAGE
        self._publish()

    # ---- adding tokens -----------------------------------------------------------------------------------------------
    def reserve(self, sequences: Sequence[int], tokens: int | Sequence[int]) -> None:
        """Reserve pages for `tokens` more tokens of each sequence (one number, or one a sequence), which only that sequence
        will write. Full: too few pages are free, or a sequence would have more than the cache's `tokens`; nothing is
        reserved."""
        counts = self._counts(sequences, tokens)
        to_copy, needed, leaving = [], 0, dict[int, int]()
        for sequence, count in counts.items():
            length, pages = int(self._lengths[sequence]), self._sequence_pages[sequence]
            if length + count > self._max_tokens:
                now = f"{length} are there, {count} to come; make a cache with more tokens="
                raise Full(f"sequence {sequence} has room for {self._max_tokens} tokens: {now}")
            needed += max(0, self._pages_for(length + count) - len(pages))
            if count and length % self.page_size:
                page = pages[length // self.page_size]
                if self._ref_counts[page] - leaving.get(page, 0) > 1:  # the last sequence that shares it needs no copy
                    leaving[page] = leaving.get(page, 0) + 1
                    to_copy.append(sequence)
        if (total := needed + len(to_copy)) > len(self._free_pages):
            raise Full(f"{len(self._free_pages)} pages of {len(self._ref_counts)} are free, {total} are needed: {counts}")
        for sequence in to_copy:
            self._copy_page(sequence, int(self._lengths[sequence]) // self.page_size)
        for sequence, count in counts.items():
            while len(self._sequence_pages[sequence]) < self._pages_for(int(self._lengths[sequence]) + count):
                self._add_page(sequence, self._allocate_page())
        if needed or to_copy:
            self._publish()

    def extend(self, sequences: Sequence[int], tokens: int | Sequence[int]) -> None:
        """Extend each sequence by `tokens` new tokens (one number, or one a sequence), whose keys and values are to be written
        next, in all layers: lengths grow, and starts say where the new tokens begin. Pages are reserved first. Full: as in
        `reserve`."""
        counts = self._counts(sequences, tokens)
        self.reserve(sequences, tokens)
        self._starts[:] = NO_PAGE
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
        """Write new keys and values of these sequences to the pools of a layer, by attention.append, whose result is returned.
        The call for layer 0 extends the sequences (`extend`); those for other layers follow, with the same sequences and
        numbers of tokens. Full: as in `reserve`.

        options: attention.append's rotary, interleaved, positions, q, k_new_norm, q_norm, norm_eps, causal, out and stream, and
        k_descale and v_descale if not `scaled`; for JAX arrays rotary, interleaved and q. k_new, v_new: (B, S, Hk, D) of as
        many sequences; or with `tokens`, the number of each sequence, all of them one after the other in a batch of 1."""
        if not hasattr(sequences, "__len__"):
            raise TypeError(f"sequences: must be a list of sequence numbers: {sequences=}")
        if self.descales[0] and (descale_names := [name for name in DESCALES if name in options]):
            raise ValueError(f"{descale_names[0]}: must not be passed to a cache that keeps its own descales: scaled=True")
        for name in SET_BY_CACHE & options.keys():
            cure = "; pass tokens=, the number of each sequence" * (name == "cu_seqlens")
            raise ValueError(
                f"{name}: must not be passed: the cache sets it, and its pools are (pages, page size, Hk, D){cure}"
            )
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer: must be from 0 to {len(self.layers) - 1}: {layer=}")
        if len(k_new.shape) != 4:
            raise ValueError(f"k_new: must have the axes B, S, Hk, D: k_new.shape={tuple(k_new.shape)}")
        ends, expected = None, (len(sequences), int(k_new.shape[1]))
        if tokens is not None:
            if not hasattr(tokens, "__len__"):
                raise TypeError(f"tokens: must be a list, one for each sequence: {tokens=}")
            ends = np.cumsum([0, *tokens], dtype=np.int32)
            expected = 1, int(ends[-1])
        if tuple(k_new.shape[:2]) != expected:
            values = f"k_new.shape={tuple(k_new.shape)}, {sequences=}, {tokens=}"
            cure = "; of packed sequences pass tokens=, the number of each" * (tokens is None and k_new.shape[0] == 1)
            raise ValueError(f"k_new: must have {expected[0]} batches and {expected[1]} tokens: {values}{cure}")
        counts = self._counts(sequences, expected[1] if tokens is None else tokens)
        rows = list(counts)
        if layer == 0:
            self.extend(rows, list(counts.values()))
        elif (self._starts[rows] < 0).any() or (self._lengths - self._starts)[rows].tolist() != list(counts.values()):
            raise ValueError(
                f"layer: append to layer 0 first, with the same sequences and numbers of tokens: {layer=}, {counts}"
            )
        pages, _, starts = self.tables(rows)
        on_host = self._starts[rows], self._table[rows], ends
        try:
            pools, result = self._backend.write(self._pools_of(layer), (k_new, v_new), *on_host, (pages, starts), options)
        except Exception:
            for sequence in rows if layer == 0 else []:
                self.rewind(sequence, int(self._starts[sequence]))
            raise
        self._set_pools(layer, pools)
        return result

    # ---- pools -------------------------------------------------------------------------------------------------------
    def _pools_of(self, layer: int) -> Pools:
        """The pools of a layer: K, V, and their descales if the cache is scaled."""
        return *self.layers[layer], *self.descales[layer].values()

    def _set_pools(self, layer: int, pools: Pools) -> None:
        """Replace the pools of a layer, as those of an immutable framework must be after a write."""
        k, v, *descales = pools
        self.layers[layer], self.descales[layer] = (k, v), dict(zip(DESCALES, descales))

    # ---- pages -------------------------------------------------------------------------------------------------------
    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _allocate_page(self) -> int:
        """Take a page from the free list; its reference count becomes 1."""
        page = self._free_pages.pop()
        self._ref_counts[page] = 1
        return page

    def _release_page(self, page: int) -> None:
        """Decrement the reference count of a page; at 0 the page is free."""
        self._ref_counts[page] -= 1
        if not self._ref_counts[page]:
            self._free_pages.append(page)

    def _add_page(self, sequence: int, page: int) -> None:
        """Write a page as the next of a sequence to its row of the page table."""
        pages = self._sequence_pages[sequence]
        self._table[sequence, len(pages)] = page
        pages.append(page)

    def _drop_pages(self, sequence: int, keep: int) -> None:
        """Release all pages of a sequence but its first `keep`."""
        pages = self._sequence_pages[sequence]
        for page in pages[keep:]:
            self._release_page(page)
        del pages[keep:]
        self._table[sequence, keep:] = NO_PAGE

    def _copy_page(self, sequence: int, n: int) -> None:
        """Replace the n-th page of a sequence, which others share, by a copy in all layers (copy on write)."""
        page, new = self._sequence_pages[sequence][n], self._allocate_page()
        for layer in range(len(self.layers)):
            self._set_pools(layer, tuple(self._backend.copy(pool, page, new) for pool in self._pools_of(layer)))
        self._release_page(page)
        self._sequence_pages[sequence][n] = self._table[sequence, n] = new

    def _take_number(self) -> int:
        if not self._free_numbers:
            raise Full(
                f"all {len(self._lengths)} sequence numbers are in use: free a sequence, or make a cache with more sequences="
            )
        return self._free_numbers.pop()

    # ---- arguments and device arrays ---------------------------------------------------------------------------------
    def _check(self, sequences: Sequence[int]) -> None:
        for n in sequences:
            if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
                raise TypeError(f"sequences: must be integers that `add` or `fork` returned: {n!r}")
            if n not in self._sequence_pages:
                raise ValueError(f"sequence {n} is not in use; those in use: {self.sequences}")

    def _counts(self, sequences: Sequence[int], tokens: int | Sequence[int]) -> dict[int, int]:
        """{sequence: its number of new tokens}, checked."""
        self._check(sequences)
        each = [tokens] * len(sequences) if isinstance(tokens, (int, np.integer)) else tokens
        if not hasattr(each, "__len__") or not all(hasattr(n, "__index__") for n in each):
            raise TypeError(f"tokens: must be an integer, or one for each sequence: {tokens=}")
        counts = [int(n) for n in each]
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"sequences: must not repeat a number: {sequences=}")
        if len(counts) != len(sequences) or min(counts, default=0) < 0:
            raise ValueError(f"tokens: must be an integer >= 0 for each sequence: {tokens=}, {sequences=}")
        return dict(zip(sequences, counts))

    def _publish(self) -> None:
        """Copy the host's page table, lengths and starts to the device."""
        self._cached_rows.clear()
        self.pages = self._backend.put(self.pages, self._table)
        self.lengths, self.starts = self._backend.put(self.lengths, self._lengths), self._backend.put(self.starts, self._starts)
