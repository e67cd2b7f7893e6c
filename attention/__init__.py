"""FlashAttention and linear attention in pure Python: `attention.forward(q, k, v, causal=True)`.

A function is imported, and Numba with it, when it is first used: `import attention` alone costs nothing."""

import re as _re
from importlib import import_module as _import_module
from pathlib import Path as _Path
from runpy import run_path as _run_path
from typing import TYPE_CHECKING

_importable = _run_path(
    str(_Path(__file__).parents[1] / "tiles/importable.py")
)  # read by path: another package may be called `tiles`
if _why := _importable["obstacle"]():
    raise ImportError(_why)

__version__: str = _importable["VERSION"]

__all__ = [
    "append",
    "backward",
    "based",
    "based_backward",
    "block_lists",
    "decode",
    "delta_rule",
    "delta_rule_backward",
    "dropout_mask",
    "forward",
    "gated_rms_norm",
    "gated_rms_norm_backward",
    "gla",
    "hedgehog",
    "hedgehog_backward",
    "lightning",
    "linear",
    "linear_backward",
    "linear_step",
    "mamba2",
    "mamba2_backward",
    "mla_decode",
    "quantize",
    "register_torch_ops",
    "retention",
    "short_conv",
    "short_conv_backward",
]

_MODULES = {  # module: its public functions
    "public.cache_append": ("append",),
    "public.cache_quantize": ("quantize",),
    "dropout": ("dropout_mask",),
    "public.mla_decoding": ("mla_decode",),
    "public.based_features": ("based",),
    "public.based_gradients": ("based_backward",),
    "public.delta_gradients": ("delta_rule_backward",),
    "public.delta_rules": ("delta_rule",),
    "public.gated_norms": ("gated_rms_norm", "gated_rms_norm_backward"),
    "public.hedgehog_features": ("hedgehog",),
    "public.hedgehog_gradients": ("hedgehog_backward",),
    "public.linear_family": ("gla", "lightning", "linear", "retention"),
    "public.linear_gradients": ("linear_backward",),
    "public.mamba": ("mamba2",),
    "public.mamba_gradients": ("mamba2_backward",),
    "public.short_convolution": ("short_conv", "short_conv_backward"),
    "public.token_steps": ("linear_step",),
    "public.softmax_backward": ("backward",),
    "public.decoding": ("decode",),
    "public.softmax_forward": ("block_lists", "forward"),
    "torch_ops": ("register_torch_ops",),
}

_SUBMODULES = "cache", "compat", "gates", "nn", "parallel", "reference"

if TYPE_CHECKING:  # for editors and type checkers
    from . import gates as gates
    from .dropout import dropout_mask
    from .public.based_features import based
    from .public.based_gradients import based_backward
    from .public.cache_append import append
    from .public.cache_quantize import quantize
    from .public.decoding import decode
    from .public.delta_gradients import delta_rule_backward
    from .public.delta_rules import delta_rule
    from .public.gated_norms import gated_rms_norm, gated_rms_norm_backward
    from .public.hedgehog_features import hedgehog
    from .public.hedgehog_gradients import hedgehog_backward
    from .public.linear_family import gla, lightning, linear, retention
    from .public.linear_gradients import linear_backward
    from .public.mamba import mamba2
    from .public.mamba_gradients import mamba2_backward
    from .public.mla_decoding import mla_decode
    from .public.short_convolution import short_conv, short_conv_backward
    from .public.softmax_backward import backward
    from .public.softmax_forward import block_lists, forward
    from .public.token_steps import linear_step
    from .torch_ops import register_torch_ops
else:

    def __getattr__(name: str) -> object:
        """Import the public function of this name, and make it an ordinary attribute of the package."""
        if name in _SUBMODULES:  # attention.gates.softplus(..), attention.nn.Attention(..)
            return _import_module(f".{name}", __name__)
        for module, names in _MODULES.items():
            if name in names:
                with _importable["uncollected"]():
                    function = globals()[name] = getattr(_import_module(f".{module}", __name__), name)
                return function
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_homes(name)}")

    def _homes(name: str) -> str:
        """Which modules of attention.compat have another library's function of this name, for an error; "" if none."""
        definition = _re.compile(rf"^(def {name}\(|{name} = )", _re.MULTILINE)
        modules = [] if name.startswith("_") else sorted((_Path(__file__).parent / "compat").glob("*.py"))
        homes = [f"attention.compat.{path.stem}" for path in modules if definition.search(path.read_text("utf-8"))]
        return f"; {' and '.join(homes)} {'has' if len(homes) == 1 else 'have'} it" if homes else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
