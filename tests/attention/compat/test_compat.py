"""attention/compat as a whole: imports are cheap, and every table names functions that exist."""

import inspect
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import attention
from attention import reference
from attention.compat import fla, flash_attn, flash_attn_interface, flex, sdpa


def test_import_is_light():
    """Importing them imports neither torch nor, before a kernel is needed, Numba."""
    modules = "fla, flash_attn, flash_attn_interface, flashinfer, flex, sdpa"
    code = f"from attention.compat import {modules}; import sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert not {"torch", "jax", "numba", "ops", "tiles"} & {name.partition(".")[0] for name in run.stdout.split()}


def test_forward_takes_what_the_tables_pass(request):
    parameters = {*inspect.signature(attention.forward).parameters}
    request.getfixturevalue("calls")
    assert {*inspect.signature(attention.forward).parameters} <= parameters


def test_kernels_serve_plain_calls():
    """In the interpreter: the same bits as through our own argument names."""
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


SEE = np.random.default_rng(1).random((5, 9)) > 0.5
SEE[2] = False
DOCS = np.arange(9) // 4
SLOPES = np.array([0.5, 2.0], np.float32)
PACKED = np.array([0, 2, 5], np.int32), np.array([0, 6, 9], np.int32)
KERNELS = {  # what is called with q (1, 5, 2, 16), k and v (1, 9, 1, 16), and what the formula is asked for
    "window, softcap": (lambda q, k, v: flash_attn.flash_attn_func(q, k, v, window_size=(2, 0), softcap=2.0),
                        dict(window=(2, 0), softcap=2.0)),
    "ALiBi": (lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=SLOPES),
              dict(causal=True, alibi=SLOPES)),
    "packed": (lambda q, k, v: flash_attn_interface.flash_attn_varlen_func(q[0], k[0], v[0], *PACKED, 3, 6, causal=True)[None],
               dict(causal=True, cu_seqlens=PACKED[0], cu_seqlens_k=PACKED[1])),
    "booleans": (lambda q, k, v: swapped(sdpa.scaled_dot_product_attention(*map(swapped, (q, k, v)), SEE)),
                 dict(mask=lambda b, h, i, j: SEE[i, j])),
    "top left": (lambda q, k, v: swapped(sdpa.scaled_dot_product_attention(*map(swapped, (q, k, v)), is_causal=True)),
                 dict(mask=lambda b, h, i, j: j <= i)),
    "top left, fewer keys": (
        lambda q, k, v: swapped(sdpa.scaled_dot_product_attention(*map(swapped, (q, k[:, :3], v[:, :3])), is_causal=True)),
        dict(mask=lambda b, h, i, j: (j <= i) & (j < 3))),
    "functions": (
        lambda q, k, v: swapped(flex.flex_attention(*map(swapped, (q, k, v)), lambda s, b, h, i, j: s - SLOPES[h] * DOCS[j])),
        dict(score=lambda s, b, h, i, j: s - SLOPES[h] * DOCS[j])),
}  # fmt: skip


def swapped(x):
    return x.swapaxes(1, 2)


@pytest.mark.parametrize("case", KERNELS)
def test_kernels_serve_variants(case):
    """In the interpreter, through the other library's signature."""
    call, options = KERNELS[case]
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, h, 16)).astype(ml_dtypes.bfloat16) for n, h in ((5, 2), (9, 1), (9, 1)))
    reference.assert_close(
        call(q, k, v), reference.forward(q, k, v, **options)[0], reference.forward_low(q, k, v, **options)[0]
    )


def test_errors_have_the_names_of_the_caller():
    """Errors name the caller's argument at fault, and the caller's arguments that it is compared with."""
    x, of_2 = np.zeros((2, 3, 4, 16), np.float16), flash_attn.flash_attn_with_kvcache
    of_3, pool = flash_attn_interface.flash_attn_with_kvcache, "page_table: must have the axes sequences, pages of each: page_"
    numbers, flat, packed = np.array([1, 2, 3], np.int32), np.array([0, 1], np.int32), (np.zeros(3, np.int32),) * 2
    of_torch, varlen = sdpa.scaled_dot_product_attention, flash_attn.flash_attn_varlen_func
    for call, arguments, options, message in (
        (of_2, (x, x, x), dict(cache_seqlens=numbers), "cache_seqlens: sequences must equal q's: cache_seqlens.shape=(3,), q."),
        (
            of_2,
            (x, x, x),
            dict(cache_seqlens=1, k=x[:, :, :2], v=x),
            "k: heads must equal k_cache's: k.shape=(2, 3, 2, 16), k_cache.",
        ),
        (of_2, (x, x[:, :, :3], x), {}, "v_cache: heads must equal k_cache's: v_cache.shape="),
        (
            of_2,
            (x, x, x),
            dict(block_table=flat[:, None, None], cache_seqlens=1),
            "block_table: must have the axes sequences, ",
        ),
        (of_3, (x, x, x), dict(page_table=flat, cache_seqlens=1), pool),
        (varlen, (x[0], x[0], x[0], *packed, 1, 1), {}, "cu_seqlens_q: must end at 3, the length of all sequences together"),
        (
            of_torch,
            (x, x[..., :8], x),
            {},
            "key: head_dim must equal query's: key.shape=(2, 3, 4, 8), query.shape=(2, 3, 4, 16)",
        ),
    ):
        with pytest.raises((TypeError, ValueError)) as raised:
            call(*arguments, **options)
        assert str(raised.value).startswith(message)
