"""The launches that add partial sums in their order, so that results have the same bits every time."""

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.launch import kernel_for

from ..kernels.recurrent import sum_head_groups
from ..kernels.softmax.norm_gradients import PART, SumNormPartials


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


def sum_groups(problem: Problem, config: sum_head_groups.Config, parts: Operand, total: Operand) -> Step:
    """The launch that sums `parts` (batch, row, head and part, column) over the parts of each head, to `total` (batch, row,
    head, column); a configuration of sum_head_groups.py that accumulates adds the sums to what `total` holds."""
    batch, rows, heads, columns = total.form.shape
    tiles, panels = -(-rows // sum_head_groups.X.rows), -(-columns // sum_head_groups.X.cols)
    return kernel_for(sum_head_groups, config, problem.device).bind(
        -(-batch * heads * tiles // sum_head_groups.WARPS),
        gPartial=parts,
        gOut=total,
        tiles=tiles,
        panels=panels,
        heads=heads,
        group=parts.form.shape[2] // heads,
    )
