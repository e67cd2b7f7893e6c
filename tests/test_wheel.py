"""What pip installs, works: a wheel built from the tree, in a folder of its own, used from elsewhere; and what a release says
of itself."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tiles

ROOT = Path(__file__).parents[1]
PACKAGES = ("tiles", "ops", "attention", "fuse")
KINDS = ".py", ".jinja"
USE = """
import numpy as np
import attention, fuse, ops, tiles
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 40, 2, 64), np.float32).astype(tiles.bf16.np)
out = attention.forward(q, k, v, causal=True)
assert np.array_equal(out[:, 0], v[:, 0])
x, w = q[0, :, 0], q[0, :40, 1].T
assert fuse.kernel(lambda x, w: fuse.relu(x @ w)).run(x, w).shape == (40, 40)
print(attention.__file__, ops.__file__, tiles.__file__, sep="\\n")
"""


def run(*command, cwd, **variables):
    """What a command printed that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **variables}, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the tree: setuptools leaves a build folder behind, and takes old files from one that is there."""
    tree, folder = tmp_path_factory.mktemp("tree") / "numba-tiles", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
    new = int(importlib.metadata.version("setuptools").partition(".")[0]) >= 77
    pip_options = ["--no-build-isolation"] if new else []  # else pip fetches one that is new enough
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *pip_options, "-w", str(folder), str(tree), cwd=folder)
    [file] = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """The folder that it is installed into."""
    folder = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), str(wheel), cwd=folder)
    return folder


def test_all_packages_are_inside(wheel):
    """Every module, template and mark for type checkers of the tree, and nothing else: no tests, benchmarks or examples."""
    tree_files = [file for name in PACKAGES for file in (ROOT / name).rglob("*")]
    files = [file for file in tree_files if file.suffix in KINDS or file.name == "py.typed"]
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == {file.relative_to(ROOT).as_posix() for file in files}


@pytest.mark.release  # .ci/smoke.py, too, uses what was installed from a wheel
def test_attention_runs_from_it(site, tmp_path):
    places = run(sys.executable, "-c", USE, cwd=tmp_path, PYTHONPATH=str(site)).splitlines()
    assert places == [str(site / name / "__init__.py") for name in ("attention", "ops", "tiles")]


@pytest.mark.release
def test_the_doctor_comes_with_it(site, tmp_path):
    report = run(sys.executable, "-m", "tiles", "doctor", cwd=tmp_path, PYTHONPATH=str(site))
    assert "tiles works here" in report and str(site / "ops") in report
    assert f"in the source distribution, numba_tiles-{tiles.__version__}.tar.gz" in report


def test_it_has_the_version_of_the_packages(wheel):
    assert wheel.name.split("-")[1] == tiles.__version__


def messages(pattern):
    """(file, text) of the strings of all modules that have this pattern and are no docstrings: what errors and reports are made
    of."""
    for file in (file for name in PACKAGES for file in (ROOT / name).rglob("*.py")):
        text = file.read_text()
        if not pattern.search(text):  # most have none, and to parse a file takes longer
            continue
        tree = ast.parse(text)
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and id(node) not in statements and pattern.search(node.value):
                yield file, node.value


def test_messages_name_no_file_that_it_lacks():
    """Where pip installed the wheel there are no docs, examples and tests."""
    lacking = re.compile(r"\b(docs|examples|bench|tests)/\w|\b(README|CONTRIBUTING)\b")
    actual = [(file.relative_to(ROOT).as_posix(), text) for file, text in messages(lacking)]
    assert actual == []


def test_files_of_a_release_name_its_version():
    """The next section of CHANGELOG.md, and CITATION.cff."""
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == tiles.__version__
    assert re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.M)[1] == tiles.__version__
