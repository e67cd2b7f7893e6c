"""A walk beside the end of the grid that it reads from: attention.delta_rule with decays of channels."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
from delta_cases import BF16, agree, inputs
from numpy import int32
from poison import poison_new_memory
from test_raw_gates import agree as agree_raw

from attention.kernels.delta import kda_transform_hopper, kda_walk_hopper
from attention.parts.recurrent.chunk_order import ChunkMajor, HeadMajor
from attention.plans.delta import delta_channel_walk, delta_walk
from attention.plans.recurrent import chunk_schedule
from attention.plans.recurrent.chunk_schedule import count_late_blocks, gains_beside
from attention.public import delta_rules
from attention.public.delta_rules import delta_rule
from ops import grid as grid_ops
from ops.memory.counts import wait_for_count
from tiles import Hazard, bf16, fp32, inlined, static
from tiles.calls import program
from tiles.calls.program import LruTable
from tiles.compiling.compiler import compile_kernel
from tiles.interpreter import interpret
from tiles.launching.arguments import signature
from tiles.launching.interpreted_launch import run_by

READ = "gQueries", "gDecayedKeys", "gSolved", "gStateDecays"  # what a walk reads of chunks


def draw(length, heads, batch=1, key_dim=64, key_heads=None, value_dim=64):
    """q, k (of length 1), v, beta and decays of channels."""
    q, k, v, beta, _ = inputs(batch, length, heads, key_dim, value_dim, BF16, key_heads)
    gates = np.random.default_rng(1).standard_exponential((batch, length, heads, key_dim), np.float32)
    return q, k, v, beta, -0.05 * gates


@pytest.fixture
def beside(monkeypatch, nothing_known):
    """beside(rounds): from then on calls walk beside the grid before, which has 2 workers a processor, after so many rounds; 0:
    after its end."""
    monkeypatch.setattr(delta_rules, "serves_channel_walk", lambda _: True)
    monkeypatch.setattr(delta_channel_walk, "count_walk_segments", lambda *_: 1)

    def beside(rounds, processors=3, item_chunks=1):
        monkeypatch.setattr(chunk_schedule, "ITEM_CHUNKS", item_chunks)
        monkeypatch.setattr(chunk_schedule, "LEAD", 1000)
        monkeypatch.setattr(chunk_schedule, "machine", lambda _: SimpleNamespace(processors=processors))
        monkeypatch.setattr(chunk_schedule, "ROUNDS", rounds)
        monkeypatch.setattr(chunk_schedule, "gains_beside", lambda *_: rounds > 0)
        for table in ("GUARDED_CALLS", "REMEMBERED"):
            monkeypatch.setattr(program, table, LruTable(program.ENTRIES))
        monkeypatch.setattr(program, "WATCHED_PLANS", LruTable(program.PLAN_KINDS))

    return beside


@pytest.mark.parametrize(
    ("length", "batch", "rounds", "processors", "item_chunks"),
    [(7 * 64 - 20, 2, 1, 3, 2), (14 * 64, 1, 1, 2, 4)],
)
def test_a_walk_beside_the_grid_before(place, beside, length, batch, rounds, processors, item_chunks):
    """The last item of each head lacks some chunks."""
    beside(rounds, processors, item_chunks)
    agree(place, *draw(length, 1, batch))


TWO_CONSUMERS = [(1, 64, 208), pytest.param(2, 128, 128, marks=pytest.mark.release)]


@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), TWO_CONSUMERS)
def test_two_consumers_in_a_block_of_the_walk(place, beside, monkeypatch, heads, key_dim, value_dim):
    """Both read the same chunks, and their outputs leave together. The last block has columns that V does not have."""
    beside(1, 3, heads)
    monkeypatch.setattr(delta_channel_walk, "choose_consumers", lambda *_: 2)
    start = np.random.default_rng(1).standard_normal((1, heads, key_dim, value_dim), np.float32)
    agree(place, *draw(6 * 64 - 20, heads, 1, key_dim, value_dim=value_dim), initial_state=start)


def test_raw_gates_of_heads_in_turn(place, beside):
    """A worker's next item is of another head, with another A_log and dt_bias; the last items lack a chunk."""
    beside(1, 3, 2)
    agree_raw(place, "sigmoid", 5 * 64 - 9, delta_rule, True)


def test_halved_chunks_beside_each_other(place, beside):
    """Both workers of a block score one at a time, each with barriers of its own."""
    beside(1, 2)
    *args, decay = draw(5 * 64, 1)
    decay[..., 5] = -1e4
    agree(place, *args, decay)


