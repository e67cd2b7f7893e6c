"""The same on GPUs, by NCCL, one process each: at sizes at which tiles are whole, and again and again while the GPU is busy."""

import pytest

pytest.importorskip("torch")

import torch
from ranks import compared, drawn, integers, numbers, start

from attention import parallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
WIDE = dict(dim=128, heads=8, kv_heads=4)
EVERY = 0, 1, 2, 3, 4


def test_bits_are_those_of_one_gpu():
    start(2, bits, "nccl")


def bits(world):
    for length in 4096, 5001:
        compared(length, "gather", shapes=WIDE, causal=True, deterministic=True, bitwise=EVERY)
        compared(length, "gather", shapes=WIDE, window=(1000, 0))
        compared(length, "ulysses", shapes=WIDE, causal=True)
    docs = torch.arange(4096, device="cuda", dtype=torch.int32) // 777
    compared(4096, "gather", shapes=WIDE, causal=True, mask=lambda b, h, i, j, docs: docs[i] == docs[j], aux=(docs,))
    compared(4096, "gather", shapes=WIDE, causal=True, cu_seqlens=integers(0, 1000, 1001, 3333, 4096))
    compared(2048, "gather", shapes=WIDE, causal=True, sink=numbers(8), learned=("sink",))


def test_ring_is_as_near_as_one_gpu():
    start(2, near, "nccl")


def near(world):
    for options in dict(causal=True), dict(window=(700, 0)), dict(softcap=20.0):
        compared(2048, "ring", shapes=WIDE, bitwise=(), **options)


def test_five_hundred_repetitions_under_load():
    start(2, again, "nccl")


def again(world):
    given = [parallel.shard(x) for x in drawn(8192, **WIDE)]
    busy, other = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    wanted, wrong = parallel.forward(*given, scheme="gather", causal=True), torch.zeros((), device="cuda")
    for _ in range(500):
        with torch.cuda.stream(busy):
            other @ other
        wrong += (parallel.forward(*given, scheme="gather", causal=True) != wanted).any()
    assert wrong.item() == 0
