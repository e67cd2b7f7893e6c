"""What the tests of attention.forward draw, and how they judge it."""

import itertools
from copy import copy

import numpy as np
from places import BF16
from poison import poisoned, unseen

import attention
from attention import reference
from tiles import fp16

FP16, F32 = fp16.np, np.dtype(np.float32)
ARRAYS = "alibi", "sink", "bias", "cu_seqlens", "cu_seqlens_k", "lengths_k", "seed"
SEVERAL = "aux", "q_norm", "k_norm"  # arrays, or tuples of them
ULP = 2.0**-23  # of float32
DRAWS = itertools.count(1)  # anew in every test
TANH = 2.0**-11  # what tanh.approx may be off, of what it gives (PTX ISA)


def draw(shape, dtype, seed=None):
    """Normal numbers, the same in every run of a test: where the largest of a few errors is judged, others may be bad luck."""
    return np.random.default_rng([next(DRAWS)] if seed is None else seed).standard_normal(shape, np.float32).astype(dtype)


def inputs(batch, seq_q, seq_kv, heads, heads_kv, head_dim, dtype=BF16, layout="bshd", value_dim=None):
    """The result is q, k and v, with axes in the order of `layout`."""
    keys = batch, seq_kv, heads_kv
    shapes = (batch, seq_q, heads, head_dim), (*keys, head_dim), (*keys, value_dim or head_dim)
    order = (0, 1, 2, 3) if layout == "bshd" else (0, 2, 1, 3)
    return tuple(draw([shape[axis] for axis in order], dtype) for shape in shapes)


def weights(*shape, dtype=F32):
    """Weights of a norm lie around 1."""
    return draw(shape, dtype) + dtype.type(1)


def weights_of(heads, dim):
    """Of a norm: one for all heads or one each, alone or with a bias."""
    return {
        "rms": weights(dim),
        "rms of heads": weights(heads, dim, dtype=BF16),
        "layer": (weights(dim, dtype=BF16), draw((heads, dim), F32)),
        "layer of heads": (weights(heads, dim), draw((dim,), FP16)),
    }


def there(place, options):
    """Options whose arrays lie where the test runs."""
    put = {name: place.put(options[name]) for name in ARRAYS if hasattr(options.get(name), "shape")}
    if "blocks" in options:
        put["blocks"] = copy(options["blocks"])
        vars(put["blocks"]).update({name: place.put(x) for name, x in vars(put["blocks"]).items() if isinstance(x, np.ndarray)})
    several = {name: options[name] for name in SEVERAL if name in options}
    return options | put | {n: tuple(map(place.put, x)) if isinstance(x, tuple) else place.put(x) for n, x in several.items()}


def agree(place, q, k, v, *, family=None, block=None, **options):
    """Run and judge by the rule: out and lse against float64, no NaN, every element written. What no query sees is poison;
    block: see there."""
    out = place.put(poisoned((*q.shape[:-1], v.shape[-1]), q.dtype))
    args = there(place, options) | ({} if family is None else {"family": family})
    outputs, lse = attention.forward(*map(place.put, unseen(q, k, v, block=block, **options)), out=out, return_lse=True, **args)
    assert outputs is out
    ref, ref_lse = reference.forward(q, k, v, **options)
    low, low_lse = reference.forward_low(q, k, v, **options)
    cap = options.get("softcap") or 0.0
    factor = 3 if cap else 2
    reference.assert_close(place.get(out), ref, low, factor=factor)
    with np.errstate(invalid="ignore"):
        lost = np.nanmax(np.abs(low_lse - ref_lse), initial=0)  # inf - inf is NaN
    atol = factor * lost + 8 * ULP + cap * TANH  # ex2 and lg2: 2 ulp each
    np.testing.assert_allclose(place.get(lse), ref_lse, rtol=8 * ULP, atol=atol)
    return place.get(out), place.get(lse)


def agree_among_poison(place, packing, arrays, *, family=None, **options):
    """The same of packed sequences (poison.Packing), whose q, k and v these arrays are, between neighbours of poison: each as
    if they were alone, and 0 and -inf for tokens of nobody."""
    family_option = {} if family is None else {"family": family}
    ends = place.put(packing.ends)
    put = [place.put(packing.spread(x)) for x in arrays]
    actual = attention.forward(*put, cu_seqlens=ends, return_lse=True, **there(place, options), **family_option)
    out, lse = map(place.get, actual)
    assert (out[:, packing.nobodys].astype(F32) == 0).all() and (lse[:, :, packing.nobodys] == -np.inf).all()
    ref, ref_lse = reference.forward(*arrays, cu_seqlens=packing.cu_seqlens, **options)
    low, _ = reference.forward_low(*arrays, cu_seqlens=packing.cu_seqlens, **options)
    reference.assert_close(packing.gather(out), ref, low)
    np.testing.assert_allclose(packing.gather(lse, 2), ref_lse, rtol=8 * ULP, atol=1e-4)
