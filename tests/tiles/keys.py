"""What the tests of keys share."""

from numba.cuda import types

from tiles.compiling import digest

ARRAY = types.Array(types.float32, 2, "A")


def key(kernel, signature=(ARRAY,), arch="sm_90a"):
    """Of a kernel of one array."""
    return digest.key(kernel, signature, arch)
