"""Launches that are early, and what they must not read too soon.

A kernel whose weights are on their way before the launch before it is done (ops/grid.py) must not find weights that this launch
writes: a function's result may be another's weights. So each step knows what it reads early and what it writes, and one whose
weights overlap what the launch before it wrote, on its stream, is not early. Launches of others are done before one of ours
begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiles.arrays import Operand
from tiles.recording import RecordedStep

WRITTEN: dict[int, list[tuple[int, int]]] = {}  # by stream: from where to where the last launch that may be overtaken wrote


Memory = tuple[int, int]  # of an array: the place of its address among those of a program, and how many bytes it spans


def memory_of(x: Operand) -> Memory:
    """Where an array that is to come will lie."""
    return x.source, x.form.extent


class EarlyLaunch(NamedTuple):
    """A step of a program: a launch that begins before the launch ahead of it has ended, if that one does not write what it
    reads early. reads: what it reads early, its weights. writes: its results."""

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
    def ranges(every: Sequence[Memory], addresses: Sequence[int]) -> list[tuple[int, int]]:
        """(begin, end) of each."""
        return [(addresses[source], addresses[source] + nbytes) for source, nbytes in every]
