"""Gradients of random problems of linear attention and the delta rule, of any decays, gates, lengths, sizes and heads, against
the reference's. Sequences without tokens are among the packed ones, and families take turns."""

import ml_dtypes
import numpy as np
from gradient_cases import DELTA_LIMIT, delta_case, run
from gradient_cases import case as linear_case
from hypothesis import given, settings
from hypothesis import strategies as st
from places import OnCard, OnInterpreter, random_on_the_card

from attention import reference

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32
GATES = {  # by their strength: of decays that are drawn as exponentials with a mean of -0.2
    "none": lambda decay: 0 * decay,
    "gentle": lambda decay: decay,
    "as models have them": lambda decay: np.maximum(12 * decay, -5),
    "strong": lambda decay: np.where(decay < -0.5, -1e4, decay),
    "that forget": lambda decay: np.where(decay < -0.8, -np.inf, decay),
}
LIMIT = 0.02  # of float32 results, whose errors are those of terms that cancel where few tokens are
one_of = st.sampled_from
problems = st.fixed_dictionaries({
    "length": st.integers(1, 70), "decay": one_of(["none", "head", "token", "channel"]), "gates": one_of([f32, bf16]),
    "key_dim": one_of([16, 64, 80, 128]), "value_dim": one_of([16, 48, 128, 144]), "key_heads": st.integers(1, 2),
    "group": st.integers(1, 2), "dtype": one_of([bf16, f16]), "strength": one_of([*GATES]), "delta": st.booleans(),
    "cuts": st.none() | st.lists(st.floats(0, 1), min_size=1, max_size=3), "family": one_of([None, "sm_80"]),
    "layout": one_of(["bshd", "bhsd"]), "scale": one_of([None, -0.3]), "state": st.booleans(),
})  # fmt: skip


def draw(length, decay, key_heads, group, strength, cuts, delta, state, **sizes):
    """The arguments of a call of linear_backward or delta_rule_backward."""
    make = delta_case if delta else linear_case
    args = make(length, decay, key_heads=key_heads, heads=key_heads * group, **sizes)
    if "decay" in args:
        args["decay"] = GATES[strength](args["decay"].astype(f32)).astype(args["decay"].dtype)
    if cuts is not None:
        ends = sorted(int(cut * length) for cut in cuts)
        args["cu_seqlens"] = np.array([0, *ends, length], np.int32)
        args |= {name: np.repeat(args[name], len(ends) + 1, axis=0) for name in ("initial_state", "dstate")}
    return args if state else {name: x for name, x in args.items() if name not in ("initial_state", "dstate")}


def check(place, layout, family, scale, **problem):
    """Compare all gradients with the reference's."""
    args = draw(**problem)
    if layout == "bhsd":
        args = {name: x.swapaxes(1, 2).copy() if x.ndim > 2 and "state" not in name else x for name, x in args.items()}
    actual = run(place, args, layout=layout, family=family, scale=scale)
    want, low = (reference.linear_backward(**args, layout=layout, scale=scale, low=low) for low in (False, True))
    for name, x in actual.items():
        if x.dtype != f32:
            reference.assert_close(x, want[name], low[name], factor=3, name=name)
            continue
        expected, size = want[name], np.sqrt(np.square(want[name]).mean())
        if name == "ddecay":
            expected = np.where(args["decay"].astype(float) < -100, 0, expected)
        if name == "ddecay" and x.ndim == 1:
            size = max(size, size_of_terms(args, layout=layout, scale=scale))
        error = np.sqrt(np.square(x - expected).mean())
        assert error <= LIMIT * size + 3 * np.sqrt(np.square(low[name] - want[name]).mean()) + DELTA_LIMIT, (name, error, size)


def size_of_terms(args, **options):
    """The root of the sum of squares of what all tokens add to the gradient of a head's decay: they cancel."""
    tokens = args["v"].shape[:3]
    by_token = args["decay"] if options["layout"] == "bshd" else args["decay"][:, None]
    terms = reference.linear_backward(**args | {"decay": np.broadcast_to(by_token, tokens)}, **options)["ddecay"]
    return np.sqrt(np.square(terms).sum() / args["decay"].size)


@settings(max_examples=4, deadline=None)
@given(problem=problems)
def test_random_problems(problem):
    check(OnInterpreter(), **problem)


@random_on_the_card
@given(problem=problems)
def test_random_problems_on_the_card(problem):
    check(OnCard(), **problem | {"length": 5 * problem["length"]})