def test_the_order_changes_no_bit(place, beside, monkeypatch):
    """Nor does what lay in memory before. Items of one chunk."""
    poison_new_memory(monkeypatch)
    args = [place.put(x) for x in draw(5 * 64 - 9, 2, key_heads=1)]
    results = []
    for rounds in (0, 1):
        beside(rounds)
        results.append([place.get(x) for x in delta_rule(*args[:4], decay=args[4], return_state=True)])
    assert all((x == y).all() for x, y in zip(*results, strict=True))


# ---- as if both grids ran at once ------------------------------------------------------------------------------------
def numbers_of_worker(worker, workers, early_workers, rounds, items):
    """The items of a worker, in its order."""
    early, late = range(worker, workers * rounds, workers), range(workers * rounds, items)
    return [*early, *(late[worker - early_workers :: workers - early_workers] if worker >= early_workers else ())]


@static
class FirstItemAwaited(ChunkMajor):
    """A walk that waits for the first item of its sequence only."""

    whole: ChunkMajor = ChunkMajor()

    @inlined
    def wait_for_item(self, args, head_sequence, index):
        self.whole.wait_for_item(args, head_sequence, int32(0))


@static
class EndNotAwaited(ChunkMajor):
    """A walk that may end before the grid before it."""

    @inlined
    def watch_items(self, rings, args, head_sequence, n):
        for index in range(n):  # of a chunk each
            self.wait_for_item(args, head_sequence, index)
            rings[0].claim(index)
            rings[0].publish(index, fenced=False)


@static
class ItemsNotTaken(ChunkMajor):
    """A walk that loads before it knows what is there."""

    @inlined
    def take_item(self, rings, args, j):
        pass


@static
class NothingAwaited(ItemsNotTaken):
    """A walk that waits for nothing."""

    @inlined
    def watch_items(self, rings, args, head_sequence, n):
        pass


FAULTS = {
    NothingAwaited: "grid.wait.. comes first",
    EndNotAwaited: "has waited for counts of the grid before it, but not",
    ItemsNotTaken: "the slot for tile 4 of ring 'ready'",
}


@pytest.fixture
def arriving(monkeypatch):
    """From then on what a walk reads is NaN until it has waited for its count."""
    monkeypatch.setenv("TILES_JOBS", "1")

    def run(kernel, grid, threads, args, *more):
        named = dict(zip(inspect.signature(kernel.py_func).parameters, args, strict=True))
        if "gSolved" not in named:
            named["order_args"].gCounts[...] = -1000  # what others left there
            return interpret(kernel, grid, threads, args, *more)
        order = named["order_args"]
        arrays = [np.asarray(named[name].array) for name in READ]
        copies = [x.copy() for x in arrays]
        for x in arrays:
            x[...] = np.nan
        items = (len(copies[0]) - 1) // order.item_chunks * order.head_sequences
        numbers = order.workers, order.early_workers, order.rounds, items

        def wait(counts, at, n):
            for item in numbers_of_worker(at[0], *numbers)[:n]:
                chunks, head = divmod(item, order.head_sequences)
                chunks = slice(order.item_chunks * chunks, order.item_chunks * (chunks + 1))
                for x, copied in zip(arrays, copies, strict=True):
                    x[chunks, head] = copied[chunks, head]
            wait_for_count(counts, at, n)

        monkeypatch.setattr(grid_ops, "wait_for_count", wait)
        interpret(kernel, grid, threads, args, *more, overlaps_previous=True)

    with run_by(run):
        yield


@pytest.mark.parametrize("order", [ChunkMajor, FirstItemAwaited, *FAULTS])
def test_a_walk_reads_nothing_before_it_is_there(beside, arriving, monkeypatch, order):
    """Were the waits fewer, outputs would be NaN, or the interpreter would refuse."""
    beside(1, 2)
    monkeypatch.setattr(chunk_schedule, "ChunkMajor", order)
    q, k, v, beta, decay = draw(5 * 64, 1)
    if order in FAULTS:
        with pytest.raises(Hazard, match=FAULTS[order]):
            delta_rule(q, k, v, beta, decay=decay)
    else:
        assert np.isnan(delta_rule(q, k, v, beta, decay=decay).astype(np.float32)).any() == (order is FirstItemAwaited)


