"""Describe the maths, get a fused kernel that you can read, with a proof.

    import fuse
    from fuse import mean, rsqrt

    @fuse.kernel
    def norm_linear(x, g, w):                       # (M, K), (K,), (K, N)
        return (x * rsqrt(mean(x * x) + 1e-5) * g) @ w

    y = norm_linear(x, g, w)            # on NumPy arrays what it says; on a GPU's arrays fused kernels
    print(norm_linear.source(x, g, w))  # these kernels, in tiles and ops
    print(norm_linear.proof(x, g, w))   # what was proven about them, and how

language/ has the functions that definitions are written with, algebra/ the rules, templates/ the kernels.
"""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from runpy import run_path as _run_path

if _why := _run_path(str(_Path(__file__).parents[1] / "tiles/importable.py"))["obstacle"]():  # `tiles` may be another's
    raise ImportError(_why)

from tiles import __version__ as __version__

from .calls.fused import Fused, compile, kernel
from .calls.torch_backend import backend
from .language.functions import *  # noqa: F403
from .language.functions import __all__ as _functions

__all__ = ["Fused", "backend", "compile", "kernel", *_functions]


def __getattr__(name: str) -> object:
    if name == "operators":  # imported when it is first asked for
        return _import_module("fuse.operators")
    written = f"a fused function is written with operators and {', '.join(_functions)}"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; {written}")
