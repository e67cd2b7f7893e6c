"""attention.linear and its named members: retention, lightning, gla. They differ in where the decays come from.

| here                          | flash-linear-attention          | S_t =                             |
| ----------------------------- | ------------------------------- | --------------------------------- |
| linear(q, k, v)               | chunk_linear_attn               | S + k v^T                         |
| linear(.., decay=(H,))        | chunk_simple_gla(.., g_gamma=)  | exp(decay[h]) S + k v^T           |
| retention(q, k, v)            | chunk_retention                 | (1 - 2^(-5 - h)) S + k v^T        |
| lightning(q, k, v, i, n)      | chunk_lightning_attn            | exp(-8 h / H (1 - i / n)) S + k v^T |
| linear(.., decay=(B, S, H))   | chunk_simple_gla(.., g=)        | exp(decay[b, t, h]) S + k v^T     |
| gla(q, k, v, decay)           | chunk_gla(q, k, v, g)           | diag(exp(decay[b, t, h])) S + k v^T |

| here                             | flash-linear-attention                                              |
| -------------------------------- | ------------------------------------------------------------------- |
| scale: Dk^-1/2 by default        | the same                                                            |
| initial_state, return_state=True | initial_state, output_final_state=True: (N, H, Dk, Dv) float32, too |
| with normalize: pairs (S, z)     | the same, but z is (N, 1, H, Dk) there and (N, H, Dk) here          |
| normalize=False by default       | normalize=True by default                                           |
| layout="bshd" or "bhsd"          | (B, T, H, D)                                                        |
"""

import functools
import math
import sys
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np

from tiles import jax_call, torch_op
from tiles.arrays import ALIGNMENT
from tiles.frameworks import Kind, describe, placed
from tiles.launch import kernel_for
from tiles.plan import Plan, nothing
from tiles.program import program
from tiles.schema import Problem, Schema

from ..families import choose_family
from ..names import suggests_argument_names
from ..options import check_flag, check_number
from . import chunks, rules, token_plan
from .chunks import SEGMENT_RESULTS, join_rows
from .kernels import segments

TOKENS = """
    q              BSGK        tile
    k              BSGK        tile
    v              BSHV        tile
    decay          H|BSH|BSHK  log      optional
    cu_seqlens     E           ends     optional
"""
STATES = """
    initial_state  NHKV        float32  optional
    initial_z      NHK         float32  optional
    out            BSHV        tile     made
    state          NHKV        float32  made      return_state
    final_z        NHK         float32  made      return_state  normalize
"""
COMPOSED = """
    begin  NHVK   float32  optional
    m      NHO    float32  updated
    left   NHVK   float32  updated
"""
LINEAR, SEGMENTS = Schema("linear", join_rows(TOKENS, STATES)), Schema("linear_segments", TOKENS)
COMPOSED_STATES = Schema("linear_composed_states", join_rows(SEGMENT_RESULTS, COMPOSED))
OUTPUTS_FROM_SEGMENTS = Schema("linear_outputs_from_segments", join_rows(TOKENS, SEGMENT_RESULTS, STATES))


