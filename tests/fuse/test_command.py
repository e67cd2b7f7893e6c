"""`python -m fuse` shows, draws and explains definitions."""

import pytest

from attention.__main__ import has_gpu
from fuse import inspect
from fuse.__main__ import main
from tiles.inspect import Figures


def test_show(capsys):
    assert main(["show", "fuse.operators:rms_norm_linear", "--shapes", "3x64", "64", "64x40.T", "--seed", "7"]) == 0
    said = capsys.readouterr().out
    for part in (
        "# The best of ",
        "A row's scale moves through a product",
        "    alongside: sum(x * x)",
        "# Its text",
        "@cuda.jit",
        ", of results up to ",
        "identity: equal at 4 random points",
        "(seed 7)",
        "no race",
    ):
        assert part in said
    assert "mm_ABt" in said  # the weights lie as their transpose


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["show", "fuse.operators:nothing", "--shapes", "3x64"], 2, "is not a function decorated with fuse.kernel"),
        (["show", "fuse.operators:rms_norm_linear", "--shapes", "3x64", "64", "48x40"], 1, "(3, 64) and (48, 40)"),
        (["show", "fuse.operators:rms_norm_linear", "--shapes", "3xa"], 1, "--shapes: must be such as 16x4096"),
        pytest.param(
            ["tune", "fuse.operators:rms_norm_linear", "--shapes", "3x64", "64", "64x40"],
            *(1, "tune: needs "),
            marks=pytest.mark.skipif(has_gpu(), reason="has a GPU, and would measure"),
        ),
        (
            ["inspect", "--only", "nothing"],
            2,
            "--only: selects nothing on sm_80 sm_86 sm_89 sm_90a sm_100a sm_120a: 'nothing'; there",
        ),
        (["inspect", "--only", "rotary", "x9"], 2, "'x9'; there are dropout_residual_layer_norm, expert_linear, "),
        (["inspect", "--only", "fp8_linear", "--arch", "sm_80"], 2, "selects nothing on sm_80: 'fp8_linear'; there are "),
        (["show", "nowhere.py:f", "--shapes", "3x64"], 2, "nowhere.py:f: there is no file nowhere.py"),
        (["show", "nowhere:f", "--shapes", "3x64"], 2, "nowhere:f: No module named 'nowhere'"),
    ],
)
def test_mistakes(arguments, code, says, capsys):
    assert main(arguments) == code and says in capsys.readouterr().err


GOOD = dict(registers=40, spill_bytes=0, local_bytes=0, shared_bytes=1024, threads=128, warnings=[])
BAD = dict(spill_bytes=4), dict(local_bytes=8), dict(warnings=["C7510"]), dict(shared_bytes=2**20), dict(threads=None)


@pytest.mark.parametrize("wrong", [{}, *BAD], ids=str)
def test_a_bad_kernel_is_found(wrong, monkeypatch):
    """A spilling kernel among good ones makes the exit code of inspect 1."""
    result = [Figures("k", "sm_90a", **GOOD | more, instructions={}, digest="") for more in ({}, wrong, {})]
    monkeypatch.setattr(inspect, "compile_case", lambda case, arch: result)
    text, bad = inspect.report_case("sm_90a", inspect.Case("gated_mlp", 16))
    assert bad == bool(wrong) and text.count("BAD") == len(wrong)
