"""The problems of bench/shapes.py: what they are, and the small ones that stand for them where there is no GPU."""

import itertools
from typing import Any, NamedTuple

import torch

BF16, FP16 = torch.bfloat16, torch.float16


class BenchProblem(NamedTuple):
    """A problem of one of the three kinds, forward, backward and decode. lens: (query, key) lengths of packed sequences.
    lengths, page, told: options of decode."""

    kind: str
    name: str
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    causal: bool = False
    dtype: Any = BF16
    window: tuple | None = None
    lens: tuple | None = None
    lengths: tuple | None = None
    page: int | None = None
    splits: int | None = None
    family: str | None = None

    @property
    def pairs(self):
        """How many scores are computed for a head, masks and lengths considered."""
        lens = self.lens or self.lengths or ((self.queries, self.keys),) * self.batch
        return sum(_pairs(*(x if isinstance(x, tuple) else (self.queries, x)), self.causal, self.window) for x in lens)

    @property
    def flops(self):
        return 2 * self.heads * self.pairs * (self.dim + self.value_dim) * (2.5 if self.kind == "backward" else 1)

    @property
    def nbytes(self):
        rows = self.queries * self.batch * self.heads * (self.dim + self.value_dim)
        if self.lengths and self.window:
            keys = sum(min(n, self.window[0] + self.queries) for n in self.lengths)
        else:
            keys = sum(self.lengths) if self.lengths else self.keys * self.batch
        return 2 * (rows + keys * self.kv_heads * (self.dim + self.value_dim)) * (3 if self.kind == "backward" else 1)


def _pairs(queries, keys, causal, window):
    i = torch.arange(queries, dtype=torch.float64) + keys - queries
    left, right = window or (None, None)
    right = 0 if causal else right
    end = (i + 1 + right).clamp(0, keys) if right is not None else torch.full_like(i, keys)
    first = (i - left).clamp(0, keys) if left is not None else torch.zeros_like(i)
    return int((end - first).clamp(min=0).sum())


