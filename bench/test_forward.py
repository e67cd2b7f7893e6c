"""attention.forward beside cuDNN, FlashAttention-2 (both through torch) and FlashAttention-4, where they are installed.

`tiles` is what a user gets on this GPU, `tiles_sm_80` the kernel for all since Ampere, whose peer is FlashAttention-2. bf16,
B * S = 16384, H * D = 2048, (B, S, H, D) for all: the peers get views of the same memory. See measure.py for the protocol.
`pytest bench/test_forward.py --benchmark-json=forward.json`, then `python bench/table.py forward.json`.
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
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ROUNDS = 7
PROVIDERS = "tiles", "tiles_sm_80", "cudnn", "flash4", "flash2"


def _inputs(head_dim, length):
    shape = TOKENS // length, length, WIDTH // head_dim, head_dim
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))


def _check(call, q, k, v, causal):
    """One head of one batch against float32, by the rule of the tests."""
    out = call(q, k, v)[-1:, :, -1].float()
    one = [x[-1:, :, -1].float() for x in (q, k, v)]

    def formula(round):
        s = one[0] @ one[1].transpose(1, 2) * q.shape[-1] ** -0.5
        if causal:
            s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
        return round(round(s.softmax(-1)) @ one[2])

    ref, low = formula(lambda x: x), formula(lambda x: x.bfloat16().float())
    assert (out - ref).abs().max() <= 2 * (low - ref).abs().max() + 2**-9 * ref.abs().max()


@functools.cache
def _times(head_dim, causal, length):
    """{provider: milliseconds of every round}, or the reason why it cannot run."""
    sets = rotated(lambda: _inputs(head_dim, length), 3 * TOKENS * WIDTH * 2)
    ours = {
        "tiles": functools.partial(attention.forward, causal=causal),
        "tiles_sm_80": functools.partial(attention.forward, causal=causal, family="sm_80"),
    }
    theirs, missing = peers.present(peers.softmax(causal), sets[0])
    for call in (calls := ours | theirs).values():
        _check(call, *sets[0], causal)
    return interleaved(calls, sets, ROUNDS) | missing


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_forward(benchmark, head_dim, causal, length, provider):
    """Rows of a group are what one reads: the same problem, one provider each."""
    times = _times(head_dim, causal, length)[provider]
    if isinstance(times, str):
        pytest.skip(f"{provider}: {times}")
    report_attention(benchmark, "forward", provider, times, 4 * TOKENS * length * WIDTH, head_dim, causal, length)
