"""The vocabulary of a warp and of a block compiles for every GPU, with no spill, no local memory and no complaint of ptxas.
(What each op becomes on Hopper: test_code.py. Products, cell by cell: test_mma.py. wgmma and TMA are Hopper's.)"""

import numpy as np
import pytest
from numba import cuda

import ops
from ops import block, complex, load, store, warpgroup, zeros
from tiles import bf16, fp16, fp32, rt, shared, st, sv
from tiles.arguments import parameter
from tiles.compiler import compile_kernel

ARCHS = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"]
T, H = rt(16, 64, fp32), rt(32, 32, bf16)
S = st(64, 64, bf16)
plan = shared(s=S, scratch=sv(256, fp32))


def maps(x, y):
    t = load(x, T, (0, 0))
    t = ops.gelu(t) + ops.tanh(t) * ops.sigmoid(t) - ops.rsqrt(ops.abs(t) + 1.0)
    t = ops.where(ops.greater(t, 0.0), ops.fma(t, t, t), ops.log2(ops.exp2(-t)) / 3.0)
    store(y, ops.maximum(ops.relu(t), ops.row_index(T)), (0, 0))


def masks(x, y):
    t = ops.causal(load(x, T, (0, 0)), 3, 0.0)
    t = ops.bounds(ops.triu(ops.left_fill(t, 2, 1.0), -5, 2.0), 12, 60, 3.0)
    store(y, ops.upper_fill(t, 1, 4.0), (0, 0))


def reductions(x, y):
    t = load(x, T, (0, 0))
    t = (t - ops.row_max(t)) / ops.total(ops.lane_sum(t)) + ops.col_sum(t, ops.col_prod(t))
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


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("body", [maps, masks, reductions, turns, groups, complex_products], ids=lambda f: f.__name__)
def test_compiles(body, arch):
    array = parameter("x", np.zeros((64, 64), np.float32)).type
    code = compile_kernel(cuda.jit(body), (array, array), arch)
    assert (code.spill_bytes, code.local_bytes, code.warnings) == (0, 0, [])
