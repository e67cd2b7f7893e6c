"""attention/plans/softmax/gradient.py: forward's arguments by flat names and back, and gradients by name, of a backward
that notes its call."""

import numpy as np
import pytest

import attention
from attention.plans.softmax import gradient
from attention.plans.softmax.call_options import AUX

X, Y = np.ones(2), np.zeros(2)
AUX_ARRAYS = tuple(np.full(1, n) for n in range(AUX))


def test_arrays_have_flat_names_and_back():
    arguments = {"q": X, "bias": None, "q_norm": (X, Y), "k_norm": X, "aux": AUX_ARRAYS, "norm_eps": 1e-3, "causal": True}
    arrays, others = gradient.flatten_arrays(arguments, frozenset(arguments))
    assert [*arrays] == ["q", "q_norm", "q_norm_bias", "k_norm", *[f"aux{n}" for n in range(AUX)]]
    assert arrays["q_norm"] is X and arrays["q_norm_bias"] is Y and arrays["aux7"] is AUX_ARRAYS[7]
    assert others == {"norm_eps": 1e-3, "causal": True}
    grouped = gradient.group_arrays(arrays)
    assert {*grouped} == {"q", "q_norm", "k_norm", "aux"} and grouped["k_norm"] is grouped["q"] is X
    assert all(x is y for x, y in zip((*grouped["q_norm"], *grouped["aux"]), (X, Y, *AUX_ARRAYS), strict=True))
    plain = {"q": X, "sink": Y}
    assert gradient.group_arrays(plain) == plain and gradient.group_arrays(plain) is not plain


DROPOUTS = [  # (dropout, seed, the names of arrays, those of other arguments)
    (0.5, 7, "", "dropout seed"), (0.5, X, "seed", "dropout"), (0.0, 7, "", ""), (None, X, "", ""), (0.5, None, "", "dropout"),
    (np.float32(0.5), 7.5, "", "dropout seed"),
]  # fmt: skip


@pytest.mark.parametrize(("dropout", "seed", "arrays", "others"), DROPOUTS)
def test_a_seed_counts_with_dropout_alone(dropout, seed, arrays, others):
    flat, rest = gradient.flatten_arrays({"dropout": dropout, "seed": seed})
    assert ([*flat], [*rest]) == (arrays.split(), others.split())


def test_arguments_that_are_refused():
    with pytest.raises(TypeError, match="^takes no argument a$"):
        gradient.flatten_arrays({"q": X, "b": 1, "a": 1}, frozenset("q"))
    with pytest.raises(TypeError, match=f"^aux: must be up to {AUX} arrays: {AUX + 1} of "):
        gradient.flatten_arrays({"aux": (*AUX_ARRAYS, X)})
    with pytest.raises(TypeError, match="^q_norm: "):
        gradient.flatten_arrays({"q_norm": (X, Y, X)})
    assert gradient.flatten_arrays({"norm_eps": 1e-3, "q_norm": None}) == ({}, {})  # without a norm it changes nothing
    assert gradient.flatten_arrays({"norm_eps": 1e-3, "k_norm": X}) == ({"k_norm": X}, {"norm_eps": 1e-3})
    assert gradient.unsupported_arguments(["q", "return_lse", "causal"]) == ["return_lse"]


@pytest.fixture
def calls(monkeypatch):
    """The calls of attention.backward, which returns the names of what was asked for in place of arrays."""
    noted = []

    def backward(dout, q, k, v, out, lse, *, dlse=None, **others):
        noted.append({"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse} | others)
        results = [name for name in ("dbias", "dalibi") if others.get(name)] + ["dsink"] * ("sink" in others)
        aux = tuple(f"daux{n}" for n, wanted in enumerate(others.get("daux", ())) if wanted)
        norms = (
            [("dq_norm", "dq_norm_bias") if isinstance(others["q_norm"], tuple) else "dq_norm"] if "q_norm" in others else []
        )
        return ("dq", "dk", "dv", *results, *([aux] if aux else []), *norms)

    gradient.backward_parameters()  # those of attention.backward itself are known
    monkeypatch.setattr(attention, "backward", backward)
    return noted


def test_gradients_by_name(calls):
    """Those that backward computes on request only where they are, those of sinks and norms always."""
    names = "q k v bias alibi sink aux0 aux1 q_norm q_norm_bias".split()
    requested, options = ("q", "bias", "aux1"), {"causal": True}
    computed = gradient.compute_gradients("dout", None, dict.fromkeys(names, X), "out", "lse", options, requested)
    expected = "q k v bias sink aux1 q_norm q_norm_bias".split()
    assert computed == {name: f"d{name}" for name in expected}
    (call,) = calls
    assert call["dbias"] is True and "dalibi" not in call and call["daux"] == [None, True] and call["causal"] is True
    assert (call["dout"], call["out"], call["lse"], call["dlse"]) == ("dout", "out", "lse", None)
    assert [*gradient.compute_gradients("dout", X, {"q": X, "k": X, "v": X}, "out", "lse", {}, ("k",))] == ["q", "k", "v"]
    assert calls[1]["dlse"] is X and "daux" not in calls[1]


def test_gradients_of_programs(calls):
    """Options become forward's arguments again; lists of blocks are no arrays that have gradients."""
    with pytest.raises(NotImplementedError, match="^cu_seqlens: has no gradient yet; put jax.lax.stop_gradient around it"):
        gradient.program_gradient(("q", "cu_seqlens"), {}, "bshd")
    options = {"scale": 0.5, "family": None, "norm_eps": 1e-3, "left": 3, "right": 0, "causal": False, "dropout": 0.5}
    options |= {"seed_value": 7, "block_rows": 64, "block_cols": 128}
    compute = gradient.program_gradient(("q", "v"), options, "bhsd")
    inputs, results = {name: name for name in "qkv"} | {"kv_indices": Y}, {"out": "out", "lse": "lse"}
    assert compute(inputs, results, {}) == {} and not calls
    assert compute(inputs, results, {"out": "dout", "lse": "dlse"}) == {"q": "dq", "k": "dk", "v": "dv"}
    (call,) = calls
    assert call.items() >= {name: name for name in "dout q k v out lse dlse".split()}.items()
    assert call["layout"] == "bhsd"
    assert {name: call[name] for name in ("scale", "window", "dropout", "seed", "causal")} == {
        "scale": 0.5, "window": (3, 0), "dropout": 0.5, "seed": 7, "causal": False,
    }  # fmt: skip
    assert call["blocks"].kv_indices is Y and call["blocks"].BLOCK_SIZE == (64, 128) and call["blocks"].kv_num_blocks is None
    assert "norm_eps" not in call and "family" not in call
    compute(inputs | {"q_norm": X}, results, {"out": "dout"})
    assert calls[1]["norm_eps"] == 1e-3 and calls[1]["dlse"] is None
    with pytest.raises(NotImplementedError, match="^leftpad: there is no backward pass with it yet; put .* around q, k and v"):
        compute(inputs | {"leftpad": X}, results, {"out": "dout"})
    with pytest.raises(TypeError, match="^sinks: is an option of forward that no gradient knows"):
        gradient.program_gradient(("q",), options | {"sinks": 1}, "bshd")(inputs, results, {"out": "dout"})
