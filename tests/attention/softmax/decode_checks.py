"""What the tests of attention.decode share: problems, their pages, the reference a sequence at a time, and the judgement."""

import numpy as np
from forward_checks import TANH, ULP, draw
from places import BF16
from poison import in_pages, poisoned, spoiled, unseen

import attention
from attention import reference
from tiles import fp8e4m3

FP8 = fp8e4m3.np
ARRAYS = "lengths", "pages", "batch_index", "leftpad", "alibi", "bias", "sink", "q_norm", "k_norm"


def case(lengths, tokens=1, heads=4, kv_heads=2, head_dim=64, room=None, dtype=BF16, value_dim=None, first=None):
    """(q, k, v) of sequences of these lengths; NaN after each length, and before the first[b] of sequence b."""
    batch, room = len(lengths), room or max(*lengths, 1)
    q = draw((batch, tokens, heads, head_dim), dtype)
    k, v = (draw((batch, room, kv_heads, dim), dtype) for dim in (head_dim, value_dim or head_dim))
    place = np.arange(room)
    used = place < np.array(lengths)[:, None]
    if first:
        used &= place >= np.array(first)[:, None]
    return q, spoiled(k, ~used), spoiled(v, ~used)


def ahead_of_windows(q, k, v, lengths, leftpad=None, causal=True, window=None, **options):
    """(k, v, the first key of each sequence that any of its tokens sees), with NaN before those keys."""
    actual, firsts = (k.copy(), v.copy()), []
    for b, n in enumerate(lengths):
        first = 0 if leftpad is None else leftpad[b]
        one = [x[b : b + 1] for x in (q, k, v)]
        _, *its = unseen(one[0], *(x[:, first:n] for x in one[1:]), causal=causal, window=window)
        for x, y in zip(actual, its):
            x[b, first:n] = y[0]
        left = window and window[0]
        firsts.append(first if left is None else max(first, n - q.shape[1] - left))
    return *actual, firsts


def known(q, k, v, lengths, leftpad=None, **options):
    """[(out, lse)] of the reference in float64, and of the one that rounds as q's dtype does, a sequence at a time."""
    actual = []
    for formula in (reference.forward, reference.forward_low):
        outs = []
        for b, n in enumerate(lengths):
            keys = slice(0 if leftpad is None else leftpad[b], n)
            one = options | ({"alibi": options["alibi"][b]} if np.ndim(options.get("alibi")) == 2 else {})
            if (bias := options.get("bias")) is not None:
                one["bias"] = np.broadcast_to(bias, (len(q), *bias.shape[1:]))[b : b + 1, ..., keys]
            outs.append(formula(q[b : b + 1], k[b : b + 1, keys], v[b : b + 1, keys], **one))
        actual.append([np.concatenate(x) for x in zip(*outs)])
    return actual


def put(place, x):
    """An array, or a layer norm's pair of arrays, on the test's device."""
    return tuple(map(place.put, x)) if isinstance(x, tuple) else place.put(x)


def agree(place, q, k, v, lengths, *, leftpad=None, size=None, splits=None, causal=True, family=None, **options):
    """Call decode, and judge by the error rule: out and lse against float64, no NaN, every element written. Keys that no token
    sees are NaN, and with pages (`size` keys each) no table names their pages."""
    kwargs = {"lengths": np.array(lengths, np.int32)} | options
    kwargs |= {} if leftpad is None else {"leftpad": np.array(leftpad, np.int64)}
    keys, values, firsts = ahead_of_windows(q, k, v, lengths, leftpad, causal, **options)
    if size is not None:
        (keys, values), kwargs["pages"] = in_pages((keys, values), lengths, size, firsts)
    kwargs = {name: put(place, x) if name in ARRAYS else x for name, x in kwargs.items()}
    out = place.put(poisoned((*q.shape[:-1], v.shape[-1]), q.dtype))
    inputs = place.put(q), place.put(keys), place.put(values)
    outputs, lse = attention.decode(*inputs, out=out, return_lse=True, splits=splits, causal=causal, family=family, **kwargs)
    assert outputs is out
    (ref, ref_lse), (low, low_lse) = known(q, k, v, lengths, leftpad, causal=causal, **options)
    cap = options.get("softcap") or 0.0
    reference.assert_close(place.get(out), ref, low, factor=3 if cap else 2)
    with np.errstate(invalid="ignore"):
        lost = np.nanmax(np.abs(low_lse - ref_lse), initial=0)
    atol = 3 * lost + 8 * ULP + cap * TANH
    np.testing.assert_allclose(place.get(lse), ref_lse, rtol=8 * ULP, atol=atol)
    return place.get(out), place.get(lse)
