"""The specimens for many rows: in the interpreter at ragged sizes, and as machine code that nobody has to apologise for."""

import linecache
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tiles
from tiles import bf16
from tiles.arguments import parameters
from tiles.compiler import compile_kernel

sys.path.append(str(Path(__file__).parents[2] / "fuse" / "specimens"))
from narrow_product import narrow_product
from normalise_rows import normalise_rows
from schedule import Schedule, chosen, printed

NAMES = "rms_norm_linear", "lora_linear", "gated_mlp"
WIDE, NARROW = Schedule(256, 4, 4, 16, 1), Schedule(128, 2, 4, 16, 1)
LAUNCH = tiles.launch


@pytest.fixture
def launches(monkeypatch):
    """What is launched, as [(kernel, types of the arguments)]; it runs all the same."""
    seen = []

    def launch(kernel, *grid, **options):
        launched = LAUNCH(kernel, *grid, **options)

        def run(*args):
            seen.append((kernel, [p.type for p in parameters(kernel, args)]))
            launched(*args)

        return run

    monkeypatch.setattr(tiles, "launch", launch)
    return seen


def module(name, schedule, transposed):
    """A specimen with another schedule, run as a module."""
    text, file = printed(name, schedule, transposed), f"<{name}, {schedule}, {transposed}>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file
    space = {"__name__": name}
    exec(compile(text, file, "exec"), space)
    return SimpleNamespace(**space)


def random(rng, *shape):
    return rng.standard_normal(shape, np.float32).astype(bf16.np)


def exact(x):
    return x.astype(np.float64)


def rounded(x):
    return exact(x.astype(bf16.np))


def silu(x):
    return x / (1 + np.exp(-x))


def normed(x, g):
    return exact(x) / np.sqrt((exact(x) ** 2).mean(-1, keepdims=True) + 1e-5) * exact(g)


def problem(name, m, k, n, rank=16):
    """(arguments but y and scratch, which of them are weights, scratch, what y should be, the same rounded step by step)"""
    rng = np.random.default_rng(0)
    x, w = random(rng, m, k), random(rng, k, n)
    if name == "rms_norm_linear":
        g, normal = random(rng, k), None
        normal = normed(x, g)
        return (x, g, w), (2,), [np.empty_like(x)], normal @ exact(w), rounded(normal) @ exact(w)
    if name == "lora_linear":
        a, b = random(rng, k, rank), random(rng, rank, n)
        low = exact(x) @ exact(a)
        y = exact(x) @ exact(w)
        parts = rounded(y) + rounded(rounded(low) @ exact(b))
        return (x, w, a, b), (1, 3), [np.empty((m, rank), bf16.np)], y + low @ exact(b), parts
    up = random(rng, k, n)
    gate, other = exact(x) @ exact(w), exact(x) @ exact(up)
    return (x, w, up), (1, 2), [], silu(gate) * other, rounded(silu(rounded(gate))) * rounded(other)


def agree(name, specimen, transposed, m, k, n):
    given, weights, scratch, want, parts = problem(name, m, k, n)
    given = [np.ascontiguousarray(v.T) if transposed and i in weights else v for i, v in enumerate(given)]
    y = np.full((m, n), np.nan, bf16.np)
    getattr(specimen, name)(*given, y, *scratch)
    error, allowed = np.abs(exact(y) - want), 2 * np.abs(rounded(parts) - want).max()
    assert (error <= allowed + 2**-8 * np.abs(want)).all(), error.max() / allowed


@pytest.mark.parametrize("name", NAMES)
def test_agrees(name):
    """More rows than a tile, columns and k at no multiple of one, and several tiles a block."""
    agree(name, module(name, WIDE, False), False, 136, 72, 520)


@pytest.mark.parametrize("name", NAMES)
def test_transposed_weights_and_narrow_tiles(name):
    agree(name, module(name, NARROW, True), True, 8, 200, 136)


def test_192_columns():
    agree("rms_norm_linear", module("rms_norm_linear", Schedule(192, 3, 4, 4, 1), True), True, 8, 8, 200)


def test_compiles(launches):
    """No spills, no local memory, no complaints of ptxas: the one with most in its registers."""
    agree("gated_mlp", module("gated_mlp", WIDE, True), True, 8, 8, 8)
    code = compile_kernel(*launches[-1], "sm_90a")
    assert (code.spill_bytes, code.local_bytes, code.warnings) == (0, 0, []), code.log


def test_text():
    for name in NAMES:
        text = printed(name, WIDE)
        assert text == (Path(sys.modules["schedule"].__file__).parent / f"{name}.py").read_text()
        assert text.count("\n") <= 80


def test_row_kernels_at_the_edges():
    rng = np.random.default_rng(1)
    for m, k in (1, 8), (33, 520):
        x, g, a = random(rng, m, k), random(rng, k), random(rng, k, 16)
        y, low = np.full((m, k), np.nan, bf16.np), np.full((m, 16), np.nan, bf16.np)
        normalise_rows(x, g, y)
        narrow_product(x, a, low)
        np.testing.assert_allclose(exact(y), normed(x, g), rtol=2**-7, atol=1e-6)
        np.testing.assert_allclose(exact(low), exact(x) @ exact(a), rtol=2**-8, atol=1e-3)


def test_chosen():
    assert chosen(4096, 4096, 6144) == (256, 4, 4, 16, 6)
    assert chosen(512, 4096, 6144)[:2] == (192, 3) and chosen(512, 4096, 6144).waves == 1
    assert chosen(4096, 4096, 14336, weights=2).columns == 256
    assert chosen(128, 4096, 4096).columns == 128
