"""attention.mamba2: the state-space duality of Mamba-2 (Dao and Gu 2024), which is linear attention of other names."""

from typing import Any

from tiles.program import Plan, program
from tiles.schema import Problem, Schema

from ..families import choose
from ..options import flag
from . import chunks, rules

MAMBA2 = Schema(
    "mamba2",
    """
    x               BSHV  tile
    dt              BSH   real
    A               H     rate
    B               BSGK  tile
    C               BSGK  tile
    D               H|HV  real     optional
    z               BSHV  tile     optional
    dt_bias         H     real     optional
    cu_seqlens      E     ends     optional
    initial_states  NHVK  float32  optional
    out             BSHV  tile     made
    states          NHVK  float32  made      return_final_states
    """,
)


def mamba2(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    *,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    initial_states: Any = None,
    return_final_states: bool = False,
    cu_seqlens: Any = None,
    out: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """Mamba-2's scan. For every sequence and head h, g = h // (H // G), over its tokens t,

        dt_t = max(softplus(dt_t + dt_bias[h]), 0)                  softplus with dt_softplus=True only
        S_t  = exp(dt_t A[h]) S_(t-1) + dt_t x_t B_t[g]^T
        y_t  = (S_t C_t[g] + D[h] x_t) silu(z_t)                    the last factor with z only

    which is linear(q=C, k=B, v=dt x, decay=dt A, scale=1) with a state that is transposed.

    x, z, out: (B, S, H, P); B, C: (B, S, G, N), G dividing H; all bfloat16 or all float16; P and N multiples of 16 up to 256.
    dt: (B, S, H); A, dt_bias: (H,); D: (H,) or (H, P); float32, bfloat16 or float16. A must not be positive.
    initial_states: (B, H, P, N) float32, 0 by default.

    | here                                | mamba_ssm's mamba_chunk_scan_combined                            |
    | ----------------------------------- | ---------------------------------------------------------------- |
    | x, dt, A, B, C, D, z, dt_bias       | the same                                                         |
    | dt_softplus=False                   | the same                                                         |
    | dt >= 0                             | dt_limit=(0, inf)                                                |
    | chunks of 64 tokens                 | chunk_size                                                       |
    | initial_states, return_final_states | the same: (B, H, P, N)                                           |
    | cu_seqlens (N + 1,), any sequences  | seq_idx for the scan, and cu_seqlens with return_varlen_states   |

    cu_seqlens: see attention.linear, also for when it and A are checked; states are then one of each sequence. out: written in
    place of a new array.

    Returns `out`, the same kind of array as x, or with return_final_states=True `(out, states)`, float32 (B, H, P, N). On
    GPUs since Ampere. Arrays, `stream`, `family` and errors are those of attention.forward."""
    arrays = x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_states, out, None
    return _mamba2(stream, arrays, (flag("dt_softplus", dt_softplus), flag("return_final_states", return_final_states), family))


@program(MAMBA2)
def _mamba2(problem: Problem, dt_softplus: bool, return_final_states: bool, family: str | None) -> Plan:
    """How mamba2 does calls of this form; states are never given."""
    rules.check(problem, "B", "x")
    batch, length, heads, sequences = problem("BSHN")
    if not (batch and length and heads):
        if return_final_states and sequences and heads:
            raise ValueError(f"x: must have a token, for return_final_states=True: x.shape={problem.shape('x')}")
        return Plan([])
    arrays = {
        "gQ": problem["C"],
        "gK": problem["B"],
        "gV": problem["x"],
        "gZ": problem["z"],
        "gGates": problem["dt"],
        "gRate": problem["A"],
        "gBias": problem["dt_bias"],
        "gSkip": problem["D"],
        "gEnds": problem["cu_seqlens"],
        "gStart": problem["initial_states"],
        "gState": problem["states"] if return_final_states else None,
        "gO": problem["out"],
    }
    piece = 0 if choose(problem, family) == "sm_90" else problem.bytes_at_once()
    steps, scratch = chunks.by_token(problem, arrays, 1.0, piece, softplus=dt_softplus)
    return Plan(steps, scratch)
