"""How the gradients' kernels since Ampere (delta_gradients_ampere.py, channel_gradients_ampere.py) find states in memory: S^T
before each chunk and dS^T after it, interleaved. PANEL columns of values of S are followed by the same columns of dS, so that
one copy brings what a kernel multiplies at once."""

from numpy import int32

from tiles import inlined

PANEL = 32  # columns of values that are multiplied at once


@inlined
def state_row(column):
    """The row of a chunk's interleaved states in memory with a column of values of S. That of dS is PANEL rows further."""
    return int32(column + column // PANEL * PANEL)
