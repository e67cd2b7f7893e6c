"""attention.decode with a bias, against float64; NaN stands in what no token sees."""

import numpy as np
import pytest
from decode_checks import FP8, agree, case, known
from forward_checks import F32, FP16, draw
from places import BF16, OnInterpreter
from poison import edges, in_pages, poisoned

import attention
from attention import reference
from attention.kernels.decode import decode_hopper
from attention.plans.decode import decode_launches

FORMS = [("batch heads tokens", F32), ("heads", BF16), ("batch tokens", FP16), ("batch", BF16), ("", F32)]


def bias_of(form, dtype, lengths, tokens, room, heads=4, leftpad=None, more=0):
    """A bias with these axes, for `more` keys than a cache has room for. Poison stands at keys that are not in use and, where
    it has rows of its own, at those that a token of a causal call does not see."""
    shape = [n if axis in form else 1 for axis, n in (("batch", len(lengths)), ("heads", heads), ("tokens", tokens))]
    bias, firsts = draw((*shape, room + more), dtype), leftpad or [0] * len(lengths)
    if "batch" not in form:
        lengths, firsts = [max(lengths)], [min(firsts)]
    for b, (first, n) in enumerate(zip(firsts, lengths)):
        bias[b, ..., :first] = bias[b, ..., n:] = poisoned((), dtype)
        if "batch" in form and "tokens" in form:
            for token in range(tokens):
                bias[b, :, token, max(0, n - tokens + token + 1) :] = poisoned((), dtype)
    return bias


def judged(place, form, lengths, tokens=3, heads=4, kv_heads=2, head_dim=64, leftpad=None, more=0, size=None, **options):
    """agree(...) for a bias of this form, which covers whole pages of `size` keys, and `more`."""
    q, k, v = case(lengths, tokens, heads, kv_heads, head_dim, first=leftpad)
    more += -k.shape[1] % (size or 1)
    bias = bias_of(*form, lengths, tokens, k.shape[1], heads, leftpad, more)
    return agree(place, q, k, v, lengths, bias=bias, leftpad=leftpad, size=size, **options)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("form", "tokens", "options"),
    [
        (FORMS[0], 3, {}),
        (FORMS[1], 1, {"splits": 2}),
        (FORMS[2], 3, {"splits": 1}),
        (FORMS[3], 1, {}),
        (FORMS[4], 9, {"size": 16}),
    ],
)
def test_bias_around_every_edge(place, form, tokens, options):
    """Of tiles of keys, of splits and of pages; rows of a tile are tokens and heads."""
    for lengths in (0, 1, 63, 64), (65, 127, 128, 129):
        judged(place, form, lengths, tokens, **options)


FORM_IN_PAGES = pytest.param(FORMS[1], 64, None, marks=pytest.mark.release)


@pytest.mark.parametrize(("form", "size", "window"), [(FORMS[0], None, None), (FORMS[2], 24, (70, 0)), FORM_IN_PAGES])
def test_bias_in_tiles_of_64(place, form, size, window):
    lengths = edges(decode_hopper.KV, 2 * decode_hopper.KV)
    judged(place, form, lengths, size=size, window=window, splits=2 - (size is None), family="sm_90")


OPTIONS = {
    "all": {"softcap": 5.0, "alibi": np.array([0.5, 0.1, 0.02, 0.3], F32), "sink": np.array([0.5, -3.0, 20.0, 1.0], F32),
            "score": lambda s, b, h, i, j: s * 0.5 + h * 0.25 - j * 0.01},
    "padding, pages": {"leftpad": (37, 0, 5), "size": 16},
    "padding, window": {"leftpad": (37, 0, 5), "window": (20, 0), "splits": 2},
    "mask": {"mask": lambda b, h, i, j: (j + h) % 3 != 0},
    "longer": {"more": 9, "causal": False},
    "whole heads": {"head_dim": 256, "heads": 2, "kv_heads": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "family"),
    [*((name, None) for name in OPTIONS), ("all", "sm_90"), ("padding, window", "sm_90"), ("mask", "sm_90")],
)
def test_bias_beside_other_options(place, options, family):
    """It comes after softcap and ALiBi, and before the score in Python; j counts the rows of the cache, also with leftpad."""
    form = ("batch heads", F32) if options == "longer" else FORMS[0]
    judged(place, form, (100, 70, 5), **OPTIONS[options], family=family)


LOWEST_BF16, LOWEST_FP16 = (-3.3895e38, BF16), (-65504.0, FP16)


