"""attention.hedgehog_backward: the gradients of attention.hedgehog."""

from typing import Any

from tiles.calls.plan import Plan
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema

from ..names import suggests_argument_names
from ..parts.recurrent.hedgehog_chunks import HALF, HEAD_DIMS
from ..parts.recurrent.tokens import CHUNK
from ..plans.recurrent import recurrent_checks
from ..plans.recurrent.hedgehog_gradients import plan_hedgehog_gradients
from ..plans.recurrent.recurrent_derivative import RecurrentDerivative, no_second_derivatives
from ..plans.requires_grad import without_gradients

HEDGEHOG_BACKWARD = Schema(
    "hedgehog_backward",
    """
    dout        (batch, seqlen, heads, value_dim)  tile
    q           (batch, seqlen, heads_k, key_dim)  tile
    k           (batch, seqlen, heads_k, key_dim)  tile
    v           (batch, seqlen, heads, value_dim)  tile
    q_map       (heads_k, key_dim, features)       tile
    k_map       (heads_k, key_dim, features)       tile
    alphas      (heads)                            float32
    betas       (heads)                            float32
    cu_seqlens  (ends)                             ends     optional
    dq          (batch, seqlen, heads_k, key_dim)  tile     output
    dk          (batch, seqlen, heads_k, key_dim)  tile     output
    dv          (batch, seqlen, heads, value_dim)  tile     output
    dq_map      (heads_k, key_dim, features)       tile     output
    dk_map      (heads_k, key_dim, features)       tile     output
    dalphas     (heads)                            float32  output
    dbetas      (heads)                            float32  output
    """,
)


def check_window(window: Any) -> None:
    """ValueError: there is no kernel for such a window."""
    if window != CHUNK:
        raise ValueError(f"window: must be {CHUNK}: {window=}")


def check_shapes(problem: Problem) -> None:
    """ValueError: no kernel takes these extents."""
    recurrent_checks.check_extents(problem)
    for name, axis in ("q", "key_dim"), ("v", "value_dim"):
        extent = problem.extents[axis]
        if extent > HEAD_DIMS[-1]:
            raise ValueError(f"{name}: head_dim must be at most {HEAD_DIMS[-1]}: {extent}, {name}.shape={problem.shape(name)}")
    if problem.extents["features"] != HALF:
        raise ValueError(f"q_map: must have {HALF} columns: q_map.shape={problem.shape('q_map')}")


@suggests_argument_names
@without_gradients
def hedgehog_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    q_map: Any,
    k_map: Any,
    alphas: Any,
    betas: Any,
    *,
    window: int = 64,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dq_map: Any = None,
    dk_map: Any = None,
    dalphas: Any = None,
    dbetas: Any = None,
    stream: Any = None,
) -> tuple[Any, ...]:
    """Gradients of attention.hedgehog. For a loss L, dout = dL/dout; with P the weights before they are divided by their sum,

        dN[i] = dout[i] / n[i]        dn[i] = -dout[i] . o[i] / n[i]        n[i] = sum_j P[i, j] + 1e-6
        dP[i, j] = dN[i] . v[j] + dn[i]                                     dv[j] = sum_i P[i, j] dN[i]

    From dP follow the gradients of scores and of features, and from these those of q, k and the maps. The largest score m[i]
    has a gradient, too; if several keys have this score, they share it. Features at the floor of 1e-6 have none.

    dout: as out. q to betas, window, cu_seqlens, layout: what hedgehog was called with. dq .. dbetas: arrays to write to
    instead of new ones, with the dtypes and shapes of q .. betas. Value heads that share a key head add to the gradients of q,
    k and the maps. Tokens after cu_seqlens[-1] have gradients of 0.

    Features, 128 columns, and what is summed from them are written to memory in q's dtype. On Hopper, for heads of more than 64
    columns without cu_seqlens, scores are computed twice. Otherwise the window's weights and their gradients, 128 columns each,
    are written, too, and the gradients of features for each value head in float32. In float16 dN must stay below 65504. All
    sums are made in a fixed order: the same bits every time.

    Returns (dq, dk, dv, dq_map, dk_map, dalphas, dbetas). On GPUs since Ampere. Arrays, `stream` and errors are those of
    hedgehog."""
    check_window(window)
    inputs = dout, q, k, v, q_map, k_map, alphas, betas, cu_seqlens
    return _hedgehog_backward(stream, (*inputs, dq, dk, dv, dq_map, dk_map, dalphas, dbetas), (), layout)


@program(HEDGEHOG_BACKWARD, no_gradient=no_second_derivatives("attention.hedgehog"))
def _hedgehog_backward(problem: Problem) -> Plan:
    """The Plan of a call of hedgehog_backward."""
    check_shapes(problem)
    return plan_hedgehog_gradients(problem, problem.extents["key_dim"] ** -0.5)


TILES = "q", "k", "v", "q_map", "k_map"
HEDGEHOG_DERIVATIVE = RecurrentDerivative("attention.hedgehog", _hedgehog_backward, tiles=TILES)
