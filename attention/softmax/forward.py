"""attention.forward: from a user's arrays to a launch."""

import math
from typing import Any

from tiles.device import machine
from tiles.dtypes import bf16, fp16
from tiles.launch import kernel_for
from tiles.program import Fill, Plan, program
from tiles.schema import Problem, Schema

from ..families import choose
from ..options import SCALES, flag, number
from . import ampere, hopper
from .online import SLACK
from .tiling import band_of

FORWARD = Schema(
    "forward",
    """
    q    BSHD  tile
    k    BTGD  tile
    v    BTGD  tile
    out  BSHD  tile     in_place
    lse  BHS   float32  made      return_lse
    """,
)
DTYPES = {"bfloat16": bf16, "float16": fp16}
LOG2_E = math.log2(math.e)


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bshd",
    out: Any = None,
    return_lse: bool = False,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """Attention: out = softmax(scale * q k^T) v, per batch and head.

    q: (B, Sq, H, D); k, v: (B, Sk, Hkv, D) for layout="bshd"; (B, H, S, D) for "bhsd". bfloat16 or float16; D a multiple
    of 8 up to 256; H a multiple of Hkv (GQA, MQA: query head h reads key head h // (H // Hkv)). Any lengths; any base
    addresses and strides with a contiguous last axis, fast where they are multiples of 16 bytes; nothing is ever copied.

    causal: query i sees key j where j <= i + Sk - Sq (aligned bottom-right); a query that sees no key gives 0.
    scale: of the scores, 1 / sqrt(D) by default. out: written in place of a new array. stream: the CUDA stream, by
    default the current one of q's framework. family: the instructions to use, "sm_90" (wgmma and TMA: Hopper, and
    multiples of 16 bytes) or "sm_80" (mma.sync and cp.async: any GPU since Ampere); by default the first where it can run.

    Returns `out`, the same kind of array as q, or with return_lse=True `(out, lse)`, where lse (B, H, Sq) is the float32
    natural logarithm of the sum of exp(score), -inf for a query that sees no key.

    Arrays are torch's, CuPy's, JAX's, Numba's or anything with `__dlpack__` or `__cuda_array_interface__`. NumPy arrays
    and others in host memory run in the interpreter, slowly and under supervision. ValueError or TypeError, before
    anything is launched, names the argument and prints the values."""
    options = flag("causal", causal), number("scale", scale), flag("return_lse", return_lse), family
    return _forward(stream, (q, k, v, out, None), options, layout)


@program(FORWARD)
def _forward(problem: Problem, causal: bool, scale: float | None, return_lse: bool, family: str | None) -> Plan:
    """How forward does calls of this form; lse is never given."""
    batch, q_len, heads, head_dim, kv_len, kv_heads = problem("BSHDTG")
    _check(problem, q_len, heads, head_dim, kv_len, kv_heads)
    scale = head_dim**-0.5 if scale is None else scale
    if not SCALES[0] <= scale <= SCALES[1]:  # a masked score is -inf, and must be -inf when scaled
        raise ValueError(f"scale: must be positive, and finite in float32: {scale=}")
    give = ("out", "lse") if return_lse else ("out",)
    out, lse = problem["out"], problem["lse"] if return_lse else None
    if 0 in out.form.shape or kv_len == 0:  # no query sees a key
        return Plan([Fill(x, value) for x, value in ((out, 0), (lse, -math.inf)) if x], give)
    tma, dtype, gpu = choose(problem, family) == "sm_90", DTYPES[problem.dtype], machine(problem.device)
    config: hopper.Config | ampere.Config
    if tma:
        config = hopper.config_for(head_dim, dtype, causal, kv_len)
    else:
        config = ampere.config_for(head_dim, dtype, causal, gpu.shared_bytes, problem.bytes_at_once())
    pairs, blocks, group = batch * heads, -(-q_len // config.rows), heads // kv_heads
    grid, at_once = pairs * blocks, gpu.processors
    if config.persistent:
        grid = min(grid, at_once)
    nbytes, uneven = 2 * kv_len * head_dim * dtype.itemsize / group, causal or (config.persistent and q_len % config.rows > 0)
    launch = kernel_for(hopper if tma else ampere, config, problem.device).bind(
        grid,
        gQ=problem["q"],
        gK=problem["k"],
        gV=problem["v"],
        gO=out,
        gLse=lse,
        q_len=q_len,
        kv_len=kv_len,
        offset=kv_len - q_len,
        blocks=blocks,
        heads=heads,
        pairs=pairs,
        band=band_of(grid, at_once, nbytes, gpu.cache_bytes, uneven),
        group=group,
        scale=scale * LOG2_E,
        slack=SLACK / (scale * LOG2_E),
    )
    return Plan([launch], give)


def _check(problem: Problem, q_len: int, heads: int, head_dim: int, kv_len: int, kv_heads: int) -> None:
    """ValueError: extents that the formula or the kernels do not take."""
    if head_dim % 8 or not 8 <= head_dim <= 256:
        raise problem.error("q", f"head_dim must be a multiple of 8, from 8 to 256: {head_dim=}", "q")
    if kv_heads == 0:
        raise problem.error("k", "must have at least one head", "k")
    if heads % kv_heads:
        raise problem.error("q", f"heads must be a multiple of k's: {heads=}, {kv_heads=}", "q", "k")
    if q_len >= 2**31 or kv_len >= 2**31:
        raise problem.error("q" if q_len >= 2**31 else "k", "sequence must be shorter than 2**31", "q", "k")