@pytest.mark.parametrize(
    ("low", "options"),
    [
        (LOWEST_BF16, {}),
        ((-1e30, F32), {"splits": 2}),
        (LOWEST_BF16, {"splits": 2, "family": "sm_90"}),
        (LOWEST_FP16, {"splits": 1}),
    ],
)
def test_a_bias_is_a_number_however_low(place, low, options):
    """If it is the same for all keys, the output is the mean of values, however many keys a split has. Keys with more get all,
    and -inf alone hides."""
    lengths, (number, dtype) = (200, 70), low
    q, k, v = case(lengths, 2, 3, 1)
    bias = np.full((1, 3, 1, 200), number, dtype)
    bias[:, 1, :, 40:], bias[:, 2] = 0, -np.inf
    out, _ = agree(place, q, k, v, lengths, bias=bias, **options)
    assert (out[:, :, 2] == 0).all()


@pytest.mark.parametrize("options", [{"splits": 3}, {"splits": 2, "family": "sm_90"}, {"splits": 1}])
def test_a_score_is_a_number_however_low(place, options):
    """A score in Python, like a bias."""
    lengths = 200, 70
    q, k, v = case(lengths, 2, 2, 1)
    agree(place, q, k, v, lengths, score=lambda s, b, h, i, j: s * 0 - 1e30, **options)


def test_bias_of_packed_tokens(place, monkeypatch, nothing_known):
    """Its batch is the sequence's number, and its rows count from the sequence's first token."""
    lengths, ends = (130, 70, 9), (0, 3, 3, 8)
    _, k, v = case(lengths, 1)
    q, bias = draw((1, 8, 4, 64), BF16), draw((3, 4, 8, 136), BF16)
    for many, splits in (10**6, 2), (1, None):
        monkeypatch.setattr(decode_launches, "MANY_TOKENS", many)
        kwargs = {"cu_seqlens": np.array(ends, np.int32), "lengths": np.array(lengths, np.int32), "bias": bias}
        kwargs = {name: place.put(x) for name, x in kwargs.items()}
        out = place.get(attention.decode(*map(place.put, (q, k, v)), splits=splits, **kwargs))
        for b, n in enumerate(lengths):
            rows = slice(ends[b], ends[b + 1])
            one = q[:, rows], k[b : b + 1, :n], v[b : b + 1, :n]
            its = {"bias": bias[b : b + 1, :, : ends[b + 1] - ends[b], :n], "causal": True}
            (ref, _), (low, _) = (formula(*one, **its) for formula in (reference.forward, reference.forward_low))
            reference.assert_close(out[:, rows], ref, low)


PROMPTS = [  # form, size, more: pages that TMA loads in boxes, or row by row; tiles of the bias by TMA, or elements
    (FORMS[0], None, {}),
    (("batch heads tokens", BF16), None, {"more": 6, "window": (40, 0)}),
    (("heads tokens", FP16), 16, {"more": 3, "softcap": 3.0}),
    (FORMS[1], 24, {}),
    (FORMS[2], 5, {"leftpad": (37, 1)}),
]


@pytest.mark.parametrize(
    ("form", "size", "more", "family"),
    [*((*prompt, None) for prompt in PROMPTS), *((*prompt, "sm_80") for prompt in PROMPTS[1:4])],
)
def test_prompts_with_a_bias(place, form, size, more, family, monkeypatch, nothing_known):
    """Many query tokens, by forward's kernels."""
    monkeypatch.setattr(decode_launches, "MANY_TOKENS", 1)
    judged(place, form, (130, 66), 5, 2, 1, size=size, family=family, **more)


def test_a_bias_covers_new_keys(place):
    """The same bits as attention.append, and then decode; with packed tokens, too."""
    for ends in None, (0, 1, 4):
        lengths, counts = np.array((61, 0), np.int32), np.full(2, 3) if ends is None else np.diff(ends)
        _, k, v = case(lengths, 1, 2, 1, room=70)
        q, *new = (draw((2, 3, h, 64) if ends is None else (1, 4, h, 64), BF16) for h in (2, 1, 1))
        where = {} if ends is None else {"cu_seqlens": place.put(np.array(ends, np.int32))}
        bias = bias_of("batch heads", F32, lengths + counts, 3, 70, 2)
        said = {"bias": place.put(bias), "splits": 2, **where}
        mine, by_hand = ([place.put(x.copy()) for x in (k, v)] for _ in "12")
        new, args, before = [place.put(x) for x in new], place.put(q), place.put(lengths)
        actual = attention.decode(args, *mine, k_new=new[0], v_new=new[1], lengths=before, **said)
        attention.append(*by_hand, *new, lengths=before, **where)
        expected = attention.decode(args, *by_hand, lengths=place.put((lengths + counts).astype(np.int32)), **said)
        assert place.get(actual).tobytes() == place.get(expected).tobytes()
        assert not np.isnan(place.get(actual).astype(F32)).any()


