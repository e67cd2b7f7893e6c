"""The tiles of attention.backward's kernels for Hopper, searched.

    python -m bench.search_backward 128                 what fits: registers and shared memory
    python -m bench.search_backward 128 --compile       ... what ptxas makes of it (no GPU needed)
    python -m bench.search_backward 128 --time 4096     ... TFLOPS on the card, causal and full, and the errors judged

A block's keys, a tile's queries and the stages of its rings are gone through. A thread of a consumer holds its columns of dK
and dV, the scores, dP or a part of dQ, and what products take from registers; 240 there are, and the loop itself wants some. Of
configurations that differ in their rings only, those are tried to which no stage can be added, and the one in use, which has a
star. notes/backward.md has the figures of the choice."""

import argparse
import contextlib
import functools
import itertools
from dataclasses import fields, replace

import attention
from attention.kernels.softmax import (
    backward_folded_hopper,
    backward_hopper,
    backward_narrow_hopper,
    backward_wide_hopper,
    backward_wide_queries_hopper,
)
from attention.parts.variant import Variant
from attention.parts.visibility import CAUSAL, FULL
from tiles import bf16
from tiles.inspect.figures import figures
from tiles.launching.arguments import signature
from tiles.targets import LARGE

LOOP = 16  # registers that addresses, counters and numbers of rows take at least
QUERIES, STAGES = range(48, 129, 16), (1, 2, 3)


