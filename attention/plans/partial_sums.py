"""The launch that adds partial sums in their order, so that results have the same bits every time."""

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.launch import kernel_for

from ..kernels.norm_gradients import PART, SumNormPartials


def sum_partials(problem: Problem, partials: Operand, total: Operand, accumulate: bool = False) -> Step:
    """The launch that sums `partials` (group, split, column) over splits, to `total` (group, column). Both may come without
    groups. accumulate: are the sums added to what `total` holds?"""
    if len(partials.form.shape) == 2:
        partials = partials.spread(0, 1)
    if len(total.form.shape) == 1:
        total = total.spread(0, 1)
    groups, splits, columns = partials.form.shape
    panels, config = -(-columns // PART.cols), SumNormPartials(accumulate)
    kernel = kernel_for(config, config, problem.device)
    return kernel.bind(groups * panels, gPartials=partials, gSum=total, panels=panels, splits=splits)
