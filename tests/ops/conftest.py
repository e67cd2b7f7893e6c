"""The fixtures of the ops' tests; sweep.py says how they are used."""
import os
import random

import numpy as np
import pytest
from sweep import BACKENDS

from tiles import fp32


@pytest.fixture(params=["meaning", "lowering", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request):
    """run(kernel, *args, warps=1, shared=None): one block, once with each backend."""
    return BACKENDS[request.param]


@pytest.fixture
def sample():
    """sample(shape, dtype): normally distributed numbers, different in every run (TILES_SEED repeats one)."""
    seed = int(os.environ.get("TILES_SEED") or random.getrandbits(32))
    print(f"TILES_SEED={seed}")
    rng = np.random.default_rng(seed)
    return lambda shape, dtype=fp32: rng.standard_normal(shape, np.float32).astype(dtype.np)
