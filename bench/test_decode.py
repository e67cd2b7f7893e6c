"""attention.decode beside cuDNN and FlashAttention-2 (both through torch) and FlashAttention-4, if installed, and beside a copy
that reads and writes as many bytes as K and V have.

One query token, all of the cache in use, bf16, D 128; TB/s are those of K and V read. `pages 16`, for example, reads a pool
whose pages are in random order; `4 tokens` has four; `norms` normalises q and all of K as it reads them. `fp8` reads caches of
e4m3, with a descale a head, or a token and head; its TB/s, too, are of K and V in bf16. `step` appends a token first, and `step
fp8 by token` computes its descales. Calls are replayed from a CUDA graph, through caches that together exceed L2 several times
over. `latents` and the rows after it are attention.mla_decode, of 576 columns, beside a copy that moves as many bytes as the
latents have, reads and writes together. See measure.py for the protocol. Kernels are compiled first, by a process for each
provider; that takes a minute, and FlashAttention-4's compiler longer. `pytest bench/test_decode.py
--benchmark-json=decode.json`."""

import functools
import subprocess
import sys

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
PEERS = "copy", "cudnn", "flash4", "flash2"
FP8 = "fp8", "fp8 by token", "fp8 by token, pages 16", "step", "step fp8", "step fp8 by token"
PROVIDERS = "tiles", *(f"pages {n}" for n in PAGES), *(f"{n} tokens" for n in TOKENS), "norms", *FP8, *PEERS


