"""Matrix products: `mma` by one warp, `wgmma` by a warpgroup, and the table `SUPPORTED` of which there are."""

from .supported import SUPPORTED

__all__ = ["SUPPORTED"]
