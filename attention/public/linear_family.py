"""attention.linear and the members of its family that have names of their own: retention, lightning, gla. They differ in their
decays.

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
import inspect
import math
from collections.abc import Callable
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import numpy as np

from tiles.calls import jax_call, torch_op
from tiles.calls.plan import Plan, return_none
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema
from tiles.calls.torch_op import imported_module
from tiles.launching.arrays import Operand
from tiles.launching.frameworks import Framework, describe, placed, without_grad
from tiles.launching.launch import kernel_for

from ..families import choose_family, uses_hopper_kernels
from ..kernels.recurrent import compose_final_state
from ..names import suggests_argument_names
from ..options import check_flag, check_number
from ..plans.recurrent import recurrent_checks, recurrent_chunks, token_loop
from ..plans.recurrent.chunk_states import STORED, check_chunk_states, check_memory, choose_memory, merge_chunks
from ..plans.recurrent.gla_chunks import plan_gla_chunks, serves_gla_chunks
from ..plans.recurrent.raw_inputs import (
    NO_RAW_GRADIENT,
    NOT_RAW,
    RAW_GATES,
    RawOptions,
    by_tma,
    formula_arrays,
    gate_operand,
    is_raw,
    prepare_rows,
    split_raw,
)
from ..plans.recurrent.recurrent_checks import NO_DT_OPTIONS
from ..plans.recurrent.recurrent_chunks import SEGMENT_RESULTS
from ..plans.requires_grad import recurrent_autograd, refuse_with_gradients, requires_grad
from .linear_gradients import LINEAR_DERIVATIVE

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable)

TOKENS = """
    q           (batch, seqlen, heads_k, key_dim)                               tile
    k           (batch, seqlen, heads_k, key_dim)                               tile
    v           (batch, seqlen, heads, value_dim)                               tile
    decay       (heads)|(batch, seqlen, heads)|(batch, seqlen, heads, key_dim)  log   optional
    cu_seqlens  (ends)                                                          ends  optional
"""
STATES = """
    initial_state  (sequences, heads, key_dim, value_dim)  float32  optional
    initial_z      (sequences, heads, key_dim)             float32  optional
    out            (batch, seqlen, heads, value_dim)       tile     output
    state          (sequences, heads, key_dim, value_dim)  float32  output  return_state
    final_z        (sequences, heads, key_dim)             float32  output  return_state  normalize
"""
COMPOSED = """
    initial_state  (sequences, heads, value_dim, key_dim)  float32  optional
    decay          (sequences, heads, 1)                   float32  updated
    final_state    (sequences, heads, value_dim, key_dim)  float32  updated
