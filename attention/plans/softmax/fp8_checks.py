"""The schema and the checks of attention.forward for float8_e4m3fn."""

import re
from typing import Any

from tiles.calls.schema import Problem, Schema
from tiles.launching.arrays import ALIGNMENT

from ...options import check_number
from ...parts.descales import BLOCK
from .call_options import AUX_ROWS, BLOCK_MASK_ROWS

MAX_BLOCK_COLUMNS = 128  # the largest head dims with descales of blocks
DESCALES = "q_descale", "k_descale", "v_descale"
NOT_WITH_FP8 = "bias", "q_norm", "k_norm", "dropout"  # arguments that calls with q, k and v of fp8 do not have
INT8_REMEDY = {
    "int8": "attention.decode reads keys and values of int8, with q of 16 bits; for forward multiply them by their descales"
}
FP8_SCHEMA = Schema(
    "forward_fp8",
    f"""
    q             (batch, seqlen_q, heads, head_dim)                             tile8
    k             (batch, seqlen_k, heads_k, head_dim)                           tile8
    v             (batch, seqlen_k, heads_k, head_dim_v)                         tile8
    alibi         (heads)|(alibi_batch, heads)                                   float32      optional
    sink          (heads)                                                        float32      optional
    cu_seqlens    (ends)                                                         ends_q       optional
    cu_seqlens_k  (ends)                                                         ends_k       optional
    lengths_k     (sequences)                                                    key_lengths  optional
    q_descale     (heads_k)|(sequences, heads_k)|(sequences, blocks_q, heads)    float32      optional
    k_descale     (heads_k)|(sequences, heads_k)|(sequences, blocks_k, heads_k)  float32      optional
    v_descale     (heads_k)|(sequences, heads_k)|(sequences, blocks_k, heads_k)  float32      optional
{BLOCK_MASK_ROWS}
    lists         *                                                              any          optional
    marks         *                                                              any          optional
{AUX_ROWS}
    out           (batch, seqlen_q, heads, head_dim_v)                           half         in_place
    lse           (batch, heads, seqlen_q)                                       float32      output    return_lse
""",
    remedies=INT8_REMEDY,
)


def fp8_cache_schema(table: str) -> str:
    """The rows of a schema of forward, with k and v of fp8 and their descales."""
    table = re.sub(r"(\n    [kv] .*)tile", r"\1fp8", table)
    rows, rest, results = table.partition("\n    out")
    descales = [f"{name}_descale  (heads_k)|(batch, heads_k)  float32  optional" for name in "kv"]
    return "\n".join([rows, *descales]) + rest + results


def is_fp8(x: Any) -> bool:
    """Does an array hold float8_e4m3fn?"""
    dtype = getattr(x, "dtype", None)
    return getattr(dtype, "itemsize", 2) == 1 and "float8_e4m3fn" in str(dtype)


def refuse_with_fp8(**options: Any) -> None:
    """NotImplementedError: one of these arguments is not None or False, and no kernel supports it."""
    for name, x in options.items():
        if not (x is None or x is False):
            raise NotImplementedError(f"{name}: is not supported with k and v of float8_e4m3fn; convert them to bfloat16")


def split_descale(name: str, descale: Any) -> tuple[float, Any]:
    """(the number, None) or (1.0, the array) of a descale. TypeError, ValueError: a number is not from 2^-60 to 2^60."""
    if descale is None:
        return 1.0, None
    if hasattr(descale, "shape") and not isinstance(descale, float):
        return 1.0, descale
    value = check_number(name, descale)
    if not value or not 2.0**-60 <= value <= 2.0**60:
        raise ValueError(f"{name}: must be from 2**-60 to 2**60: {name}={descale!r}")
    return value, None


def block_descale_names(problem: Problem) -> list[str]:
    """The names of the descales that have one number for each block of rows. ValueError, NotImplementedError: they have another
    number of blocks, or the call does not support such descales."""
    names = [name for name in DESCALES if name in problem and len(problem.axes(name)) == 3]
    for name in names:
        input_name, rows, blocks = ("q", "seqlen_q", "blocks_q") if name == "q_descale" else ("k", "seqlen_k", "blocks_k")
        if problem.extents[blocks] != -(-problem.extents[rows] // BLOCK):
            raise problem.error(name, f"must have a number for each block of {BLOCK} rows of {input_name}", name, input_name)
    if names and ("cu_seqlens" in problem or "parts" in problem.extents):
        raise NotImplementedError(f"{names[0]}: of blocks is not supported with sequences that share a batch")
    columns = problem("head_dim", "head_dim_v")
    if names and max(columns) > MAX_BLOCK_COLUMNS:
        raise NotImplementedError(f"{names[0]}: of blocks is supported for up to {MAX_BLOCK_COLUMNS} columns: {columns}")
    return names


def check_output(problem: Problem) -> None:
    """ValueError: the kernels cannot store this output 16 bytes at a time."""
    out = problem.forms.get("out")
    if out and (problem.bytes_at_once("out") < ALIGNMENT or (out.strides[-1] != out.itemsize and out.shape[-1] > 1)):
        message = f"must have contiguous columns, and an address and strides that are multiples of {ALIGNMENT} bytes"
        raise ValueError(f"out: {message}: out.strides={out.strides}, {out.misalignment} bytes past such an address")
