"""attention.append: new keys and values into a cache, in place, rotated and quantised on the way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tiles.arrays import Operand
from tiles.checks import asked, read
from tiles.device import machine
from tiles.program import Plan, nothing, program
from tiles.schema import Problem, Schema
from tiles.targets import has_fp8

from ..names import suggests_argument_names
from ..options import check_flag, check_positive, split_norm
from . import write_kernel

INPUTS = """
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
OF_QUERIES = """
    q_norm           D|HD   real     optional
    q_norm_bias      D|HD   real     optional
    out              BAHD   tile     in_place
"""
BESIDE_QUERIES = f"q BAHD tile {INPUTS.rstrip()}{OF_QUERIES}"


def with_descales_found(table: str) -> str:
    """The rows of a schema, changed to those for descales of each token and head, which are written as the cache is."""
    return re.sub(r"(_descale +)\S+( +float32 +)optional", r"\1CTG\2updated", table)


APPEND, WITH_QUERIES = Schema("append", INPUTS), Schema("append_with_queries", BESIDE_QUERIES)
QUANTISING = Schema("append_quantising", with_descales_found(INPUTS))
QUANTISING_WITH_QUERIES = Schema("append_quantising_with_queries", with_descales_found(BESIDE_QUERIES))


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
    cos, sin = tables_of(rotary)
    if q is None and out is not None:
        raise ValueError("out: takes q, too, which is None")
    if q is None and q_norm is not None:
        raise ValueError("q_norm: takes q, too, which is None")
    arrays = k_new, v_new, k, v, cu_seqlens, lengths, pages, batch_index, cos, sin, positions, k_descale, v_descale
    given = *arrays, *split_norm("k_new_norm", k_new_norm)
    options = check_flag("interleaved", interleaved), check_flag("causal", causal), check_positive("norm_eps", norm_eps)
    found = of_tokens(k_descale, v_descale)
    if q is None:
        return (_append_quantising if found else _append)(stream, given, options, layout)
    call = _append_quantising_with_queries if found else _append_with_queries
    return call(stream, (q, *given, *split_norm("q_norm", q_norm), out), options, layout)


def of_tokens(*descales: Any) -> bool:
    """Are there descales, and is there one for each token and head?"""
    return all([x is not None for x in descales]) and any([len(getattr(x, "shape", ())) == 3 for x in descales])


def tables_of(rotary: Any) -> Sequence[Any]:
    """(cos, sin), (None, None) if there is no rotary. TypeError: it is not a pair of arrays."""
    if rotary is not None and (not isinstance(rotary, Sequence) or len(rotary) != 2):
        raise TypeError(f"rotary: must be a pair (cos, sin): {type(rotary).__name__}")
    return rotary or (None, None)


@program(APPEND)
def _append(problem: Problem, interleaved: bool, causal: bool, norm_eps: float) -> Plan:
    """The Plan of a call of append."""
    queries = (problem["q"], problem["out"]) if "q" in problem else None
    step = planned(problem, interleaved, causal, Names("S", "A", queries, problem["cu_seqlens"]), norm_eps)
    return Plan(step, give=None if queries else nothing)


_append_with_queries = program(WITH_QUERIES)(_append.planner)
_append_quantising = program(QUANTISING)(_append.planner)
_append_quantising_with_queries = program(QUANTISING_WITH_QUERIES)(_append.planner)


class Names(NamedTuple):
    """What arrays and axes of a function that appends are called. new, asked: the axes of new tokens and of queries. queries:
    (the queries, where they go), if they are rotated. ends: the ends of packed sequences of new tokens."""

    new: str
    asked: str
    queries: tuple[Operand, Operand] | None
    ends: Operand | None


def of_each_key(problem: Problem) -> bool:
    """Is there one descale for each key and head? ValueError: descales are given for keys or for values only."""
    names = "k_descale", "v_descale"
    found = {problem.axes(name) == "CTG" for name in names if name in problem}
    if len(found) > 1:
        raise problem.error("v_descale", "must be of each key and head where k_descale is, and the other way round", *names)
    return any(found)


def planned(problem: Problem, interleaved: bool, causal: bool, names: Names, norm_eps: float) -> list:
    """The steps of a plan that append. names: what this function calls its arrays; all others have the names and axes of
    INPUTS. ValueError: the arrays do not fit each other."""
    new, cache = (problem["k_new"], problem["v_new"]), (problem["k"], problem["v"])
    _check_cache(problem)
    rotary = _rotary(problem)
    scales = problem["k_descale"], problem["v_descale"]
    if (scales[0] is None) != (scales[1] is None):
        raise ValueError("k_descale: must be given where v_descale is, and the other way round")
    of_each_key(problem)
    if scales[0] is not None and cache[0].form.itemsize > 1:
        raise ValueError(f"k_descale: is for a cache of float8_e4m3fn: k.dtype={cache[0].form.dtype!r}")
    queries, ends, lengths = names.queries, names.ends, problem["lengths"]
    if queries and rotary is None:
        raise ValueError("q: is rotated, and takes rotary, which is None")
    batch, tokens, heads = problem(f"B{names.new}G")
    if queries and ends and problem(names.asked) != (tokens,):
        raise problem.error("q", "must have as many tokens as k_new where sequences are packed", "q", "k_new")
    if batch == 0 or heads == 0 or (tokens == 0 and (not queries or problem(names.asked) == (0,))):
        return []
    where = {name: problem[name] for name in ("pages", "batch_index", "positions")}
    step = write_kernel.launch(
        problem.device,
        new,
        cache,
        lengths,
        ends=ends,
        rotary=rotary,
        interleaved=interleaved,
        scales=scales,
        queries=queries,
        causal=causal,
        norms=(norm_of(problem, "k_new_norm", "G"), norm_of(problem, "q_norm", "H") if queries else None),
        norm_eps=norm_eps,
        in_place=bool(queries and "out" in problem and queries[1].source == problem["out"].source),
        **where,
    )
    if problem.device is None or asked().values:
        return [Room(problem, names), step]
    return [step]


