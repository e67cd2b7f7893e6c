"""`python -m attention inspect`: what every shipped kernel compiles to, with no GPU.

A row: {kernel, arch, config, registers, spill_bytes, local_bytes, shared_bytes, lines, warnings, instructions}. `lines`
counts the kernel and its helpers without blanks, comments and docstrings; `instructions` counts SASS mnemonics.
"""

import ast
import inspect
import itertools
import json
import multiprocessing
from collections.abc import Iterator
from functools import partial

from tiles import bf16, fp16, fp32
from tiles.arguments import signature
from tiles.compiler import compile_kernel
from tiles.sass import instructions

from .recurrent import chunks
from .recurrent.kernels import (
    based_hopper,
    chunk_ampere,
    chunk_hopper,
    decay_frame,
    delta_hopper,
    gates,
    gla_hopper,
    hedgehog_hopper,
    kda_hopper,
    token_loop,
    tokens,
    transposed_state,
)
from .softmax import ampere, hopper, tiling

PIECES = 16, 8, 4, 2  # bytes that arrays can be copied by at a time
SHOWN = ("HGMMA", "HMMA", "UTMALDG", "LDGSTS", "LDSM", "MUFU", "FFMA", "LDL", "STL")  # in the table; --json has all
ROOMS = {"sm_80": 163 * 1024, "sm_90a": ampere.LARGE, "sm_100a": ampere.LARGE}  # shared memory a block; others have least
BAD = ("spill_bytes", "local_bytes", "warnings")

ALL = {"softplus": True, "skip": True, "gated": True}
LINEAR: tuple[dict[str, bool], ...] = (
    {},
    {"states": True},
    {"varlen": True},
    {"ones": True},
    {"divided": True},
    {"apart": True},
    {"varlen": True, "states": True},
    {"varlen": True, "ones": True},
    {"varlen": True, "divided": True},
)
MAMBA2: tuple[dict[str, bool], ...] = {}, {"states": True}, {"varlen": True}, ALL, {"varlen": True, **ALL}
SHARES = {
    chunk_hopper: (gates.gates, tokens.places),
    chunk_ampere: (gates.gates, gates.shared_gates, tokens.places),
    delta_hopper: (tokens.span, transposed_state.turned),
    **dict.fromkeys((gla_hopper, kda_hopper), (decay_frame.frame, decay_frame.bringing, tokens.span, transposed_state.turned)),
    **dict.fromkeys((based_hopper, hedgehog_hopper, token_loop), (tokens.span,)),
}


def configurations(everything=False, arch="sm_90a"):
    """(kernel name, module, config) of what is shipped for an architecture: bf16, every gate at every size, every other form at
    one size; or `everything`: every form at every size, fp16 and unaligned arrays too. fp16 and pieces of 8 bytes come with
    fewer forms, for time: the former takes the same registers as bf16, the latter are between those of 16 and of 4."""
    large, middle, small, element = PIECES
    some = (
        (bf16, large, everything),
        *(((bf16, middle, False), (bf16, small, True), (bf16, element, True), (fp16, large, False)) if everything else ()),
    )
    for dtype, piece, all_forms in some:
        for head_dim, causal in itertools.product(ampere.SHAPES, (False, True)):
            yield "forward", ampere, ampere.config_for(head_dim, dtype, causal, ROOMS.get(arch, ampere.SHARED_BYTES), piece)
        sizes = [(key_dim, 1) for key_dim in chunks.KEY_DIMS]
        yield from _by_token(chunk_ampere, sizes, (None, "token", "step"), all_forms, dtype, piece=piece)
    yield from _walked(everything)
    for dtype in ((bf16, fp16) if everything else (bf16,)) if arch == "sm_90a" else ():
        yield from _on_hopper(dtype, everything and dtype is bf16)


def _by_token(module, sizes, kinds, everything, dtype, **given):
    """Linear attention and Mamba-2 where a decay is one number for a token and head."""
    for size, kind in itertools.product(sizes, kinds):
        name, forms = ("mamba2", MAMBA2) if kind == "step" else ("linear", LINEAR)
        for form in forms if everything or (size[0], kind) in ((128, "token"), (128, "step")) else forms[:1]:
            if "states" not in form or size[0] <= chunk_hopper.WIDE or module is chunk_hopper:
                yield name, module, module.Config(*size, dtype, kind, **given, **form)


