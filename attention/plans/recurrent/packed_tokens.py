"""Packed sequences as mamba_ssm takes them, by seq_idx (B, S): the number of the sequence that each token belongs to. The state
starts at 0 wherever the number changes, and with each batch.

Kernels take cu_seqlens and a batch of 1. So batches are joined, and cu_seqlens is computed from seq_idx. Empty sequences are
put in front of the others of a batch, so that all batches have the same number of sequences, and the last ones are evenly
spaced."""

from typing import Any, NamedTuple

import numpy as np

from tiles.calls import jax_call, torch_op
from tiles.launching.frameworks import describe, fetched, placed, stream_handle, without_grad


class PackedBatches(NamedTuple):
    """Batches of packed sequences as one batch. cu_seqlens: an array on seq_idx's device. batch: the number of batches.
    sequences: the number of sequences of each batch, empty ones included. length: the number of tokens of each batch."""

    cu_seqlens: Any
    batch: int
    sequences: int
    length: int

    def join(self, x: Any, name: str) -> Any:
        """x (B, S, ...) as (1, B S, ...): a view if the batches are contiguous in memory. ValueError: x has other axes than B,
        S. Later checks would not see that, because arrays with as many tokens in all look the same when they are joined."""
        if x is None or self.batch == 1:
            return x
        shape = tuple(x.shape) if hasattr(x, "shape") else describe(x, name).shape
        if shape[:2] != (self.batch, self.length):
            raise ValueError(f"{name}: must have the axes B, S of x: {name}.shape={shape}, B={self.batch}, S={self.length}")
        return x.reshape(1, self.batch * self.length, *shape[2:])

    def split(self, x: Any) -> Any:
        """The inverse of join: (1, B S, ...) as (B, S, ...)."""
        return x if self.batch == 1 else x.reshape(self.batch, x.shape[1] // self.batch, *x.shape[2:])

    def last_states(self, states: Any) -> Any:
        """The states of the last sequence of each batch, from the states of all sequences."""
        return states[self.sequences - 1 :: self.sequences]


def pack_batches(seq_idx: Any, x: Any, stream: Any) -> PackedBatches:
    """The PackedBatches of x (B, S, ...) for seq_idx (B, S), whose numbers the host reads: that waits for the device.
    TypeError, ValueError: seq_idx has another dtype, shape or device. NotImplementedError: a framework traces the call, so that
    there are no numbers yet."""
    if torch_op.is_traced(x) or any(map(jax_call.is_jax_tracer, (x, seq_idx))):
        raise NotImplementedError("seq_idx: its numbers cannot be read while the call is traced: pass cu_seqlens instead")
    array, values = describe(seq_idx, "seq_idx"), describe(without_grad(x), "x")
    if array.dtype not in ("int32", "int64"):
        raise TypeError(f"seq_idx: dtype must be one of ('int32', 'int64'): seq_idx.dtype={array.dtype!r}")
    if array.shape != values.shape[:2]:
        raise ValueError(f"seq_idx: must have the axes B, S of x: seq_idx.shape={array.shape}, x.shape={values.shape}")
    if array.device != values.device:
        raise ValueError(
            f"seq_idx: must lie where x does (None: host memory): seq_idx.device={array.device}, x.device={values.device}"
        )
    if not array.form.extent:
        raise ValueError(f"seq_idx: must have at least one token: seq_idx.shape={array.shape}")
    handle = 0
    if array.device is not None:
        handle = array.kind.stream(seq_idx, array.device) if stream is None else stream_handle(stream)
    numbers = fetched(array, "seq_idx", handle)
    length = numbers.shape[1]
    starts = [[0, *np.flatnonzero(np.diff(row)) + 1] for row in numbers]
    sequences = max(map(len, starts))
    ends = [length * b + start for b, row in enumerate(starts) for start in [0] * (sequences - len(row)) + row]
    cu_seqlens = placed(np.array([*ends, numbers.size], np.int32), array.kind, array.kind.placement(array), array.device)
    return PackedBatches(cu_seqlens, len(starts), sequences, length)
