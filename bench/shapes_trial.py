"""Trials of other shapes beside what is shipped: `python bench/shapes_trial.py forward ..`, as bench/shapes.py."""

import contextlib
import importlib
import sys
from dataclasses import replace

import attention
from attention.softmax import hopper, shared_out
from bench import shapes
from bench.shapes import Provider, ours
from tiles import program

decode_launches = importlib.import_module("attention.softmax.decode.launches")


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


# ---- forward
config_for = hopper.config_for
BEFORE = (shared_out, "serves", lambda *told: False), (hopper, "fitted", lambda config, *told: config)


def narrow(head_dim, dtype, variant, keys, value_dim=None, **kind):
    return replace(config_for(head_dim, dtype, variant, keys, value_dim, **kind), head_dim=32, value_dim=32)


def two_of(config, *told):
    return replace(config, consumers=2, stored=False, turns=True) if config.consumers == 3 else config


def one_of(config, *told):
    return replace(config, **hopper.SMALL[max(config.head_dim, config.value_dim)])


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
    return (
        p.kind == "forward" and not p.lens and not p.window and (tiles <= 264 or rows <= 64) and (p.keys >= 256 or rows <= 64)
    )


# ---- decode
def split(splits, family=None):
    return lambda p, given: ours(p._replace(splits=splits, family=family), given)


is_forward = lambda p: p.kind == "forward"
short = lambda p: (
    is_forward(p) and (max(x for x, _ in p.lens) if p.lens else p.queries) <= 260 and p.dim <= 128 and not p.window
)
is_full = lambda p: is_forward(p) and not p.causal and not p.lens and not p.window and p.queries > 64 and p.dim <= 128
brief = lambda p: p.kind == "decode" and p.keys <= 2048 and p.queries <= 4 and p.batch > 1
alone = lambda p: p.kind == "decode" and p.batch == 1 and p.queries == 1 and p.kv_heads <= 8
TRIALS = {
    "before": Provider(ours, lambda p: is_forward(p) and not p.window, instead(*BEFORE)),
    "two": Provider(ours, is_full, instead(BEFORE[0], (hopper, "fitted", two_of))),
    "one": Provider(ours, short, instead(BEFORE[0], (hopper, "fitted", one_of))),
    "parts": Provider(parts(), few),
    "shares": Provider(ours, brief, instead((decode_launches, "BRIEF", 0))),
    **{f"{n} parts": Provider(split(n), alone) for n in (8, 16, 32, 64, 128)},
}

if __name__ == "__main__":
    shapes.main(sys.argv[1:], shapes.PROVIDERS | TRIALS)
