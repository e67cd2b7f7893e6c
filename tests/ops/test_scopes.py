"""ops/scopes.py: an op called in a scope that has no meaning for it."""

import re

import numpy as np
import pytest
from numba import cuda

import ops
from ops import block, cluster, warpgroup, zeros
from ops.scopes import SCOPES
from tiles import fp32, rt
from tiles.op import OPS
from tiles.testing import meaning, ptx

T = rt(16, 16, fp32)


def columns_in_a_warpgroup(x):
    warpgroup.right_fill(zeros(T), 0, 0.0)


def rows_in_a_warpgroup(x):
    warpgroup.row_max(zeros(T))


def a_wgmma_by_a_warp(x):
    ops.mm_AB(zeros(T), zeros(T))


def turns_of_a_block(x):
    block.wait(zeros(T))


def tiles_of_a_block(x):
    block.load(x, T, (0, 0))


def ranks_of_a_block(x):
    block.rank()


WARP = "It is an op of a warp: each warp calls ops.{} on its own tile"
GROUP = "It is an op of a warpgroup: its four warps together call warpgroup.{}"
MISTAKES = {
    columns_in_a_warpgroup: "right_fill has no meaning for a warpgroup. " + WARP.format("right_fill"),
    rows_in_a_warpgroup: "row_max has no meaning for a warpgroup. " + WARP.format("row_max"),
    a_wgmma_by_a_warp: "mm_AB has no meaning for a warp. " + GROUP.format("mm_AB"),
    turns_of_a_block: "wait has no meaning for a block. " + GROUP.format("wait") + "; of a cluster: all its",
    ranks_of_a_block: "rank has no meaning for a block. " + GROUP.format("rank") + "; of a cluster: all its blocks together",
    tiles_of_a_block: f"load has no meaning for a block. {WARP}; {GROUP[12:]}; of a cluster".replace("{}", "load"),
}


@pytest.mark.parametrize("backend", [meaning, ptx])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_mistakes(backend, mistake):
    """Both backends raise the same message, with the kernel's line."""
    with pytest.raises(TypeError, match=f"^{re.escape(MISTAKES[mistake])}") as error:
        backend(cuda.jit(mistake), np.zeros((16, 16), np.float32))
    assert re.search(rf"test_scopes\.py(:|\", line ){mistake.__code__.co_firstlineno + 1}\b", str(error.value))


@pytest.mark.parametrize("module", [ops, warpgroup, block, cluster], ids=lambda m: m.__name__)
def test_names_of_no_op_are_missing_as_in_any_module(module):
    assert module.__name__ in SCOPES and not hasattr(module, "no_such_op")
    with pytest.raises(AttributeError, match="has no attribute 'no_such_op'") as error:
        module.no_such_op  # noqa: B018
    assert not isinstance(error.value, TypeError)


def test_every_op_of_a_warp_is_public():
    """ops.__all__ has every op of a warp; others are private or in another scope."""
    public = {
        name for name in vars(ops) if not name.startswith("_") and callable(getattr(ops, name)) and getattr(ops, name) in OPS
    }
    assert public <= set(ops.__all__)
