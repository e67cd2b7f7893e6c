"""What an editor shows inside a kernel: names to complete, parameters, docstrings. Jedi reads the sources as editors do, and
imports nothing."""

import sys
from pathlib import Path

import pytest

jedi = pytest.importorskip("jedi")

ROOT = Path(__file__).parents[1]
KERNEL = """
from numba import cuda

import ops, tiles
from ops import block, load, row_max, warpgroup, zeros
from tiles import bf16, fp32, pipeline, ring, rt, shared, st

T, K = rt(16, 64, fp32), ring(st(64, 64, bf16), 2)
smem = shared(k=K)

@cuda.jit
def kernel(x):
    tile = load(x, T, (0, 0))
    """


@pytest.fixture(scope="module")
def editor():
    """editor(line): a Jedi script that ends in this line of the kernel, and the cursor behind it."""
    project = jedi.Project(ROOT, environment_path=sys.executable)

    def at(line):
        source = KERNEL + line
        return jedi.Script(source, path=ROOT / "kernel.py", project=project), (source.count("\n") + 1, len(line) + 4)

    return at


COMPLETIONS = {
    "ops.row_": {"row_index", "row_max", "row_min", "row_prod", "row_sum"},
    "ops.": {"exp2", "mma_AB", "where", "causal", "swap_layout", "warpgroup", "block"},
    "warpgroup.": {"mm_ABt", "mma_AB", "wait", "store", "causal", "reduce_sum", "ping_pong", "quarter"},
    "ops.cluster.": {"rank", "map", "store", "store_async", "signal", "receive"},
    "ops.complex.": {"Complex", "mul", "mma_AB", "mma_ABt", "mma_AtB", "mma_AtBt"},
    "block.reduce": {"reduce_max", "reduce_min", "reduce_sum", "reduce_prod", "reduce_any", "reduce_all"},
    "tiles.": {"rt", "st", "ring", "shared", "tensor", "launch", "bf16", "op", "lowers"},
    "T.": {"rows", "cols", "dtype", "row_vec", "col_vec", "layout"},
    "K.": {"fill", "wait", "release"},
}
SIGNATURES = {
    "ops.exp2(": "exp2(x)",
    "row_max(": "row_max(tile, running=None)",
    "ops.columns(": "columns(tile, count, index)",
    "zeros(": "zeros(shape)",
    "ops.map(": "map(x, function, y=None, z=None)",
    "ops.cluster.store(": "store(target, value)",
    "ops.where(": "where(mask, x, y)",
    "ops.causal(": "causal(tile, diagonal, value)",
    "warpgroup.causal(": "causal(tile, diagonal, value)",
    "warpgroup.mma_AB(": "mma_AB(acc, a, b)",
    "warpgroup.wait(": "wait(tile=None, newer=0)",
    "block.reduce_sum(": "reduce_sum(x, scratch)",
}


@pytest.mark.parametrize("line", COMPLETIONS)
def test_completions(editor, line):
    script, cursor = editor(line)
    assert COMPLETIONS[line] <= {actual.name for actual in script.complete(*cursor)}


@pytest.mark.parametrize("line", SIGNATURES)
def test_parameters_and_docstrings(editor, line):
    script, cursor = editor(line)
    [actual] = script.get_signatures(*cursor)
    assert actual.to_string() == SIGNATURES[line] and len(actual.docstring(raw=True)) > 10


def test_every_op_has_them(editor):
    """No op hides behind its decorator: parameters by name, and a docstring."""
    script, cursor = editor("ops.")
    for actual in script.complete(*cursor):
        if actual.type == "function" and not actual.name.startswith("_"):
            [signature] = actual.get_signatures()
            assert "*" not in signature.to_string() and actual.docstring(raw=True), actual.name


def test_packages_are_marked_as_typed():
    assert '"*" = ["py.typed", "*.jinja"]' in (ROOT / "pyproject.toml").read_text()
    assert all((ROOT / package / "py.typed").exists() for package in ("tiles", "ops", "attention", "fuse"))
