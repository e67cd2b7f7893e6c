"""attention.decode beside cuDNN and FlashAttention-2 (both through torch) and FlashAttention-4, where they are installed, and
beside a copy that reads and writes as many bytes as K and V have.

One query token, all of the cache in use, bf16, D 128; TB/s are those of K and V read. `pages 16` and its like are ours from a
pool whose pages lie in any order; `4 tokens` has four. Calls are replayed from a CUDA graph, through caches that together
exceed L2 several times over. See measure.py for the protocol. `pytest bench/test_decode.py --benchmark-json=decode.json`.
"""

import functools

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import attention  # noqa: E402
from bench import peers  # noqa: E402
from bench.measure import replayed, report, rotated  # noqa: E402

HEAD_DIM, ROUNDS = 128, 5
SHAPES = [  # batch, keys, query heads, key heads
    (1, 32768, 32, 8),
    (16, 8192, 32, 8),
    (64, 8192, 32, 8),
    (64, 8192, 64, 8),
    (128, 4096, 32, 32),
    (32, 4096, 32, 8),
    (1, 1024, 32, 4),
]
PAGES, TOKENS = (1, 16, 64), (4, 8)
PROVIDERS = "tiles", *(f"pages {n}" for n in PAGES), *(f"{n} tokens" for n in TOKENS), "copy", "cudnn", "flash4", "flash2"


def _inputs(batch, keys, heads, kv_heads):
    """q for the most tokens, K, V, lengths, and tables of pages."""
    draw = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    cache = [draw((batch, keys, kv_heads, HEAD_DIM)) for _ in range(2)]
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    tables = [torch.randperm(batch * keys // n, device="cuda").int().view(batch, keys // n) for n in PAGES]
    return draw((batch, max(TOKENS), heads, HEAD_DIM)), *cache, lengths, tables


def _ours(tokens=1, page=None):
    """A call of ours on such inputs."""

    def call(q, k, v, lengths, tables):
        if page is None:
            return attention.decode(q[:, :tokens], k, v, lengths=lengths)
        pools = [x.view(-1, page, *x.shape[2:]) for x in (k, v)]
        return attention.decode(q[:, :tokens], *pools, lengths=lengths, pages=tables[PAGES.index(page)])

    return call


def _sdpa(backend):
    def call(q, k, v, *_):
        with sdpa_kernel(backend):
            q, k, v = (x.transpose(1, 2) for x in (q[:, :1], k, v))
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    return call


def _copy(q, k, v, *_):
    """Reads K and writes over V: what reading both takes."""
    v.copy_(k)


def _flash4(q, k, v, *_):
    return peers.library("flash_attn.cute.interface", "flash_attn_func", causal=True)(q[:, :1], k, v)


OURS = {"tiles": _ours()} | {f"pages {n}": _ours(page=n) for n in PAGES} | {f"{n} tokens": _ours(n) for n in TOKENS}
THEIRS = {"cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION), "flash4": _flash4, "flash2": _sdpa(SDPBackend.FLASH_ATTENTION)}


def _check(call, inputs):
    """The last sequence's last head, of one token over a dense cache, against float32, by the rule of the tests."""
    q, k, v, *_ = inputs
    out = call(*inputs)[-1, 0, -1].float()
    one = q[-1, 0, -1].float(), k[-1, :, -1].float(), v[-1, :, -1].float()
    p = (one[1] @ one[0] * HEAD_DIM**-0.5).softmax(0)
    ref, low = p @ one[2], (p.bfloat16().float() @ one[2]).bfloat16().float()
    assert (out - ref).abs().max() <= 2 * (low - ref).abs().max() + 2**-8 * ref.abs().max()


@functools.cache
def _times(shape):
    """{provider: milliseconds of every round}, or the reason why it cannot run."""
    batch, keys, _, kv_heads = shape
    nbytes = 4 * batch * keys * kv_heads * HEAD_DIM
    sets = rotated(lambda: _inputs(*shape), nbytes)
    theirs, missing = peers.present(THEIRS, sets[0])
    for call in ({"tiles": OURS["tiles"]} | theirs).values():
        _check(call, sets[0])
    calls = max(len(sets), min(200, int(2e11 / nbytes)))  # a graph of some 50 ms at most
    return replayed(OURS | theirs | {"copy": _copy}, sets, ROUNDS, calls) | missing


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "B {} S {} H {}/{}".format(*s))
def test_decode(benchmark, shape, provider):
    """Rows of a group are what one reads: the same problem, one provider each."""
    times = _times(shape)[provider]
    if isinstance(times, str):
        pytest.skip(f"{provider}: {times}")
    batch, keys, heads, kv_heads = shape
    benchmark.group = f"decode B {batch} S {keys} H {heads}/{kv_heads}"
    benchmark.extra_info |= {"provider": provider, "shape": shape}
    report(benchmark, times)
    nbytes = 4 * batch * keys * kv_heads * HEAD_DIM
    benchmark.extra_info["tbs"] = round(nbytes / benchmark.stats.stats.median / 1e12, 2)
