"""attention.decode that appends and rotates, with packed queries, with functions in Python, and with many query tokens: the
same bits as attention.append and decode, or the reference in float64."""

import importlib

import numpy as np
import pytest
from decode_checks import case, known
from forward_checks import TANH, ULP, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from places import BF16, OnCard, OnInterpreter, random_on_the_card
from poison import in_pages, poisoned

import attention
from attention import reference
from attention.plans.decode import decode_launches
from tiles import fp8e4m3

decoding = importlib.import_module("attention.public.decoding")
FP8, POSITIONS = fp8e4m3.np, 256
ANGLES = np.arange(POSITIONS)[:, None] * 100.0 ** (-np.arange(32) / 32)
COS, SIN = np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)


@pytest.fixture(params=["few", "many"])
def tiles(request, monkeypatch, nothing_known):
    """Of few query tokens, or of as many as there are."""
    monkeypatch.setattr(decode_launches, "MANY_TOKENS", 1 if request.param == "many" else 10**6)
    return request.param


def cases(names, interpreter_cases, on_card):
    """Parameters of a test: `interpreter_cases`, and those few on the card, where most of the time goes to compiling."""
    rows = [pytest.param("interpreter", *case) for case in interpreter_cases]
    rows += [pytest.param("gpu", *case, marks=pytest.mark.gpu) for case in on_card]
    return pytest.mark.parametrize(
        ("place", *names), rows, indirect=[name for name in ("place", "tiles") if name in ("place", *names)]
    )


def by_sequence(formula, q, k, v, lengths, ends=None, mask=None, score=None, **options):
    """[(out, lse)] of each sequence; mask and score get its number as b."""
    actual = []
    for b, n in enumerate(lengths):
        rows = (slice(b, b + 1), slice(None)) if ends is None else (slice(0, 1), slice(ends[b], ends[b + 1]))
        of_b = {} if mask is None else {"mask": lambda _, h, i, j, *aux: mask(b, h, i, j, *aux)}
        of_b |= {} if score is None else {"score": lambda s, _, h, i, j, *aux: score(s, b, h, i, j, *aux)}
        actual.append(formula(q[rows], k[b : b + 1, :n], v[b : b + 1, :n], **options, **of_b))
    return actual


def agree(place, q, k, v, lengths, *, ends=None, size=None, splits=None, aux=(), family=None, **options):
    """Call decode, and judge by the error rule, as judged_decode.agree does."""
    kwargs = {"lengths": place.put(np.array(lengths, np.int32)), "splits": splits, "family": family, **options}
    kwargs |= {} if ends is None else {"cu_seqlens": place.put(np.array(ends, np.int64))}
    kwargs |= {"aux": tuple(map(place.put, aux))} if aux else {}
    kwargs |= {name: place.put(options[name]) for name in ("alibi", "sink") if name in options}
    keys, values = k, v
    if size is not None:
        (keys, values), table = in_pages((k, v), lengths, size)
        kwargs["pages"] = place.put(table)
    out = place.put(poisoned((*q.shape[:-1], v.shape[-1]), q.dtype))
    _, lse = attention.decode(place.put(q), place.put(keys), place.put(values), out=out, return_lse=True, **kwargs)
    options = {"causal": True, **options} | ({"aux": aux} if aux else {})
    (ref, its_lse), (low, low_lse) = (
        [np.concatenate(x, axis) for x, axis in zip(zip(*by_sequence(formula, q, k, v, lengths, ends, **options)), axes)]
        for formula in (reference.forward, reference.forward_low)
        for axes in [(0, 0) if ends is None else (1, 2)]
    )
    reference.assert_close(place.get(out), ref, low, factor=3 if "softcap" in options else 2)
    with np.errstate(invalid="ignore"):
        lost = np.nanmax(np.abs(low_lse - its_lse), initial=0)
    atol = (
        3 * lost + 8 * ULP + (options.get("softcap") or 0.0) * TANH + np.abs(options.get("alibi", 0)).max() * k.shape[1] * ULP
    )
    np.testing.assert_allclose(place.get(lse), its_lse, rtol=8 * ULP, atol=atol)
    return place.get(out)


