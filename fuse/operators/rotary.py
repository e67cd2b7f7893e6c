"""Rotary embedding."""

from ..fused import kernel
from ..language import concatenate, halves


@kernel
def rotary(x, cos, sin):
    """The two halves of each row, rotated: (x1 * cos - x2 * sin, x2 * cos + x1 * sin). x (..., D), cos, sin (..., D/2), which
    may lack leading axes of x or have length 1 there: (S, D/2) for x (B, H, S, D), (S, 1, D/2) for x (B, S, H, D)."""
    first, second = halves(x)
    return concatenate([first * cos - second * sin, second * cos + first * sin])
