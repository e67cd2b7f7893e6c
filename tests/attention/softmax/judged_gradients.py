"""The rule for gradients: attention.backward against float64, and against what the formula loses."""

import numpy as np
from judged import draw, there
from places import OnInterpreter
from poison import FAR_LSE, poisoned, spoiled, unseen

import attention
from attention import reference

F32 = np.float32
NAMES = "dq", "dk", "dv", "dsink"
NOTHING, NOISE = 1e-9, 1e-4


def agree(
    place, q, k, v, family=None, between=lambda: None, deterministic=False, by_output=False, whole=False,
    of_lse=False, **options,
):  # fmt: skip
    """Run forward and, after `between`, backward, and judge by the rule for gradients: no NaN, every element written. What no
    query sees is poison, and so are all rows of no sequence. In the interpreter the formula takes forward's place, which has
    tests of its own, unless `whole`. by_output: the formula goes by the output that backward was given. of_lse: the loss
    depends on lse, too, and where a query sees nothing its gradient is NaN. Of a row or two, what its rounding does to all of
    dq is one number, whose size in another rounding says nothing."""
    dout = draw((*q.shape[:-1], v.shape[-1]), q.dtype)
    put, given = [place.put(x) for x in unseen(q, k, v, **options)], there(place, options)
    if whole or not isinstance(place, OnInterpreter):
        out, lse = attention.forward(*put, return_lse=True, **given)
    else:
        out, lse = reference.forward_low(q, k, v, **options)
    of_results = {"dlse": gradient_of_lse(place.get(lse))} if of_lse else {}
    its_dout = dout
    if "cu_seqlens" in options:
        nobodys = np.s_[:, int(options["cu_seqlens"][-1]) :]
        its_dout, out = spoiled(dout, nobodys), place.put(spoiled(place.get(out), nobodys))
        lse = place.get(lse).copy()
        lse[:, :, nobodys[1]] = FAR_LSE
        lse = place.put(lse)
    between()
    of = [q, k, v, *[options[name] for name in ("sink",) if name in options]]
    made = {name: place.put(poisoned(x.shape, x.dtype)) for name, x in zip(NAMES, of)}
    given |= {name: place.put(x) for name, x in of_results.items()}
    got = attention.backward(place.put(its_dout), *put, out, lse, **given, **made, deterministic=deterministic, family=family)
    assert len(got) == len(of) and all(x is made[name] for name, x in zip(NAMES, got))
    by = {"by": place.get(out)} if by_output else {}
    ref, low = (f(dout, q, k, v, **by, **of_results, **options) for f in (reference.backward, reference.backward_low))
    got = [place.get(x) for x in got]
    if "sink" in options:  # by the output as it was rounded: a few sums of many errors have no error worth comparing with
        *got, dsink = got
        delta = (dout.astype(float) * place.get(out).astype(float)).sum(-1).swapaxes(1, 2) - of_results.get("dlse", 0)
        want = -(np.exp(options["sink"][:, None] - place.get(lse).astype(float)) * delta).sum((0, 2))
        np.testing.assert_allclose(dsink, want, rtol=1e-4, atol=1e-4)
    for name, *each in zip(NAMES, got, ref, low):
        judge(name, *each)
    return got


def judge(name, found, ref, low):
    """Assert the rule for gradients of one array."""
    if np.abs(ref).max(initial=0) < NOTHING:  # each row sees one key: what is left are sums in another order
        assert np.abs(found.astype(F32)).max(initial=0) < NOISE, name
    else:
        reference.assert_close(found, ref, low, factor=3, name=name)


def gradient_of_lse(lse):
    """Numbers as large as those of out, NaN where nothing is seen."""
    return np.where(np.isinf(lse), np.nan, 3 * draw(lse.shape, F32)).astype(F32)


def agree_among_poison(place, packing, arrays, family, **options):
    """The same of packed sequences (poison.Packing), whose q, k and v these arrays are, between neighbours of poison: each as
    if they were alone, and 0 for tokens of nobody."""
    alone = {"cu_seqlens": packing.alone, **options}
    dout, (out, lse) = draw(arrays[0].shape, arrays[0].dtype), reference.forward_low(*arrays, **alone)
    put = [place.put(packing.spread(x)) for x in (dout, *arrays, out)]
    told = {"cu_seqlens": place.put(packing.ends), "family": family}
    got = attention.backward(*put, place.put(packing.spread(lse, 2, FAR_LSE)), **told, **there(place, options))
    ref, low = (f(dout, *arrays, **alone) for f in (reference.backward, reference.backward_low))
    for name, found, *each in zip(NAMES, map(place.get, got), ref, low):
        assert (found[:, packing.nobodys].astype(F32) == 0).all(), name
        judge(name, packing.gather(found), *each)
