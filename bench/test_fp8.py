"""attention.forward of float8_e4m3fn beside ours and cuDNN's of bfloat16; `by block` has descales of each block of 128 rows, of
values, too, or `keys by block` not of those. And attention.quantize beside a copy that moves as many bytes.

cuDNN's fp8 attention cannot be reached through torch, whose SDPA takes 2-byte tensors; NVIDIA's own figures for it on an H200
are in bench/notes/fp8.md. B * S = 16384, H * D = 2048, (B, S, H, D) for all. See measure.py for the protocol.
`pytest bench/test_fp8.py --benchmark-json=fp8.json`.
"""

import functools

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import attention  # noqa: E402
from bench import peers  # noqa: E402
from bench.measure import interleaved, report, report_attention, rotated  # noqa: E402

TOKENS, WIDTH = 16384, 2048
LENGTHS = (2048, 4096, 8192, 16384)
PROVIDERS = "tiles", "by block", "keys by block", "tiles_bf16", "cudnn"
ROUNDS = 7


def _inputs(head_dim, length):
    """q, k and v in fp8, and in bfloat16 the same numbers."""
    shape = TOKENS // length, length, WIDTH // head_dim, head_dim
    narrow = [torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for _ in range(3)]
    return *narrow, *(x.bfloat16() for x in narrow)


def _check(call, causal, *inputs):
    """One head of one batch against float32: 4 times what rounding the weights loses, and a rounding of the output."""
    out = call(*inputs)[-1:, :, -1].float()
    q, k, v = (x[-1:, :, -1].float() for x in inputs[:3])
    s = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if causal:
        s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    p = (s - s.amax(-1, keepdim=True)).exp()
    total = p.sum(-1, keepdim=True)
    ref, low = p @ v / total, (256 * p).to(torch.float8_e4m3fn).float() @ v / 256 / total
    assert (out - ref).abs().max() <= 4 * (low - ref).abs().max() + 2**-9 * ref.abs().max()


def _by_block(causal, values):
    """A call of ours with descales of blocks that are all 1."""

    def call(q, k, v, *_):
        batch, length, heads, _ = q.shape
        each = torch.ones((batch, -(-length // 128), heads), device="cuda")
        descales = {"q_descale": each, "k_descale": each} | ({"v_descale": each} if values else {})
        return attention.forward(q, k, v, causal=causal, **descales)

    return call


@functools.cache
def _times(head_dim, causal, length):
    """{provider: milliseconds of every round}, or the reason why it cannot run."""
    sets = rotated(lambda: _inputs(head_dim, length), 3 * TOKENS * WIDTH)
    ours = {
        "tiles": lambda q, k, v, *_: attention.forward(q, k, v, causal=causal),
        "tiles_bf16": lambda *x: attention.forward(*x[3:], causal=causal),
    }
    if head_dim <= 128:
        ours |= {"by block": _by_block(causal, True), "keys by block": _by_block(causal, False)}
    cudnn = peers.softmax(causal)["cudnn"]
    theirs, missing = peers.present({"cudnn": lambda *x: cudnn(*x[3:])}, sets[0])
    for call in (calls := ours | theirs).values():
        _check(call, causal, *sets[0])
    missing |= {name: "there is no kernel of so many columns" for name in PROVIDERS if name not in {*calls, *missing}}
    return interleaved(calls, sets, ROUNDS) | missing


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fp8(benchmark, head_dim, causal, length, provider):
    """Rows of a group are what one reads: the same problem, one provider each."""
    times = _times(head_dim, causal, length)[provider]
    if isinstance(times, str):
        pytest.skip(f"{provider}: {times}")
    report_attention(benchmark, "fp8", provider, times, 4 * TOKENS * length * WIDTH, head_dim, causal, length)


QUANTIZERS = {
    "a head": attention.quantize,
    "a head, centred": functools.partial(attention.quantize, centred=True),
    "a block": functools.partial(attention.quantize, block=128),
    "a block, centred": functools.partial(attention.quantize, block=128, centred=True),
    "copy": lambda x: x.view(-1)[: 3 * x.numel() // 4].clone(),  # three bytes a number, read and written
}


@functools.cache
def _quantized(length):
    """{provider: milliseconds of every round}"""
    shape = TOKENS // length, length, WIDTH // 128, 128
    sets = rotated(lambda: (torch.randn(shape, device="cuda", dtype=torch.bfloat16),), 2 * TOKENS * WIDTH)
    return interleaved(QUANTIZERS, sets, ROUNDS)


@pytest.mark.parametrize("provider", QUANTIZERS)
@pytest.mark.parametrize("length", LENGTHS)
def test_quantize(benchmark, length, provider):
    """One of q, k and v, D 128."""
    benchmark.group = f"quantize S {length}"
    benchmark.extra_info |= {"provider": provider, "length": length}
    report(benchmark, _quantized(length)[provider])
