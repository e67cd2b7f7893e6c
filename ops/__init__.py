"""What can be done to tiles, for use inside kernels. Scope warp here; `ops.warpgroup` for four warps together; `ops.raw`
for the instructions without their guards."""

from . import convert as _convert  # dtypes become callable  # noqa: F401
from . import mma, raw, warpgroup
from . import show as _show  # print takes tiles  # noqa: F401
from .copy import commit_group, copy_async, wait_group
from .index import split
from .make import full, zeros
from .maps import exp, exp2, log2, maximum, minimum
from .mask import causal, right_fill
from .memory import load, store
from .mma import mma_AB, mma_ABt
from .online import lazy_maximum, rescale
from .reduce import lane_sum, row_max, row_sum, total
from .schedule import grouped, snake
from .subtile import subtile

__all__ = [
    "causal", "commit_group", "copy_async", "exp", "exp2", "full", "grouped", "lane_sum", "lazy_maximum", "load", "log2",
    "maximum", "minimum", "mma", "mma_AB", "mma_ABt", "raw", "rescale", "right_fill", "row_max", "row_sum", "snake",
    "split", "store", "subtile", "total", "wait_group", "warpgroup", "zeros",
]  # fmt: skip