def norm_of(problem: Problem, name: str, heads: str) -> write_kernel.Norm | None:
    """The Norm of this name, None if there is none. heads: the axis that counts its heads."""
    if name not in problem:
        return None
    arrays = problem[name], problem[f"{name}_bias"]
    weights, bias = (x.spread(0, problem(heads)[0]) if x and len(x.shape) == 1 else x for x in arrays)
    return write_kernel.Norm(weights, bias)


def _check_cache(problem: Problem) -> None:
    batch, caches, page_size = problem("NCT")
    k, v = problem["k"].form, problem["v"].form
    for name, form in ("k", k), ("v", v):
        if form.dtype not in (problem.dtype, "float8_e4m3fn") or form.dtype != k.dtype:
            also, said = (", as k's", f"k.dtype={k.dtype!r}, ") if name == "v" else ("", "")
            said = f"{name}.dtype={form.dtype!r}, {said}k_new.dtype={problem.dtype!r}"
            raise TypeError(f"{name}: dtype must be k_new's or float8_e4m3fn{also}: {said}")
        if form.strides[-1] != form.itemsize and form.shape[-1] > 1:
            raise problem.error(name, f"last axis must be contiguous: {name}.strides={form.strides} bytes", name)
    gpu = machine(problem.device)
    if k.itemsize == 1 and not has_fp8(gpu.capability):
        raise ValueError(f"k: a cache of float8_e4m3fn takes a GPU of compute capability 8.9 or later; it lies on {gpu}")
    if page_size == 0:
        raise problem.error("k", "must have room for a key", "k")
    if "pages" in problem and "batch_index" in problem:
        raise ValueError("batch_index: pages say already where a sequence's keys lie; pass one of them")
    if "pages" not in problem and "batch_index" not in problem and caches != batch:
        raise problem.error("k", f"must have as many caches as there are sequences, {batch}, or pages or batch_index", "k")


def _rotary(problem: Problem) -> tuple[Operand, Operand] | None:
    """(cos, sin) as operands. ValueError: the tables do not fit."""
    if ("cos" in problem) != ("sin" in problem):
        raise TypeError("rotary: must be a pair of arrays (cos, sin)")
    if "cos" not in problem:
        if "positions" in problem:
            raise ValueError("positions: are those of rotary, which is None")
        return None
    columns, pairs = problem("DR")
    if not 0 < 2 * pairs <= columns:
        words = f"must have half as many columns as are rotated, {columns // 2} at most, a column for each pair"
        twice = f" (of tables that say each twice, as transformers' do, cos[:, :{pairs // 2}])" if pairs == columns else ""
        raise problem.error("cos", words + twice, "cos", "k_new")
    return problem["cos"], problem["sin"]


class Room(NamedTuple):
    """A step of a plan that reads lengths and pages, and launches nothing. ValueError: there is no room for the new tokens."""

    problem: Problem
    names: Names

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        """Check the arrays at these addresses."""
        problem = self.problem
        given = {name: problem[name] for name in ("lengths", "pages", "batch_index", "positions")} | {"ends": self.names.ends}
        found = {name: read(addresses[x.source], x.form, stream) for name, x in given.items() if x}
        if any(x is None for x in found.values()):  # a CUDA graph is being captured
            return
        (new, size, caches), lengths = problem(f"{self.names.new}TC"), found["lengths"]
        counts = np.diff(found["ends"]) if "ends" in found else np.full(len(lengths), new)
        most = size * problem("M")[0] if "pages" in problem else size
        starts, known = found.get("positions", lengths), problem.extents.get("Z", 0)
        for b, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist())):
            said = f"lengths[{b}]={length}, {count} new"
            nobodys = "pages" in found and length == -1 and found["pages"][b, 0] < 0  # PagedCache.starts of a place not in use
            if nobodys or not count:  # nothing is written
                continue
            if length < 0 or length + count > most:
                raise ValueError(f"lengths: sequence {b} has room for {most} keys: {said}")
            if "cos" in problem and not 0 <= starts[b] <= known - count:
                raise ValueError(f"rotary: has {known} positions: sequence {b} begins at {starts[b]}: {said}")
            table = found["pages"][b] if "pages" in found else found.get("batch_index", np.arange(len(lengths)))[b : b + 1]
            for n in range(length // size, -(-(length + count) // size) if count else 0):
                if not 0 <= table[n] < caches:
                    name = f"pages[{b}, {n}]" if "pages" in found else f"batch_index[{b}]"
                    raise ValueError(f"{name.partition('[')[0]}: must be from 0 to {caches - 1}: {name}={table[n]}, {said}")
