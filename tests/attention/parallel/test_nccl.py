"""attention.parallel on several GPUs, by NCCL, with the same processes for all tests: messages, streams, and repetition under
load. Few variants, because compiling takes longest: test_one_gpu.py has them all, and leaves its kernels on disk if it runs
before."""

import pytest

pytest.importorskip("torch")

import torch
from ranks import Waiting, compared, drawn, numbers

import attention
from attention import parallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
WIDE = dict(dim=128, heads=8, kv_heads=4)
EVERY = 0, 1, 2, 3, 4


NUMBERS = sorted({2, max(2, torch.cuda.device_count())})


@pytest.fixture(scope="module", params=NUMBERS, ids="{} GPUs".format)
def ranks(request):
    """The processes of all tests in this module: two, and as many as there are GPUs."""
    found = Waiting(request.param, "nccl")
    yield found
    found.end()


def test_bits_are_those_of_one_gpu(ranks):
    ranks.run(bits)


def bits(world):
    for length in 4096, 5001:
        compared(length, "gather", shapes=WIDE, causal=True, deterministic=True, bitwise=EVERY)
    for length in 4703, 2443, 2560:  # parts have up to 2048 keys, for which tiles are others, and the whole has more
        compared(length, "gather", shapes=dict(dim=64, heads=4, kv_heads=2), causal=True)
        compared(length, "ulysses", shapes=dict(dim=64, heads=4, kv_heads=2), causal=True)
    compared(1456, "gather", order="contiguous", shapes=WIDE, causal=True, alibi=numbers(8).abs())  # 1024 keys are as many here
    compared(2528, "gather", shapes=WIDE, score=lambda s, b, h, i, j: s + 0.001 * (i - 2 * j))
    compared(4096, "ulysses", shapes=WIDE, causal=True, deterministic=True)  # its gradients are sums in float32
    q, k, v = drawn(8192, **WIDE)
    found = parallel.forward(*map(parallel.shard, (q, k, v)), scheme="gather", window=(1000, 0))  # its halo comes meanwhile
    assert torch.equal(found, parallel.shard(attention.forward(q, k, v, window=(1000, 0))))


def test_recurrences(ranks):
    ranks.run(recurrent)


def recurrent(world):
    torch.manual_seed(0)
    part = lambda x: parallel.shard(x, order="contiguous")
    q, k, v = (torch.randn(1, 20000, 4, 128, device="cuda").bfloat16() for _ in range(3))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    beta, decay = torch.rand(1, 20000, 4, device="cuda"), -0.01 * torch.rand(1, 20000, 4, device="cuda")
    for name, arrays in ("linear", (q, k, v)), ("delta_rule", (q, k, v, beta)):
        wanted = getattr(attention, name)(*arrays, decay=decay)
        found = getattr(parallel, name)(*map(part, arrays), decay=part(decay), length=q.shape[1])
        off = (found.float() - part(wanted).float()).abs().max()
        assert off <= 2**-6 * wanted.float().abs().max(), f"{name}: {off}"


def test_everything_runs_on_the_callers_stream(ranks):
    ranks.run(on_a_stream)


def on_a_stream(world):
    """The arrays are written late on a side stream: a reader on another stream would see NaN."""
    stream, whole = torch.cuda.Stream(), drawn(4096, **WIDE)
    wanted = {scheme: parallel.shard(attention.forward(*whole, causal=True)) for scheme in ("gather", "ulysses", "ring")}
    mine = [parallel.shard(x) for x in whole]
    for scheme, x in wanted.items():
        for given in (False, True):
            arrays = [torch.full_like(one, torch.nan) for one in mine]
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)
                for to, one in zip(arrays, mine):
                    to.copy_(one)
                found = None if given else parallel.forward(*arrays, scheme=scheme, causal=True)
            found = parallel.forward(*arrays, scheme=scheme, causal=True, stream=stream) if given else found
            stream.synchronize()
            assert (found.float() - x.float()).abs().max() <= 2**-6, f"{scheme}, {given=}"


def test_five_hundred_repetitions_under_load(ranks):
    ranks.run(again)


def again(world):
    given = [parallel.shard(x) for x in drawn(8192, **WIDE)]
    busy, other = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    wanted, wrong = parallel.forward(*given, scheme="gather", causal=True), torch.zeros((), device="cuda")
    for _ in range(500):
        with torch.cuda.stream(busy):
            other @ other
        wrong += (parallel.forward(*given, scheme="gather", causal=True) != wanted).any()
    assert wrong.item() == 0


def test_attention_overlaps_copies(ranks):
    ranks.run(arriving)


def arriving(world):
    """New arrays in every call, of two lengths that alternate, on two streams, while the GPU is busy: the bits of one GPU, and
    no message is sent."""
    group, busy, side = parallel.mapped(), torch.cuda.Stream(), torch.cuda.Stream()
    other, wrong = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16), torch.zeros((), device="cuda")
    vars(group)["exchange"] = None
    for n in range(24):
        whole = drawn(4096 if n % 2 else 8192, seed=n, **WIDE)
        mine, wanted = [parallel.shard(x) for x in whole], parallel.shard(attention.forward(*whole, causal=True))
        with torch.cuda.stream(busy):
            other @ other
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if n % 3 == 0 else torch.cuda.current_stream()):
            for _ in range(3):
                out = parallel.forward(*mine, group=group, scheme="gather", causal=True)
                wrong += (out != wanted).any()
        torch.cuda.current_stream().wait_stream(side)
    assert wrong.item() == 0
