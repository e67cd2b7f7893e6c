"""Launches that overlap the previous one on their stream (programmatic dependent launch), and the check that makes this safe.

A kernel that loads its weights before the previous launch has ended (ops/grid.py) must not load weights that this launch
writes: a function's result may be another's weights. So each step knows what it reads early and what it writes, and it does not
overlap if it reads what the previous one on its stream wrote. Launches of other libraries end before one of ours begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiles.launching.arrays import Operand
from tiles.launching.recording import RecordedStep

WRITTEN: dict[int, list[tuple[int, int]]] = {}  # {stream: (begin, end) of the memory that its last overlapping launch wrote}


Memory = tuple[int, int]  # an array's memory: the place of its address among those of a program, and its size in bytes


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
        reads, written = self.ranges(self.reads, addresses), WRITTEN.get(stream, ())
        waits = any([low < end and start < high for low, high in reads for start, end in written])
        bound = self.launch.late if waits else self.launch.bound
        bound.run(stream, [addresses[source] for source in self.launch.sources])
        WRITTEN[stream] = self.ranges(self.writes, addresses)

    @staticmethod
    def ranges(memories: Sequence[Memory], addresses: Sequence[int]) -> list[tuple[int, int]]:
        """(begin, end) of each of these memories, for these addresses."""
        return [(addresses[source], addresses[source] + nbytes) for source, nbytes in memories]
