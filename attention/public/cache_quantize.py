"""attention.quantize: an array in fp8, and its descales."""

from __future__ import annotations

from typing import Any

from tiles.calls.plan import Plan
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema
from tiles.dtypes import bf16, fp16
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for

from ..kernels.decode import cache_quantize
from ..kernels.decode.cache_quantize import Config
from ..names import suggests_argument_names
from ..options import check_flag
from ..parts.descales import BLOCK

ARRAYS = """
    x         (batch, seqlen, heads_k, head_dim)  tile
    descale   (batch, heads_k)                    float32  optional
    out       (batch, seqlen, heads_k, head_dim)  fp8      output
    computed  (batch, heads_k)                    float32  output  computes
    mean      (batch, heads_k, head_dim)          float32  output  centred
"""
REMEDIES = {"int8": "attention.append quantises to int8, the keys and values of a cache"}
QUANTIZE = Schema("quantize", ARRAYS, remedies=REMEDIES)
ARRAYS_OF_BLOCKS = ARRAYS.replace("computed  (batch, heads_k)", "computed  (batch, blocks, heads_k)")
QUANTIZE_BLOCKS = Schema(
    "quantize_blocks",
    ARRAYS_OF_BLOCKS,
    remedies=REMEDIES,
    blocks=lambda extents: (extents["seqlen"] + BLOCK - 1) // BLOCK,
)
DTYPES = {"bfloat16": bf16, "float16": fp16}


@suggests_argument_names
def quantize(
    x: Any,
    *,
    block: int | None = None,
    descale: Any = None,
    centred: bool = False,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Quantize x to float8_e4m3fn, with a descale for each sequence and head, or for each block of rows of a head. The result
    is what attention.forward takes.

        out[b, s, h] = (x[b, s, h] - mean[b, h]) / descale[b, h]         or with a block  descale[b, s // block, h]

    x: (B, S, H, D) or with layout="bhsd" (B, H, S, D), bfloat16 or float16, D a multiple of 8 up to 256. descale: (B, H),
    float32, positive; by default it is computed so that the largest absolute value of a head becomes 448. What is beyond 448 is
    clamped to it.

    block: 128, or None. Each block of rows then has a descale of its own, (B, blocks, H), or with layout="bhsd" (B, H, blocks),
    which is always computed here. So large numbers in some blocks do not take the range of e4m3, 2^-9 to 448, from small ones
    in others.

    centred: the mean of each head's rows is subtracted first. For keys this changes no weight: all scores of a query change
    by one number, scale q_i . mean, and lse is less by it (add it if you need lse). Keys that have much in common are then
    rounded less coarsely (SageAttention, Zhang et al. 2024). For values the mean is missing: add it to the output, if every
    query sees a key.

    Returns (out, descale), or (out, descale, mean) with centred=True, mean (B, H, D) in float32; without the descale if you
    gave it. out: written in place of a new array. Sums are in float32, in a fixed order: always the same bits.

    attention.append does the same for new rows of a cache. Arrays, `stream` and errors are those of attention.forward; a GPU of
    compute capability 8.9 or later."""
    if block is None:
        return _quantize(stream, (x, descale, out, None, None), (check_flag("centred", centred), descale is None), layout)
    if isinstance(block, bool) or block != BLOCK:
        raise ValueError(f"block: must be {BLOCK}, the rows that share a descale in attention.forward, or None: {block=}")
    if descale is not None:
        raise ValueError(f"descale: must be None where block is passed, which has one computed for each block: {block=}")
    return _quantize_blocks(stream, (x, None, out, None, None), (check_flag("centred", centred), True), layout)


@program(QUANTIZE)
def _quantize(problem: Problem, centred: bool, computes: bool) -> Plan:
    """The Plan of a call of quantize. computes: is the descale computed, not given?"""
    batch, rows, heads, columns = problem("batch", "seqlen", "heads_k", "head_dim")
    if columns % 8 or not 8 <= columns <= 256:
        raise problem.error("x", f"head_dim must be a multiple of 8, from 8 to 256: head_dim={columns}", "x")
    gpu = machine(problem.device)
    if not gpu.target.has_fp8:
        raise ValueError(f"x: fp8 needs a GPU of compute capability 8.9 or later; x is on {gpu}")
    if 0 in (batch, rows, heads):
        raise problem.error("x", "must not be empty", "x")
    dtype, column_tiles = DTYPES[problem.dtype], -(-columns // cache_quantize.COLUMNS)
    batch_heads, tiles = batch * heads, -(-rows // cache_quantize.ROWS)
    part_rows = -(-tiles // cache_quantize.PARTS) * cache_quantize.ROWS
    part_count = -(-rows // part_rows)
    steps, scratch = [], []

    def launch(kernel: str, warps: int, dtype=dtype, **arguments: Any) -> None:
        config = Config(kernel, dtype, centred and kernel != "partial_stats")
        blocks = -(-warps // cache_quantize.WARPS), 1 if kernel in ("reduce_stats", "quantize_blocks") else column_tiles, 1
        steps.append(kernel_for(cache_quantize, config, problem.device).bind(blocks, heads=heads, **arguments))

    mean, descale = problem["mean"] if centred else None, problem["computed" if computes else "descale"]
    by_block = problem.schema is QUANTIZE_BLOCKS
    if centred or (computes and not by_block):
        scratch.append(((batch_heads, part_count, 3, column_tiles * cache_quantize.COLUMNS), "float32"))
        stats = problem.scratch(0, *scratch[0])
        launch(
            "partial_stats",
            batch_heads * part_count,
            gX=problem["x"],
            gStats=stats,
            count=part_count,
            part_rows=part_rows,
            batch_heads=batch_heads,
        )
        launch(
            "reduce_stats",
            batch_heads,
            bf16,
            gStats=stats,
            gMean=mean,
            gDescale=descale if computes and not by_block else None,
            count=part_count,
            rows=rows,
            batch_heads=batch_heads,
        )
    blocks = -(-rows // BLOCK)
    kernel, count = ("quantize_blocks", blocks) if by_block else ("quantize_rows", tiles)
    launch(kernel, batch_heads * count, gX=problem["x"], gOut=problem["out"], gMean=mean, gDescale=descale, count=count)
    return Plan(steps, scratch)


_quantize_blocks = program(QUANTIZE_BLOCKS)(_quantize.planner)
