"""attention.backward: sums of dQ in order, the same bits every time, and launches one after the other."""

import itertools
import traceback
from collections import Counter, defaultdict, deque

import numpy as np
import pytest
from judged import inputs
from judged_gradients import agree
from places import OnInterpreter

import attention
from attention.softmax.backward import dq_order, hopper_folded, hopper_narrow
from attention.softmax.backward.dq_order import Ordered
from attention.softmax.backward.launches import band_of
from attention.softmax.variants import At
from attention.softmax.visible_keys import CAUSAL
from ops import add_held, count_stored, count_up, grid, tma_add, tma_store, wait_count
from tiles import Hazard, bf16, interpreter
from tiles.interpreter import here
from tiles.numba_types import void
from tiles.op import OPS, lowers, op

F32 = np.float32
ORDERED = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(window=(70, 20)),
    "window, left": dict(window=(100, None), softcap=2.0),
    "mask": dict(mask=lambda b, h, i, j: (j <= i) & (j // 70 != 1)),
}


@pytest.mark.parametrize(("case", "head_dim"), [*zip(ORDERED, itertools.cycle([128, 64]))])
@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_deterministic(place, case, head_dim, family, monkeypatch):
    """Who waits for a block that comes later, or for more than there are, is found by the interpreter; who waits for less, or
    adds before that, overtakes a slow warp."""
    steps = recorded_steps(monkeypatch) if isinstance(place, OnInterpreter) else None
    agree(place, *inputs(1, 150, 330, 2, 1, head_dim), family, deterministic=True, **ORDERED[case])
    if steps is not None:
        nobody_is_overtaken(steps)


ADDING, COUNTING = (add_held, tma_add, tma_store), (count_stored, count_up)


def recorded_steps(monkeypatch):
    """{(block, warp): [(what it does, where, the count that it waits for)]} of all adding, counting and waiting from now on."""
    steps = defaultdict(list)

    def record(face, where, count=None):
        meaning = OPS[face].meaning

        def recording(*args):
            at = tuple(map(int, args[where]))
            steps[here().block.index, here().index].append((face, at, count and int(args[count])))
            return meaning(*args)

        monkeypatch.setattr(OPS[face], "meaning", recording)

    for one in (*ADDING, *COUNTING):
        record(one, 2 if one is add_held else 1)
    record(wait_count, 1, 2)
    monkeypatch.setenv("TILES_JOBS", "1")  # steps in other processes would not be seen
    return steps


def blocks_that_add(steps, slow):
    """{place in the sums of dQ: the blocks that add there, in their order} where all begin at once, and this warp goes on only
    while all others wait or are done."""
    added, counts = defaultdict(list), Counter()
    todo = {who: deque(steps[who]) for who in sorted(steps, key=lambda who: (who == slow, who))}
    while any(todo.values()):
        (block, _), does = next((who, does) for who, does in todo.items() if does and not waits(does[0], counts))
        step, at, _ = does.popleft()
        if step in COUNTING:
            counts[at] += 1
        elif step in ADDING:
            added[at].append(block)
    return added


def waits(step, counts):
    face, at, n = step
    return face is wait_count and counts[at] < n


def nobody_is_overtaken(steps):
    """Blocks add in the order in which they begin, whichever warp is slow."""
    assert steps
    for slow in steps:
        added = blocks_that_add(steps, slow).values()
        assert all(blocks == sorted(blocks) for blocks in added) and any(blocks[0] != blocks[-1] for blocks in added)


@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_blocks_add_in_order(family, monkeypatch):
    """In whatever order they come: a block waits for those before it. Without order none minds what another does."""
    forwards, q_k_v = interpreter.clusters, inputs(1, 20, 160, 1, 1, 64)
    monkeypatch.setattr(interpreter, "clusters", lambda *args: [*forwards(*args)][::-1])
    agree(OnInterpreter(), *q_k_v, family)
    ends, ends_k = np.array([0, 9, 20], np.int32), np.array([0, 70, 160], np.int32)
    agree(OnInterpreter(), *q_k_v, family, cu_seqlens=ends, cu_seqlens_k=ends_k)
    with pytest.raises(Hazard, match="(?s)deadlock: .*blocks that come later in the grid may not be waited for"):
        agree(OnInterpreter(), *q_k_v, family, deterministic=True)


@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_blocks_add_in_order_of_those_that_lists_name(family, monkeypatch):
    """A block waits for those before it whose lists have the tile, and for no others."""
    n, forwards = 128, interpreter.clusters  # keys of a block
    q, k, v = inputs(1, 40, 2 * n + 4, 2, 1, 64)
    agree(OnInterpreter(), q, k, v, family, deterministic=True, mask=lambda b, h, i, j: (i // 30 + h) % 3 != j // 90)
    monkeypatch.setattr(interpreter, "clusters", lambda *args: [*forwards(*args)][::-1])
    q, k, v = q[:, :, :1], k[:, : n + 2], v[:, : n + 2]
    agree(OnInterpreter(), q, k, v, family, deterministic=True, mask=lambda b, h, i, j: (i + n) // n == j // n)
    with pytest.raises(Hazard, match="deadlock"):
        agree(OnInterpreter(), q, k, v, family, deterministic=True, mask=lambda b, h, i, j: (i > 5) | (j < n))


@pytest.mark.parametrize("lengths", [(0, 1), (1, 700), (300, 2000), (2000, 300), (1700, 1700)], ids=str)
@pytest.mark.parametrize(("module", "head_dim"), [(hopper_narrow, 64), (hopper_folded, 128)], ids=["64", "128"])
def test_a_snake_comes_behind_what_began_before(module, head_dim, lengths):
    """Of every tile of queries the blocks of keys that see it have the places 0, 1, .. in the order in which they begin, and
    each place is one block's. Groups begin in turns from their last keys and from their first."""
    (queries, keys), config = lengths, module.config_for(head_dim, bf16, CAUSAL, ordered=True)
    order, tiling, blocks = config.order, config.tiling, -(-keys // config.kv)
    at, added = At(0, 0, 0, keys - queries, queries, keys, (), (), 0), Counter()
    begin = [order.place(tiling, number, blocks, 3, 2) for number in range(3 * blocks)]
    assert sorted(begin) == [(block, pair) for block in range(blocks) for pair in range(3)]
    for block, pair in begin:
        every = tiling.tiles(config.kv * block, at, 1)
        for tile in range(every.first, every.first + every.n):
            assert order.behind(tiling, block, tile, at, 1) == added[pair, tile]
            added[pair, tile] += 1
    if blocks == 14:
        assert [block for block, pair in begin if pair == 2] == [2, 1, 0, 3, 4, 5, 8, 7, 6, 9, 10, 11, 13, 12]


@pytest.mark.parametrize("lengths", [(1, 1), (1, 700), (300, 900), (700, 700)], ids=str)
@pytest.mark.parametrize(("module", "head_dim"), [(hopper_narrow, 64), (hopper_folded, 128)], ids=["64", "128"])
def test_who_stores_heads_the_others(module, head_dim, lengths):
    """Of every tile of queries one block of keys stores, and begins before all others that see it; it takes its own first."""
    (queries, keys), config = lengths, module.config_for(head_dim, bf16, CAUSAL, stores=True)
    order, tiling, blocks = config.order, config.tiling, -(-keys // config.kv)
    at, stored = At(0, 0, 0, keys - queries, queries, keys, (), (), 0), set()
    begin = [order.place(tiling, number, blocks, 3, 2) for number in range(3 * blocks)]
    assert sorted(begin) == [(block, pair) for block in range(blocks) for pair in range(3)]
    for block, pair in begin:
        every = tiling.tiles(config.kv * block, at, 1)
        seen = [(order.behind(tiling, block, tile, at, 1), pair, tile) for tile in range(every.first, every.first + every.n)]
        assert seen == sorted(seen, key=lambda x: x[0])
        for behind, *place in seen:
            assert behind == (tuple(place) in stored)
            stored.add(tuple(place))
    assert len(stored) == 3 * -(-queries // config.rows)


def test_pairs_at_once():
    """As many as leave each pair the thread blocks that should begin together: a snake's, a group."""
    snake, heading, plain = (
        hopper_folded.config_for(128, bf16, CAUSAL, ordered=ordered, stores=stores).order
        for ordered, stores in [(True, True), (False, True), (False, False)]
    )
    row = Ordered(1, True)
    assert [band_of(True, order, 132) for order in (snake, row, heading, plain)] == [44, 22, 22, 22]
    assert [band_of(True, order, 132, 2048) for order in (snake, row, heading, plain)] == [44, 22, 16, 16]
    assert [band_of(False, order, 132, 2048) for order in (row, plain)] == [8, 1] and band_of(True, snake, 2) == 1


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_snake_in_the_interpreter(head_dim, monkeypatch):
    """Groups of two: from the last keys on, from the first on, and one that is not whole."""
    monkeypatch.setattr(dq_order, "GROUP", 2)
    q_k_v, forwards, steps = inputs(1, 150, 600, 2, 1, head_dim), interpreter.clusters, recorded_steps(monkeypatch)
    agree(OnInterpreter(), *q_k_v, "sm_90", deterministic=True, causal=True)
    nobody_is_overtaken(steps)
    monkeypatch.setattr(interpreter, "clusters", lambda *args: [*forwards(*args)][::-1])
    with pytest.raises(Hazard, match="deadlock"):
        agree(OnInterpreter(), *q_k_v, "sm_90", deterministic=True, causal=True)


SAME = {  # of a mask that leaves most blocks out, and of which others see all
    "full": {},
    "causal": dict(causal=True),
    "softcap": dict(causal=True, softcap=3.0),
    "lists": dict(mask=lambda b, h, i, j: ((j <= i) & (i - j < 300)) | (j < 40 * h) | (i % 700 == j % 900)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", SAME)
@pytest.mark.parametrize(("family", "head_dim"), [("sm_90", 64), ("sm_90", 128), ("sm_90", 256), ("sm_80", 128)])
def test_the_same_bits_under_load(family, head_dim, case):
    """Of eight streams at once, again and again."""
    torch, options = pytest.importorskip("torch"), SAME[case]
    q, k, v = (torch.randn(2, 2000, 4, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, lse = attention.forward(q, k, v, return_lse=True, **options)
    found = []
    torch.cuda.synchronize()
    for stream in [torch.cuda.Stream() for _ in range(8)] * 5:
        with torch.cuda.stream(stream):
            found.append(attention.backward(q, q, k, v, out, lse, deterministic=True, family=family, **options))
    torch.cuda.synchronize()
    for one in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(one, found[0], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "options"), [(16384, {}), (16384, dict(causal=True)), (512, dict(causal=True))], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_stored_first_is_there(head_dim, length, options, ordered):
    """Sums that nobody clears, in memory that holds NaN: dQ as the formula in float64 has it, of eight streams at once."""
    torch = pytest.importorskip("torch")
    q, k, v, dout = (torch.randn(1, length, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = attention.forward(q, k, v, return_lse=True, **options)
    poison, found = [torch.full((2**28,), torch.nan, device="cuda") for _ in range(2)], []
    del poison
    torch.cuda.synchronize()
    for stream in [torch.cuda.Stream() for _ in range(8)] * 3:
        with torch.cuda.stream(stream):
            found.append(attention.backward(dout, q, k, v, out, lse, deterministic=ordered, **options)[0])
    torch.cuda.synchronize()
    one, key, value, its = (x[0, :, -1].double() for x in (q, k, v, dout))
    for rows in torch.arange(length, device="cuda").split(2048):
        s = one[rows] @ key.T * head_dim**-0.5
        if options:
            s.masked_fill_(torch.arange(length, device="cuda") > rows[:, None], -torch.inf)
        p, dp = s.softmax(-1), its[rows] @ value.T
        want = p * (dp - (dp * p).sum(-1, keepdim=True)) @ key * head_dim**-0.5
        for dq in found:
            error = (dq[0, rows, -1].double() - want).abs().max()
            assert error <= 2**-6 * want.abs().max(), (rows[0], error, want.abs().max())
    if ordered:
        assert all(torch.equal(x, found[0]) for x in found[1:])


# ---- one launch after the other ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [{}, {"head_dim": 72}, {"softcap": 2.0, "head_dim": 72}, {"head_dim": 136}],
    ids=["apart", "folded", "hopper", "wide"],
)
def test_early_launches_wait(options, monkeypatch):
    """All threads of all do, and but for the last launch's they then let the next one begin."""
    options, asked = options.copy(), Counter()
    q, k, v = inputs(1, 10, 10, 1, 1, options.pop("head_dim", 64))

    def counted(what):
        def happens():
            names = [frame.name for frame in traceback.extract_stack()]
            asked[next(name for name in names if name in ("prepare", "attend", "finish")), what] += 1

        lowers(counting := op(happens))(lambda: (void, None))
        monkeypatch.setattr(grid, what, counting)

    counted("wait")
    counted("release")
    attention.backward(q, q, k, v, q, np.zeros((1, 1, 10), F32), family="sm_90", **options)
    attend, release = (asked["attend", what] for what in ("wait", "release"))
    assert asked["prepare", "wait"] == asked["prepare", "release"] > 0 and not asked["finish", "release"]
    if asked["finish", "wait"]:
        assert attend == release == (16 if not options and q.shape[-1] == 64 else 12)  # warps of a block
    else:  # two kernels: hopper_wide.py, hopper_wide_queries.py
        assert attend == 2 * release == 24


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_calls_that_follow_one_another(head_dim):
    """In the same scratch memory, on a stream and in a graph: as if each were alone."""
    torch = pytest.importorskip("torch")
    sets = [
        [torch.randn(1, 300 + 50 * n, 4, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)] for n in range(4)
    ]
    made = [attention.forward(*x[:3], causal=True, return_lse=True) for x in sets]

    def call(n):
        q, k, v, dout = sets[n]
        return attention.backward(dout, q, k, v, *made[n], causal=True)

    alone = []
    for n in range(len(sets)):
        alone.append(call(n))
        torch.cuda.synchronize()
    found = [call(n % len(sets)) for n in range(100)]
    captured, found_there = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(captured):
        found_there += [call(n % len(sets)) for n in range(20)]
    for _ in range(5):
        captured.replay()
    torch.cuda.synchronize()
    for n, of in enumerate([*found, *found_there]):
        *_, dk, dv = alone[n % len(sets)]
        assert torch.equal(of[1], dk) and torch.equal(of[2], dv)
        torch.testing.assert_close(of[0], alone[n % len(sets)][0], rtol=2**-6, atol=2**-8)
