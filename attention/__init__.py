"""FlashAttention and linear attention in pure Python: `attention.forward(q, k, v, causal=True)`.

A function is imported, and Numba with it, when it is first used: `import attention` alone costs nothing."""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from runpy import run_path as _run_path
from typing import TYPE_CHECKING

_importable = _run_path(
    str(_Path(__file__).parents[1] / "tiles/importable.py")
)  # read by path: another package may be called `tiles`
if _why := _importable["obstacle"]():
    raise ImportError(_why)

__all__ = [
    "append",
    "backward",
    "based",
    "block_lists",
    "decode",
    "delta_rule",
    "dropout_mask",
    "forward",
    "gla",
    "hedgehog",
    "lightning",
    "linear",
    "linear_step",
    "mamba2",
    "mla_decode",
    "quantize",
    "register_torch_ops",
    "retention",
]

_HOMES = {  # module: its public functions
    "cache.append": ("append",),
    "cache.quantize": ("quantize",),
    "dropout": ("dropout_mask",),
    "mla.decode": ("mla_decode",),
    "recurrent.based": ("based",),
    "recurrent.delta_rule": ("delta_rule",),
    "recurrent.hedgehog": ("hedgehog",),
    "recurrent.linear": ("gla", "lightning", "linear", "retention"),
    "recurrent.mamba2": ("mamba2",),
    "recurrent.step": ("linear_step",),
    "softmax.backward.backward": ("backward",),
    "softmax.decode.decode": ("decode",),
    "softmax.forward": ("block_lists", "forward"),
    "torch_ops": ("register_torch_ops",),
}

if TYPE_CHECKING:  # for editors and type checkers
    from .cache.append import append
    from .cache.quantize import quantize
    from .dropout import dropout_mask
    from .mla.decode import mla_decode
    from .recurrent.based import based
    from .recurrent.delta_rule import delta_rule
    from .recurrent.hedgehog import hedgehog
    from .recurrent.linear import gla, lightning, linear, retention
    from .recurrent.mamba2 import mamba2
    from .recurrent.step import linear_step
    from .softmax.backward.backward import backward
    from .softmax.decode.decode import decode
    from .softmax.forward import block_lists, forward
    from .torch_ops import register_torch_ops
else:

    def __getattr__(name: str) -> object:
        """Import the public function of this name, and make it an ordinary attribute of the package."""
        for home, names in _HOMES.items():
            if name in names:
                with _importable["uncollected"]():
                    function = globals()[name] = getattr(_import_module(f".{home}", __name__), name)
                return function
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
