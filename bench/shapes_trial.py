"""Trials of other shapes beside what is shipped: `python bench/shapes_trial.py forward ..`, as bench/shapes.py."""
import contextlib
import sys
from dataclasses import replace

import attention
from attention.softmax import hopper
from attention.softmax.backward import wide, wide_queries
from attention.softmax.decode import attend
from bench import shapes
from bench.shapes import Provider, ours
from tiles import program


def forget():
    for table in (program.KNOWN, program.FUNCTIONS):
        table.young, table.old = {}, {}


def instead(*changes):
    """A context in which attributes are others."""

    @contextlib.contextmanager
    def around():
        before = [(of, name, getattr(of, name)) for of, name, _ in changes]
        for of, name, value in changes:
            setattr(of, name, value)
        forget()
        try:
            yield
        finally:
            for of, name, value in before:
                setattr(of, name, value)
            forget()

    return around


# ---- gradients
def to(dims, n):
    return min(d for d in dims if d >= n)


def wide_of(kv, kv_narrow):
    def by_keys(head_dim, dtype, variant, value_dim=None):
        dims = to((192, 256), head_dim), to((128, 192, 256), value_dim or head_dim)
        return wide.Config(*dims, dtype, variant, 64, 64)

    def by_queries(head_dim, dtype, variant, value_dim=None):
        dims = to((192, 256), head_dim), to((128, 192, 256), value_dim or head_dim)
        return wide_queries.Config(*dims, dtype, variant, 64 if 256 in dims else kv_narrow if dims[1] < 192 else kv)

    return instead((wide, "config_for", by_keys), (wide_queries, "config_for", by_queries))


# ---- forward
config_for = hopper.config_for


def narrow(of):
    def chosen(head_dim, dtype, variant, keys, value_dim=None, **kind):
        made = config_for(head_dim, dtype, variant, keys, value_dim, **kind)
        return replace(made, head_dim=32, value_dim=32, **of)

    return instead((hopper, "config_for", chosen))


def parts(rounds=None):
    """As decode goes about it: keys in parts, as many as its model says, or as give each multiprocessor so many blocks."""

    def call(p, given):
        splits = rounds and max(1, min(128, -(-132 * rounds // bands_of(p)), p.keys // 128))
        return attention.decode(given["q"], given["k"], given["v"], lengths=None, causal=p.causal, splits=splits)

    return call


def bands_of(p):
    return p.batch * p.kv_heads * -(-p.queries * (p.heads // p.kv_heads) // 64)


def few(p):
    tiles, rows = p.batch * p.heads * -(-p.queries // 128), p.queries * p.heads // p.kv_heads
    return p.kind == "forward" and not p.lens and not p.window and (tiles <= 264 or rows <= 64) and (p.keys >= 256 or rows <= 64)


# ---- decode
def shared(n):
    table = {64: [(64, 4, 2, 1), (32, 8, 2, 1), (32, 4, 4, 1)], 96: [(32, 4, 2, 1), (32, 4, 3, 1)], 192: [(32, 4, 2, 1), (16, 4, 3, 1)]}
    table[256] = [(16, 4, 2, 1)]
    here = {d: of[n] for d, of in table.items() if n < len(of)}
    serves = lambda p: p.kind == "decode" and p.dim in here and p.queries == 1 and not p.page and not p.window
    return Provider(ours, serves, instead((attend, "SHARED", attend.SHARED | here)))


def split(rounds):
    def call(p, given):
        return ours(p._replace(splits=max(2, round(132 * rounds / bands_of(p)))), given)

    return call


def one(kv):
    """One consumer, two blocks a multiprocessor: tiles of 64 queries."""

    def chosen(head_dim, dtype, variant, keys, value_dim=None, **kind):
        made = config_for(head_dim, dtype, variant, keys, value_dim, **kind)
        wide = made.head_dim > 64
        shape = {"kv": 64 if wide else kv, "consumers": 1, "stages": 2 if wide or kv == 128 else 4, "resident": 2}
        return replace(made, **shape, persistent=False, queries=1, sent=False, turns=False, stored=False)

    return instead((hopper, "config_for", chosen))


def short(p):
    longest = max(x for x, _ in p.lens) if p.lens else p.queries
    return p.kind == "forward" and longest <= 260 and p.dim <= 128 and not p.window


narrower = lambda p: p.kind == "forward" and p.dim == 32
broad = lambda p: p.kind == "backward" and p.dim > 128 and not p.lens and not p.window
TRIALS = {
    "192": Provider(ours, broad, wide_of(64, 64)),
    "192, more keys": Provider(ours, broad, wide_of(80, 96)),
    "32": Provider(ours, narrower, narrow({})),
    "32, three": Provider(ours, narrower, narrow(hopper.three(128, persistent=False, queries=1, sent=False))),
    "32, two": Provider(ours, narrower, narrow(hopper.two(192, persistent=False, queries=1, sent=False))),
    "one": Provider(ours, short, one(128)),
    "one, 64": Provider(ours, lambda p: short(p) and p.dim <= 64, one(64)),
    "sm_80": Provider(lambda p, given: ours(p._replace(family="sm_80"), given), lambda p: short(p) and p.keys <= 300),
    "parts": Provider(parts(), few),
    "parts, 2": Provider(parts(2), lambda p: few(p) and p.queries > 1),
    "parts, 4": Provider(parts(4), lambda p: few(p) and p.queries > 1),
    **{f"shape {n}": shared(n) for n in range(3)},
    "split": Provider(split(1), lambda p: p.kind == "decode" and p.queries >= 64),
    "split twice": Provider(split(2), lambda p: p.kind == "decode" and p.queries >= 64),
}

if __name__ == "__main__":
    shapes.main(sys.argv[1:], shapes.PROVIDERS | TRIALS)
