"""What can be done to tiles, for use inside kernels. Scope warp here; `ops.warpgroup` for four warps together, `ops.block` for
all of a block, `ops.cluster` for several blocks; `ops.raw` for the instructions without their guards."""

from pathlib import Path as _Path
from runpy import run_path as _run_path

if _why := _run_path(str(_Path(__file__).parents[1] / "tiles/importable.py"))["obstacle"]():  # `tiles` may be another's
    raise ImportError(_why)

from . import block, cluster, complex, mma, raw, warpgroup
from . import convert as _convert  # dtypes become callable  # noqa: F401
from . import show as _show  # print takes tiles  # noqa: F401
from .bulk import prefetch
from .compare import equal, greater, greater_equal, less, less_equal, not_equal, where
from .copy import commit_group, copy_async, wait_group
from .functions import (
    abs,
    exp,
    exp2,
    gelu,
    gelu_tanh,
    log,
    log2,
    map,
    reciprocal,
    relu,
    rsqrt,
    sigmoid,
    silu,
    softplus,
    sqrt,
    tanh,
)
from .index import split
from .inverse import inverse_unit_lower
from .make import col_index, full, neg_infty, ones, pos_infty, row_index, zeros
from .maps import fma, maximum, minimum
from .mask import bounds, causal, left_fill, lower_fill, right_fill, tril, triu, upper_fill
from .memory import clip, load, store
from .mma import mma_AB, mma_ABt, mma_AtB, mma_AtBt
from .online import lazy_maximum, rescale
from .parts import columns, hstack, rows, vstack
from .prefix import cumsum, sum_down
from .reduce import (
    col_max,
    col_min,
    col_prod,
    col_sum,
    lane_sum,
    row_max,
    row_min,
    row_prod,
    row_sum,
    tile_all,
    tile_any,
    tile_max,
    tile_min,
    tile_prod,
    tile_sum,
    total,
)
from .schedule import grouped, snake
from .scopes import refuse_others as _refuse_others
from .subtile import subtile
from .taylor import taylor
from .transpose import swap_layout, transpose
from .vectors import last, load_row

__all__ = [
    "abs", "block", "bounds", "causal", "clip", "cluster", "col_index", "col_max", "col_min", "col_prod", "col_sum", "columns",
    "commit_group", "complex", "copy_async", "cumsum", "equal", "exp", "exp2", "fma", "full", "gelu", "gelu_tanh", "greater",
    "greater_equal", "grouped", "hstack", "inverse_unit_lower", "lane_sum", "last", "lazy_maximum", "left_fill", "less",
    "less_equal", "load", "load_row", "log", "log2", "lower_fill", "map", "maximum", "minimum", "mma", "mma_AB", "mma_ABt",
    "mma_AtB", "mma_AtBt", "neg_infty", "not_equal", "ones", "pos_infty", "prefetch", "raw", "reciprocal", "relu", "rescale",
    "right_fill", "row_index", "row_max", "row_min", "row_prod", "row_sum", "rows", "rsqrt", "sigmoid", "silu", "snake",
    "softplus", "split", "sqrt", "store", "subtile", "sum_down", "swap_layout", "tanh", "taylor", "tile_all", "tile_any",
    "tile_max", "tile_min", "tile_prod", "tile_sum", "total", "transpose", "tril", "triu", "upper_fill", "vstack", "wait_group",
    "warpgroup", "where", "zeros",
]  # fmt: skip

_refuse_others()
