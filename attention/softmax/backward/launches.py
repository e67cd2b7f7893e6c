"""The launches of attention.backward: what kernels are bound to (choice.py says which)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tiles import fp32
from tiles.arrays import Operand
from tiles.device import machine
from tiles.launch import kernel_for
from tiles.plan import Fill, Plan, nothing
from tiles.schema import Problem

from ..assembled import VariantSpec
from ..launches import DTYPES, LOG2_E, Before, made_for, sequences_of, spread, variant_arrays
from ..prepared_lists import Listing, check
from . import finish, hopper_wide, hopper_wide_queries, prepare, shares, sinks, slopes
from .choice import chosen
from .dq_order import UNORDERED, Heading, Ordered, Turns, Unordered
from .query_lists import listed
from .recomputed_scores import Added
from .results import Written
from .score_gradients import Learned

CLOSE, SHORT = 8, 2048  # multiprocessors that work on one pair at a time, causal, up to how many keys
IN_LINE = 16  # multiprocessors that work on one pair at a time in order, where no query sees more keys than others


def planned(
    problem: Problem,
    spec: VariantSpec,
    scale: float,
    ordered: bool,
    family: str | None,
    aux: Sequence[Operand] = (),
    listing: Listing | None = None,
    reads: Mapping[str, Sequence[Added]] = MappingProxyType({}),
    sunk: bool = False,
) -> Plan:
    """The launches of the gradients of an assembled variant of scores that were `scale` q k^T at first. ordered: dQ is summed
    in a fixed order. aux: the arrays that its functions read. listing: how it is listed which tiles of queries see a block of
    keys; None: there is no need to. reads: by the name of a gradient what reads the array that it belongs to. sunk: is the
    sinks' gradient asked for?"""
    batch, q_len, heads, head_dim, kv_len, kv_heads, value_dim = problem("BSHDTGV")
    gradients = [problem[name] for name in ("dq", "dk", "dv", *["dsink"] * sunk, *reads)]
    adds = problem.schema.arguments["dq"].role == "updated"
    give = nothing if adds else None
    if any(0 in problem[name].form.shape for name in ("q", "k")):  # no query sees a key
        return Plan([] if adds else [Fill(x, 0.0) for x in gradients if 0 not in x.form.shape], (), give)
    (seq_layout, where), gpu = sequences_of(problem), machine(problem.device)
    module, config, plain = chosen(problem, spec, ordered, family, aux, listing, reads)
    if module is hopper_wide:
        return planned_wide(problem, spec, scale, config, ordered, sunk)
    learns, by_list = config.learns, config.by_list
    parts, cut = config.parts, shares.Cut()
    if seq_layout.packed:  # see there, how many blocks that takes
        (ends,) = problem("E")
        tiles, blocks = q_len // config.rows + ends - 1, kv_len // config.kv + ends - 1
    else:
        tiles, blocks = -(-q_len // config.rows), -(-kv_len // config.kv)
    early = Before(problem)
    if not (adds or listing):
        longest_first = spec.variant.monotonic and not isinstance(config.order, Heading)
        cut = shares.cut_of(problem, blocks, tiles, ordered, longest_first, gpu.processors)
    if learns is not slopes.UNASKED:  # all spans of a subgroup would have the same places
        cut = cut._replace(spans=1)
    late = Before(problem, early.scratch)
    of_keys, config = shares.arguments(early, late, config, cut), replace(config, spans=cut.spans > 1)
    of_rows = early.memory((batch, heads, 2 * tiles * config.rows), "float32")
    sums = problem["dq"] if config.alone else early.memory((batch * heads, tiles * parts.rows, parts.width), "float32")
    turns = {}
    if isinstance(config.order, Turns):
        turns["turns"] = early.memory((batch * heads, config.order.lines * tiles), "int32")
    told = where | turns
    given = spec.numbers | {name: x for name, x in variant_arrays(problem).items() if name in spec.variant.params}
    read = {f"aux{n}": x for n, x in enumerate(aux)}
    if listing and listing.blocked:
        marks = problem["marks"] or early.classes(listing.blocked)
        given["marks"] = spread(marks, (*problem("NH"), *marks.form.shape[2:]))
    listed_by, surveyed = {}, {}
    if listing and by_list:
        if listing.ready_for:
            check(listing.ready_for, made_for(problem, config, listing), but="tiles")
        found = listed(early, spec, listing.varies, config, where | given, read)
        surveyed = {"classes": spread(classes := found.pop("classes"), (batch, heads, *classes.form.shape[2:]))}
        listed_by = {name: spread(x, (batch, kv_heads, *x.form.shape[2:])) for name, x in found.items()}
    learnt: dict[str, Any] = {}
    if learns is not slopes.UNASKED:
        rows = config.learners * blocks * (1 if seq_layout.packed else batch)
        size = math.prod(problem["dalibi"].form.shape)
        learnt["found"] = early.memory((rows, size), "float32")
        early.steps.append(Fill(learnt["found"], 0.0))
    main = kernel_for(module, config, problem.device).bind(
        of_keys["batch_heads"] * blocks,
        gQ=problem["q"],
        gK=problem["k"],
        gV=problem["v"],
        gDO=problem["dout"],
        gSums=of_rows,
        gSum=sums,
        blocks=blocks,
        band=band_of(spec.variant.monotonic, config.order, gpu.processors, kv_len if plain else math.inf),
        scale=spec.unit * LOG2_E,
        unit=scale,
        **of_keys,
        **told,
        **given,
        **listed_by,
        **read,
        **learnt,
    )
    before = _of_queries(problem, prepare.config_of(config), of_rows, of_rows if config.alone else sums, tiles, told)
    steps = [*early.steps, before, main]
    if not config.alone:
        after = kernel_for(finish, finish.config_of(config), problem.device)
        told = {"blocks": tiles, "heads": heads, "unit": scale} | where
        steps.append(after.bind(batch * heads * tiles, gSum=sums, gDQ=problem["dq"], **told))
    if sunk:
        steps.append(_of_sinks(problem, sinks.config_of(config), of_rows, batch, tiles))
    arrays = {"gQ": problem["q"], "gK": problem["k"], "gV": problem["v"], "gDO": problem["dout"], "gSums": of_rows}
    learned = Learned(problem, spec, config, late, arrays | where | given | surveyed | read, gpu.processors)
    for name, readers in reads.items():
        if name == "dalibi" and learnt:
            learned.add_up(name, learnt["found"])
        else:
            learned.launch(name, readers)
    return Plan([*steps, *late.steps], early.scratch, give)


def band_of(rising: bool, order: Unordered, processors: int, keys: float = math.inf) -> int:
    """How many pairs of share and batch are gone through at once: see tiling.band_of. keys: of a sequence. Blocks that add
    to dQ in order wait for each other when they begin, the longer the more of a pair begin at once."""
    ordered = isinstance(order, Ordered)
    sharing = CLOSE if keys <= SHORT and not ordered else order.sharing
    return max(1, processors // sharing) if rising else max(1, processors // IN_LINE) if ordered else 1


def planned_wide(
    problem: Problem, spec: VariantSpec, scale: float, by_keys: hopper_wide.Config, ordered: bool, sunk: bool
) -> Plan:
    """The launches of the gradients of wide heads: dK and dV, and dQ by itself. Of dQ nothing is summed in memory."""
    batch, q_len, heads, head_dim, kv_len, kv_heads, value_dim = problem("BSHDTGV")
    dtype, gpu = DTYPES[problem.dtype], machine(problem.device)
    by_queries = hopper_wide_queries.config_for(head_dim, dtype, spec.variant, value_dim)
    (_, where), early, tiles = sequences_of(problem), Before(problem), -(-q_len // by_keys.rows)
    blocks, group, late = -(-kv_len // by_keys.kv), heads // kv_heads, Before(problem, early.scratch)
    cut = shares.cut_of(problem, blocks, tiles, ordered, spec.variant.monotonic, gpu.processors)
    of_keys, by_keys = shares.arguments(early, late, by_keys, cut), replace(by_keys, spans=cut.spans > 1)
    of_rows = early.memory((batch, heads, 2 * tiles * by_keys.rows), "float32")
    before = _of_queries(problem, prepare.without_sums(by_keys), of_rows, of_rows, tiles, where)  # there are none to clear
    of_queries = {"heads": heads, "batch_heads": batch * heads, "group": group, "gDQ": problem["dq"]}
    steps = [before]
    for module, config, count, own in [
        (hopper_wide, by_keys, blocks, of_keys),
        (hopper_wide_queries, by_queries, -(-q_len // by_queries.rows), of_queries),
    ]:
        steps.append(
            kernel_for(module, config, problem.device).bind(
                own["batch_heads"] * count,
                gQ=problem["q"],
                gK=problem["k"],
                gV=problem["v"],
                gDO=problem["dout"],
                gSums=of_rows,
                blocks=count,
                band=band_of(spec.variant.monotonic, UNORDERED, gpu.processors),
                scale=spec.unit * LOG2_E,
                unit=scale,
                **where,
                **own,
                **spec.numbers,
                **{name: x for name, x in variant_arrays(problem).items() if name in spec.variant.params},
            )
        )
    if sunk:
        steps.append(_of_sinks(problem, sinks.Config(by_keys.rows, Written(fp32)), of_rows, batch, tiles))
    return Plan([*steps, *late.steps], early.scratch)


def _of_queries(problem: Problem, config: prepare.Config, of_rows: Any, sums: Any, tiles: int, told: Mapping[str, Any]) -> Any:
    """The launch that finds two numbers of each query, and clears the sums."""
    batch, heads = problem("BH")
    dlse = {} if (x := problem["dlse"]) is None else {"dlse": x}
    return kernel_for(prepare, replace(config, of_lse=bool(dlse)), problem.device).bind(
        batch * heads * tiles,
        gO=problem["out"],
        gDO=problem["dout"],
        gLse=problem["lse"],
        gSums=of_rows,
        gSum=sums,
        blocks=tiles,
        heads=heads,
        **dlse,
        **told,
    )


def _of_sinks(problem: Problem, config: sinks.Config, of_rows: Any, batches: int, tiles: int) -> Any:
    """The launch that finds the sinks' gradients."""
    (heads,) = problem("H")
    return kernel_for(sinks, config, problem.device).bind(
        -(-heads // sinks.HEADS), gSums=of_rows, gSink=problem["sink"], gDSink=problem["dsink"], batches=batches, tiles=tiles
    )