"""
CHUNK_STATES = "chunk_states    (batch, chunks, heads, value_dim, key_dim)  tile     output  return_chunk_states  memory:states"
LINEAR = Schema("linear", TOKENS + STATES + CHUNK_STATES, chunks=recurrent_chunks.count_chunks)
SEGMENTS = Schema("linear_segments", TOKENS)
COMPOSED_STATES = Schema("linear_composed_states", SEGMENT_RESULTS + COMPOSED)
RAW_LINEAR = Schema("linear_raw", TOKENS + RAW_GATES + STATES)
OUTPUTS_FROM_SEGMENTS = Schema(
    "linear_outputs_from_segments", TOKENS + SEGMENT_RESULTS + STATES + CHUNK_STATES, chunks=recurrent_chunks.count_chunks
)


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
    return_chunk_states: bool = False,
    normalize: bool = False,
    qk_l2norm: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    memory: str = "states",
    out: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """Causal linear attention with decay. For every sequence and head, and its tokens t,

        S_t = exp(decay_t) S_(t-1) + k_t v_t^T        o_t = scale S_t^T q_t

    q, k: (B, S, Hk, Dk). v, out: (B, S, H, Dv). For layout="bhsd" sequence and head are swapped, in decay, too. bfloat16 or
    float16. Dk and Dv: multiples of 16 up to 256; 64 and 128 are fast. Hk divides H, and value head h reads key head
    h // (H // Hk). Any lengths.

    decay: log decays, never positive (-inf sets the state to 0), in float32, bfloat16 or float16: None; (H,), the same for
    all tokens; (B, S, H), for each token; or (B, S, H, Dk), for each token and channel of the keys. Or a gate as a layer
    projects it, attention.gates.softplus(a, A_log, dt_bias) and its like. scale: Dk^-1/2 by default. qk_l2norm: q and k are
    divided by their L2 norms first, sqrt(sum(x^2) + 1e-6).
    initial_state: (B, H, Dk, Dv) float32, 0 by default. out: written in place instead of a new array.

    normalize: o_t is divided by scale z_t . q_t + 1e-10, where z_t is the sum of the keys so far, decayed as S_t is. Then
    initial_state is a pair (S, z), and so is the returned state; z is (B, H, Dk).

    cu_seqlens: (N + 1,) int32 or int64, on q's device: N packed sequences in a batch of 1, sequence n from cu_seqlens[n] to
    cu_seqlens[n + 1]; states are (N, H, Dk, Dv). It must ascend from 0 to S. For arrays in host memory this is checked, and so
    is that no decay is above 0; on a GPU only with TILES_CHECK=1, which makes the call wait for the device. Without a check,
    tokens after cu_seqlens[-1] are padding: they are not read, and their outputs are 0.

    memory: what forward stores for the backward pass. "states": in training, by torch's autograd or JAX's, the states before
    each chunk of 64 tokens, (B, S / 64, H, Dv, Dk) in q's dtype, for gradients that read them: on Hopper, Dk and Dv up to 128;
    with decays of channels, float32 ones, Dk above 64 and normalize=False. "recompute": nothing, and the backward pass computes
    the states again. With H = Hk and Dk = Dv = 128 they are two thirds as large as q, k and v. return_chunk_states: return
    them, too, for linear_backward.

    Returns `out`, the same kind of array as q, or with return_state=True `(out, state)`. state is a new float32
    array (B, H, Dk, Dv), C-ordered: that of each sequence after its last token. With return_chunk_states=True the states before
    chunks come last. Of packed sequences, the chunk of sequence n that begins at token t has the index t // 64 + n; what other
    indices hold is undefined.

    float16: scores, scale q . k, and the elements of states are rounded to float16. Beyond 65504 they are infinite and outputs
    NaN, for example after 65504 tokens of keys and values that are all 1. bfloat16 has float32's range. With decays of
    channels, elements of float16 queries and keys must stay below 32 where a channel decays by exp(-15) in a chunk of 64
    tokens.

    Sequences are processed in chunks of 64 tokens, on tensor cores: on Hopper with tiles loaded by TMA; on other GPUs since
    Ampere, and if addresses or strides are not multiples of 16 bytes, with copies by cp.async. On Hopper arrays that TMA cannot
    read are copied first where decays are of channels. With decays of channels, calls with normalize=True, and calls with Dk
    above 128 on GPUs that are not Hopper, are computed token by token: correct, and slow. Chunks in which a channel decays by
    more than exp(-119) in 16 tokens, or exp(-13) in float16, or from one 16 tokens to the next by more than exp(-87), take 1.5
    times as long, on Hopper 2.3 times.

    Arrays, `stream`, `family` ("sm_80" is cp.async) and errors are those of attention.forward. out
    and state have gradients, in torch and JAX: `linear_backward`. flash-linear-attention's names: attention.compat.fla."""
    normalize, return_state = check_flag("normalize", normalize), check_flag("return_state", return_state)
    return_chunk_states = check_flag("return_chunk_states", return_chunk_states)
    check_memory(memory)
    initial_states = initial_state if isinstance(initial_state, tuple) else (initial_state,)
    raw = NOT_RAW
    if is_raw(decay, None, qk_l2norm):
        q, k, decay, _, gate, raw = split_raw(
            q, k, decay, None, check_flag("qk_l2norm", qk_l2norm), layout, (v, *initial_states)
        )
    states = recurrent_checks.split_state("initial_state", initial_state, normalize)
    options = check_number("scale", scale), normalize, return_state, family
    if requires_grad(*(differentiable := (q, k, v, decay, *initial_states))) or torch_op.is_mapped_with_grad(differentiable):
        refuse_with_gradients(out=out, stream=stream, return_chunk_states=return_chunk_states or None)
        inputs, memory = (q, k, v, decay, cu_seqlens, *states), choose_memory(memory, q, v, decay, normalize, family)
        results = recurrent_autograd().call_with_gradients("linear", inputs, (*options, False, memory), layout)
        return (results[0], results[1:]) if return_state and normalize else results
    results_to = out, None, None
    if raw is NOT_RAW:
        if not torch_op.is_compiling() and any(map(jax_call.is_jax_tracer, differentiable)):
            memory = choose_memory(memory, q, v, decay, normalize, family)
        memory_options = return_chunk_states, STORED if return_chunk_states else memory
        results = _linear(stream, (q, k, v, decay, cu_seqlens, *states, *results_to, None), (*options, *memory_options), layout)
    elif return_chunk_states:
        raise NotImplementedError("return_chunk_states: takes decays, not gates as a layer projects them, and no qk_l2norm")
    else:
        results = _linear_raw(stream, (q, k, v, decay, cu_seqlens, *gate, *states, *results_to), (*options, *raw), layout)
    return (results[0], results[1:3], *results[3:]) if return_state and normalize else results


