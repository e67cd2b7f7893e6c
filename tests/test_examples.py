"""Every example runs: in the interpreter, as machine code that nobody has to apologise for, and on the card."""

import importlib
import json
import linecache
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import tiles
from tiles import bf16, fp16
from tiles.compiling.compiler import compile_kernel
from tiles.launching.arguments import parameters
from tiles.testing import ptx

FOLDER = Path(__file__).parents[1] / "examples"
LEVELS = sorted(f"gemm/{path.stem}" for path in FOLDER.glob("gemm/level_*.py"))
APART = "generate", "generate_hybrid", "long", "machine", "train"  # which have tests of their own, or none
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in APART) + LEVELS
LAUNCH = tiles.launch


@pytest.fixture
def launches(monkeypatch):
    """What the example launches, as [(kernel, types of the arguments)]; it is launched all the same."""
    seen = []

    def launch(kernel, *grid, **options):
        launched = LAUNCH(kernel, *grid, **options)

        def run(*args):
            seen.append((kernel, tuple(p.type for p in parameters(kernel, args))))
            launched(*args)

        return run

    monkeypatch.setattr(tiles, "launch", launch)
    return seen


def load(name, monkeypatch):
    """The example's module, as `python examples/name.py` finds it."""
    path = FOLDER / name
    monkeypatch.syspath_prepend(str(path.parent))
    return importlib.import_module(path.name)


def on_host(array):
    return array


# where else they run, in turn; the others multiply by wgmma, which Hopper alone has
ELSEWHERE = {"hello_tile": ["sm_80", "sm_120a"], "softmax": ["sm_89", "sm_100a"], "copy_tma": ["sm_120a"]}
ELSEWHERE |= {"sliding_window": ["sm_80"]}
# Levels between the first and the last are steps from one to the other.
BETWEEN = LEVELS[1:-1]
TARGETS = [pytest.param(name, "sm_90a", marks=[pytest.mark.release] * (name in BETWEEN)) for name in EXAMPLES]
TARGETS += [pytest.param(name, arch, marks=pytest.mark.release) for name in EXAMPLES for arch in ELSEWHERE.get(name, [])]


@pytest.mark.parametrize("name, arch", TARGETS)
def test_runs_in_the_interpreter_and_compiles(name, arch, monkeypatch, launches):
    """No spills, no local memory, no complaints of ptxas."""
    monkeypatch.setenv("TILES_CHECK", "0")  # compiling types what is launched, too
    load(name, monkeypatch).main(on_host)
    assert launches
    for kernel, signature in dict.fromkeys(launches):
        code = compile_kernel(kernel, signature, arch)
        prints = "print" in kernel.py_func.__code__.co_names  # printf takes its arguments from memory
        assert code.spill_bytes == 0 and not code.warnings, code.log
        assert code.local_bytes == 0 or prints, code.log


SIZES = {  # at and around the edges of tiles
    "copy_tma": [(64, 64), (1, 8), (65, 200), (63, 56)],
    "softmax": [(1, 1), (64, 128), (63, 129), (130, 1000)],
    "gemm": [(1, 8, 8), (128, 128, 64), (129, 136, 72), (64, 256, 640)],
    "flash_attention": [(1, 1), (128, 128), (127, 129), (129, 640)],
    "fftconv": [(1, 1, 1024), (5, 2, 1024), (3, 1, 4096)],
    "sliding_window": [(1, 1), (33, 1), (64, 32), (70, 100)],
    **{name: [(1, 8, 8), (128, 256, 64), (129, 264, 72), (64, 520, 328)] for name in LEVELS},
}


@pytest.mark.parametrize("name, sizes", [(name, sizes) for name, rows in SIZES.items() for sizes in rows])
def test_any_size(name, sizes, monkeypatch):
    monkeypatch.setenv("TILES_CHECK", "0")
    load(name, monkeypatch).main(on_host, *sizes)


def test_convolutions_as_compiled(monkeypatch):
    """Products of tiles in registers with complex ones in shared memory, two sequences below each other."""
    ptx(load("fftconv", monkeypatch).main, on_host, 1, 1, 1024, fp16)