# ---- append and rotary -----------------------------------------------------------------------------------------------
WAYS = {  # how caches lie, how many query tokens there are for how many new ones, and what of a head is rotated
    "dense": dict(),
    "no rotary": dict(pairs=0),
    "half a head, interleaved": dict(pairs=16, interleaved=True, tokens=2),
    "pages": dict(size=16, tokens=3),
    "pages of one": dict(size=1),
    "other caches": dict(batch_index=True, tokens=2),
    "left padding": dict(leftpad=True),
    "one position": dict(causal=False, tokens=2),
    "positions that are no lengths": dict(positions=(9, 0, 200), tokens=2),
    "a window": dict(causal=False, window=(20, 3), tokens=2),
    "packed": dict(ends=(0, 1, 4, 4)),
    "packed, pages": dict(ends=(0, 2, 2, 7), size=16),
    "more keys than queries": dict(tokens=1, new=4),
}


HERE = [(way, "few") for way in WAYS] + [(way, "many") for way in ("dense", "pages", "packed, pages", "left padding")]
ON_CARD = ("half a head, interleaved", "few"), ("packed, pages", "few"), ("packed, pages", "many")


@pytest.mark.parametrize(("size", "dtype"), [(None, FP8), (16, FP8), (16, np.int8)], ids=str)
def test_new_keys_are_quantised_with_token_descales(place, size, dtype):
    """The same bits as attention.append, and then decode."""
    lengths = np.array((0, 14, 70), np.int32)
    q, k, v = case(lengths, 2, 2, 1, room=80)
    new = draw((3, 2, 1, 64), BF16, 5), draw((3, 2, 1, 64), BF16, 6)
    caches = [(16 * np.nan_to_num(x.astype(np.float32))).astype(dtype) for x in (k, v)]
    caches += [np.full(k.shape[:3], 0.25, np.float32), np.full(k.shape[:3], 0.5, np.float32)]
    kwargs = {"rotary": (place.put(COS), place.put(SIN))}
    if size:
        _, table = in_pages((k, v), lengths + 2, size)
        caches = [x for n in (0, 2) for x in in_pages(caches[n : n + 2], lengths + 2, size)[0]]
        kwargs["pages"] = place.put(table)
    mine, its = ([place.put(x.copy()) for x in caches] for _ in "12")
    put = {"k_new": place.put(new[0]), "v_new": place.put(new[1])}
    descales = lambda of: {"k_descale": of[2], "v_descale": of[3]}
    out = attention.decode(place.put(q), *mine[:2], lengths=place.put(lengths), splits=2, **put, **kwargs, **descales(mine))
    q_rotated = attention.append(*its[:2], **put, lengths=place.put(lengths), q=place.put(q), **kwargs, **descales(its))
    kwargs.pop("rotary")
    same = attention.decode(q_rotated, *its[:2], lengths=place.put(lengths + 2), splits=2, **kwargs, **descales(its))
    for x, y in zip((out, *mine), (same, *its)):
        np.testing.assert_array_equal(place.get(x).astype(np.float32), place.get(y).astype(np.float32))
    assert (np.nan_to_num(place.get(mine[2])) != np.nan_to_num(caches[2])).sum() == 6


@pytest.mark.smoke
@cases(("way", "tiles"), HERE, ON_CARD)
def test_new_keys_are_rotated_written_and_seen(place, way, tiles):
    """The same bits as attention.append, and then decode."""
    said = {"tokens": 1, "pairs": 32, "causal": True} | WAYS[way]
    tokens, pairs, size, ends = (said.pop(name, None) for name in ("tokens", "pairs", "size", "ends"))
    interleaved, new = said.pop("interleaved", False), said.pop("new", tokens)
    packed, lengths = ends is not None, np.array((0, 14, 70), np.int32)
    batch, tokens, new = (1, ends[-1], ends[-1]) if packed else (3, tokens, new)
    _, k, v = case(lengths, 1, 2, 1, room=80)
    q, k_new, v_new = draw((batch, tokens, 2, 64), BF16), draw((batch, new, 1, 64), BF16), draw((batch, new, 1, 64), BF16)
    counts = np.diff(ends) if packed else np.full(3, new)
    kwargs = {"cu_seqlens": np.array(ends)} if packed else {}
    if size:
        (k, v), kwargs["pages"] = in_pages((k, v), lengths + counts, size)
    if said.pop("batch_index", False):
        k, v = (np.concatenate([x[::-1], poisoned((1, *x.shape[1:]), BF16)]) for x in (k, v))
        kwargs["batch_index"] = np.array([2, 1, 0], np.int32)
    padding = {"leftpad": np.array((0, 3, 69), np.int32)} if said.pop("leftpad", False) else {}
    rotary, turn = ((COS[:, :pairs], SIN[:, :pairs]), {"interleaved": interleaved}) if pairs else ((), {})
    at, said = said.pop("positions", None), said | {"splits": 2 if tiles == "few" else None, "return_lse": True}
    after = (lengths + counts).astype(np.int32)

    def put(x):
        return place.put(x.copy())

    new, turn = (put(k_new), put(v_new)), {"rotary": tuple(map(put, rotary))} | turn if rotary else {}
    turn |= {"positions": put(np.array(at))} if at else {}
    where = {name: put(x) for name, x in kwargs.items()}
    padding = {name: put(x) for name, x in padding.items()}
    by_hand, mine, args = (put(k), put(v)), (put(k), put(v)), put(q)
    rotated = {"q": put(q), "causal": said["causal"] or "window" in said} if rotary else {}
    queries = attention.append(*by_hand, *new, lengths=put(lengths), **where, **turn, **rotated)
    said |= where | padding
    expected = attention.decode(put(q) if queries is None else queries, *by_hand, lengths=put(after), **said)
    actual = attention.decode(args, *mine, k_new=new[0], v_new=new[1], lengths=put(lengths), **turn, **said)
    for x, y in zip((*actual, *mine, args), (*expected, *by_hand, put(q)), strict=True):
        assert place.get(x).tobytes() == place.get(y).tobytes()
    assert not np.isnan(place.get(actual[0]).astype(np.float32)).any()


