"""attention.parallel on one GPU, whose ranks are threads: kernels and plans at sizes with whole tiles. test_nccl.py has the
tests that need two GPUs, of messages and streams, and finds these kernels on disk; `-n 8` compiles them in parallel."""

import importlib

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from ranks import drawn, start
from threads import compared, together

import attention
from attention import parallel

pytestmark = pytest.mark.gpu
WIDE, NARROW = dict(dim=128, heads=8, kv_heads=4), dict(dim=64, heads=4, kv_heads=2)
EVERY = 0, 1, 2, 3, 4
CASES = {
    "causal, in order": (4096, "gather", dict(causal=True, deterministic=True)),
    "uneven, in order": (5001, "gather", dict(causal=True, deterministic=True)),
    "causal": (4096, "gather", dict(causal=True)),
    "parts of few keys": (4703, "gather", dict(causal=True)),
    "joined parts of few keys": (2560, "gather", dict(causal=True)),
    "a score": (2528, "gather", dict(score=lambda s, b, h, i, j: s + 0.001 * (i - 2 * j))),
    "a window": (5001, "gather", dict(window=(1000, 0))),
    "heads": (4096, "ulysses", dict(causal=True)),
    "documents by a mask": (4096, "gather", dict(causal=True, mask=lambda b, h, i, j, docs: docs[i] == docs[j])),
    "documents": (4096, "gather", dict(causal=True, cu_seqlens=[0, 1000, 1001, 3333, 4096])),
    "a mask of documents": (
        4096,
        "gather",
        dict(cu_seqlens=[0, 1000, 1001, 3333, 4096], mask=lambda b, h, i, j: (i + j + b) % 5 > 0),
    ),
    "sinks": (2048, "gather", dict(causal=True, sink=[0.5, -1.0, 2.0, 0.0, 1.0, 1.5, -2.0, 3.0])),
    "by ring": (4096, "ring", dict(causal=True)),
    "by ring, uneven": (5001, "ring", dict(causal=True)),
    "by ring, a window": (2048, "ring", dict(window=(700, 0))),
    "by ring, capped": (2048, "ring", dict(softcap=20.0)),
    "by ring, sinks": (2048, "ring", dict(causal=True, sink=[0.5, -1.0, 2.0, 0.0, 1.0, 1.5, -2.0, 3.0])),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(name, world):
    """gather and ulysses are bitwise what one call gives, and gradients in order are; ring in one turn, and in four."""
    length, scheme, options = CASES[name]
    if scheme == "ulysses" and world == 3:
        pytest.skip("8 heads are not for three ranks")
    call_options = dict(options)
    if "mask" in call_options and "cu_seqlens" not in call_options:
        call_options["aux"] = (torch.arange(length, device="cuda", dtype=torch.int32) // 777,)
    for array, of in ("cu_seqlens", torch.int32), ("sink", torch.float32):
        if array in call_options:
            call_options[array] = torch.tensor(call_options[array], device="cuda", dtype=of)
    learned = ["sink"] if "sink" in call_options else []
    bitwise = () if scheme == "ring" else EVERY if call_options.get("deterministic") else (0, 1)
    shapes = NARROW if "few keys" in name else WIDE
    for requested in ({}, dict(memory=1)) if scheme == "ring" else ({},):
        compared(
            world, length, scheme, "cuda", shapes=shapes, bitwise=bitwise, learned=learned, requested=requested, **call_options
        )


@pytest.mark.parametrize("name", ["linear", "delta_rule", "delta_rule without decays", "mamba2"])
@pytest.mark.parametrize(("length", "heads"), [(20000, 4), (3000, 72)])
def test_recurrences(name, length, heads):
    """Shards in as many segments as the GPU has room for, and in one segment, if the heads fill the GPU."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, length, heads, 128, device="cuda").bfloat16() for _ in range(3))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    beta, decay = torch.rand(1, length, heads, device="cuda"), -0.01 * torch.rand(1, length, heads, device="cuda")
    rate, function = -torch.rand(heads, device="cuda"), name.partition(" ")[0]
    arrays = {"linear": (q, k, v), "delta_rule": (q, k, v, beta), "mamba2": (v, 0.1 * beta, rate, k, q)}[function]
    options = dict(decay=decay) if name in ("linear", "delta_rule") else {}
    expected = getattr(attention, function)(*arrays, **options)

    def rank(peers):
        part = lambda x: x if x is rate else parallel.shard(x, peers, order="contiguous")
        call_options = {n: part(x) for n, x in options.items()}
        return getattr(parallel, function)(*map(part, arrays), group=peers, length=length, **call_options)

    off = (torch.cat(together(2, rank), 1).float() - expected.float()).abs().max()
    assert off <= 2**-6 * expected.float().abs().max()


@pytest.mark.timeout(150)
def test_rows_come_by_copies_between_processes(monkeypatch):
    """Two processes map each other's memory on one GPU."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    start(2, by_copies)


def by_copies(world):
    """New arrays in every call, and at the end longer ones, for which larger buffers are allocated."""

    def all_gather_bytes(said, device):
        actual = [None] * world
        dist.all_gather_object(actual, said)
        return actual

    importlib.import_module("attention.parallel.symmetric_memory").TIMEOUT = 60_000
    peers = parallel.mapped()
    vars(peers)["all_gather_bytes"] = all_gather_bytes  # gloo has no all-gather of a GPU's tensors
    wrong = torch.zeros((), device="cuda")
    for n in range(40):
        length = 1024 if n < 30 else 3001
        whole = [x.cuda() for x in drawn(length, seed=n, **WIDE)]
        mine = [parallel.shard(x, peers) for x in whole]
        if n < 10 or length > 1024:
            dist.barrier()  # while one still compiles, the others' GPU would wait
        out = parallel.forward(*mine, group=peers, scheme="gather", causal=True, length=length)
        wrong += (out != parallel.shard(attention.forward(*whole, causal=True), peers)).any()
    assert wrong.item() == 0
