"""attention/compat/flashinfer.py: plan and run, compared with the formula in float64."""

import numpy as np
import pytest
from places import BF16

from attention import reference
from attention.compat import flashinfer

LOG2_E = np.log2(np.e)
SIZE, HEADS, KV_HEADS, COLUMNS = 8, 4, 2, 32


@pytest.fixture
def draw():
    rng = np.random.default_rng(0)
    return lambda *shape: rng.standard_normal(shape, np.float32).astype(BF16)


def paged(draw, lengths):
    """(k, v of each sequence, the cache (pages, 2, size, Hk, D), indptr, indices, last_page_len), NaN where there are no
    keys."""
    rng, counts = np.random.default_rng(1), [-(-n // SIZE) for n in lengths]
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    indices = rng.permutation(indptr[-1] + 3)[: indptr[-1]].astype(np.int32)
    cache = np.full((indptr[-1] + 3, 2, SIZE, KV_HEADS, COLUMNS), np.nan, BF16)
    both = [(draw(n, KV_HEADS, COLUMNS), draw(n, KV_HEADS, COLUMNS)) for n in lengths]
    for b, n in enumerate(lengths):
        for j in range(n):
            page = indices[indptr[b] + j // SIZE]
            cache[page, 0, j % SIZE], cache[page, 1, j % SIZE] = both[b][0][j], both[b][1][j]
    last = np.array([n - SIZE * (count - 1) if count else 0 for n, count in zip(lengths, counts)], np.int32)
    return both, cache, indptr, indices, last


def agree(out, lse, q, both, ends, of=lambda b: {}, **options):
    """Compare each sequence with the reference by the error rule; lse is to the base 2."""
    for b, (k, v) in enumerate(both):
        rows = slice(ends[b], ends[b + 1])
        inputs = q[None, rows], k[None], v[None]
        actual = [formula(*inputs, **options, **of(b)) for formula in (reference.forward, reference.forward_low)]
        if ends[b] < ends[b + 1]:
            reference.assert_close(out[None, rows], actual[0][0], actual[1][0], factor=3 if options.get("softcap") else 2)
            np.testing.assert_allclose(lse[rows].T, actual[0][1][0] * LOG2_E, atol=0.02)


CACHES = {
    "NHD": lambda cache: cache,
    "pair": lambda cache: (cache[:, 0].copy(), cache[:, 1].copy()),
    "HND": lambda cache: np.ascontiguousarray(cache.swapaxes(2, 3)),
}


@pytest.mark.parametrize("way", CACHES)
def test_decode(way, draw):
    """Lengths around the edges of pages, and a sequence without keys."""
    lengths = (9, 0, 8, 30)
    both, cache, *where = paged(draw, lengths)
    q, sink = draw(4, HEADS, COLUMNS), np.array([0.5, 0, -1, 2], np.float32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(np.empty(64, np.uint8), "HND" if way == "HND" else "NHD")
    wrapper.plan(*where, HEADS, KV_HEADS, COLUMNS, SIZE, window_left=6, logits_soft_cap=5.0, q_data_type="bfloat16")
    out, sums = np.full_like(q, np.nan), np.full((4, HEADS), np.nan, np.float32)
    actual = wrapper.run(q, CACHES[way](cache), return_lse=True, out=out, lse=sums, sinks=sink, q_scale=0.5)
    assert actual[0] is out and actual[1] is sums
    call_options = dict(window=(6, None), softcap=5.0, sink=sink, scale=0.5 * COLUMNS**-0.5)
    agree(out, sums, q, both, range(5), **call_options)
    again = wrapper.run(q, CACHES[way](cache), sinks=sink, q_scale=0.5, window_left=6)
    assert (again == out).all()


def test_several_tokens_of_each(draw):
    both, cache, *where = paged(draw, (9, 17))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*where, HEADS, KV_HEADS, COLUMNS, SIZE, q_len_per_req=3, disable_split_kv=True)
    q = draw(6, HEADS, COLUMNS)
    agree(*wrapper.run(q, cache, return_lse=True), q, both, (0, 3, 6), causal=True)
    assert (wrapper.run(q, cache, v_scale=2.0) == 2 * wrapper.run(q, cache)).all()


def test_without_splits_a_batch_has_the_bits_of_each(draw):
    both, cache, indptr, indices, last = paged(draw, (300, 430, 9))
    q, actual = draw(3, HEADS, COLUMNS), []
    for batch in ((0, 1, 2), (0,), (1,)):
        pages = [indices[indptr[b] : indptr[b + 1]] for b in batch]
        where = np.cumsum([0, *map(len, pages)]), np.concatenate(pages), last[list(batch)]
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
        wrapper.plan(*where, HEADS, KV_HEADS, COLUMNS, SIZE, disable_split_kv=True)
        actual.append(wrapper.run(q[list(batch)], cache))
    assert (np.concatenate(actual[1:]) == actual[0][:2]).all()


@pytest.mark.parametrize("causal", [True, False])
def test_prefill(causal, draw):
    both, cache, *where = paged(draw, (9, 5, 30))
    q, ends = draw(16, HEADS, COLUMNS), np.array([0, 9, 9, 16], np.int32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(np.empty(64, np.uint8))
    wrapper.plan(ends, *where, HEADS, KV_HEADS, COLUMNS, SIZE, causal=causal, sm_scale=0.3)
    agree(*wrapper.run(q, cache, return_lse=True), q, both, ends, causal=causal, scale=0.3)


def test_masks_of_bits(draw):
    """A bit for each query token and key of each sequence, in both wrappers; causal is ignored."""
    lengths, ends = (9, 20), np.array([0, 3, 10], np.int32)
    both, cache, *where = paged(draw, lengths)
    q, seen = draw(10, HEADS, COLUMNS), [np.random.default_rng(b).random((n, m)) > 0.4 for b, n, m in ((0, 3, 9), (1, 7, 20))]
    bits = np.concatenate([x.reshape(-1) for x in seen])
    one, other = flashinfer.BatchPrefillWithPagedKVCacheWrapper(None), flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None)
    one.plan(ends, *where, HEADS, KV_HEADS, COLUMNS, SIZE, custom_mask=bits, causal=True)
    keys = np.array([0, 9, 29], np.int32)
    other.plan(ends, keys, HEADS, KV_HEADS, COLUMNS, custom_mask=bits, causal=True)
    k, v = (np.concatenate(x) for x in zip(*both))
    for actual in one.run(q, cache, return_lse=True), other.run(q, k, v, return_lse=True):
        agree(*actual, q, both, ends, of=lambda b: {"mask": lambda _, h, i, j: seen[b][i, j]})


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_ragged_prefill(layout, draw):
    both = [(draw(n, KV_HEADS, COLUMNS), draw(n, KV_HEADS, COLUMNS)) for n in (9, 20)]
    q, ends, keys = draw(10, HEADS, COLUMNS), np.array([0, 3, 10], np.int32), np.array([0, 9, 29], np.int32)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None, layout)
    wrapper.plan(ends, keys, HEADS, KV_HEADS, COLUMNS, causal=True, window_left=4)
    k, v = (np.concatenate(x) for x in zip(*both))
    inputs = (k, v) if layout == "NHD" else (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (k, v))
    agree(*wrapper.run(q, *inputs, return_lse=True), q, both, ends, causal=True, window=(4, None))


def test_plans_of_a_graph_stay_where_they_are(draw):
    """A CUDA graph has captured the arrays of the first plan, and later plans write into them."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(np.empty(64, np.uint8), use_cuda_graph=True)
    q, first = draw(2, HEADS, COLUMNS), None
    for lengths in (1, 1), (9, 60), (0, 17):
        both, cache, *where = paged(draw, lengths)
        wrapper.plan(*where, HEADS, KV_HEADS, COLUMNS, SIZE)
        agree(*wrapper.run(q, cache, return_lse=True), q, both, range(3))
        where = [wrapper.planned[name].__array_interface__["data"] for name in ("pages", "lengths")]
        assert first in (None, where)
        first = where
    *_, indptr, indices, last = paged(draw, (80, 1))
    with pytest.raises(ValueError, match="^float_workspace_buffer: has room for 8 pages of each of 2 sequences: 10"):
        wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, COLUMNS, SIZE)


def test_plans_of_a_graph_write_into_no_array_of_the_caller(draw):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(np.empty(64, np.uint8), use_cuda_graph=True)
    _, _, *where = paged(draw, (9, 5))
    first, then = (np.array(ends, np.int32) for ends in ((0, 3, 5), (0, 1, 5)))
    for ends in first, then:
        wrapper.plan(ends, *where, HEADS, KV_HEADS, COLUMNS, SIZE)
    assert wrapper.planned["cu_seqlens"].tolist() == [0, 1, 5] and first.tolist() == [0, 3, 5]


def test_what_cannot_be_served_says_so():
    with pytest.raises(ValueError, match="^kv_layout"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, "DHN")
    with pytest.raises(NotImplementedError, match="^jit_args"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, jit_args=[])
    wrapper, ends = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None), np.array([0, 1], np.int32)
    with pytest.raises(RuntimeError, match="plan must be called first"):
        wrapper.run(np.zeros((1, 1, 32), BF16), None)
    for option in {"pos_encoding_mode": "ALIBI"}, {"fixed_split_size": 4}:
        with pytest.raises(NotImplementedError, match=f"^{min(option)}: is not supported"):
            wrapper.plan(ends, ends[:1], ends[1:], 1, 1, 32, 8, **option)
    with pytest.raises(TypeError, match="^indptr: must be an array of int32: indptr=.0, 1."):
        wrapper.plan([0, 1], ends[:1], ends[1:], 1, 1, 32, 8)
    wrapper.plan(ends, ends[:1], ends[1:], 1, 1, 32, 8)
    with pytest.raises(ValueError, match="^paged_kv_cache: has pages of 4 tokens, and page_size=8 and NHD were planned"):
        wrapper.run(np.zeros((1, 1, 32), BF16), np.zeros((1, 2, 4, 1, 32), BF16))


def planned(which, **changes):
    """(a wrapper planned for (9, 5) keys and (3, 2) queries, with `changes`; the arrays of its run)"""
    both, cache, *where = paged(lambda *shape: np.ones(shape, BF16), (9, 5))
    call_options = dict(num_qo_heads=HEADS, num_kv_heads=KV_HEADS) | (dict(page_size=SIZE) if which != "Ragged" else {})
    if which == "Decode":
        names = "indptr", "indices", "last_page_len"
        wrapper, q = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None), 2
        call_options |= dict(zip(names, where)) | {"head_dim": COLUMNS}
    else:
        names = "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"
        wrapper, q = getattr(flashinfer, f"BatchPrefillWith{which}KVCacheWrapper")(None), 5
        call_options |= {"head_dim_qk": COLUMNS, "qo_indptr": np.array([0, 3, 5], np.int32)}
        call_options |= dict(zip(names, where)) if which == "Paged" else {"kv_indptr": np.array([0, 9, 14], np.int32)}
    short = {"head_dim": "head_dim_qk", "indptr": "paged_kv_indptr" if which == "Paged" else "kv_indptr"}
    wrapper.plan(**call_options | {name if name in call_options else short.get(name, name): x for name, x in changes.items()})
    kv = [cache] if which != "Ragged" else [np.concatenate(x) for x in zip(*both)]
    return wrapper, [np.ones((q, HEADS, COLUMNS), BF16), *kv]


WRAPPERS = "Decode", "Paged", "Ragged"


@pytest.mark.parametrize("which", WRAPPERS)
def test_arrays_that_are_not_as_planned(which, monkeypatch):
    """Run raises errors with names and values before any launch."""
    for name in "decode", "forward":
        monkeypatch.setattr(flashinfer.attention, name, lambda *_, **__: pytest.fail("was called"))
    heads = {"Decode": r"\(2, 4, 32\)"}.get(which, r"\(5, 4, 32\)")
    for changes, said in [
        ({"head_dim": 64}, rf"^q: must have \(num_qo_heads, head_dim\) = \(4, 64\), as in plan, .* q.shape={heads}"),
        ({"num_qo_heads": 8}, r"^q: must have .* = \(8, 32\)"),
        ({"num_kv_heads": 1}, r"^k: must have \((page_size, )?num_kv_heads, head_dim\) = \((8, )?1, 32\), .* k.shape="),
        ({"q_data_type": "float16"}, "^q: must be float16, the q_data_type of plan: q.dtype=bfloat16"),
        ({"q_data_type": BF16, "kv_data_type": np.float16}, "^k: must be float16, the kv_data_type .* k.dtype=bfloat16"),
    ]:
        wrapper, inputs = planned(which, **changes)
        with pytest.raises(ValueError, match=said):
            wrapper.run(*inputs)
    wrapper, (q, *rest) = planned(which)
    for wrong in q[1:], np.concatenate([q, q]):
        with pytest.raises(ValueError, match=rf"^q: must have the {len(q)} tokens that were planned: q.shape=\({len(wrong)}, "):
            wrapper.run(wrong, *rest)
    wrapper, inputs = planned(which, o_data_type=np.float32)
    with pytest.raises(
        NotImplementedError, match="^o_data_type: is not supported; out has q's dtype, bfloat16, and o_data_type=f"
    ):
        wrapper.run(*inputs)
    if which == "Ragged":
        wrapper, (q, k, v) = planned(which, head_dim_vo=16)
        with pytest.raises(ValueError, match=r"^v: must have \(num_kv_heads, head_dim_vo\) = \(2, 16\)"):
            wrapper.run(q, k, v)
        with pytest.raises(ValueError, match=r"^k: must have the 14 tokens that were planned: k.shape=\(13, 2, 32\)"):
            planned(which)[0].run(q, k[1:], v)


@pytest.mark.parametrize("which", WRAPPERS)
def test_plans_that_contradict_themselves(which):
    ends = lambda *numbers: np.array(numbers, np.int32)
    cases = [
        ({"num_qo_heads": 3}, "^num_qo_heads: must be a multiple of num_kv_heads: heads=3, kv_heads=2"),
        ({"indptr": ends(1, 2, 3)}, "indptr: must begin with 0 and not fall"),
        ({"indptr": ends(0, 2, 1)}, r"indptr: must begin with 0 and not fall: \w+=\[0 2 1\]"),
    ]
    if which != "Ragged":
        its = "" if which == "Decode" else "paged_kv_"
        last = f"{its}last_page_len"
        cases += [
            ({"indptr": ends(0, 2, 9)}, rf"^{its}indptr: must not end after {its}indices: {its}indptr\[-1\]=9, .*=3"),
            ({last: ends(1)}, f"^{last}: must have a number for each of {its}indptr's 2 sequences: 1"),
            ({last: ends(1, SIZE + 1)}, rf"^{last}: must be from 0 to page_size=8: {last}\[1\]=9"),
        ]
    if which != "Decode":
        bits = np.ones(3 * 9 + 2 * 5 + 1, bool)
        cases += [
            ({"qo_indptr": ends(0, 5)}, r"^qo_indptr: must have as many ends as \w+: len\(qo_indptr\)=2, 3"),
            ({"custom_mask": bits}, "^custom_mask: must have a bit for each query token .*, 37: len.bits.=38"),
        ]
    for changes, said in cases:
        with pytest.raises(ValueError, match=said):
            planned(which, **changes)


@pytest.mark.gpu
def test_on_the_card(card, draw):
    """A captured graph computes with plans that are made later."""
    torch = pytest.importorskip("torch")
    lengths = (700, 64, 3)
    both, cache, *where = paged(draw, lengths)
    q, put = draw(3, HEADS, COLUMNS), card.put
    workspace = torch.empty(1 << 16, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, use_cuda_graph=True)
    inputs, pool = put(q), put(cache)
    wrapper.plan(*map(put, paged(draw, (1, 1, 1))[2:]), HEADS, KV_HEADS, COLUMNS, SIZE)
    wrapper.run(inputs, pool)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = wrapper.run(inputs, pool, return_lse=True)
    wrapper.plan(*map(put, where), HEADS, KV_HEADS, COLUMNS, SIZE)
    graph.replay()
    agree(card.get(out), card.get(lse), q, both, range(4))