def _inputs(batch, keys, heads, kv_heads):
    """q for the most tokens, K, V, lengths, tables of pages, K and V in fp8, descales of each head, and of each token; for a
    step its K and V, and lengths without them."""
    draw = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    cache = [draw((batch, keys, kv_heads, HEAD_DIM)) for _ in range(2)]
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    tables = [torch.randperm(batch * keys // n, device="cuda").int().view(batch, keys // n) for n in PAGES]
    eight = [x.to(torch.float8_e4m3fn) for x in cache]
    descales = [[torch.ones(shape, device="cuda") for _ in "kv"] for shape in ((kv_heads,), (batch, keys, kv_heads))]
    return (
        draw((batch, max(TOKENS), heads, HEAD_DIM)),
        *cache,
        lengths,
        tables,
        eight,
        descales,
        (
            *(x[:, -1:].clone() for x in cache),
            lengths - 1,
        ),
    )


def _ours(tokens=1, page=None):
    """A call of attention.decode on the arrays of _inputs."""

    def call(q, k, v, lengths, tables, *_):
        if page is None:
            return attention.decode(q[:, :tokens], k, v, lengths=lengths)
        pools = [x.view(-1, page, *x.shape[2:]) for x in (k, v)]
        return attention.decode(q[:, :tokens], *pools, lengths=lengths, pages=tables[PAGES.index(page)])

    return call


@functools.cache
def _weights():
    """The weights of q_norm and k_norm."""
    return torch.rand(HEAD_DIM, device="cuda")


def _normed(q, k, v, lengths, *_):
    return attention.decode(q[:, :1], k, v, lengths=lengths, q_norm=_weights(), k_norm=_weights())


def _fp8(by_token=False, page=None, append=False, eight=True):
    """A call of attention.decode on fp8 caches, or with eight=False on those in bf16. append: the last token is written
    first."""

    def call(q, k, v, lengths, tables, fp8, descales, step):
        cache, cache_descales, kwargs = (fp8 if eight else (k, v)), descales[by_token], {"lengths": lengths}
        if append:
            kwargs = dict(zip(("k_new", "v_new", "lengths"), step, strict=True))
        if page is not None:
            cache, cache_descales = ([x.view(-1, page, *x.shape[2:]) for x in xs] for xs in (cache, cache_descales))
            kwargs["pages"] = tables[PAGES.index(page)]
        kwargs |= dict(zip(("k_descale", "v_descale"), cache_descales)) if eight else {}
        return attention.decode(q[:, :1], *cache, **kwargs)

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


FP8_CALLS = (
    *(_fp8(), _fp8(True), _fp8(True, 16)),
    *(_fp8(append=True, eight=False), _fp8(append=True), _fp8(True, append=True)),
)
OURS = {"tiles": _ours()} | {f"pages {n}": _ours(page=n) for n in PAGES} | {f"{n} tokens": _ours(n) for n in TOKENS}
OURS |= {"norms": _normed} | dict(zip(FP8, FP8_CALLS, strict=True))
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
    _compiled()
    sets = rotated(lambda: _inputs(*shape), nbytes)
    theirs, missing = peers.present(THEIRS, sets[0])
    for call in ({"tiles": OURS["tiles"]} | theirs).values():
        _check(call, sets[0])
    calls = max(len(sets), min(200, int(5e10 / nbytes)))  # a graph of some 12 ms at most
    return replayed(OURS | theirs | {"copy": _copy}, sets, ROUNDS, calls) | missing


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "B {} S {} H {}/{}".format(*s))
def test_decode(benchmark, shape, provider):
    """A group has one problem, with a row for each provider."""
    times = _times(shape)[provider]
    if isinstance(times, str):
        pytest.skip(f"{provider}: {times}")
    batch, keys, heads, kv_heads = shape
    benchmark.group = f"decode B {batch} S {keys} H {heads}/{kv_heads}"
    benchmark.extra_info |= {"provider": provider, "shape": shape}
    report(benchmark, times)
    nbytes = 4 * batch * keys * kv_heads * HEAD_DIM
    benchmark.extra_info["tbs"] = round(nbytes / benchmark.stats.stats.median / 1e12, 2)


# ---- latents -----------------------------------------------------------------------------------------------------------
LATENT, ROTARY, SCALE = 512, 64, 192**-0.5
MLA_SHAPES = [(128, 4096, 16), (128, 4096, 64), (128, 4096, 128), (32, 4096, 128), (8, 32768, 128), (1, 32768, 16)]  # .., heads
MLA_PROVIDERS = "latents", "latents, pages 64", "latents, pages 1", "latents, 4 tokens", "latents, fp8", "copy"


def _latents(batch, keys, heads):
    """q for the most tokens, latents, the same in fp8 with their descales and rotated columns, lengths, tables, half a copy."""
    latent = torch.randn((batch, keys, LATENT + ROTARY), device="cuda", dtype=torch.bfloat16)
    descale = latent[..., :LATENT].abs().amax(-1).float() / 448
    latent_fp8 = (latent[..., :LATENT] / descale[..., None]).to(torch.float8_e4m3fn)
    tables = {n: torch.randperm(batch * keys // n, device="cuda").int().view(batch, keys // n) for n in (1, 64)}
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    q = torch.randn((batch, 4, heads, LATENT + ROTARY), device="cuda", dtype=torch.bfloat16)
    half = torch.empty(latent.numel() // 2, device="cuda", dtype=torch.bfloat16)
    return q, latent, (latent_fp8, descale, latent[..., LATENT:].contiguous()), lengths, tables, half


def _mla(tokens=1, page=None, fp8=False):
    """A call of attention.mla_decode on the arrays of _latents."""

    def call(q, latent, fp8_cache, lengths, tables, half):
        kwargs = {"lengths": lengths, "scale": SCALE}
        if fp8:
            latent_fp8, descale, rotary = fp8_cache
            return attention.mla_decode(q[:, :tokens], latent_fp8, descale=descale, rotary=rotary, **kwargs)
        if page is None:
            return attention.mla_decode(q[:, :tokens], latent, **kwargs)
        return attention.mla_decode(q[:, :tokens], latent.view(-1, page, LATENT + ROTARY), pages=tables[page], **kwargs)

    return call


def _copy_half(q, latent, fp8_cache, lengths, tables, half):
    """Reads and writes as many bytes together as there are of latents."""
    half.copy_(latent.view(-1)[: half.numel()])


MLA = dict(zip(MLA_PROVIDERS, (_mla(), _mla(page=64), _mla(page=1), _mla(4), _mla(fp8=True), _copy_half), strict=True))


@functools.cache
def _mla_times(shape):
    """{provider: milliseconds of every round}"""
    batch, keys, _ = shape
    nbytes = 2 * batch * keys * (LATENT + ROTARY)
    _compiled()
    sets = rotated(lambda: _latents(*shape), nbytes)
    q, latent = (x[-1].float() for x in sets[0][:2])
    p = (q[0] @ latent.T * SCALE).softmax(-1)
    ref, low = p @ latent[:, :LATENT], (p.bfloat16().float() @ latent[:, :LATENT]).bfloat16().float()
    for name in ("latents", "latents, pages 64"):
        page_table = torch.arange(batch * keys // 64, device="cuda").int().view(batch, -1)
        out = MLA[name](*sets[0][:4], {64: page_table}, None)[-1, 0].float()
        assert (out - ref).abs().max() <= 2 * (low - ref).abs().max() + 2**-8 * ref.abs().max()
    return replayed(MLA, sets, ROUNDS, max(len(sets), min(200, int(2e10 / nbytes))))


@pytest.mark.parametrize("provider", MLA_PROVIDERS)
@pytest.mark.parametrize("shape", MLA_SHAPES, ids=lambda s: "B {} S {} H {}".format(*s))
def test_mla_decode(benchmark, shape, provider):
    """TB/s are of latents in bf16, whatever is read; TFLOPS of one token."""
    batch, keys, heads = shape
    benchmark.group = f"mla_decode B {batch} S {keys} H {heads}"
    benchmark.extra_info |= {"provider": provider, "shape": shape}
    report(benchmark, _mla_times(shape)[provider])
    seconds, columns = benchmark.stats.stats.median, LATENT + ROTARY
    benchmark.extra_info["tbs"] = round(2 * batch * keys * columns / seconds / 1e12, 2)
    benchmark.extra_info["tflops"] = round(2 * batch * keys * heads * (columns + LATENT) / seconds / 1e12, 1)


# ---- kernels, before anything is timed ---------------------------------------------------------------------------------
def first_calls(name):
    """Each kernel of a provider of ours once, so that its machine code lies on disk."""
    if name in OURS:
        for batch, *shape in SHAPES:
            OURS[name](*_inputs(min(batch, 2), *shape))  # which kernel it is depends on whether there are several sequences
    else:
        for shape in MLA_SHAPES:
            MLA[name](*_latents(*shape))


@functools.cache
def _compiled():
    """All providers' at once, a process each."""
    names = [*OURS, *(name for name in MLA_PROVIDERS if name not in OURS)]
    call = "import sys; from bench.test_decode import first_calls; first_calls(sys.argv[1])"
    running = [subprocess.Popen([sys.executable, "-c", call, name]) for name in names]
    for process in running:
        process.wait()
