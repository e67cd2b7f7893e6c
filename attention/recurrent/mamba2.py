"""attention.mamba2: the state-space duality of Mamba-2 (Dao and Gu 2024), which is linear attention of other names."""

from typing import Any

from tiles.plans import Plan, planned

from .chunks import copied, passes
from .problem import check, nothing

NEEDED, OTHERS = "x dt A B C", "D z dt_bias cu_seqlens initial_states out state local total"


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

    cu_seqlens: see attention.linear; states are then one of each sequence. out: written in place of a new array.

    Returns `out`, the same kind of array as x, or with return_final_states=True `(out, states)`, float32 (B, H, P, N). On
    GPUs since Ampere. Arrays, `stream`, `family` and errors are those of attention.forward."""
    arrays = (x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_states, out, None, None, None)
    return _solve(stream, arrays, (bool(dt_softplus), bool(return_final_states), family))


@planned(NEEDED, OTHERS)
def _solve(x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_states, out, state, local, total, softplus, keep, family) -> Plan:
    """How mamba2 does calls of this form at these addresses."""
    arrays = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias, "cu_seqlens": cu_seqlens}
    problem = check("mamba2", arrays | {"initial_states": initial_states, "out": out}, scale=1.0)
    give = ("out", "state") if keep else ("out",)
    make: dict[str, tuple[tuple[int, ...], str]] = {} if out else {"out": (problem.out_shape, problem.dtype)}
    if keep:
        make["state"] = problem.state_shape, "float32"
    if problem.trivial:
        if keep and 0 not in problem.state_shape:
            raise ValueError(f"x: must have a token, for return_final_states=True: x.shape={x.shape}")
        return Plan(nothing, make, give)
    by_copies = copied(problem, family, *(array.pointer for array in (x, B, C, z, out) if array))
    found, names = passes(problem, softplus, keep, by_copies=by_copies), f"{NEEDED} {OTHERS}".split()

    def prepare(stream: int, *addresses: int):
        return found.prepare(stream, dict(zip(names, addresses, strict=True)))

    return Plan(prepare, make | found.scratch, give)
