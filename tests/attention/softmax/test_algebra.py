"""What algebra finds in masks and scores in Python: that it is the same, and that it is found."""

import numpy as np
import pytest
from forward_checks import agree, inputs
from places import OnInterpreter

import attention
from attention.parts.scores import ScoreMod, ScoreModAlibi, ScoreModInUnit
from attention.plans.softmax import forward_launches
from attention.scoring.algebra import RelativeWindow, mask_bounds, score_variant
from ops import exp2, less_equal, tanh

I, J = np.arange(40)[:, None], np.arange(50)[None]
MASKS = {
    "causal": (lambda b, h, i, j: j <= i, RelativeWindow(None, 0)),
    "window": (lambda b, h, i, j: (j <= i) & (i - j < 9), RelativeWindow(8, 0)),
    "by an op": (lambda b, h, i, j: less_equal(j, i + 2), RelativeWindow(None, 2)),
    "distance": (lambda b, h, i, j: abs(i - j) <= 7, RelativeWindow(7, 7)),
    "distance, turned": (lambda b, h, i, j: abs(j - i + 1) < 3, RelativeWindow(3, 1)),
    "itself": (lambda b, h, i, j: i == j, RelativeWindow(0, 0)),
    "negated": (lambda b, h, i, j: ~(j > i + 3), RelativeWindow(None, 3)),
    "a fraction": (lambda b, h, i, j: i - j < 9.5, RelativeWindow(9, None)),
    "far behind": (lambda b, h, i, j: (j <= i - 10) & (i <= j + 20), RelativeWindow(20, -10)),
    "twice": (lambda b, h, i, j: 2 * j - j <= -1 * -i, RelativeWindow(None, 0)),
    "either": (lambda b, h, i, j: (j <= i) | (j < 5), None),
    "the first keys": (lambda b, h, i, j: j < 5, None),
    "even ones": (lambda b, h, i, j: 2 * j <= i, None),
    "by head": (lambda b, h, i, j: j <= i + h, None),
    "never a half": (lambda b, h, i, j: i - j == 0.5, None),
    "of an array": (lambda b, h, i, j, n: j <= i + n[0], None),
    "by what it is": (lambda b, h, i, j: j <= i if h else j < 3, None),
    "nothing at all": (lambda b, h, i, j: True, None),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    mask, ends = MASKS[name]
    assert mask_bounds(mask, [1] * (name == "of an array")) == ends
    if ends:
        seen = np.ones((40, 50), bool)
        seen &= True if ends.left is None else I - ends.left <= J
        seen &= True if ends.right is None else I + ends.right >= J
        assert np.array_equal(seen, mask(0, 0, I, J))


SCORES = {  # what is found: the kind, and unit and factor, or whether the distance has a sign
    "capped": (lambda s, b, h, i, j: 30 * tanh(s / 30), ScoreModInUnit, (30, 1 / 30)),
    "capped, turned": (lambda s, b, h, i, j: tanh(0.5 * s) * 4, ScoreModInUnit, (4, 0.5)),
    "two uses": (lambda s, b, h, i, j: (s * 0.5 + tanh(s * 0.5)) / 2, ScoreModInUnit, (0.5, 0.5)),
    "uses that differ": (lambda s, b, h, i, j: 2 * (s + tanh(s * 0.5)), ScoreModInUnit, (2, 1)),
    "only a factor": (lambda s, b, h, i, j: s * 3, ScoreModInUnit, (3, 1)),
    "negative": (lambda s, b, h, i, j: -2 * tanh(s), ScoreMod, None),
    "what it is": (lambda s, b, h, i, j: s, ScoreMod, None),
    "divides": (lambda s, b, h, i, j: 2 / (s * s + 1), ScoreMod, None),
    "ALiBi": (lambda s, b, h, i, j, w: s - w[h] * (i - j), ScoreModAlibi, True),
    "ALiBi of distances": (lambda s, b, h, i, j, w: s - abs(i - j) * w[h], ScoreModAlibi, False),
    "ALiBi, halved": (lambda s, b, h, i, j, w: w[h] / 2 * (j - i) + s, ScoreModAlibi, True),
    "slopes by formula": (lambda s, b, h, i, j: s - exp2(-4.0 * (h + 1)) * abs(j - i), ScoreModAlibi, False),
    "a number": (lambda s, b, h, i, j: -(i - j) * 0.25 + s, ScoreModAlibi, True),
    "grows": (lambda s, b, h, i, j: s + 0.125 * abs(i - j), ScoreModAlibi, False),
    "another key": (lambda s, b, h, i, j: s + (j - i - 1), ScoreMod, None),
    "by key": (lambda s, b, h, i, j, w: s - w[j] * (i - j), ScoreMod, None),
    "by key, turned": (lambda s, b, h, i, j, w: s - (i - j) * w[j], ScoreMod, None),
    "of a score": (lambda s, b, h, i, j: s + s * (i - j), ScoreMod, None),
    "minus it": (lambda s, b, h, i, j: (i - j) - s, ScoreMod, None),
}


def _axes(function):
    return [1] * (function.__code__.co_argcount - 5)


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    function, kind, said = SCORES[name]
    actual = score_variant(function, _axes(function), signed_distance=False)
    assert type(actual) is kind
    if said is not None:
        assert said == (actual.signed_distance if kind is ScoreModAlibi else pytest.approx((actual.unit, actual.factor)))


SLOPES = np.array([0.5, 0.125], np.float32)


def _case(name, sq, sk):
    """(q, k and v, options, the same without a function)"""
    function = (MASKS | SCORES)[name][0]
    aux = {"aux": (SLOPES,)} if _axes(function) and name in SCORES else {}
    return inputs(1, sq, sk, 2, 1, 64), {"mask" if name in MASKS else "score": function} | aux


@pytest.mark.parametrize(("name", "lengths"), [
    ("causal", (70, 140)), ("window", (140, 70)), ("far behind", (140, 140)), ("distance, turned", (5, 140)),
    ("capped", (70, 140)), ("two uses", (33, 70)), ("ALiBi", (140, 70)), ("ALiBi of distances", (70, 140)), ("grows", (70, 70)),
])  # fmt: skip
@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_in_kernels(place, name, lengths, family):
    arrays, options = _case(name, *lengths)
    agree(place, *arrays, family=family, **options)


@pytest.mark.parametrize("queries", [60, 90, 130])
def test_distances_where_the_order_is_known(queries):
    """A causal mask counts from the last key, a function from the first: keys may come after a query all the same."""
    arrays, options = _case("ALiBi of distances", queries, 90)
    agree(OnInterpreter(), *arrays, causal=True, **options)


@pytest.mark.parametrize("option", [{}, {"window": (5, None)}, {"causal": True}, {"window": (50, 2)}])
def test_a_mask_joins_a_window(option):
    arrays, options = _case("window", 90, 90)
    agree(OnInterpreter(), *arrays, **options, **option)


def test_the_same_bits_as_what_is_built_in(monkeypatch):
    """Gradients, too; and no lists are made."""
    monkeypatch.setattr(forward_launches.PreparationSteps, "list_key_blocks", None)
    (q, k, v), options = _case("window", 70, 70)
    mine, theirs = ({"mask": options["mask"]}, {"window": (8, 0)})
    actual = []
    for option in mine, theirs:
        out, lse = attention.forward(q, k, v, return_lse=True, **option)
        actual.append([out, lse, *attention.backward(q, q, k, v, out, lse, deterministic=True, **option)])
    for x, y in zip(*actual, strict=True):
        assert np.array_equal(x, y)


@pytest.mark.parametrize("lengths_option", [{"lengths_k": np.array([50])}, {"cu_seqlens": np.array([0, 20, 60])}])
def test_sequences_with_lengths_of_their_own(lengths_option):
    """Keys are counted from the first one of each: no one window says that."""
    arrays, options = _case("causal", 60, 60)
    agree(OnInterpreter(), *arrays, **options, **lengths_option)
