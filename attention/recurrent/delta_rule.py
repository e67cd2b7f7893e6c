"""attention.delta_rule: the delta rule, with or without decays.

| delta_rule(q, k, v, beta, ..) | flash-linear-attention              | S_t =                                                |
| ----------------------------- | ----------------------------------- | ---------------------------------------------------- |
|                               | chunk_delta_rule(q, k, v, beta)     | S + k (beta (v - S^T k))^T                           |
| decay=(H,) or (B, S, H)       | chunk_gated_delta_rule(.., g, beta) | the same of exp(decay) S: gated delta networks       |
| decay=(B, S, H, Dk)           | chunk_kda(.., g, beta)              | the same of diag(exp(decay)) S: Kimi delta attention |

The same there: the default scale (Dk^-1/2), the layout of states, (N, H, Dk, Dv) float32, and shared q and k heads (which
chunk_delta_rule lacks). g is (B, T, H) or (B, T, H, Dk) there, for each token; decays are logarithms in both. Keys are taken
as they are: use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True and the like are the caller's work here.
"""

from typing import Any

from tiles.arrays import ALIGNMENT
from tiles.device import machine
from tiles.launch import kernel_for
from tiles.plan import Plan, Step
from tiles.program import program
from tiles.schema import Problem, Schema

from ..families import choose_family
from ..names import suggests_argument_names
from ..options import check_flag, check_number
from . import chunks, rules, token_plan
from .kernels import delta_hopper, delta_states_hopper, kda_hopper, kda_states_hopper, maps_hopper
from .kernels.tokens import CHUNK, COLUMNS
from .rules import DTYPES, padded, varlen

DELTA_RULE = Schema(
    "delta_rule",
    """
    q              BSGK        tile
    k              BSGK        tile
    v              BSHV        tile
    beta           BSH         real
    decay          H|BSH|BSHK  log      optional
    cu_seqlens     E           ends     optional
    initial_state  NHKV        float32  optional
    out            BSHV        tile     made
    state          NHKV        float32  made      return_state
    """,
)

DELTA_STATES = Schema(
    "delta_rule_states",
    """
    k              BSGK   tile
    v              BSHV   tile
    beta           BSH    real
    decay          H|BSH  log      optional
    cu_seqlens     E      ends     optional
    initial_state  NHKL   float32
    skipped        NHO    float32  optional
    state          NHKL   float32  made
    """,
)


# The kernel, that of the pass before it, and what they cost at 128 keys: decays are one number a token, or one a channel.
BY_TOKEN = delta_hopper, delta_states_hopper, chunks.Costs(both=1.4, again=0.7, added=1.5, launches=1.5)
BY_CHANNEL = kda_hopper, kda_states_hopper, chunks.Costs(both=1.25, again=0.7, added=0.75, launches=0.5)


