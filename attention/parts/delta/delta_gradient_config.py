"""The tiles, warpgroups and chunks of a thread block that walks along a head and computes gradients of the delta rule on Hopper
(delta_gradients_hopper.py, delta_segment_gradients_hopper.py)."""

from dataclasses import dataclass
from typing import ClassVar

from numpy import int32

from ops import warpgroup
from tiles import inlined

from ..recurrent.tokens import COLUMNS
from .delta_config import DeltaConfig
from .delta_gate_sums import NO_GATE_SUMS, NoGateSums

CONSUMERS = 2  # warpgroups with 64 columns of values each
VALUES = CONSUMERS * COLUMNS  # columns of values of a thread block
DKDQ, PRODUCER = CONSUMERS, CONSUMERS + 1  # the third warpgroup, which computes dK and dQ, and the fourth
LOADER, VALUE_SUMS, GRADIENTS, KEY_SUMS = range(4)  # warps of the producer: one loads, the others store these results
REGISTERS = 24, 160, 168  # of each thread of the producer, of a consumer, of the warpgroup for dK and dQ
WARPS = warpgroup.WARPGROUP
OUTPUTS = 2  # dQ and dK, stored one after the other


@inlined
def find_counts(chunk, key_head):
    """The places of the two counts of a chunk and key head: how many value heads have added their dQ, and how many their dK."""
    return (chunk, int32(OUTPUTS * key_head)), (chunk, int32(OUTPUTS * key_head + 1))


@inlined
def clear_counts(gCounts, chunk, key_head):
    """Set both counts of a chunk and key head to 0."""
    of_dq, of_dk = find_counts(chunk, key_head)
    gCounts[of_dq] = int32(0)
    gCounts[of_dk] = int32(0)


@dataclass(frozen=True)
class DeltaGradientConfig(DeltaConfig):
    """A kernel's configuration. gates: what becomes of the sums that the gates' gradients are made of."""

    gates: NoGateSums = NO_GATE_SUMS
    threads: ClassVar[int] = warpgroup.THREADS * (PRODUCER + 1)

    @property
    def columns(self):
        """The columns of values of both consumers."""
        return VALUES