def forward_problems():
    def one(name, b, sq, sk, h, g, d, dv=None, **more):
        return BenchProblem("forward", name, b, sq, sk, h, g, d, dv or d, **more)

    for causal in (False, True):
        c = " causal" * causal
        for d in (32, 72, 80, 112, 160, 192, 224):
            h = 1024 // d
            yield one(f"dim {d}{c}", 2, 4096, 4096, h, h, d, causal=causal)
        yield one(f"dim 192/128{c}", 2, 4096, 4096, 8, 8, 192, 128, causal=causal)
        for d in (64, 128):
            yield one(f"fp16 dim {d}{c}", 2, 4096, 4096, 1024 // d, 1024 // d, d, causal=causal, dtype=FP16)
        for h, s, d in (
            (1, 2048, 128),
            (1, 8192, 128),
            (1, 32768, 64),
            (1, 65536, 128),
            (4, 2048, 64),
            (4, 4096, 128),
            (2, 16384, 256),
        ):
            yield one(f"few heads{c}", 1, s, s, h, h, d, causal=causal)
        for s, d in ((16, 64), (64, 128), (128, 64), (256, 128)):
            yield one(f"short{c}", 256, s, s, 16, 16, d, causal=causal)
        for s in (1000, 4097):
            yield one(f"odd length{c}", 4, s, s, 16, 16, 128, causal=causal)
        yield one(f"GQA 8:1{c}", 2, 4096, 4096, 32, 4, 128, causal=causal)
        yield one(f"MQA{c}", 2, 2048, 2048, 71, 1, 64, causal=causal)
    yield one("short, Swin", 1024, 49, 49, 4, 4, 32)
    yield one("ViT", 64, 197, 197, 12, 12, 64)
    yield one("CLIP", 64, 257, 257, 16, 16, 80)
    yield one("Whisper", 8, 1500, 1500, 20, 20, 64)
    yield one("diffusion, image", 4, 4096, 4096, 8, 8, 40)
    for b, s, h, d in (
        (1, 4608, 24, 128),
        (1, 4096, 32, 128),
        (1, 8192, 16, 128),
        (1, 4096, 12, 64),
        (8, 1024, 12, 64),
        (32, 512, 12, 64),
    ):
        yield one("few rounds", b, s, s, h, h, d)
    yield one("diffusion, text", 4, 4096, 77, 8, 8, 40)
    yield one("diffusion, image", 4, 256, 256, 8, 8, 160)
    yield one("cross 77", 2, 4096, 77, 24, 24, 128)
    for b, sq, sk, h, g, d in (
        (1, 1, 8192, 32, 8, 128),
        (1, 8, 32768, 16, 16, 64),
        (1, 16, 32768, 32, 8, 128),
        (4, 32, 4096, 16, 16, 64),
        (64, 32, 257, 12, 12, 64),
        (1, 63, 65536, 8, 8, 128),
        (1, 64, 16384, 8, 8, 64),
        (1, 256, 16384, 8, 8, 64),
        (1, 512, 32768, 4, 4, 128),
        (8, 1, 1500, 20, 20, 64),
        (64, 1, 2048, 32, 8, 128),
        (1, 128, 4096, 16, 16, 128),
        (1, 1024, 8192, 8, 8, 128),
        (2, 512, 2048, 8, 8, 64),
        (32, 32, 4096, 16, 16, 64),
        (1, 256, 16384, 8, 8, 256),
        (16, 8, 4096, 32, 8, 128),
        (2, 1, 4096, 32, 32, 128),
        (64, 4, 1024, 16, 16, 128),
    ):
        yield one("cross", b, sq, sk, h, g, d)
    for sq, sk, h, g, d in ((16, 32768, 32, 8, 128), (128, 32768, 32, 8, 128), (512, 16384, 8, 1, 128)):
        yield one("chunk causal", 1, sq, sk, h, g, d, causal=True)


def more_problems():
    """Forward problems with windows, or with packed sequences."""

    def one(name, b, sq, sk, h, g, d, dv=None, **more):
        return BenchProblem("forward", name, b, sq, sk, h, g, d, dv or d, **more)

    for left, d in ((128, 64), (128, 128), (256, 128), (512, 64), (4096, 128)):
        yield one("window", 1, 16384, 16384, 1024 // d, 1024 // d, d, causal=True, window=(left, 0))
    yield one("window both", 1, 16384, 16384, 16, 16, 64, window=(64, 64))
    yield one("window both", 2, 8192, 8192, 4, 4, 256, window=(256, 256))
    for name, lens, h, g, d, causal in (
        ("packed, one long", (8192, *[64] * 64), 16, 16, 128, True),
        ("packed, one long", (8192, *[64] * 64), 16, 16, 64, False),
        ("packed, short", tuple(8 + 7 * n % 120 for n in range(256)), 16, 16, 128, True),
        ("packed, GQA", (17, 4001, 300, 1, 2222, 5000, 64, 3), 32, 4, 128, True),
        ("packed, images", (1024,) * 16, 16, 16, 80, False),
    ):
        total = sum(lens)
        yield BenchProblem("forward", name, 1, total, total, h, g, d, d, causal, lens=tuple((n, n) for n in lens))
    lens = tuple((1 + 37 * n % 63, 512 + 977 * n % 7001) for n in range(16))
    yield BenchProblem(
        "forward", "packed, few queries", 1, sum(x for x, _ in lens), sum(x for _, x in lens), 16, 16, 128, 128, lens=lens
    )


def decode_problems():
    def one(name, b, tokens, keys, h, g, d, **more):
        return BenchProblem("decode", name, b, tokens, keys, h, g, d, d, causal=True, **more)

    for d in (64, 96, 192, 256):
        yield one(f"dim {d}", 1, 1, 32768, 32, 8, d, lengths=(32768,))
        yield one(f"dim {d}", 32, 1, 4096, 32, 8, d, lengths=(4096,) * 32)
    yield one("MQA", 64, 1, 4096, 32, 1, 128, lengths=(4096,) * 64)
    yield one("MQA", 1, 1, 32768, 64, 1, 128, lengths=(32768,))
    yield one("MHA", 16, 1, 2048, 32, 32, 64, lengths=(2048,) * 16)
    for keys, h, g, d in (
        (8192, 8, 1, 128),
        (32768, 16, 1, 128),
        (8192, 32, 1, 128),
        (8192, 16, 2, 128),
        (4096, 32, 8, 64),
        (131072, 8, 1, 64),
        (2048, 32, 32, 128),
    ):
        yield one("one sequence", 1, 1, keys, h, g, d, lengths=(keys,))
    for keys, h, g, d, page in (
        (512, 32, 8, 128, 16),
        (512, 32, 8, 64, None),
        (512, 32, 8, 96, None),
        (1024, 64, 8, 128, None),
        (512, 32, 8, 192, None),
        (512, 32, 8, 256, None),
    ):
        yield one("short caches", 160, 1, keys, h, g, d, lengths=(keys,) * 160, page=page)
    short = tuple(1 + 41 * n % 1000 for n in range(160))
    yield one("short, uneven", 160, 1, 1024, 32, 8, 128, lengths=short)
    yield one("short, uneven", 160, 4, 1024, 32, 8, 128, lengths=short)
    for tokens, h, g in ((16, 32, 8), (16, 64, 8), (32, 32, 8), (63, 32, 8), (16, 32, 32), (16, 32, 1)):
        yield one(f"{tokens} tokens", 8, tokens, 8192, h, g, 128, lengths=(8192,) * 8)
    yield one("16 tokens", 1, 16, 32768, 32, 8, 128, lengths=(32768,))
    uneven = tuple(int(64 * 1.1 ** (n % 50)) for n in range(0, 192, 3))
    yield one("uneven", 64, 1, 8192, 32, 8, 128, lengths=uneven)
    yield one("uneven", 64, 1, 8192, 64, 8, 64, lengths=uneven)
    yield one("uneven, 8 tokens", 64, 8, 8192, 32, 8, 128, lengths=uneven)
    yield one("uneven, pages", 64, 1, 8192, 32, 8, 128, lengths=uneven, page=16)
    yield one("window 128", 64, 1, 8192, 64, 8, 64, lengths=(8192,) * 64, window=(127, 0))
    yield one("window 1024", 8, 1, 32768, 32, 8, 128, lengths=(32768,) * 8, window=(1023, 0))
    yield one("window 4096", 64, 1, 8192, 32, 8, 128, lengths=(8192,) * 64, window=(4095, 0))
    for page, d in ((1, 64), (8, 64), (16, 64), (8, 128), (16, 256), (64, 96)):
        yield one("pages", 32, 1, 4096, 32, 8, d, lengths=(4096,) * 32, page=page)
    yield one("16 tokens, pages", 8, 16, 8192, 64, 8, 128, lengths=(8192,) * 8, page=16)
    for keys in (64, 256, 640):
        yield one("short caches", 256, 1, keys, 32, 8, 128, lengths=(keys,) * 256)
    yield one("short caches", 256, 1, 256, 14, 2, 64, lengths=(256,) * 256)
    yield one("short caches", 256, 1, 512, 32, 32, 128, lengths=(512,) * 256)
    yield one("short cache", 1, 1, 128, 64, 8, 128, lengths=(128,))
    for b, tokens, keys, page in (
        (1, 64, 32768, 64),
        (1, 128, 32768, 16),
        (1, 256, 32768, 64),
        (1, 512, 32768, 16),
        (8, 64, 4096, 16),
        (1, 2048, 4096, 16),
    ):
        yield one("chunk, pages", b, tokens, keys, 32, 8, 128, lengths=(keys,) * b, page=page)
    yield one("chunk", 1, 64, 32768, 32, 8, 128, lengths=(32768,))
    yield one("chunk", 1, 256, 8192, 8, 1, 128, lengths=(8192,))


def backward_problems():
    def one(name, b, sq, sk, h, g, d, dv=None, **more):
        return BenchProblem("backward", name, b, sq, sk, h, g, d, dv or d, **more)

    for d in (96, 192, 80):
        yield one(f"dim {d} causal", 2, 4096, 4096, 1024 // d, 1024 // d, d, causal=True)
    yield one("dim 192/128 causal", 2, 4096, 4096, 8, 8, 192, 128, causal=True)
    yield one("dim 160 causal", 2, 4096, 4096, 6, 6, 160, causal=True)
    yield one("fp16 dim 128 causal", 2, 4096, 4096, 8, 8, 128, causal=True, dtype=FP16)
    yield one("dim 32", 2, 4096, 4096, 32, 32, 32)
    for heads, kv_heads, s, d in (
        (4, 4, 2048, 64),
        (4, 4, 2048, 128),
        (1, 1, 8192, 128),
        (32, 4, 4096, 128),
        (8, 1, 8192, 256),
    ):
        for causal in (False, True):
            yield one("few heads" + " causal" * causal, 1, s, s, heads, kv_heads, d, causal=causal)
    yield one("short", 256, 64, 64, 16, 16, 64)
    yield one("short causal", 256, 128, 128, 16, 16, 128, causal=True)
    yield one("cross 77", 2, 4096, 77, 16, 16, 64)
    yield one("cross 77", 2, 4096, 77, 8, 8, 128)
    yield one("cross", 4, 32, 4096, 16, 16, 64)
    yield one("odd length", 4, 1000, 1000, 16, 16, 64)
    yield one("GQA 8:1 causal", 2, 4096, 4096, 32, 4, 128, causal=True)
    yield one("MQA causal", 2, 2048, 2048, 32, 1, 128, causal=True)
    yield BenchProblem("backward", "packed, images", 1, 8192, 8192, 12, 12, 80, 80, lens=((1024, 1024),) * 8)
    yield one("window causal", 1, 16384, 16384, 8, 8, 128, causal=True, window=(512, 0))
    lens = (8192, *[64] * 64)
    yield BenchProblem(
        "backward", "packed, one long", 1, sum(lens), sum(lens), 8, 8, 128, 128, True, lens=tuple((n, n) for n in lens)
    )


def tiles_problems():
    """Few tiles or blocks of keys for a GPU, and short sequences: forward, then gradients."""

    def one(kind, batch, queries, keys, heads, kv_heads, dim, causal):
        name = "tiles" + " causal" * causal
        return BenchProblem(kind, name, batch, queries, keys, heads, kv_heads, dim, dim, causal=causal)

    lengths = (512, 16), (1024, 8), (1024, 16), (2048, 1), (2048, 4), (2048, 8), (4096, 2), (4096, 4), (8192, 1), (16384, 1)
    for dim, causal, (s, heads) in itertools.product((64, 128), (False, True), lengths):
        yield one("forward", 1, s, s, heads, heads, dim, causal)
    for batch, s, heads, kv_heads, dim in (
        *((2, 2048, 32, 1, 128), (1, 2048, 32, 1, 128), (1, 4096, 32, 4, 128), (1, 2048, 32, 8, 128), (1, 8192, 8, 1, 256)),
        *((1, 1024, 4, 4, 64), (1, 2048, 4, 4, 64), (1, 2048, 4, 4, 128), (1, 2048, 1, 1, 128), (1, 8192, 1, 1, 128)),
        *((256, 64, 16, 16, 64), (256, 64, 16, 16, 128), (256, 32, 16, 16, 128), (1024, 49, 4, 4, 32), (64, 16, 16, 16, 64)),
        *((64, 77, 12, 12, 64), (256, 128, 16, 16, 64)),
    ):
        for causal in (False, True):
            yield one("backward", batch, s, s, heads, kv_heads, dim, causal)
    for batch, queries, keys, heads, dim in ((2, 4096, 77, 8, 128), (2, 4096, 77, 10, 64), (4, 32, 4096, 16, 64)):
        yield one("backward", batch, queries, keys, heads, heads, dim, False)


KINDS = {
    "forward": forward_problems,
    "more": more_problems,
    "decode": decode_problems,
    "backward": backward_problems,
    "tiles": tiles_problems,
}


def label(p):
    """What a printed line says of the problem before its times."""
    dims = f"{p.dim}" + f"/{p.value_dim}" * (p.dim != p.value_dim)
    lengths = f"{p.queries}" + f"x{p.keys}" * (p.keys != p.queries)
    window = f" window {p.window[0]}" if p.window and p.kind != "decode" else ""
    more = f" page {p.page}" * bool(p.page) + window
    return f"{p.kind[:4]} {p.name:22} B{p.batch} S{lengths} H{p.heads}/{p.kv_heads} D{dims}{more}"


def kernel_of(p):
    """What decides which kernel it is, roughly: such problems are warmed by one process, one after the other."""
    padded = min(n for n in (64, 96, 128, 192, 256) if n >= max(p.dim, p.value_dim))
    return (p.kind, padded, p.dim != p.value_dim, str(p.dtype), p.causal, bool(p.window), bool(p.lens), bool(p.page))


def tiny(p):
    """A rehearsal's: as p, but small."""
    least = lambda n, m: min(n, m)
    group = p.heads // p.kv_heads
    g = 1 if group > 1 else least(p.kv_heads, 2)
    lens = p.lens and tuple((1 + a % 40, 1 + b % 70) for a, b in p.lens[:3])
    b = least(p.batch, 2)
    keys = 128 if p.page else least(p.keys, 70) + 30 * (p.kind == "decode")
    p = p._replace(batch=b, queries=least(p.queries, 50), keys=keys, heads=g * least(group, 4), kv_heads=g, lens=lens)
    if lens:
        p = p._replace(queries=sum(a for a, _ in lens), keys=sum(b for _, b in lens))
        if p.name != "packed, few queries":
            p = p._replace(lens=tuple((a, a) for a, _ in lens), keys=p.queries)
    if p.lengths:
        p = p._replace(lengths=tuple(min(n, keys) for n in p.lengths[:b]))
    return p._replace(window=p.window and tuple(x and min(x, 20) for x in p.window), page=p.page and min(p.page, 64))


def asked(words, small):
    kinds = [x for x in words if x in KINDS] or list(KINDS)
    parts = [x for x in words if x not in KINDS]
    problems = [p for kind in kinds for p in KINDS[kind]() if not parts or any(x in label(p) for x in parts)]
    if not problems:
        raise SystemExit(f"no problem has one of {', '.join(parts)} in its name; kinds are {', '.join(KINDS)}")
    return [tiny(p) for p in problems] if small else problems
