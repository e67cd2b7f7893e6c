"""attention.quantize: an array in fp8, and what its numbers are to be multiplied by."""

from __future__ import annotations

from typing import Any

from tiles.device import machine
from tiles.dtypes import bf16, fp16
from tiles.launch import kernel_for
from tiles.program import Plan, program
from tiles.schema import Problem, Schema

from ..options import flag
from . import narrowing
from .narrowing import Config

QUANTIZE = Schema(
    "quantize",
    """
    x        BSGD  tile
    descale  BG    float32  optional
    out      BSGD  fp8      made
    found    BG    float32  made  settled
    mean     BGD   float32  made  centred
    """,
)
DTYPES = {"bfloat16": bf16, "float16": fp16}


def quantize(
    x: Any, *, descale: Any = None, centred: bool = False, layout: str = "bshd", out: Any = None, stream: Any = None
) -> Any:
    """x in float8_e4m3fn, divided by a number of each sequence and head: what attention.forward takes.

        out[b, s, h] = (x[b, s, h] - mean[b, h]) / descale[b, h]

    x: (B, S, H, D) or with layout="bhsd" (B, H, S, D), bfloat16 or float16, D a multiple of 8 up to 256. descale: (B, H),
    float32, positive; by default made, so that the greatest element of a head becomes 448. What is beyond that becomes it.
    centred: the mean of each head's rows is subtracted first. Of keys nobody misses it: all scores of a query change by one
    number, so its weights are the same (and lse is not); and what is left of keys that have much in common is rounded finer
    (SageAttention, Zhang et al. 2024). Of values it is missed: add it to the output, where every query sees a key.

    Returns (out, descale), or (out, descale, mean) with centred=True, mean (B, H, D) in float32; without the descale that you
    gave. out: written in place of a new array. Sums are float32's, in an order of their own: always the same bits.

    Of new rows of a cache, whose descales stand, attention.append does this on the way. Arrays, `stream` and errors are those
    of attention.forward; a GPU of compute capability 8.9 or later."""
    return _quantize(stream, (x, descale, out, None, None), (flag("centred", centred), descale is None), layout)


@program(QUANTIZE)
def _quantize(problem: Problem, centred: bool, settled: bool) -> Plan:
    """How quantize does calls of this form; settled: the descale is to be found."""
    batch, rows, heads, columns = problem("BSGD")
    if columns % 8 or not 8 <= columns <= 256:
        raise problem.error("x", f"head_dim must be a multiple of 8, from 8 to 256: head_dim={columns}", "x")
    gpu = machine(problem.device)
    if gpu.capability < narrowing.FP8:
        raise ValueError(f"x: fp8 takes a GPU of compute capability 8.9 or later; it lies on {gpu}")
    if 0 in (batch, rows, heads):
        raise problem.error("x", "must not be empty", "x")
    of, across = DTYPES[problem.dtype], -(-columns // narrowing.COLUMNS)
    pairs, tiles = batch * heads, -(-rows // narrowing.ROWS)
    each = -(-tiles // narrowing.PARTS) * narrowing.ROWS
    count = -(-rows // each)
    steps, scratch = [], []

    def launch(kernel: str, warps: int, of=of, **arguments: Any) -> None:
        config = Config(kernel, of, centred and kernel != "parts")
        blocks = -(-warps // narrowing.WARPS), 1 if kernel == "settle" else across, 1
        steps.append(kernel_for(narrowing, config, problem.device).bind(blocks, heads=heads, **arguments))

    mean, descale = problem["mean"] if centred else None, problem["found" if settled else "descale"]
    if settled or centred:
        scratch.append(((pairs, count, 3, across * narrowing.COLUMNS), "float32"))
        parts = problem.scratch(0, *scratch[0])
        launch("parts", pairs * count, gX=problem["x"], gParts=parts, count=count, each=each, pairs=pairs)
        launch(
            "settle",
            pairs,
            bf16,
            gParts=parts,
            gMean=mean,
            gDescale=problem["found"] if settled else None,
            count=count,
            rows=rows,
            pairs=pairs,
        )
    launch("narrow", pairs * tiles, gX=problem["x"], gOut=problem["out"], gMean=mean, gDescale=descale, count=tiles)
    return Plan(steps, scratch)
