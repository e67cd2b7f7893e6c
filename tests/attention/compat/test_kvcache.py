"""flash_attn_with_kvcache of both modules: the options that attention.decode gets, and what attention.append writes."""

import ml_dtypes
import numpy as np
import pytest
from eager import attend, window
from places import OnInterpreter

import attention
from attention import reference
from attention.compat import flash_attn, flash_attn_interface

BF16 = ml_dtypes.bfloat16
MODULES = {2: flash_attn, 3: flash_attn_interface}


@pytest.fixture
def decode(monkeypatch):
    """Replace attention.decode by eager attention in float64, for the options of these tests. Returns a list of the options."""
    call_options = []

    def decode(
        q, k, v, *, lengths, pages=None, batch_index=None, leftpad=None, causal=True, window=None, softcap=None, alibi=None,
        scale=None, splits=None, return_lse=False, k_new=None, v_new=None, rotary=None, interleaved=False, positions=None,
    ):  # fmt: skip
        call_options.append(dict(causal=causal, window=window, softcap=softcap, alibi=alibi, scale=scale, splits=splits))
        if k_new is not None:
            turn = {"rotary": rotary, "interleaved": interleaved, "positions": positions} if rotary else {}
            turn |= {"q": q, "causal": causal or window is not None} if rotary else {}
            turned = attention.append(k, v, k_new, v_new, lengths=lengths, pages=pages, batch_index=batch_index, **turn)
            q, lengths = q if turned is None else turned, lengths + k_new.shape[1]
        actual = []
        for b, length in enumerate(lengths):
            if pages is not None:
                used = pages[b, : -(-length // k.shape[1])]
                keys, values = (x[used].reshape(-1, *x.shape[2:])[:length] for x in (k, v))
            else:
                keys, values = (x[b if batch_index is None else batch_index[b], :length] for x in (k, v))
            start = 0 if leftpad is None else leftpad[b]
            actual.append(seen(q[b], keys[start:], values[start:], causal, window, softcap, scale))
        out, lse = map(np.stack, zip(*actual))
        return (out, lse) if return_lse else out

    monkeypatch.setattr(attention, "decode", decode)
    return call_options


def seen(q, k, v, causal, ends, softcap, scale):
    """(out (Sq, H, D), lse (H, Sq)) of one sequence."""
    left, right = (-1 if end is None else end for end in ends or (-1, -1))
    see = window(len(q), len(k), left, right) & (window(len(q), len(k), -1, 0) if causal else True)
    change = (lambda s: softcap * np.tanh(s / softcap)) if softcap else None
    heads_first = [x.astype(float).swapaxes(0, 1)[None] for x in (q, k, v)]
    out, lse = attend(*heads_first, see=see, change=change, scale=scale)
    return out[0].swapaxes(0, 1), lse[0]


def turned(x, cos, sin, interleaved):
    """Rows (H, D) rotated to a position."""
    pairs, y = len(cos), x.astype(np.float32)
    parts = (np.s_[0 : 2 * pairs : 2], np.s_[1 : 2 * pairs : 2]) if interleaved else (np.s_[:pairs], np.s_[pairs : 2 * pairs])
    one, other = (y[:, part].copy() for part in parts)
    y[:, parts[0]], y[:, parts[1]] = one * cos - other * sin, other * cos + one * sin
    return y.astype(x.dtype)


CASES = {  # theirs: what is asked for; pages and places by name
    "plain": {},
    "causal": dict(causal=True, softmax_scale=0.3, softcap=1.5),
    "rotary": dict(rotary=True, causal=True),
    "rotary at one position": dict(rotary=True, rotary_interleaved=False),
    "rotary and a window": dict(rotary=True, window_size=(3, 1), rotary_interleaved=False),
    "pages": dict(paged=True, rotary=True, causal=True),
    "other caches": dict(batch_index=True, leftpad=True, causal=True, rotary=True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("module", [2, 3])
def test_new_keys_are_written_and_seen(module, case, decode):
    options = dict(CASES[case])
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(BF16)
    q, k, v, lengths = draw(2, 3, 4, 16), draw(2, 3, 2, 16), draw(2, 3, 2, 16), np.array([2, 6], np.int32)
    paged, batch_index, leftpad = (options.pop(name, False) for name in ("paged", "batch_index", "leftpad"))
    k_cache, v_cache = (draw(7, 4, 2, 16) if paged else draw(3, 12, 2, 16) for _ in "kv")
    table, index = np.array([[5, 1, 99], [0, 6, 3]], np.int32), np.array([2, 0], np.int32)
    if not batch_index and not paged:
        k_cache, v_cache, index = k_cache[:2], v_cache[:2], np.arange(2)
    cos, sin = draw(12, 4), draw(12, 4)
    rotary = options.pop("rotary", False)
    interleaved, causal, ends = (options.get(n, d) for n, d in (
        ("rotary_interleaved", True), ("causal", False), ("window_size", (-1, -1))))  # fmt: skip
    keys, values, out, lse = k_cache.copy(), v_cache.copy(), [], []
    for b, length in enumerate(lengths):
        rows, mine = [], []
        for i in range(3):
            at = (table[b, (length + i) // 4], (length + i) % 4) if paged else (index[b], length + i)
            turn = lambda x, n: turned(x, cos[n].astype(np.float32), sin[n].astype(np.float32), interleaved) if rotary else x
            keys[at], values[at] = turn(k[b, i], length + i), v[b, i]
            rows.append(turn(q[b, i], length + i * (causal or ends != (-1, -1))))
        for cache in keys, values:
            whole = cache[table[b, :-1] if paged and b == 0 else table[b]].reshape(-1, 2, 16) if paged else cache[index[b]]
            mine.append(whole[b * leftpad : length + 3])
        left, right = (None if end < 0 else end for end in ends)
        both = seen(np.stack(rows), *mine, causal, (left, right), options.get("softcap"), options.get("softmax_scale"))
        out.append(both[0]), lse.append(both[1])
    name = {2: "block_table", 3: "page_table"}[module]
    options |= {name: table} if paged else {}
    options |= dict(cache_batch_idx=index) if batch_index else {}
    options |= dict(cache_leftpad=np.arange(2, dtype=np.int32)) if leftpad else {}
    options |= dict(rotary_cos=cos, rotary_sin=sin) if rotary else {}
    actual = MODULES[module].flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, return_softmax_lse=True, num_splits=3, **options
    )
    assert decode[-1]["splits"] == 3
    for x, y in zip((k_cache, v_cache), (keys, values)):
        assert (x.view(np.uint16) == y.view(np.uint16)).all()
    for x, y in zip(actual, (out, lse), strict=True):
        np.testing.assert_allclose(x, np.stack(y), rtol=1e-10)


@pytest.mark.parametrize("module", [2, 3])
@pytest.mark.parametrize("lengths", [None, 5, np.array([5, 5])])
def test_keys_that_are_there(module, lengths, decode):
    """Without new keys: an integer is the length of all sequences, None means full caches. Without lse the result is no
    tuple."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 2, 8))
    if lengths is not None:
        k, v = (np.concatenate([x, np.full_like(x, np.nan)], 1) for x in (k, v))
    actual = MODULES[module].flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=lengths)
    expected = [seen(q[b, :1], k[b, :5], v[b, :5], False, None, None, None)[0] for b in (0, 1)]
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    pages, table = (x[:, :5].reshape(5, 2, 2, 8) for x in (k, v)), np.array([[0, 1], [3, 4]])
    name = {2: "block_table", 3: "page_table"}[module]
    if lengths is None:
        assert MODULES[module].flash_attn_with_kvcache(q[:, :1], *pages, **{name: table}).shape == (2, 1, 2, 8)


def test_positions_and_biases(decode):
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 1, 1, 2, 16)).astype(BF16)
    cache, cos, sin = np.zeros((1, 4, 2, 16), BF16), *rng.standard_normal((2, 9, 8)).astype(np.float32)
    lengths, starts = np.array([2], np.int32), np.array([7], np.int32)
    flash_attn_interface.flash_attn_with_kvcache(
        q, cache, cache.copy(), k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths, rotary_seqlens=starts
    )
    assert (cache[0, 2] == turned(k[0, 0], cos[7], sin[7], True)).all()
    slopes = np.ones(2, np.float32)
    flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3, alibi_slopes=slopes)
    assert decode[-1] == dict(causal=False, window=None, softcap=None, alibi=slopes, scale=None, splits=None)


def test_what_makes_no_sense(decode):
    x = np.zeros((1, 4, 2, 16), BF16)
    call = flash_attn.flash_attn_with_kvcache
    for options, said in [
        (dict(k=x, v=x), "cache_seqlens: is required with k"),
        (dict(k=x, cache_seqlens=0), "v: must not be None"),
        (dict(rotary_cos=x, rotary_sin=x), "rotary_cos: requires k and v"),
    ]:
        with pytest.raises(ValueError, match=said):
            call(x, x.copy(), x.copy(), **options)


@pytest.mark.parametrize("name", ["qv", "cu_seqlens_k_new", "q_descale", "attention_chunk"])
def test_what_cannot_be_served_says_so(name, decode):
    x = np.ones((1, 1, 1, 8))
    with pytest.raises(NotImplementedError, match=f"^{name}: is not supported; "):
        flash_attn_interface.flash_attn_with_kvcache(x, x, x, **{name: x if name != "attention_chunk" else 5})


@pytest.mark.parametrize("module", [2, 3])
def test_kernels_serve_it(module):
    """In the interpreter, by append and decode themselves: shuffled pages, rotary, several new tokens."""
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.standard_normal(shape).astype(BF16)
    q, k, v, lengths = draw(2, 2, 4, 32), draw(2, 2, 2, 32), draw(2, 2, 2, 32), np.array([3, 6], np.int32)
    k_cache, v_cache, cos, sin = draw(6, 4, 2, 32), draw(6, 4, 2, 32), draw(9, 16), draw(9, 16)
    table = np.array([[4, 1, 77], [0, 5, 2]], np.int32)
    out, lse = MODULES[module].flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths, causal=True,
        return_softmax_lse=True, **{{2: "block_table", 3: "page_table"}[module]: table},
    )  # fmt: skip
    for b, length in enumerate(lengths + 2):
        at = [(table[b, n // 4], n % 4) for n in range(length)]
        keys, values = (np.stack([x[place] for place in at])[None] for x in (k_cache, v_cache))
        rows = [
            turned(q[b, i], cos[length - 2 + i].astype(np.float32), sin[length - 2 + i].astype(np.float32), True)
            for i in (0, 1)
        ]
        inputs = np.stack(rows)[None], keys, values
        ref, its_lse = reference.forward(*inputs, causal=True)
        reference.assert_close(out[b][None], ref, reference.forward_low(*inputs, causal=True)[0])
        np.testing.assert_allclose(lse[b], its_lse[0], atol=1e-5)


def test_caches_of_fp8_have_descales():
    """Descales for each sequence and head, as in FlashAttention-3; or for each token and head, which are then written."""
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.standard_normal(shape).astype(BF16)
    q, k, v, lengths = draw(1, 1, 2, 32), draw(1, 1, 2, 32), draw(1, 1, 2, 32), np.array([3], np.int32)
    for shape in (1, 2), (1, 5, 2):
        caches = [draw(1, 5, 2, 32).astype(ml_dtypes.float8_e4m3fn) for _ in "kv"]
        call_options = {name: np.full(shape, 0.5, np.float32) for name in ("k_descale", "v_descale")}
        mine, its = [x.copy() for x in caches], {name: x.copy() for name, x in call_options.items()}
        out = flash_attn_interface.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, **call_options)
        reference_values = attention.decode(q, *mine, lengths=lengths, k_new=k, v_new=v, causal=False, **its)
        np.testing.assert_array_equal(out.astype(float), reference_values.astype(float))
        assert (call_options["k_descale"] == its["k_descale"]).all() and ((call_options["k_descale"] != 0.5).sum() == 2) == (
            len(shape) == 3
        )


@pytest.mark.parametrize("options", [{}, dict(causal=True, window_size=(3, 0), softcap=2.0, alibi_slopes=True)])
def test_packed_sequences_in_pages(options):
    """flash_attn_varlen_func(block_table=) equals the call on gathered pages, for sequences of 3, 0 and 2 queries."""
    rng, options = np.random.default_rng(4), dict(options)
    draw = lambda *shape: rng.standard_normal(shape).astype(BF16)
    options |= {"alibi_slopes": np.array([0.5, 0.25], np.float32)} if options else {}
    q, k, v, table = draw(5, 2, 16), draw(6, 4, 1, 16), draw(6, 4, 1, 16), np.array([[4, 1], [3, 99], [0, 5]], np.int32)
    ends, ends_k = np.array([0, 3, 3, 5], np.int32), np.array([0, 7, 9, 14], np.int32)
    rest = ends, ends_k, 3, 7
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, *rest, **options, block_table=table, deterministic=True, return_attn_probs=True
    )
    gathered = [
        np.concatenate([x[page[: -(-n // 4)]].reshape(-1, 1, 16)[:n] for page, n in zip(table, np.diff(ends_k))])
        for x in (k, v)
    ]
    expected, its_lse, _ = flash_attn.flash_attn_varlen_func(q, *gathered, *rest, **options, return_attn_probs=True)
    np.testing.assert_allclose(out.astype(float), expected.astype(float), atol=0.02)
    np.testing.assert_allclose(lse, its_lse, atol=1e-3)
    with pytest.raises(ValueError, match="^q: must have the axes total, H, D of packed sequences"):
        flash_attn.flash_attn_varlen_func(q[None], k, v, *rest, block_table=table)


# Of FlashAttention's own sweep (hopper/test_flash_attn.py): (query tokens, keys in a cache, new keys, page size, what else)
SWEEP = [
    (1, 128, 0, None, {}),
    (1, 128, 1, 4, {"rotary": 1.0}),
    (1, 339, 1, 1, {"rotary": 0.5, "rotary_interleaved": False}),
    (3, 799, 3, 128, {"causal": True, "rotary": 1.0, "leftpad": True}),
    (3, 799, 3, None, {"window_size": (99, 7), "rotary": 0.5, "batch_index": True}),
    (64, 300, 64, 16, {"causal": True, "rotary": 1.0, "packed": True}),
    (3, 130, 5, 4, {"causal": True, "rotary": 0.5, "packed": True, "softcap": 15.0}),
]
LARGE = [
    (64, 2048, 64, 128, {"causal": True, "rotary": 1.0, "packed": True}),
    (16, 20000, 16, 1, {"window_size": (4000, 0), "rotary": 1.0}),
    (16, 20000, 0, 4, {"num_splits": 5}),
    (2048, 3577, 2048, 128, {"causal": True, "rotary": 0.5}),
]


def swept(place, tokens, keys, new, size, said, heads, columns):
    """Sequences of any lengths, one of them without keys, in shuffled pages that are NaN elsewhere."""
    rng, said = np.random.default_rng(tokens + keys), dict(said)
    draw = lambda *shape: rng.standard_normal(shape, np.float32).astype(BF16)
    rotary, leftpad, other, packed = (said.pop(name, 0) for name in ("rotary", "leftpad", "batch_index", "packed"))
    lengths = np.array([0, keys - new, rng.integers(1, keys - new)], np.int32)
    counts = rng.integers(0, tokens + 1, 3) if packed else np.full(3, tokens)
    news = counts if new and packed else np.full(3, new)
    q, k, v = ([draw(n, h, columns) for n in number] for number, h in ((counts, heads), (news, 2), (news, 2)))
    caches, after = [draw(3, keys, 2, columns) for _ in "kv"], lengths + news
    pairs = int(rotary * columns) // 2
    cos, sin = (f(np.arange(keys)[:, None] * 100.0 ** (-np.arange(pairs) / columns)).astype(BF16) for f in (np.cos, np.sin))
    local, interleaved = said.get("causal", False) or "window_size" in said, said.get("rotary_interleaved", True)
    expected = [x.copy() for x in caches]

    def turn(x, n):
        return turned(x, cos[n].astype(np.float32), sin[n].astype(np.float32), interleaved) if rotary else x

    mine = [np.stack([turn(row, lengths[b] + i * local) for i, row in enumerate(x)]) if len(x) else x for b, x in enumerate(q)]
    for b, length in enumerate(lengths):
        for i in range(news[b]):
            expected[0][b, length + i], expected[1][b, length + i] = turn(k[b][i], length + i), v[b][i]
        for x in (*caches, *expected):
            x[b, after[b] :] = np.nan
    call_options, cache_args = {"cache_seqlens": lengths}, caches
    if size:
        each = -(-keys // size)
        table = rng.permutation(3 * each).astype(np.int32).reshape(3, each)
        cache_args, rows = [np.full((3 * each, size, 2, columns), np.nan, BF16) for _ in "kv"], np.arange(keys)
        for pool, x in zip(cache_args, caches):
            for b in range(3):
                pool[table[b, rows // size], rows % size] = x[b]
        for b in range(3):
            table[b, -(-after[b] // size) :] = -7
        call_options["page_table"] = table
    elif other:
        cache_args = [np.concatenate([np.full((1, *x.shape[1:]), np.nan, BF16), x[::-1]]) for x in caches]
        call_options["cache_batch_idx"] = np.array([3, 2, 1], np.int32)
    starts = np.minimum(after, [0, 5, 1]) if leftpad else np.zeros(3, int)
    call_options |= {"cache_leftpad": starts.astype(np.int32)} if leftpad else {}
    call_options |= {"rotary_cos": cos, "rotary_sin": sin} if rotary else {}
    lie = np.concatenate if packed else np.stack
    inputs = [lie(q), *cache_args, *((lie(k), lie(v)) if new else ())]
    if packed:
        ends = np.cumsum([0, *counts]).astype(np.int32)
        call_options |= {"cu_seqlens_q": ends} | ({"cu_seqlens_k_new": ends} if new else {})
    call_options = {name: place.put(x) for name, x in call_options.items()}
    out, lse = flash_attn_interface.flash_attn_with_kvcache(
        *map(place.put, inputs), return_softmax_lse=True, **call_options, **said
    )
    out, lse = place.get(out), place.get(lse)
    left, right = (None if end < 0 else end for end in said.get("window_size", (-1, -1)))
    options = {"causal": said.get("causal", False), "window": (left, right), "softcap": said.get("softcap")}
    for b, end in enumerate(np.cumsum(counts)):
        rows = out[end - counts[b] : end] if packed else out[b]
        inputs = mine[b][None], *(x[b : b + 1, starts[b] : after[b]] for x in expected)
        ref, low = (formula(*inputs, **options)[0] for formula in (reference.forward, reference.forward_low))
        if counts[b]:
            reference.assert_close(rows[None], ref, low, factor=3 if said.get("softcap") else 2)
    assert lse.shape == ((heads, len(out)) if packed else (3, heads, tokens))


@pytest.mark.parametrize("nth", range(len(SWEEP)))
def test_their_own_sweep(nth):
    swept(OnInterpreter(), *SWEEP[nth], 2, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("nth", range(len(LARGE)))
def test_their_own_sweep_on_the_card(card, nth):
    swept(card, *LARGE[nth], 6, 128)
