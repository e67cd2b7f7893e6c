"""Launches that overlap the previous one on their stream (programmatic dependent launch), and the check that makes this safe.

A kernel that loads its weights before the previous launch has ended (ops/grid.py) must not load weights that this launch
writes: a function's result may be another's weights. So each step knows what it reads early and what it writes, and it does not
overlap if it reads what the previous one on its stream wrote. Launches of other libraries end before one of ours begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiles.launching.arrays import Operand
from tiles.launching.recording import RecordedStep

Memory = tuple[int, int]  # an array's memory: the place of its address among those of a program, and its size in bytes
# {stream: (the memory that its last overlapping launch wrote, the addresses of that launch's program)}
WRITTEN: dict[int, tuple[Sequence[Memory], Sequence[int]]] = {}


def memory_of(x: Operand) -> Memory:
    """The Memory of an operand of a program."""
    return x.source, x.form.extent


class EarlyLaunch(NamedTuple):
    """A step of a program: a launch that overlaps the previous one unless that one writes what this one reads early. reads: the
    memory that it reads early. writes: the memory of its results."""

    launch: RecordedStep
    reads: Sequence[Memory]
    writes: Sequence[Memory]

    @property
    def of_lengths(self) -> bool:
        return self.launch.of_lengths

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on this stream, with operands at these addresses."""
        bound, _, _, select = self.launch
        before = WRITTEN.get(stream)
        if before is not None and _meet(self.reads, addresses, *before):
            bound = bound.without_overlap()
        bound.run(stream, select(addresses))
        WRITTEN[stream] = self.writes, addresses


def _meet(reads: Sequence[Memory], addresses: Sequence[int], writes: Sequence[Memory], addresses_before: Sequence[int]) -> bool:
    """Does one of these memories share a byte with one that the launch before wrote?"""
    for source, nbytes in reads:  # a comprehension would take three times as long
        begin = addresses[source]
        for written, count in writes:
            if begin < addresses_before[written] + count and addresses_before[written] < begin + nbytes:
                return True
    return False
