"""What PagedCache does with the arrays of each framework: it copies page tables and lengths from the host to them, copies pages
within a pool, and writes new rows.

JAX's arrays are immutable: there each change makes a new array, to which XLA donates the memory of the old one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiles.dtypes import DTYPES
from tiles.launching import frameworks

from ..parts.cache_scales import MIN_DESCALE
from ..public.cache_append import append

Pair = tuple[Any, Any]
Pools = tuple[Any, ...]  # of a layer: K and V, and their descales if each token has its own
DESCALES = "k_descale", "v_descale"


class ArrayBackend:
    """What a PagedCache does with arrays of its framework. This class serves NumPy; subclasses override what differs. like: an
    array on the device of all arrays to come."""

    def __init__(self, like: Any):
        self.device = self.device_of(like)

    def device_of(self, like: Any) -> Any:
        """The device of an array, None in host memory."""
        return getattr(like, "device", None)

    def new(self, host: np.ndarray) -> Any:
        """A new array on the device with the values of `host`."""
        return host.copy()

    def put(self, array: Any, host: np.ndarray) -> Any:
        """The array with the values of `host`, at the same address unless the framework's arrays are immutable."""
        array[...] = host
        return array

    def copy(self, pool: Any, source: int, target: int) -> Any:
        """The pool after pool[target] = pool[source]."""
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
        """Call attention.append on the pools of a layer. Returns (the pools, what append returned). starts, pages: the host's
        copies of the sequences' rows; tables: (pages, starts) on the device. ends: cu_seqlens of packed sequences, or None."""
        args: dict[str, Any] = {} if ends is None else {"cu_seqlens": self.new(ends)}
        (k, v, *descales), (k_new, v_new), (device_pages, device_starts) = pools, new, tables
        args |= zip(DESCALES, descales)
        return pools, append(k, v, k_new, v_new, pages=device_pages, lengths=device_starts, **args, **options)


class TorchBackend(ArrayBackend):
    """torch's tensors are written in place on the current stream."""

    def new(self, host: np.ndarray) -> Any:
        return sys.modules["torch"].from_numpy(host.copy()).to(self.device, non_blocking=True)

    def put(self, array: Any, host: np.ndarray) -> Any:
        """Copy `host` to the tensor, without waiting for the stream. `host` is pageable memory, so CUDA has read it when this
        returns."""
        return array.copy_(sys.modules["torch"].from_numpy(host), non_blocking=True)


class CupyBackend(ArrayBackend):
    """CuPy's arrays are written in place; new ones are made on the device of `like`."""

    def new(self, host: np.ndarray) -> Any:
        with self.device:
            return sys.modules["cupy"].asarray(host)

    def put(self, array: Any, host: np.ndarray) -> Any:
        array.set(host)
        return array


class JaxBackend(ArrayBackend):
    """JAX's arrays are replaced by new ones. XLA rotates rows, and may contract a product and a sum to an fma."""

    def device_of(self, like: Any) -> Any:
        (device,) = like.devices()
        return device

    def new(self, host: np.ndarray) -> Any:
        return sys.modules["jax"].device_put(host.copy(), self.device)

    def put(self, array: Any, host: np.ndarray) -> Any:
        return self.new(host)

    def copy(self, pool: Any, source: int, target: int) -> Any:
        return _page_update()(pool, target, None, pool[source])

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
            raise NotImplementedError(
                f"{min(options)}: is not supported for JAX arrays, which PagedCache.append writes with XLA"
            )
        tokens, size = new[0].shape[1], pools[0].shape[1]
        counts = np.full(len(starts), tokens) if ends is None else np.diff(ends)
        sequence = np.repeat(np.arange(len(starts)), counts)  # of each token
        first_token = np.repeat(np.cumsum(counts) - counts, counts)
        key = starts[sequence] + np.arange(len(sequence)) - first_token  # where each token is in its sequence
        slots = pages[sequence, key // size], key % size
        positions = key.reshape(new[0].shape[:2])
        rotate = functools.partial(_rotate, positions=positions, rotary=rotary, interleaved=interleaved)
        rows = [x.reshape(-1, *x.shape[2:]) for x in (rotate(new[0]), new[1])]
        if len(pools) > len(rows):
            quantized, descales = zip(*(_quantize(x, pool.dtype) for x, pool in zip(rows, pools)))
            rows = [*quantized, *descales]
        new_pools = tuple(_page_update()(pool, *slots, x.astype(pool.dtype)) for pool, x in zip(pools, rows, strict=True))
        return new_pools, None if q is None else rotate(q).astype(q.dtype)


@functools.cache
def _page_update() -> Any:
    """A compiled function (pool, page, slot, rows): pool[page, slot] = rows, or pool[page] = rows if slot is None, in a new
    array that takes over the pool's memory."""
    jax = sys.modules["jax"]
    return jax.jit(
        lambda pool, page, slot, rows: pool.at[page].set(rows) if slot is None else pool.at[page, slot].set(rows),
        donate_argnums=0,
    )


def _rotate(x: Any, positions: np.ndarray, rotary: Pair | None, interleaved: bool) -> Any:
    """Rotate the rows of x (B, S, H, D) as attention.append does, in float32."""
    if rotary is None:
        return x
    jnp = sys.modules["jax"].numpy
    cos, sin = (table[positions][:, :, None].astype("float32") for table in rotary)
    columns = 2 * cos.shape[-1]
    front, rest = x[..., :columns].astype("float32"), x[..., columns:].astype("float32")
    x1, x2 = (front[..., ::2], front[..., 1::2]) if interleaved else jnp.split(front, 2, -1)
    pair = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    rotated = jnp.stack(pair, -1).reshape(front.shape) if interleaved else jnp.concatenate(pair, -1)
    return jnp.concatenate([rotated, rest], -1)


def _quantize(x: Any, dtype: np.dtype) -> Pair:
    """(x / descale, descale), with descale (.., H) = max(abs(x)) / the greatest number of the dtype of the rows x (.., H, D),
    448 of e4m3, 127 of int8, for which the quotient is rounded."""
    jnp = sys.modules["jax"].numpy
    x, (least, greatest) = x.astype("float32"), DTYPES[np.dtype(dtype)].ends
    descale = jnp.maximum(abs(x).max(-1) / greatest, MIN_DESCALE)
    quotient = jnp.clip(x / descale[..., None], least, greatest)
    return jnp.round(quotient) if dtype == np.int8 else quotient, descale


BACKENDS: Sequence[tuple[type, type[ArrayBackend]]] = (
    (frameworks.NumPy, ArrayBackend),
    (frameworks.Torch, TorchBackend),
    (frameworks.CuPy, CupyBackend),
    (frameworks.Jax, JaxBackend),
)


def backend_of(like: Any) -> ArrayBackend:
    """The backend for an array's framework. TypeError: there is none."""
    framework = frameworks.kind_of(like, "k")
    for kind, backend in BACKENDS:
        if type(framework) is kind:
            return backend(like)
    raise TypeError(f"k: must be an array of NumPy, torch, CuPy or JAX: type(k)={type(like)}")
