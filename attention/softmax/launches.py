"""From an assembled variant of attention to its launches: which kernels serve a problem, and what they are told."""

import math
from collections.abc import Sequence
from typing import Any

from tiles.arrays import ALIGNMENT, Operand
from tiles.device import machine, persistent
from tiles.dtypes import bf16, fp16
from tiles.launch import kernel_for
from tiles.program import Fill, Plan, Step
from tiles.schema import Problem

from ..families import choose
from . import ampere, block_masks, hopper, norms
from . import blocks as lists
from .assembled import Assembled
from .block_masks import Blocked
from .norms import Layer, Rms
from .online import SLACK
from .ready import Listing, check, giving
from .sequences import Batched, InUse, Packed, PackedInUse, Parts
from .tiling import band_of

DTYPES = {"bfloat16": bf16, "float16": fp16}
LOG2_E = math.log2(math.e)


class Before:
    """What comes before the launch of attention itself, or after it: other launches, and what they leave in scratch memory, of
    which there is some already."""

    def __init__(self, problem: Problem, scratch: list[tuple[tuple[int, ...], str]] | None = None):
        self.problem = problem
        self.steps: list[Step] = []
        self.scratch = [] if scratch is None else scratch

    def memory(self, shape: tuple[int, ...], dtype: str) -> Operand:
        """Some of it."""
        self.scratch.append((shape, dtype))
        return self.problem.scratch(len(self.scratch) - 1, shape, dtype)

    def launch(self, module: Any, config: Any, grid: int, **arguments: Any) -> None:
        """One more."""
        self.steps.append(kernel_for(module, config, self.problem.device).bind(grid, **arguments))

    def normed_keys(self, norm: Rms, padded: int, eps: float) -> Operand:
        """The keys' norm."""
        problem = self.problem
        shape = batch, rows, heads, columns = problem("BTGD")
        config = norms.Config(norm, padded, DTYPES[problem.dtype], problem.bytes_at_once("k") == ALIGNMENT)
        found, blocks = self.memory(shape, problem.dtype), -(-rows // config.rows)
        numbers = {"norm_eps": eps, "columns": columns}
        arrays = {"gX": problem["k"], "gOut": found, **norm_arrays(problem, "k_norm", "GD")}
        self.launch(norms, config, batch * heads * blocks, blocks=blocks, heads=heads, **numbers, **arrays)
        return found

    def classes(self, blocked: Blocked) -> Operand:
        """The map of a caller's lists of blocks. ValueError."""
        problem = self.problem
        batch, heads, rows = problem("IJP")
        q_len, kv_len, sequences, all_heads = problem("STNH")
        if batch not in (1, sequences) or heads not in (1, all_heads):
            wanted = f"must have a batch of {sequences} or 1, and {all_heads} or 1 heads"
            raise problem.error("kv_num_blocks", wanted, "kv_num_blocks", "q")
        if "cu_seqlens" not in problem and rows * blocked.rows < q_len:
            raise problem.error(
                "kv_num_blocks", f"must have all rows of blocks of {blocked.rows} queries", "kv_num_blocks", "q"
            )
        shape = batch, heads, rows, -(-kv_len // blocked.cols)
        found = self.memory(shape, "int8")
        given = {name: problem[name] for name in block_masks.FIELDS if name in problem}
        grid = batch * heads * -(-rows // block_masks.WARPS)
        numbers = {"rows": rows, "cols": shape[3], "heads": heads}
        self.launch(block_masks, block_masks.Config(), grid, marks=found, **numbers, **given)
        return found

    def listed(
        self, made: Assembled, varies: tuple[bool, bool], config: Any, blocks: int, told: dict[str, Any], read: dict[str, Any]
    ) -> Operand:
        """The lists of key blocks of `blocks` tiles of queries. varies: do they differ by batch, by head? told, read: what
        kernels are told of the variant and of sequences, and the arrays that its functions read."""
        batch, heads, kv_len = self.problem("BHT")
        many, keys = (batch if varies[0] else 1, heads if varies[1] else 1), -(-kv_len // config.kv)
        found, classes = self.memory((*many, blocks, lists.HEAD + keys), "int32"), self.memory((*many, blocks, keys), "int8")
        survey = lists.Survey(made.variant, config.rows, config.kv, config.axes)
        compaction = lists.Compaction(made.variant, config.rows, config.kv)
        tiles, groups = many[0] * many[1] * blocks, -(-keys // lists.WARPS)
        told |= {"classes": classes, "blocks": blocks, "heads": many[1]}
        self.launch(survey, survey, tiles * groups, groups=groups, **told, **read)
        self.launch(compaction, compaction, tiles, lists=found, **told)
        return found


def planned(
    problem: Problem,
    made: Assembled,
    return_lse: bool,
    family: str | None,
    aux: Sequence[Operand] = (),
    listing: Listing | None = None,
    norm_eps: float = 0.0,
) -> Plan:
    """The launch of an assembled variant, after those that it needs: of the keys' norm; of the map of a caller's blocks; and
    where nobody knows which keys are seen before they are asked for, and each sequence lies in a batch of its own, of its lists
    of key blocks. listing: how these are made; None: there is no need of them. Of a schema without results they are all that is
    made, and given back as BlockLists."""
    batch, q_len, heads, head_dim, kv_len, kv_heads, value_dim = problem("BSHDTGV")
    out, lse, only_lists = problem["out"], problem["lse"] if return_lse else None, not problem.schema.written
    empty = 0 in (batch, q_len, heads)
    if only_lists and (empty or kv_len == 0):
        raise problem.error("q" if empty else "k", "must not be empty where lists of its blocks are made", "q", "k")
    if empty or kv_len == 0:  # no query sees a key
        if "sink" in problem and not empty:
            raise problem.error("k", "must have at least one key where there is a sink", "k")
        return Plan([Fill(x, value) for x, value in ((out, 0), (lse, -math.inf)) if x])
    lie, where = sequences_of(problem)
    tma, dtype, gpu = choose(problem, family) == "sm_90", DTYPES[problem.dtype], machine(problem.device)
    variant, axes = made.variant, tuple(len(x.form.shape) for x in aux)
    config: hopper.Config | ampere.Config
    by_list = listing is not None and lie is Batched
    if only_lists and listing is None:
        raise ValueError("mask: must say which keys are seen, or blocks, where lists are made of them: mask=None, blocks=None")
    if (only_lists or "lists" in problem) and not by_list:
        name = "lengths_k" if "lengths_k" in problem else "cu_seqlens"
        raise problem.error(name, "must be None where lists of key blocks are made or given", name)
    unrounded = not only_lists and problem.schema.arguments["out"].holds == "float32"
    kind = {"lie": lie, "axes": axes, "by_list": by_list, "unrounded": unrounded}
    if lie is Batched and not (axes or by_list or unrounded):
        kind = {}
    if tma:
        config = hopper.config_for(head_dim, dtype, variant, min(kv_len, made.reach), value_dim, **kind)
    else:
        room, piece = gpu.shared_bytes, problem.bytes_at_once()
        config = ampere.config_for(head_dim, dtype, variant, room, piece, value_dim, **kind)
    blocks, pairs = -(-q_len // config.rows), batch * heads
    if issubclass(lie, Packed):
        (ends,) = problem("E")
        blocks, pairs = q_len // config.rows + ends - 1, heads
    if lie is Parts:
        blocks = problem.extents["Z"] * -(-where["q_len"] // config.rows)
    group, at_once = heads // kv_heads, gpu.processors
    grid = pairs * blocks
    if config.persistent:
        grid = persistent(gpu, grid)
    nbytes = kv_len * (head_dim + value_dim) * dtype.itemsize / group
    alike = config.persistent and made.reach < kv_len  # a window's tiles, but for a pair's first ones
    uneven = not alike and (variant.rising or (config.persistent and q_len % config.rows > 0))
    before, key_norm = Before(problem), norm_of(problem, "k_norm")
    given = made.numbers | variant_arrays(problem)
    read = {f"aux{n}": x for n, x in enumerate(aux)}
    if listing and listing.blocked:
        marks = problem["marks"] or before.classes(listing.blocked)
        given["marks"] = spread(marks, (*problem("NH"), *marks.form.shape[2:]))
    if listing and by_list:
        if listing.ready_for:
            check(listing.ready_for, made_for(problem, config, listing))
        of_scores = {name: x for name, x in given.items() if name in variant.given}
        found = problem["lists"] or before.listed(made, listing.varies, config, blocks, where | of_scores, read)
        if only_lists:
            marked = (marks, listing.blocked.rows, listing.blocked.cols) if listing.blocked else None
            return Plan(before.steps, before.scratch, giving(made_for(problem, config, listing), found, marked))
        given["lists"] = spread(found, (batch, heads, *found.form.shape[2:]))
    attend = kernel_for(hopper if tma else ampere, config, problem.device).bind(
        grid,
        gQ=problem["q"],
        gK=problem["k"] if key_norm is None else before.normed_keys(key_norm, config.head_dim, norm_eps),
        gV=problem["v"],
        gO=out,
        gLse=lse,
        blocks=blocks,
        heads=heads,
        pairs=pairs,
        band=band_of(grid, at_once, nbytes, gpu.cache_bytes, uneven),
        group=group,
        scale=made.unit * LOG2_E,
        slack=SLACK / (made.unit * LOG2_E),
        **where,
        **given,
        **read,
    )
    return Plan([*before.steps, attend], before.scratch)


def made_for(problem: Problem, config: Any, listing: Listing) -> str:
    """Which calls lists serve: see BlockLists."""
    batch, heads, queries, keys = map(int, problem("BHST"))
    each = [f"{name}={n if differ else 'any'}" for name, n, differ in zip(("batch", "heads"), (batch, heads), listing.varies)]
    return "; ".join([f"{queries=}; {keys=}", *each, f"tiles={config.rows} x {config.kv}", listing.seen])


def variant_arrays(problem: Problem) -> dict[str, Operand]:
    """The arrays that variants read, by the names that these know them by."""
    found = {"slopes": over(problem, "alibi", "NH"), "sinks": problem["sink"], "bias": over(problem, "bias", "NHST")}
    found["seeds"] = problem["seed"]
    return {name: x for name, x in found.items() if x is not None} | norm_arrays(problem, "q_norm", "HD")


def norm_of(problem: Problem, name: str) -> Rms | None:
    """The norm of this name, if there is one."""
    return None if name not in problem else Layer() if f"{name}_bias" in problem else Rms()


def norm_arrays(problem: Problem, name: str, axes: str) -> dict[str, Operand]:
    """The same of a norm: weights, and a bias if there is one. ValueError."""
    found = {}
    for said, which in (("norm_weights", name), ("norm_bias", f"{name}_bias")):
        operand = over(problem, which, axes)
        if operand is not None:
            if operand.form.strides[-1] != operand.form.itemsize:
                raise ValueError(f"{which}: last axis must be contiguous: {which}.strides={problem.forms[which].strides}")
            found[said] = operand
    return found


def sequences_of(problem: Problem) -> tuple[type[Batched], dict[str, Any]]:
    """How a problem's sequences lie, and what its kernels are told of that; ValueError."""
    q_len, kv_len = problem("ST")
    if "cu_seqlens_k" in problem and "cu_seqlens" not in problem:
        raise ValueError("cu_seqlens_k: takes cu_seqlens, too, which is None")
    if "cu_seqlens" in problem:
        if "cu_seqlens_k" not in problem and q_len != kv_len:
            raise problem.error("cu_seqlens_k", "must be given where keys are more or fewer than queries", "q", "k")
        ends = problem["cu_seqlens"]
        where = {"ends": ends, "ends_k": problem["cu_seqlens_k"] or ends}
        if "lengths_k" in problem:
            return PackedInUse, where | {"lengths": problem["lengths_k"]}
        return Packed, where
    if "lengths_k" in problem and "Z" in problem.extents:
        return Parts, _parts(problem)
    if "lengths_k" in problem:
        return InUse, {"q_len": q_len, "lengths": problem["lengths_k"]}
    return Batched, {"q_len": q_len, "kv_len": kv_len}


def _parts(problem: Problem) -> dict[str, Any]:
    """What kernels are told of Parts; ValueError, NotImplementedError."""
    lengths, (q_len, parts, batch) = problem["lengths_k"], problem("SZB")
    form = lengths.form
    if parts == 0 or q_len % parts:
        raise problem.error("lengths_k", "must have so many parts as queries are divided into", "lengths_k", "q")
    if form.strides != (parts * form.itemsize, form.itemsize):
        raise ValueError(f"lengths_k: must be contiguous: lengths_k.strides={form.strides}")
    for name in ("cu_seqlens", "bias", "seed", "aux0", "kv_indices", "lists"):
        if name in problem or (batch > 1 and "alibi" in problem):
            raise NotImplementedError(f"lengths_k: of parts of queries it is not served with {name.rstrip('0')}")
    flat = lengths._replace(form=form._replace(shape=(batch * parts,), strides=(form.itemsize,)))
    return {"q_len": q_len // parts, "parts": parts, "lengths": flat}


def over(problem: Problem, name: str, axes: str) -> Operand | None:
    """An argument spread over axes where it has an extent of 1, and over the first if it lacks that. ValueError."""
    operand = problem[name]
    if operand is None:
        return None
    form = operand.form
    shape, strides, lettered = form.shape, form.strides, problem.axes(name)
    if len(shape) < len(axes):
        shape, strides, lettered = (1, *shape), (0, *strides), f"U{lettered}"
    extents = problem(axes)
    if any(have not in (1, want) for have, want in zip(shape, extents)):
        wanted = ", ".join(f"{want} or 1" if want > 1 and a in "UWXY" else f"{want}" for a, want in zip(lettered, extents))
        raise ValueError(f"{name}: must have the shape ({wanted}): {name}.shape={form.shape}")
    return spread(operand._replace(form=form._replace(shape=shape, strides=strides)), extents)


def spread(operand: Operand, extents: tuple[int, ...]) -> Operand:
    """With these extents, all elements being one along axes that have an extent of 1."""
    form = operand.form
    strides = tuple(0 if have == 1 else stride for have, stride in zip(form.shape, form.strides))
    return operand._replace(form=form._replace(shape=extents, strides=strides))
