"""attention.backward beside the backward passes of cuDNN and FlashAttention-2 (both through torch) and of FlashAttention-4,
where they are installed.

`tiles` is attention.backward into given arrays; the peers are asked through torch.autograd.grad, which makes new ones. bf16,
B * S = 16384, H * D = 2048, (B, S, H, D) for all. Operations count 2.5 times those of the forward pass. See measure.py for the
protocol. `pytest bench/test_backward.py --benchmark-json=backward.json`, then `python bench/table.py backward.json`.
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
PROVIDERS = "tiles", "cudnn", "flash4", "flash2"


class ForwardOfProviders:
    """Inputs, what each provider's forward pass made of them, and the gradient of that."""

    def __init__(self, head_dim, length, causal, providers):
        shape = TOKENS // length, length, WIDTH // head_dim, head_dim
        self.q, self.k, self.v, self.dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        self.out, self.lse = attention.forward(self.q, self.k, self.v, causal=causal, return_lse=True)
        self.gradients = [torch.empty_like(x) for x in (self.q, self.k, self.v)]
        self.leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        self.outs = {name: call(*self.leaves) for name, call in providers.items()}


def _tiles(passed, causal):
    dq, dk, dv = passed.gradients
    return attention.backward(
        passed.dout, passed.q, passed.k, passed.v, passed.out, passed.lse, causal=causal, dq=dq, dk=dk, dv=dv
    )


def _peer(name, passed):
    return torch.autograd.grad(passed.outs[name], passed.leaves, passed.dout, retain_graph=True)


def _check(call, passed, causal):
    """One head of one batch against float32, by the rule of the tests."""
    got = [x[-1, :, -1].float() for x in call(passed)]
    one = [x[-1, :, -1].float() for x in (passed.q, passed.k, passed.v, passed.dout)]
    scale = passed.q.shape[-1] ** -0.5

    def formula(round):
        q, k, v, dout = one
        s = q @ k.T * scale
        if causal:
            s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
        p = s.softmax(-1)
        ds = p * (dout @ v.T - (dout * round(round(p) @ v)).sum(-1, keepdim=True))
        return [round(x) for x in (round(ds) @ k * scale, round(ds).T @ q * scale, round(p).T @ dout)]

    ref, low = formula(lambda x: x), formula(lambda x: x.bfloat16().float())
    for mine, right, lossy in zip(got, ref, low):
        assert (mine - right).abs().max() <= 3 * (lossy - right).abs().max() + 2**-9 * right.abs().max()


@functools.cache
def _times(head_dim, causal, length):
    """{provider: milliseconds of every round}, or the reason why it cannot run."""
    theirs, missing = peers.present(peers.softmax(causal), ForwardOfProviders(head_dim, length, causal, {}).leaves)
    sets = [(x,) for x in rotated(lambda: ForwardOfProviders(head_dim, length, causal, theirs), 7 * TOKENS * WIDTH * 2)]
    calls = {"tiles": functools.partial(_tiles, causal=causal)}
    calls |= {name: functools.partial(_peer, name) for name in theirs}
    for call in calls.values():
        _check(call, *sets[0], causal)
    return interleaved(calls, sets, ROUNDS) | missing


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_backward(benchmark, head_dim, causal, length, provider):
    """Rows of a group are what one reads: the same problem, one provider each."""
    times = _times(head_dim, causal, length)[provider]
    if isinstance(times, str):
        pytest.skip(f"{provider}: {times}")
    report_attention(benchmark, "backward", provider, times, 10 * TOKENS * length * WIDTH, head_dim, causal, length)
