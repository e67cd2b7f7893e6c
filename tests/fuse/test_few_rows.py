"""fuse/specimens: the few-rows template, by hand. Each module in the interpreter at ragged sizes against float64, compiled for
the card with no spills, and the schedules."""

import importlib.util
import itertools
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tiles import bf16
from tiles.compiler import compile_kernel

SPECIMENS = Path(__file__).parents[2] / "fuse" / "specimens"
LINE = re.compile(r"ROWS, COLUMNS, DEPTH, BLOCKS, STAGES, AHEAD = .*")
LONGEST = 80  # lines of a printed module


def load(path, name):
    """The module in a file."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


schedule = load(SPECIMENS / "schedule.py", "few_rows_schedule").schedule


BY_ROWS = {  # what else differs for weights (N, K): the tile, where it lies, and that it is not transposed
    "W = st(DEPTH, COLUMNS, bf16)": "W = st(COLUMNS, DEPTH, bf16)",
    "st(ROWS, DEPTH, bf16), st(DEPTH, COLUMNS, bf16)": "st(ROWS, DEPTH, bf16), st(COLUMNS, DEPTH, bf16)",
    "(first + i, col)": "(col, first + i)",
    "k, n = ": "n, k = ",
    "mm_AtBt(subtile": "mm_ABt(subtile",
    "mma_AtBt(acc, subtile(w": "mma_ABt(acc, subtile(w",
    "mma_AtBt(acc, subtile(gate": "mma_ABt(acc, subtile(gate",
    "mma_AtBt(acc2, subtile(up": "mma_ABt(acc2, subtile(up",
    "i), DEPTH, 0, 64, me)": "i), 64, me)",
    "wait(0), DEPTH, 0, 64, me)": "wait(0), 64, me)",
}


def specimen(name, folder, values, by_rows=False):
    """The module with other constants, and for weights (N, K): what a printer varies."""
    text, found = LINE.subn(f"ROWS, COLUMNS, DEPTH, BLOCKS, STAGES, AHEAD = {values}", (SPECIMENS / f"{name}.py").read_text())
    assert found == 1
    for given, other in BY_ROWS.items() if by_rows else ():
        text = text.replace(given, other)
    path = folder / f"{name}.py"
    path.write_text(text)
    return load(path, f"{folder.name}_{name}")


def normal(*shape):
    return (np.random.default_rng(len(shape)).standard_normal(shape, np.float32)).astype(bf16.np)


def wide(*arrays):
    return [a.astype(np.float64) for a in arrays]


def rms_norm_linear(m, k, n):
    """(arguments, the result in float64, what it is a sum of)"""
    args = normal(m, k), normal(k), normal(k, n)
    x, g, w = wide(*args)
    u = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * g
    return args, u @ w, abs(u) @ abs(w)


def lora_linear(m, k, n):
    args = normal(m, k), normal(k, n), normal(k, 16), normal(16, n)
    x, w, a, b = wide(*args)
    return args, x @ w + x @ a @ b, abs(x) @ abs(w) + abs(x @ a) @ abs(b) + 2 * k**0.5 * abs(b).sum(0)


def gated_mlp(m, k, n):
    args = normal(m, k), normal(k, n), normal(k, n)
    x, gate, up = wide(*args)
    h = x @ gate
    return args, h / (1 + np.exp(-h)) * (x @ up), abs(h) * (abs(x) @ abs(up))


CASES = [
    (rms_norm_linear, (17, 264, 136), (32, 128, 64, 2, 3, 2)),
    (rms_norm_linear, (64, 264, 72), (64, 64, 64, 4, 2, 2)),
    (lora_linear, (1, 328, 72), (16, 64, 128, 2, 2, 4)),
    (lora_linear, (49, 200, 136), (64, 128, 64, 4, 2, 2)),
    (gated_mlp, (5, 328, 72), (16, 64, 64, 2, 2, 2)),
    (gated_mlp, (33, 200, 136), (64, 128, 64, 1, 3, 2)),
]


@pytest.mark.parametrize(("operator", "sizes", "values"), CASES)
def test_meaning(tmp_path, operator, sizes, values):
    args, exact, size = operator(*sizes)
    y = np.full(exact.shape, np.nan, bf16.np)
    specimen(operator.__name__, tmp_path, values).launch(*args, y)
    assert (abs(y.astype(np.float64) - exact) <= 2**-8 * abs(exact) + 2**-9 * size).all()


def by_rows(operator, args):
    """The arguments with weights as (N, K)."""
    weights = {rms_norm_linear: (2,), lora_linear: (1,), gated_mlp: (1, 2)}[operator]
    return [np.ascontiguousarray(a.T) if k in weights else a for k, a in enumerate(args)]


@pytest.mark.parametrize("operator", [lora_linear, gated_mlp])
def test_weights_by_rows(tmp_path, operator):
    args, exact, size = operator(5, 200, 72)
    y = np.full(exact.shape, np.nan, bf16.np)
    specimen(operator.__name__, tmp_path, (16, 64, 128, 1, 2, 4), by_rows=True).launch(*by_rows(operator, args), y)
    assert (abs(y.astype(np.float64) - exact) <= 2**-8 * abs(exact) + 2**-9 * size).all()


MADE = {rms_norm_linear: {"prepared": True}, lora_linear: {"rank": 16}, gated_mlp: {"weights": 2}}
CHOSEN = [  # on an H200: with what of bench/NOTES.md was best, or within 1 % of it
    (rms_norm_linear, (16, 4096, 6144), (16, 128, 128, 2, 5, 4)),
    (lora_linear, (16, 4096, 4096), (16, 64, 128, 2, 9, 8)),
    (lora_linear, (16, 256, 4096), (16, 64, 128, 1, 2, 4)),
    (gated_mlp, (8, 4096, 4096), (16, 64, 128, 2, 6, 6)),
    (gated_mlp, (8, 4096, 14336), (16, 64, 128, 1, 6, 6)),
]


@pytest.mark.parametrize(("operator", "sizes", "values"), CHOSEN)
def test_chosen(operator, sizes, values):
    assert schedule(*sizes, 132, **MADE[operator]) == values


@pytest.mark.parametrize("operator", MADE)
def test_schedules_fit(tmp_path, operator):
    """Their rings have room, whatever the sizes."""
    found = {schedule(*s, 132, **MADE[operator]) for s in itertools.product((1, 17, 64), (64, 256, 4096), (64, 4096, 14336))}
    for k, values in enumerate(found):
        folder = tmp_path / str(k)
        folder.mkdir()
        assert specimen(operator.__name__, folder, tuple(values)).smem.nbytes <= 227 * 2**10, values


def test_too_many_rows():
    with pytest.raises(ValueError, match="few rows are up to 64, got rows=65"):
        schedule(65, 4096, 4096, 132)


class Typed(Exception):
    """A launch was about to be made."""


def test_no_spills(tmp_path, monkeypatch, operator=rms_norm_linear, sizes=(64, 4096, 6144)):
    """The one that needs most registers, as it is compiled for the card."""
    seen = []

    def watch(kernel, types, *_):
        seen.append((kernel, types))
        raise Typed

    monkeypatch.setattr(sys.modules["tiles.launch"], "watchers", [watch])
    args, exact, _ = operator(16, 64, 64)
    with pytest.raises(Typed):
        specimen(operator.__name__, tmp_path, tuple(schedule(*sizes, 132, **MADE[operator]))).launch(
            *args, exact.astype(bf16.np)
        )
    compiled = compile_kernel(*seen[0], "sm_90a")
    assert not compiled.warnings and " 0 bytes spill stores" in compiled.log


@pytest.mark.parametrize("path", sorted(SPECIMENS.glob("*_*.py")), ids=lambda path: path.stem)
def test_a_page(path):
    assert len(path.read_text().splitlines()) <= LONGEST
