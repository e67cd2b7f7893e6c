"""PagedCache: two thousand random steps against a model of lists of tokens; and append with each framework's arrays."""

import random

import ml_dtypes
import numpy as np
import pytest

import attention
from attention.cache import Full, PagedCache

BF16, F8 = ml_dtypes.bfloat16, np.dtype(ml_dtypes.float8_e4m3fn)


def pools(pages, size, heads=1, head=1, dtype=np.float32, layers=1):
    """Their pages are poisoned with NaN, or with -128 in int8."""
    poison = -128 if dtype == np.int8 else np.nan
    return [tuple(np.full((pages, size, heads, head), poison, dtype) for _ in "kv") for _ in range(layers)]


def write(cache, sequence, tokens):
    """Write the newest tokens to all layers, at the places that the tables name."""
    assert cache.lengths[sequence] - cache.starts[sequence] == len(tokens)
    for n, token in enumerate(tokens, cache.starts[sequence]):
        page, slot = cache.pages[sequence, n // cache.page_size], n % cache.page_size
        for layer, (k, v) in enumerate(cache.layers):
            k[page, slot], v[page, slot] = token + 1000 * layer, -token


def tokens_of(cache, sequence):
    """A sequence's tokens, read by its row of the page table; all layers agree."""
    length, size = cache.lengths[sequence], cache.page_size
    at = np.arange(length)
    actual = []
    for layer, (k, v) in enumerate(cache.layers):
        keys, values = (x[cache.pages[sequence, at // size], at % size].ravel() for x in (k, v))
        assert (keys - 1000 * layer == -values).all()
        actual.append((-values).tolist())
    assert all(one == actual[0] for one in actual)
    return actual[0]


class CacheModel:
    """A model of the cache: {sequence: its tokens}, and how many tokens each has reserved."""

    def __init__(self, cache, pages, size, sequences, tokens):
        self.cache, self.all, self.size, self.sequences, self.tokens = cache, pages, size, sequences, tokens
        self.lists: dict[int, list[int]] = {}

    def check(self):
        """Tables and model agree; each page is free, or its reference count is the number of sequences that have it."""
        cache = self.cache
        assert cache.sequences == sorted(self.lists)
        for sequence, tokens in self.lists.items():
            assert tokens_of(cache, sequence) == tokens and cache.length(sequence) == len(tokens)
        rows = cache.pages[cache.pages >= 0]
        used, counts = np.unique(rows, return_counts=True)
        assert len(used) + cache.free_pages == self.all
        assert [cache._ref_counts[page] for page in used] == counts.tolist() and sum(cache._ref_counts) == counts.sum()
        unused = [n for n in range(self.sequences) if n not in self.lists]
        assert (cache.pages[unused] == -1).all() and (cache.lengths[unused] == 0).all()

    def snapshot(self):
        cache = self.cache
        return (
            cache.pages.tobytes(),
            cache.lengths.tobytes(),
            cache.starts.tobytes(),
            list(cache._ref_counts),
            sorted(cache._free_pages),
            sorted(cache._free_numbers),
        )

    def refused(self, call, *args):
        """Call; True if it raised Full, which must change nothing."""
        before = self.snapshot()
        try:
            return call(*args), False
        except Full:
            assert self.snapshot() == before
            return None, True

    def needed(self, chosen, counts):
        """How many pages a reservation needs, computed from the tables."""
        cache, size, leaving, pages = self.cache, self.size, [], 0
        for s, n in zip(chosen, counts):
            length = len(self.lists[s])
            pages += max(0, -(-(length + n) // size) - int((cache.pages[s] >= 0).sum()))
            if n and length % size:
                page = cache.pages[s, length // size]
                if (cache.pages == page).sum() - leaving.count(page) > 1:
                    leaving.append(page)
        return pages + len(leaving)


@pytest.mark.parametrize("size, pages, steps", [(4, 40, 2000), (1, 60, 500), (16, 12, 500)])
def test_two_thousand_steps(size, pages, steps):
    """Sequences are added, forked, extended together, rewound and freed, in a pool that is full most of the time."""
    rng, sequences, most = random.Random(size), 9, 50
    cache = PagedCache(pools(pages, size, layers=2), sequences=sequences, tokens=most)
    model, number, full = CacheModel(cache, pages, size, sequences, most), 0, 0
    for step in range(steps):
        lists = model.lists
        deed = rng.choice(["add", "fork", "free", "rewind", *["extend"] * 5]) if lists else "add"
        if deed == "add" or deed == "fork":
            parent = rng.choice(list(lists)) if deed == "fork" else None
            new, was_full = model.refused(*((cache.add,) if parent is None else (cache.fork, parent)))
            assert was_full == (len(lists) == sequences) and (was_full or new not in lists)
            if not was_full:
                lists[new] = [] if parent is None else [*lists[parent]]
        elif deed == "free":
            gone = rng.choice(list(lists))
            cache.free(gone)
            del lists[gone]
        elif deed == "rewind":
            some = rng.choice(list(lists))
            keep = rng.randint(max(0, len(lists[some]) - 6), len(lists[some]))
            cache.rewind(some, keep)
            del lists[some][keep:]
        else:
            chosen = rng.sample(list(lists), rng.randint(1, min(4, len(lists))))
            counts = [rng.choice([0, 1, 1, 2, 3, size, 9]) for _ in chosen]
            too_long = any(len(lists[s]) + n > most for s, n in zip(chosen, counts))
            needed, free = model.needed(chosen, counts), cache.free_pages
            ahead = rng.random() < 0.3  # some stay reserved
            _, was_full = model.refused(cache.reserve if ahead else cache.extend, chosen, counts)
            assert was_full == (too_long or needed > free)
            full += was_full
            if not was_full:
                done = [rng.randint(0, n) for n in counts] if ahead else counts
                if ahead:
                    cache.extend(chosen, done)
                assert free - cache.free_pages == needed
                assert {n for n in range(sequences) if cache.starts[n] >= 0} == {*chosen}
                for s, n in zip(chosen, done):
                    fresh = list(range(number, number + n))
                    number += n
                    write(cache, s, fresh)
                    lists[s] += fresh
        if step % 5 == 0 or deed != "extend":
            model.check()
    assert full > steps // 100
    for s in list(model.lists):
        cache.free(s)
    assert cache.free_pages == pages and (cache.pages == -1).all()


def test_copy_on_write():
    """Of three sequences that share a page, two get copies, and the last keeps it; all at once, or one after the other."""
    for together in (True, False):
        cache = PagedCache(pools(6, 4), sequences=3, tokens=16)
        a = cache.add()
        cache.extend([a], 6)
        write(cache, a, range(6))
        b, c = cache.fork(a), cache.fork(a)
        assert cache.free_pages == 4
        for some in [[a, b, c]] if together else [[b], [a], [c]]:
            cache.reserve(some, 1)
        assert cache.free_pages == 2 and len(set(cache.pages[:, 0])) == 1 and len(set(cache.pages[:, 1])) == 3
        assert all(tokens_of(cache, s) == [*range(6)] for s in (a, b, c))


def test_a_fork_does_not_share_reserved_pages():
    cache = PagedCache(pools(6, 4), sequences=2, tokens=16)
    a = cache.add()
    cache.reserve([a], 12)
    cache.extend([a], 4)
    write(cache, a, range(4))
    b = cache.fork(a)
    assert cache.pages[b, 1:].tolist() == [-1] * 3 and cache.free_pages == 3
    cache.reserve([b], 4)
    cache.extend([b, a], [2, 1])
    write(cache, b, [7, 8])
    write(cache, a, [5])
    assert (tokens_of(cache, a), tokens_of(cache, b)) == ([0, 1, 2, 3, 5], [0, 1, 2, 3, 7, 8])


def test_mistakes_name_the_argument():
    cache, two = PagedCache(pools(4, 4), sequences=2, tokens=16), PagedCache(pools(4, 4, layers=2), sequences=1, tokens=16)
    a = cache.add()
    two.add()
    for call, message in [
        (lambda: cache.free(1), "sequence 1 is not in use; those in use: [0]"),
        (lambda: cache.fork(7), "sequence 7 is not in use"),
        (lambda: cache.reserve([a, a], 1), "sequences: must not repeat a number"),
        (lambda: cache.reserve([a], [1, 2]), "tokens: must be an integer >= 0 for each sequence"),
        (lambda: cache.reserve([a], -1), "tokens: must be an integer >= 0"),
        (lambda: cache.append([a], *np.zeros((2, 1, 1, 1, 1)), layer=1), "layer: must be from 0 to 0: layer=1"),
        (
            lambda: two.append([0], *np.zeros((2, 1, 1, 1, 1)), layer=1),
            "layer: append to layer 0 first, with the same sequences",
        ),
        (lambda: cache.rewind(a, 1), "length: must be from 0 to the 0 tokens of sequence 0"),
        (lambda: cache.append([a], np.zeros((2, 1, 1, 1)), None), "k_new: must have 1 batches and 1 tokens"),
        (lambda: cache.append([a, a], np.zeros((1, 3, 1, 1)), None), "; of packed sequences pass tokens="),
        (lambda: cache.append([a], np.zeros((1, 3, 1, 1)), None, tokens=[2]), "k_new: must have 1 batches and 2 tokens"),
        (lambda: PagedCache([], sequences=1, tokens=1), "layers: must be pairs of pools"),
        (lambda: PagedCache(pools(4, 4) + pools(5, 4), sequences=1, tokens=1), "layers: must be pairs of pools"),
        (lambda: PagedCache(pools(4, 4), sequences=0, tokens=1), "layers, sequences, tokens: must not be empty"),
        (lambda: cache.append([a], np.zeros((1, 1, 1)), None), "k_new: must have the axes B, S, Hk, D: k_new.shape=(1, 1, 1)"),
        (
            lambda: PagedCache([(pools(4, 4)[0][0], np.zeros((4, 4, 1, 1), np.int8))], sequences=1, tokens=1),
            "layers[0]: k and v must have one dtype, and as many heads: k.dtype=",
        ),
    ]:
        with pytest.raises(ValueError) as caught:
            call()
        assert message in str(caught.value)
    for wrong, message in (
        (pools(4, 4)[0], "a pair for each layer, got .'ndarray"),
        (pools(4, 4)[0][0], "a pair for each layer, got"),
    ):
        with pytest.raises(TypeError, match=f"layers: must be a list of pairs .k, v. of pools, {message}"):
            PagedCache(wrong, sequences=1, tokens=1)
    with pytest.raises(TypeError, match="tokens: must be an integer: tokens='64'"):
        PagedCache(pools(4, 4), sequences=1, tokens="64")
    with pytest.raises(TypeError, match="sequences: must be a list of sequence numbers: sequences=0"):
        cache.append(a, *np.zeros((2, 1, 1, 1, 1)))
    other = type("Other", (), {"shape": (1, 1, 1, 1), "__dlpack__": None, "__dlpack_device__": None})()
    with pytest.raises(TypeError, match="k: must be an array of NumPy, torch, CuPy or JAX"):
        PagedCache([(other, other)], sequences=1, tokens=1)
    with pytest.raises(TypeError, match="missing 1 .*'tokens'; tokens: the largest number of tokens of each$"):
        PagedCache(pools(4, 4), sequences=1)
    with pytest.raises(TypeError, match="'page_size'; here that is layers=, the pools"):
        PagedCache(pools(4, 4), sequences=1, tokens=1, page_size=4)
    with pytest.raises(Full, match="sequence 0 has room for 16 tokens: 0 are there, 17 to come; make a cache with more"):
        cache.reserve([a], 17)
    cache.add()
    with pytest.raises(Full, match="all 2 sequence numbers are in use"):
        cache.add()
    with pytest.raises(Full, match="all 2 sequence numbers are in use"):
        cache.fork(a)


# ---- with arrays that kernels write ------------------------------------------------------------------------------------
def as_numpy(x):
    return x


def as_torch(x):
    torch = pytest.importorskip("torch")
    if x.dtype == F8:
        return torch.from_numpy(x.view(np.int8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BF16 else torch.from_numpy(x)


def as_jax(x):
    return pytest.importorskip("jax").numpy.asarray(x)


def on_card(x):
    return as_torch(x).cuda()


def back(x):
    if type(x).__module__ == "torch":
        return x.cpu().float().numpy()
    return np.asarray(x).astype(np.float32)


FRAMEWORKS = [as_numpy, as_torch, as_jax, pytest.param(on_card, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("put", FRAMEWORKS)
def test_append_writes_by_the_page_table(put):
    """Two layers; a prompt, a fork, a token for each, and packed tokens of both."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal((*shape, 2, 16)).astype(BF16)
    cos, sin = rng.standard_normal((2, 32, 4)).astype(np.float32)
    cache = PagedCache([tuple(map(put, pair)) for pair in pools(8, 4, 2, 16, BF16, layers=2)], sequences=3, tokens=20)
    used = cache.pages, cache.lengths, cache.starts
    rotary, lists = (put(cos), put(sin)), {}

    def rotated(x, start):
        x = x.astype(np.float32)
        c, s = (table[start : start + len(x), None] for table in (cos, sin))
        first, second, rest = x[..., :4], x[..., 4:8], x[..., 8:]
        return np.concatenate([first * c - second * s, second * c + first * s, rest], -1).astype(BF16)

    def append(sequences, *shape, tokens=None):
        """Append to both layers; the second one's K is -K of the first."""
        k_new, v_new, q = draw(*shape), draw(*shape), draw(*shape)
        starts = [len(lists.setdefault(s, ([], []))[0]) for s in sequences]
        for layer, sign in (0, 1), (1, -1):
            actual = cache.append(sequences, put(sign * k_new), put(v_new), layer=layer, tokens=tokens, rotary=rotary, q=put(q))
        ends = np.cumsum([0, *tokens]) if tokens else None
        for n, (s, start) in enumerate(zip(sequences, starts)):
            mine = np.s_[0, ends[n] : ends[n + 1]] if tokens else np.s_[n]
            keys, values = lists[s]
            keys += list(rotated(k_new[mine], start))
            values += list(v_new[mine])
            np.testing.assert_allclose(back(actual)[mine], rotated(q[mine], start).astype(np.float32), rtol=2**-7, atol=1e-6)

    def check():
        for s, expected in lists.items():
            at = np.arange(cache.length(s))
            pages = back(cache.pages).astype(int)[s, at // 4]
            assert back(cache.lengths)[s] == len(at) == len(expected[0])
            for layer, sign in (0, 1), (1, -1):
                for pool, rows, its in zip(cache.layers[layer], expected, (sign, 1)):
                    rows = its * np.array(rows, np.float32).reshape(-1, 2, 16)
                    exact = dict(rtol=2**-7, atol=1e-6) if put is as_jax else dict(rtol=0)  # XLA makes an fma
                    np.testing.assert_allclose(back(pool)[pages, at % 4], rows, **exact)

    a = cache.add()
    append([a], 1, 6)
    b = cache.fork(a)
    lists[b] = tuple(map(list, lists[a]))
    append([b, a], 2, 1)
    check()
    c = cache.add()
    append([c, a, b], 1, 5, tokens=[3, 0, 2])
    check()
    cache.free(a)
    del lists[a]
    check()
    if put is not as_jax:
        assert cache.pages is used[0] and cache.lengths is used[1] and cache.starts is used[2]  # as CUDA graphs want it
    poisoned = np.isnan(back(cache.layers[0][0])).all((2, 3)).sum()
    assert poisoned == 32 - (4 + 3 + 5 + 3)  # the shared page, a's other, those of b, and c's
    if put is not as_jax:
        with pytest.raises(TypeError, match="dtype must be"):  # and nothing has changed
            cache.append([b], *[put(np.zeros((1, 2, 2, 16), np.float32))] * 2)
    check()
    with pytest.raises(Full):
        cache.append([b], put(draw(1, 17)), put(draw(1, 17)), rotary=rotary)
    check()


@pytest.mark.parametrize("dtype", [F8, np.dtype(np.int8)], ids=str)
@pytest.mark.parametrize("put", FRAMEWORKS)
def test_a_cache_keeps_descales(put, dtype):
    """One for each token and head, in both layers; a fork shares them, until its page is copied."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: (rng.standard_normal((*shape, 2, 16)) * 10 ** rng.uniform(-3, 3, (*shape, 2, 1))).astype(BF16)
    cache = PagedCache(
        [tuple(map(put, pair)) for pair in pools(8, 4, 2, 16, dtype, layers=2)], sequences=2, tokens=12, scaled=True
    )
    lists, end = {}, 448 if dtype == F8 else 127

    def append(sequences, tokens):
        new = draw(len(sequences), tokens), draw(len(sequences), tokens)
        for layer, sign in (0, 1), (1, -2):
            cache.append(sequences, *(put((sign * x.astype(np.float32)).astype(BF16)) for x in new), layer=layer)
        for n, s in enumerate(sequences):
            lists[s] = tuple(np.concatenate([old, x[n]]) for old, x in zip(lists.get(s, np.zeros((2, 0, 2, 16), BF16)), new))

    append([a := cache.add()], 6)
    lists[b := cache.fork(a)] = lists[a]
    append([b, a], 1)
    for s, expected in lists.items():
        at = np.arange(7)
        places = back(cache.pages).astype(int)[s, at // 4], at % 4
        for layer, sign in (0, 1), (1, -2):
            assert [*cache.descales[layer]] == ["k_descale", "v_descale"]
            for pool, descale, rows in zip(cache.layers[layer], cache.descales[layer].values(), expected):
                rows, actual = sign * rows.astype(np.float32), back(descale)[places]
                np.testing.assert_allclose(actual, np.abs(rows).max(-1) / end, rtol=2**-22)
                error = np.abs(back(pool)[places] * actual[..., None] - rows)
                limit = 2**-4 * np.abs(rows) + 2**-9 * actual.max() if dtype == F8 else 0.501 * actual[..., None]
                assert (error <= limit).all()
    if put is not as_jax:
        q, turned = put(draw(2, 1)), cache.tables([b, a])
        out = attention.decode(q, *cache.layers[1], **cache.descales[1], lengths=turned[1], pages=turned[0])
        assert np.isfinite(back(out)).all()
    with pytest.raises(ValueError, match="k_descale: must not be passed to a cache that keeps its own"):
        cache.append([a], put(draw(1, 1)), put(draw(1, 1)), k_descale=None)


def test_a_cache_with_descales_is_of_fp8():
    with pytest.raises(TypeError, match="scaled: must be False unless all pools are float8_e4m3fn or int8"):
        PagedCache(pools(4, 4), sequences=1, tokens=1, scaled=True)


def test_unsupported_options_of_jax():
    k = as_jax(np.zeros((2, 4, 1, 8), BF16))
    cache = PagedCache([(k, k)], sequences=1, tokens=8)
    with pytest.raises(NotImplementedError, match="positions: is not supported for JAX arrays"):
        cache.append([cache.add()], k[:1, :1], k[:1, :1], positions=None)


def test_append_refuses_wrong_arguments():
    """Each error names the argument, and nothing has changed."""
    pool, new = (np.zeros((6, 16, 2, 64), BF16) for _ in range(2)), np.ones((1, 2, 2, 64), BF16)
    cache = PagedCache([tuple(pool)], sequences=3, tokens=64)
    a = cache.add()
    for error, words, sequences, options in (
        (ValueError, "lengths: must not be passed: the cache sets it", [a], dict(lengths=np.zeros(1, np.int32))),
        (ValueError, "cu_seqlens: must not be passed: .*; pass tokens=", [a], dict(cu_seqlens=np.zeros(2, np.int32))),
        (ValueError, "layout: must not be passed: the cache sets it, and its pools are", [a], dict(layout="bhsd")),
        (TypeError, "tokens: must be a list, one for each sequence: tokens=5", [a], dict(tokens=5)),
        (TypeError, "sequences: must be integers that `add` or `fork` returned: 0.0", [0.0], {}),
        (
            TypeError,
            r"append\(\) got an unexpected keyword argument 'is_causal'; here that is causal",
            [a],
            dict(is_causal=True),
        ),
    ):
        with pytest.raises(error, match=words):
            cache.append(sequences, new, new, **options)
    with pytest.raises(TypeError, match="tokens: must be an integer, or one for each sequence: tokens=1.5"):
        cache.extend([a], 1.5)
    assert cache.length(a) == 0 and cache.free_pages == 6