# ---- members: functions of linear's arguments ----------------------------------------------------------------------
class LinearArguments(TypedDict, total=False):
    """The arguments of linear besides q, k, v and decay."""

    scale: float | None
    initial_state: Any
    return_state: bool
    return_chunk_states: bool
    normalize: bool
    qk_l2norm: bool
    cu_seqlens: Any
    layout: str
    memory: str
    out: Any
    stream: Any
    family: str | None


def _member(function: F) -> F:
    """Decorator of a function that passes LinearArguments to linear: it has their defaults."""
    return suggests_argument_names(function, {name: x.default for name, x in inspect.signature(linear).parameters.items()})


@_member
def retention(q: Any, k: Any, v: Any, **arguments: "Unpack[LinearArguments]") -> Any:
    """Retention (Sun et al. 2023): `linear` with a decay of log(1 - 2^(-5 - h)) for head h. All other arguments are those of
    linear.

    flash-linear-attention's chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens) has the same
    decays, default scale and state layout; its output_final_state is return_state here. The decays are copied to a GPU once:
    call it once before you capture a CUDA graph."""
    decay = _head_decays(q, v, arguments.get("layout", "bshd"), lambda h, heads, log1p: log1p(-(2.0 ** (-5 - h))))
    return linear(q, k, v, decay=decay, **arguments)


@_member
def lightning(q: Any, k: Any, v: Any, layer: int, layers: int, **arguments: "Unpack[LinearArguments]") -> Any:
    """Lightning attention (Qin et al. 2024): `linear` with a decay of -8 h / H (1 - layer / layers) for head h of H. All other
    arguments are those of linear.

    flash-linear-attention's chunk_lightning_attn(q, k, v, layer_idx, num_layers, scale, ...) has the same decays, default
    scale and state layout; its layer_idx, num_layers and output_final_state are layer, layers and return_state here. The
    decays are copied to a GPU once: call it once before you capture a CUDA graph."""
    if not (isinstance(layer, Integral) and isinstance(layers, Integral) and 0 <= layer <= layers > 0):
        raise ValueError(f"layer: must be an integer from 0 to layers, which is 1 or more: {layer=}, {layers=}")
    rate = 8 * (1 - layer / layers)
    decay = _head_decays(q, v, arguments.get("layout", "bshd"), lambda h, heads, log1p: -rate * h / heads)
    return linear(q, k, v, decay=decay, **arguments)


@_member
def gla(q: Any, k: Any, v: Any, decay: Any, **arguments: "Unpack[LinearArguments]") -> Any:
    """Gated linear attention (Yang et al. 2024): `linear` with a decay (B, S, H, Dk) for each token and channel. All other
    arguments are those of linear.

    flash-linear-attention's chunk_gla(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens) has the same default
    scale and state layout; its g and output_final_state are decay and return_state here."""
    shape = decay.shape if hasattr(decay, "shape") else describe(decay, "decay").shape
    if len(shape) != 4:
        raise ValueError(
            f"decay: must have an axis of channels (attention.linear takes decays without one): decay.shape={tuple(shape)}"
        )
    return linear(q, k, v, decay=decay, **arguments)


@LINEAR_DERIVATIVE.make_program(LINEAR)
def _linear(
    problem: Problem,
    scale: float | None,
    normalize: bool,
    return_state: bool,
    family: str | None,
    return_chunk_states: bool,
    memory: str,
) -> Plan:
    """The Plan of a call of linear. The schema's `state`, `final_z` and `chunk_states` are results, which a caller cannot
    pass."""
    chunk_states = None
    if return_chunk_states and memory == STORED:
        check_chunk_states(problem)
        chunk_states = merge_chunks(problem["chunk_states"])
    return plan_linear(problem, scale, normalize, return_state, family, NOT_RAW, chunk_states)


