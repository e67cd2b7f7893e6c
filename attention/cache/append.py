"""attention.append: new keys and values into a cache, in place, rotated and quantised on the way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tiles.arrays import Operand
from tiles.checks import asked, read
from tiles.device import machine
from tiles.plan import Plan, nothing
from tiles.program import program
from tiles.schema import Problem, Schema
from tiles.targets import has_fp8

from ..names import suggests_argument_names
from ..options import check_flag, check_positive, split_norm
from . import write_kernel

ARRAYS = """
    k_new            BSGD   tile
    v_new            BSGV   tile
    k                CTGD   cache    updated
    v                CTGV   cache    updated
    cu_seqlens       E      ends     optional
    lengths          N      index
    pages            NM     index    optional
    batch_index      N      index    optional
    cos              ZR     real     optional
    sin              ZR     real     optional
    positions        N      index    optional
    k_descale        G|NG   float32  optional
    v_descale        G|NG   float32  optional
    k_new_norm       D|GD   real     optional
    k_new_norm_bias  D|GD   real     optional
"""
QUERY_ARRAYS = """
    q_norm           D|HD   real     optional
    q_norm_bias      D|HD   real     optional
    out              BAHD   tile     in_place
"""
ARRAYS_AND_QUERIES = f"q BAHD tile {ARRAYS.rstrip()}{QUERY_ARRAYS}"


def with_token_descales(table: str) -> str:
    """A schema's rows with descales of each token and head, shaped as the cache is, which the call writes."""
    return re.sub(r"(_descale +)\S+( +float32 +)optional", r"\1CTG\2updated", table)


APPEND, WITH_QUERIES = Schema("append", ARRAYS), Schema("append_with_queries", ARRAYS_AND_QUERIES)
QUANTISING = Schema("append_quantising", with_token_descales(ARRAYS))
QUANTISING_WITH_QUERIES = Schema("append_quantising_with_queries", with_token_descales(ARRAYS_AND_QUERIES))


