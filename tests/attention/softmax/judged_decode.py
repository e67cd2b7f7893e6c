"""What the tests of attention.decode share: sequences, their pages, the formula a sequence at a time, what judges."""

import numpy as np
from judged import TANH, ULP, draw, poisoned
from places import BF16

import attention
from attention import reference
from tiles import fp8e4m3

FP8 = fp8e4m3.np
HELD = "lengths", "pages", "batch_index", "leftpad", "alibi", "sink", "q_norm", "k_norm"


def case(lengths, tokens=1, heads=4, kv_heads=2, head_dim=64, room=None, dtype=BF16, value_dim=None, first=None):
    """(q, k, v) of sequences of these lengths; NaN behind a length, and before `first` of each."""
    batch, room = len(lengths), room or max(*lengths, 1)
    q = draw((batch, tokens, heads, head_dim), dtype)
    k, v = (draw((batch, room, kv_heads, dim), dtype) for dim in (head_dim, value_dim or head_dim))
    for b, length in enumerate(lengths):
        for x in (k, v):
            x[b, length:] = np.nan
            x[b, : first[b] if first else 0] = np.nan
    return q, k, v


def in_pages(k, v, lengths, size):
    """(the pools, the table): pages in any order, NaN where nobody's keys lie, and no numbers behind a sequence's last page."""
    rng = np.random.default_rng(3)
    most = -(-k.shape[1] // size) + 1
    used = [-(-n // size) for n in lengths]
    numbers = iter(rng.permutation(sum(used) + 2))
    table = np.full((len(lengths), most), -7, np.int32)
    pools = [poisoned((sum(used) + 2, size, *x.shape[2:]), x.dtype) for x in (k, v)]
    for b, n in enumerate(lengths):
        for page in range(used[b]):
            table[b, page] = number = next(numbers)
            for pool, x in zip(pools, (k, v)):
                rows = x[b, size * page : min(size * (page + 1), n)]
                pool[number, : len(rows)] = rows
    return *pools, table


def known(q, k, v, lengths, leftpad=None, **options):
    """The formula in float64, and as q's dtype allows: [(out, lse)] of each, a sequence at a time."""
    found = []
    for formula in (reference.forward, reference.forward_low):
        outs = []
        for b, n in enumerate(lengths):
            keys = slice(0 if leftpad is None else leftpad[b], n)
            one = options | ({"alibi": options["alibi"][b]} if np.ndim(options.get("alibi")) == 2 else {})
            outs.append(formula(q[b : b + 1], k[b : b + 1, keys], v[b : b + 1, keys], **one))
        found.append([np.concatenate(x) for x in zip(*outs)])
    return found


def put(place, x):
    """An array, or those of a layer norm."""
    return tuple(map(place.put, x)) if isinstance(x, tuple) else place.put(x)


def agree(place, q, k, v, lengths, *, leftpad=None, size=None, splits=None, causal=True, family=None, **options):
    """Run and judge by the rule: out and lse against float64, no NaN, every element written."""
    told = {"lengths": np.array(lengths, np.int32)} | options
    told |= {} if leftpad is None else {"leftpad": np.array(leftpad, np.int64)}
    keys, values = k, v
    if size is not None:
        keys, values, told["pages"] = in_pages(k, v, lengths, size)
    told = {name: put(place, x) if name in HELD else x for name, x in told.items()}
    out = place.put(poisoned((*q.shape[:-1], v.shape[-1]), q.dtype))
    given = place.put(q), place.put(keys), place.put(values)
    got, lse = attention.decode(*given, out=out, return_lse=True, splits=splits, causal=causal, family=family, **told)
    assert got is out
    (ref, ref_lse), (low, low_lse) = known(q, k, v, lengths, leftpad, causal=causal, **options)
    cap = options.get("softcap") or 0.0
    reference.assert_close(place.get(out), ref, low, factor=3 if cap else 2)
    with np.errstate(invalid="ignore"):
        lost = np.nanmax(np.abs(low_lse - ref_lse), initial=0)
    atol = 3 * lost + 8 * ULP + cap * TANH
    np.testing.assert_allclose(place.get(lse), ref_lse, rtol=8 * ULP, atol=atol)
    return place.get(out), place.get(lse)
