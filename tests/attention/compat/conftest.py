"""attention.forward is replaced by the reference: a table of argument names can be tested without kernels."""

import numpy as np
import pytest

import attention
from attention import reference


@pytest.fixture
def calls(monkeypatch):
    """Replace attention.forward by the reference in float64. Returns a list of the options of each call."""
    call_options = []

    def forward(
        q, k, v, *, causal=False, window=None, softcap=None, alibi=None, sink=None, bias=None, mask=None, score=None, aux=(),
        blocks=None, cu_seqlens=None, cu_seqlens_k=None, lengths_k=None, dropout=0.0, seed=None, q_norm=None, k_norm=None,
        norm_eps=1e-6, scale=None, deterministic=False, layout="bshd", out=None, return_lse=False, stream=None, family=None,
    ):  # fmt: skip
        options = dict(
            causal=causal, window=window, softcap=softcap, alibi=alibi, sink=sink, bias=bias, mask=mask, score=score, aux=aux,
            blocks=blocks, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, lengths_k=lengths_k, dropout=dropout,
            q_norm=q_norm, k_norm=k_norm, norm_eps=norm_eps, scale=scale, layout=layout,
        )  # fmt: skip
        assert window is None or all(end is None or end >= 0 for end in window)
        others = {"seed": seed, "deterministic": deterministic, "return_lse": return_lse}
        call_options.append(options | others | {"q": q, "k": k, "v": v})
        keep = None if seed is None else lambda b, h, i, j: (i * 7 + j * 3 + h + b + seed) % 5 > 0
        both = reference.forward(q, k, v, **options, keep=keep)
        return both if return_lse else both[0]

    monkeypatch.setattr(attention, "forward", forward)
    return call_options


@pytest.fixture
def draw():
    """draw(*shape): an array of random numbers, other ones each time."""
    return np.random.default_rng(0).standard_normal
