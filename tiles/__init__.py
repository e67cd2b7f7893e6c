"""Tiles for Numba-CUDA: what a tile is, where its elements lie, and how a kernel made of them is launched."""

from .importable import VERSION, importing

__version__: str = VERSION

with importing():
    from .compiling import sources  # before the others: it digests what they are read from  # noqa: F401
    from .dtypes import bf16, dtype, fp8e4m3, fp8e5m2, fp16, fp32, int8, int32, tf32
    from .inspect import inspect
    from .interpreter import Hazard
    from .launching.frameworks import persistent_blocks, processors
    from .launching.launch import launch
    from .op import inlined, lowers, op
    from .pipeline import pipeline
    from .profile import profile
    from .ring import ring
    from .shared import shared
    from .static import static
    from .types import barrier, gl, pending, rt, rv, st, sv
    from .values import Tile, tensor

__all__ = [
    "Hazard", "Tile", "barrier", "bf16", "dtype", "fp8e4m3", "fp8e5m2", "fp16", "fp32", "gl", "inlined", "inspect", "int8",
    "int32", "launch", "lowers", "op", "pending", "persistent_blocks", "pipeline", "processors", "profile", "ring", "rt", "rv",
    "shared", "st", "static", "sv", "tensor", "tf32",
]  # fmt: skip
