"""The plans of attention.gated_rms_norm and its gradients."""

from typing import Any

from tiles.calls.plan import Plan
from tiles.calls.schema import Problem
from tiles.launching.arrays import ALIGNMENT, Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for
from tiles.launching.lengths import watched_function

from ...kernels.recurrent import gated_norm, gated_norm_gradients
from ...parts.gated_rows import COLUMNS, GROUPS, LINES, MAX_WARPS, UNIT_WEIGHTS, GroupedRows, SpreadRow
from ...parts.recurrent.l2norm import L2NORM_EPSILON
from ..partial_sums import sum_partials
from .recurrent_checks import DTYPES

MAX_COLUMNS = COLUMNS * LINES * MAX_WARPS
MAX_TOKENS, WARPS_PER_PROCESSOR = 64, 64  # the most tokens of a strip; the warps that each SM should have strips for


def serves(columns: int) -> bool:
    """Are there kernels for rows of so many columns?"""
    return columns % COLUMNS == 0 and COLUMNS <= columns <= MAX_COLUMNS


@watched_function
def choose_strip_tokens(tokens: int, warps: int, processors: int) -> int:
    """The number of tokens of a strip, which a warp or a thread block goes through. warps: how many work on one token."""
    return max(1, min(MAX_TOKENS, tokens * warps // (WARPS_PER_PROCESSOR * processors)))


class RowGrid:
    """How the rows of a problem are divided into strips of tokens. rows: how a warp or a block holds a row. splits: the strips
    of a sequence. blocks: the thread blocks of the launch. kernel_sizes: the numbers that both kernels take."""

    def __init__(self, problem: Problem, *names: str):
        batch, length, heads, columns = problem("batch", "seqlen", "heads", "head_dim")
        if not serves(columns):
            limits = f"must be a multiple of {COLUMNS} up to {MAX_COLUMNS}"
            raise problem.error("x", f"head_dim {limits}: head_dim={columns}", "x")
        self.lines = columns // COLUMNS
        aligned = bool(batch and length and heads) and problem.bytes_at_once(*names) == ALIGNMENT
        rows_type = GroupedRows if self.lines in GROUPS else SpreadRow
        self.rows = rows_type(self.lines, DTYPES[problem.dtype], aligned)
        self.panels = -(-heads // self.rows.rows)
        warps = self.panels * max(1, self.rows.threads // 32 if rows_type is SpreadRow else 1)
        self.tokens = choose_strip_tokens(batch * length, warps, machine(problem.device).processors)
        self.splits = -(-length // self.tokens) if length else 0
        strips = batch * self.splits * self.panels
        self.blocks = strips if rows_type is SpreadRow else -(-strips // (self.rows.threads // 32))
        self.kernel_sizes = {
            "inverse_columns": 1.0 / columns,
            "length": length,
            "tokens": self.tokens,
            "splits": self.splits,
            "panels": self.panels,
        }

    def view_lines(self, problem: Problem, name: str) -> Operand | None:
        """An array (batch, token, head, column) as (batch, token, line, column). ValueError: its heads are not contiguous."""
        x = problem[name]
        if x is None:
            return None
        try:
            return x.reshape(*x.shape[:2], -1, COLUMNS)
        except ValueError:
            remedy = "heads and columns must be contiguous: call contiguous() on it"
            raise problem.error(name, remedy, name) from None

    def view_weights(self, problem: Problem) -> Operand:
        """The weights as (head, line, column)."""
        weight, heads = problem["weight"], problem.extents["heads"]
        weight = weight if len(weight.shape) == 2 else weight.spread(0, heads)
        return weight.reshape(heads, self.lines, COLUMNS)


def plan_gated_norm(problem: Problem, eps: float, activation: str, norm_before_gate: bool) -> Plan:
    """The Plan of a call of gated_rms_norm."""
    grid = RowGrid(problem, "x", "gate", "out")
    if not grid.blocks:
        return Plan([])
    gated = "gate" in problem
    config = gated_norm.Config(grid.rows, activation if gated else None, norm_before_gate or not gated)
    launch = kernel_for(gated_norm, config, problem.device).bind(
        grid.blocks,
        gX=grid.view_lines(problem, "x"),
        gGate=grid.view_lines(problem, "gate"),
        gWeight=grid.view_weights(problem),
        gOut=grid.view_lines(problem, "out"),
        eps=eps,
        **grid.kernel_sizes,
    )
    return Plan([launch])


def plan_gated_norm_gradients(problem: Problem, eps: float, activation: str, norm_before_gate: bool, wants_dgate: bool) -> Plan:
    """The Plan of a call of gated_rms_norm_backward. Partial sums of dweight are (head, strip, column). Where heads share the
    weights, those of each head are summed first: one launch of a few blocks would go through all of them."""
    grid = RowGrid(problem, "dout", "x", "gate", "dx", "dgate")
    gated, (batch, heads, columns) = "gate" in problem, problem("batch", "heads", "head_dim")
    scratch = [((heads, batch * grid.splits, columns), "float32"), ((heads, columns), "float32")]
    (sums, head_sums), dweight, steps = (problem.scratch(n, *x) for n, x in enumerate(scratch)), problem["dweight"], list[Any]()
    if grid.blocks:
        config = gated_norm_gradients.Config(grid.rows, activation if gated else None, norm_before_gate or not gated)
        launch = kernel_for(gated_norm_gradients, config, problem.device).bind(
            grid.blocks,
            gDOut=grid.view_lines(problem, "dout"),
            gX=grid.view_lines(problem, "x"),
            gGate=grid.view_lines(problem, "gate"),
            gWeight=grid.view_weights(problem),
            gDX=grid.view_lines(problem, "dx"),
            gDGate=grid.view_lines(problem, "dgate") if wants_dgate else None,
            gSums=sums.reshape(heads, batch * grid.splits, grid.lines, COLUMNS),
            eps=eps,
            **grid.kernel_sizes,
        )
        steps.append(launch)
    if len(problem.axes("weight")) == 2:
        steps.append(sum_partials(problem, sums, dweight))
    elif heads < 2:
        steps.append(sum_partials(problem, sums.reshape(-1, columns), dweight))
    else:
        steps += [sum_partials(problem, sums, head_sums), sum_partials(problem, head_sums, dweight)]
    return Plan(steps, scratch)


def plan_l2norm(problem: Problem) -> Plan:
    """The Plan that divides rows of `x` by their L2 norms."""
    return _plan_l2norm(problem, gated_norm, gX="x", gOut="out")


def plan_l2norm_gradients(problem: Problem) -> Plan:
    """The Plan of `dx`, the gradient of `x` before it was divided by its L2 norms, from that of the result, `dout`."""
    return _plan_l2norm(problem, gated_norm_gradients, gX="x", gDOut="dout", gDX="dx")


def _plan_l2norm(problem: Problem, module: Any, **names: str) -> Plan:
    """The Plan of a kernel of norms without gates or weights. names: of its arrays."""
    grid = RowGrid(problem, *names.values())
    if not grid.blocks:
        return Plan([])
    kernel = kernel_for(module, module.Config(grid.rows, None, True, UNIT_WEIGHTS), problem.device)
    arrays = {parameter: grid.view_lines(problem, name) for parameter, name in names.items()}
    sizes = grid.kernel_sizes | {"inverse_columns": 1.0, "eps": float(L2NORM_EPSILON)}
    return Plan([kernel.bind(grid.blocks, **arrays, **sizes)])
