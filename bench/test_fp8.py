"""attention.forward of float8_e4m3fn beside ours and cuDNN's of bfloat16.

cuDNN's fp8 attention cannot be reached through torch, whose SDPA takes 2-byte tensors; NVIDIA's own figures for it on an H200
are in bench/NOTES.md. B * S = 16384, H * D = 2048, (B, S, H, D) for all. See measure.py for the protocol.
`pytest bench/test_fp8.py --benchmark-json=fp8.json`.
"""

import functools

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import attention  # noqa: E402
from bench import peers  # noqa: E402
from bench.measure import interleaved, report_attention, rotated  # noqa: E402

TOKENS, WIDTH = 16384, 2048
LENGTHS = (2048, 4096, 8192, 16384)
PROVIDERS = "tiles", "tiles_bf16", "cudnn"
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


@functools.cache
def _times(head_dim, causal, length):
    """{provider: milliseconds of every round}, or the reason why it cannot run."""
    sets = rotated(lambda: _inputs(head_dim, length), 3 * TOKENS * WIDTH)
    ours = {
        "tiles": lambda q, k, v, *_: attention.forward(q, k, v, causal=causal),
        "tiles_bf16": lambda *x: attention.forward(*x[3:], causal=causal),
    }
    cudnn = peers.softmax(causal)["cudnn"]
    theirs, missing = peers.present({"cudnn": lambda *x: cudnn(*x[3:])}, sets[0])
    for call in (calls := ours | theirs).values():
        _check(call, causal, *sets[0])
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
