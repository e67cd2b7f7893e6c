"""Packed sequences as mamba_ssm says them: seq_idx (B, S), which sequence each token belongs to. The state begins anew wherever
the number changes, and with each batch.

Kernels go by cu_seqlens, in a batch of 1. So batches are joined, and seq_idx becomes the ends of sequences. Each batch is given
as many of these, by empty ones in front, so that the last of each batch are evenly spaced.
"""

from typing import Any, NamedTuple

import numpy as np

from tiles import jax_call, torch_op
from tiles.frameworks import describe, fetched, placed, stream_handle


class Packed(NamedTuple):
    """Packed sequences for the kernels. cu_seqlens: their ends, an array where seq_idx lies. batch: how many batches there
    were. each: how many sequences each batch has, empty ones in front included. length: how many tokens a batch has."""

    cu_seqlens: Any
    batch: int
    each: int
    length: int

    def joined(self, x: Any, name: str) -> Any:
        """x (B, S, ...) as (1, B S, ...): a view, if batches follow on each other in memory. ValueError: x has not the axes B,
        S. This must be checked here, because once the two are joined other arrays with as many tokens look the same."""
        if x is None or self.batch == 1:
            return x
        shape = tuple(x.shape) if hasattr(x, "shape") else describe(x, name).shape
        if shape[:2] != (self.batch, self.length):
            raise ValueError(f"{name}: must have the axes B, S of x: {name}.shape={shape}, B={self.batch}, S={self.length}")
        return x.reshape(1, self.batch * self.length, *shape[2:])

    def parted(self, x: Any) -> Any:
        """The reverse of joined: (1, B S, ...) as (B, S, ...)."""
        return x if self.batch == 1 else x.reshape(self.batch, x.shape[1] // self.batch, *x.shape[2:])

    def last(self, states: Any) -> Any:
        """The states of the last sequence of each batch, of those of all sequences."""
        return states[self.each - 1 :: self.each]


def packed(seq_idx: Any, x: Any, stream: Any) -> Packed:
    """What seq_idx (B, S) says about x (B, S, ...). Its numbers are read, which waits for the device. TypeError, ValueError:
    it has another dtype, shape or device.

    NotImplementedError: a framework traces the call, so that there are no numbers yet."""
    if torch_op.traced(x) or any(map(jax_call.tracing, (x, seq_idx))):
        raise NotImplementedError("seq_idx: is read, and cannot be where the call is traced: give cu_seqlens there")
    array, values = describe(seq_idx, "seq_idx"), describe(x, "x")
    if array.dtype not in ("int32", "int64"):
        raise TypeError(f"seq_idx: dtype must be one of ('int32', 'int64'): seq_idx.dtype={array.dtype!r}")
    if array.shape != values.shape[:2]:
        raise ValueError(f"seq_idx: must have the axes B, S of x: seq_idx.shape={array.shape}, x.shape={values.shape}")
    if array.device != values.device:
        raise ValueError(
            f"seq_idx: must lie where x does (None: host memory): seq_idx.device={array.device}, x.device={values.device}"
        )
    if not array.form.extent:
        raise ValueError(f"seq_idx: must have a token: seq_idx.shape={array.shape}")
    where = 0
    if array.device is not None:
        where = array.kind.stream(seq_idx, array.device) if stream is None else stream_handle(stream)
    numbers = fetched(array, "seq_idx", where)
    length = numbers.shape[1]
    starts = [[0, *np.flatnonzero(np.diff(row)) + 1] for row in numbers]
    each = max(map(len, starts))
    ends = [length * b + at for b, found in enumerate(starts) for at in [0] * (each - len(found)) + found]
    cu_seqlens = placed(np.array([*ends, numbers.size], np.int32), array.kind, array.kind.home(array), array.device)
    return Packed(cu_seqlens, len(starts), each, length)
