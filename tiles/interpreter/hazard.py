"""Hazard: an error of an interpreted kernel, with the line of its source."""

import linecache
from typing import NamedTuple

KINDS = {
    "deadlock": "nobody can go on",
    "race": "two accesses to shared memory, or two stores of other values to an element of global memory, that nothing orders; "
    "a store while the grid before may still run",
    "in flight": "a tile is touched while a copy into it, or a register while an mma that reads it, may still be under way",
    "released": "a ring's tile is used after, or given back before, its readers are done with it",
    "fence": "ordinary accesses and asynchronous ones (wgmma, TMA) with no fence.proxy.async between",
    "never written": "memory is read that nobody has written",
    "arrivals": "a barrier gets more arrivals than a phase takes",
    "bytes": "a barrier is told of more or fewer bytes than its copies bring",
    "phase": "a wait by parity that may take one phase for another",
    "wait": "a wait for mmas that does not cover the one asked for",
    "lifetime": "a peer's shared memory is reached before it is set up, or when it may be gone",
    "unfinished": "work is in flight, or half agreed upon, when the block ends",
    "bounds": "an index outside an array, a ring or the named barriers",
    "divergence": "the lanes of a warp disagree where the warp must act as one",
    "collective": "the warps of a warpgroup do different things where they must do the same",
    "registers": "setmaxnreg in the wrong direction",
    "storage": "the kernel and its launch disagree about shared memory",
    "language": "something that kernels run here cannot say",
}


class WarpPlace(NamedTuple):
    """A warp and the statement that it executes. code_positions: (code, offset in it) of each function that it is in, the
    innermost first. code: the instruction, if the kernel runs as compiled."""

    block: tuple
    warp: int
    code_positions: tuple
    code: str = ""

    @property
    def frames(self):
        """(file, line) in each function. Computed on demand: it takes longer than most ops, and few places are ever shown."""
        return tuple(_line(*where) for where in self.code_positions)

    @property
    def line(self):
        """file:line and text of the statement, then where the helper it stands in was called."""
        return (", called at ".join(_statement(*frame) for frame in self.frames) or "?") + f", {self.code}" * bool(self.code)

    def describe(self, operation):
        """The operation with its warp and line, for the middle of a sentence."""
        return f"{operation} (warp {self.warp}, {self.line})"

    def __str__(self):
        return f"warp {self.warp} (warpgroup {self.warp // 4}) of block {self.block}, {self.line}"


def _line(code, at):
    return code.co_filename, next(line for start, end, line in code.co_lines() if start <= at < end)


def _statement(file, line):
    text = linecache.getline(file, line).split("  #")[0].strip()
    return f"{file.replace(chr(92), '/').rsplit('/')[-1]}:{line} `{text}`"


class Hazard(Exception):
    """What would be a race, a hang, a fault or a silent wrong result on the GPU.

    kind: a key of KINDS. cause: what is wrong, in words. places: the warps that it concerns, the guilty one first."""

    def __init__(self, kind, cause, *places):
        assert kind in KINDS, kind
        self.kind, self.cause, self.places = kind, cause, places
        at = [] if kind == "deadlock" else [f"at {place}" for place in places]  # a deadlock's cause names them all
        super().__init__("\n  ".join([f"{kind}: {cause}", *at]))

    @property
    def warp(self):
        """The warp that caused the hazard."""
        return self.places[0].warp

    @property
    def line(self):
        """The guilty statement: file:line and text."""
        return self.places[0].line
