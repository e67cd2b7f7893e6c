"""Thread blocks that have the same keys: how many there are, and that their partial dK and dV add up."""

import numpy as np
import pytest
from forward_checks import draw, inputs
from gradient_checks import agree

import attention
from attention import reference
from attention.plans.softmax import backward_launches
from attention.plans.softmax.query_split import QuerySplit, split_queries


@pytest.mark.parametrize(
    ("group", "thread_blocks", "tiles", "wanted", "split"),
    [
        (32, 32, 16, 264, QuerySplit(8, 1)),  # 2 sequences of 2048 with one key head, causal
        (8, 128, 32, 264, QuerySplit(2, 1)),
        (3, 128, 64, 264, QuerySplit(1, 2)),  # 3 heads would be 384
        (71, 32, 16, 264, QuerySplit(1, 8)),
        (1, 16, 64, 132, QuerySplit(1, 8)),  # 77 tokens of text, 2 images of 4096 tokens, 8 heads
        (1, 80, 64, 132, QuerySplit(1, 1)),
        (1, 1, 16, 132, QuerySplit(1, 4)),  # no split has less than 4 query tiles
        (4, 1, 4, 132, QuerySplit(4, 1)),
        (3, 44, 1, 264, QuerySplit(3, 1)),
        (1, 1, 0, 132, QuerySplit(1, 1)),
    ],
)
def test_as_many_partials_as_give_at_most_the_wanted_thread_blocks(group, thread_blocks, tiles, wanted, split):
    assert split_queries(group, thread_blocks, tiles, wanted) == split


@pytest.fixture
def splits(monkeypatch, nothing_known, request):
    """Problems are split as for 132 multiprocessors (or as many as the parameter says), instead of the interpreter's. Returns
    the list of splits that were chosen."""
    chosen, original, processors = [], backward_launches.choose_split, getattr(request, "param", 132)

    def choose_split(*args):
        chosen.append(original(*args[:-1], processors))
        return chosen[-1]

    monkeypatch.setattr(backward_launches, "choose_split", choose_split)
    return chosen


SINK = np.array([1.5, -2, 0, 1], np.float32)
PROBLEMS = [  # groups of heads, splits, and both, by both families; each of Hopper's kernels
    ("sm_90", (40, 70), (4, 1), 64, {}, QuerySplit(4, 1)),
    ("sm_80", (130, 140), (6, 2), 128, dict(causal=True), QuerySplit(3, 1)),
    ("sm_90", (40, 200), (4, 2), 192, dict(causal=True), QuerySplit(2, 1)),
    ("sm_80", (1100, 77), (2, 2), 64, {}, QuerySplit(1, 2)),  # 9 query tiles, the last of which is not full
    ("sm_90", (1100, 77), (1, 1), 64, {}, QuerySplit(1, 2)),
    ("sm_90", (530, 77), (2, 2), 128, {}, QuerySplit(1, 2)),
    ("sm_90", (700, 700), (1, 1), 128, dict(causal=True), QuerySplit(1, 2)),  # the last key blocks have empty splits
    ("sm_80", (600, 130), (1, 1), 256, {}, QuerySplit(1, 2)),
    ("sm_90", (600, 130), (1, 1), 256, {}, QuerySplit(1, 2)),
    ("sm_90", (600, 130), (3, 1), 128, dict(window=(200, 50), dropout=0.3, seed=7), QuerySplit(3, 2)),
    ("sm_80", (600, 130), (4, 2), 72, dict(causal=True, sink=SINK), QuerySplit(2, 2)),
    ("sm_80", (300, 90), (3, 1), 64, dict(softcap=3.0), QuerySplit(3, 1)),
]


@pytest.mark.parametrize(("family", "lengths", "heads", "head_dim", "options", "split"), PROBLEMS)
def test_gradients(place, splits, family, lengths, heads, head_dim, options, split):
    agree(place, *inputs(1, *lengths, *heads, head_dim), family, **options)
    first = splits[0]  # on a GPU a plan for other lengths is made, too
    assert first.head_groups == split.head_groups and (first.splits > 1) == (split.splits > 1), first


@pytest.mark.parametrize("splits", [6], indirect=True)
def test_deterministic_split_depends_on_no_length(place, splits):
    """attention.parallel promises the bits of one GPU to parts of the keys, which have fewer thread blocks."""
    q, k, v = inputs(1, 530, 256, 4, 1, 64)
    dout, (out, lse) = draw(q.shape, q.dtype), reference.forward_low(q, k, v)

    def gradients(keys):
        arrays = [place.put(x) for x in (dout, q, k[:, keys], v[:, keys], out, lse)]
        return [place.get(x) for x in attention.backward(*arrays, deterministic=True)[1:]]

    for whole, *parts in zip(gradients(slice(0, 256)), gradients(slice(0, 128)), gradients(slice(128, 256))):
        np.testing.assert_array_equal(whole, np.concatenate(parts, 1))
    assert set(splits) == {QuerySplit(4, 1)}


def test_single_block_sums_queries_in_the_order_of_many_blocks(place):
    """The same promise where a thread block has all keys of a part: sums over queries have one order. The test is in float32,
    because bf16 would round most differences away."""
    q, k, v = inputs(1, 400, 256, 1, 1, 16)
    dout, (out, lse) = draw(q.shape, q.dtype), reference.forward_low(q, k, v)

    def gradients(keys):
        arrays = [place.put(x) for x in (dout, q, k[:, keys], v[:, keys], out, lse)]
        into = {f"d{name}": place.put(np.zeros(x.shape, np.float32)) for name, x in zip("qkv", arrays[1:4])}
        attention.backward(*arrays, **into, accumulate=True, deterministic=True, family="sm_80")
        return place.get(into["dk"]), place.get(into["dv"])

    for whole, *parts in zip(gradients(slice(0, 256)), gradients(slice(0, 128)), gradients(slice(128, 256))):
        np.testing.assert_array_equal(whole, np.concatenate(parts, 1))
