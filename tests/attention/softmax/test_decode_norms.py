"""Norms of attention.decode and attention.append: of queries, of the cache's keys, and of new keys."""

import numpy as np
import pytest
from decode_checks import FP8, case, known, put
from decode_checks import agree as decoded
from forward_checks import draw
from places import BF16, OnInterpreter
from poison import in_pages, poisoned
from test_decode_appends import COS, SIN
from test_decode_appends import agree as appended

import attention
from attention import reference
from attention.plans.decode import decode_launches
from attention.reference.softmax import normalize_rows

F32, F64, EPS = np.dtype(np.float32), np.float64, 1e-2


def weights(*shape, dtype=F32):
    return draw(shape, dtype) * dtype.type(0.25) + dtype.type(1)


def norms_of(heads, dim):
    """Weights of all heads, or of each head, alone or with a bias."""
    return {
        "rms": weights(dim),
        "rms of heads": weights(heads, dim, dtype=BF16),
        "layer": (weights(dim, dtype=BF16), draw((dim,), F32)),
        "layer of heads": (weights(heads, dim), draw((dim,), F32)),
    }


def norms(ours, theirs, heads=4, kv_heads=2, dim=64):
    """q_norm and k_norm for a call, without those that are None."""
    actual = {"q_norm": norms_of(heads, dim).get(ours), "k_norm": norms_of(kv_heads, dim).get(theirs), "norm_eps": EPS}
    return {name: x for name, x in actual.items() if x is not None}


def shifted(q, k, v):
    """Rows whose mean is not 0."""
    return q + q.dtype.type(2), k - k.dtype.type(1), v


PAIRS = [("rms", "rms of heads"), ("rms of heads", "rms"), ("layer", "layer of heads"), ("layer of heads", "layer"),
         (None, "rms"), ("rms", None)]  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_norms(place, ours, theirs):
    """Rows of a tile belong to several heads, each with its own weights; a block works on several sequences, or one."""
    lengths = (70, 0, 9)
    decoded(place, *shifted(*case(lengths, 3)), lengths, **norms(ours, theirs), splits=2 if theirs == "rms" else None)


@pytest.mark.parametrize(("dim", "value_dim", "theirs"), [(8, 8, "rms"), (72, 136, "layer"), (256, 256, "rms of heads")])
def test_columns_that_are_padding_do_not_count(dim, value_dim, theirs):
    lengths, kwargs = (20,), norms("layer" if dim == 72 else "rms", theirs, dim=dim)
    inputs = shifted(*case(lengths, 2, head_dim=dim, value_dim=value_dim))
    decoded(OnInterpreter(), *inputs, lengths, **kwargs, splits=1)


def test_keys_far_from_0():
    """A layer norm's variance is the difference of two means, for which float32 is precise enough."""
    q, k, v = case((40,))
    decoded(OnInterpreter(), q, k + BF16.type(30), v, (40,), **norms(None, "layer"), splits=1)


def test_with_other_options(place):
    """With pages, padding, a window, and options of scores."""
    lengths, leftpad, sink = (70, 33), (20, 33), np.array([0.5, -3.0, 2.0, 1.0], F32)
    q, k, v = shifted(*case(lengths, 2, first=leftpad))
    kwargs = norms("rms of heads", "rms") | {"leftpad": leftpad, "window": (30, 0), "softcap": 5.0, "sink": sink}
    decoded(place, q, k, v, lengths, size=16, splits=2, **kwargs)


@pytest.mark.parametrize(("many", "theirs"), [(1, None), (1, "rms"), (10**6, "layer")])
def test_packed_queries(many, theirs, monkeypatch, nothing_known):
    """With few and with many tokens; k_norm is served by split-KV in both cases."""
    monkeypatch.setattr(decode_launches, "MANY_TOKENS", many)
    lengths, ends = (30, 12), (0, 1, 6)
    _, k, v = case(lengths, 1, 3, 1)
    kwargs = norms("rms of heads", theirs, 3, 1)
    appended(OnInterpreter(), draw((1, ends[-1], 3, 64), BF16), k, v, lengths, ends=ends, **kwargs)


