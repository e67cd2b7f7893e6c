"""attention.linear_step: one token of linear attention, the state read and written once.

    S = exp(decay) S;  v = beta (v - S^T k);  S = S + k v^T;  o = scale S^T q

A warp holds all rows of some columns of a head's state in its registers, so sums over the rows stay inside it and no warp
waits for another. All that takes time is moving the state: 16 bytes a lane, everything on its way before anything is used.
"""

import functools
from dataclasses import dataclass
from typing import Any

from numba import cuda

from ops import col_sum, exp, fma, load, split, store
from tiles import fp32, launch, rt
from tiles.arrays import Form, at, c_ordered, form
from tiles.plans import Plan, planned

from ..problem import options
from .problem import Problem, check, nothing

WARPS = 4  # of a block
PIECE = 16  # bytes that a lane moves of the state
COLUMNS = 16  # of the state, a warp
BLOCKS = {64: 5, 128: 3, 256: 2}  # key dim, up to -> blocks of an SM, as registers allow
DECAYS = {1: "token", 2: "token", 3: "channel"}  # axes of a decay -> what shares it; that of a head is every token's


@dataclass(frozen=True)
class Config:
    """A kernel's shape: rows of a state; whether a decay is the token's or the channel's, or there is none (""); is it the
    delta rule."""

    key_dim: int
    decay: str
    delta: bool

    @property
    def blocks(self):
        """Of an SM."""
        return next(blocks for limit, blocks in BLOCKS.items() if self.key_dim <= limit)

    @property
    def threads(self):
        """Of a block."""
        return 32 * WARPS


@functools.cache
def make(config: Config):
    """The kernel of a configuration."""
    DECAY, DELTA = config.decay, config.delta
    STATE = rt(config.key_dim, COLUMNS, fp32)

    @cuda.jit(launch_bounds=(config.threads, config.blocks), fastmath=True)
    def step(gQ, gK, gV, gState, gDecay, gBeta, gOut, count, parts, heads, group, scale):
        """`count` warps: `parts` for a head's state, `heads` states for a sequence; `group` heads share a key."""
        warp = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32
        if warp < count:
            part, pair = split(warp, parts)
            head, sequence = split(pair, heads)
            _, shared = split(head, group)
            column = COLUMNS * part
            s = load(gState, STATE, (sequence, head, 0, column), aligned=True)
            q = load(gQ, STATE.col_vec, (sequence, shared, 0), aligned=True)
            k = load(gK, STATE.col_vec, (sequence, shared, 0), aligned=True)
            v = load(gV, STATE.row_vec, (sequence, head, column), aligned=True)
            if DECAY == "token":
                s *= exp(load(gDecay, STATE.row_vec, (sequence, head, column)))
            if DECAY == "channel":
                s *= exp(load(gDecay, STATE.col_vec, (sequence, head, 0), aligned=True))
            if DELTA:
                v = load(gBeta, STATE.row_vec, (sequence, head, column)) * (v - col_sum(s * k))
            s = fma(k, v, s)
            store(gState, s, (sequence, head, 0, column), aligned=True)
            store(gOut, scale * col_sum(s * q), (sequence, head, column))

    return step


def linear_step(
    state: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    beta: Any = None,
    scale: float | None = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """One token of linear attention: o, with `state` brought up to date in place. For every sequence and head,

        S = exp(decay) S;  v = beta (v - S^T k);  S = S + k v^T;  o = scale S^T q

    state: (B, H, Dk, Dv) float32, its rows contiguous and 16 bytes aligned: what the functions of whole sequences return with
    return_state=True. q, k: (B, Hk, Dk), bfloat16 or float16, value head h reading key head h // (H // Hk); v, out: (B, H, Dv).
    Dk and Dv: multiples of 16 up to 256.

    decay: logarithms (<= 0), float32, bfloat16 or float16: None (linear attention), (H,) (retention, lightning), (B, H) (simple
    GLA, gated delta rule) or (B, H, Dk) (GLA, KDA). beta: None or (B, H): the delta rule. scale: Dk^-1/2 by default.

    Mamba-2's step is that of q=C, k=B, v=dt * x, decay=dt * A, scale=1, to which D * x comes; its state is transposed. There is
    no step with normalize=True. JAX's arrays cannot be written, so they cannot be a state.

    Returns `out`, the same kind of array as q. Arrays, `stream` and errors are those of attention.forward."""
    _, scale = options(False, scale)
    return _solve(stream, (q, k, v, state, decay, beta, out), (scale,))


@planned("q k v state", "decay beta out")
def _solve(q, k, v, state, decay, beta, out, scale) -> Plan:
    """How linear_step does calls of this form at these addresses."""
    arrays = {"q": q, "k": k, "v": v, "state": state, "decay": decay, "beta": beta, "out": out}
    problem = check("step", arrays, scale=scale)
    place = problem.forms["state"]
    if place.strides[-1] != place.itemsize or any(x % PIECE for x in (state.pointer, *place.strides[:-1])):
        raise ValueError(
            f"state: last axis must be contiguous, address and other strides multiples of {PIECE} bytes: "
            f"address {state.pointer:#x}, state.strides={state.strides} bytes, state.shape={state.shape}"
        )
    make_out = {} if out else {"out": (problem.out_shape, problem.dtype)}
    return Plan(nothing if problem.trivial else _plan(problem).prepare, make_out, ("out",))


@functools.lru_cache
def _plan(problem: Problem):
    """The launch of problems of this form; arrays in the order of `_solve`."""
    forms, parts = problem.forms, problem.value_dim // COLUMNS
    count, decay = problem.batch * problem.heads * parts, forms.get("decay")
    config = Config(problem.key_dim, DECAYS[len(decay.shape)] if decay else "", "beta" in forms)
    spread = dict(forms) | {name: _spread(forms.get(name), problem) for name in ("decay", "beta")}
    arrays = [at(0, spread[name]) for name in ("q", "k", "v", "state", "decay", "beta", "out")]
    sizes = count, parts, problem.heads, problem.group, problem.scale
    return launch(make(config), -(-count // WARPS), config.threads).bind(*arrays, *sizes)


def _spread(given: Form | None, problem: Problem) -> Form:
    """A decay or beta as (B, H, Dv), or (B, H, Dk) as it is: axes that it has not are steps of 0 bytes. Nothing for None."""
    if given is None:
        return c_ordered((0, 0, 0), "float32", problem.device)
    if len(given.shape) == 3:
        return given
    strides = (0, *given.strides, 0) if len(given.shape) == 1 else (*given.strides, 0)
    shape = problem.batch, problem.heads, problem.value_dim
    return form(shape, strides, given.dtype, given.device, given.itemsize)