def test_lengths_that_no_matrices_make(monkeypatch):
    u = np.zeros((1, 1, 2048), bf16.np)
    with pytest.raises(ValueError, match=r"u: sequences must have one of \(1024, 4096\) numbers.*2048"):
        load("fftconv", monkeypatch).fftconv(u, u, u, u, u)


@pytest.mark.gpu
@pytest.mark.smoke
@pytest.mark.parametrize("name", EXAMPLES)
def test_runs_on_the_card(name, monkeypatch):
    load(name, monkeypatch).main(load("machine", monkeypatch).on_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("name, sizes", [(name, sizes) for name, rows in SIZES.items() for sizes in rows])
def test_any_size_on_the_card(name, sizes, monkeypatch):
    load(name, monkeypatch).main(load("machine", monkeypatch).on_gpu, *sizes)


def test_runs_as_a_script():
    env = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    done = subprocess.run([sys.executable, FOLDER / "hello_tile.py"], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert "rt(16, 16, fp32)" in done.stdout
    numbers = np.array(re.findall(r"-?\d+\.\d{4}", done.stdout), float)
    np.testing.assert_array_equal(numbers, 2.0 * np.arange(256))


# ---- train.py, which launches what attention.forward does ------------------------------------------------------------
def trained(monkeypatch, path, *options, baseline="torch"):
    """Its losses and the baseline's, of a few steps."""
    for needed in "torch", "tqdm", "matplotlib":
        pytest.importorskip(needed)
    monkeypatch.setenv("TILES_CHECK", "0")
    runs = load("train", monkeypatch).main(["--baseline", baseline, "--quiet", "--png", str(path), *options])
    ours, theirs = ([x.item() for x in runs[name].losses] for name in ("attention", baseline))
    return ours, theirs


@pytest.mark.parametrize("mixer", ["softmax", "gated_delta", "kda", "mamba2", "hybrid"])
def test_trains_as_on_torch(mixer, monkeypatch, tmp_path):
    """Two trainings are drawn from the table."""
    pytest.importorskip("torch")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    picture, table = tmp_path / "curve.png", tmp_path / "losses.csv"
    table.write_text("mixer,model,step,loss,ms\nkda,torch,1,5.5,2\n")
    options = "--mixer", mixer, "--steps=3", f"--depth={1 + (mixer == 'hybrid')}", "--csv", str(table)
    ours, theirs = trained(monkeypatch, picture, *options)
    np.testing.assert_allclose(ours, theirs, atol=0.01)
    assert len({*ours}) == len(ours) == 3
    assert picture.read_bytes().startswith(b"\x89PNG") and len(table.read_text().splitlines()) == 2 + 2 * 3


@pytest.mark.parametrize("mixer", ["gated_delta", "kda"])
def test_trains_as_on_fla(mixer, monkeypatch, tmp_path):
    """flash-linear-attention's functions are called as they must be; compat's, of the same signatures, stand for them."""
    torch = pytest.importorskip("torch")
    from attention import short_conv
    from attention.compat import fla

    def rms_norm_gated(x, g, weight, bias, activation="swish", *, eps):
        norm = torch.nn.functional.rms_norm(x.float(), weight.shape, weight, eps)
        return (norm * {"swish": torch.nn.functional.silu, "sigmoid": torch.sigmoid}[activation](g.float())).to(x.dtype)

    conv = lambda x, weight, bias, activation: (short_conv(x, weight, bias, activation=activation), None)
    for name, functions in {
        "modules.norm.fused_norm_gate": {"rms_norm_gated": rms_norm_gated},
        "modules.causal_conv1d": {"causal_conv1d": conv},
        "ops.gated_delta_rule": vars(fla),
        "ops.kda": vars(fla),
    }.items():
        monkeypatch.setitem(sys.modules, f"fla.{name}", types.SimpleNamespace(**functions))
    for package in "fla", "fla.modules", "fla.modules.norm", "fla.ops":
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ours, theirs = trained(monkeypatch, tmp_path / "curve.png", "--mixer", mixer, "--steps=2", baseline="fla")
    np.testing.assert_allclose(ours, theirs, atol=0.01)


def test_two_processes_train_as_one_does_and_attend_to_a_long_sequence(tmp_path):
    for needed in "torch", "tqdm", "matplotlib":
        pytest.importorskip(needed)
    by_torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "TILES_CHECK": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    train = [str(FOLDER / "train.py"), "--quiet", "--eager", "--steps=2", "--png", str(tmp_path / "curve.png")]
    for options in [], ["--mixer=hybrid", "--depth=2"]:
        said = [
            subprocess.run([*how, *train, *options], env=environment, capture_output=True, text=True, check=True).stdout
            for how in ([sys.executable], by_torchrun)
        ]
        single_losses, pair_losses = (re.findall(r"loss ([\d.]+) -> ([\d.]+)", one) for one in said)
        np.testing.assert_allclose(np.array(pair_losses, float), np.array(single_losses, float), atol=0.005)
    long = [*by_torchrun, str(FOLDER / "long.py"), "--tokens=60", "--dim=16", "--quiet"]
    done = subprocess.run(long, env=environment, capture_output=True, text=True, check=True)
    assert "60 tokens, 2 heads of 1 of keys, on 2 x cpu" in done.stdout and "of perfect scaling" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["softmax", "mamba2", "hybrid"])
def test_trains_on_the_card(mixer, monkeypatch, tmp_path):
    small = "--mixer", mixer, "--steps=60", "--dim=256", "--depth=2", "--heads=4", "--kv-heads=2", "--tokens=512"
    ours, theirs = trained(monkeypatch, tmp_path / "curve.png", *small)
    np.testing.assert_allclose(ours[:10], theirs[:10], atol=0.02)
    assert abs(ours[-1] - theirs[-1]) < 0.1 and ours[-1] < 0.7 * ours[0]


# ---- generate.py, the same with models of transformers ----------------------------------------------------------------
def generated(monkeypatch, *options):
    """Its runs, of a few tokens."""
    for needed in "torch", "transformers":
        pytest.importorskip(needed)
    monkeypatch.setenv("TILES_CHECK", "0")
    return load("generate", monkeypatch).main(["--quiet", *options])


def test_generates_as_on_torch(monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    runs = generated(monkeypatch, "--tokens=6")
    assert (runs["tiles"].tokens == runs["sdpa"].tokens).all() and (runs["nothing"].tokens != runs["sdpa"].tokens).any()
    assert "tokens a second" in capsys.readouterr().out


@pytest.mark.gpu
def test_generates_on_the_card(monkeypatch):
    """A graph that was captured once serves lengths as they grow."""
    runs = generated(monkeypatch, "--dim=512", "--hidden=512", "--depth=2", "--heads=4", "--kv-heads=2", "--batch=3",
                     "--vocabulary=200", "--prompt=300", "--tokens=40")  # fmt: skip
    assert (runs["tiles"].tokens == runs["sdpa"].tokens).float().mean() > 0.5


def test_generates_with_caches(monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setenv("TILES_CHECK", "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert load("generate_hybrid", monkeypatch).main([]) < 0.02
    assert "3 tokens of 2 sequences" in capsys.readouterr().out


@pytest.mark.gpu
def test_generates_with_caches_on_the_card(monkeypatch):
    """Each step is one graph."""
    sizes = "--dim=256", "--depth=4", "--heads=4", "--kv_heads=2", "--batch=3", "--prompt=300", "--tokens=20"
    assert load("generate_hybrid", monkeypatch).main(sizes) < 0.02


NOTEBOOKS = sorted(FOLDER.glob("notebooks/*.ipynb"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_run(file, monkeypatch):
    """Cell by cell, with their source as Jupyter keeps it; they are stored without outputs. `.ci/release` runs them there."""
    monkeypatch.setenv("TILES_CHECK", "0")
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(file.read_text())["cells"]):
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
            source, name = "".join(cell["source"]), f"{file}, cell {number}"
            linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
            exec(compile(source, name, "exec"), namespace)
