"""attention.linear_step: one token of linear attention, the state read and written once."""

import functools
from typing import Any

from tiles.arrays import Form, form
from tiles.plans import Plan, planned

from ..softmax.problem import options
from .kernels import token_loop
from .problem import Problem, check, nothing

PIECE = 16  # bytes that a lane moves of the state


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
    Dk and Dv: multiples of 16 up to 256; B and H: up to 65535.

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
    return Plan(nothing if problem.trivial else _plan(problem), make_out, ("out",))


@functools.lru_cache
def _plan(problem: Problem):
    """The launch of problems of this form; arrays in the order of `_solve`."""
    forms = {
        name: _of_sequences(x) if name in ("q", "k", "v", "decay", "beta", "out") else x for name, x in problem.forms.items()
    }
    bound = token_loop.bind(problem, forms | {"initial_state": forms["state"]}, True)

    def prepare(stream: int, q: int, k: int, v: int, state: int, decay: int, beta: int, out: int):
        where = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "out": out, "initial_state": state, "state": state}
        return bound.prepare(stream, *(where.get(name, 0) for name in token_loop.ARRAYS))

    return prepare


def _of_sequences(x: Form) -> Form:
    """The form of tokens as one of sequences of one token each; a decay of heads as it is."""
    if len(x.shape) == 1:
        return x
    (batch, *shape), (step, *strides) = x.shape, x.strides
    return form((batch, 1, *shape), (step, step, *strides), x.dtype, x.device, x.itemsize)
