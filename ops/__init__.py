"""The operations on tiles inside kernels. The ops in this module are one warp's, on its own tile. `ops.warpgroup`
has what four warps do together, `ops.block` what all warps of a block do, `ops.cluster` what several blocks do. `ops.raw`
has instructions without their guards.

This file only lists names. The folders say how an op is done: elementwise/, shape/, memory/, reductions/, matmul/, threads/,
for_attention/.
"""

from pathlib import Path as _Path
from runpy import run_path as _run_path

if _why := _run_path(str(_Path(__file__).parents[1] / "tiles/importable.py"))["obstacle"]():  # `tiles` may be another's
    raise ImportError(_why)

from tiles import __version__ as __version__

from . import block, cluster, complex, grid, matmul, raw, warpgroup
from . import printing as _printing  # print takes tiles  # noqa: F401
from .elementwise import convert as _convert  # dtypes become callable  # noqa: F401
from .elementwise.arithmetic import fma, maximum, minimum, product
from .elementwise.compare import equal, greater, greater_equal, less, less_equal, not_equal, where
from .elementwise.create import col_index, full, neg_infty, ones, pos_infty, row_index, zeros
from .elementwise.draws import bernoulli, bernoulli_of_row
from .elementwise.functions import (
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
from .elementwise.masks import causal, left_fill, lower_fill, outside_fill, right_fill, tril, triu, upper_fill
from .elementwise.order_of_computation import compute_now
from .for_attention.online_softmax import lazy_maximum, rescale
from .for_attention.taylor_features import taylor, taylor_gradients
from .for_attention.triangular_inverse import inverse_unit_lower
from .matmul.mma import mma_AB, mma_ABt, mma_AtB, mma_AtBt
from .matmul.unzipped import mma_AB_unzipped, mma_ABt_unzipped, rezipped, unzipped
from .matmul.zipped import zipped
from .memory import gather as _gather  # arrays take vectors of indices  # noqa: F401
from .memory.async_copy import commit_group, copy_async, copy_pages, look_up, wait_group
from .memory.counts import count_stored, count_up, reset_count, wait_count
from .memory.global_elements import truncate
from .memory.lane_order import add_fragment, load_fragment, load_part_of_fragment
from .memory.load_store import load, store
from .memory.numbers import load_number
from .memory.shared_vectors import last_element, load_row, load_row_of_group
from .memory.tma import prefetch
from .memory.tma_by_warp import store_wait, stores_done, tma_add, tma_store
from .memory.unordered import load_pages, load_unordered, store_unordered, store_widened
from .reductions.reduce import (
    col_max,
    col_min,
    col_prod,
    col_sum,
    finish_sum,
    group_sum,
    lane_col_sum,
    lane_moment,
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
)
from .reductions.scan import cumsum, cumsum_columns, reverse_cumsum_columns
from .schedule import divmod, line_up, persistent_tile, rasterize, warp_index
from .scopes import refuse_others as _refuse_others
from .shape.column import column
from .shape.shifted import shift_rows
from .shape.slicing import columns, hstack, rows, vstack
from .shape.subtile import subtile
from .shape.transpose import swap_layout, transpose, turned
from .shape.viewed import viewed

__all__ = [
    "abs", "add_fragment", "bernoulli", "bernoulli_of_row", "block", "causal", "cluster", "col_index", "col_max", "col_min",
    "col_prod", "col_sum", "column", "columns", "commit_group", "complex", "compute_now", "copy_async", "copy_pages",
    "count_stored", "count_up", "cumsum", "cumsum_columns", "divmod", "equal", "exp", "exp2", "finish_sum", "fma", "full",
    "gelu", "gelu_tanh", "greater", "greater_equal", "grid", "group_sum", "hstack", "inverse_unit_lower", "lane_col_sum",
    "lane_moment", "lane_sum", "last_element", "lazy_maximum", "left_fill", "less", "less_equal", "line_up", "load",
    "load_fragment", "load_number", "load_pages", "load_part_of_fragment", "load_row", "load_row_of_group",
    "load_unordered", "log", "log2", "look_up",
    "lower_fill", "map", "matmul", "maximum", "minimum", "mma_AB", "mma_AB_unzipped", "mma_ABt", "mma_ABt_unzipped", "mma_AtB",
    "mma_AtBt", "neg_infty", "not_equal", "ones", "outside_fill", "persistent_tile", "pos_infty", "prefetch", "product",
    "rasterize", "raw", "reciprocal", "relu", "rescale", "reset_count", "reverse_cumsum_columns", "rezipped", "right_fill",
    "row_index", "row_max", "row_min", "row_prod", "row_sum", "rows", "rsqrt", "shift_rows", "sigmoid", "silu", "softplus",
    "sqrt", "store", "store_unordered", "store_wait", "store_widened", "stores_done", "subtile", "swap_layout", "tanh",
    "taylor", "taylor_gradients", "tile_all", "tile_any", "tile_max", "tile_min", "tile_prod", "tile_sum", "tma_add",
    "tma_store", "transpose", "tril", "triu", "truncate", "turned", "unzipped", "upper_fill", "viewed", "vstack",
    "wait_count", "wait_group", "warp_index", "warpgroup", "where", "zeros", "zipped",
]  # fmt: skip

_refuse_others()
