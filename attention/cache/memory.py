"""What a paged cache does with arrays, for each framework: arrays of numbers that the host knows are updated in place, pages
are copied, rows are written.

JAX's arrays cannot be written: there each change makes a new array, to which the memory of the old one is donated."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiles import frameworks

from .append import append
from .scales import END, LEAST

Pair = tuple[Any, Any]
Pools = tuple[Any, ...]  # K and V, and their descales if each token has its own
DESCALES = "k_descale", "v_descale"


class Memory:
    """What a PagedCache does with arrays of its framework. This class is NumPy's; those of other frameworks change what
    differs. like: an array in the place where all arrays are to be."""

    def __init__(self, like: Any):
        self.place = self.place_of(like)

    def place_of(self, like: Any) -> Any:
        """The place of an array: its device."""
        return getattr(like, "device", None)

    def new(self, host: np.ndarray) -> Any:
        """An array of these numbers."""
        return host.copy()

    def put(self, array: Any, host: np.ndarray) -> Any:
        """The array with these numbers, at the same address if the framework can write."""
        array[...] = host
        return array

    def copy(self, pool: Any, source: int, target: int) -> Any:
        """The pool with page `target` overwritten by page `source`."""
        pool[target] = pool[source]
        return pool

    def write(
        self,
        pools: Pools,
        new: Pair,
        starts: np.ndarray,
        pages: np.ndarray,
        ends: np.ndarray | None,
        tables: Pair,
        options: dict,
    ) -> tuple[Pools, Any]:
        """attention.append to the pools of a layer. Returns (the pools, what append returned). starts, pages: what the host
        knows of the sequences; tables: the same as arrays, (pages, starts). ends: cu_seqlens of packed sequences."""
        packed: dict[str, Any] = {} if ends is None else {"cu_seqlens": self.new(ends)}
        (k, v, *descales), (k_new, v_new), (of_pages, of_starts) = pools, new, tables
        packed |= zip(DESCALES, descales)
        return pools, append(k, v, k_new, v_new, pages=of_pages, lengths=of_starts, **packed, **options)


class Torch(Memory):
    """Arrays of torch."""

    def new(self, host: np.ndarray) -> Any:
        return sys.modules["torch"].from_numpy(host.copy()).to(self.place, non_blocking=True)

    def put(self, array: Any, host: np.ndarray) -> Any:
        """See Memory. The numbers come from pageable memory, so they have been read when this returns. It does not wait for
        the stream."""
        return array.copy_(sys.modules["torch"].from_numpy(host), non_blocking=True)


class CuPy(Memory):
    """Arrays of CuPy."""

    def new(self, host: np.ndarray) -> Any:
        with self.place:
            return sys.modules["cupy"].asarray(host)

    def put(self, array: Any, host: np.ndarray) -> Any:
        array.set(host)
        return array


class Jax(Memory):
    """Arrays of JAX. XLA rotates rows, and may round a product and a sum together."""

    def place_of(self, like: Any) -> Any:
        (device,) = like.devices()
        return device

    def new(self, host: np.ndarray) -> Any:
        return sys.modules["jax"].device_put(host.copy(), self.place)

    def put(self, array: Any, host: np.ndarray) -> Any:
        return self.new(host)

    def copy(self, pool: Any, source: int, target: int) -> Any:
        return _donated()(pool, target, None, pool[source])

    def write(
        self,
        pools: Pools,
        new: Pair,
        starts: np.ndarray,
        pages: np.ndarray,
        ends: np.ndarray | None,
        tables: Pair,
        options: dict,
    ) -> tuple[Pools, Any]:
        rotary, interleaved, q = (options.pop(name, None) for name in ("rotary", "interleaved", "q"))
        if options:
            raise NotImplementedError(f"{min(options)}: is not served on JAX's arrays")
        tokens, size = new[0].shape[1], pools[0].shape[1]
        counts = np.full(len(starts), tokens) if ends is None else np.diff(ends)
        number = np.repeat(np.arange(len(starts)), counts)  # the sequence of each token
        first = np.repeat(np.cumsum(counts) - counts, counts)
        at = starts[number] + np.arange(len(number)) - first
        where = pages[number, at // size], at % size
        positions = at.reshape(new[0].shape[:2])
        rotate = functools.partial(_rotated, positions=positions, rotary=rotary, interleaved=interleaved)
        rows = [x.reshape(-1, *x.shape[2:]) for x in (rotate(new[0]), new[1])]
        if len(pools) > len(rows):
            held, descales = zip(*map(_quantised, rows))
            rows = [*held, *descales]
        written = tuple(_donated()(pool, *where, x.astype(pool.dtype)) for pool, x in zip(pools, rows, strict=True))
        return written, None if q is None else rotate(q).astype(q.dtype)


@functools.cache
def _donated() -> Any:
    """pool[page, slot] = rows, or pool[page] = rows, in a new array with the pool's memory."""
    jax = sys.modules["jax"]
    return jax.jit(
        lambda pool, page, slot, rows: pool.at[page].set(rows) if slot is None else pool.at[page, slot].set(rows),
        donate_argnums=0,
    )


def _rotated(x: Any, positions: np.ndarray, rotary: Pair | None, interleaved: bool) -> Any:
    """Rows (B, S, H, D) of x as attention.append rotates them, in float32."""
    if rotary is None:
        return x
    jnp = sys.modules["jax"].numpy
    cos, sin = (table[positions][:, :, None].astype("float32") for table in rotary)
    turned, rest = x[..., : 2 * cos.shape[-1]].astype("float32"), x[..., 2 * cos.shape[-1] :].astype("float32")
    one, other = (turned[..., ::2], turned[..., 1::2]) if interleaved else jnp.split(turned, 2, -1)
    pair = [one * cos - other * sin, other * cos + one * sin]
    turned = jnp.stack(pair, -1).reshape(turned.shape) if interleaved else jnp.concatenate(pair, -1)
    return jnp.concatenate([turned, rest], -1)


def _quantised(x: Any) -> Pair:
    """(rows (.., H, D) of x divided by their descales, the descales): the greatest element becomes 448, the end of e4m3."""
    jnp = sys.modules["jax"].numpy
    x = x.astype("float32")
    descale = jnp.maximum(abs(x).max(-1) / END, LEAST)
    return jnp.clip(x / descale[..., None], -END, END), descale


KINDS: Sequence[tuple[type, type[Memory]]] = (
    (frameworks.NumPy, Memory),
    (frameworks.Torch, Torch),
    (frameworks.CuPy, CuPy),
    (frameworks.Jax, Jax),
)


def memory_of(like: Any) -> Memory:
    """The Memory of an array's framework. TypeError: there is none for it."""
    kind = frameworks.kind_of(like, "k")
    for its, memory in KINDS:
        if type(kind) is its:
            return memory(like)
    raise TypeError(f"k: a paged cache is made of arrays of NumPy, torch, CuPy or JAX: {type(like)}")
