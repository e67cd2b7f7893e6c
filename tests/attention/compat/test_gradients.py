"""Gradients through attention/compat, on torch tensors, compared with torch's autograd of the formula in float64."""

import math

import pytest

from attention.compat import flash_attn, flash_attn_interface, flashinfer, flex, sdpa

torch = pytest.importorskip("torch")
ROWS, COLS, HEADS, KEYS, DIM = 9, 12, 4, 2, 16
FAR = torch.arange(COLS) - (torch.arange(ROWS)[:, None] + COLS - ROWS)
SLOPES, LEAST = torch.tensor([0.5, 0.1, 0.0, 1.0]), torch.full((), -torch.inf)
SEEN, ADDED = torch.rand(ROWS, COLS, generator=torch.Generator().manual_seed(0)) > 0.3, torch.linspace(-1, 1, COLS)[None]
LOUD, ENDS = torch.tensor([1.0, 0.5, 2.0, -1.0]), torch.tensor([0, 4, ROWS], dtype=torch.int32)
PACKED = torch.tensor([0, 7, COLS], dtype=torch.int32)
WHICH = torch.bucketize(torch.arange(ROWS), ENDS[1:2], right=True), torch.bucketize(torch.arange(COLS), PACKED[1:2], right=True)


def swapped(function, *options, **named):
    """A function of (B, H, S, D) as a function of (B, S, H, D)."""
    return lambda *arrays: function(*(x.transpose(1, 2) for x in arrays), *options, **named).transpose(1, 2)


def packed(q, k, v):
    """FlashAttention's function of packed sequences."""
    out, lse, _ = flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], ENDS, PACKED, 5, 7, return_attn_probs=True)
    return out[None], lse[None]


def ragged(q, k, v):
    """FlashInfer's wrapper, whose lse is to the base 2."""
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(0))
    wrapper.plan(ENDS, PACKED, HEADS, KEYS, DIM)
    out, lse = wrapper.run(q[0], k[0], v[0], return_lse=True)
    return out[None], lse.T[None] * math.log(2)


def of_flex(q, k, v):
    out, lse = flex.flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), score_mod=loud, return_lse=True)
    return out.transpose(1, 2), lse


def loud(s, b, h, i, j):
    return s * LOUD[h]


# name: (ours, of (B, S, H, D), which may give lse, too; what becomes of scores (B, H, Sq, Sk) before the softmax)
CASES = {
    "flash_attn": (lambda *x: flash_attn.flash_attn_func(*x, return_attn_probs=True)[:2], lambda s: s),
    "flash_attn, packed arrays": (
        lambda q, k, v: flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True, window_size=(5, -1)),
        lambda s: torch.where((FAR <= 0) & (FAR >= -5), s, LEAST),
    ),
    "flash_attn, scores": (
        lambda *x: flash_attn.flash_attn_func(*x, softmax_scale=0.5, softcap=2.0, alibi_slopes=SLOPES),
        lambda s: 2 * (s * DIM**0.5 / 4).tanh() - SLOPES[:, None, None] * FAR.abs(),
    ),
    "flash_attn, sequences": (
        packed,
        lambda s: torch.where(WHICH[0][:, None] == WHICH[1], s, LEAST),
    ),
    "flashinfer": (ragged, lambda s: torch.where(WHICH[0][:, None] == WHICH[1], s, LEAST)),
    "flash_attn_interface": (
        lambda *x: flash_attn_interface.flash_attn_func(*x, causal=True, return_attn_probs=True),
        lambda s: torch.where(FAR <= 0, s, LEAST),
    ),
    "sdpa, seen": (swapped(sdpa.scaled_dot_product_attention, SEEN), lambda s: torch.where(SEEN, s, LEAST)),
    "sdpa, added": (swapped(sdpa.scaled_dot_product_attention, ADDED), lambda s: s + ADDED),
    "sdpa, causal": (
        swapped(sdpa.scaled_dot_product_attention, is_causal=True, enable_gqa=True),
        lambda s: torch.where(torch.ones(ROWS, COLS).tril() > 0, s, LEAST),
    ),
    "flex": (swapped(flex.flex_attention), lambda s: s),
    "flex, score": (of_flex, lambda s: s * LOUD[:, None, None]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    """Gradients of out, of lse, and of both, for q, k and v."""
    ours, changed = CASES[name]
    torch.manual_seed(0)
    low = [torch.randn(1, n, h, DIM).bfloat16().requires_grad_() for n, h in ((ROWS, HEADS), (COLS, KEYS), (COLS, KEYS))]
    high = [x.detach().double().requires_grad_() for x in low]
    q, k, v = high[0], *(x.repeat_interleave(HEADS // KEYS, 2) for x in high[1:])
    s = changed(torch.einsum("bihd,bjhd->bhij", q, k) * DIM**-0.5)
    wanted = torch.einsum("bhij,bjhd->bihd", s.softmax(-1).nan_to_num(), v), s.logsumexp(-1)
    found = ours(*low)
    got = found if isinstance(found, tuple) else (found,)
    of_results = [torch.randn_like(x) for x in got]
    gradients = (
        torch.autograd.grad(got, low, of_results),
        torch.autograd.grad(wanted[: len(got)], high, [x.double() for x in of_results]),
    )
    for mine, theirs in zip([*got, *gradients[0]], [*wanted[: len(got)], *gradients[1]], strict=True):
        assert (mine.double() - theirs).abs().max() < 0.02 * theirs.abs().max()
