"""How rows are appended to a cache: what the call is checked for, and its launches."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.checks import check_options, read
from tiles.launching.devices import machine

from ..kernels import cache_write


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
    new, cache = (problem["k_new"], problem["v_new"]), (problem["k"], problem["v"])
    _check_cache(problem)
    rotary = _rotary(problem)
    descales = problem["k_descale"], problem["v_descale"]
    if (descales[0] is None) != (descales[1] is None):
        name, other = ("k_descale", "v_descale") if descales[0] is None else ("v_descale", "k_descale")
        raise ValueError(f"{name}: must be passed together with {other}: {name}=None")
    has_descale_per_key(problem)
    if descales[0] is not None and cache[0].form.itemsize > 1:
        raise ValueError(f"k_descale: must be None unless the cache is float8_e4m3fn: k.dtype={cache[0].form.dtype!r}")
    if queries and rotary is None:
        raise ValueError("q: is passed to be rotated, and needs rotary=(cos, sin): rotary=None")
    batch, tokens, heads = problem("batch", "seqlen_new", "heads_k")
    if queries and ends and problem.extents["seqlen_q"] != tokens:
        raise problem.error("q", "must have as many tokens as k_new where sequences are packed", "q", "k_new")
    if batch == 0 or heads == 0 or (tokens == 0 and (not queries or problem.extents["seqlen_q"] == 0)):
        return []
    placement = {name: problem[name] for name in ("pages", "batch_index", "positions")}
    step = cache_write.launch(
        problem.device,
        new,
        cache,
        problem["lengths"],
        ends=ends,
        rotary=rotary,
        interleaved=interleaved,
        descales=descales,
        queries=queries,
        causal=causal,
        norms=(norm_operands(problem, "k_new_norm", "heads_k"), norm_operands(problem, "q_norm", "heads") if queries else None),
        norm_eps=norm_eps,
        in_place=bool(queries and "out" in problem and queries[1].source == problem["out"].source),
        **placement,
    )
    if problem.device is None or check_options().values:
        return [RoomCheck(problem, ends), step]
    return [step]


def norm_operands(problem: Problem, name: str, heads: str) -> cache_write.NormOperands | None:
    """The arrays of the norm `name`, None if it is not given. heads: the name of the axis of its heads."""
    if name not in problem:
        return None
    arrays = problem[name], problem[f"{name}_bias"]
    weights, bias = (x.spread(0, problem.extents[heads]) if x and len(x.shape) == 1 else x for x in arrays)
    return cache_write.NormOperands(weights, bias)


def _check_cache(problem: Problem) -> None:
    batch, caches, page_size = problem("sequences", "batch_cache", "seqlen_k")
    k, v = problem["k"].form, problem["v"].form
    for name, form in ("k", k), ("v", v):
        if form.dtype not in (problem.dtype, "float8_e4m3fn") or form.dtype != k.dtype:
            also, values = (", as k's", f"k.dtype={k.dtype!r}, ") if name == "v" else ("", "")
            values = f"{name}.dtype={form.dtype!r}, {values}k_new.dtype={problem.dtype!r}"
            raise TypeError(f"{name}: dtype must be k_new's or float8_e4m3fn{also}: {values}")
        if form.strides[-1] != form.itemsize and form.shape[-1] > 1:
            raise problem.error(name, f"last axis must be contiguous: {name}.strides={form.strides} bytes", name)
    gpu = machine(problem.device)
    if k.itemsize == 1 and not gpu.target.has_fp8:
        raise ValueError(f"k: a cache of float8_e4m3fn needs a GPU of compute capability 8.9 or later, and is on {gpu}")
    if page_size == 0:
        raise problem.error("k", "must have at least one row for keys", "k")
    if "pages" in problem and "batch_index" in problem:
        raise ValueError("batch_index: must be None where pages is passed, which says already where a sequence's keys are")
    if "pages" not in problem and "batch_index" not in problem and caches != batch:
        raise problem.error(
            "k", f"batch must equal the number of sequences, {batch}, unless pages or batch_index is passed", "k"
        )


def _rotary(problem: Problem) -> tuple[Operand, Operand] | None:
    """(cos, sin), None without rotary. TypeError, ValueError: one is missing, or has the wrong number of columns."""
    if ("cos" in problem) != ("sin" in problem):
        raise TypeError("rotary: must be a pair of arrays (cos, sin)")
    if "cos" not in problem:
        if "positions" in problem:
            raise ValueError("positions: are rows of rotary's tables, and need rotary=(cos, sin): rotary=None")
        return None
    columns, pairs = problem("head_dim", "pairs")
    if not 0 < 2 * pairs <= columns:
        rule = f"must have a column for each pair of rotated columns, from 1 to {columns // 2}"
        halve = f" (transformers' tables repeat each column: pass cos[:, :{pairs // 2}])" if pairs == columns else ""
        raise problem.error("cos", rule + halve, "cos", "k_new")
    return problem["cos"], problem["sin"]


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
        most = size * problem.extents["pages_per_seq"] if "pages" in problem else size
        starts, table_rows = values.get("positions", lengths), problem.extents.get("positions", 0)
        for b, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist())):
            tokens = f"lengths[{b}]={length}, {count} new tokens"
            unused = "pages" in values and length == -1 and values["pages"][b, 0] < 0  # an unused row of PagedCache.starts
            if unused or not count:  # nothing is written
                continue
            if length < 0 or length + count > most:
                raise ValueError(f"lengths: sequence {b} has room for {most} keys: {tokens}")
            if "cos" in problem and not 0 <= starts[b] <= table_rows - count:
                raise ValueError(f"rotary: has {table_rows} positions: sequence {b} begins at {starts[b]}: {tokens}")
            table = values["pages"][b] if "pages" in values else values.get("batch_index", np.arange(len(lengths)))[b : b + 1]
            for n in range(length // size, -(-(length + count) // size) if count else 0):
                if not 0 <= table[n] < caches:
                    name = f"pages[{b}, {n}]" if "pages" in values else f"batch_index[{b}]"
                    raise ValueError(f"{name.partition('[')[0]}: must be from 0 to {caches - 1}: {name}={table[n]}, {tokens}")
