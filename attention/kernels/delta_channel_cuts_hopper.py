"""Where sequences can be cut into segments under the delta rule, where each channel of the keys has a decay: how many chunks
before a segment still count in it for states, and how many after it for their gradients (parts/recurrent/channel_history.py has
the bound). A block, one warpgroup, has the first token of a segment of a head, and one direction."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import divmod, warpgroup
from tiles import bf16, dtype, fp16, fp32, shared
from tiles.launching.arguments import INT, array
from tiles.targets import Target

from ..parts.recurrent.channel_gates import choose_channel_gates
from ..parts.recurrent.channel_history import ChannelHistory
from ..parts.recurrent.delta_chunks import KEY_DIMS
from ..parts.recurrent.gate_formulas import PLAIN_BETA
from ..parts.recurrent.segment_cuts import FORWARD, UNCUT, SegmentBounds
from ..parts.recurrent.tokens import TokenRange

DIRECTIONS = 2


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. gates: the dtype of the gates; dtype: of keys."""

    key_dim: int
    gates: dtype
    dtype: dtype
    threads = warpgroup.THREADS

    def __str__(self):
        return f"cuts of sequences, Dk {self.key_dim} {self.dtype}, gates {self.gates}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with gates in fp32 and in bf16; fp16 too if `everything`."""
    if target.has_wgmma:
        for input_dtype in (bf16, fp16) if everything else (bf16,):
            yield from (Config(*size, input_dtype) for size in itertools.product(KEY_DIMS, (fp32, input_dtype)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    channel_gates = choose_channel_gates(config.key_dim // warpgroup.WARPGROUP, None, None)
    history = ChannelHistory(config.key_dim, config.gates, config.dtype, channel_gates, PLAIN_BETA, False)
    ROWS, FORMULA = history.params(), channel_gates.params()
    smem = shared(sums=history.sums)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def count_overlaps(
        gBeta: array(3),
        gOverlaps: array(3),
        length: INT,
        segments: INT,
        heads: INT,
        group: INT,
        rows: ROWS,
        formula: FORMULA,
    ):
        """gOverlaps: (direction, sequence * heads + head, segment). `group` of the value `heads` share a key head."""
        (sums,) = smem.open()
        index, segment = divmod(cuda.blockIdx.x, segments - 1)
        head_sequence, direction = divmod(index, DIRECTIONS)
        sequence, head = divmod(head_sequence, heads)
        key_head, _ = divmod(head, group)
        segment = int32(segment + 1)
        token = SegmentBounds(length, segments).start(segment)
        if direction == FORWARD:
            seq = TokenRange(int32(0), token, sequence)
            overlap = history.count(rows, formula, gBeta, seq, head, key_head, sums)
        else:
            seq = TokenRange(token, int32(length), sequence)
            overlap = history.count(rows, formula, gBeta, seq.backwards(), head, key_head, sums)
        if warpgroup.rank() == 0:
            gOverlaps[direction, head_sequence, segment] = float32(overlap) if overlap < seq.num_chunks() else float32(UNCUT)

    return count_overlaps, smem
