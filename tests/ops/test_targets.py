"""The vocabulary of a warp and of a block compiles for every GPU, with no spill, no local memory and no complaint of ptxas.
(What each op becomes on Hopper: test_code.py. Products, cell by cell: test_mma.py. wgmma and TMA are Hopper's.)"""

import itertools

import numpy as np
import pytest
from numba import cuda

import ops
from ops import block, complex, load, store, warpgroup, zeros
from tiles import bf16, fp8e4m3, fp8e5m2, fp16, fp32, inlined, rt, shared, st, sv
from tiles.compiling.compiler import compile_kernel
from tiles.launching.arguments import parameter

ARCHS = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"]
OTHERS = [arch for arch in ARCHS if arch not in ("sm_80", "sm_90a")]
T, H = rt(16, 64, fp32), rt(32, 32, bf16)
S = st(64, 64, bf16)
plan = shared(s=S, scratch=sv(256, fp32))
stores = shared(f=st(64, 64, fp32), h=S, v=sv(64, bf16), e=st(64, 64, fp8e4m3), w=sv(64, fp8e5m2))


def maps(x, y):
    t = load(x, T, (0, 0))
    t = ops.gelu(t) + ops.tanh(t) * ops.sigmoid(t) - ops.rsqrt(ops.abs(t) + 1.0)
    t = ops.where(ops.greater(t, 0.0), ops.fma(t, t, t), ops.log2(ops.exp2(-t)) / 3.0)
    store(y, ops.maximum(ops.relu(t), ops.row_index(T)), (0, 0))


def masks(x, y):
    t = ops.causal(load(x, T, (0, 0)), 3, 0.0)
    t = ops.outside_fill(ops.triu(ops.left_fill(t, 2, 1.0), -5, 2.0), 12, 60, 3.0)
    store(y, ops.upper_fill(t, 1, 4.0), (0, 0))


def reductions(x, y):
    t = load(x, T, (0, 0))
    t = (t - ops.row_max(t)) / ops.finish_sum(ops.lane_sum(t)) + ops.col_sum(t, ops.col_prod(t))
    if ops.tile_any(ops.less(t, 0.0)):
        t *= ops.tile_sum(t)
    store(y, t, (0, 0))


def turns(x, y):
    t = bf16(load(x, H, (0, 0)))
    t = ops.hstack(ops.columns(ops.swap_layout(ops.swap_layout(t)), 16, 1), ops.columns(ops.transpose(t), 16, 0))
    store(y, fp16(ops.vstack(ops.rows(t, 16, 1), ops.rows(t, 16, 0))), (0, 0))


def groups(x, y):
    s, scratch = plan.open()
    warpgroup.store(s, warpgroup.load(x, rt(16, 64, bf16), (0, 0)))
    block.sync()
    t = warpgroup.load(s, rt(16, 64, fp32))
    t = t + warpgroup.reduce_sum(ops.col_sum(t), scratch) + block.reduce_max(ops.tile_max(warpgroup.quarter(s)), scratch)
    if block.reduce_any(ops.tile_any(t)):
        warpgroup.store(y, ops.exp(t) + fp32(ops.col_max(s)), (0, 0))


def complex_products(x, y):
    a, c = rt(16, 32, bf16), zeros(rt(16, 16, fp32))
    left = complex.Complex(load(x, a, (0, 0)), load(x, a, (16, 0)))
    product = complex.mma_ABt(complex.Complex(c, c), left, complex.conj(left))
    store(y, ops.hstack(product.re, product.im), (0, 0))


def moves(x, y):
    f, h, v, _, _ = stores.open()
    ops.copy_async(f, x, (-3, 60))
    ops.commit_group()
    ops.wait_group()
    store(h, load(f, rt(64, 64, bf16, "col")))
    store(v, load(x, T.row_vec, (1, 7)))
    block.sync()
    t = load(ops.subtile(h, 16, 1), T) + load(v, T.row_vec) + ops.load_row(f, T.row_vec, 2)
    store(y, t + load(x, T, (0, 0), aligned=True), (48, 0), aligned=True)


def bytes_of_fp8(x, y):
    _, _, _, e, w = stores.open()
    store(e, load(x, rt(64, 64, fp32), (0, 0)))
    store(w, load(x, T.row_vec, (0, 3)))
    block.sync()
    right = load(e, rt(64, 64, fp8e4m3, "col"))
    t = ops.mma_AB(zeros(T), fp8e5m2(load(x, T, (0, 0))), right)
    store(y, ops.map(t, halfway, load(w, T.row_vec)), (0, 0))


@inlined
def halfway(e, f):
    return (e + f) * np.float32(0.5)


BODIES = [maps, masks, reductions, turns, groups, complex_products, moves]
CASES = [  # each body for the oldest, and for others in turn; for Hopper, each op's own test makes its machine code
    *itertools.product(BODIES, ["sm_80"]),
    *zip(BODIES, OTHERS),
    *((bytes_of_fp8, arch) for arch in ("sm_89", "sm_100a")),
]
CASES += [
    pytest.param(*case, marks=pytest.mark.release)
    for case in (
        *[*zip(BODIES, itertools.cycle(OTHERS))][len(OTHERS) :],
        *itertools.product(BODIES, ["sm_90a"]),
        *((bytes_of_fp8, arch) for arch in ("sm_90a", "sm_120a")),
    )
]


@pytest.mark.parametrize(("body", "arch"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_compiles(body, arch):
    array = parameter("x", np.zeros((64, 64), np.float32)).type
    code = compile_kernel(cuda.jit(body), (array, array), arch)
    assert (code.spill_bytes, code.local_bytes, code.warnings) == (0, 0, [])
