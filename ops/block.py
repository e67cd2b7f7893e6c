"""Ops that all warps of a block call together."""

from tiles.interpreter import current_warp
from tiles.op import op

from .reductions.across_warps import lower_scope, reduced, voted
from .threads.warps import ALL_WARPS


@op
def sync(fenced=True):
    """All warps of the block meet. What they wrote to shared memory is then visible to all, to their wgmmas and to TMA. fenced:
    as in warpgroup.sync."""
    ALL_WARPS.sync(current_warp(), fenced)


@op
def reduce_max(x, scratch):
    """The maximum over the block's warps of vectors, element by element, or numbers: reduce_max(tile_max(tile), scratch).
    scratch: an fp32 shared vector of x's length for each warp; of 4 for numbers. All warps get the result."""
    return reduced(ALL_WARPS, "max", x, scratch)


@op
def reduce_min(x, scratch):
    """The minimum over the block's warps; see reduce_max."""
    return reduced(ALL_WARPS, "min", x, scratch)


@op
def reduce_sum(x, scratch):
    """The sum over the block's warps, in fp32; see reduce_max."""
    return reduced(ALL_WARPS, "sum", x, scratch)


@op
def reduce_prod(x, scratch):
    """The product over the block's warps, in fp32; see reduce_max."""
    return reduced(ALL_WARPS, "prod", x, scratch)


@op
def reduce_any(condition):
    """Does the condition, such as tile_any(mask), hold in one of the block's warps? They meet."""
    return voted(ALL_WARPS, any, condition)


@op
def reduce_all(condition):
    """Does the condition, such as tile_all(mask), hold in all of the block's warps? They meet."""
    return voted(ALL_WARPS, all, condition)


lower_scope(ALL_WARPS, reduce_max, reduce_min, reduce_sum, reduce_prod, reduce_any, reduce_all, sync)