@pytest.mark.parametrize("options", [{}, {"window": (20, 0), "leftpad": (0, 1, 40)}], ids=["all", "window"])
def test_stream_k_counts_new_keys(place, options):
    """A new key that begins a tile adds a tile to those that stream-K shares out: the same bits as append, and then decode."""
    lengths, tokens = np.array((127, 0, 61), np.int32), 3
    _, k, v = case(lengths, 1, 2, 1, room=140)
    q, *new = (draw((3, tokens, heads, 64), BF16) for heads in (2, 1, 1))
    kwargs = {name: place.put(np.array(x)) if name == "leftpad" else x for name, x in options.items()}
    mine, by_hand = ([place.put(x.copy()) for x in (k, v)] for _ in range(2))
    new, args = [place.put(x) for x in new], place.put(q)
    actual = attention.decode(args, *mine, k_new=new[0], v_new=new[1], lengths=place.put(lengths), **kwargs)
    attention.append(*by_hand, *new, lengths=place.put(lengths))
    expected = attention.decode(args, *by_hand, lengths=place.put(lengths + tokens), **kwargs)
    assert place.get(actual).tobytes() == place.get(expected).tobytes()


def test_cu_seqlens_new(place):
    """Sequences have other numbers of new keys than of queries."""
    lengths, ends, ends_new = np.array((3, 0), np.int32), np.array((0, 1, 3)), np.array((0, 4, 5))
    _, k, v = case(lengths, room=80)
    q, k_new, v_new = draw((1, 3, 4, 64), BF16), draw((1, 5, 2, 64), BF16), draw((1, 5, 2, 64), BF16)
    caches = [place.put(k), place.put(v)]
    where = {"cu_seqlens": place.put(ends), "cu_seqlens_new": place.put(ends_new), "lengths": place.put(lengths)}
    new = {"k_new": place.put(k_new), "v_new": place.put(v_new)}
    out = attention.decode(place.put(q), *caches, **where, **new)
    k[0, 3:7], k[1, :1], v[0, 3:7], v[1, :1] = k_new[0, :4], k_new[0, 4:], v_new[0, :4], v_new[0, 4:]
    np.testing.assert_array_equal(place.get(out), agree(place, q, k, v, (7, 1), ends=ends))


TURNED = [  # in which ways queries and keys are rotated where each has ends of its own
    {},
    {"causal": False},
    {"positions": np.array((20, 5)), "interleaved": True, "q_norm": np.linspace(0.5, 2, 64, dtype=np.float32)},
]


