"""`import attention` does not import Numba; its functions are visible nevertheless to users, editors and pickle."""

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import attention

SOURCE = Path(attention.__file__).read_text()


def test_import_alone_is_light():
    """Numba takes most of a second to import, and is imported only when needed."""
    code = "import sys, attention; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    heavy = {"numba", "numba_cuda", "llvmlite", "cuda", "numpy", "ml_dtypes", "greenlet", "tiles", "ops"}
    assert "attention" in run.stdout.split() and not heavy & set(run.stdout.split())


WAITS = """
import importlib.abc, importlib.util, sys, threading, time
import torch
from attention.plans.softmax.forward_programs import autograd

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "attention.autograd":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (begun.set(), time.sleep(0.3), run(module))
            return spec

begun, thread = threading.Event(), threading.Thread(target=autograd)
sys.meta_path.insert(0, Slow())
thread.start(), begun.wait()
assert hasattr(autograd(), "make_tma_contiguous") and autograd() is sys.modules["attention.autograd"]
thread.join()
"""


def test_what_another_thread_imports_is_waited_for():
    """The first call with a signature may prepare its gradient in a thread while the next call needs it."""
    pytest.importorskip("torch")
    run = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", attention.__all__)
def test_each_function_is_one_object(name):
    function = getattr(attention, name)
    assert callable(function) and function is getattr(attention, name) and name in dir(attention)
    assert function is getattr(importlib.import_module(function.__module__), name)
    assert pickle.loads(pickle.dumps(function)) is function


def test_from_import():
    space = {}
    exec("from attention import forward, linear\nfrom attention import *", space)
    assert space["forward"] is attention.forward and set(attention.__all__) <= set(space)


def test_modules_are_attributes():
    assert attention.gates is importlib.import_module("attention.gates") and attention.cache.PagedCache


def test_what_does_not_exist():
    with pytest.raises(AttributeError, match="module 'attention' has no attribute 'backwards'"):
        attention.backwards  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'backwards'"):
        from attention import backwards  # noqa: F401


def test_editors_read_what_is_imported():
    """The imports for type checkers, the table of modules and __all__ agree."""
    [block] = [node for node in ast.parse(SOURCE).body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    read = {node.module: tuple(alias.name for alias in node.names) for node in block.body}
    assert read == attention._MODULES | {None: ("gates",)}  # a module
    del read[None]
    assert sorted(name for names in read.values() for name in names) == sorted(attention.__all__)
