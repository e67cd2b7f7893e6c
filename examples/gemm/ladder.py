"""What the levels share: how one is checked. Each level is a whole program; read them in order.

All compute C = A B^T as a linear layer does: A is (M, K), B (N, K), C (M, N), of bf16, with sums in fp32. K and N are
multiples of 8, which makes rows multiples of the 16 bytes that TMA and 16-byte stores want; any other edge may be ragged.
"""

import sys
from pathlib import Path

import numpy as np

from tiles import bf16

sys.path.append(str(Path(__file__).parents[1]))  # the other examples have machine.py beside them
from machine import to_device, to_host


def check(matmul, to_device=to_device, m=200, n=328, k=200):
    """Compare a level's `matmul(a, b, c)` with float64: one rounding to bf16, and what fp32 sums add to it. The sizes are more
    than one tile each way, and no multiple of one."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, np.float32).astype(bf16.np) for shape in ((m, k), (n, k)))
    c = to_device(np.full((m, n), np.nan, bf16.np))
    matmul(to_device(a), to_device(b), c)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(to_host(c), exact, rtol=2**-8, atol=1e-5 * k**0.5)
    print(f"({m} x {k}) @ ({n} x {k}).T: agrees with NumPy")