@pytest.mark.parametrize("ways", TURNED, ids=lambda ways: ", ".join(ways) or "plain")
def test_rotary_with_cu_seqlens_new(place, ways):
    """The same bits as two calls of append, one of which rotates the queries, while the other writes the keys."""
    lengths, ends, ends_new = (place.put(np.array(x, np.int32)) for x in ((3, 0), (0, 1, 3), (0, 4, 9)))
    _, k, v = case((3, 0), room=80)
    q, *new = (place.put(draw((1, tokens, heads, 64), BF16)) for tokens, heads in ((3, 4), (9, 2), (9, 2)))
    ways = {name: place.put(x) if isinstance(x, np.ndarray) else x for name, x in ways.items()}
    kwargs, causal = {"lengths": lengths, "rotary": (place.put(COS), place.put(SIN))} | ways, ways.get("causal", True)
    caches, others = ([place.put(x.copy()) for x in (k, v)] for _ in "12")
    actual = attention.decode(q, *caches, cu_seqlens=ends, cu_seqlens_new=ends_new, k_new=new[0], v_new=new[1], **kwargs)
    room = [place.put(np.zeros_like(x)) for x in (k, v)]
    q_rotated = attention.append(*room, q[:, :, :2], q[:, :, :2], cu_seqlens=ends, q=q, **kwargs)
    kwargs.pop("q_norm", None)
    attention.append(*others, *new, cu_seqlens=ends_new, **kwargs)
    after = {"cu_seqlens": ends, "lengths": place.put(np.array((7, 5), np.int32)), "causal": causal}
    for x, y in zip((actual, *caches), (attention.decode(q_rotated, *others, **after), *others), strict=True):
        assert place.get(x).tobytes() == place.get(y).tobytes()


@pytest.mark.gpu
def test_a_graph_holds_a_step(card):
    """A CUDA graph is captured once; it writes, rotates and attends by the lengths, as they grow."""
    torch = pytest.importorskip("torch")
    _, k, v = case((70, 70), 1, 2, 1)
    q, k_new, v_new = (draw((2, 1, heads, 64), BF16) for heads in (2, 1, 1))
    lengths, caches = torch.zeros(2, dtype=torch.int32, device="cuda"), [card.put(k), card.put(v)]
    kwargs = {"lengths": lengths, "rotary": (card.put(COS), card.put(SIN)), "splits": 2}
    new = {"k_new": card.put(k_new), "v_new": card.put(v_new)}
    queries = card.put(q)
    attention.decode(queries, *caches, **kwargs, **new)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.decode(queries, *caches, **kwargs, **new)
    by_hand = [x.clone() for x in caches]
    for now in (0, 60), (1, 61), (69, 3):
        lengths.copy_(torch.tensor(now))
        graph.replay()
        q_rotated = attention.append(*by_hand, *new.values(), q=queries, lengths=lengths, rotary=kwargs["rotary"])
        expected = attention.decode(q_rotated, *by_hand, lengths=lengths + 1, splits=2)
        assert torch.equal(out, expected) and all(map(torch.equal, caches, by_hand))


def test_new_keys_are_written_without_queries():
    q, k, v = case((5,))
    new, kwargs = draw((1, 1, 2, 64), BF16), {"lengths": np.array([4]), "rotary": (COS, SIN)}
    out = attention.decode(q[:, :0], k, v, k_new=new, v_new=new, **kwargs)
    assert out.shape == (1, 0, 4, 64) and (v[:, 4:] == new).all()


# ---- queries one behind the other ------------------------------------------------------------------------------------
PACKED = ((0, 1, 2, 3), None), ((0, 0, 20, 23), 16), ((0, 9, 9, 10), None)


@pytest.mark.smoke
@cases(("tiles", "ends", "size"), [(tiles, *ends) for tiles in ("few", "many") for ends in PACKED], [("few", *PACKED[1])])
def test_packed_queries(place, tiles, ends, size):
    """Tiles never span two sequences; a sequence may have no query tokens, no keys, or fewer keys than queries."""
    lengths = (130, 12, 0)
    splits = 2 if tiles == "few" else None
    _, k, v = case(lengths, 1, 3, 1, room=140)
    agree(place, draw((1, ends[-1], 3, 64), BF16), k, v, lengths, ends=ends, size=size, splits=splits)


def test_packed_queries_have_the_bits_of_each(place):
    """The same bits as each sequence alone, with the same splits, if all have as many tokens."""
    lengths, ends = (500, 390), (0, 3, 6)
    _, k, v = case(lengths)
    q = draw((1, 6, 4, 64), BF16)
    out = agree(place, q, k, v, lengths, ends=ends, splits=3, window=(400, 0))
    for b, n in enumerate(lengths):
        mine = q[:, ends[b] : ends[b + 1]]
        single_sequence = agree(place, mine, k[b : b + 1], v[b : b + 1], (n,), splits=3, window=(400, 0))
        np.testing.assert_array_equal(out[:, ends[b] : ends[b + 1]], single_sequence)