def registers(module, config) -> int:
    """What a consumer's thread holds at once, without what the loop itself wants."""
    rows, dims = config.rows, (config.head_dim, config.value_dim)
    if module is backward_wide_queries_hopper:  # dQ, scores, dP; dS for a product
        return config.head_dim // 2 + config.kv + config.kv // 4
    if module is backward_wide_hopper:  # dK or dV, scores, weights or slopes twice
        return max(dims) // 2 + rows // 2 + 2 * (rows // 4)
    sums, scores, part = sum(dims) // (2 * config.consumers_per_key), rows // 2, config.parts.part_columns // 2
    if module is backward_narrow_hopper:  # dK is the gatherer's
        return config.value_dim // 2 + 2 * scores
    if module is backward_folded_hopper:  # a tile's dS and the part of dQ before it are in use while weights are found
        return sums + scores + part + rows // 4
    return sums + scores + max(scores + rows // 4 * (2 if config.rounded_p else 1), part)


def shared_bytes(module, config) -> int:
    return module.make(config)[1].nbytes


def enumerate_configs(head_dim: int, variant: Variant):
    """(module, configuration) of each form, whether it fits or not."""
    if head_dim > 128:
        for q, do, p in itertools.product(
            STAGES, STAGES, (1, 2)
        ):  # 64 queries: backward_wide_queries_hopper.py takes their sums so
            yield backward_wide_hopper, backward_wide_hopper.Config(head_dim, head_dim, bf16, variant, 64, 64, q, do, p)
        for kv, q, v in itertools.product((32, 48, 64, 80), STAGES, STAGES):
            yield backward_wide_queries_hopper, backward_wide_queries_hopper.Config(head_dim, head_dim, bf16, variant, kv, q, v)
    kv = 64 if head_dim > 128 else 128
    for queries, q, do, ds, dq, rounded in itertools.product(QUERIES, (2, 3), STAGES, (1, 2), (1, 2), (False, True)):
        config = backward_hopper.Config(head_dim, head_dim, bf16, variant, kv, queries, q, do, ds, 1, rounded_p=rounded)
        if config.parts.count % backward_hopper.CONSUMERS:
            continue  # one consumer would have more of dQ than the other
        config = replace(config, dq_stages=dq * backward_hopper.CONSUMERS)  # else a slot would change hands between consumers
        yield backward_hopper, config
        if config.consumers_per_key == 1 and config.parts.count == backward_hopper.CONSUMERS:
            common = {field.name: getattr(config, field.name) for field in fields(backward_folded_hopper.Config)}
            yield backward_folded_hopper, backward_folded_hopper.Config(**common)
            if head_dim == backward_narrow_hopper.HEAD_DIM and rounded:
                yield backward_narrow_hopper, backward_narrow_hopper.Config(**common)


PLAIN = bf16, FULL
RINGS = "stages", "do_stages", "ds_stages", "dq_stages", "p_stages", "v_stages"


def candidates(head_dim: int, variant: Variant = FULL):
    """(module, configuration) of those that fit and whose rings cannot be deeper, or that are in use."""
    fit = [
        (module, config)
        for module, config in enumerate_configs(head_dim, variant)
        if registers(module, config) + LOOP
        <= (backward_narrow_hopper if module is backward_narrow_hopper else backward_hopper).REGISTERS[-1]
        and shared_bytes(module, config) <= LARGE
    ]

    def deeper(one, other):
        """Is the other one the same, with more stages?"""
        rings = [(getattr(one, name), getattr(other, name)) for name in RINGS if hasattr(one, name)]
        same = replace(one, **{name: 1 for name in RINGS if hasattr(one, name)}) == replace(
            other, **{name: 1 for name in RINGS if hasattr(other, name)}
        )
        return same and one != other and all(a <= b for a, b in rings)

    return [(m, c) for m, c in fit if in_use(m, c) or not any(m is n and deeper(c, d) for n, d in fit)]


def in_use(module, config) -> bool:
    """Is this what problems are served with?"""
    serving = next(
        (x for x in (backward_narrow_hopper, backward_folded_hopper) if x.serves(config.head_dim, config.variant)), module
    )
    return module is serving and config == module.config_for(config.head_dim, config.dtype, config.variant)


@contextlib.contextmanager
def forced(module, config):
    """attention.backward uses this configuration, for either variant."""
    modules = (
        backward_wide_hopper,
        backward_narrow_hopper,
        backward_folded_hopper,
        backward_hopper,
        backward_wide_queries_hopper,
    )
    originals = [(m, m.config_for, getattr(m, "serves", None)) for m in modules]
    try:
        module.config_for = lambda _, dtype, variant, *__, **___: replace(config, variant=variant)
        backward_wide_hopper.serves = lambda *_: module in (backward_wide_hopper, backward_wide_queries_hopper)
        backward_narrow_hopper.serves = lambda *_: module is backward_narrow_hopper
        backward_folded_hopper.serves = lambda *_: module is backward_folded_hopper
        yield
    finally:
        for m, config_for, serves in originals:
            m.config_for = config_for
            if serves:
                m.serves = serves


def compiled(module, config) -> str:
    """What ptxas makes of it."""
    kernel, smem = module.make(config)
    code = figures(kernel, signature(kernel), "sm_90a", smem, config.threads)
    codes = [line.split("(")[1].split(")")[0] for line in code.warnings if "(C7" in line]
    return f"{code.spill_bytes:5} spilled {' '.join(codes)}"


def timed(head_dim: int, length: int) -> None:
    """Print TFLOPS of those that compile with no spill, beside cuDNN's, rounds in turn."""
    from bench.measure import interleaved, medians
    from bench.peers import softmax
    from bench.test_backward import TOKENS, WIDTH, Passed, _check, _peer

    for causal in (False, True):
        variant = CAUSAL if causal else FULL
        sets = [(Passed(head_dim, length, causal, {"cudnn": softmax(causal)["cudnn"]}),) for _ in range(2)]
        calls = {"cudnn": functools.partial(_peer, "cudnn")}
        for n, (module, config) in enumerate(candidates(head_dim, variant)):
            if compiled(module, config).strip() != "0 spilled":
                continue

            def call(passed, module=module, config=config, scale=head_dim**-0.5 * (1 + 1e-7 * n)):
                q, k, v, dq, dk, dv = passed.q, passed.k, passed.v, *passed.gradients
                with forced(module, config):  # when its first call is planned; that plan is known by its scale
                    return attention.backward(
                        passed.dout, q, k, v, passed.out, passed.lse, causal=causal, scale=scale, dq=dq, dk=dk, dv=dv
                    )

            _check(call, *sets[0], causal)
            calls[said(module, config)] = call
        flops = 10 * TOKENS * length * WIDTH * (0.5 if causal else 1)
        for name, ms in sorted(medians(interleaved(calls, sets, 3)).items(), key=lambda item: item[1]):
            print(f"{flops / ms / 1e9:7.1f} TFLOPS  {'causal' if causal else 'full'} {length}  {name}", flush=True)


def said(module, config) -> str:
    """A configuration in a line."""
    rings = ", ".join(f"{name.replace('_stages', '')} {getattr(config, name)}" for name in RINGS if hasattr(config, name))
    more = "".join([f", {name}" for name in ("rounded", "turns") if getattr(config, name, False)])
    star = " *" * in_use(module, config)
    return f"{module.__name__.rpartition('.')[2]:12} {config.rows:3} queries x {config.kv:3} keys; {rings}{more}{star}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("head_dim", type=int, choices=[64, 128, 256])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--time", type=int, metavar="LENGTH")
    options = parser.parse_args()
    if options.time:
        return timed(options.head_dim, options.time)
    total = sum(1 for _ in enumerate_configs(options.head_dim, FULL))
    configs = candidates(options.head_dim)
    print(f"{len(configs)} of {total} fit and cannot have more stages")
    for module, config in configs:
        line = f"{said(module, config):80} {registers(module, config):4} registers {shared_bytes(module, config):7} bytes"
        print(line, compiled(module, config) if options.compile else "", flush=True)


if __name__ == "__main__":
    main()