@suggests_argument_names
def append(
    k: Any,
    v: Any,
    k_new: Any,
    v_new: Any,
    *,
    lengths: Any,
    pages: Any = None,
    batch_index: Any = None,
    cu_seqlens: Any = None,
    rotary: tuple[Any, Any] | None = None,
    interleaved: bool = False,
    positions: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    k_new_norm: Any = None,
    q: Any = None,
    q_norm: Any = None,
    norm_eps: float = 1e-6,
    causal: bool = True,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Write new keys and values into a cache, in place, after those that it has. For sequence b,

        k[b, lengths[b] + i] = rotate(k_new[b, i], lengths[b] + i);  v[b, lengths[b] + i] = v_new[b, i]

    k_new: (B, S, Hk, D), v_new: (B, S, Hk, Dv), bfloat16 or float16. With cu_seqlens (N + 1), ascending from 0 to S, the
    sequences lie one after the other in a batch of 1. k, v: the cache, (B, Sk, Hk, D) and (B, Sk, Hk, Dv), of the same dtype
    or float8_e4m3fn, the last axis contiguous. batch_index: (B), which of more caches belongs to a sequence. With
    pages (B, most pages), the cache is a pool (pages, page size, Hk, D), and a sequence's n-th key lies in page
    pages[b, n // page size]; entries beyond the pages in use may hold anything. Any page size; no two sequences may write to
    one place.

    lengths: (B), int32 or int64, the number of keys before. They are read on the device, so a CUDA graph that holds the call
    serves sequences as they grow; the caller adds S to them. What would pass the cache's end is not written, nor what lies
    in a page that is not in the pool (-1, for instance). With host arrays such a call is refused, and with others under
    TILES_CHECK=1. Left padding moves nothing.

    rotary: (cos, sin), each (positions, pairs), float32, bfloat16 or float16. Of the first 2 pairs columns, n and pairs + n
    are rotated together (NeoX), or with interleaved=True 2n and 2n + 1: (x1 cos - x2 sin, x2 cos + x1 sin). It is computed
    in float32, each product and sum rounded, and rounded once to the cache's dtype: the same bits as by hand. positions:
    (B), of a sequence's first new key, if it is not `lengths`. Beyond the end of the tables nothing is written.

    k_descale, v_descale: float32, by which the numbers of an fp8 cache are multiplied when they are read; both or none. Rows
    are divided by them, to 2 ulp of float32, and rounded; what is beyond 448 times the descale is clamped to it. (Hk)
    or (B, Hk): they are read. Or shaped as k and v are, (B, Sk, Hk) or with pages (pages, page size, Hk), with any strides:
    then they are computed and written, for each new token and head, so that its largest rotated number becomes 448; at least
    2^-120.

    k_new_norm, q_norm: norms of the rows of k_new and of q, before they are rotated, as attention.forward has them:
    weights (D), or of each head, of an RMS norm, or a pair (weights, bias) of a layer norm. They are computed in float32,
    and the result of norm and rotation is rounded once.

    q: (B, Sq, H, D), of k_new's dtype: rotated as well, query i at position lengths[b] + i, or with causal=False all at
    lengths[b], and returned, in `out` if given, which may be q. Beyond the end of the tables it is NaN.

    layout="bhsd": keys, values, caches and q are (B, H, S, D), a pool is (pages, Hk, page size, D), and descales of each
    token are (B, Hk, Sk).

    Returns out, or None without q. Arrays, `stream` and errors are those of attention.forward. JAX arrays cannot be written;
    see cache.PagedCache."""
    cos, sin = rotary_tables(rotary)
    if q is None and out is not None:
        raise ValueError("out: is where the rotated q goes, and needs q: q=None")
    if q is None and q_norm is not None:
        raise ValueError("q_norm: normalises q, and needs it: q=None")
    arrays = k_new, v_new, k, v, cu_seqlens, lengths, pages, batch_index, cos, sin, positions, k_descale, v_descale
    arrays = *arrays, *split_norm("k_new_norm", k_new_norm)
    options = check_flag("interleaved", interleaved), check_flag("causal", causal), check_positive("norm_eps", norm_eps)
    quantizes = has_token_descales(k_descale, v_descale)
    if q is None:
        return (_append_quantising if quantizes else _append)(stream, arrays, options, layout)
    call = _append_quantising_with_queries if quantizes else _append_with_queries
    return call(stream, (q, *arrays, *split_norm("q_norm", q_norm), out), options, layout)


def has_token_descales(*descales: Any) -> bool:
    """Are all descales given, and is any of them shaped for each token and head (three axes)?"""
    return all([x is not None for x in descales]) and any([len(getattr(x, "shape", ())) == 3 for x in descales])


def rotary_tables(rotary: Any) -> Sequence[Any]:
    """(cos, sin), (None, None) if there is no rotary. TypeError: it is not a pair of arrays."""
    if rotary is not None and (not isinstance(rotary, Sequence) or len(rotary) != 2):
        raise TypeError(f"rotary: must be a pair (cos, sin): {type(rotary).__name__}")
    return rotary or (None, None)


@program(APPEND)
def _append(problem: Problem, interleaved: bool, causal: bool, norm_eps: float) -> Plan:
    """The Plan of a call of append."""
    queries = (problem["q"], problem["out"]) if "q" in problem else None
    names = AppendNames("S", "A", queries, problem["cu_seqlens"])
    steps = plan_append(problem, interleaved, causal, names, norm_eps)
    return Plan(steps, give=None if queries else nothing)


_append_with_queries = program(WITH_QUERIES)(_append.planner)
_append_quantising = program(QUANTISING)(_append.planner)
_append_quantising_with_queries = program(QUANTISING_WITH_QUERIES)(_append.planner)


class AppendNames(NamedTuple):
    """What a function that appends calls its arrays and axes. new_axis, query_axis: the letters of the axes of new tokens and
    of queries in its schema. queries: (q, out) if q is rotated to out. ends: cu_seqlens of packed new tokens, or None."""

    new_axis: str
    query_axis: str
    queries: tuple[Operand, Operand] | None
    ends: Operand | None


def has_descale_per_key(problem: Problem) -> bool:
    """Do k_descale and v_descale have one number for each key and head? ValueError: only one of them has."""
    names = "k_descale", "v_descale"
    per_key = {problem.axes(name) == "CTG" for name in names if name in problem}
    if len(per_key) > 1:
        raise problem.error("v_descale", "must have as many axes as k_descale: both of each key and head, or neither", *names)
    return any(per_key)


def plan_append(problem: Problem, interleaved: bool, causal: bool, names: AppendNames, norm_eps: float) -> list:
    """The steps of a plan that write new keys and values. names: what the calling function calls its arrays; all others have
    the names and axes of ARRAYS. ValueError: the arrays do not fit each other."""
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
    queries, ends, lengths = names.queries, names.ends, problem["lengths"]
    if queries and rotary is None:
        raise ValueError("q: is passed to be rotated, and needs rotary=(cos, sin): rotary=None")
    batch, tokens, heads = problem(f"B{names.new_axis}G")
    if queries and ends and problem(names.query_axis) != (tokens,):
        raise problem.error("q", "must have as many tokens as k_new where sequences are packed", "q", "k_new")
    if batch == 0 or heads == 0 or (tokens == 0 and (not queries or problem(names.query_axis) == (0,))):
        return []
    placement = {name: problem[name] for name in ("pages", "batch_index", "positions")}
    step = write_kernel.launch(
        problem.device,
        new,
        cache,
        lengths,
        ends=ends,
        rotary=rotary,
        interleaved=interleaved,
        descales=descales,
        queries=queries,
        causal=causal,
        norms=(norm_operands(problem, "k_new_norm", "G"), norm_operands(problem, "q_norm", "H") if queries else None),
        norm_eps=norm_eps,
        in_place=bool(queries and "out" in problem and queries[1].source == problem["out"].source),
        **placement,
    )
    if problem.device is None or asked().values:
        return [RoomCheck(problem, names), step]
    return [step]


def norm_operands(problem: Problem, name: str, heads: str) -> write_kernel.NormOperands | None:
    """The arrays of the norm `name`, None if it is not given. heads: the letter of the axis of its heads."""
    if name not in problem:
        return None
    arrays = problem[name], problem[f"{name}_bias"]
    weights, bias = (x.spread(0, problem(heads)[0]) if x and len(x.shape) == 1 else x for x in arrays)
    return write_kernel.NormOperands(weights, bias)


def _check_cache(problem: Problem) -> None:
    batch, caches, page_size = problem("NCT")
    k, v = problem["k"].form, problem["v"].form
    for name, form in ("k", k), ("v", v):
        if form.dtype not in (problem.dtype, "float8_e4m3fn") or form.dtype != k.dtype:
            also, values = (", as k's", f"k.dtype={k.dtype!r}, ") if name == "v" else ("", "")
            values = f"{name}.dtype={form.dtype!r}, {values}k_new.dtype={problem.dtype!r}"
            raise TypeError(f"{name}: dtype must be k_new's or float8_e4m3fn{also}: {values}")
        if form.strides[-1] != form.itemsize and form.shape[-1] > 1:
            raise problem.error(name, f"last axis must be contiguous: {name}.strides={form.strides} bytes", name)
    gpu = machine(problem.device)
    if k.itemsize == 1 and not has_fp8(gpu.capability):
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
    columns, pairs = problem("DR")
    if not 0 < 2 * pairs <= columns:
        rule = f"must have a column for each pair of rotated columns, from 1 to {columns // 2}"
        halve = f" (transformers' tables repeat each column: pass cos[:, :{pairs // 2}])" if pairs == columns else ""
        raise problem.error("cos", rule + halve, "cos", "k_new")
    return problem["cos"], problem["sin"]


class RoomCheck(NamedTuple):
    """A step of a plan that reads lengths, pages and positions on the host, and launches nothing. ValueError: the cache has no
    room for the new tokens, or the rotary tables have no row for them."""

    problem: Problem
    names: AppendNames

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        """Check the arrays at `addresses`, after what is queued on `stream`. Nothing is checked while a CUDA graph is
        captured."""
        problem = self.problem
        arrays = {name: problem[name] for name in ("lengths", "pages", "batch_index", "positions")} | {"ends": self.names.ends}
        values = {name: read(addresses[x.source], x.form, stream) for name, x in arrays.items() if x}
        if any(x is None for x in values.values()):  # a CUDA graph is being captured
            return
        (new, size, caches), lengths = problem(f"{self.names.new_axis}TC"), values["lengths"]
        counts = np.diff(values["ends"]) if "ends" in values else np.full(len(lengths), new)
        most = size * problem("M")[0] if "pages" in problem else size
        starts, table_rows = values.get("positions", lengths), problem.extents.get("Z", 0)
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
