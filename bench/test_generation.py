"""A step of generation, and attention's share of it: a decoder of Llama 3 8B's shape in plain torch, with attention.decode,
with torch's scaled_dot_product_attention, and with no attention at all. What a step then takes less is attention's part.

32 layers, bf16, random weights; 8192 keys a sequence in use, the last of which the step writes. Embedding, products, norms and
MLP are the same code for all, and so is the rotation of q and k, but for `tiles, one call`, where attention.decode rotates.
`tiles, pages 64` is ours over a PagedCache whose sequences grew in turn. `sdpa` is what torch chooses, `cudnn` and `flash2`
what it is told: SDPBackend.CUDNN_ATTENTION and FLASH_ATTENTION; all three with enable_gqa and no mask, for all of a cache is in
use, which a server cannot promise. A step is one CUDA graph, or `eager`, which has the host's part. Needs 60 GB.
`pytest bench/test_generation.py --benchmark-json=generation.json`.
"""

import contextlib
import functools
import statistics
import time

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import attention  # noqa: E402
from attention.cache import PagedCache  # noqa: E402
from bench import peers  # noqa: E402
from bench.measure import report  # noqa: E402

DIM, HIDDEN, LAYERS, VOCABULARY = 4096, 14336, 32, 128256
HEADS, KV_HEADS, HEAD_DIM, KEYS, PAGE = 32, 8, 128, 8192, 64
BATCHES, ROUNDS, STEPS = (1, 32), 5, 10


def _drawn(*shape, scale=1.0):
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, scale)


@functools.cache
def _weights():
    """The weights of the embedding, which is the head, too, and of each layer: QKV, output, gate and up, down, and two
    norms."""
    shapes = ((HEADS + 2 * KV_HEADS) * HEAD_DIM, DIM), (DIM, HEADS * HEAD_DIM), (2 * HIDDEN, DIM), (DIM, HIDDEN)
    norms = torch.ones(2, DIM, device="cuda", dtype=torch.bfloat16)
    return _drawn(VOCABULARY, DIM), [(*(_drawn(*x, scale=x[1] ** -0.5) for x in shapes), *norms) for _ in range(LAYERS)]


@functools.cache
def _angles():
    """cos and sin of each position, of neighbours in a row; and of the last one, as complex numbers."""
    rates = 500000.0 ** (-torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM)
    angles = torch.arange(KEYS, device="cuda")[:, None] * rates
    return angles.cos(), angles.sin(), torch.polar(torch.ones_like(angles[-1]), angles[-1])


def _step(token, attend):
    """The next token of each sequence. attend: (layer, queries and keys, values) to outputs, (B, 1, heads, D)."""
    embedding, layers = _weights()
    x = embedding[token]
    for n, (qkv, output, gates, down, first, second) in enumerate(layers):
        heads = F.linear(F.rms_norm(x, (DIM,), first), qkv).unflatten(-1, (-1, HEAD_DIM))
        x = x + F.linear(attend(n, *heads.split((HEADS + KV_HEADS, KV_HEADS), 2)).flatten(2), output)
        gate, up = F.linear(F.rms_norm(x, (DIM,), second), gates).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, down)
    return F.linear(F.rms_norm(x, (DIM,)), embedding).argmax(-1)


def _turned(qk):
    """Queries and keys, rotated by the last position."""
    pairs = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2))) * _angles()[2]
    return torch.view_as_real(pairs).flatten(-2).to(qk.dtype).split((HEADS, KV_HEADS), 2)


