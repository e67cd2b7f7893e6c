"""Problems of gradients of linear attention and of the delta rule, and their comparison with the reference."""

import ml_dtypes
import numpy as np
from places import OnInterpreter
from poison import Packing, as_on_a_device
from test_linear import inputs

import attention
from attention import reference

bf16, f32 = ml_dtypes.bfloat16, np.float32
NAMES = "dq", "dk", "dv", "dbeta", "ddecay", "dinitial_state"
# Of float32 results: relative errors of operands that are rounded to 8 bits (bf16) or 11 are 2^-9 or 2^-12, of which a gate's
# gradient gathers those of all tokens of its chunk.
LIMITS = {"ddecay": 0.005, "dbeta": 0.005, "dinitial_state": 0.005}
DELTA_LIMIT = 0.004  # of the delta rule, beside three times the error that operands of the input dtype have in the reference
OF_HEADS = 0.01  # more for ddecay of heads, whose terms of all tokens cancel


def case(length, decay="token", batch=1, key_dim=16, value_dim=16, **more):
    """The arguments of linear_backward, with an initial state and the gradient of the last one."""
    args = inputs(batch, length, key_dim, value_dim, decay, **more)
    rng = np.random.default_rng(length)
    args["dout"] = rng.standard_normal(args["v"].shape).astype(args["v"].dtype)
    args["dstate"] = rng.standard_normal(args["initial_state"].shape).astype(f32)
    return args


def delta_case(length, decay="token", batch=1, key_dim=16, value_dim=16, **more):
    """The arguments of delta_rule_backward: those of `case`, keys of length 1, and a beta between 0 and 1."""
    args = case(length, decay, batch, key_dim, value_dim, **more)
    keys = args["k"].astype(f32)
    args["k"] = (keys / np.linalg.norm(keys, axis=-1, keepdims=True)).astype(args["k"].dtype)
    args["beta"] = np.random.default_rng(length).random(args["v"].shape[:3], f32)
    return args


def run(place, args, **options):
    """The gradients by name, in NumPy arrays: delta_rule_backward's if there is a beta, else linear_backward's."""
    function = attention.delta_rule_backward if "beta" in args else attention.linear_backward
    results = function(**{name: place.put(x) for name, x in args.items()}, **options)
    names = [name for name in NAMES if name[1:] in args]
    return dict(zip(names, map(place.get, results), strict=True))


def relative_rms(actual, want):
    """The root of the mean square error over that of the reference."""
    actual, want = (np.asarray(x).astype(float) for x in (actual, want))
    difference = np.square(actual - want).mean()
    return np.sqrt(difference / np.square(want).mean()) if difference else 0.0


def check(place, args, **options):
    """Compare all gradients with the reference's, and return them."""
    actual = run(place, args, **options)
    of_reference = {name: x for name, x in options.items() if name != "family"}
    want, low = (reference.linear_backward(**args, **of_reference, low=low) for low in (False, True))
    for name, x in actual.items():
        if name in LIMITS and "beta" in args:
            limit = DELTA_LIMIT + 3 * relative_rms(low[name], want[name])
            limit += OF_HEADS * (name == "ddecay" and x.ndim == 1)
            assert x.shape == want[name].shape and relative_rms(x, want[name]) <= limit, name
        elif name in LIMITS:
            limit = LIMITS[name] + OF_HEADS * (name == "ddecay" and x.ndim == 1)
            assert x.shape == want[name].shape and relative_rms(x, want[name]) <= limit, name
        else:
            reference.assert_close(x, want[name], low[name], factor=3, name=name)
    return actual


def with_record(place, args, **options):
    """(out, state, record) of forward, and the arguments of gradients with the record."""
    inputs = {name: place.put(x) for name, x in args.items() if name not in ("dout", "dstate")}
    results = attention.delta_rule(**inputs, return_state=True, return_chunk_states=True, **options)
    return results, args | {"chunk_states": results[-1]}


def check_record(place, args, **options):
    """Outputs and the state are those of the reference, and gradients have the bits that they have without a record."""
    (out, state, record), _ = with_record(place, args, **options)
    inputs = {name: x for name, x in args.items() if name not in ("dout", "dstate")}
    (want, last), (low, _) = (reference.linear(**inputs, low=low, **options) for low in (False, True))
    reference.assert_close(place.get(out), want, low, factor=2)
    assert relative_rms(place.get(state), last) < 0.005
    actual = attention.delta_rule_backward(**{n: place.put(x) for n, x in args.items()}, chunk_states=record, **options)
    for x, (name, y) in zip(map(place.get, actual), run(place, args, **options).items(), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)
    return record


def check_heads_first(place, args, **options):
    """Arrays with heads before tokens have the same gradients, to the last bit."""
    swap = lambda name, x: x.swapaxes(1, 2).copy() if x.ndim > 2 and "state" not in name else x
    actual = check(place, args, **options)
    for name, x in run(place, {name: swap(name, x) for name, x in args.items()}, layout="bhsd", **options).items():
        np.testing.assert_array_equal(swap(name, x), actual[name])


def check_row_strides(args, more, **options):
    """Rows that are `more` elements apart from each other have the same gradients, to the last bit."""

    def widened(x):
        wide = np.full((*x.shape[:-1], x.shape[-1] + more), np.nan, x.dtype)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]

    apart = {name: widened(args[name]) for name in ("q", "k", "v", "decay", "dout")}
    actual = run(OnInterpreter(), args | apart, **options)
    for name, x in run(OnInterpreter(), args, **options).items():
        np.testing.assert_array_equal(actual[name], x)


def check_packed(place, monkeypatch, make_case, decay, heads=2, **options):
    """A sequence with a token more than a chunk, and one of a token, next to poison, have the gradients that each has by
    itself. Padding has gradients of 0; a sequence without tokens passes the gradient of its state on."""
    as_on_a_device(monkeypatch)
    packing = Packing([0, 65, 1], neighbour=2, nobodys=66)
    args = make_case(int(packing.cu_seqlens[-1]), decay, heads=heads, key_heads=1)
    count = len(packing.ends) - 1
    tokens = {name: x for name, x in args.items() if x.ndim > 2 and "state" not in name}
    states = {name: np.repeat(args[name], len(packing.cu_seqlens) - 1, axis=0) for name in ("initial_state", "dstate")}
    spread_states = {name: np.full((count, *x.shape[1:]), np.nan, f32) for name, x in states.items()}
    for name, x in states.items():
        spread_states[name][packing.which] = x
    without_neighbours = run(place, args | states | {"cu_seqlens": packing.cu_seqlens}, **options)
    spread = {name: packing.spread(x) for name, x in tokens.items()}
    actual = run(place, args | spread | spread_states | {"cu_seqlens": packing.ends}, **options)
    want = reference.linear_backward(**args | states, cu_seqlens=packing.cu_seqlens)
    for name, x in without_neighbours.items():
        assert relative_rms(x, want[name]) < (0.02 if decay == "head" else 0.005), name
        if name == "dinitial_state":
            np.testing.assert_array_equal(actual[name][packing.which], x)
            np.testing.assert_array_equal(x[0], args["dstate"][0])
        elif name != "ddecay" or decay != "head":
            np.testing.assert_array_equal(packing.gather(actual[name].astype(f32)), x.astype(f32))
            assert (actual[name][:, packing.nobodys] == 0).all()
