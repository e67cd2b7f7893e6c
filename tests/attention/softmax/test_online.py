"""attention/parts/online_softmax.py: what has been seen of keys block by block, in any order, is the softmax of all."""

import math

import numpy as np
import pytest
from numba import cuda

import tiles
from attention.parts.online_softmax import LOWEST, SLACK, Softmax
from attention.parts.visibility import FULL
from ops import load, mma_AB, store
from tiles import bf16, fp32, inlined, rt
from tiles.compiling.compiler import compile_kernel
from tiles.launching.arguments import parameter

S, V, O = rt(16, 32, fp32), rt(32, 16, bf16, "col"), rt(16, 16, fp32)
softmax = Softmax(O)
SCALE, BLOCKS = 0.7, 5


@inlined
def block(state, scores, values, j, slack):
    s = load(scores, S, (0, 32 * j))
    state = state.update_max(s, None, SCALE, slack)
    p = state.weights(s, None, SCALE)
    return state._replace(o=mma_AB(state.rescale(), bf16(p), load(values, V, (32 * j, 0)))).add(p)


@cuda.jit
def attend(scores, values, out, lse, first, slack):
    """The blocks from `first` on, and then those before it."""
    state = softmax.init(LOWEST)
    for j in range(BLOCKS):
        state = block(state, scores, values, (first + j) % BLOCKS, slack)
    o, l = state.finish(SCALE, FULL, None)
    store(out, o, (0, 0))
    store(lse, l, (0,))


def inputs(seed=0, spread=8.0):
    rng = np.random.default_rng(seed)
    scores = (rng.standard_normal((16, 32 * BLOCKS)) * spread).astype(np.float32)
    return scores, rng.standard_normal((32 * BLOCKS, 16)).astype(np.float32).astype(bf16.np)


def expected(scores, values):
    """In float64; powers of 2, as the kernels count them."""
    weights = np.exp2(SCALE * scores.astype(np.float64) - SCALE * scores.max(axis=1, keepdims=True))
    total = weights.sum(axis=1, keepdims=True)
    lse = (np.log2(total) + SCALE * scores.max(axis=1, keepdims=True)) * math.log(2)
    return weights @ values.astype(np.float64) / total, lse[:, 0]


@pytest.mark.parametrize("slack", [0.0, SLACK / SCALE, 30 / SCALE])
@pytest.mark.parametrize("first", range(BLOCKS))
def test_blocks_make_a_softmax(first, slack):
    """In any order; with a slack of 30 the maximum moves once, at the first block."""
    scores, values = inputs(first)
    out, lse = np.full((16, 16), np.nan, np.float32), np.full(16, np.nan, np.float32)
    tiles.launch(attend, 1, 32)(scores, values, out, lse, first, slack)
    ref, ref_lse = expected(scores, values)
    assert np.abs(out - ref).max() < 2e-2 and np.abs(lse - ref_lse).max() < 1e-4


def test_rows_that_see_no_key():
    """-inf everywhere: 0 and -inf; or in the last blocks."""
    scores, values = inputs()
    scores[3], scores[5, :64] = -np.inf, -np.inf
    out, lse = np.full((16, 16), np.nan, np.float32), np.full(16, np.nan, np.float32)
    tiles.launch(attend, 1, 32)(scores, values, out, lse, 2, SLACK / SCALE)
    assert (out[3] == 0).all() and lse[3] == -np.inf
    ref, ref_lse = expected(np.where(np.isneginf(scores), -1e4, scores), values)
    assert np.abs(out[5] - ref[5]).max() < 2e-2 and abs(lse[5] - ref_lse[5]) < 1e-4


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_it_stays_in_registers(arch):
    scores, values = inputs()
    args = scores, values, np.zeros((16, 16), np.float32), np.zeros(16, np.float32), 2, 1.0
    types = tuple(parameter(f"x{k}", x).type for k, x in enumerate(args))
    actual = compile_kernel(attend, types, arch)
    assert (actual.spill_bytes, actual.local_bytes, actual.warnings) == (0, 0, [])
