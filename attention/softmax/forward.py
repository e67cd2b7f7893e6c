"""attention.forward: from a user's arrays to a launch."""

import functools
import math
from collections.abc import Callable
from typing import Any

from tiles import launch, tensor
from tiles.arrays import FORMS, Form, at, c_ordered, fill, form
from tiles.device import cache, device, processors, supported
from tiles.dtypes import bf16, fp16
from tiles.plans import Plan, planned

from . import ampere, hopper
from .problem import PIECES, Placed, Problem, check, options, piece
from .tiling import band_of

DTYPES = {"bfloat16": bf16, "float16": fp16}
FAMILIES = "sm_80", "sm_90"
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
    addresses and strides that are multiples of 4 bytes, with a contiguous last axis; nothing is ever copied.

    causal: query i sees key j where j <= i + Sk - Sq (aligned bottom-right); a query that sees no key gives 0.
    scale: of the scores, 1 / sqrt(D) by default. out: written in place of a new array. stream: the CUDA stream, by
    default the current one of q's framework. family: the instructions to use, "sm_90" (wgmma and TMA: Hopper, and
    multiples of 16 bytes) or "sm_80" (mma.sync and cp.async: any GPU since Ampere); by default the first where it can run.

    Returns `out`, the same kind of array as q, or with return_lse=True `(out, lse)`, where lse (B, H, Sq) is the float32
    natural logarithm of the sum of exp(score), -inf for a query that sees no key.

    Arrays are torch's, CuPy's, JAX's, Numba's or anything with `__dlpack__` or `__cuda_array_interface__`. NumPy arrays
    and others in host memory run in the interpreter, slowly and under supervision. ValueError or TypeError, before
    anything is launched, names the argument and prints the values."""
    causal, scale = options(causal, scale)
    return _solve(stream, (q, k, v, out, None), (causal, scale, layout, return_lse, family))


@planned("q k v", "out lse")
def _solve(q, k, v, out, lse, causal, scale, layout, with_lse, family) -> Plan:
    """How forward does calls of this form at these addresses; lse is never given."""
    problem = check(q, k, v, out, causal=causal, scale=scale, layout=layout)
    make = {} if out else {"out": (problem.out_shape, problem.dtype)}
    if with_lse:
        make["lse"] = problem.lse_shape, "float32"
    if problem.trivial:
        made = {name: c_ordered(*what, problem.device) for name, what in make.items()}
        prepare = functools.partial(_fill, {"out": out.form} | made if out else made)
    else:
        given = [array.pointer for array in (q, k, v, out) if array]
        prepare = _plan(problem, with_lse, piece(problem, *given), family).prepare
    return Plan(prepare, make, ("out", "lse") if with_lse else ("out",))


def _fill(forms: dict[str, Form], stream: int, *addresses: int) -> Callable[[], None]:
    """A function for calls in which no query sees a key: out is 0 and lse, if wanted, -inf."""
    values = zip(("out", "lse"), addresses[-2:], (0, -math.inf))
    targets = [(at(address, forms[name]), value) for name, address, value in values if name in forms]

    def run():
        for target, value in targets:
            fill(target, value, stream)

    return run


def choose(problem: Placed, bytes_at_once: int, family: str | None, member: str = "forward") -> str:
    """The family that serves a problem of attention.`member`: the one asked for; by default Hopper's, on Hopper if TMA can
    address the arrays, and else sm_80's. In the interpreter both run. ValueError: this GPU or these arrays are not for it."""
    if family not in (None, *FAMILIES):
        raise ValueError(f"family: must be None or one of {FAMILIES}: {family=}")
    gpu, addressable = None if problem.device is None else device(problem.device), bytes_at_once == PIECES[0]
    if gpu and not supported(gpu.capability):
        raise ValueError(f"attention.{member}: runs on GPUs since Ampere (sm_80); the arrays lie on {gpu}")
    hopper_runs = gpu is None or gpu.capability[0] == 9
    if family == "sm_90" and not hopper_runs:
        raise ValueError(f"family: sm_90 runs on Hopper; the arrays lie on {gpu}: {family=} (the default, None, runs there)")
    if family == "sm_90" and not addressable:
        raise ValueError(
            f"family: sm_90 takes addresses and strides that are multiples of {PIECES[0]} bytes; "
            f"these are of {bytes_at_once}: {family=} (the default, None, takes them)"
        )
    return family or ("sm_90" if hopper_runs and addressable else "sm_80")


@functools.lru_cache(FORMS)
def _plan(problem: Problem, with_lse: bool, bytes_at_once: int, family: str | None):
    """The launch that solves problems of this form: all that is left to say is the stream and five addresses. Where it runs
    is settled here, too, so TILES_INTERPRET is read when a form is first seen."""
    tma, wanted = choose(problem, bytes_at_once, family) == "sm_90", (problem.head_dim, DTYPES[problem.dtype], problem.causal)
    room = ampere.LARGE if problem.device is None else device(problem.device).shared_bytes
    config: hopper.Config | ampere.Config = (
        hopper.config_for(*wanted, problem.seqlen_kv) if tma else ampere.config_for(*wanted, room, bytes_at_once)
    )
    kernel, smem = (hopper if tma else ampere).make(config)

    def array(length, heads, strides):
        shape = problem.batch, length, heads, problem.head_dim
        return at(0, form(shape, strides, problem.dtype, problem.device, config.dtype.itemsize))

    def tiled(tile, *place):
        return tensor(array(*place), tile, rows=1, cols=3) if tma else array(*place)

    pairs, blocks = problem.batch * problem.heads_q, -(-problem.seqlen_q // config.rows)
    lse_shape = problem.lse_shape if with_lse else (*problem.lse_shape[:2], 0)  # stores outside an array are left out
    scale = problem.scale * LOG2_E
    grid, at_once = pairs * blocks, processors(problem.device)
    if config.persistent:
        grid = min(grid, at_once)
    nbytes = 2 * problem.seqlen_kv * problem.head_dim * config.dtype.itemsize / problem.group
    band = band_of(grid, at_once, nbytes, cache(problem.device))
    return launch(kernel, grid, config.threads, shared=smem).bind(
        tiled(config.query, problem.seqlen_q, problem.heads_q, problem.q_strides),
        tiled(config.key, problem.seqlen_kv, problem.heads_kv, problem.k_strides),
        tiled(config.key, problem.seqlen_kv, problem.heads_kv, problem.v_strides),
        array(problem.seqlen_q, problem.heads_q, problem.out_strides),
        at(0, c_ordered(lse_shape, "float32", problem.device)),
        problem.seqlen_q,
        problem.seqlen_kv,
        blocks,
        problem.heads_q,
        pairs,
        band,
        problem.group,
        scale,
        hopper.SLACK / scale,
    )
