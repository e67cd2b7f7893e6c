"""The project of one's own in examples/template passes where it is copied to, and the pages show what stands there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "examples" / "template"
IGNORED = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")


def test_passes_outside_the_repository(tmp_path):
    """Its tests are found, and by meaning and as compiled they pass; what the plugin says of a GPU is said there, too."""
    project = shutil.copytree(TEMPLATE, tmp_path / "project", ignore=IGNORED)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TILES"))}
    environment |= {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not gpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=project, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"rootdir: {project}" in done.stdout and re.search(r"\d\d passed, \d deselected", done.stdout), done.stdout
    assert "warning" not in done.stdout, done.stdout


@pytest.mark.parametrize(("page", "count"), [("docs/op.md", 2), ("docs/kernel.md", 1)])
def test_the_pages_show_it(page, count):
    """A block of `py` is a piece of one of its files. (What `python` blocks say runs: test_documents.py.)"""
    shown = re.findall(r"^```py\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    files = [file.read_text() for file in TEMPLATE.rglob("*.py")]
    assert len(shown) == count and all(any(block in file for file in files) for block in shown)
