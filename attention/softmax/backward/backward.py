"""attention.backward: from a user's arrays to the launches that give gradients."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tiles import fp32
from tiles.arrays import Number, Operand
from tiles.device import machine
from tiles.launch import kernel_for
from tiles.program import Fill, Plan, program
from tiles.schema import REAL, Problem, Schema

from ...families import choose
from ...options import flag, number
from ..asked import blocks_of, eight, ends_of, positive, random_of
from ..assembled import Assembled, assembled
from ..derivative import derivatives
from ..forward import check_extents, dropped, functions_of, listing_of, scale_of
from ..gradient import ONCE
from ..launches import DTYPES, LOG2_E, Before, made_for, sequences_of, spread, variant_arrays
from ..python import named
from ..ready import Listing, check
from ..scores import ScoredBack
from ..sequences import Batched
from . import ampere, finish, folded, hopper, norms, prepare, sinks, wide, wide_queries
from .again import Added
from .learned import GRADIENTS, Learned, read_by
from .lists import FACING, listed
from .results import Written

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
    kv_num_blocks       IJP   index  optional
    kv_indices          IJPQ  index  optional
    full_kv_num_blocks  IJP   index  optional
    full_kv_indices     IJPL  index  optional
    marks  *     any      optional
    aux0   *     any      optional
    aux1   *     any      optional
    aux2   *     any      optional
    aux3   *     any      optional
    aux4   *     any      optional
    aux5   *     any      optional
    aux6   *     any      optional
    aux7   *     any      optional
"""
MADE = """
    dq   BSHD  tile  made
    dk   BTGD  tile  made
    dv   BTGV  tile  made
    dbias  =bias  float32  made  also:dbias
    dalibi =alibi float32  made  also:dalibi
    dsink  H      float32  made  also:dsink
    daux0  =aux0  float32  made  also:daux0
    daux1  =aux1  float32  made  also:daux1
    daux2  =aux2  float32  made  also:daux2
    daux3  =aux3  float32  made  also:daux3
    daux4  =aux4  float32  made  also:daux4
    daux5  =aux5  float32  made  also:daux5
    daux6  =aux6  float32  made  also:daux6
    daux7  =aux7  float32  made  also:daux7
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
    mask: Callable | None = None,
    score: Callable | None = None,
    aux: Sequence[Any] = (),
    blocks: Any = None,
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
    dbias: Any = None,
    dalibi: Any = None,
    dsink: Any = None,
    daux: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> tuple[Any, ...]:
    """Gradients of attention.forward: of a loss L, dq = dL/dq, dk = dL/dk and dv = dL/dv, where dout = dL/dout.

        P = exp(scale q k^T - lse)    dv = P^T dout
        dS = P (dout v^T - rowsum(dout out))    dq = scale dS k    dk = scale dS^T q

    dout: as out. q, k, v, causal, window, softcap, alibi, sink, bias, mask, score, aux, blocks, cu_seqlens, cu_seqlens_k,
    lengths_k, dropout, seed, scale, layout: what forward was called with; dS is then that of q k^T, before all these. out, lse:
    what it gave, with return_lse=True. Heads that share a key head are summed. What sees nothing has gradients of 0, and so
    have keys that are not in use.

    dq, dk, dv, dsink: written in place of new arrays. With accumulate=True they must be given, of float32, and gradients are
    added to what they hold, unrounded; not with norms, dbias, dalibi or daux.

    dbias, dalibi: True for the gradient of a bias, summed over axes of 1, and of slopes; or an array to write it to. daux: True
    for the gradients of all arrays of aux that are not of integers, as far as score reads them; or for each array one of True,
    an array to write to, and None. They are of float32, and computed from scores once more, each array for itself, in a fixed
    order: the same bits every time. Not of packed sequences, nor with lengths_k.

    score's derivative is found by running it once on terms that note what is done to them; it may do all that it may in
    forward, but for `map`. Tiles of queries that see no key of a block are passed by, as forward does with blocks of keys.

    Sums are taken in float32 and rounded once. Those of dq are taken as they come, so its last bits differ from call to call;
    with deterministic=True they are taken in a fixed order, and all bits are the same in every call on the same kind of GPU.
    Tiles that a mask or blocks of the caller's let nobody see are then not passed by.

    q_norm, k_norm, norm_eps: norms of queries and keys, as forward has them; dq and dk are those of q and k before them,
    through the gradients of the normalised rows in their dtype. The norms' own gradients are float32, have their shapes and
    come last, of each norm an array, or a pair (of the weights, of the bias); the sums that they are have a fixed order.

    With forward's other options there is no gradient yet. stream, family: as in forward.

    Returns (dq, dk, dv), and behind these in this order: dbias and dalibi, if they are asked for; dsink, if there is a sink;
    each of daux that is asked for; those of norms. They are the same kind of arrays as q. Arrays and errors are as in
    forward."""
    if flag("accumulate", accumulate) and any([x is not None for x in (q_norm, k_norm, dbias, dalibi, daux)]):
        raise NotImplementedError("accumulate: is not served with q_norm, k_norm, dbias, dalibi or daux; add these yourself")
    of_sequences, random = (cu_seqlens, cu_seqlens_k, lengths_k), random_of(dropout, seed)
    eps, rows = positive("norm_eps", norm_eps), {"q": (q, q_norm), "k": (k, k_norm)}
    of_q, of_k = (norms.normalised(name, x, norm, eps, stream, layout) for name, (x, norm) in rows.items())
    into = [dx if norm is None else None for dx, norm in ((dq, q_norm), (dk, k_norm))]
    size, ready_for, (*lists, _, marks) = blocks_of(blocks)
    read = eight(aux)
    besides = dbias, dalibi, True if dsink is None and sink is not None else dsink, *each_of(daux, read)
    also = " ".join([name for name, x in zip(GRADIENTS, besides) if x is not None])
    places = [None if x is True else x for x in besides]
    of_scores = alibi, sink, bias, *of_sequences, random.seeds, *lists, marks, *read
    given = dout, of_q, of_k, v, out, lse, *of_scores, *into, dv
    options = (
        flag("causal", causal),
        *ends_of(window),
        positive("softcap", softcap),
        *[None if f is None else named(n, f) for n, f in (("mask", mask), ("score", score))],
        *size,
        ready_for,
        random.dropout,
        random.seed,
        number("scale", scale),
        flag("deterministic", deterministic),
        "" if accumulate else also,
        family,
    )
    if accumulate and sink is None:
        _backward_into(stream, given, options, layout)
        return dq, dk, dv
    if accumulate:
        _backward_into_sinks(stream, (*given, dsink), options, layout)
        return dq, dk, dv, dsink
    found = _backward(stream, (*given, *places), options, layout)
    if q_norm is k_norm is None:
        return found
    dq, of_q_norm = norms.gradients("q", q, found[0], q_norm, eps, dq, stream, layout)
    dk, of_k_norm = norms.gradients("k", k, found[1], k_norm, eps, dk, stream, layout)
    return dq, dk, *found[2:], *of_q_norm, *of_k_norm


def each_of(daux: Any, aux: tuple) -> tuple:
    """What is to become of the gradient of each array of aux: True, an array to write to, or None; TypeError."""
    if daux is None or daux is True:
        return tuple([daux and (True if x is not None and is_real(x) else None) for x in aux])
    count = sum(x is not None for x in aux)
    if not isinstance(daux, (tuple, list)) or len(daux) != count:
        raise TypeError(f"daux: must be True, or for each of {count} arrays of aux True, an array or None")
    return *daux, *(None,) * (len(aux) - len(daux))


def is_real(x: Any) -> bool:
    """Is this an array of real numbers, not of integers or truth values?"""
    return any(name in str(x.dtype) for name in REAL)


@program(BACKWARD, no_gradient=ONCE)
def _backward(
    problem: Problem,
    causal: bool,
    left: int | None,
    right: int | None,
    softcap: float | None,
    mask: str | None,
    score: str | None,
    block_rows: int | None,
    block_cols: int | None,
    ready_for: str | None,
    dropout: float | None,
    seed_value: Number | None,
    scale: float | None,
    deterministic: bool,
    also: str,
    family: str | None,
) -> Plan:
    """How backward does calls of this form; mask and score are the names that python.py knows functions by, also the names of
    the gradients that are asked for besides dq, dk and dv."""
    check_extents(problem)
    scale = scale_of(problem, scale)  # the sink is in lse, and nowhere else
    masking, scoring, aux = functions_of(problem, mask, score)
    size = None if block_rows is None or block_cols is None else (block_rows, block_cols)
    more: list[Any] = [dropped(problem, dropout, seed_value)] if dropout is not None else []
    listing = listing_of(problem, masking, f"{mask=!s}; window={(left, 0 if causal else right)}", size, FACING, ready_for)
    blocked = listing and listing.blocked
    of_scores = softcap, "alibi" in problem, "bias" in problem
    found = scoring and derivatives(scoring, tuple([len(x.form.shape) for x in aux]))
    made = assembled(
        scale,
        causal,
        (left, right),
        *of_scores,
        mask=None if blocked else masking,
        score=ScoredBack(scoring, found.bent, found.even) if scoring and found else None,
        more=[*more, (blocked, {})] if blocked else more,
    )
    reads = {name: read_by(problem, name, found) for name in also.split() if name != "dsink"}
    return planned(problem, made, scale, deterministic, family, aux, listing, reads)


_backward_into = program(INTO, no_gradient=ONCE)(_backward.planner)
_backward_into_sinks = program(INTO_SINKS, no_gradient=ONCE)(_backward.planner)


def planned(
    problem: Problem,
    made: Assembled,
    scale: float,
    ordered: bool,
    family: str | None,
    aux: Sequence[Operand] = (),
    listing: Listing | None = None,
    reads: Mapping[str, Sequence[Added]] = MappingProxyType({}),
) -> Plan:
    """The launches of the gradients of an assembled variant of scores that were `scale` q k^T at first. ordered: dQ is summed
    in a fixed order. aux: the arrays that its functions read. listing: how it is listed which tiles of queries see a block of
    keys; None: there is no need to. reads: by the name of a gradient what reads the array that it belongs to."""
    batch, q_len, heads, head_dim, kv_len, kv_heads, value_dim = problem("BSHDTGV")
    gradients = [problem[name] for name in ("dq", "dk", "dv", *["dsink"] * ("sink" in problem), *reads)]
    adds = problem.schema is not BACKWARD
    give = _nothing if adds else None
    if any(0 in problem[name].form.shape for name in ("q", "k")):  # no query sees a key
        return Plan([] if adds else [Fill(x, 0.0) for x in gradients if 0 not in x.form.shape], (), give)
    tma, dtype, gpu = choose(problem, family) == "sm_90", DTYPES[problem.dtype], machine(problem.device)
    config: hopper.Config | ampere.Config
    lie, where = sequences_of(problem)
    if reads and lie is not Batched:
        raise NotImplementedError(
            f"{next(iter(reads))}: of packed sequences, and with lengths_k, there is no such gradient yet"
        )
    by_list = listing is not None and lie is Batched and not ordered  # whose turn it is follows from places, not from lists
    kind: dict[str, Any] = {"axes": tuple([len(x.form.shape) for x in aux]), "by_list": by_list}
    kind |= {"lie": lie, "ordered": ordered, "adds": adds}
    plain = tma and lie is Batched and not (aux or reads or listing or adds or made.variant.draws)
    if plain and wide.serves(head_dim, made.variant, value_dim):
        return planned_wide(problem, made, scale)
    plain = plain and not ordered and folded.serves(head_dim, made.variant, value_dim)
    family_of = folded if plain else hopper if tma else ampere
    if family_of is folded:
        config = folded.config_for(head_dim, dtype, made.variant, value_dim)
    elif family_of is hopper:
        config = hopper.config_for(head_dim, dtype, made.variant, value_dim, **kind)
    else:
        config = ampere.config_for(head_dim, dtype, made.variant, problem.bytes_at_once(), value_dim, **kind)
    parts, group = config.parts, heads // kv_heads
    if lie.packed:  # see there, how many blocks that takes
        (ends,) = problem("E")
        tiles, blocks = q_len // config.rows + ends - 1, kv_len // config.kv + ends - 1
    else:
        tiles, blocks = -(-q_len // config.rows), -(-kv_len // config.kv)
    early = Before(problem)
    of_rows = early.memory((batch, heads, 2 * tiles * config.rows), "float32")
    sums = early.memory((batch * heads, tiles * parts.rows, parts.width), "float32")
    turns = {"turns": early.memory((batch * heads, tiles), "int32")} if ordered else {}
    told = where | turns
    given = made.numbers | {name: x for name, x in variant_arrays(problem).items() if name in made.variant.given}
    read = {f"aux{n}": x for n, x in enumerate(aux)}
    if listing and listing.blocked:
        marks = problem["marks"] or early.classes(listing.blocked)
        given["marks"] = spread(marks, (*problem("NH"), *marks.form.shape[2:]))
    listed_by, surveyed = {}, {}
    if listing and by_list:
        if listing.ready_for:
            check(listing.ready_for, made_for(problem, config, listing), but="tiles")
        lists, classes = listed(early, made, listing.varies, config, told | given, read)
        listed_by = {"lists": spread(lists, (batch, kv_heads, *lists.form.shape[2:]))}
        surveyed = {"classes": spread(classes, (batch, heads, *classes.form.shape[2:]))}
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
    main = kernel_for(family_of, config, problem.device).bind(
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
        **given,
        **listed_by,
        **read,
    )
    after = kernel_for(finish, finish.config_of(config), problem.device).bind(
        batch * heads * tiles, gSum=sums, gDQ=problem["dq"], blocks=tiles, heads=heads, unit=scale, **where
    )
    steps = [*early.steps, before, main, after]
    if "sink" in problem:
        steps.append(_of_sinks(problem, sinks.config_of(config), of_rows, batch, tiles))
    late = Before(problem, early.scratch)
    arrays = {"gQ": problem["q"], "gK": problem["k"], "gV": problem["v"], "gDO": problem["dout"], "gSums": of_rows}
    learned = Learned(problem, made, config, late, arrays | where | given | surveyed | read, gpu.processors)
    for name, readers in reads.items():
        learned.launch(name, readers)
    return Plan([*steps, *late.steps], early.scratch, give)


def _nothing(every: Any) -> None:
    """What is given back where all results were given to be added to."""


def band_of(rising: bool, ordered: bool, processors: int) -> int:
    """How many pairs of key head and batch are gone through at once: see tiling.band_of. Blocks that add to dQ in
    order wait for each other when they begin, the longer the more of a pair begin at once."""
    return max(1, processors // SHARING) if rising else max(1, processors // IN_LINE) if ordered else 1


def planned_wide(problem: Problem, made: Assembled, scale: float) -> Plan:
    """The launches of the gradients of wide heads: dK and dV, and dQ by itself. Nothing is summed in memory."""
    batch, q_len, heads, head_dim, kv_len, kv_heads, value_dim = problem("BSHDTGV")
    dtype, gpu = DTYPES[problem.dtype], machine(problem.device)
    by_keys = wide.config_for(head_dim, dtype, made.variant, value_dim)
    by_queries = wide_queries.config_for(head_dim, dtype, made.variant, value_dim)
    (_, where), early, tiles = sequences_of(problem), Before(problem), -(-q_len // by_keys.rows)
    of_rows = early.memory((batch, heads, 2 * tiles * by_keys.rows), "float32")
    before = kernel_for(prepare, prepare.without_sums(by_keys), problem.device).bind(
        batch * heads * tiles,
        gO=problem["out"],
        gDO=problem["dout"],
        gLse=problem["lse"],
        gSums=of_rows,
        gSum=of_rows,  # there are none to clear
        blocks=tiles,
        heads=heads,
        **where,
    )
    steps = [before]
    for module, config, length, its_heads, results in [
        (wide, by_keys, -(-kv_len // by_keys.kv), kv_heads, {"gDK": problem["dk"], "gDV": problem["dv"]}),
        (wide_queries, by_queries, -(-q_len // by_queries.rows), heads, {"gDQ": problem["dq"]}),
    ]:
        steps.append(
            kernel_for(module, config, problem.device).bind(
                batch * its_heads * length,
                gQ=problem["q"],
                gK=problem["k"],
                gV=problem["v"],
                gDO=problem["dout"],
                gSums=of_rows,
                blocks=length,
                heads=its_heads,
                pairs=batch * its_heads,
                band=band_of(made.variant.rising, False, gpu.processors),
                group=heads // kv_heads,
                scale=made.unit * LOG2_E,
                unit=scale,
                **where,
                **results,
                **made.numbers,
                **{name: x for name, x in variant_arrays(problem).items() if name in made.variant.given},
            )
        )
    if "sink" in problem:
        steps.append(_of_sinks(problem, sinks.Config(by_keys.rows, Written(fp32)), of_rows, batch, tiles))
    return Plan(steps, early.scratch)


def _of_sinks(problem: Problem, config: sinks.Config, of_rows: Any, batches: int, tiles: int) -> Any:
    """The launch that finds the sinks' gradients."""
    (heads,) = problem("H")
    return kernel_for(sinks, config, problem.device).bind(
        -(-heads // sinks.HEADS), gSums=of_rows, gSink=problem["sink"], gDSink=problem["dsink"], batches=batches, tiles=tiles
    )
