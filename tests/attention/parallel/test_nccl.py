"""The same on GPUs, by NCCL, two processes for all tests: at sizes at which tiles are whole, and again and again while the GPU
is busy."""

import pytest

pytest.importorskip("torch")

import torch
from ranks import Waiting, compared, drawn, integers, numbers

import attention
from attention import parallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
WIDE = dict(dim=128, heads=8, kv_heads=4)
EVERY = 0, 1, 2, 3, 4


@pytest.fixture(scope="module")
def two():
    """Two processes, for all tests here."""
    found = Waiting(2, "nccl")
    yield found
    found.end()


def test_bits_are_those_of_one_gpu(two):
    two.run(bits)


def bits(world):
    for length in 4096, 5001:
        compared(length, "gather", shapes=WIDE, causal=True, deterministic=True, bitwise=EVERY)
        compared(length, "gather", shapes=WIDE, window=(1000, 0))
        compared(length, "ulysses", shapes=WIDE, causal=True)
    docs = torch.arange(4096, device="cuda", dtype=torch.int32) // 777
    compared(4096, "gather", shapes=WIDE, causal=True, mask=lambda b, h, i, j, docs: docs[i] == docs[j], aux=(docs,))
    compared(4096, "gather", shapes=WIDE, causal=True, cu_seqlens=integers(0, 1000, 1001, 3333, 4096))
    compared(2048, "gather", shapes=WIDE, causal=True, sink=numbers(8), learned=("sink",))


def test_recurrences(two):
    two.run(recurrent)


def recurrent(world):
    """Parts in as many segments as the GPU has room for, and in one, of heads that fill it."""
    torch.manual_seed(0)
    part = lambda x: parallel.shard(x, order="contiguous")
    for length, heads in (20000, 4), (3000, 72):
        q, k, v = (torch.randn(1, length, heads, 128, device="cuda").bfloat16() for _ in range(3))
        k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
        beta, decay = torch.rand(1, length, heads, device="cuda"), -0.01 * torch.rand(1, length, heads, device="cuda")
        rate = -torch.rand(heads, device="cuda")
        for name, arrays, options in (
            ("linear", (q, k, v), dict(decay=decay)),
            ("delta_rule", (q, k, v, beta), dict(decay=decay)),
            ("delta_rule", (q, k, v, beta), {}),
            ("mamba2", (v, 0.1 * beta, rate, k, q), {}),
        ):
            wanted = getattr(attention, name)(*arrays, **options)
            mine = [x if x is rate else part(x) for x in arrays]
            found = getattr(parallel, name)(*mine, length=length, **{n: part(x) for n, x in options.items()})
            off = (found.float() - part(wanted).float()).abs().max()
            assert off <= 2**-6 * wanted.float().abs().max(), f"{name} of {heads} heads: {off}"


def test_everything_runs_on_the_callers_stream(two):
    two.run(on_a_stream)


def on_a_stream(world):
    """What the arrays hold is written there after a while: who reads them on another stream reads NaN."""
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


def test_ring_is_as_near_as_one_gpu(two):
    two.run(near)


def near(world):
    for options in dict(causal=True), dict(window=(700, 0)), dict(softcap=20.0):
        compared(2048, "ring", shapes=WIDE, bitwise=(), **options)


def test_five_hundred_repetitions_under_load(two):
    two.run(again)


def again(world):
    given = [parallel.shard(x) for x in drawn(8192, **WIDE)]
    busy, other = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    wanted, wrong = parallel.forward(*given, scheme="gather", causal=True), torch.zeros((), device="cuda")
    for _ in range(500):
        with torch.cuda.stream(busy):
            other @ other
        wrong += (parallel.forward(*given, scheme="gather", causal=True) != wanted).any()
    assert wrong.item() == 0
