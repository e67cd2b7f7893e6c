"""How rows are appended to a cache: what the call is checked for, and its launches."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.checks import check_options, read
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for

from ...kernels.decode import cache_write
from ...parts.cache_scales import COLUMNS, HEADS, QUANTIZED, ComputedDescales, GivenDescales, NoDescales
from ...parts.row_norms import NO_ROW_NORM, NoRowNorm, RowLayerNorm, RowRmsNorm
from ..softmax.forward_launches import DTYPES


def has_descale_per_key(problem: Problem) -> bool:
    """Do k_descale and v_descale have one number for each key and head? ValueError: only one of them has."""
    names = "k_descale", "v_descale"
    per_key = {"seqlen_k" in problem.axes(name) for name in names if name in problem}
    if len(per_key) > 1:
        raise problem.error("v_descale", "must have as many axes as k_descale: both of each key and head, or neither", *names)
    return any(per_key)


def plan_append(
    problem: Problem,
    interleaved: bool,
    causal: bool,
    queries: tuple[Operand, Operand] | None,
    ends: Operand | None,
    norm_eps: float,
) -> list:
    """The steps of a plan that write new keys and values. queries: (q, out) if q is rotated to out. ends: cu_seqlens of packed
    new tokens, or None. All other arrays have the names and axes that attention.append gives them. ValueError: the arrays do
    not fit each other."""
    _check_cache(problem)
    _check_rotary(problem)
    descales = problem["k_descale"], problem["v_descale"]
    if "v" in problem and (descales[0] is None) != (descales[1] is None):
        name, other = ("k_descale", "v_descale") if descales[0] is None else ("v_descale", "k_descale")
        raise ValueError(f"{name}: must be passed together with {other}: {name}=None")
    has_descale_per_key(problem)
    if descales[0] is not None and problem["k"].form.itemsize > 1:
        raise ValueError(
            f"k_descale: must be None unless the cache is float8_e4m3fn or int8: k.dtype={problem['k'].form.dtype!r}"
        )
    if queries and "cos" not in problem:
        raise ValueError("q: is passed to be rotated, and needs rotary=(cos, sin): rotary=None")
    batch, tokens, heads = problem("batch", "seqlen_new", "heads_k")
    if queries and ends and problem.extents["seqlen_q"] != tokens:
        raise problem.error("q", "must have as many tokens as k_new where sequences are packed", "q", "k_new")
    if batch == 0 or heads == 0 or (tokens == 0 and (not queries or problem.extents["seqlen_q"] == 0)):
        return []
    step = launch_append(problem, interleaved, causal, queries, ends, norm_eps)
    if problem.device is None or check_options().values:
        return [RoomCheck(problem, ends), step]
    return [step]


def launch_append(
    problem: Problem,
    interleaved: bool,
    causal: bool,
    queries: tuple[Operand, Operand] | None,
    ends: Operand | None,
    norm_eps: float,
    writes: bool = True,
) -> Step:
    """The launch of cache_write.py's kernel; `plan_append` documents the arguments. writes: does it write keys and values, or
    rotate queries alone?"""
    (q, out), names = queries or (None, None), ("k_new", "k", "v_new", "v")
    k_new, k, v_new, v = [problem[name] if writes else None for name in names]
    pairs, kv_heads, q_heads = (problem.extents.get(name, 0) for name in ("pairs", "heads_k", "heads"))
    arrays = {"gKNew": k_new, "gK": k, "gQ": q, "gOut": out}
    arrays |= {f"{name}Pairs": _view_as_pairs(x, pairs, interleaved) for name, x in arrays.items()}
    arrays |= {"gVNew": v_new, "gV": v, "gLengths": problem["lengths"], "gEnds": ends}
    arrays |= {"gCos": problem["cos"], "gSin": problem["sin"], "gPositions": problem["positions"]}
    kind, cache, head_tiles, kv_head_tiles = NoDescales, problem.dtype, -(-q_heads // HEADS) if queries else 0, 0
    columns = problem.extents["head_dim"]
    if writes:
        index = problem["batch_index"]  # is a page table with one page for each sequence
        arrays["gPages"] = problem["pages"] if index is None else index.spread(1, 1)
        kv_head_tiles, cache = -(-kv_heads // HEADS), problem["k"].form.dtype
        columns = max(problem.extents["head_dim"], problem.extents.get("head_dim_v", 0))
        if "k_descale" in problem:
            for name in [name for name in ("k_descale", "v_descale") if name in problem]:
                x = problem[name]
                by_head = len(x.shape) == 1
                arrays[f"g{name[0].upper()}Descale"] = x.spread(0, problem["lengths"].shape[0]) if by_head else x
            kind = ComputedDescales if has_descale_per_key(problem) else GivenDescales
    k_norm, k_args = _row_norm(problem, "k_new_norm", "k_norm", kv_heads, pairs, interleaved) if writes else (NO_ROW_NORM, {})
    q_norm, q_args = _row_norm(problem, "q_norm", "q_norm", q_heads, pairs, interleaved) if queries else (NO_ROW_NORM, {})
    norm_args = k_args | q_args | ({"norm_eps": norm_eps} if k_args or q_args else {})
    config = cache_write.Config(DTYPES[problem.dtype], DTYPES[cache], kind, k_norm, q_norm)
    tokens = max(x.shape[1] for x in (k_new, q) if x is not None)
    rows = problem.extents["batch"] * tokens
    # in place, a norm of q would read columns that another block has overwritten already
    in_place = bool(queries and "out" in problem and queries[1].source == problem["out"].source)
    whole_rows = kind(config.cache).needs_whole_row or (in_place and q_norm.is_norm)
    return kernel_for(cache_write, config, problem.device).bind(
        (-(-rows // cache_write.WARPS), 2 * kv_head_tiles + head_tiles, 1 if whole_rows else -(-columns // COLUMNS)),
        rows=rows,
        tokens=tokens,
        page_size=problem.extents["seqlen_k"] if writes else 1,
        kv_head_tiles=kv_head_tiles,
        one_position=int(not causal),
        **arrays,
        **norm_args,
    )


def _row_norm(
    problem: Problem, name: str, param: str, heads: int, pairs: int, interleaved: bool
) -> tuple[NoRowNorm, dict[str, Operand | None]]:
    """(the norm whose arrays have this name, the kernel's arguments for it, which are called `param`)"""
    arrays = {param: problem[name], f"{param}_bias": problem[f"{name}_bias"]}
    arrays = {key: x if len(x.shape) > 1 else x.spread(0, heads) for key, x in arrays.items() if x is not None}
    args = arrays | {f"{key}_pairs": _view_as_pairs(x, pairs, interleaved) for key, x in arrays.items()}
    norm = (None, RowRmsNorm, RowLayerNorm)[len(arrays)]
    return (norm(param == "q_norm"), args) if norm else (NO_ROW_NORM, {})


def _view_as_pairs(x: Operand | None, pairs: int, interleaved: bool) -> Operand | None:
    """The rotated columns of x as (.., 2, pairs): a pair is columns 2n and 2n + 1 (interleaved), or n and pairs + n."""
    if x is None or not pairs:
        return None
    form = x.form
    *strides, step = form.strides
    steps = (step, 2 * step) if interleaved else (pairs * step, step)
    return x._replace(form=form._replace(shape=(*form.shape[:-1], 2, pairs), strides=(*strides, *steps)))


def _check_cache(problem: Problem) -> None:
    batch, caches, page_size = problem("sequences", "batch_cache", "seqlen_k")
    k = problem["k"].form
    passed = [name for name in ("v", "v_new", "v_descale") if name in problem]
    if passed and not {"v", "v_new"} <= {*passed}:
        missing = "v" if "v" not in passed else "v_new"
        raise ValueError(f"{missing}: must be passed together with {passed[0]}: {missing}=None")
    for name, form in ((name, problem[name].form) for name in ("k", "v") if name in problem):
        if form.dtype not in (problem.dtype, *QUANTIZED) or form.dtype != k.dtype:
            must_match, values = (", as k's", f"k.dtype={k.dtype!r}, ") if name == "v" else ("", "")
            values = f"{name}.dtype={form.dtype!r}, {values}k_new.dtype={problem.dtype!r}"
            raise TypeError(f"{name}: dtype must be k_new's, float8_e4m3fn or int8{must_match}: {values}")
        if form.strides[-1] != form.itemsize and form.shape[-1] > 1:
            raise problem.error(name, f"last axis must be contiguous: {name}.strides={form.strides} bytes", name)
    gpu = machine(problem.device)
    if k.dtype == "float8_e4m3fn" and not gpu.target.has_fp8:
        raise ValueError(f"k: a cache of float8_e4m3fn needs a GPU of compute capability 8.9 or later, and is on {gpu}")
    if page_size == 0:
        raise problem.error("k", "must have at least one row for keys", "k")
    if "pages" in problem and "batch_index" in problem:
        raise ValueError("batch_index: must be None where pages is passed, which says already where a sequence's keys are")
    if "pages" not in problem and "batch_index" not in problem and caches != batch:
        raise problem.error(
            "k", f"batch must equal the number of sequences, {batch}, unless pages or batch_index is passed", "k"
        )


def _check_rotary(problem: Problem) -> None:
    """TypeError, ValueError: one of cos and sin is missing, or has the wrong number of columns."""
    if ("cos" in problem) != ("sin" in problem):
        raise TypeError("rotary: must be a pair of arrays (cos, sin)")
    if "cos" not in problem:
        if "positions" in problem:
            raise ValueError("positions: are rows of rotary's tables, and need rotary=(cos, sin): rotary=None")
        return
    columns, pairs = problem("head_dim", "pairs")
    if not 0 < 2 * pairs <= columns:
        rule = f"must have a column for each pair of rotated columns, from 1 to {columns // 2}"
        halve = f" (transformers' tables repeat each column: pass cos[:, :{pairs // 2}])" if pairs == columns else ""
        raise problem.error("cos", rule + halve, "cos", "k_new")


class RoomCheck(NamedTuple):
    """A step of a plan that reads lengths, pages and positions on the host, and launches nothing. ValueError: the cache has no
    room for the new tokens, or the rotary tables have no row for them."""

    problem: Problem
    ends: Operand | None

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        """Check the arrays at `addresses`, after what is queued on `stream`. Nothing is checked while a CUDA graph is
        captured."""
        problem = self.problem
        arrays = {name: problem[name] for name in ("lengths", "pages", "batch_index", "positions")} | {"ends": self.ends}
        values = {name: read(addresses[x.source], x.form, stream) for name, x in arrays.items() if x}
        if any(x is None for x in values.values()):  # a CUDA graph is being captured
            return
        (new, size, caches), lengths = problem("seqlen_new", "seqlen_k", "batch_cache"), values["lengths"]
        counts = np.diff(values["ends"]) if "ends" in values else np.full(len(lengths), new)
        max_keys = size * problem.extents["pages_per_seq"] if "pages" in problem else size
        starts, table_rows = values.get("positions", lengths), problem.extents.get("positions", 0)
        for b, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist())):
            tokens = f"lengths[{b}]={length}, {count} new tokens"
            unused = "pages" in values and length == -1 and values["pages"][b, 0] < 0  # an unused row of PagedCache.starts
            if unused or not count:  # nothing is written
                continue
            if length < 0:
                raise ValueError(f"lengths: must not be negative: {tokens}")
            if length + count > max_keys:
                raise ValueError(f"lengths: sequence {b} has room for {max_keys} keys: {tokens}")
            if "cos" in problem and not 0 <= starts[b] <= table_rows - count:
                raise ValueError(f"rotary: has {table_rows} positions: sequence {b} begins at {starts[b]}: {tokens}")
            table = values["pages"][b] if "pages" in values else values.get("batch_index", np.arange(len(lengths)))[b : b + 1]
            for n in range(length // size, -(-(length + count) // size) if count else 0):
                if not 0 <= table[n] < caches:
                    name = f"pages[{b}, {n}]" if "pages" in values else f"batch_index[{b}]"
                    raise ValueError(f"{name.partition('[')[0]}: must be from 0 to {caches - 1}: {name}={table[n]}, {tokens}")
