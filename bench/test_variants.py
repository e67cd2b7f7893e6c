"""Variants of attention.forward beside FlashAttention-4, where that has them, and plain causal attention.

`tiles` is the built-in variant, `python` the same as a mask or score in Python, `flash4` the peer, `causal` plain causal
attention in the same run, by which the goals are scaled, `compile` torch.compile of its own ops. bf16, B 2, S 8192, 16 heads,
D 128; packed: eight sequences of 17 to 8192, causal; QK-norm: B 1, S 4096, 32 heads and 8 of keys, full.
See measure.py for the protocol. `pytest bench/test_variants.py -s --benchmark-json=variants.json`.
"""

import functools
import itertools

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402

import attention  # noqa: E402
from bench import peers  # noqa: E402
from bench.measure import interleaved, medians, report, rotated  # noqa: E402
from ops import tanh  # noqa: E402

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 8192, 16, 128
PACKED = 17, 100, 519, 1024, 1500, 2000, 3032, 8192
ROUNDS = 7
GROUPED = (1, 4096, 32), (1, 4096, 8), (1, 4096, 8)
VARIANTS = (
    "window 1024", "softcap 30", "ALiBi", "documents of 700", "prefix 2048", "sink", "dropout 0.1", "QK-norm",
    "D 192, Dv 128", "packed",
)  # fmt: skip
PROVIDERS = "tiles", "python", "flash4", "compile", "causal"


def _flash4(**options):
    return peers.library("flash_attn.cute.interface", "flash_attn_func", **options)


def _normed(q, k, v, weight):
    q, k = (F.rms_norm(x, x.shape[-1:], weight, 1e-6) for x in (q, k))
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True).transpose(1, 2)


def _cases():
    """{variant: {provider: call that takes (q, k, v)}}"""
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)], device="cuda")
    documents = torch.arange(LENGTH, device="cuda", dtype=torch.int32) // 700
    weight = torch.randn(HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([0, *itertools.accumulate(PACKED)], device="cuda", dtype=torch.int32)
    forward = functools.partial(functools.partial, attention.forward)
    varlen = peers.library("flash_attn.cute.interface", "flash_attn_varlen_func", causal=True)
    longest = max(PACKED)
    return {
        "window 1024": {
            "tiles": forward(causal=True, window=(1024, None)),
            "python": forward(mask=lambda b, h, i, j: (j <= i) & (j >= i - 1024)),
            "flash4": _flash4(causal=True, window_size=(1024, 0)),
        },
        "softcap 30": {
            "tiles": forward(causal=True, softcap=30.0),
            "python": forward(causal=True, score=lambda s, b, h, i, j: tanh(s * (1 / 30)) * 30),
            "flash4": _flash4(causal=True, softcap=30.0),
        },
        "ALiBi": {
            "tiles": forward(causal=True, alibi=slopes),
            "python": forward(causal=True, score=lambda s, b, h, i, j, slopes: s - slopes[h] * abs(i - j), aux=(slopes,)),
        },
        "documents of 700": {
            "python": forward(causal=True, mask=lambda b, h, i, j, docs: docs[i] == docs[j], aux=(documents,)),
        },
        "prefix 2048": {"python": forward(mask=lambda b, h, i, j: (j <= i) | (j < 2048))},
        "sink": {"tiles": forward(causal=True, sink=slopes)},
        "dropout 0.1": {"tiles": forward(causal=True, dropout=0.1, seed=7)},
        "QK-norm": {
            "tiles": forward(q_norm=weight, k_norm=weight),
            "compile": functools.partial(torch.compile(_normed), weight=weight),
        },
        "D 192, Dv 128": {"tiles": forward(causal=True), "flash4": _flash4(causal=True)},
        "packed": {
            "tiles": forward(causal=True, cu_seqlens=ends),
            "flash4": lambda q, k, v: varlen(
                q[0], k[0], v[0], cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest
            ),
        },
    }


def _inputs(variant):
    shape = (1, sum(PACKED), HEADS) if variant == "packed" else (BATCH, LENGTH, HEADS)
    shapes = GROUPED if variant == "QK-norm" else (shape,) * 3
    dims = (192, 192, 128) if "192" in variant else (HEAD_DIM,) * 3
    return tuple(torch.randn((*shape, d), device="cuda", dtype=torch.bfloat16) for shape, d in zip(shapes, dims))


@functools.cache
def _times(variant):
    sets = rotated(lambda: _inputs(variant), sum(x.nbytes for x in _inputs(variant)))
    calls, missing = peers.present(_cases()[variant], sets[0])
    outs = [call(*sets[0]).reshape(-1).float() for call in calls.values()]
    for out in outs[1:]:  # against float64 is the tests' business; here all must mean the same
        assert (out - outs[0]).abs().max() < 0.05
    if variant not in ("packed", "D 192, Dv 128", "QK-norm"):
        calls["causal"] = functools.partial(attention.forward, causal=True)
    return interleaved(calls, sets, ROUNDS) | missing


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant(benchmark, variant, provider):
    """Rows of a group are what one reads: the same problem, one provider each."""
    times = _times(variant).get(provider, "has none")
    if isinstance(times, str):
        pytest.skip(f"{provider}: {times}")
    benchmark.group = variant
    benchmark.extra_info |= {"provider": provider, "variant": variant, "ms": medians({provider: times})[provider]}
    report(benchmark, times)
    print(f"\n{variant:20} {provider:8} {benchmark.extra_info['ms']:.4f} ms")