@pytest.mark.parametrize(("theirs", "per"), [("rms", ""), ("rms of heads", "BG"), ("layer", "G")])
def test_caches_of_fp8(theirs, per):
    """Keys are multiplied by their descales before the norm: norm_eps is in units of the product."""
    lengths, rng = (40, 7), np.random.default_rng(5)
    q, k, v = shifted(*case(lengths, 2))
    eight = [np.clip(x.astype(F32) * 8, -448, 448).astype(FP8) for x in (k, v)]
    shape = [{"B": 2, "G": 2}[axis] for axis in per]
    descales = [rng.uniform(0.01, 0.03, shape).astype(F32) for _ in "kv"]
    caches = [x.astype(F32) * (d[..., None, :, None] if per else 1) for x, d in zip(eight, descales)]
    kwargs, of_norms = dict(zip(("k_descale", "v_descale"), descales)) if per else {}, norms("rms", theirs)
    actual = attention.decode(q, *eight, lengths=np.array(lengths), splits=1, **kwargs, **of_norms)
    (ref, _), (low, _) = known(q, *caches, lengths, causal=True, **of_norms)
    reference.assert_close(actual, ref, low, factor=4)


# ---- appended --------------------------------------------------------------------------------------------------------
def rotated(x, positions, interleaved):
    """The rows of x, normalised in float64."""
    x, pairs = x.copy(), COS.shape[1]
    one, other = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    cos, sin = (table[positions][:, None].astype(F64) for table in (COS, SIN))
    x[..., one], x[..., other] = x[..., one] * cos - x[..., other] * sin, x[..., other] * cos + x[..., one] * sin
    return x


APPENDS = [
    (64, "rms", "rms of heads", False, None),
    (96, "layer of heads", "layer", True, 16),
    (72, "rms", "layer", False, None),
]


