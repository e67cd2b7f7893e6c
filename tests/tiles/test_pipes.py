"""tiles/pipes.py: a command whose reader leaves."""

import subprocess
import sys
from pathlib import Path

import pytest

from tiles.pipes import STOPPED

ROOT = Path(__file__).parents[2]


LAYOUT, SHOW = ["tiles", "layout", "rt", "64", "256", "bf16"], ["attention", "show", "--causal"]


@pytest.mark.parametrize("command", [LAYOUT, pytest.param(SHOW, marks=pytest.mark.release)])
def test_no_word_of_a_reader_that_left(command):
    running = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    running.stdout.close()
    assert "Traceback" not in running.stderr.read() and running.wait() == STOPPED
