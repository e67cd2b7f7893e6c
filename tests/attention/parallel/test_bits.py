"""attention.parallel gives the bits of one GPU: each query of a rank takes its keys in the blocks of one GPU, in their order.
Only planners run (key_orders.py), so no GPU is needed."""

import os
import random

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from key_orders import EACH, WholeCall, key_orders, of_backward, of_forward, on_ranks
from planned_launches import GPUS

from attention.parallel import plans
from attention.parallel.orders import Zigzag
from attention.parts.backward.dq_order import AscendingAdds, ReverseTiles, SnakeAdds

PROBLEMS = int(os.environ.get("TILES_EXAMPLES", 40))  # 1,000 take a minute
WHOLE_TILES = Zigzag(384)  # parts that begin with whole tiles in every kernel


def array(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


def documents(b, h, i, j, docs):
    return docs[i] == docs[j]


def near(b, h, i, j):
    return (j <= i) & (j > i - 700)


def bent(s, b, h, i, j):
    return s + 0.1 * (i * j)


def use_alibi(s, b, h, i, j, slopes):
    return s - slopes[h] * (i - j)


CAUSAL = dict(causal=True)
CASES = {  # (problem, ranks, order) where a rank's own lengths, variant or number of sequences would give other blocks of keys
    "part of few keys": (WholeCall(4703, 4, 2, (64, 64), CAUSAL), 2, "zigzag"),
    "shorter": (WholeCall(2443, 4, 2, (16, 16), CAUSAL), 6, "contiguous"),
    "joined parts": (WholeCall(2560, 4, 2, (64, 64), CAUSAL), 2, "zigzag"),
    "batches": (WholeCall(4866, 1, 1, (64, 64), CAUSAL, batch=2), 5, "contiguous"),
    "alibi": (WholeCall(1456, 4, 2, (128, 128), CAUSAL | dict(alibi=array(4))), 4, "contiguous"),
    "a score": (WholeCall(2528, 4, 2, (128, 128), dict(score=bent)), 3, "zigzag"),
    "a score that is alibi": (WholeCall(2003, 2, 2, (128, 128), CAUSAL | dict(score=use_alibi, aux=(array(2),))), 3, "zigzag"),
    "packed": (WholeCall(7845, 128, 8, (64, 64), CAUSAL | dict(cu_seqlens=ends(*range(0, 7845, 500), 7845))), 8, "zigzag"),
    "short parts": (WholeCall(200, 8, 8, (128, 128), CAUSAL, batch=70), 4, "contiguous"),
    "a bias of one row": (WholeCall(1025, 2, 2, (128, 128), dict(bias=array(1, 2, 1025, 1025))), 4, "zigzag"),
    "a window ahead": (WholeCall(2556, 4, 1, (64, 64), dict(window=(None, 100))), 5, "zigzag"),
    "a window of most keys": (WholeCall(5040, 4, 1, (64, 64), dict(window=(4500, 50))), 2, WHOLE_TILES),
}


def differs(monkeypatch, gpu, problem, world, order, scheme="gather"):
    """Every EACH-th query whose keys ranks take in other blocks, or another order, than one GPU."""
    whole = of_forward(monkeypatch, gpu, problem)
    orders = [key_orders(one, problem) for one in whole]
    one, ranks = {row: keys for its in orders for row, keys in its.items()}, {}
    for its in on_ranks(monkeypatch, gpu, problem, world, scheme, order):
        ranks |= key_orders(its, problem)
    assert sorted(one) == list(range(0, problem.length, EACH))
    return [row for row, keys in one.items() if keys != ranks.get(row)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_take_the_blocks_of_one_gpu(monkeypatch, name):
    """They would not, if they chose blocks by their own shards."""
    problem, world, order = CASES[name]
    assert not differs(monkeypatch, "H200", problem, world, order)
    monkeypatch.setattr(plans, "find_kv_block", lambda *_: None)
    assert differs(monkeypatch, "H200", problem, world, order)


def test_masks_equal_to_a_window_become_one(monkeypatch):
    i, j = np.arange(2280)[:, None], np.arange(2280)[None]
    problem = WholeCall(2280, 4, 2, (64, 64), dict(mask=near), seen=(j <= i) & (j > i - 700))
    assert not differs(monkeypatch, "RTX 4090", problem, 2, WHOLE_TILES)
    monkeypatch.setattr(plans, "use_window", lambda options, *_: options)
    assert differs(monkeypatch, "RTX 4090", problem, 2, WHOLE_TILES)


def drawn_problem(draw):
    """(WholeCall, ranks, order, GPU), drawn at random."""
    kind, keys, seen = draw.choice(KINDS), 0, None
    length = draw.choice([draw.randint(100, 1200), draw.randint(1200, 3000), draw.randint(3000, 9000)])
    group, kv_heads, dim = draw.choice([1, 2, 4]), draw.choice([1, 2, 8]), draw.choice([16, 64, 64, 96, 128, 128, 192, 256])
    heads, far, ahead = group * kv_heads, draw.choice([100, 300, 700, 1500, length]), draw.choice([0, 50, 200, None])
    options = dict(causal=True) if draw.random() < 0.6 else {}
    if kind == "plain":
        keys = length + draw.choice([0, 0, draw.randint(0, 300)])
    elif kind == "window":
        options |= dict(window=(far, None if options else ahead))
    elif kind == "ahead":
        options = dict(window=(None, far))
    elif kind in ("bias", "bias and window"):
        keys = length = length // 8 * 8
        rows, dtype = draw.choice([1, length]), draw.choice([torch.bfloat16, torch.float32])
        options |= dict(bias=array(1, heads, rows, length, dtype=dtype))
        options |= dict(causal=True, window=(far, None)) if kind != "bias" else {}
    elif kind in ("alibi", "alibi and window"):
        options = dict(causal=True, alibi=array(heads)) | (dict(window=(far, None)) if kind != "alibi" else {})
    elif kind == "mask":
        docs = torch.arange(length := min(length, 3000)) // draw.choice([90, 700])
        options, seen = options | dict(mask=documents, aux=(docs.int(),)), (docs[:, None] == docs).numpy()
    elif kind == "packed":
        cuts = sorted(draw.sample(range(length), draw.randint(1, 30)))
        options, heads = options | dict(cu_seqlens=ends(0, *cuts, length)), draw.choice([4, 16]) * kv_heads
    elif kind == "norms":
        options |= dict(q_norm=array(dim, dtype=torch.bfloat16), k_norm=array(dim, dtype=torch.bfloat16))
    else:
        options |= {"softcap": dict(softcap=20.0), "sink": dict(sink=array(heads)), "score": dict(score=bent)}[kind]
    whole = kind == "mask" or (options.get("window") or (None,))[0] is not None
    order, world = draw.choice(["zigzag", "contiguous"]), draw.randint(2, 8)
    if whole:
        world = max(2, min(world, length // 768))
        order = WHOLE_TILES
    batch = 1 if kind == "packed" else draw.choice([1, 1, 2, 40])
    dims = dim, draw.choice([dim, dim, dim, 64, 128])
    problem = WholeCall(length, heads, kv_heads, dims, options, keys, batch, draw.choice([torch.bfloat16, torch.float16]), seen)
    return problem, world, order, draw.choice(["H200", "H200", *GPUS])


KINDS = [*"plain window ahead softcap sink bias alibi mask score packed norms".split(), "plain", "plain", "bias and window"]
KINDS += ["alibi and window"]


@pytest.mark.parametrize("part", range(4))
def test_drawn_problems(monkeypatch, part):
    """Random problems of all variants, on 2 to 8 ranks, by gather and ulysses; windows and masks with parts that begin with
    whole tiles."""
    draw = random.Random(part)
    for number in range(PROBLEMS // 4):
        problem, world, order, gpu = drawn_problem(draw)
        whole = of_forward(monkeypatch, gpu, problem)
        if "decode" in type(whole[0].launch.config).__module__ or (order == WHOLE_TILES and problem.length < 768 * world):
            continue  # a case of docs/parallel.md
        heads = problem.heads % world == 0 and problem.kv_heads % world == 0
        for scheme in ("gather", "ulysses") if heads else ("gather",):
            wrong = differs(monkeypatch, gpu, problem, world, order, scheme)
            assert not wrong, f"{number}: {problem[:7]} on {world} ranks of {order}, {gpu}, {scheme}: queries {wrong[:3]} .."


def launches_of_gradients(monkeypatch, gpu, problem, world=1, order=None):
    """What decides the bits of deterministic gradients, for each launch: for dq, the keys of a block and the order of blocks;
    for dk and dv, the rows of a tile, the order of tiles, and the shares of heads."""
    ranks = order is not None
    actual = (
        on_ranks(monkeypatch, gpu, problem, world, "gather", order, True) if ranks else of_backward(monkeypatch, gpu, problem)
    )
    of_dq, of_dk = set(), set()
    for (config, _, call_options), rows, keys, is_local in actual:
        if not hasattr(config, "order") or "gQ" not in call_options or "gO" in call_options:
            continue
        module, back = type(config).__module__, isinstance(config.order, (AscendingAdds, ReverseTiles))
        first = rows[0] % config.rows == 0 if len(rows) else True
        blocks = type(config.order) if isinstance(config.order, SnakeAdds) else None
        if not (ranks and is_local):
            of_dq.add((module, config.kv, blocks, bool(keys[0] % config.kv == 0)))
        if not ranks or is_local:
            of_dk.add((module, config.rows, back, bool(first), call_options.get("shares"), call_options.get("group")))
    return of_dq, of_dk


def test_gradients_use_the_gathered_halo(monkeypatch):
    """The keys of each of a rank's parts begin after the first key, at a block of the forward kernel."""
    problem = WholeCall(2304, 1, 1, (64, 64), dict(window=(200, 0)))
    actual = on_ranks(monkeypatch, "H200", problem, 3, back=True)
    assert any([one.keys[0] % 384 for one in actual])


def test_deterministic_gradients(monkeypatch):
    """Gradients with deterministic=True have the bits of one GPU, except for windows that look ahead."""
    draw, tried = random.Random(0), 0
    while tried < PROBLEMS // 2:
        problem, world, order, gpu = drawn_problem(draw)
        bare = not {"bias", "cu_seqlens", "alibi", "q_norm"} & problem.options.keys()
        ahead = (problem.options.get("window") or (None, 0))[1] != 0 and not problem.options.get("causal")
        if not bare or ("window" in problem.options and ahead) or (order == WHOLE_TILES and problem.length < 768 * world):
            continue
        tried += 1
        one, ranks = (launches_of_gradients(monkeypatch, gpu, problem, *more) for more in ((), (world, order)))
        assert ranks[0] <= one[0] and ranks[1] <= one[1], f"{problem[:7]} on {world} ranks of {order}, {gpu}: {one} {ranks}"
