"""Derivatives of scores in Python, against differences; what kernels run gives the same as what is read here."""

import numpy as np
import pytest

import ops
from attention.scoring.score_derivative import GRADIENT_RULES, differentiate
from attention.scoring.symbolic import WITHOUT_GRADIENT
from tiles import fp32

STEP = 2.0**-8
TABLE, BUCKETS = np.random.default_rng(0).uniform(1, 2, (2, 9)), np.arange(20) // 3
I, J = np.arange(4)[:, None], np.arange(5)[None]
S = np.random.default_rng(1).uniform(0.3, 0.9, (4, 5)) * np.where((I + J) % 2, 1, -1)  # no map has a kink there
SCORES = {
    **{name: (lambda s, b, h, i, j, name=name: getattr(ops, name)(s)) for name in (
        "exp2", "exp", "abs", "relu", "tanh", "sigmoid", "silu", "softplus", "gelu", "gelu_tanh")},
    **{name: (lambda s, b, h, i, j, name=name: getattr(ops, name)(s * s)) for name in (
        "log2", "log", "sqrt", "rsqrt", "reciprocal")},
    "arithmetic": lambda s, b, h, i, j: -(s * 2 + 3.0 - j) / (s * s + np.float32(1.5)) - (i - s) % 100 + s // 10,
    "maxima": lambda s, b, h, i, j: ops.maximum(s, 0.1 * s) * ops.minimum(2.0, s) + ops.fma(s, s, 1.0),
    "choices": lambda s, b, h, i, j: ops.where((j <= i) & ~(s > 0.5), s * s, ops.where(ops.less(s, 0.0), 3.0 * s, 1.0)),
    "one": lambda s, b, h, i, j: s + h * (j - i) // 2,
    "constant": lambda s, b, h, i, j: 0 * i + ops.tanh(j * 1.0),
    "converted": lambda s, b, h, i, j: fp32(s) * 3.0 if not isinstance(s, np.ndarray) else s * 3.0,
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_by_the_score(name):
    score, at = SCORES[name], (0, 1, I, J)
    actual = differentiate(score, ())
    value, slope = actual.score_and_grad(S, *at)
    np.testing.assert_allclose(value, score(S, *at), rtol=1e-6)
    expected = (np.asarray(score(S + STEP, *at), float) - score(S - STEP, *at)) / (2 * STEP)
    np.testing.assert_allclose(np.broadcast_to(slope, S.shape), expected, rtol=2e-3, atol=2e-3)
    assert actual.linear == (name == "one") and not actual.reads


def test_every_map_has_one():
    """Or is said to have none, or is no map of a score."""
    from ops.elementwise import arithmetic, compare, functions

    op_functions = {name for module in (arithmetic, compare, functions) for name in vars(module) if name in ops.__all__}
    assert op_functions - {"map"} <= {*GRADIENT_RULES, *WITHOUT_GRADIENT}


def test_by_what_it_reads():
    def score(s, b, h, i, j, table, buckets, scales):
        return scales[h] * s * s + table[h, buckets[j - i + 4]] * table[h, buckets[j - i + 4]] * scales[h]

    arrays, at = (TABLE, BUCKETS, np.array([0.5, 2])), (0, 1, I, J)
    actual = differentiate(score, (2, 1, 1))
    where = {0: TABLE, 2: arrays[2]}
    sums = {n: np.zeros(x.shape) for n, x in where.items()}
    for read in actual.reads:
        place = np.broadcast_to(read.element_index(*at, *arrays), S.shape).astype(int)
        np.add.at(sums[read.array].reshape(-1), place, np.broadcast_to(read.gradient(S, *at, *arrays), S.shape))
        assert (read.element_index(0, 5, I, J, *arrays) == -1).all()  # there is no such head
    for n, x in where.items():
        for place in np.ndindex(x.shape):
            ends = []
            for step in (STEP, -STEP):
                shifted_arrays = [y.copy() for y in arrays]
                shifted_arrays[n][place] += step
                ends.append(score(S, *at, *shifted_arrays).sum())
            assert np.isclose(sums[n][place], (ends[0] - ends[1]) / (2 * STEP), atol=1e-6)
