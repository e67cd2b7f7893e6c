"""tiles/inspect/command.py: how the command line finds a kernel and its arguments, and what it prints."""

import json
import sys
import textwrap

import pytest
from inspected import plan

from tiles import bf16, fp32, rt, shared, st
from tiles.__main__ import main as tiles_main
from tiles.compiling.line_table import SourcePlace
from tiles.inspect import Inspection, command
from tiles.inspect.code import SassLine
from tiles.inspect.command import find, main
from tiles.launching.arguments import FLOAT, INT, array, tiled

small = shared(a=st(16, 16, bf16))
SOURCE = """
import numpy as np
from numba import cuda

import tiles
from ops import load, store
from tiles import bf16, fp32, rt, shared, st
from tiles.launching.arguments import FLOAT, INT, array

T, BOX, plan = rt(16, 16, fp32), st(64, 64, bf16), shared(a=st(64, 64, bf16))

@cuda.jit
def declared(x: array(2), n: INT):
    x[n, n] = 1.0

@cuda.jit
def plain(x, y, scale):
    x[0, 0] = y[0] * scale

def make(columns):
    @cuda.jit
    def made(x: array(2), scale: FLOAT):
        store(x, load(x, rt(16, columns, fp32), (0, 0)) * scale, (0, 0))
    return made, plan

def main():
    @cuda.jit
    def hidden(x):
        x[0] = 1.0

    print("not what was asked for")
    x = np.zeros(4, np.float32)
    tiles.launch(hidden, 2, 64)(x)
    tiles.launch(hidden, 2, 128, shared=plan)(x)
    raise OSError("no more")

if __name__ == "__main__":
    main()
    raise SystemExit("done")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("commands") / "of_a_user.py"
    path.write_text(textwrap.dedent(SOURCE))
    before, known = list(sys.path), set(sys.modules)
    yield str(path)
    sys.path[:] = before
    for name in set(sys.modules) - known:
        if "of_a_user" in name:
            del sys.modules[name]


def test_annotations_say_what_a_kernel_takes(file):
    actual = find(f"{file}:declared")
    assert actual.kernel.py_func.__name__ == "declared" and actual[1:] == ((), None, None)


def test_expressions_for_arguments(file):
    actual = find(f"{file}:plain", "array(2, bf16), tiled(BOX), 1.0")
    assert actual.args == (array(2, bf16), tiled(st(64, 64, bf16)), 1.0)
    assert find(f"{file}:plain", "array(T.rows // 8, fp32),").args == (array(2),) and rt(16, 16, fp32).rows == 16


def test_a_factory_gives_the_plan_too(file):
    actual = find(f"{file}:make(32)")
    assert actual.kernel.py_func.__name__ == "made" and actual.shared.nbytes == 8192 + 1024


def test_a_script_runs_up_to_the_first_launch(file, capsys):
    actual = find(f"{file}:hidden")
    assert actual.args == (array(1),) and (actual.block, actual.shared) == (64, None)
    said = capsys.readouterr()
    assert said.out == "" and "not what was asked for" in said.err


def test_a_module_goes_as_well():
    assert find("inspected:product").kernel.py_func.__name__ == "product"


@pytest.mark.parametrize("kernel, words", [
    ("missing", "has no kernel missing, and launches none of that name; its kernels are declared, plain"),
    ("missing", "it stops with OSError: no more"),
    ("plain", "plain: annotate its parameters, say --args, or launch it"),

    ("T", "is no @cuda.jit function but"), ("make(", "SyntaxError"),
])  # fmt: skip
def test_what_is_wrong_is_said(kernel, words, file, capsys):
    assert main([f"{file}:{kernel}"]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("kernel", ["product", "factory(plan)", "of_a_loop", "other"])
def test_the_plan_that_a_kernel_opens_counts(kernel, tmp_path, capsys):
    """Without being said, where the code names it."""
    (tmp_path / "opens.py").write_text(
        "from inspected import T, array, bf16, cuda, load, other, plan, product, rt, shared, st, store\n"
        "small = shared(a=st(16, 16, bf16))\n"
        "def factory(p):\n"
        "    @cuda.jit\n"
        "    def made(x: array(2)):\n"
        "        a, b = p.open()\n"
        "        store(x, load(a, rt(64, 64, bf16)), (0, 0))\n"
        "    return made\n"
        "@cuda.jit\n"
        "def of_a_loop(x: array(2)):\n"
        "    for i in range(x.shape[0]):\n"
        "        x[i, 0] = 0.0\n"
        "    (a,) = small.open()\n"
    )
    assert (
        main([f"{tmp_path}/opens.py:{kernel}", "--args", "array(2), array(2)" if kernel == "other" else "array(2)", "--json"])
        == 0
    )
    expected = {"other": 0, "of_a_loop": small.nbytes}.get(kernel, plan.nbytes)
    assert json.loads(capsys.readouterr().out)["shared_bytes"] == expected
    if kernel == "product":  # what is said counts
        assert main([f"{tmp_path}/opens.py:product", "--args", "array(2)", "--shared", "4096", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["shared_bytes"] == 4096


@pytest.mark.parametrize("words, message", [
    ("--arch hopper", "--arch: arch must look like sm_80 or sm_90a, got 'hopper'"),
    ("--arch sm_75", "--arch: arch must be one of sm_80, sm_86,"), ("--arch sm_999", "got 'sm_999'"),
    ("--diff sm_999", "--diff: arch must be one of sm_80,"), ("--html {file}/page.html", "--html: [Errno 20] Not a directory"),
])  # fmt: skip
def test_a_wrong_option_is_no_traceback(words, message, file, capsys):
    with pytest.raises(SystemExit) as ended:
        main([f"{file}:declared", *words.format(file=file).split()])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_neither_file_nor_kernel(capsys):
    assert main(["nothing"]) == main(["no.such.module:kernel"]) == 1
    said = capsys.readouterr().err
    assert "say FILE:KERNEL, as in my_kernels.py:gemm, got 'nothing'" in said and "No module named 'no'" in said


def test_what_is_printed(file, capsys, tmp_path, monkeypatch):
    def look(kernel, *args, arch, shared, block):
        line = SassLine(f"RET R{len(arch)}", SourcePlace())
        return Inspection("plain", arch, len(args), 0, 0, shared.nbytes, block, [], {"RET": 1}, "", (line,), (line,))

    monkeypatch.setattr(command, "inspect", look)
    inputs = [f"{file}:plain", "--args", "array(2), array(1), 0.5", "--block", "128", "--shared", "4096"]
    assert tiles_main(["inspect", *inputs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "title": "plain", "arch": "sm_90a", "registers": 3, "spill_bytes": 0, "local_bytes": 0, "shared_bytes": 4096,
        "threads": 128, "warnings": [], "instructions": {"RET": 1}, "digest": "",
    }  # fmt: skip
    page = tmp_path / "page.html"
    assert main([*inputs, "--html", str(page), "--diff", "sm_80"]) == 0
    assert "plain for sm_80 <small>and</small> plain for sm_90a" in page.read_text()
    assert main([*inputs, "--diff", "sm_80", "--json"]) == 0
    assert {name: one["arch"] for name, one in json.loads(capsys.readouterr().out.partition("\n")[2]).items()} == {
        "before": "sm_80",
        "after": "sm_90a",
    }
    assert main([*inputs, "--diff", f"{file}:declared", "--sass"]) == 0
    assert "RET R6" in capsys.readouterr().out


def test_numbers_are_types_as_in_a_launch(file, capsys):
    assert main([f"{file}:declared", "--args", "array(2), INT", "--ptx"]) == 0
    assert "of_a_user.py:14 `x[n, n] = 1.0`" in capsys.readouterr().out
    assert find(f"{file}:plain", "INT, FLOAT").args == (INT, FLOAT)
