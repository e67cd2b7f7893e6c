"""attention.backward: from a user's arrays to the launches that give gradients."""

from typing import Any

from tiles.arrays import Number
from tiles.device import machine
from tiles.launch import kernel_for
from tiles.program import Fill, Plan, program
from tiles.schema import Problem, Schema

from ...families import choose
from ...options import flag, number
from ..asked import ends_of, positive, random_of
from ..assembled import Assembled, assembled
from ..forward import check_extents, dropped, scale_of
from ..gradient import ONCE
from ..launches import DTYPES, LOG2_E, sequences_of, variant_arrays
from . import ampere, finish, hopper, norms, prepare, sinks

SHARING, IN_LINE = 6, 16  # multiprocessors that work on one pair at a time, where later queries see more keys, and in order
GIVEN = """
    dout BSHV  tile
    q    BSHD  tile
    k    BTGD  tile
    v    BTGV  tile
    out  BSHV  tile
    lse  BHS   float32
    alibi  H|UH  float32  optional
    sink   H     float32  optional
    bias   WXYT  real     optional
    cu_seqlens    E  ends         optional
    cu_seqlens_k  E  key_ends     optional
    lengths_k     N  key_lengths  optional
    seed   O     index   optional
"""
MADE = """
    dq   BSHD  tile  made
    dk   BTGD  tile  made
    dv   BTGV  tile  made
    dsink  H   float32  made  sinks
"""
ADDED = """
    dq   BSHD  float32  updated
    dk   BTGD  float32  updated
    dv   BTGV  float32  updated
"""
BACKWARD, INTO = Schema("backward", GIVEN.rstrip() + MADE), Schema("backward_into", GIVEN.rstrip() + ADDED)
INTO_SINKS = Schema("backward_into_sinks", GIVEN.rstrip() + ADDED.rstrip() + "\n    dsink  H   float32  updated\n")


def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi: Any = None,
    sink: Any = None,
    bias: Any = None,
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
    lengths_k: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    q_norm: Any = None,
    k_norm: Any = None,
    norm_eps: float = 1e-6,
    scale: float | None = None,
    deterministic: bool = False,
    accumulate: bool = False,
    layout: str = "bshd",
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsink: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> tuple[Any, ...]:
    """Gradients of attention.forward: of a loss L, dq = dL/dq, dk = dL/dk and dv = dL/dv, where dout = dL/dout.

        P = exp(scale q k^T - lse)    dv = P^T dout
        dS = P (dout v^T - rowsum(dout out))    dq = scale dS k    dk = scale dS^T q

    dout: as out. q, k, v, causal, window, softcap, alibi, sink, bias, cu_seqlens, cu_seqlens_k, lengths_k, dropout, seed,
    scale, layout: what forward was called with; dS is then that of q k^T, before all these. out, lse: what it gave, with
    return_lse=True. Heads that share a key head are summed. What sees nothing has gradients of 0, and so have keys that are not
    in use; alibi and bias have none.

    dq, dk, dv, dsink: written in place of new arrays. With accumulate=True they must be given, of float32, and gradients are
    added to what they hold, unrounded.

    Sums are taken in float32 and rounded once. Those of dq are taken as they come, so its last bits differ from call to call;
    with deterministic=True they are taken in a fixed order, and all bits are the same in every call on the same kind of GPU.

    q_norm, k_norm, norm_eps: norms of queries and keys, as forward has them; dq and dk are those of q and k before them,
    through the gradients of the normalised rows in their dtype. The norms' own gradients are float32, have their shapes and
    come last, of each norm an array, or a pair (of the weights, of the bias); the sums that they are have a fixed order.

    With forward's other options there is no gradient yet. stream, family: as in forward.

    Returns (dq, dk, dv[, dsink][, dq_norm][, dk_norm]), the same kind of arrays as q. Arrays and errors are as in
    forward."""
    if flag("accumulate", accumulate) and not (q_norm is k_norm is None):
        raise NotImplementedError("accumulate: is not served with q_norm or k_norm, whose gradients are written; add them")
    of_sequences, random = (cu_seqlens, cu_seqlens_k, lengths_k), random_of(dropout, seed)
    eps, rows = positive("norm_eps", norm_eps), {"q": (q, q_norm), "k": (k, k_norm)}
    of_q, of_k = (norms.normalised(name, x, norm, eps, stream, layout) for name, (x, norm) in rows.items())
    into = [dx if norm is None else None for dx, norm in ((dq, q_norm), (dk, k_norm))]
    given = dout, of_q, of_k, v, out, lse, alibi, sink, bias, *of_sequences, random.seeds, *into, dv, dsink
    options = (
        flag("causal", causal),
        *ends_of(window),
        positive("softcap", softcap),
        random.dropout,
        random.seed,
        number("scale", scale),
        flag("deterministic", deterministic),
        sink is not None,
        family,
    )
    if accumulate:
        if sink is None:
            _backward_into(stream, given[:-1], options, layout)
        else:
            _backward_into_sinks(stream, given, options, layout)
        return (dq, dk, dv) if sink is None else (dq, dk, dv, dsink)
    found = _backward(stream, given, options, layout)
    if q_norm is k_norm is None:
        return found
    dq, of_q_norm = norms.gradients("q", q, found[0], q_norm, eps, dq, stream, layout)
    dk, of_k_norm = norms.gradients("k", k, found[1], k_norm, eps, dk, stream, layout)
    return dq, dk, *found[2:], *of_q_norm, *of_k_norm


