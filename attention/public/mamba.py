"""attention.mamba2: the state-space duality of Mamba-2 (Dao and Gu 2024), which is linear attention under other names."""

import functools
import math
from numbers import Integral
from typing import Any

from tiles.calls import jax_call, torch_op
from tiles.calls.plan import Plan
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema
from tiles.launching.frameworks import describe

from ..families import choose_family, uses_hopper_kernels
from ..names import suggests_argument_names
from ..options import check_flag
from ..plans.recurrent import recurrent_checks, recurrent_chunks
from ..plans.recurrent.chunk_states import STORED, check_chunk_states, check_memory, choose_memory, merge_chunks
from ..plans.recurrent.packed_tokens import pack_batches
from ..plans.recurrent.recurrent_checks import MAMBA2_AXES, DtOptions
from ..plans.recurrent.recurrent_chunks import SEGMENT_RESULTS, count_chunks
from ..plans.requires_grad import recurrent_autograd, refuse_with_gradients, requires_grad
from .mamba_gradients import MAMBA2_DERIVATIVE

TOKENS = """
    x   (batch, seqlen, heads, value_dim)  tile
    dt  (batch, seqlen, heads)             real
    A   (heads)                            rate
    B   (batch, seqlen, heads_k, key_dim)  tile
    C   (batch, seqlen, heads_k, key_dim)  tile
"""
OTHERS = """
    D  (heads)|(heads, value_dim)         real  optional
    z  (batch, seqlen, heads, value_dim)  tile  optional
"""
STEPS = """
    dt_bias     (heads)  real  optional
    cu_seqlens  (ends)   ends  optional
"""
STATES = """
    initial_states  (sequences, heads, value_dim, key_dim)  float32  optional
    out             (batch, seqlen, heads, value_dim)       tile     output
    states          (sequences, heads, value_dim, key_dim)  float32  output  return_final_states
"""
CHUNK_STATES = "chunk_states    (batch, chunks, heads, value_dim, key_dim)  tile     output  return_chunk_states  memory:states"
make_schema = functools.partial(Schema, axis_names=MAMBA2_AXES)
MAMBA2 = make_schema("mamba2", TOKENS + OTHERS + STEPS + STATES + CHUNK_STATES, chunks=count_chunks)
SEGMENTS = make_schema("mamba2_segments", TOKENS + STEPS)
OUTPUTS_FROM_SEGMENTS = make_schema(
    "mamba2_outputs_from_segments", TOKENS + OTHERS + STEPS + SEGMENT_RESULTS + STATES + CHUNK_STATES, chunks=count_chunks
)


