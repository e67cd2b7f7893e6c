"""attention/compat as a whole: light to import, and tables over functions that are there."""

import inspect
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import attention
from attention.compat import fla, flash_attn, flash_attn_interface, sdpa


def test_import_is_light():
    """No torch, and Numba not before it is needed."""
    code = "from attention.compat import fla, flash_attn, flash_attn_interface, flex, sdpa; import sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert not {"torch", "jax", "numba", "ops", "tiles"} & {name.partition(".")[0] for name in run.stdout.split()}


def test_forward_takes_what_the_tables_pass(request):
    taken = {*inspect.signature(attention.forward).parameters}
    if "mask" not in taken:
        pytest.skip("attention.forward takes no variants yet")
    request.getfixturevalue("calls")
    assert {*inspect.signature(attention.forward).parameters} <= taken


def test_kernels_serve_plain_calls():
    """In the interpreter: the same bits as by our own names."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16, 2, 16)).astype(ml_dtypes.bfloat16)
    expected, lse = attention.forward(q, k, v, causal=True, scale=0.5, return_lse=True)
    out, its_lse, _ = flash_attn.flash_attn_func(q, k, v, 0.0, 0.5, True, return_attn_probs=True)
    assert (out == expected).all() and (its_lse == lse).all()
    assert (flash_attn_interface.flash_attn_func(q, k, v, 0.5, True) == expected).all()
    heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]
    assert (sdpa.scaled_dot_product_attention(*heads_first, is_causal=True, scale=0.5).swapaxes(1, 2) == expected).all()
    out, state = fla.chunk_retention(q, k, v, output_final_state=True)
    expected, its_state = attention.retention(q, k, v, return_state=True)
    assert (out == expected).all() and (state == its_state).all()