def _walked(everything):
    """Token by token."""
    for key_dim, decay, delta_rule in itertools.product(token_loop.GREATEST, ("", "token", "channel"), (False, True)):
        for single in (True, False):
            if everything or decay == "channel":
                yield "walk", token_loop, token_loop.Config(key_dim, decay, delta_rule, varlen=not single, single=single)
        if not delta_rule and (everything or decay == "token"):
            yield "walk", token_loop, token_loop.Config(key_dim, decay, normalize=True)


def _on_hopper(dtype, everything):
    """What TMA and wgmma serve."""
    for head_dim, causal in itertools.product(hopper.SHAPES, (False, True)):
        for config in {hopper.config_for(head_dim, dtype, causal, hopper.SHORT * n // 2): None for n in (1, 2, 3)}:
            yield "forward", hopper, config
    sizes = (64, 1), (64, 2), (128, 1), (128, 2), (256, 1)  # padded key dim, consumers
    yield from _by_token(chunk_hopper, sizes, gates.KINDS, everything, dtype)
    for size, varlen in itertools.product(sizes, (False, True)):
        if everything or not varlen or size == (128, 2):
            for of in fp32, dtype:
                yield "gla", gla_hopper, gla_hopper.Config(*size, of, dtype, varlen)
                if size[0] in kda_hopper.KEY_DIMS:
                    yield "kda", kda_hopper, kda_hopper.Config(*size, of, dtype, varlen)
            for decays in (False, True) if size[0] in delta_hopper.STAGES else ():
                yield "delta", delta_hopper, delta_hopper.Config(*size, dtype, decays, varlen)
    for flag, varlen in itertools.product((False, True), repeat=2):
        yield "based", based_hopper, based_hopper.Config(dtype, flag, varlen)
    for varlen in False, True:
        yield "hedgehog", hedgehog_hopper, hedgehog_hopper.Config(dtype, varlen)


def lines(function) -> int:
    """Lines of the kernel and its helpers, which are the functions inside `function`, without blanks, comments, docstrings."""
    used: set[int] = set()
    for inner in ast.walk(ast.parse(inspect.getsource(function)).body[0]):
        if isinstance(inner, ast.FunctionDef) and inner.name != function.__name__:
            body = inner.body[1:] if ast.get_docstring(inner) else inner.body
            for node in [*inner.decorator_list, inner.args, *body]:
                used.update(n.lineno for n in ast.walk(node) if hasattr(n, "lineno"))
            used.add(inner.lineno)
    return len(used)


def row(name, module, config, arch) -> dict:
    """Compile one configuration and describe the outcome."""
    kernel, smem = module.make(config)
    compiled = compile_kernel(kernel, signature(kernel), arch)
    return {
        "kernel": name,
        "arch": arch,
        "config": str(config),
        "registers": compiled.registers,
        "spill_bytes": compiled.spill_bytes,
        "local_bytes": compiled.local_bytes,
        "shared_bytes": smem.nbytes if smem else 0,
        "lines": sum(map(lines, (module.make.__wrapped__, *SHARES.get(module, (tiling.walk,))))),
        "warnings": compiled.warnings,
        "instructions": dict(instructions(compiled.cubin)),
    }


def _nth(everything, arch, n) -> dict:
    """The row of the n-th configuration."""
    name, module, config = next(itertools.islice(configurations(everything, arch), n, None))
    return row(name, module, config, arch)


def rows(everything=False, arch="sm_90a", jobs: int | None = 1) -> Iterator[dict]:
    """A row for each configuration, in order; `jobs` processes, by default as many as there are cores, compile them."""
    count = sum(1 for _ in configurations(everything, arch))
    if jobs == 1:
        yield from map(partial(_nth, everything, arch), range(count))
    else:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            yield from pool.imap(partial(_nth, everything, arch), range(count))


def main(arch="sm_90a", everything=False, check=False, as_json=False, jobs: int | None = None) -> int:
    """Print the rows; the exit code is 1 if `check` finds a spill, local memory or a warning."""
    found = []
    for one in rows(everything, arch, jobs):
        found.append(one)
        if not as_json:
            counts = " ".join(f"{m} {one['instructions'].get(m, 0)}" for m in SHOWN)
            print(
                f"{one['kernel']:8} {arch:7} {one['config']:36} {one['registers']:4} registers {one['spill_bytes']:4} spilled "
                f"{one['local_bytes']:4} local {one['shared_bytes']:7} shared {one['lines']:4} lines   {counts}",
                *one["warnings"],
                sep="\n    ",
                flush=True,
            )
    if as_json:
        print(json.dumps(found, indent=1))
    return int(check and any(one[key] for one in found for key in BAD))
