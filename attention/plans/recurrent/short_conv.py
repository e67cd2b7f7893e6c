"""The plans of attention.short_conv and its gradients."""

from dataclasses import replace
from typing import Any

from tiles.calls.plan import Plan
from tiles.calls.schema import Problem
from tiles.launching.arrays import ALIGNMENT, Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for
from tiles.launching.lengths import watched_function

from ...kernels.recurrent import short_conv, short_conv_backward
from ...parts.short_conv import CHANNELS, ROWS, VECTORS, WIDTHS, ConvConfig, SomeConfig
from .recurrent_checks import DTYPES, is_varlen

MIN_TOKENS = 16  # the least tokens of a block


@watched_function
def choose_block_tokens(length: int, batch: int, panels: int, warps: int, max_tokens: int) -> int:
    """The number of tokens of a block, a multiple of ROWS, at most `max_tokens`. It is chosen so that the blocks of all panels
    of channels fill the resident warps a whole number of times."""
    rounds = max(1, -(-length * batch * panels // (warps * max_tokens)))
    blocks = max(1, warps * rounds // max(1, batch * panels))
    return max(MIN_TOKENS, -(-length // (blocks * ROWS)) * ROWS)


@watched_function
def count_warps(count: int, panels: int, warps: int) -> int:
    """How many of the resident warps share the `count` blocks of each of the panels."""
    return min(count, max(1, warps // max(1, panels)))


class TokenGrid:
    """How the tokens of a problem are divided into blocks. tokens: the tokens of a block. blocks: the blocks of a sequence that
    is not packed; count: those of all sequences. panels: the panels of channels. warps: those of a panel, if each has several
    blocks."""

    def __init__(self, problem: Problem, config: ConvConfig):
        batch, length, channels, sequences = problem("batch", "seqlen", "channels", "sequences")
        self.panels = -(-channels // CHANNELS)
        warps = config.ctas_per_sm * machine(problem.device).processors
        self.tokens = choose_block_tokens(length, batch, self.panels, warps, config.max_tokens)
        self.blocks = -(-length // self.tokens) if length else 1
        self.count = length // self.tokens + sequences if is_varlen(problem) else self.blocks * batch
        self.warps = count_warps(self.count, self.panels, warps)
        self.kernel_sizes = {"length": length, "tokens": self.tokens, "blocks": self.blocks, "panels": self.panels}


def bias_row(problem: Problem) -> Operand | None:
    """The bias as (1, channel)."""
    bias = problem["bias"]
    return None if bias is None else bias.spread(0, 1)


def check_width(problem: Problem) -> None:
    """ValueError: no kernel serves the width of the weights, or so long a sequence."""
    width, length = problem("width", "seqlen")
    if width not in WIDTHS:
        raise problem.error("weight", f"width must be from {WIDTHS[0]} to {WIDTHS[-1]}: {width=}", "weight")
    if length >= 2**31:
        raise problem.error("x", "sequence must be shorter than 2**31", "x")


def choose_vector_bytes(problem: Problem, *names: str) -> int:
    """The largest of VECTORS of which addresses and strides of these arrays are multiples; fewer than 16 bytes where a lane
    cannot store its part of each row with one instruction, for which row strides must be from 0 to 2 GiB. Arrays without
    elements have no strides."""
    if not problem.extents["seqlen"]:
        return VECTORS[-1]
    vector_bytes = next(size for size in VECTORS if problem.bytes_at_once(*names) % size == 0)
    strides_fit = all([0 <= problem.forms[name].strides[1] < 2**31 for name in names if name in problem])
    whole_parts = problem.extents["channels"] % (ALIGNMENT // 2) == 0
    return vector_bytes if vector_bytes < ALIGNMENT or (strides_fit and whole_parts) else VECTORS[1]


def config_for(problem: Problem, make: type[SomeConfig], has_silu: bool, *names: str) -> SomeConfig:
    """The configuration of a kernel that moves the tokens of these arrays."""
    vector_bytes, has_bias = choose_vector_bytes(problem, *names), "bias" in problem
    return make(problem.extents["width"], has_silu, has_bias, DTYPES[problem.dtype], vector_bytes, is_varlen(problem))


def plan_short_conv(problem: Problem, silu: bool, return_state: bool) -> Plan:
    """The Plan of a call of short_conv."""
    check_width(problem)
    batch, length, channels, sequences = problem("batch", "seqlen", "channels", "sequences")
    if not channels or not (batch * length or (return_state and sequences)):
        return Plan([])
    config = config_for(problem, short_conv.Config, silu, "x", "out")
    grid = TokenGrid(problem, config)
    launch = kernel_for(short_conv, config, problem.device).bind(
        grid.count * grid.panels,
        gX=problem["x"],
        gWeight=problem["weight"],
        gBias=bias_row(problem),
        gInitialState=problem["initial_state"],
        gOut=problem["out"],
        gFinalState=problem["state"] if return_state else None,
        gCuSeqlens=problem["cu_seqlens"],
        **grid.kernel_sizes,
    )
    return Plan([launch])


def plan_short_conv_gradients(problem: Problem, silu: bool, requested: dict[str, bool]) -> Plan:
    """The Plan of a call of short_conv_backward. requested: are dbias and dinitial_state results?"""
    check_width(problem)
    if not problem.extents["channels"]:
        return Plan([])
    config = config_for(problem, short_conv_backward.Config, silu, "dout", "x", "dx")
    config = replace(config, window="dstate" in problem)
    grid, width, device = TokenGrid(problem, config), problem.extents["width"], problem.device
    shape = (grid.warps, width + 1, problem.extents["channels"]), "float32"
    sums = problem.scratch(0, *shape)
    results = {name: problem[name] if is_requested else None for name, is_requested in requested.items()}
    steps: list[Any] = []
    rows = width + (results["dbias"] is not None)
    if problem.extents["sequences"]:
        steps.append(_bind_gradients(problem, config, grid, sums, results["dinitial_state"]))
    steps.append(
        kernel_for(short_conv_backward, short_conv_backward.SumConfig(rows), device).bind(
            -(-problem.extents["channels"] // short_conv_backward.SUMS.cols) * rows,
            gSums=sums,
            gDWeight=problem["dweight"],
            gDBias=results["dbias"],
            count=grid.warps,
        )
    )
    return Plan(steps, [shape])


def _bind_gradients(
    problem: Problem, config: ConvConfig, grid: TokenGrid, sums: Operand, dinitial_state: Operand | None
) -> Any:
    """The launch that computes dx, dinitial_state and the sums of each warp."""
    return kernel_for(short_conv_backward, config, problem.device).bind(
        grid.warps * grid.panels,
        gDOut=problem["dout"],
        gX=problem["x"],
        gWeight=problem["weight"],
        gBias=bias_row(problem),
        gInitialState=problem["initial_state"],
        gDState=problem["dstate"],
        gDX=problem["dx"],
        gDInitialState=dinitial_state,
        gSums=sums,
        gCuSeqlens=problem["cu_seqlens"],
        count=grid.count,
        **grid.kernel_sizes,
    )