# ---- the schedule ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("head_sequences", "chunks", "consumers", "gains"),
    [
        (8, 512, 1, True), (16, 512, 1, True), (24, 512, 1, True), (32, 512, 1, True), (32, 128, 1, False), (40, 512, 1, False),
        (66, 512, 1, False), (32, 512, 2, True), (40, 512, 2, True), (48, 512, 2, False), (66, 512, 2, False),
    ],
)  # fmt: skip
def test_when_a_walk_had_better_run_beside_the_grid_before(head_sequences, chunks, consumers, gains):
    """128 columns of values a head, 132 multiprocessors."""
    costs, blocks = delta_channel_walk.CHANNEL_COSTS[consumers], 2 // consumers * head_sequences
    late_blocks = count_late_blocks(head_sequences, blocks, 132, costs)
    limits = {(8, 1): 39, (16, 1): 77, (32, 2): 90}  # 86 and 92 took the shortest time with 32 heads
    assert late_blocks == min(132 - blocks, limits.get((head_sequences, consumers), 132))
    assert gains_beside(head_sequences, chunks, late_blocks, 132, 2, costs) == gains


@pytest.mark.parametrize(
    ("head_sequences", "width", "consumers"), [(8, 2, 1), (16, 2, 1), (32, 2, 2), (32, 1, 1), (48, 2, 2), (24, 4, 2)]
)
def test_when_two_consumers_of_the_walk_share_a_block(head_sequences, width, consumers):
    """Where the launch beside the walk, and not the walk, takes the longest time; 132 multiprocessors, 512 chunks."""
    assert delta_channel_walk.choose_consumers(head_sequences, width, 512, 132) == consumers


class FewSequences(dict):
    """A problem of sequences of so many tokens and heads of 128, as a planner asks it: axes by name; packed or not."""

    device = None

    def __init__(self, heads, length, packed=False, sequences=1):
        super().__init__({"cu_seqlens": None} if packed else {})
        self.extents = {"seqlen": length, "heads": heads, "key_dim": 128, "value_dim": 128, "sequences": sequences}
        self.extents |= {"batch": 1 if packed else sequences}

    def __call__(self, *axes):
        return tuple(self.extents[axis] for axis in axes)


@pytest.mark.parametrize(
    ("heads", "length", "packed", "walks", "order"),
    [
        (8, 32768, False, True, ChunkMajor), (67, 32768, False, False, None), (32, 32768, False, True, ChunkMajor),
        (33, 32768, False, True, HeadMajor), (32, 8192, False, True, HeadMajor), (1, 63 * 64, False, True, HeadMajor),
        (1, 7 * 64, False, False, None), (16, 2**19, False, False, None), (16, 32768, True, True, HeadMajor),
    ],
)  # fmt: skip
def test_which_problems_are_walked_and_how(monkeypatch, heads, length, packed, walks, order):
    """On an H200, where each block of a walk has a multiprocessor."""
    for place in delta_walk, delta_channel_walk, chunk_schedule:
        monkeypatch.setattr(place, "machine", lambda _: SimpleNamespace(processors=132))
    problem = FewSequences(heads, length, packed)
    assert delta_channel_walk.serves_channel_walk(problem) == walks
    if walks:
        scratch = lambda *_, **__: None
        schedule = chunk_schedule.schedule_chunks(problem, 2 * heads, delta_channel_walk.CHANNEL_COSTS[1], 264, scratch)
        assert type(schedule.order) is order
        assert schedule.blocks == (132 if order is ChunkMajor else heads * min(264 // heads, length // 64))


@pytest.mark.release
@pytest.mark.parametrize(
    ("kernels", "config"),
    [
        (kda_transform_hopper, kda_transform_hopper.Config(128, 0, fp32, bf16, order=ChunkMajor())),
        (kda_walk_hopper, kda_walk_hopper.Config(128, bf16, order=ChunkMajor())),
        (kda_walk_hopper, kda_walk_hopper.Config(128, bf16, order=ChunkMajor(), consumers=2)),
    ],
    ids=lambda x: str(x) if hasattr(x, "threads") else "",
)
def test_machine_code(kernels, config):
    """No spills, no wgmma serialised by ptxas, and shared memory for a block."""
    kernel, smem = kernels.make(config)
    compiled = compile_kernel(kernel, signature(kernel), "sm_90a")
    assert (compiled.spill_bytes, compiled.local_bytes, compiled.warnings) == (0, 0, [])
    assert smem.nbytes <= 227 * 1024
