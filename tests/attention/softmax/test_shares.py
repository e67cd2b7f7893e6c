"""Thread blocks that share a block of keys: which there are, and that their gradients add up."""

import numpy as np
import pytest
from judged import draw, inputs
from judged_gradients import agree

import attention
from attention import reference
from attention.softmax.backward import shares
from attention.softmax.backward.shares import QuerySplit


@pytest.mark.parametrize(
    ("group", "thread_blocks", "tiles", "wanted", "cut"),
    [
        (32, 32, 16, 264, QuerySplit(8, 1)),  # 2 sequences of 2048 with one key head, causal
        (8, 128, 32, 264, QuerySplit(2, 1)),
        (3, 128, 64, 264, QuerySplit(1, 2)),  # 3 heads would be 384
        (71, 32, 16, 264, QuerySplit(1, 8)),
        (1, 16, 64, 132, QuerySplit(1, 8)),  # 77 words, 2 pictures of 4096 places, 8 heads
        (1, 80, 64, 132, QuerySplit(1, 1)),
        (1, 1, 16, 132, QuerySplit(1, 4)),  # no span has less than 4 tiles ..
        (4, 1, 4, 132, QuerySplit(4, 1)),
        (3, 44, 1, 264, QuerySplit(3, 1)),
        (1, 1, 0, 132, QuerySplit(1, 1)),
    ],
)
def test_as_many_shares_as_leave_no_more_than_are_wanted(group, thread_blocks, tiles, wanted, cut):
    assert shares.cut(group, thread_blocks, tiles, wanted) == cut


@pytest.fixture
def cuts(monkeypatch, nothing_known, request):
    """Problems are cut as for 132 multiprocessors (or as many as the test says), of which the interpreter has a few; the cuts
    that there were."""
    found, of, processors = [], shares.choose_split, getattr(request, "param", 132)

    def choose_split(*args):
        found.append(of(*args[:-1], processors))
        return found[-1]

    monkeypatch.setattr(shares, "cut_of", choose_split)
    return found


@pytest.mark.parametrize(
    ("lengths", "heads", "head_dim", "options", "cut"),
    [
        ((40, 70), (4, 1), 64, {}, QuerySplit(4, 1)),
        ((130, 140), (6, 2), 128, dict(causal=True), QuerySplit(3, 1)),
        ((40, 200), (4, 2), 192, dict(causal=True), QuerySplit(2, 1)),
        ((1100, 77), (2, 2), 64, {}, QuerySplit(1, 2)),  # of 9 tiles, the last of which is short
        ((530, 77), (2, 2), 128, {}, QuerySplit(1, 2)),
        ((700, 700), (1, 1), 128, dict(causal=True), QuerySplit(1, 2)),  # the last blocks' spans are empty
        ((600, 130), (1, 1), 256, {}, QuerySplit(1, 2)),
        ((600, 130), (3, 1), 128, dict(window=(200, 50), dropout=0.3, seed=7), QuerySplit(3, 2)),
        ((600, 130), (4, 2), 72, dict(causal=True, sink=np.array([1.5, -2, 0, 1], np.float32)), QuerySplit(2, 2)),
        ((300, 90), (3, 1), 64, dict(softcap=3.0), QuerySplit(3, 1)),
    ],
)
@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_gradients(place, cuts, lengths, heads, head_dim, options, cut, family):
    agree(place, *inputs(1, *lengths, *heads, head_dim), family, **options)
    found = cuts[0]  # a plan for other lengths, too, is made besides on a GPU
    assert found.head_groups == cut.head_groups and (found.spans > 1) == (cut.spans > 1), found


@pytest.mark.parametrize("cuts", [6], indirect=True)
def test_in_order_no_length_decides(place, cuts):
    """attention.parallel promises the bits of one GPU for parts of the keys, which have fewer thread blocks."""
    q, k, v = inputs(1, 530, 256, 4, 1, 64)
    dout, (out, lse) = draw(q.shape, q.dtype), reference.forward_low(q, k, v)

    def found(keys):
        given = [place.put(x) for x in (dout, q, k[:, keys], v[:, keys], out, lse)]
        return [place.get(x) for x in attention.backward(*given, deterministic=True)[1:]]

    for whole, *parts in zip(found(slice(0, 256)), found(slice(0, 128)), found(slice(128, 256))):
        np.testing.assert_array_equal(whole, np.concatenate(parts, 1))
    assert set(cuts) == {QuerySplit(4, 1)}


def test_a_block_with_all_keys_takes_queries_as_many_blocks_do(place):
    """The same promise, where a block has all keys of a part: sums over queries have one order. In float32, as in bf16 other
    last bits would mostly be rounded away."""
    q, k, v = inputs(1, 400, 256, 1, 1, 16)
    dout, (out, lse) = draw(q.shape, q.dtype), reference.forward_low(q, k, v)

    def found(keys):
        given = [place.put(x) for x in (dout, q, k[:, keys], v[:, keys], out, lse)]
        into = {f"d{name}": place.put(np.zeros(x.shape, np.float32)) for name, x in zip("qkv", given[1:4])}
        attention.backward(*given, **into, accumulate=True, deterministic=True, family="sm_80")
        return place.get(into["dk"]), place.get(into["dv"])

    for whole, *parts in zip(found(slice(0, 256)), found(slice(0, 128)), found(slice(128, 256))):
        np.testing.assert_array_equal(whole, np.concatenate(parts, 1))