class Caches:
    """Keys and values of all layers, (B, KEYS, Hk, D), and the same memory in pages; what attends to them, by name."""

    def __init__(self, batch):
        self.dense = [(_drawn(batch, KEYS, KV_HEADS, HEAD_DIM), _drawn(batch, KEYS, KV_HEADS, HEAD_DIM)) for _ in range(LAYERS)]
        pools = [tuple(x.view(-1, PAGE, KV_HEADS, HEAD_DIM) for x in layer) for layer in self.dense]
        self.paged = PagedCache(pools, sequences=batch, tokens=KEYS)
        sequences = [self.paged.add() for _ in range(batch)]
        for count in [PAGE] * (KEYS // PAGE - 1) + [PAGE - 1, 1]:
            self.paged.extend(sequences, count)
        self.before = torch.full((batch,), KEYS - 1, dtype=torch.int32, device="cuda")
        self.zeros = torch.zeros(batch, 1, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def tiles(self, n, qk, v):
        q, k = _turned(qk)
        return attention.decode(q, *self.dense[n], lengths=self.before, k_new=k, v_new=v)

    def pages(self, n, qk, v):
        q, k = _turned(qk)
        where = {"lengths": self.paged.starts, "pages": self.paged.pages}
        return attention.decode(q, *self.paged.layers[n], **where, k_new=k, v_new=v)

    def one_call(self, n, qk, v):
        q, k = qk.split((HEADS, KV_HEADS), 2)
        turn = {"rotary": _angles()[:2], "interleaved": True}
        return attention.decode(q, *self.dense[n], lengths=self.before, k_new=k, v_new=v, **turn)

    def sdpa(self, n, qk, v):
        (q, k), cache = _turned(qk), self.dense[n]
        for buffer, new in zip(cache, (k, v)):
            buffer[:, -1:] = new
        q, k, v = (x.transpose(1, 2) for x in (q, *cache))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    def nothing(self, n, qk, v):
        _turned(qk)
        return self.zeros


OURS = {"tiles": Caches.tiles, "tiles, one call": Caches.one_call, "tiles, pages 64": Caches.pages}
CHOSEN = {"sdpa": None, "cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
ATTEND = OURS | dict.fromkeys(CHOSEN, Caches.sdpa) | {"nothing": Caches.nothing}


def _told(name):
    """What torch is told of its attention."""
    backend = CHOSEN.get(name)
    return contextlib.nullcontext() if backend is None else sdpa_kernel(backend)


def _check(caches, name):
    """The last sequence's last head in the first layer against float32, by the rule of the tests."""
    batch, caches_of = len(caches.before), caches.paged.layers[0] if "pages" in name else caches.dense[0]
    qk, new = _drawn(batch, 1, HEADS + KV_HEADS, HEAD_DIM), _drawn(batch, 1, KV_HEADS, HEAD_DIM)
    with _told(name):
        out = ATTEND[name](caches, 0, qk, new)[-1, 0, -1].float()
    row = caches.paged.pages[-1] if "pages" in name else -1
    k, v = (x[row][..., -1, :].reshape(KEYS, HEAD_DIM).float() for x in caches_of)
    assert torch.equal(v[-1], new[-1, 0, -1].float())
    p = (k @ _turned(qk)[0][-1, 0, -1].float() * HEAD_DIM**-0.5).softmax(0)
    ref, low = p @ v, (p.bfloat16().float() @ v).bfloat16().float()
    assert (out - ref).abs().max() <= 2 * (low - ref).abs().max() + 2**-8 * ref.abs().max()


def _captured(step):
    """A function that replays the step, captured in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@functools.cache
def _times(batch):
    """{(provider, how): milliseconds of a step in every round}, or the reason why it cannot run."""
    caches, token, ways, times = Caches(batch), torch.zeros(batch, 1, dtype=torch.int64, device="cuda"), {}, {}
    for name, attend in ATTEND.items():

        def step(name=name, attend=attend):
            with _told(name):
                return _step(token, functools.partial(attend, caches))

        try:
            step()
            if name != "nothing":
                _check(caches, name)
            ways |= {(name, "eager"): step, (name, "graph"): _captured(step)}
        except peers.ABSENT as error:
            times |= dict.fromkeys([(name, "eager"), (name, "graph")], f"{type(error).__name__}: {error}")
    times |= {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, run in ways.items():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(STEPS):
                run()
            torch.cuda.synchronize()
            times[way].append((time.perf_counter() - begun) / STEPS * 1e3)
    return times


@pytest.mark.parametrize("provider", ATTEND)
@pytest.mark.parametrize("how", ["graph", "eager"])
@pytest.mark.parametrize("batch", BATCHES)
def test_generation(benchmark, batch, how, provider):
    """Rows of a group are what one reads: the same step, one provider each."""
    times = _times(batch)
    mine = times[provider, how]
    if isinstance(mine, str):
        pytest.skip(f"{provider}: {mine}")
    benchmark.group = f"generation B {batch} S {KEYS} {how}"
    report(benchmark, mine)
    step, without = (statistics.median(x) for x in (mine, times["nothing", how]))
    share, speed = round(1 - without / step, 3), round(batch / step * 1e3)
    benchmark.extra_info |= {"provider": provider, "batch": batch, "how": how, "share": share, "tokens_per_s": speed}
