"""What must hold before tiles, ops and attention can be imported, and what to say where it does not.

It imports the standard library, and NumPy once nothing is in the way. tiles imports it by name; ops and attention
run it by its path (`runpy`), before anything else: what Python finds under the name `tiles` may be somebody else's, and that is
what they have to say.
"""

import contextlib
import gc
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

VERSION = "0.1.0"  # of numba-tiles, for pyproject.toml and as `__version__` of each package
ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("tiles", "ops")  # packages that others of ours import by name
MARK = "importable"  # an __init__.py of ours names this module
SIMULATOR = (
    "NUMBA_ENABLE_CUDASIM is set, and Numba's simulator cannot run tiles. Unset it: tiles.launch runs kernels on NumPy arrays "
    "in an interpreter of its own, and with TILES_INTERPRET=1 kernels on device arrays, too"
)


def simulated() -> bool:
    """Does the environment select Numba's simulator?"""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def examining() -> bool:
    """Is this `python -m tiles doctor`? Then imports may fail: the doctor looks into that."""
    return sys.argv[:2] == ["-m", "doctor"]


def locate_package(name: str) -> Path | None:
    """The file or folder that Python takes for the package `name`: what is imported already, or would be."""
    if name in sys.modules:
        place = getattr(sys.modules[name], "__file__", None) or next(iter(getattr(sys.modules[name], "__path__", ())), None)
    elif spec := importlib.util.find_spec(name):
        place = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    else:
        place = None
    return Path(place).resolve() if place else None


def obstacle() -> str:
    """Why our packages cannot be imported here; empty if nothing speaks against it."""
    if examining():
        return ""
    if simulated():
        return SIMULATOR
    for name in NEEDED:
        place, home = locate_package(name), ROOT / name
        if place and place.parent != home:
            folder = place.parent if place.name == "__init__.py" else place
            return (
                f"{folder} shadows the package {name} of numba-tiles, {home}: Python finds it first under that name. "
                f"Rename it; or, if it is installed, remove it or put {ROOT} before it on sys.path"
            )
        if place and place.suffix == ".py" and MARK not in place.read_text(errors="replace"):
            return (
                f"{place} is another distribution's: installed beside numba-tiles, it overwrote our package {name}. "
                "Give each an environment of its own, and install numba-tiles again"
            )
    return ""


@contextlib.contextmanager
def uncollected():
    """Around imports, and where a kernel is compiled: no garbage is collected inside. Modules stay, and going through them
    again and again for what might be garbage takes a fifth of the time that Numba takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def row_stack():
    """Around the import of numba-cuda 0.30, which names numpy.row_stack once: NumPy 2.5 no longer has this alias of vstack."""
    numpy: Any = None
    with contextlib.suppress(Exception):  # who needs it will say what is wrong with it
        numpy = importlib.import_module("numpy")
    missing = numpy is not None and not hasattr(numpy, "row_stack")
    if missing:
        numpy.row_stack = numpy.vstack
    try:
        yield
    finally:
        if missing:
            del numpy.row_stack


@contextlib.contextmanager
def importing():
    """Around the imports of tiles/__init__.py: says what to do where they cannot work."""
    if reason := obstacle():
        raise ImportError(reason)
    try:
        with row_stack(), uncollected():
            yield
    except Exception as error:
        if examining():
            return
        if isinstance(error, (ImportError, AttributeError)):
            raise ImportError(f"{error}; `python -m tiles doctor` says what to do") from error
        raise