@pytest.mark.parametrize(("dim", "ours", "theirs", "interleaved", "size"), APPENDS)
def test_new_rows_are_normalised_then_rotated(place, dim, ours, theirs, interleaved, size):
    """The result is rounded once. decode gives the same bits; the cache's other keys, normalised before, do not change."""
    lengths, kwargs = (3, 20), norms(ours, theirs, dim=dim)
    kwargs["k_new_norm"] = kwargs.pop("k_norm")
    q, k, v = case(lengths, 2, head_dim=dim, room=24)
    k_new, v_new = draw((2, 2, 2, dim), BF16) + BF16.type(1), draw((2, 2, 2, dim), BF16)
    where = {}
    if size:
        for x in (k, v):
            x[0, 3:5] = x[1, 20:22] = 0
        (k, v), where["pages"] = in_pages((k, v), [n + 2 for n in lengths], size)
    inputs = {name: put(place, x) for name, x in kwargs.items() if name != "norm_eps"}
    inputs |= {"norm_eps": EPS, "lengths": place.put(np.array(lengths)), "interleaved": interleaved}
    inputs |= {"rotary": put(place, (COS, SIN))} | {name: place.put(x) for name, x in where.items()}
    hand, new, out = put(place, (k.copy(), v.copy())), put(place, (k_new, v_new)), place.put(poisoned(q.shape, BF16))
    attention.append(*hand, *new, q=place.put(q), out=out, **inputs)
    for b, n in enumerate(lengths):
        at = np.arange(n, n + 2)
        page, row = (where["pages"][b, at // size], at % size) if size else (b, at)
        for actual, x, name in ((place.get(hand[0])[page, row], k_new, "k_new_norm"), (place.get(out)[b], q, "q_norm")):
            expected = rotated(normalize_rows(x[b : b + 1].astype(F64), kwargs[name], EPS, F64, F64)[0], at, interleaved)
            np.testing.assert_allclose(actual.astype(F64), expected, rtol=2**-8, atol=1e-5)
        np.testing.assert_array_equal(place.get(hand[1])[page, row], v_new[b])
    after = {"lengths": place.put(np.array(lengths) + 2), "splits": 2} | {name: place.put(x) for name, x in where.items()}
    expected = attention.decode(out, *hand, **after)
    mine = put(place, (k.copy(), v.copy()))
    actual = attention.decode(place.put(q), *mine, k_new=new[0], v_new=new[1], splits=2, **inputs)
    for x, y in zip((actual, *mine), (expected, *hand), strict=True):
        assert place.get(x).tobytes() == place.get(y).tobytes()


def test_norms_without_rotary():
    """The attention kernel normalises queries then. New keys may have cu_seqlens_new, and an fp8 cache quantises normalised
    keys."""
    lengths, kwargs, norm = np.array([3, 9]), norms("rms", None), weights(2, 64)
    q, k, v = case(lengths, room=16)
    k_new, v_new = draw((2, 1, 2, 64), BF16), draw((2, 1, 2, 64), BF16)
    eight = [np.zeros(k.shape, FP8) for _ in "kv"]
    attention.append(*eight, k_new, v_new, lengths=lengths, k_new_norm=norm, norm_eps=EPS)
    expected = normalize_rows(k_new.astype(F64), norm, EPS, F64, F64)[:, 0]
    np.testing.assert_allclose(eight[0][[0, 1], lengths].astype(F64), expected, rtol=2**-4, atol=2**-9)
    actual = attention.decode(q, k, v, k_new=k_new, v_new=v_new, lengths=lengths, k_new_norm=norm, splits=1, **kwargs)
    expected = attention.decode(q, k, v, lengths=lengths + 1, splits=1, **kwargs)
    assert actual.tobytes() == expected.tobytes()


def test_norms_with_cu_seqlens_new():
    lengths, ends, kwargs = np.array([3, 0]), {"cu_seqlens": np.array([0, 1, 3])}, {"rotary": (COS, SIN), "norm_eps": EPS}
    _, k, v = case(lengths, room=8)
    q, new, norm = draw((1, 3, 4, 64), BF16), [draw((1, 4, 2, 64), BF16) for _ in "kv"], weights(4, 64)
    caches, copies = [k, v], [k.copy(), v.copy()]
    of_new = {"k_new": new[0], "v_new": new[1], "cu_seqlens_new": np.array([0, 3, 4])}
    actual = attention.decode(q, *caches, lengths=lengths, splits=1, q_norm=norm, **ends, **of_new, **kwargs)
    q_rotated = attention.append(*copies, q[:, :, :2], q[:, :, :2], lengths=lengths, q=q, q_norm=norm, **ends, **kwargs)
    attention.append(*copies, *new, lengths=lengths, cu_seqlens=of_new["cu_seqlens_new"], **kwargs)
    assert actual.tobytes() == attention.decode(q_rotated, *copies, lengths=lengths + [3, 1], splits=1, **ends).tobytes()


# ---- compiled --------------------------------------------------------------------------------------------------------
@pytest.mark.release
def test_as_compiled(as_compiled):
    """The compiled PTX, run by the emulator."""
    as_compiled("sm_90a")
    decoded(OnInterpreter(), *shifted(*case((20,), 1, 2, 1)), (20,), **norms("layer of heads", "layer", 2, 1), splits=1)


# ---- refused ---------------------------------------------------------------------------------------------------------
NEW = draw((1, 1, 2, 64), BF16)


@pytest.mark.parametrize(("options", "what"), [
    (dict(q_norm=weights(3, 64)), r"q_norm: heads must equal q's: q_norm.shape=\(3, 64\)"),
    (dict(k_norm=weights(32)), "k_norm: head_dim must equal q's"),
    (dict(k_norm=(weights(64),)), r"k_norm: must be weights, or a pair \(weights, bias\)"),
    (dict(q_norm=np.ones(128, F32)[::2]), "q_norm: last axis must be contiguous"),
    (dict(q_norm=weights(64), norm_eps=0.0), "norm_eps: must be positive"),
    (dict(k_new_norm=weights(64)), "k_new_norm: must be None unless k_new"),
    (dict(k_norm=weights(64), k_new=NEW, v_new=NEW, rotary=(COS, SIN)), "k_norm: must be None with rotary.* k_new_norm"),
    (dict(k_new_norm=weights(3, 64), k_new=NEW, v_new=NEW), "k_new_norm: heads must equal k's"),
])  # fmt: skip
def test_wrong_norms_are_refused(options, what):
    q, k, v = case((4,))
    out = poisoned(q.shape, q.dtype)
    with pytest.raises((TypeError, ValueError), match=what):
        attention.decode(q, k, v, lengths=np.array([3]), out=out, **options)
    assert np.isnan(out.astype(F32)).all()


def test_append_refuses_q_norm_without_q():
    with pytest.raises(ValueError, match="q_norm: normalises q, and needs it"):
        attention.append(NEW.copy(), NEW.copy(), NEW, NEW, lengths=np.array([0]), q_norm=weights(64))