@suggests_argument_names
def linear(
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    return_state: bool = False,
    normalize: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """Causal linear attention with decay. For every sequence and head, over its tokens t,

        S_t = exp(decay_t) S_(t-1) + k_t v_t^T        o_t = scale S_t^T q_t

    q, k: (B, S, Hk, Dk). v, out: (B, S, H, Dv). For layout="bhsd" sequence and head are swapped, in decay, too. bfloat16 or
    float16. Dk and Dv: multiples of 16 up to 256; 64 and 128 are fast. Hk divides H, and value head h reads key head
    h // (H // Hk). Any lengths.

    decay: logarithms, never positive (-inf forgets all), in float32, bfloat16 or float16: None; (H,), the same for all
    tokens; (B, S, H), for each token; or (B, S, H, Dk), for each token and channel of the keys. scale: Dk^-1/2 by default.
    initial_state: (B, H, Dk, Dv) float32, 0 by default. out: written in place instead of a new array.

    normalize: o_t is divided by scale z_t . q_t + 1e-10, where z_t is the sum of the keys so far, decayed as S_t is. Then
    initial_state is a pair (S, z), and so is the returned state; z is (B, H, Dk).

    cu_seqlens: (N + 1,) int32 or int64, on q's device: N sequences lie one after the other in a batch of 1, sequence n from
    cu_seqlens[n] to cu_seqlens[n + 1]; states are (N, H, Dk, Dv). It must ascend from 0 to S. For arrays in host memory this
    is checked, and so is that no decay is above 0; on a GPU with TILES_CHECK=1, where the call then waits for what it reads.
    Where nobody checks, tokens behind the last sequence belong to nobody: they are not read, and their outputs are 0.

    Returns `out`, the same kind of array as q, or with return_state=True `(out, state)`. state is a new float32
    array (B, H, Dk, Dv), C-ordered: that of each sequence after its last token.

    float16: scores scale q . k and the elements of states are read as float16. Beyond 65504 they are infinite and outputs NaN,
    as after 65504 tokens of keys and values that are all 1. bfloat16 has float32's range. With decays of channels elements of
    float16 queries and keys must stay below 32 where a channel decays by exp(-15) in a chunk of 64 tokens.

    Sequences are cut into chunks of 64 tokens, which the tensor cores multiply: on Hopper with tiles loaded by TMA; on other
    GPUs since Ampere, and where addresses and strides are not multiples of 16 bytes, with copies by cp.async. Decays of
    channels need the former, and normalize=False; otherwise they are computed token by token: correct, and slow.

    Arrays, `stream`, `family` ("sm_80" is cp.async, or token by token) and errors are those of attention.forward. The head
    of this file has flash-linear-attention's names next to these."""
    normalize, return_state = check_flag("normalize", normalize), check_flag("return_state", return_state)
    arrays = q, k, v, decay, cu_seqlens, *pair(initial_state, normalize), out, None, None
    found = _linear(stream, arrays, (check_number("scale", scale), normalize, return_state, family), layout)
    return (found[0], found[1:]) if return_state and normalize else found


@suggests_argument_names
def retention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    return_state: bool = False,
    normalize: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """Retention (Sun et al. 2023): `linear` with a decay of log(1 - 2^(-5 - h)) for head h. All other arguments are those of
    linear.

    flash-linear-attention's chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens) has the same
    decays, default scale and state layout; its output_final_state is return_state here. The decays are copied to a GPU once:
    call it once before you capture a CUDA graph."""
    decay = _of_heads(q, v, layout, lambda h, heads, log1p: log1p(-(2.0 ** (-5 - h))))
    return linear(
        q, k, v, decay=decay, scale=scale, initial_state=initial_state, return_state=return_state, normalize=normalize,
        cu_seqlens=cu_seqlens, layout=layout, out=out, stream=stream, family=family,
    )  # fmt: skip


@suggests_argument_names
def lightning(
    q: Any,
    k: Any,
    v: Any,
    layer: int,
    layers: int,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    return_state: bool = False,
    normalize: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """Lightning attention (Qin et al. 2024): `linear` with a decay of -8 h / H (1 - layer / layers) for head h of H. All other
    arguments are those of linear.

    flash-linear-attention's chunk_lightning_attn(q, k, v, layer_idx, num_layers, scale, ...) has the same decays, default
    scale and state layout; its layer_idx, num_layers and output_final_state are layer, layers and return_state here. The
    decays are copied to a GPU once: call it once before you capture a CUDA graph."""
    if not (isinstance(layer, Integral) and isinstance(layers, Integral) and 0 <= layer <= layers > 0):
        raise ValueError(f"layer: must be an integer from 0 to layers, of which there is one or more: {layer=}, {layers=}")
    slope = 8 * (1 - layer / layers)
    decay = _of_heads(q, v, layout, lambda h, heads, log1p: -slope * h / heads)
    return linear(
        q, k, v, decay=decay, scale=scale, initial_state=initial_state, return_state=return_state, normalize=normalize,
        cu_seqlens=cu_seqlens, layout=layout, out=out, stream=stream, family=family,
    )  # fmt: skip


@suggests_argument_names
def gla(
    q: Any,
    k: Any,
    v: Any,
    decay: Any,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    return_state: bool = False,
    normalize: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """Gated linear attention (Yang et al. 2024): `linear` with a decay (B, S, H, Dk) for each token and channel. All other
    arguments are those of linear.

    flash-linear-attention's chunk_gla(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens) has the same default
    scale and state layout; its g and output_final_state are decay and return_state here."""
    shape = decay.shape if hasattr(decay, "shape") else describe(decay, "decay").shape
    if len(shape) != 4:
        raise ValueError(f"decay: must have an axis of channels (linear takes those that have none): decay.shape={shape}")
    return linear(
        q, k, v, decay=decay, scale=scale, initial_state=initial_state, return_state=return_state, normalize=normalize,
        cu_seqlens=cu_seqlens, layout=layout, out=out, stream=stream, family=family,
    )  # fmt: skip


@program(LINEAR)
def _linear(problem: Problem, scale: float | None, normalize: bool, return_state: bool, family: str | None) -> Plan:
    """The Plan of a call of linear. The schema's `state` and `final_z` are results, which a caller cannot give."""
    rules.check(problem)
    scale, by_channel = rules.scale_of(problem, scale), rules.by_channel(problem)
    batch, length, heads, value_dim = problem("BSHV")
    if rules.idle(problem, return_state):
        choose_family(problem, family, tma=True)  # which refuses what it refuses of other calls: nothing is read
        return Plan([])
    arrays = rules.arrays(problem, return_state)
    sums = {"gStart": problem["initial_z"], "gState": problem["final_z"] if return_state else None}
    tma = choose_family(problem, family) == "sm_90"
    gates_by_tma = tma and not normalize and problem.bytes_at_once("decay") == ALIGNMENT
    if batch * length and (not by_channel or gates_by_tma):
        arrays |= {"gGates": problem["decay"], "gO": problem["out"]}
        arrays |= {name: x and x.permuted(chunks.SWAPPED) for name, x in arrays.items() if name in ("gStart", "gState")}
        if by_channel:
            return Plan(*chunks.by_channel(problem, arrays, scale))
        piece = 0 if tma else problem.bytes_at_once()
        if problem["local"]:
            arrays |= {"gLocal": problem["local"], "gTotal": problem["total"]}
        steps, scratch = chunks.by_token(problem, arrays, scale, piece, normalizer=sums if normalize else None)
        return Plan(steps, scratch)
    if family == "sm_90" and batch * length:
        raise ValueError(
            f"family: sm_90 takes decays of channels whose address and strides are multiples of {ALIGNMENT} bytes, and no "
            f"normalize=True: {family=}, {normalize=}, decay.strides={problem.forms['decay'].strides}"
        )
    arrays |= {"gDecay": problem["decay"], "gOut": problem["out"], "gStartZ": sums["gStart"], "gStateZ": sums["gState"]}
    return Plan([token_plan.launch(problem, arrays, scale, normalize)])


def segment_states(q: Any, k: Any, v: Any, *, decay: Any = None, cu_seqlens: Any = None, family: str | None = None) -> Any:
    """(local, total): what the segments into which `linear` would cut the sequences do to a state. local: what each leaves of
    a state of 0, transposed, (N, H, P, Dv, Dk). total: the logarithm to the base 2 of the number by which it multiplies a
    state, (N, H, P, 1). NotImplementedError, ValueError: decays of channels, Dk above 128."""
    return _segments(None, (q, k, v, decay, cu_seqlens), (family,))


def compose_segment_states(local: Any, total: Any, begin: Any, m: Any, left: Any) -> None:
    """Write to `left` (N, H, Dv, Dk) the state after all of these segments, which begin with the state `begin`, or 0 if it is
    None, and to m (N, H, 1) the number by which they multiply a state. All arrays are float32."""
    _left(None, (local, total, begin, m, left), ())


@program(COMPOSED_STATES)
def _left(problem: Problem) -> Plan:
    """The Plan of a call of compose_segment_states."""
    sequences, heads, parts, columns, key_dim = problem("NHPVK")
    rows, cols = -(-columns // segments.TILE.rows), -(-key_dim // segments.TILE.cols)
    arrays = {f"g{name.title()}": problem[name] for name in COMPOSED_STATES.names}
    kernel = kernel_for(segments, segments.Config("begin" in problem), problem.device)
    grid = sequences * heads * rows * cols
    return Plan([kernel.bind(grid, heads=heads, segments=parts, rows=rows, cols=cols, **arrays)], (), nothing)


def outputs_from_segments(
    q: Any,
    k: Any,
    v: Any,
    local: Any,
    total: Any,
    *,
    decay: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    family: str | None = None,
) -> Any:
    """The output of `linear`, computed from what its segments leave (segment_states): only the second pass runs."""
    arrays = q, k, v, decay, cu_seqlens, local, total, initial_state, None, None, None, None
    return _outputs_from_segments(None, arrays, (check_number("scale", scale), False, False, family))


@program(SEGMENTS)
def _segments(problem: Problem, family: str | None) -> Plan:
    """The Plan of a call of segment_states."""
    rules.check(problem)
    if rules.by_channel(problem):
        raise NotImplementedError("decay: of channels has no segments")
    piece = 0 if choose_family(problem, family) == "sm_90" else problem.bytes_at_once()
    arrays = rules.arrays(problem, False) | {"gGates": problem["decay"], "gO": None}
    steps, scratch = chunks.of_segments(problem, arrays, piece)
    return Plan(steps, scratch, lambda every: tuple(every[-2:]))


_outputs_from_segments = program(OUTPUTS_FROM_SEGMENTS)(_linear.planner)


def pair(initial_state: Any, normalize: bool) -> tuple[Any, Any]:
    """(state, z) of initial_state as the caller gave it. z is None without `normalize`; both are None if nothing was given.
    TypeError: a pair is given where an array is needed, or an array where a pair is."""
    if initial_state is None or (not normalize and not isinstance(initial_state, tuple)):
        return initial_state, None
    if not normalize:
        raise TypeError("initial_state: must be an array, not a pair, which is for normalize=True")
    given = tuple(type(x).__name__ for x in initial_state) if isinstance(initial_state, tuple) else type(initial_state).__name__
    if not isinstance(given, tuple) or len(given) != 2 or "NoneType" in given:
        raise TypeError(f"initial_state: must be a pair (state, z) with normalize=True, not {given}")
    return initial_state


# ---- decays that follow from the number of a head ------------------------------------------------------------------
def _of_heads(q: Any, v: Any, layout: str, decay: Callable[[Any, int, Callable], Any]) -> Any:
    """decay(h, heads, log1p) for each of v's heads, as an array of q's kind."""
    axis = -3 if layout == "bhsd" else -2
    if torch_op.traced(q):  # in the graph they are computed, as a copy from the host would keep it from being captured
        torch, heads = sys.modules["torch"], v.shape[axis]
        return decay(torch.arange(heads, dtype=torch.float32, device=q.device), heads, torch.log1p)
    on_tracers = jax_call.tracing(q)
    shape = v.shape if on_tracers else describe(v, "v").shape
    heads = shape[axis] if len(shape) == 4 else 0
    numbers = tuple(decay(h, heads, math.log1p) for h in range(heads))
    if on_tracers:
        return np.array(numbers, np.float32)
    queries = describe(q, "q")
    return _constant(queries.kind, queries.kind.home(queries), queries.device, numbers)


@functools.lru_cache
def _constant(kind: Kind, home: Any, ordinal: int | None, numbers: tuple[float, ...]) -> Any:
    """A float32 array of these numbers, of this kind and in this place, NumPy's in host memory. It is made once and kept."""
    return placed(np.array(numbers, np.float32), kind, home, ordinal)