@suggests_argument_names
def mamba2(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    chunk_size: int | None = None,
    *,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Any = None,
    return_final_states: bool = False,
    return_chunk_states: bool = False,
    seq_idx: Any = None,
    cu_seqlens: Any = None,
    memory: str = "states",
    out: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """Mamba-2's scan. For every sequence and head h, g = h // (H // G), over its tokens t,

        dt_t = clip(softplus(dt_t + dt_bias[h]), dt_limit)          softplus with dt_softplus=True only
        S_t  = exp(dt_t A[h]) S_(t-1) + dt_t x_t B_t[g]^T
        y_t  = (S_t C_t[g] + D[h] x_t) silu(z_t)                    the last factor with z only

    This is linear(q=C, k=B, v=dt x, decay=dt A, scale=1) with a transposed state. In float16, products with dt are float32 and
    a state has an exponent of its own: if x, B, C, their products and the outputs are within the range of float16, dt x and
    states may be greater.

    x, z, out: (B, S, H, P). B, C: (B, S, G, N), where G divides H. All bfloat16 or all float16; P and N multiples of 16 up
    to 256. dt: (B, S, H); A, dt_bias: (H,); D: (H,) or (H, P); float32, bfloat16 or float16. A must not be positive.
    initial_states: (B, H, P, N) float32, 0 by default.

    | here                                | mamba_ssm's mamba_chunk_scan_combined                            |
    | ----------------------------------- | ---------------------------------------------------------------- |
    | x, dt, A, B, C, D, z, dt_bias       | the same                                                         |
    | dt_softplus=False                   | the same                                                         |
    | dt_limit=(0, inf), never negative   | the same                                                         |
    | chunk_size, of no effect: it is 64  | chunk_size                                                       |
    | initial_states, return_final_states | the same: (B, H, P, N)                                           |
    | seq_idx (B, S)                      | the same                                                         |
    | cu_seqlens (N + 1,), any sequences  | cu_seqlens with return_varlen_states                             |

    cu_seqlens: as in attention.linear, which also says when it and A are checked; there is then one state for each sequence.

    seq_idx: int32 or int64, the number of the sequence that each token belongs to. The state begins with 0 wherever the
    number changes, and the returned states are those of each batch's last sequence. The host reads it, which waits for the
    device, so torch.compile, jax.jit and CUDA graphs do not take it: cu_seqlens does the same without these limits.

    memory: as in attention.linear. In training forward stores the states before each chunk of 64 tokens, (B, S / 64, H, P, N)
    in x's dtype, on Hopper where P and N are at most 128; memory="recompute": the backward pass computes them again.
    return_chunk_states: return them, too, for mamba2_backward; not with seq_idx.

    out: written in place instead of a new array. Returns `out`, the same kind of array as x, or with
    return_final_states=True `(out, states)`, float32 (B, H, P, N). States before chunks come last. On GPUs since Ampere.
    Arrays, `stream`, `family` and errors are those of attention.forward. out and states have gradients, in torch and JAX:
    `mamba2_backward`."""
    if chunk_size is not None and not (isinstance(chunk_size, Integral) and chunk_size > 0):
        raise ValueError(f"chunk_size: must be a positive integer or None, and has no effect: {chunk_size=}")
    dt_options = recurrent_checks.make_dt_options(dt_softplus, dt_limit)
    flags = check_flag("return_final_states", return_final_states), family
    stored = check_flag("return_chunk_states", return_chunk_states), check_memory(memory)
    options = *dt_options, *flags, *stored
    if seq_idx is None:
        return _scan(stream, (x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_states, out), options)
    if return_chunk_states:
        raise ValueError("return_chunk_states: is not returned with seq_idx: pass cu_seqlens instead")
    if initial_states is not None or cu_seqlens is not None:
        raise ValueError("seq_idx: takes neither initial_states nor cu_seqlens: pass cu_seqlens instead, which takes both")
    batches = pack_batches(seq_idx, x, stream)
    x, dt, B, C, z, joined_out = map(batches.join, (x, dt, B, C, z, out), ("x", "dt", "B", "C", "z", "out"))
    if joined_out is not out and describe(joined_out, "out").pointer != describe(out, "out").pointer:
        raise ValueError(f"out: with seq_idx its batches must be contiguous in memory: out.shape={tuple(out.shape)}")
    results = _scan(stream, (x, dt, A, B, C, D, z, dt_bias, batches.cu_seqlens, None, joined_out), options)
    result = out if out is not None else batches.split(results[0] if return_final_states else results)
    return (result, batches.last_states(results[1])) if return_final_states else result


def _scan(stream: Any, arrays: tuple, options: tuple) -> Any:
    """The result of a call with these arrays, in the order of MAMBA2. torch's autograd records it if one of them requires
    grad."""
    *inputs, out = arrays
    x, _, _, B, *_ = inputs
    *others, family, returned, memory = options
    if requires_grad(*inputs) or torch_op.is_mapped_with_grad(inputs):
        refuse_with_gradients(out=out, stream=stream, return_chunk_states=returned or None)
        options = *others, family, False, choose_memory(memory, B, x, None, False, family)
        return recurrent_autograd().call_with_gradients("mamba2", tuple(inputs), options)
    if not torch_op.is_compiling() and any(map(jax_call.is_jax_tracer, inputs)):
        memory = choose_memory(memory, B, x, None, False, family)
    return _mamba2(stream, (*arrays, None, None), (*others, family, returned, STORED if returned else memory))


@MAMBA2_DERIVATIVE.make_program(MAMBA2)
def _mamba2(
    problem: Problem,
    dt_options: DtOptions,
    return_final_states: bool,
    family: str | None,
    return_chunk_states: bool,
    memory: str,
) -> Plan:
    """The Plan of a call of mamba2. The schema's `states` and `chunk_states` are results, which a caller cannot pass."""
    recurrent_checks.check_extents(problem, "B", "x")
    batch, length, heads, sequences = problem("batch", "seqlen", "heads", "sequences")
    if not (batch and length and heads):
        choose_family(problem, family, tma=True)  # for its errors; arrays without elements have no address
        if return_final_states and sequences and heads:
            raise ValueError(f"x: must have a token, for return_final_states=True: x.shape={problem.shape('x')}")
        return Plan([])
    arrays = {
        "gQ": problem["C"],
        "gK": problem["B"],
        "gV": problem["x"],
        "gZ": problem["z"],
        "gGates": problem["dt"],
        "gA": problem["A"],
        "gDtBias": problem["dt_bias"],
        "gD": problem["D"],
        "gCuSeqlens": problem["cu_seqlens"],
        "gInitialState": problem["initial_states"],
        "gFinalState": problem["states"] if return_final_states else None,
        "gO": problem["out"],
    }
    if problem["local_state"]:
        arrays |= {"gLocalStates": problem["local_state"], "gTotalDecays": problem["total_decay"]}
    vector_bytes = 0 if uses_hopper_kernels(problem, family) else problem.bytes_at_once()
    chunk_states = None
    if return_chunk_states and memory == STORED:
        check_chunk_states(problem, "B", "x")
        chunk_states = merge_chunks(problem["chunk_states"])
    steps, scratch = recurrent_chunks.plan_token_decay(
        problem, arrays, 1.0, vector_bytes, dt_options, chunk_states=chunk_states
    )
    return Plan(steps, scratch)


def segment_states(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    *,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    cu_seqlens: Any = None,
    family: str | None = None,
) -> Any:
    """(local_state, total_decay) of the segments into which `mamba2` cuts each sequence, as linear_family.segment_states
    returns them."""
    dt_options = recurrent_checks.make_dt_options(dt_softplus, dt_limit)
    return _segment_states(None, (x, dt, A, B, C, dt_bias, cu_seqlens), (*dt_options, family))


def outputs_from_segments(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    local_state: Any,
    total_decay: Any,
    *,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Any = None,
    cu_seqlens: Any = None,
    family: str | None = None,
    return_chunk_states: bool = False,
) -> Any:
    """The output of `mamba2`, computed from the results of segment_states: only the second pass is launched. With
    return_chunk_states (out, chunk_states), as mamba2 returns them."""
    arrays = x, dt, A, B, C, D, z, dt_bias, cu_seqlens, local_state, total_decay, initial_states, *[None] * 3
    options = *recurrent_checks.make_dt_options(dt_softplus, dt_limit), False, family, return_chunk_states, STORED
    return _outputs_from_segments(None, arrays, options)


@program(SEGMENTS)
def _segment_states(problem: Problem, dt_options: DtOptions, family: str | None) -> Plan:
    """The Plan of a call of segment_states."""
    recurrent_checks.check_extents(problem, "B", "x")
    arrays = {"gQ": problem["C"], "gK": problem["B"], "gV": problem["x"], "gCuSeqlens": problem["cu_seqlens"], "gO": None}
    arrays |= {
        "gGates": problem["dt"],
        "gA": problem["A"],
        "gDtBias": problem["dt_bias"],
        "gInitialState": None,
        "gFinalState": None,
    }
    vector_bytes = 0 if uses_hopper_kernels(problem, family) else problem.bytes_at_once()
    steps, scratch = recurrent_chunks.plan_segment_states(problem, arrays, vector_bytes, dt_options)
    return Plan(steps, scratch, lambda arrays: tuple(arrays[-2:]))


_outputs_from_segments = program(OUTPUTS_FROM_SEGMENTS)(_mamba2.planner)