# ---- functions in Python ---------------------------------------------------------------------------------------------
def third(b, h, i, j, numbers):
    return (j + h - numbers[b, i]) % 3 != 0


def lifted(s, b, h, i, j, numbers):
    return s * 0.5 + h * 0.25 - numbers[b, i] * 0.125 + j * 0.01


FUNCTIONS = {
    "mask": {"mask": third},
    "score": {"score": lifted},
    "both": {"mask": third, "score": lifted, "softcap": 4.0, "alibi": np.array([0.1, 0.0, 0.2, 0.05], np.float32),
             "sink": np.array([0.5, -1.0, 2.0, 0.0], np.float32)},
}  # fmt: skip


@cases(("functions", "tiles"), [*((name, "few") for name in FUNCTIONS), ("both", "many")], [("both", "few"), ("both", "many")])
def test_masks_and_scores_in_python(place, tiles, functions):
    """b is the sequence, h the query head, i counts its query tokens, j its keys."""
    numbers = np.random.default_rng(5).integers(0, 9, (2, 4)).astype(np.int32)
    agree(place, *case((70, 30), 4), (70, 30), aux=(numbers,), **FUNCTIONS[functions], splits=2 if tiles == "few" else None)


def test_functions_count_padded_keys_as_the_cache_does(tiles):
    """j is a key's index in the cache, also with leftpad."""
    q, k, v = case((70,), 4, first=(9,))
    kwargs = {"lengths": np.array([70]), "leftpad": np.array([9])}
    actual = attention.decode(q, k, v, mask=lambda b, h, i, j: j % 2 == 0, **kwargs)
    (ref, _), (low, _) = (
        formula(q, k[:, 9:], v[:, 9:], causal=True, mask=lambda b, h, i, j: j % 2 == 1)
        for formula in (reference.forward, reference.forward_low)
    )
    reference.assert_close(actual, ref, low)


# ---- many query tokens -----------------------------------------------------------------------------------------------
PROMPTS = [
    (70, (70, 200), 16, None, {}),
    (66, (0, 3), None, None, {}),
    (64, (65, 64), None, "sm_80", {"causal": False, "softcap": 3.0}),
    (130, (131, 90), 8, "sm_80", {"window": (40, 5), "causal": False}),
]


@cases(("tokens", "lengths", "size", "family", "options"), PROMPTS, PROMPTS[::3])
def test_chunked_prefill(place, tokens, lengths, size, family, options):
    """After a prefix of any length, also with fewer keys than tokens; the page table may be longer than the sequence."""
    agree(place, *case(lengths, tokens, 2, 1), lengths, size=size, family=family, **options)


@cases(("size",), [(1,), (24,), (64,), (256,)], [(24,), (64,)])
def test_prompts_over_pages(place, size, monkeypatch, nothing_known):
    """Pages of any size, loaded by TMA in boxes, or row by row: the same bits within a family."""
    monkeypatch.setattr(decode_launches, "MANY_TOKENS", 1)
    lengths = (130, 0, 65)
    q, k, v = case(lengths, 3, 1, 1)
    family = "sm_80" if size % 8 else None
    paged, dense = (agree(place, q, k, v, lengths, size=s, family=family) for s in (size, None))
    np.testing.assert_array_equal(paged, dense)


@pytest.mark.parametrize("where", ["batch_index", "leftpad", "leftpad, pages"])
def test_prompts_in_other_caches_and_padded(where, monkeypatch, nothing_known):
    monkeypatch.setattr(decode_launches, "MANY_TOKENS", 1)
    lengths, leftpad = (100, 70), (37, 70) if "leftpad" in where else (0, 0)
    q, k, v = case(lengths, 3, first=leftpad)
    keys, values, kwargs = k, v, {}
    if where == "batch_index":
        keys, values = (np.concatenate([poisoned((1, *x.shape[1:]), BF16), x[::-1]]) for x in (k, v))
        kwargs["batch_index"] = np.array([2, 1])
    else:
        kwargs["leftpad"] = np.array(leftpad)
    if "pages" in where:
        (keys, values), table = in_pages((k, v), lengths, 16)
        kwargs["pages"] = table
    actual = attention.decode(q, keys, values, lengths=np.array(lengths), **kwargs)
    (ref, _), (low, _) = known(q, k, v, lengths, leftpad, causal=True)
    reference.assert_close(actual, ref, low)