@suggests_argument_names
def delta_rule(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    *,
    decay: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    return_state: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """The delta rule: the state learns from every key what it does not return for it yet. For every sequence and head, over its
    tokens t,

        S = exp(decay_t) S;  u_t = beta_t (v_t - S^T k_t);  S = S + k_t u_t^T;  o_t = scale S^T q_t

    q, k: (B, S, Hk, Dk). v, out: (B, S, H, Dv). beta: (B, S, H). For layout="bhsd" sequence and head are swapped. bfloat16
    or float16; beta and decay also float32. Dk and Dv: multiples of 16 up to 256; with decays of channels Dk above 128 is
    slow. Hk divides H, and value head h reads key head h // (H // Hk). Any lengths.

    It is stable where beta |k|^2 is between 0 and 2. Relative errors of bfloat16 outputs are 4e-3 to 8e-3 for keys at random.
    They are greatest where all keys are the same, for what a chunk's inverse multiplies then cancels: 2e-2 for beta 1, 4e-2 to
    0.5 for 1.9, and no digit is left at 1.99; with decays of channels 4e-2, and 0.1 from 1.5 on. float16 has an eighth of that;
    its range ends where attention.linear says. Token by token (family="sm_80"; see below) all factors and sums are float32: for
    keys that repeat with beta near 2.

    decay: logarithms, never positive: None; (H,), the same for all tokens; (B, S, H), for each token; or (B, S, H, Dk), for
    each token and channel of the keys. scale: Dk^-1/2 by default. initial_state: (B, H, Dk, Dv) float32, 0 by default. out:
    written in place instead of a new array.

    cu_seqlens: (N + 1,) int32 or int64, on q's device: N sequences lie one after the other in a batch of 1, sequence n from
    cu_seqlens[n] to cu_seqlens[n + 1]; states are (N, H, Dk, Dv). It must ascend from 0 to S. For arrays in host memory this
    is checked, and so is that no decay is above 0; on a GPU with TILES_CHECK=1, where the call then waits for what it reads.
    Where nobody checks, tokens behind the last sequence belong to nobody: they are not read, and their outputs are 0.

    Returns `out`, the same kind of array as q, or with return_state=True `(out, state)`. state is a new float32
    array (B, H, Dk, Dv), C-ordered: that of each sequence after its last token.

    On Hopper sequences are cut into chunks of 64 tokens, which the tensor cores multiply, and few long sequences of Dk up to
    128 into segments of chunks, which are walked at the same time. Other GPUs, addresses and strides that are not multiples of
    16 bytes, and Dk above 128 with decays of channels are served token by token: correct, and slow. With decays of channels, a
    chunk by whose end a channel has decayed by more than exp(-119), or exp(-15) for float16, is slow, too.

    Arrays, `stream`, `family` ("sm_80" is token by token) and errors are those of attention.forward. The head of this file
    has flash-linear-attention's names next to these."""
    arrays = q, k, v, beta, decay, cu_seqlens, initial_state, out, None
    return _delta_rule(stream, arrays, (check_number("scale", scale), check_flag("return_state", return_state), family), layout)


@program(DELTA_RULE)
def _delta_rule(problem: Problem, scale: float | None, return_state: bool, family: str | None) -> Plan:
    """The Plan of a call of delta_rule. The schema's `state` is a result, which a caller cannot give."""
    rules.check(problem)
    scale, by_channel = rules.scale_of(problem, scale), rules.by_channel(problem)
    batch, length, key_dim = problem("BSK")
    widest = max(kda_hopper.KEY_DIMS if by_channel else delta_hopper.STAGES)
    if family == "sm_90" and key_dim > widest:
        raise ValueError(f"family: sm_90 takes keys of at most {widest} columns: {family=}, q has {key_dim}")
    if rules.idle(problem, return_state):
        choose_family(problem, family, tma=True)  # which refuses what it refuses of other calls: nothing is read
        return Plan([])
    arrays = rules.arrays(problem, return_state) | {"gBeta": problem["beta"]}
    by_tma = problem.by_tma and not (by_channel and problem.bytes_at_once("decay") < ALIGNMENT)
    on_hopper = choose_family(problem, family, by_tma) == "sm_90"
    if on_hopper and key_dim <= widest and batch * length:
        arrays |= {"gGates": problem["decay"], "gO": problem["out"]}
        return Plan(*_in_segments(problem, arrays, by_channel, scale))
    return Plan([token_plan.launch(problem, arrays | {"gDecay": problem["decay"], "gOut": problem["out"]}, scale)])


def states(
    k: Any,
    v: Any,
    beta: Any,
    initial_state: Any,
    *,
    decay: Any = None,
    skipped: Any = None,
    cu_seqlens: Any = None,
    family: str | None = None,
) -> Any:
    """The state after each sequence under delta_rule, without outputs: (N, H, Dk, columns) in float32, with as many columns as
    initial_state. Those beyond v's have values of 0. There must be no decays of channels.

    skipped: (N, H, 1) float32, written: how many chunks of 64 tokens at the beginning of each sequence have decayed to nothing
    by its end, together with the initial state, and may be left out."""
    return _states(None, (k, v, beta, decay, cu_seqlens, initial_state, skipped, None), (family,))


@program(DELTA_STATES)
def _states(problem: Problem, family: str | None) -> Plan:
    """The Plan of a call of `states`, whose schema's `state` is a result."""
    rules.check(problem, "k", "v")
    batch, length, heads, key_dim, value_dim, columns = problem("BSHKVL")
    if columns < value_dim:
        raise problem.error("initial_state", "must have a column for each of v's", "initial_state", "v")
    arrays = {"gK": problem["k"], "gV": problem["v"], "gBeta": problem["beta"], "gEnds": problem["cu_seqlens"]}
    arrays |= {"gStart": problem["initial_state"], "gState": problem["state"]}
    if rules.idle(problem, True):
        return Plan([])
    if choose_family(problem, family) == "sm_90" and key_dim <= max(delta_states_hopper.KEY_DIMS) and batch * length:
        arrays |= {"gGates": problem["decay"], "gSkipped": problem["skipped"]}
        return Plan([_in_chunks(problem, arrays, columns, delta_states_hopper, 1, segments=1, walked=1, values=0)])
    outputs = (batch, length, heads, value_dim), "bfloat16"  # which the loop over tokens writes, and nobody reads
    arrays |= {"gQ": problem["k"], "gDecay": problem["decay"], "gOut": problem.scratch(0, *outputs)}
    return Plan([token_plan.launch(problem, arrays, 0.0, columns=columns)], [outputs])


def _in_segments(problem: Problem, arrays: dict, by_channel: bool, scale: float) -> tuple[list[Step], chunks.Scratch]:
    """(the launches of Hopper's kernels, the scratch memory between them). There is one launch, or three if few sequences are
    cut into segments: one finds what each segment does to a state, the second computes the states before the segments, the
    third goes on from these."""
    batch, length, heads, key_dim, columns, sequences = problem("BSHKVN")
    module, before, costs = BY_CHANNEL if by_channel else BY_TOKEN
    width, both = -(-columns // COLUMNS), -(-(columns + key_dim) // COLUMNS)
    parts, scratch, steps = 1, chunks.Scratches(problem), []
    if key_dim <= max(maps_hopper.KEY_DIMS):
        places, each = machine(problem.device).processors, length * batch // sequences // CHUNK
        costs = costs._replace(added=costs.added * padded(key_dim, maps_hopper.KEY_DIMS) / max(maps_hopper.KEY_DIMS))
        parts = chunks.in_launches(sequences * heads, width, both, each, places, costs)
    if parts > 1:
        walked = parts - 1
        left = scratch(sequences * walked, heads, key_dim, columns + key_dim)
        begins = scratch(sequences * parts, heads, key_dim, columns)
        given = {name: x for name, x in arrays.items() if name not in ("gQ", "gO", "gStart")} | {"gState": left}
        whole = columns + key_dim
        steps.append(_in_chunks(problem, given, whole, before, walked, True, segments=parts, walked=walked, values=columns))
        config = maps_hopper.Config(padded(key_dim, maps_hopper.KEY_DIMS))
        steps.append(
            kernel_for(maps_hopper, config, problem.device).bind(
                sequences * heads * width,
                blocks=width,
                segments=parts,
                heads=heads,
                values=columns,
                gLeft=left,
                gStart=arrays["gStart"],
                gStarts=begins,
            )
        )
        arrays = arrays | {"gStart": begins}
    return [*steps, _in_chunks(problem, arrays, columns, module, parts, segments=parts, scale=scale)], scratch.every


def _in_chunks(
    problem: Problem, arrays: dict, columns: int, module: Any, parts: int, mapped: bool = False, **numbers: Any
) -> Step:
    """The launch of one of Hopper's kernels of chunks, for `parts` parts of each sequence and states of so many columns.
    mapped: see delta_states_hopper.Config."""
    batch, length, heads, key_heads, key_dim, sequences = problem("BSHGKN")
    width, gates = -(-columns // COLUMNS), arrays["gGates"]
    apart = sequences * heads * parts * width <= machine(problem.device).processors  # there is one for each 64 columns
    sizes = padded(key_dim, delta_hopper.STAGES), 1 if apart or key_dim > delta_hopper.WIDE else min(width, 2)
    dtype, kind = DTYPES[problem.dtype], (mapped,) if mapped else ()
    if module in (kda_hopper, kda_states_hopper):
        config = module.Config(*sizes, DTYPES[gates.form.dtype], dtype, varlen(problem))
    else:
        config = module.Config(*sizes, dtype, gates is not None, varlen(problem), *kind)
        if gates and len(gates.form.shape) == 1:  # each token's is the head's
            arrays["gGates"] = gates.spread(0, length).spread(0, batch)
    blocks = -(-width // config.consumers)
    return kernel_for(module, config, problem.device).bind(
        sequences * heads * parts * blocks,
        length=length,
        blocks=blocks,
        heads=key_heads,
        group=heads // key_heads,
        **numbers,
        **arrays,
    )
