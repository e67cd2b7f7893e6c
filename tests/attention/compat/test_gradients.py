"""Gradients through attention/compat, on torch tensors, compared with torch's autograd of the formula in float64."""

import math

import pytest

from attention.compat import fla, flash_attn, flash_attn_interface, flashinfer, flex, sdpa

torch = pytest.importorskip("torch")
from test_nn_recurrent import recurrence  # noqa: E402

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
    expected = torch.einsum("bhij,bjhd->bihd", s.softmax(-1).nan_to_num(), v), s.logsumexp(-1)
    actual = ours(*low)
    outputs = actual if isinstance(actual, tuple) else (actual,)
    of_results = [torch.randn_like(x) for x in outputs]
    gradients = (
        torch.autograd.grad(outputs, low, of_results),
        torch.autograd.grad(expected[: len(outputs)], high, [x.double() for x in of_results]),
    )
    for mine, theirs in zip([*outputs, *gradients[0]], [*expected[: len(outputs)], *gradients[1]], strict=True):
        assert (mine.double() - theirs).abs().max() < 0.02 * theirs.abs().max()


# ---- flash-linear-attention's ----------------------------------------------------------------------------------------
RAW = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
RATES = torch.log1p(-(2.0 ** (-5 - torch.arange(KEYS, dtype=torch.float64))))


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def raw_decay(g, A_log, dt_bias):
    return -A_log.exp()[:, None] * torch.nn.functional.softplus(g + dt_bias.view(KEYS, -1))


# name: (its function; its arguments behind v, by shape; q, k, decay and beta of the recurrence that it is)
FLA = {
    "chunk_retention": (fla.chunk_retention, [], lambda q, k: (q, k, RATES.expand(1, ROWS, KEYS), None)),
    "chunk_simple_gla": (fla.chunk_simple_gla, ["g"], lambda q, k, g: (q, k, g, None)),
    "chunk_gla": (fla.chunk_gla, ["g of channels"], lambda q, k, g: (q, k, g, None)),
    "chunk_delta_rule": (fla.chunk_delta_rule, ["beta"], lambda q, k, b: (q, k, torch.zeros_like(b), b)),
    "chunk_gated_delta_rule": (fla.chunk_gated_delta_rule, ["g", "beta"], lambda q, k, g, b: (q, k, g, b)),
    "chunk_gated_delta_rule, raw": (
        lambda q, k, v, g, b, A_log, dt_bias, **o: fla.chunk_gdn(q, k, v, g, b, A_log=A_log, dt_bias=dt_bias, **RAW, **o),
        ["g", "beta", "A_log", "dt_bias"],
        lambda q, k, g, b, A_log, bias: (unit(q), unit(k), raw_decay(g[..., None], A_log, bias)[..., 0], 2 * b.sigmoid()),
    ),
    "chunk_kda, raw": (
        lambda q, k, v, g, b, A_log, dt_bias, **o: fla.chunk_kda(q, k, v, g, b, A_log=A_log, dt_bias=dt_bias, **RAW, **o),
        ["g of channels", "beta", "A_log", "dt_bias of channels"],
        lambda q, k, g, b, A_log, bias: (unit(q), unit(k), raw_decay(g, A_log, bias), 2 * b.sigmoid()),
    ),
}
SHAPES = {"g": (1, ROWS, KEYS), "g of channels": (1, ROWS, KEYS, DIM), "beta": (1, ROWS, KEYS), "A_log": (KEYS,)}
SHAPES |= {"dt_bias": (KEYS,), "dt_bias of channels": (KEYS * DIM,)}


@pytest.mark.parametrize("name", FLA)
def test_gradients_of_recurrences(name):
    """Gradients of the output and of the last state, for all arguments."""
    ours, more, formula = FLA[name]
    torch.manual_seed(0)
    low = [torch.randn(1, ROWS, KEYS, DIM).bfloat16() for _ in range(3)]
    low += [-torch.rand(SHAPES[x]) if x[0] == "g" else torch.rand(SHAPES[x]) for x in more] + [torch.randn(1, KEYS, DIM, DIM)]
    low = [x.requires_grad_() for x in low]
    high = [x.detach().double().requires_grad_() for x in low]
    q, k, v, *others, start = high
    outputs = ours(*low[:-1], initial_state=low[-1], output_final_state=True, scale=0.4)
    q, k, decay, beta = formula(q, k, *others)
    expected = recurrence(q, k, v, decay, beta, 0.4, start)
    of_results = [torch.randn_like(x) for x in outputs]
    of_doubles = [x.double() for x in of_results]
    gradients = torch.autograd.grad(outputs, low, of_results), torch.autograd.grad(expected, high, of_doubles)
    for mine, theirs in zip([*outputs, *gradients[0]], [*expected, *gradients[1]], strict=True):
        assert (mine.double() - theirs).abs().max() < 0.02 * theirs.abs().max()