def test_sequences_that_differ_a_thousandfold(place):
    """Lengths in one call, with few tokens and with many."""
    lengths = (3, 3000)
    _, k, v = case(lengths, 1, 1, 1, head_dim=16)
    agree(place, draw((2, 1, 1, 16), BF16), k, v, lengths, size=64)
    agree(place, draw((1, 66, 1, 16), BF16), k, v, lengths, ends=(0, 1, 66), size=64, splits=4)


@settings(max_examples=3, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 40)), min_size=1, max_size=3), st.integers(1, 2), st.integers(1, 4),
    st.sampled_from([None, 8, 16, 24, 5]), st.booleans(), st.integers(1, 3), st.sampled_from([1, 10**6]),
)  # fmt: skip
def test_random_packed_problems(sequences, kv_heads, group, size, causal, splits, many):
    run_random(OnInterpreter(), sequences, kv_heads, group, size, causal, splits, many, 64)


@random_on_the_card
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 300)), min_size=1, max_size=5), st.integers(1, 3),
    st.integers(1, 8), st.sampled_from([None, 1, 8, 16, 24, 64, 256]), st.booleans(), st.integers(1, 9),
    st.sampled_from([1, 64, 10**6]), st.sampled_from([64, 128]),
)  # fmt: skip
def test_random_packed_problems_on_the_card(sequences, kv_heads, group, size, causal, splits, many, head_dim):
    run_random(OnCard(), sequences, kv_heads, group, size, causal, splits, many, head_dim)


def run_random(place, sequences, kv_heads, group, size, causal, splits, many, head_dim):
    lengths, counts = zip(*sequences)
    ends = np.cumsum([0, *counts])
    _, k, v = case(lengths, 1, group * kv_heads, kv_heads, head_dim, room=max(*lengths, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_launches, "MANY_TOKENS", many)
        q = draw((1, int(ends[-1]), group * kv_heads, head_dim), BF16)
        agree(place, q, k, v, lengths, ends=ends, size=size, causal=causal, splits=None if many == 1 else splits)


def test_as_compiled(as_compiled, monkeypatch, nothing_known):
    """The compiled PTX for Hopper, run by the emulator: packed queries over pages, which TMA loads in boxes."""
    as_compiled("sm_90a")
    monkeypatch.setattr(decode_launches, "MANY_TOKENS", 1)
    _, k, v = case((20, 3), 1, 1, 1)
    agree(OnInterpreter(), draw((1, 3, 1, 64), BF16), k, v, (20, 3), ends=(0, 2, 3), size=16)


# ---- refused ---------------------------------------------------------------------------------------------------------
def test_mistakes_name_the_argument():
    q, k, v = case((5,))
    new, ends = draw((1, 1, 2, 64), BF16), np.array([0, 1])

    def refused(error, words, **more):
        with pytest.raises(error, match=words):
            attention.decode(q, k.copy(), v.copy(), **{"lengths": np.array([4])} | more)

    refused(ValueError, "^v_new: must be passed together with k_new", k_new=new)
    refused(ValueError, "^k_new: must be passed together with rotary", rotary=(COS, SIN))
    refused(TypeError, "^rotary: must be a pair", k_new=new, v_new=new, rotary=COS)
    refused(ValueError, "^positions: must be None unless k_new", positions=np.array([0]))
    refused(ValueError, "^cu_seqlens_new: must be None unless k_new", cu_seqlens_new=ends)
    refused(ValueError, "^cu_seqlens_new: needs cu_seqlens", k_new=new, v_new=new, cu_seqlens_new=ends)
    refused(ValueError, "^lengths: sequence 0 has room for 5 keys", k_new=new, v_new=new, lengths=np.array([5]))
    refused(ValueError, "^rotary: has 4 positions", k_new=new, v_new=new, rotary=(COS[:4], SIN[:4]))
    refused(ValueError, "^cu_seqlens: must end at 1", cu_seqlens=np.array([0, 2]))
    refused(
        ValueError, "^k: batch must equal the number of sequences, 2", cu_seqlens=np.array([0, 1, 1]), lengths=np.array([4, 4])
    )
    refused(TypeError, "^mask: must be a Python function", mask=3)
    refused(TypeError, "^aux: must be a tuple", aux=3)


def test_arguments_are_documented():
    for name in decoding.APPENDING.names:
        assert name.removesuffix("_bias") in attention.decode.__doc__ or name.startswith("aux") or name in ("cos", "sin")