@program(RAW_LINEAR, no_gradient=NO_RAW_GRADIENT)
def _linear_raw(
    problem: Problem, scale: float | None, normalize: bool, return_state: bool, family: str | None, raw: RawOptions
) -> Plan:
    """The Plan of a call of linear with raw inputs."""
    return plan_linear(problem, scale, normalize, return_state, family, raw)


def plan_linear(
    problem: Problem,
    scale: float | None,
    normalize: bool,
    return_state: bool,
    family: str | None,
    raw: RawOptions,
    chunk_states: Operand | None = None,
) -> Plan:
    """The Plan of a call of linear. raw: the formulas that kernels apply to raw inputs. chunk_states: the array to store the
    states before chunks in, or None."""
    recurrent_checks.check_extents(problem)
    scale, by_channel = recurrent_checks.resolve_scale(problem, scale), recurrent_checks.has_channel_decay(problem)
    batch, length, heads, value_dim = problem("batch", "seqlen", "heads", "value_dim")
    if recurrent_checks.has_nothing_to_compute(problem, return_state):
        choose_family(problem, family, tma=True)  # for its errors; arrays without elements have no address
        return Plan([])
    recurrent_checks.check_normalizer(problem, family, normalize)
    arrays = recurrent_checks.kernel_arrays(problem, return_state)
    z = {"gInitialState": problem["initial_z"], "gFinalState": problem["final_z"] if return_state and normalize else None}
    gates = gate_operand(problem)
    tma = uses_hopper_kernels(problem, family, by_tma(problem, "out") if by_channel else None)
    on_hopper = by_channel and tma
    by_chunks = not normalize and (tma or serves_gla_chunks(problem)) if by_channel else True
    if chunk_states and not (tma and by_chunks) and by_channel:
        raise ValueError("return_chunk_states: with decays of channels takes arrays that TMA reads, and normalize=False")
    if batch * length and by_chunks:
        arrays |= {"gGates": gates, "gO": problem["out"]} | formula_arrays(problem)
        states = {name: arrays[name] for name in ("gInitialState", "gFinalState")}
        arrays |= {name: x and x.permuted(recurrent_chunks.SWAP_STATE_AXES) for name, x in states.items()}
        scratch = recurrent_chunks.ScratchAllocator(problem)
        row_copies, copies = prepare_rows(problem, scratch, raw.l2norm and not on_hopper, on_hopper, on_hopper)
        arrays |= copies
        if by_channel and not tma:
            steps = plan_gla_chunks(problem, arrays, scale, raw.gate, scratch)
            return Plan([*row_copies, *steps], scratch.shapes)
        if by_channel:
            steps, shapes = recurrent_chunks.plan_channel_decay(
                problem, arrays, scale, raw.gate, scratch, raw.l2norm, chunk_states
            )
            return Plan([*row_copies, *steps], shapes)
        vector_bytes = 0 if tma else problem.bytes_at_once()
        if problem["local_state"]:
            arrays |= {"gLocalStates": problem["local_state"], "gTotalDecays": problem["total_decay"]}
        normalizer = z if normalize else None
        steps, shapes = recurrent_chunks.plan_token_decay(
            problem, arrays, scale, vector_bytes, NO_DT_OPTIONS, normalizer, raw.gate, scratch, chunk_states
        )
        return Plan([*row_copies, *steps], shapes)
    arrays |= {"gDecay": gates, "gOut": problem["out"], "gInitialZ": z["gInitialState"], "gFinalZ": z["gFinalState"]}
    return Plan([token_loop.launch(problem, arrays, scale, normalize, raw=raw)])


def segment_states(
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    cu_seqlens: Any = None,
    family: str | None = None,
    reverse: bool = False,
) -> Any:
    """(local_state, total_decay) of the P segments into which `linear` cuts each sequence. local_state: the state after the
    segment if the state before it is 0, transposed, (N, H, P, Dv, Dk). total_decay: log2 of the decay of a state by the whole
    segment, (N, H, P, 1). reverse=True: the gradient of the state before the segment if that after it is 0, k being the queries
    and v the gradient of the outputs, times the scale; the last segment comes first. NotImplementedError, ValueError: decays of
    channels, Dk above 128."""
    return _segment_states(None, (q, k, v, decay, cu_seqlens), (reverse, family))


