"""Somebody else's tiles, ops or attention, found before ours: the import says which file is in the way, and what to do."""

import contextlib
import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiles import importable

ROOT = Path(__file__).parents[2]


def run(folder, code, *path):
    """A script user.py in `folder`, which Python then searches first; ours is what PYTHONPATH ends with."""
    (folder / "user.py").write_text(code)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    return subprocess.run([sys.executable, folder / "user.py"], capture_output=True, text=True, env=env, timeout=200)


def refused(done, folder, name):
    """The last line of a traceback names the file in the way, our package, and the cure."""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {folder} shadows the package {name} of numba-tiles, {ROOT / name}:"), done.stderr
    assert "Rename it" in last and "doctor" not in last
    return True


@pytest.mark.parametrize(
    "code",
    ["import attention", "from attention import forward", "import tiles", "import ops, attention", "import ops, tiles"],
)
def test_an_ops_py_beside_the_script(code, tmp_path):
    (tmp_path / "ops.py").write_text("mine = 1\n")
    assert refused(run(tmp_path, code), tmp_path / "ops.py", "ops")


@pytest.mark.parametrize("code", ["import attention", "import ops", "from ops import exp2", "import tiles, ops"])
def test_a_tiles_py_beside_the_script(code, tmp_path):
    (tmp_path / "tiles.py").write_text("mine = 1\n")
    assert refused(run(tmp_path, code), tmp_path / "tiles.py", "tiles")


def test_another_package_before_ours(tmp_path):
    """As a package installed by somebody else: its folder is named, and the other cures."""
    (tmp_path / "site/ops").mkdir(parents=True)
    (tmp_path / "site/ops/__init__.py").write_text("")
    done = run(tmp_path, "import attention", tmp_path / "site")
    assert refused(done, tmp_path / "site/ops", "ops") and f"put {ROOT} before it on sys.path" in done.stderr


def test_what_harms_nobody(tmp_path):
    """Folders without an __init__.py come after packages; and a script named attention.py may use tiles and ops."""
    for name in ("ops", "tiles"):
        (tmp_path / name).mkdir()
    (tmp_path / "attention.py").write_text("import tiles, ops\n")
    done = run(tmp_path, "import attention, sys; print(attention.__file__, ops := sys.modules['ops'].exp2.__name__)")
    assert done.stdout.split() == [str(tmp_path / "attention.py"), "exp2"], done.stderr


def test_a_folder_before_an_editable_install(tmp_path):
    """Setuptools' finder for those is asked last: there even a folder without an __init__.py is in the way."""
    (tmp_path / "ops").mkdir()
    code = f"""
import sys
from importlib.machinery import PathFinder

class Editable:
    find_spec = lambda name, path=None, target=None: None if path else PathFinder.find_spec(name, [{str(ROOT)!r}])

sys.path.remove({str(ROOT)!r})
sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Editable)
import attention
"""
    assert refused(run(tmp_path, code), tmp_path / "ops", "ops")


def test_a_package_that_overwrote_ours(tmp_path):
    """pip installs two distributions with a package `ops` into one folder, one over the other."""
    site = tmp_path / "site"
    for name in importable.NEEDED:
        shutil.copytree(ROOT / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "ops/__init__.py").write_text("class CharmBase: ...\n")
    last = run(tmp_path, "import tiles", site).stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {site / 'ops/__init__.py'} is another distribution's"), last
    assert "environment of its own" in last


def test_ours_are_marked():
    assert importable.obstacle() == ""
    assert all(importable.MARK in (ROOT / name / "__init__.py").read_text() for name in importable.NEEDED)


@pytest.mark.parametrize("name", ["attention", "ops", "tiles"])
def test_numba_s_simulator_is_refused_at_once(name, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    done = run(tmp_path, f"import {name}")
    assert done.stderr.strip().splitlines()[-1] == f"ImportError: {importable.SIMULATOR}"


@pytest.mark.parametrize("enabled", [False, True])
def test_garbage_is_left_while_modules_are_imported(enabled):
    """And collected again afterwards, if it was before, also where an import fails."""
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with contextlib.suppress(ImportError), importable.uncollected():
            assert not gc.isenabled()
            with importable.uncollected():
                pass
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_numpy_without_row_stack():
    """NumPy 2.5 no longer has it, numba-cuda 0.30 names it, and afterwards nobody sees that it was there."""
    code = """
import numpy
numpy.__dict__.pop("row_stack", None)
others = numpy.__getattr__
def without(name):
    if name == "row_stack":
        raise AttributeError(name)
    return others(name)
numpy.__getattr__ = without
import tiles
assert not hasattr(numpy, "row_stack")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
