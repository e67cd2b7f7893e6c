"""Copies of the inputs that TMA cannot address, as forward makes them (raw_inputs.prepare_rows), for gradients of the delta
rule and of decays of channels."""

import copy
import functools
import operator
from collections.abc import Sequence

from tiles.calls.plan import Step
from tiles.calls.schema import Problem

from ...families import uses_hopper_kernels
from .raw_inputs import by_tma, copy_arrays
from .recurrent_checks import has_channel_decay
from .recurrent_chunks import Arrays, ScratchAllocator

TILES = "dout", "q", "k", "v"  # inputs that kernels read by tiles


def align_for_hopper(
    problem: Problem, family: str | None, arrays: Arrays, scratch: ScratchAllocator
) -> tuple[bool, Problem, Arrays, list[Step]]:
    """(do kernels for Hopper serve a call, the problem and its arrays as they read them, the launches that copy inputs for
    them). family: as in choose_family, whose errors it has. arrays: by names of arguments."""
    if not problem.extents["batch"] * problem.extents["seqlen"]:  # arrays without elements have no address
        return uses_hopper_kernels(problem, family, True), problem, arrays, []
    names = *TILES, *["decay"] * has_channel_decay(problem)
    aligned = ignore_alignment(problem, names)
    if not uses_hopper_kernels(aligned, family):
        return False, problem, arrays, []
    copied, steps = copy_misaligned(problem, names, arrays, scratch)
    return True, aligned, copied, steps


def copy_misaligned(
    problem: Problem, names: Sequence[str], arrays: Arrays, scratch: ScratchAllocator
) -> tuple[Arrays, list[Step]]:
    """(the arrays with copies of those among `names` that TMA cannot address, the launches that copy them)."""
    misaligned = [name for name in names if not by_tma(problem, name)]
    copies = [copy_arrays(problem, {name: x}, scratch) for name in misaligned for x in [arrays[name]] if x]
    return arrays | {name: x for _, copied in copies for name, x in copied.items()}, [step for step, _ in copies]


def ignore_alignment(problem: Problem, names: Sequence[str]) -> Problem:
    """The problem as if addresses and strides of these arrays were multiples of 16 bytes, as those of copies are."""
    aligned = copy.copy(problem)
    aligned.bits = {name: 0 if name in names else x for name, x in problem.bits.items()}
    aligned.bits[None] = functools.reduce(operator.or_, [aligned.bits.get(name, 0) for name in problem.schema.tiles])
    return aligned