def compose_segment_states(local_state: Any, total_decay: Any, initial_state: Any, decay: Any, final_state: Any) -> None:
    """Write the state after all of these segments to `final_state` (N, H, Dv, Dk), and their decay to `decay` (N, H, 1).
    initial_state: the state before them, 0 if None. All arrays are float32."""
    _compose_segment_states(None, (local_state, total_decay, initial_state, decay, final_state), ())


@program(COMPOSED_STATES)
def _compose_segment_states(problem: Problem) -> Plan:
    """The Plan of a call of compose_segment_states."""
    sequences, heads, num_segments, columns, key_dim = problem("sequences", "heads", "segments", "value_dim", "key_dim")
    rows, cols = -(-columns // compose_final_state.TILE.rows), -(-key_dim // compose_final_state.TILE.cols)
    arrays = {"gLocalStates": problem["local_state"], "gTotalDecays": problem["total_decay"], "gDecay": problem["decay"]}
    arrays |= {"gInitialState": problem["initial_state"], "gFinalState": problem["final_state"]}
    kernel = kernel_for(compose_final_state, compose_final_state.Config("initial_state" in problem), problem.device)
    grid = sequences * heads * rows * cols
    return Plan([kernel.bind(grid, heads=heads, segments=num_segments, rows=rows, cols=cols, **arrays)], (), return_none)


def outputs_from_segments(
    q: Any,
    k: Any,
    v: Any,
    local_state: Any,
    total_decay: Any,
    *,
    decay: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    family: str | None = None,
    return_chunk_states: bool = False,
) -> Any:
    """The output of `linear`, computed from the results of segment_states: only the second pass is launched. With
    return_chunk_states (out, chunk_states), as linear returns them."""
    arrays = q, k, v, decay, cu_seqlens, local_state, total_decay, initial_state, *[None] * 5
    options = check_number("scale", scale), False, False, family, return_chunk_states, STORED
    return _outputs_from_segments(None, arrays, options)


@program(SEGMENTS)
def _segment_states(problem: Problem, reverse: bool, family: str | None) -> Plan:
    """The Plan of a call of segment_states."""
    recurrent_checks.check_extents(problem)
    if recurrent_checks.has_channel_decay(problem):
        raise NotImplementedError("decay: must have no axis of channels, with which sequences are not cut into segments")
    vector_bytes = 0 if uses_hopper_kernels(problem, family) else problem.bytes_at_once()
    arrays = recurrent_checks.kernel_arrays(problem, False) | {"gGates": problem["decay"], "gO": None}
    steps, scratch = recurrent_chunks.plan_segment_states(problem, arrays, vector_bytes, reverse=reverse)
    return Plan(steps, scratch, lambda arrays: tuple(arrays[-2:]))


_outputs_from_segments = program(OUTPUTS_FROM_SEGMENTS)(_linear.planner)


# ---- decays that are functions of a head's index --------------------------------------------------------------------
def _head_decays(q: Any, v: Any, layout: str, decay: Callable[[Any, int, Callable], Any]) -> Any:
    """decay(h, heads, log1p) for each of v's heads, as an array of q's framework."""
    axis = -3 if layout == "bhsd" else -2
    if torch_op.is_traced(q):  # the graph computes them: a copy from the host could not be captured
        torch, heads = imported_module("torch"), v.shape[axis]
        return decay(torch.arange(heads, dtype=torch.float32, device=q.device), heads, torch.log1p)
    on_tracers = jax_call.is_jax_tracer(q) or jax_call.is_jax_tracer(v)
    shape = v.shape if on_tracers else describe(without_grad(v), "v").shape
    heads = shape[axis] if len(shape) == 4 else 0
    numbers = tuple(decay(h, heads, math.log1p) for h in range(heads))
    if on_tracers:
        return np.array(numbers, np.float32)
    queries = describe(without_grad(q), "q")
    return _constant(queries.kind, queries.kind.placement(queries), queries.device, numbers)


@functools.lru_cache
def _constant(kind: Framework, placement: Any, ordinal: int | None, numbers: tuple[float, ...]) -> Any:
    """A float32 array of these numbers, of this framework and on this device. Equal arguments get the same array."""
    return placed(np.array(numbers, np.float32), kind, placement, ordinal)