@program(BACKWARD, no_gradient=ONCE)
def _backward(
    problem: Problem,
    causal: bool,
    left: int | None,
    right: int | None,
    softcap: float | None,
    dropout: float | None,
    seed_value: Number | None,
    scale: float | None,
    deterministic: bool,
    sinks: bool,
    family: str | None,
) -> Plan:
    """How backward does calls of this form."""
    check_extents(problem)
    scale = scale_of(problem, scale)  # the sink is in lse, and nowhere else
    more = [dropped(problem, dropout, seed_value)] if dropout is not None else []
    made = assembled(scale, causal, (left, right), softcap, "alibi" in problem, "bias" in problem, more=more)
    return planned(problem, made, scale, deterministic, family)


_backward_into = program(INTO, no_gradient=ONCE)(_backward.planner)
_backward_into_sinks = program(INTO_SINKS, no_gradient=ONCE)(_backward.planner)


def planned(problem: Problem, made: Assembled, scale: float, ordered: bool, family: str | None) -> Plan:
    """The launches of the gradients of an assembled variant of scores that were `scale` q k^T at first. ordered: dQ is summed
    in a fixed order."""
    batch, q_len, heads, head_dim, kv_len, kv_heads, value_dim = problem("BSHDTGV")
    gradients = [problem[name] for name in ("dq", "dk", "dv", *["dsink"] * ("sink" in problem))]
    adds = problem.schema is not BACKWARD
    give = _nothing if adds else None
    if any(0 in problem[name].form.shape for name in ("q", "k")):  # no query sees a key
        return Plan([] if adds else [Fill(x, 0.0) for x in gradients if 0 not in x.form.shape], (), give)
    tma, dtype, gpu = choose(problem, family) == "sm_90", DTYPES[problem.dtype], machine(problem.device)
    config: hopper.Config | ampere.Config
    lie, where = sequences_of(problem)
    kind: dict[str, Any] = {"lie": lie, "ordered": ordered, "adds": adds}
    if tma:
        config = hopper.config_for(head_dim, dtype, made.variant, value_dim, **kind)
    else:
        config = ampere.config_for(head_dim, dtype, made.variant, problem.bytes_at_once(), value_dim, **kind)
    parts, group = config.parts, heads // kv_heads
    if lie.packed:  # see there, how many blocks that takes
        (ends,) = problem("E")
        tiles, blocks = q_len // config.rows + ends - 1, kv_len // config.kv + ends - 1
    else:
        tiles, blocks = -(-q_len // config.rows), -(-kv_len // config.kv)
    scratch: list[tuple[tuple[int, ...], str]] = [
        ((batch, heads, 2 * tiles * config.rows), "float32"),
        ((batch * heads, tiles * parts.rows, parts.width), "float32"),
    ]
    if ordered:
        scratch.append(((batch * heads, tiles), "int32"))
    of_rows, sums, *turns = (problem.scratch(n, *what) for n, what in enumerate(scratch))
    told = where | dict(zip(("turns",), turns))
    before = kernel_for(prepare, prepare.config_of(config), problem.device).bind(
        batch * heads * tiles,
        gO=problem["out"],
        gDO=problem["dout"],
        gLse=problem["lse"],
        gSums=of_rows,
        gSum=sums,
        blocks=tiles,
        heads=heads,
        **told,
    )
    main = kernel_for(hopper if tma else ampere, config, problem.device).bind(
        batch * kv_heads * blocks,
        gQ=problem["q"],
        gK=problem["k"],
        gV=problem["v"],
        gDO=problem["dout"],
        gSums=of_rows,
        gSum=sums,
        gDK=problem["dk"],
        gDV=problem["dv"],
        blocks=blocks,
        heads=kv_heads,
        pairs=batch * kv_heads,
        band=band_of(made.variant.rising, ordered, gpu.processors),
        group=group,
        scale=made.unit * LOG2_E,
        unit=scale,
        **told,
        **made.numbers,
        **{name: x for name, x in variant_arrays(problem).items() if name in made.variant.given},
    )
    after = kernel_for(finish, finish.config_of(config), problem.device).bind(
        batch * heads * tiles, gSum=sums, gDQ=problem["dq"], blocks=tiles, heads=heads, unit=scale, **where
    )
    steps = [before, main, after]
    if "sink" in problem:
        of_sinks = kernel_for(sinks, sinks.config_of(config), problem.device).bind(
            -(-heads // sinks.HEADS), gSums=of_rows, gSink=problem["sink"], gDSink=problem["dsink"], batches=batch, tiles=tiles
        )
        steps.append(of_sinks)
    return Plan(steps, scratch, give)


def _nothing(every: Any) -> None:
    """What is given back where all results were given to be added to."""


def band_of(rising: bool, ordered: bool, processors: int) -> int:
    """How many pairs of key head and batch are gone through at once: see tiling.band_of. Blocks that add to dQ in
    order wait for each other when they begin, the longer the more of a pair begin at once."""
    return max(1, processors // SHARING) if rising else max(1, processors // IN_LINE) if ordered else 1
