"""Reductions and running sums: of a lane's elements, across the lanes of a warp, across the warps of a warpgroup or block."""
