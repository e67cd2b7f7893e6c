"""In which blocks, and in which order, launches take the keys of each query: on one GPU, and on ranks.

Only planners run (planned_launches.py). The bits of a result depend on the family, on the keys of a block, and on the order in
which a query meets the blocks of which it sees any key; other blocks change no bit."""

import contextlib
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import planned_launches
import torch
from planned_launches import PlannedLaunch, form_of

import attention
from attention.parallel import gather, gather_in_order, plans, softmax, subcalls, ulysses, whole_checks
from attention.parallel.orders import Span, find_order
from attention.parallel.peers import Peers, PendingMessages
from attention.parallel.redistribution import PendingArrays
from attention.parts import sequences
from attention.parts.backward.config import BackwardConfig
from attention.parts.base_config import BaseConfig
from attention.parts.variant import ScoreContext
from tiles.launching.arrays import Array

EACH = 16  # every 16th query is compared, because its neighbours see the same blocks


class SilentRank(Peers):
    """A rank that sends and receives nothing."""

    def exchange(self, sends, receives):
        return PendingMessages(())


@contextlib.contextmanager
def noted(monkeypatch, gpu):
    """The launches planned inside, including those of ranks: see planned_launches.noted."""
    with planned_launches.noted(monkeypatch, gpu) as actual, monkeypatch.context() as patched:
        for module in plans, whole_checks:
            patched.setattr(module, "describe", lambda x, name: Array(0 if x.is_meta else x.data_ptr(), form_of(x), x, None))
        patched.setattr(subcalls, "key_lengths", lambda ends, batch, device: torch.tensor([ends] * batch, dtype=torch.int32))
        yield actual


class Places:
    """The rows of the whole sequence that each array has, for arrays that were noted and all their views."""

    def __init__(self):
        self.rows = {}

    def note(self, x, spans):
        """Remember that x has the rows of these spans, packed; return x."""
        self.rows[x.untyped_storage()._cdata] = np.concatenate([np.arange(0), *[np.arange(*span) for span in spans]]), x
        return x

    def of(self, x):
        """The rows of a view of an array that was noted."""
        rows, array = self.rows[x.untyped_storage()._cdata]
        first = x.storage_offset() // array.stride(1) if array.stride(1) else 0
        return rows[first : first + x.shape[1]]


def drawn(spans, keys, problem):
    """q, k and v with the rows of these spans, on the meta device."""
    heads, kv_heads, dims, dtype = problem.heads, problem.kv_heads, problem.dims, problem.dtype
    shapes = (spans, heads, dims[0]), (keys, kv_heads, dims[0]), (keys, kv_heads, dims[1])
    result = [torch.empty((problem.batch, sum(map(len, of)), h, d), dtype=dtype, device="meta") for of, h, d in shapes]
    return result, (spans, keys, keys)


class WholeCall(NamedTuple):
    """A call on a whole sequence. options: those of attention.forward, with the bias of the whole. seen: (queries, keys), where
    a mask in Python is true; None without one."""

    length: int
    heads: int
    kv_heads: int
    dims: tuple
    options: dict
    keys: int = 0
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    seen: object = None

    @property
    def length_k(self):
        return self.keys or self.length


class NotedLaunch(NamedTuple):
    """A launch; the rows of the whole sequence that its queries and its keys have; and whether its keys are a rank's own
    shard."""

    launch: PlannedLaunch
    rows: np.ndarray
    keys: np.ndarray
    of_own_keys: bool = False


def of_forward(monkeypatch, gpu, problem):
    """Every launch of attention of the call on one GPU, as NotedLaunch."""
    with noted(monkeypatch, gpu) as actual:
        arrays, _ = drawn((Span(0, problem.length),), (Span(0, problem.length_k),), problem)
        attention.forward(*arrays, **problem.options, return_lse=True)
    rows = np.arange(problem.length), np.arange(problem.length_k)
    return [NotedLaunch(one, *rows) for one in actual if isinstance(one.config, BaseConfig)]


def of_backward(monkeypatch, gpu, problem):
    """Every launch of the deterministic backward pass of the call on one GPU."""
    with noted(monkeypatch, gpu) as actual:
        arrays, _ = drawn((Span(0, problem.length),), (Span(0, problem.length_k),), problem)
        out, lse = results(*arrays)
        attention.backward(out, *arrays, out, lse, **problem.options, deterministic=True)
    rows = np.arange(problem.length), np.arange(problem.length_k)
    return [NotedLaunch(one, *rows) for one in actual if isinstance(one.config, BackwardConfig)]


def results(q, k, v):
    """Arrays with the shapes of out and lse."""
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def on_ranks(monkeypatch, gpu, problem, world, scheme="gather", order="zigzag", back=False):
    """Every launch of all ranks; with back=True those of the deterministic backward pass."""
    order = find_order(order)
    queries, keys = order.spans(problem.length, world), order.spans(problem.length_k, world)
    actual = []
    for rank in range(world):
        peers, places = SilentRank(None, rank, world, tuple(range(world))), Places()
        with noted(monkeypatch, gpu) as its, _moved(monkeypatch, places):
            arrays, spans = drawn(queries[rank], keys[rank], problem)
            for x, of in zip(arrays, spans):
                places.note(x, of)
            call_options = problem.options | ({"deterministic": True} if back else {})
            if "bias" in call_options and call_options["bias"].shape[2] > 1:
                bias = call_options["bias"]
                call_options["bias"] = bias.new_empty((*bias.shape[:2], sum(map(len, queries[rank])), bias.shape[3]))
            _, plan = plans.plan_call(
                (peers,), (scheme, order, problem.length, problem.length_k, None, False), *arrays, call_options
            )
            its.clear()
            plan.scheme.attend(*arrays, plan.call(*arrays, call_options))
            if back:
                out, lse = results(*arrays)
                softmax._run_backward(plan, out, None, *arrays, out, lse, call_options, ["q", "k", "v"])
        for one in its:
            if isinstance(one.config, BackwardConfig if back else BaseConfig):
                k = np.arange(problem.length_k) if "local_k" in one.arrays else places.of(one.arrays["k"])
                is_local = one.arrays["k"].untyped_storage()._cdata == arrays[1].untyped_storage()._cdata
                assert (np.diff(k) == 1).all(), f"keys of a launch lie one behind the other: {k}"
                actual.append(NotedLaunch(one, places.of(one.arrays["q"]), k, is_local))
    return actual