@pytest.mark.parametrize("per_token", [False, True])
def test_a_bias_over_caches_of_fp8(place, per_token):
    lengths, rng = (150, 0, 70), np.random.default_rng(5)
    q, k, v = case(lengths, 2)
    eight = [np.clip(x.astype(F32) * 8, -448, 448).astype(FP8) for x in (k, v)]
    descales = [rng.uniform(0.05, 0.3, k.shape[:3] if per_token else (2,)).astype(F32) for _ in "kv"]
    caches = [x.astype(F32) * (d[..., None] if per_token else d[:, None]) for x, d in zip(eight, descales)]
    bias = bias_of(*FORMS[0], lengths, 2, k.shape[1])
    kwargs = dict(zip(("k_descale", "v_descale"), descales)) | {"bias": bias, "lengths": np.array(lengths, np.int32)}
    kwargs = {name: place.put(x) for name, x in kwargs.items()}
    out = place.get(attention.decode(*[place.put(x) for x in (q, *eight)], **kwargs))
    (ref, _), (low, _) = known(q, *caches, lengths, causal=True, bias=bias)
    reference.assert_close(out, ref, low, factor=4)


def test_a_bias_with_other_layouts_and_batches(place):
    """layout="bhsd" and batch_index: the same bits. A bias has heads before tokens in both layouts."""
    lengths = (70, 20)
    q, k, v = case(lengths, 2)
    bias = bias_of(*FORMS[0], lengths, 2, 70)
    expected, _ = agree(place, q, k, v, lengths, bias=bias, splits=2)
    kwargs = {"bias": place.put(bias), "lengths": place.put(np.array(lengths, np.int32)), "splits": 2}
    swapped = [place.put(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in (q, k, v)]
    np.testing.assert_array_equal(place.get(attention.decode(*swapped, layout="bhsd", **kwargs)).swapaxes(1, 2), expected)
    caches = [place.put(np.concatenate([x[::-1], poisoned((1, *x.shape[1:]), x.dtype)])) for x in (k, v)]
    kwargs["batch_index"] = place.put(np.array([1, 0], np.int32))
    np.testing.assert_array_equal(place.get(attention.decode(place.put(q), *caches, **kwargs)), expected)


@pytest.mark.release
@pytest.mark.parametrize(("arch", "family"), [("sm_80", None), ("sm_90a", "sm_90")])
def test_as_compiled(as_compiled, arch, family):
    """The compiled PTX, run by the emulator."""
    as_compiled(arch)
    judged(OnInterpreter(), FORMS[0], (70, 3), 2, 3, 1, splits=2, family=family)


def test_mistakes_name_the_bias():
    q, k, v = case((5, 3), 2)
    (pool_k, pool_v), table = in_pages((k, v), (5, 3), 4)

    def refused(error, words, bias, keys=(k, v), **more):
        with pytest.raises(error, match=words):
            attention.decode(q, *keys, lengths=np.array([5, 3]), bias=bias, **more)

    all_keys = r"^bias: must have a column for each key that a sequence may have, "
    refused(ValueError, rf"{all_keys}5; .*: bias.shape=\(1, 4, 1, 4\), k.shape=\(2, 5, 2, 64\)", np.zeros((1, 4, 1, 4), F32))
    pages = {"keys": (pool_k, pool_v), "pages": table}
    refused(ValueError, rf"{all_keys}8; .*, pages.shape=\(2, 2\)", np.zeros((1, 1, 1, 7), F32), **pages)
    refused(ValueError, r"^bias: must have the shape \(2 or 1, 4 or 1, 2 or 1, 5\)", np.zeros((2, 3, 2, 5), F32))
    refused(ValueError, "^bias: must have the axes B or 1, H or 1, S or 1, keys", np.zeros((4, 5), F32))
    refused(TypeError, "^bias: dtype must be one of", np.zeros((1, 4, 1, 5)))
    refused(ValueError, "^bias: strides must not be negative", np.zeros((1, 4, 1, 5), F32)[..., ::-1])
