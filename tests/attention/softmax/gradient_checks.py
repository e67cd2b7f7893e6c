"""attention.backward against the reference in float64, and against what the reference loses in the inputs' dtype."""

import numpy as np
from forward_checks import draw, there
from places import OnInterpreter
from poison import FAR_LSE, poisoned, spoiled, unseen

import attention
from attention import reference

F32 = np.float32
NAMES = "dq", "dk", "dv", "dsink"
NOTHING, NOISE = 1e-9, 1e-4


def agree(
    place, q, k, v, family=None, between=lambda: None, deterministic=False, by_output=False, run_forward=False,
    with_dlse=False, **options,
):  # fmt: skip
    """Run forward and, after `between`, backward, and judge the gradients: no NaN, every element written. Keys that no query
    sees are poison, and so are all rows of no sequence. In the interpreter the reference takes the place of forward, which has
    tests of its own, unless `run_forward`. by_output: the reference computes delta from the output that backward was given;
    with a row or two the rounding of delta moves all of dq by one number, which differs from rounding to rounding. with_dlse:
    the loss depends on lse, too, and where a query sees no key its gradient is NaN."""
    dout = draw((*q.shape[:-1], v.shape[-1]), q.dtype)
    qkv, args = [place.put(x) for x in unseen(q, k, v, **options)], there(place, options)
    if run_forward or not isinstance(place, OnInterpreter):
        out, lse = attention.forward(*qkv, return_lse=True, **args)
    else:
        out, lse = reference.forward_low(q, k, v, **options)
    dlse = {"dlse": gradient_of_lse(place.get(lse))} if with_dlse else {}
    given_dout = dout
    if "cu_seqlens" in options:
        after_last = np.s_[:, int(options["cu_seqlens"][-1]) :]
        given_dout, out = spoiled(dout, after_last), place.put(spoiled(place.get(out), after_last))
        lse = place.get(lse).copy()
        lse[:, :, after_last[1]] = FAR_LSE
        lse = place.put(lse)
    between()
    inputs = [q, k, v, *[options[name] for name in ("sink",) if name in options]]
    outputs = {name: place.put(poisoned(x.shape, x.dtype)) for name, x in zip(NAMES, inputs)}
    args |= {name: place.put(x) for name, x in dlse.items()} | {"deterministic": deterministic, "family": family}
    actual = attention.backward(place.put(given_dout), *qkv, out, lse, **args, **outputs)
    assert len(actual) == len(inputs) and all(x is outputs[name] for name, x in zip(NAMES, actual))
    given_out = {"out": place.get(out)} if by_output else {}
    ref, low = (f(dout, q, k, v, **given_out, **dlse, **options) for f in (reference.backward, reference.backward_low))
    actual = [place.get(x) for x in actual]
    if "sink" in options:  # from the rounded output: a sum of many rounding errors says nothing
        *actual, dsink = actual
        delta = (dout.astype(float) * place.get(out).astype(float)).sum(-1).swapaxes(1, 2) - dlse.get("dlse", 0)
        want = -(np.exp(options["sink"][:, None] - place.get(lse).astype(float)) * delta).sum((0, 2))
        np.testing.assert_allclose(dsink, want, rtol=1e-4, atol=1e-4)
    for name, *each in zip(NAMES, actual, ref, low):
        judge(name, *each)
    return actual


def judge(name, actual, ref, low):
    """Assert that a gradient is as close to float64 as the reference in the inputs' dtype, up to a factor of 3."""
    if np.abs(ref).max(initial=0) < NOTHING:  # each row sees one key: only rounding is left
        noise = max(NOISE, 3 * np.abs(low.astype(F32)).max(initial=0))
        assert np.abs(actual.astype(F32)).max(initial=0) < noise, name
    else:
        reference.assert_close(actual, ref, low, factor=3, name=name)


def gradient_of_lse(lse):
    """A dlse as large as dout, and NaN for rows that see no key."""
    return np.where(np.isinf(lse), np.nan, 3 * draw(lse.shape, F32)).astype(F32)


def agree_among_poison(place, packing, arrays, family, **options):
    """Judge the gradients of packed sequences (poison.Packing), whose q, k and v these arrays are, between rows of poison: they
    equal those of the sequences without poison, and are 0 for tokens of no sequence."""
    packed_options = {"cu_seqlens": packing.cu_seqlens, **options}
    dout, (out, lse) = draw(arrays[0].shape, arrays[0].dtype), reference.forward_low(*arrays, **packed_options)
    put = [place.put(packing.spread(x)) for x in (dout, *arrays, out)]
    args = {"cu_seqlens": place.put(packing.ends), "family": family}
    actual = attention.backward(*put, place.put(packing.spread(lse, 2, FAR_LSE)), **args, **there(place, options))
    ref, low = (f(dout, *arrays, **packed_options) for f in (reference.backward, reference.backward_low))
    for name, dx, *each in zip(NAMES, map(place.get, actual), ref, low):
        assert (dx[:, packing.nobodys].astype(F32) == 0).all(), name
        judge(name, packing.gather(dx), *each)
