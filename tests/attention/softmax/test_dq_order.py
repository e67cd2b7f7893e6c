"""attention.backward: dQ summed in a fixed order, with the same bits every time, and launches that overlap (PDL)."""

import itertools
import traceback
from collections import Counter, defaultdict, deque

import numpy as np
import pytest
from forward_checks import inputs
from gradient_checks import agree
from places import OnInterpreter

import attention
from attention.kernels.softmax import backward_folded_hopper, backward_narrow_hopper
from attention.parts.backward import dq_order
from attention.parts.backward.dq_order import AscendingAdds
from attention.parts.variant import ScoreContext
from attention.parts.visibility import CAUSAL
from attention.plans.softmax.backward_launches import choose_raster_group
from ops import add_fragment, count_stored, count_up, grid, tma_add, tma_store, wait_count
from tiles import Hazard, bf16, interpreter
from tiles.compiling.numba_types import void
from tiles.interpreter import current_warp
from tiles.op import OPS, lowers, op

F32 = np.float32
MASKS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(window=(70, 20)),
    "window, left": dict(window=(100, None), softcap=2.0),
    "mask": dict(mask=lambda b, h, i, j: (j <= i) & (j // 70 != 1)),
}


CASES = [  # of sm_80 every other one
    pytest.param(case, head_dim, family, marks=[pytest.mark.release] * (family == "sm_80" and n % 2))
    for n, (case, head_dim) in enumerate(zip(MASKS, itertools.cycle([128, 64])))
    for family in ("sm_90", "sm_80")
]


@pytest.mark.parametrize(("case", "head_dim", "family"), CASES)
def test_deterministic(place, case, head_dim, family, monkeypatch):
    """The interpreter raises a Hazard if a thread block waits for a later one, or for more of them than there are. A thread
    block that waits for fewer than it must, or adds before it waits, is found by replaying its steps beside a slow warp."""
    steps = record_steps(monkeypatch) if isinstance(place, OnInterpreter) else None
    agree(place, *inputs(1, 150, 330, 2, 1, head_dim), family, deterministic=True, **MASKS[case])
    if steps is not None:
        check_adds_in_order(steps)


ADDS, ARRIVES = (add_fragment, tma_add, tma_store), (count_stored, count_up)


def record_steps(monkeypatch):
    """{(thread block, warp): [(op, index, the count that it waits for)]} of all adds, arrivals and waits from now on."""
    steps = defaultdict(list)

    def record(op_function, index_argument, count_argument=None):
        meaning = OPS[op_function].meaning

        def recording(*args):
            index = tuple(map(int, args[index_argument]))
            count = count_argument and int(args[count_argument])
            steps[current_warp().block.index, current_warp().index].append((op_function, index, count))
            return meaning(*args)

        monkeypatch.setattr(OPS[op_function], "meaning", recording)

    for op_function in (*ADDS, *ARRIVES):
        record(op_function, 2 if op_function is add_fragment else 1)
    record(wait_count, 1, 2)
    monkeypatch.setenv("TILES_JOBS", "1")  # steps in other processes would not be recorded
    return steps


def replay(steps, slow):
    """{index in the sums of dQ: the thread blocks that add there, in order} if all begin at once, and the warp `slow` goes on
    only while all others wait or are done."""
    added, counts = defaultdict(list), Counter()
    remaining = {warp: deque(steps[warp]) for warp in sorted(steps, key=lambda warp: (warp == slow, warp))}
    while any(remaining.values()):
        (block, _), todo = next((warp, todo) for warp, todo in remaining.items() if todo and not must_wait(todo[0], counts))
        op_function, index, _ = todo.popleft()
        if op_function in ARRIVES:
            counts[index] += 1
        elif op_function in ADDS:
            added[index].append(block)
    return added


def must_wait(step, counts):
    op_function, index, count = step
    return op_function is wait_count and counts[index] < count


def check_adds_in_order(steps):
    """Thread blocks add in the order in which they begin, whichever warp is slow."""
    assert steps
    for slow in steps:
        added = replay(steps, slow).values()
        assert all(blocks == sorted(blocks) for blocks in added) and any(blocks[0] != blocks[-1] for blocks in added)


@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_blocks_add_in_order(family, monkeypatch):
    """With `deterministic` thread blocks wait for earlier key blocks, so in reverse order they deadlock. Without it none
    waits."""
    forwards, q_k_v = interpreter.clusters, inputs(1, 20, 160, 1, 1, 64)
    monkeypatch.setattr(interpreter, "clusters", lambda *args: [*forwards(*args)][::-1])
    agree(OnInterpreter(), *q_k_v, family)
    ends, ends_k = np.array([0, 9, 20], np.int32), np.array([0, 70, 160], np.int32)
    agree(OnInterpreter(), *q_k_v, family, cu_seqlens=ends, cu_seqlens_k=ends_k)
    with pytest.raises(Hazard, match="(?s)deadlock: .*blocks that come later in the grid may not be waited for"):
        agree(OnInterpreter(), *q_k_v, family, deterministic=True)


@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_only_listed_blocks_are_waited_for(family, monkeypatch):
    """A thread block waits for the earlier key blocks whose lists have the tile, and for no others."""
    n, forwards = 128, interpreter.clusters  # keys of a block
    q, k, v = inputs(1, 40, 2 * n + 4, 2, 1, 64)
    agree(OnInterpreter(), q, k, v, family, deterministic=True, mask=lambda b, h, i, j: (i // 30 + h) % 3 != j // 90)
    monkeypatch.setattr(interpreter, "clusters", lambda *args: [*forwards(*args)][::-1])
    q, k, v = q[:, :, :1], k[:, : n + 2], v[:, : n + 2]
    agree(OnInterpreter(), q, k, v, family, deterministic=True, mask=lambda b, h, i, j: (i + n) // n == j // n)
    with pytest.raises(Hazard, match="deadlock"):
        agree(OnInterpreter(), q, k, v, family, deterministic=True, mask=lambda b, h, i, j: (i > 5) | (j < n))


@pytest.mark.parametrize("lengths", [(0, 1), (1, 700), (300, 2000), (2000, 300), (1700, 1700)], ids=str)
@pytest.mark.parametrize(
    ("module", "head_dim"), [(backward_narrow_hopper, 64), (backward_folded_hopper, 128)], ids=["64", "128"]
)
def test_snake_waits_only_for_earlier_thread_blocks(module, head_dim, lengths):
    """The key blocks that see a query tile have 0, 1, .. prior adds in the order in which their thread blocks begin. Groups
    begin alternately with their last keys and with their first."""
    (queries, keys), config = lengths, module.config_for(head_dim, bf16, CAUSAL, deterministic=True)
    order, tiling, blocks = config.order, config.tiling, -(-keys // config.kv)
    at, added = ScoreContext(0, 0, 0, keys - queries, queries, keys, (), (), 0), Counter()
    begin = [order.locate_block(tiling, number, blocks, 3, 2) for number in range(3 * blocks)]
    assert sorted(begin) == [(block, pair) for block in range(blocks) for pair in range(3)]
    for block, pair in begin:
        q_tiles = tiling.query_tiles(config.kv * block, at, 1)
        for tile in range(q_tiles.first, q_tiles.first + q_tiles.n):
            assert order.prior_adds(tiling, block, tile, at, 1) == added[pair, tile]
            added[pair, tile] += 1
    if blocks == 14:
        assert [block for block, pair in begin if pair == 2] == [2, 1, 0, 3, 4, 5, 8, 7, 6, 9, 10, 11, 13, 12]


@pytest.mark.parametrize("lengths", [(1, 1), (1, 700), (300, 900), (700, 700)], ids=str)
@pytest.mark.parametrize(
    ("module", "head_dim"), [(backward_narrow_hopper, 64), (backward_folded_hopper, 128)], ids=["64", "128"]
)
def test_last_block_stores_before_others_add(module, head_dim, lengths):
    """One key block stores each query tile, and its thread block begins before all others that see the tile, with this tile."""
    (queries, keys), config = lengths, module.config_for(head_dim, bf16, CAUSAL, stores_first=True)
    order, tiling, blocks = config.order, config.tiling, -(-keys // config.kv)
    at, stored = ScoreContext(0, 0, 0, keys - queries, queries, keys, (), (), 0), set()
    begin = [order.locate_block(tiling, number, blocks, 3, 2) for number in range(3 * blocks)]
    assert sorted(begin) == [(block, pair) for block in range(blocks) for pair in range(3)]
    for block, pair in begin:
        q_tiles = tiling.query_tiles(config.kv * block, at, 1)
        adds = [
            (order.prior_adds(tiling, block, tile, at, 1), pair, tile)
            for tile in range(q_tiles.first, q_tiles.first + q_tiles.n)
        ]
        assert adds == sorted(adds, key=lambda x: x[0])
        for prior, *index in adds:
            assert prior == (tuple(index) in stored)
            stored.add(tuple(index))
    assert len(stored) == 3 * -(-queries // config.rows)


def test_raster_group():
    """As many heads at once as leave each the thread blocks that should begin together: with SnakeAdds, those of a group."""
    snake, last_block, plain = (
        backward_folded_hopper.config_for(128, bf16, CAUSAL, deterministic=deterministic, stores_first=stores_first).order
        for deterministic, stores_first in [(True, True), (False, True), (False, False)]
    )
    ascending = AscendingAdds(1, True)
    assert [choose_raster_group(True, order, 132) for order in (snake, ascending, last_block, plain)] == [44, 22, 22, 22]
    assert [choose_raster_group(True, order, 132, 2048) for order in (snake, ascending, last_block, plain)] == [44, 22, 16, 16]
    assert [choose_raster_group(False, order, 132, 2048) for order in (ascending, plain)] == [8, 1] and choose_raster_group(
        True, snake, 2
    ) == 1


@pytest.mark.parametrize("head_dim", [64, 128])
def test_snake_in_the_interpreter(head_dim, monkeypatch):
    """Groups of two key blocks: one in descending order, one in ascending order, and one that is not full."""
    monkeypatch.setattr(dq_order, "SNAKE_GROUP", 2)
    q_k_v, forwards, steps = inputs(1, 150, 600, 2, 1, head_dim), interpreter.clusters, record_steps(monkeypatch)
    agree(OnInterpreter(), *q_k_v, "sm_90", deterministic=True, causal=True)
    check_adds_in_order(steps)
    monkeypatch.setattr(interpreter, "clusters", lambda *args: [*forwards(*args)][::-1])
    with pytest.raises(Hazard, match="deadlock"):
        agree(OnInterpreter(), *q_k_v, "sm_90", deterministic=True, causal=True)


DETERMINISTIC = {  # "lists": some key blocks see few query tiles, others all
    "full": {},
    "causal": dict(causal=True),
    "softcap": dict(causal=True, softcap=3.0),
    "lists": dict(mask=lambda b, h, i, j: ((j <= i) & (i - j < 300)) | (j < 40 * h) | (i % 700 == j % 900)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", DETERMINISTIC)
@pytest.mark.parametrize(("family", "head_dim"), [("sm_90", 64), ("sm_90", 128), ("sm_90", 256), ("sm_80", 128)])
def test_deterministic_under_load(family, head_dim, case):
    """The bits are the same on eight streams at once, again and again."""
    torch, options = pytest.importorskip("torch"), DETERMINISTIC[case]
    q, k, v = (torch.randn(2, 2000, 4, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, lse = attention.forward(q, k, v, return_lse=True, **options)
    results = []
    torch.cuda.synchronize()
    for stream in [torch.cuda.Stream() for _ in range(8)] * 5:
        with torch.cuda.stream(stream):
            results.append(attention.backward(q, q, k, v, out, lse, deterministic=True, family=family, **options))
    torch.cuda.synchronize()
    for one in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(one, results[0], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "options"), [(16384, {}), (16384, dict(causal=True)), (512, dict(causal=True))], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deterministic", [True, False])
def test_uncleared_sums(head_dim, length, options, deterministic):
    """If the first thread block stores, nothing clears the sums: in memory that holds NaN, dQ agrees with float64, on eight
    streams at once."""
    torch = pytest.importorskip("torch")
    q, k, v, dout = (torch.randn(1, length, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = attention.forward(q, k, v, return_lse=True, **options)
    poison, results = [torch.full((2**28,), torch.nan, device="cuda") for _ in range(2)], []
    del poison
    torch.cuda.synchronize()
    for stream in [torch.cuda.Stream() for _ in range(8)] * 3:
        with torch.cuda.stream(stream):
            results.append(attention.backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)[0])
    torch.cuda.synchronize()
    one, key, value, its_dout = (x[0, :, -1].double() for x in (q, k, v, dout))
    for rows in torch.arange(length, device="cuda").split(2048):
        s = one[rows] @ key.T * head_dim**-0.5
        if options:
            s.masked_fill_(torch.arange(length, device="cuda") > rows[:, None], -torch.inf)
        p, dp = s.softmax(-1), its_dout[rows] @ value.T
        want = p * (dp - (dp * p).sum(-1, keepdim=True)) @ key * head_dim**-0.5
        for dq in results:
            error = (dq[0, rows, -1].double() - want).abs().max()
            assert error <= 2**-6 * want.abs().max(), (rows[0], error, want.abs().max())
    if deterministic:
        assert all(torch.equal(x, results[0]) for x in results[1:])


# ---- overlapping launches (PDL) ----------------------------------------------------------------------------------------
MAIN_KERNELS = "compute_dq_dk_dv", "compute_dk_dv", "compute_dq"


@pytest.mark.parametrize(
    "options",
    [{}, {"head_dim": 72}, {"softcap": 2.0, "head_dim": 72}, {"head_dim": 136}],
    ids=["narrow", "folded", "hopper", "wide"],
)
def test_overlapping_launches_wait(options, monkeypatch):
    """All threads of all launches wait for the launch before, and except for the last launch they then let the next one
    begin."""
    options, calls = options.copy(), Counter()
    q, k, v = inputs(1, 10, 10, 1, 1, options.pop("head_dim", 64))

    def counted(what):
        original = getattr(grid, what)

        def happens():
            original()
            names = [frame.name for frame in traceback.extract_stack()]
            kernel = next(name for name in names if name in ("prepare", *MAIN_KERNELS, "finish"))
            calls["main" if kernel in MAIN_KERNELS else kernel, what] += 1

        lowers(counting := op(happens))(lambda: (void, None))
        monkeypatch.setattr(grid, what, counting)

    counted("wait")
    counted("release")
    attention.backward(q, q, k, v, q, np.zeros((1, 1, 10), F32), family="sm_90", **options)
    wait, release = (calls["main", what] for what in ("wait", "release"))
    assert calls["prepare", "wait"] == calls["prepare", "release"] > 0 and not calls["finish", "release"]
    if calls["finish", "wait"]:
        assert wait == release == (16 if not options and q.shape[-1] == 64 else 12)  # warps of a thread block
    else:  # two kernels: backward_wide_hopper.py, backward_wide_queries_hopper.py
        assert wait == 2 * release == 24


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_consecutive_calls(head_dim):
    """Calls in the same scratch memory, on a stream and in a graph, give what each gives by itself."""
    torch = pytest.importorskip("torch")
    sets = [
        [torch.randn(1, 300 + 50 * n, 4, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)] for n in range(4)
    ]
    outputs = [attention.forward(*x[:3], causal=True, return_lse=True) for x in sets]

    def call(n):
        q, k, v, dout = sets[n]
        return attention.backward(dout, q, k, v, *outputs[n], causal=True)

    expected = []
    for n in range(len(sets)):
        expected.append(call(n))
        torch.cuda.synchronize()
    results = [call(n % len(sets)) for n in range(100)]
    graph, in_graph = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        in_graph += [call(n % len(sets)) for n in range(20)]
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    for n, (dq, dk, dv) in enumerate([*results, *in_graph]):
        want_dq, want_dk, want_dv = expected[n % len(sets)]
        assert torch.equal(dk, want_dk) and torch.equal(dv, want_dv)
        torch.testing.assert_close(dq, want_dq, rtol=2**-6, atol=2**-8)
