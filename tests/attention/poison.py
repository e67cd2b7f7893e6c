"""Poison: whatever a kernel must not read is NaN, in every test of attention from this one place.

- `poisoned`, `spoiled`, `only`: arrays of it, with it, and with it everywhere else. Each byte is 0xFF: a NaN in every float
  dtype that the library takes, -1 in integers.
- `unseen`: q, k and v with poison in what no query sees, by the formula.
- `edges`: the lengths around the edges of tiles and pages. Sizes come from a kernel's Config, so they follow it.
- `in_pages`: keys in pages of a pool that holds nothing but poison elsewhere. Table entries of no use are no page's number.
- `Packing`: sequences of given lengths, each behind a neighbour of which everything is poison (and the log-sum-exp far below
  any of ours, so that a weight that counts one by mistake is not finite), with tokens after the last that belong to nobody.
- `unaligned`: the same elements at other addresses, poison between the rows.
- `poison_new_memory`: what the library allocates, results and scratch memory, holds poison. tests/attention/conftest.py calls
  it for every test.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from attention.reference.scores import ReferenceVariant
from attention.reference.softmax import sequence_slices
from tiles.calls.schema import ORDER
from tiles.launching.checks import Check
from tiles.launching.frameworks import Framework, Torch

BYTE = 0xFF
FAR_LSE = -509.0  # of a neighbour's row: exp(score + 509) is no float32


def poisoned(shape: Any, dtype: Any) -> np.ndarray:
    """A NumPy array filled with poison."""
    return _filled(np.empty(shape, dtype))


def _filled(x: Any) -> Any:
    """A C-ordered array of NumPy or torch, filled with poison."""
    if isinstance(x, np.ndarray):
        x.reshape(-1).view(np.uint8)[:] = BYTE
    elif x.numel():
        import torch

        x.view(-1).view(torch.uint8).fill_(BYTE)
    return x


def spoiled(x: np.ndarray, where: Any) -> np.ndarray:
    """A copy with poison at this index, which may be a mask of the leading axes."""
    x = x.copy()
    x[where] = poisoned((), x.dtype)
    return x


def only(x: np.ndarray, where: Any) -> np.ndarray:
    """A copy with poison everywhere except at this index."""
    actual = poisoned(x.shape, x.dtype)
    actual[where] = x[where]
    return actual


MASKING = "causal", "window", "mask", "aux", "blocks"


def unseen(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, layout: str = "bshd", cu_seqlens: Any = None, cu_seqlens_k: Any = None,
    lengths_k: Any = None, block: int | None = None, **options: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Copies of q, k and v (attention.forward's, as its options say) with poison in the queries and keys of no sequence, in the
    keys before the first and after the last that any query of their sequence sees with one of the heads that share them, and
    in those of a sequence that are seen by none. block: and between these in every block of so many keys of which none is seen.

    Of packed sequences, and of those of which some keys are in use, masks in Python and lists of blocks hide nothing: there
    docs/variants.md promises it of windows alone."""
    axes = np.argsort(ORDER[layout])
    known = MASKING if cu_seqlens is None and lengths_k is None else MASKING[:2]
    variant = ReferenceVariant(**{name: options[name] for name in known if name in options}).cast(np.float64)
    actual = [poisoned(x.transpose(axes).shape, x.dtype) for x in (q, k, v)]
    heads, kv_heads = actual[0].shape[2], actual[1].shape[2]
    lies = actual[0].shape, actual[1].shape, cu_seqlens, cu_seqlens_k, lengths_k
    for b, place, queries, keys in sequence_slices(*lies):
        actual[0][place, queries] = q.transpose(axes)[place, queries]
        i, j = np.arange(queries.stop - queries.start)[:, None], np.arange(keys.stop - keys.start)[None]
        for head in range(kv_heads):
            its = range(head * heads // kv_heads, (head + 1) * heads // kv_heads)
            seen = np.flatnonzero(np.any([variant.visible(b, h, i, j, j.size - i.size).any(0) for h in its], 0))
            if seen.size:
                rows = np.arange(seen[0], seen[-1] + 1)
                rows = keys.start + (rows if block is None else rows[np.isin(rows // block, seen // block)])
                for result, x in zip(actual[1:], (k, v)):
                    result[place, rows, head] = x.transpose(axes)[place, rows, head]
    return tuple(x.transpose(axes) for x in actual)


def edges(*sizes: int, most: float = np.inf) -> list[int]:
    """0, 1, and one less than each of these sizes, the size, and one more, up to `most`: ascending."""
    around = {0, 1, *(size + by for size in sizes for by in (-1, 0, 1))}
    return sorted(n for n in around if 0 <= n <= most)


def in_pages(
    arrays: Sequence[np.ndarray], lengths: Sequence[int], size: int, first: Sequence[int] | None = None
) -> tuple[list[np.ndarray], np.ndarray]:
    """(the pools, the table) of sequences (batch, row, ...) in pages of `size` rows, which lie in any order. The first rows,
    before `first` of each sequence, are in no page either: a server has given those pages away. The table ends with the last
    page of the longest sequence."""
    begins = first or [0] * len(lengths)
    used = [range(begin // size, -(-n // size) if n > begin else begin // size) for begin, n in zip(begins, lengths)]
    numbers = iter(np.random.default_rng(3).permutation(sum(map(len, used)) + 2))
    table = np.full((len(lengths), max(1, max(pages.stop for pages in used))), -7, np.int32)
    pools = [poisoned((sum(map(len, used)) + 2, size, *x.shape[2:]), x.dtype) for x in arrays]
    for b, (begin, n) in enumerate(zip(begins, lengths)):
        for page in used[b]:
            table[b, page] = number = next(numbers)
            rows = slice(max(size * page, begin), min(size * (page + 1), n))
            for pool, x in zip(pools, arrays):
                pool[number, rows.start - size * page : rows.stop - size * page] = x[b, rows]
    return pools, table


class Packing:
    """Sequences of these lengths, one behind the other in one batch, with a neighbour before each. Behind the last one come
    `nobodys` tokens of no sequence.

    ends: cu_seqlens with neighbours. cu_seqlens: those without them. mine: which tokens belong to the sequences. which:
    the numbers of the sequences among all that `ends` has."""

    def __init__(self, lengths: Sequence[int], neighbour: int = 1, nobodys: int = 300):
        all_lengths = [n for length in lengths for n in (neighbour, length)]
        self.ends = np.array([0, *accumulate(all_lengths)], np.int32)
        self.cu_seqlens = np.array([0, *accumulate(lengths)], np.int32)
        self.which = slice(1, len(all_lengths), 2)
        self.mine = np.repeat([*(np.arange(len(all_lengths)) % 2 == 1), False], [*all_lengths, nobodys])
        self.nobodys = slice(int(self.ends[-1]), int(self.ends[-1]) + nobodys)

    def spread(self, x: np.ndarray, axis: int = 1, fill: float | None = None) -> np.ndarray:
        """Rows of the sequences alone, along an axis, at their places; everything else is poison, or `fill`."""
        shape = (*x.shape[:axis], self.mine.size, *x.shape[axis + 1 :])
        actual = poisoned(shape, x.dtype) if fill is None else np.full(shape, fill, x.dtype)
        actual[(slice(None),) * axis + (self.mine,)] = x
        return actual

    def gather(self, x: np.ndarray, axis: int = 1) -> np.ndarray:
        """The rows of the sequences alone."""
        return np.compress(self.mine, x, axis)


def as_on_a_device(monkeypatch: Any) -> None:
    """Skip checks of the values of cu_seqlens and lengths in host memory, as on a GPU."""
    monkeypatch.setattr(Check, "run", lambda *_: None)


def unaligned(x: np.ndarray, elements: int, behind: int = 0) -> np.ndarray:
    """The same elements: the array begins so many elements behind a multiple of 16 bytes, its strides are odd multiples of as
    many (`behind` more, if said), and poison lies between its rows. `.base` has the poison."""
    width = x.shape[-1] + elements + behind
    room = poisoned((*x.shape[:-1], width), x.dtype)
    room[..., elements : elements + x.shape[-1]] = x
    return room[..., elements : elements + x.shape[-1]]


def poison_new_memory(monkeypatch: Any, kind: type[Framework] = Framework) -> None:
    """From here on what the library allocates holds poison: of NumPy's arrays, or of torch's (kind=Torch)."""
    maker = kind.allocator

    def filling(self, home, shape, dtype):
        make = maker(self, home, shape, dtype)
        return (lambda: _filled(make())) if kind is Torch or home is None else make

    monkeypatch.setattr(kind, "allocator", filling)
    monkeypatch.setattr(kind, "watched_allocator", Framework.watched_allocator)