@contextlib.contextmanager
def _moved(monkeypatch, places):
    """Redistributed arrays are allocated but not received, and their rows are noted."""
    real = {module: module.plan_redistribution for module in (gather, gather_in_order, ulysses)}
    expected = {}

    def plan_redistribution(of):
        def actual(rank, sources, targets):
            its = of(rank, sources, targets)
            expected[id(its)] = targets[rank]
            return its

        return actual

    def redistribute(peers, *routes):
        result = [x if its.is_identity else x.new_empty((x.shape[0], *its.shape, *x.shape[3:])) for x, its in routes]
        for x, (_, its) in zip(result, routes):
            places.note(x, expected[id(its)].spans)
        return PendingArrays(result, PendingMessages(()), [])

    with monkeypatch.context() as patched:
        for module, of in real.items():
            patched.setattr(module, "plan_redistribution", plan_redistribution(of))
            patched.setattr(module, "redistribute", redistribute)
        yield


def key_orders(noted, problem, each=EACH):
    """{query: (the first keys of the blocks of which it sees any key, in their order)} for every `each`-th query of a launch,
    for one head."""
    (config, arrays, call_options), rows, keys, _ = noted
    inputs, actual = SimpleNamespace(**{name: x for name, x in call_options.items() if isinstance(x, (int, float))}), {}
    for query, queries, key, n in _sequences(config, call_options, arrays):
        for tile in range(0, queries, config.rows):
            mine = rows[query + tile : query + min(queries, tile + config.rows)]
            at = ScoreContext(0, 0, tile, n - queries, queries, n, inputs, (), 0)
            if config.by_list:
                blocks = _listed(config, mine, keys[key : key + n], problem)
            else:
                its = config.tiling.key_blocks(tile, at)
                blocks = [int(config.tiling.key(its, i, at)) for i in range(int(its.n))]
            starts = np.array([at for at in blocks if at < n], int)
            first, last = keys[key + starts], keys[key + np.minimum(n, starts + config.kv) - 1]
            mine = mine[mine % each == 0]
            for row, low, high in zip(mine, *visible(problem, mine)):
                sees = (first < high) & (last >= low)
                if problem.seen is not None:
                    sees &= [problem.seen[row, a : b + 1].any() for a, b in zip(first, last)]
                actual[int(row)] = tuple(first[sees].tolist())
    return actual


def _listed(config, rows, keys, problem):
    """The key blocks in the lists of a tile, in their order: partly visible ones first, both kinds from the last on."""
    low, high = visible(problem, rows)
    j = keys[None]
    seen = problem.seen[np.ix_(rows, keys)] & (j >= low[:, None]) & (j < high[:, None])
    partial_blocks, full_blocks = [], []
    for start in range(0, len(keys), config.kv)[::-1]:
        part = seen[:, start : start + config.kv]
        if part.any():
            (full_blocks if part.all() and part.shape == (config.rows, config.kv) else partial_blocks).append(start)
    return partial_blocks + full_blocks


def visible(problem, rows):
    """(first key, key after the last) that each query sees by causal, window and cu_seqlens."""
    options, shift = problem.options, problem.length_k - problem.length
    left, right = options.get("window") or (None, None)
    right = 0 if options.get("causal") else right
    low, high = np.zeros(len(rows), int), np.full(len(rows), problem.length_k)
    if "cu_seqlens" in options:
        ends = options["cu_seqlens"].numpy()
        number = np.searchsorted(ends, rows, "right") - 1
        low, high = ends[number], ends[number + 1]
    if right is not None:
        high = np.minimum(high, rows + shift + right + 1)
    if left is not None:
        low = np.maximum(low, rows + shift - left)
    return low, high


def _sequences(config, call_options, arrays):
    """(first query, how many, first key, how many) of each sequence of a launch, for one batch."""
    if issubclass(config.seq_layout, sequences.PackedLayout):
        ends = arrays["cu_seqlens"].tolist()
        ends_k = ends if arrays.get("cu_seqlens_k") is None else arrays["cu_seqlens_k"].tolist()
        return [(a, b - a, c, d - c) for a, b, c, d in zip(ends, ends[1:], ends_k, ends_k[1:])]
    if config.seq_layout is sequences.QueryPartsLayout:
        return [
            (call_options["q_len"] * n, call_options["q_len"], 0, end) for n, end in enumerate(arrays["lengths_k"][0].tolist())
        ]
    if config.seq_layout is sequences.SeqUsedLayout:
        return [(0, call_options["q_len"], 0, int(arrays["lengths_k"][0]))]
    return [(0, call_options["q_len"], 0, call_options["kv_len"])]
