"""`python -m attention inspect`: what every shipped kernel compiles to, with no GPU.

A row: {kernel, arch, config, registers, spill_bytes, local_bytes, shared_bytes, lines, warnings, instructions}. `lines`
counts the kernel and its helpers without blanks, comments and docstrings; `instructions` counts SASS mnemonics.
"""

import ast
import inspect
import itertools
import json

from tiles import bf16, fp16, fp32
from tiles.compiler import compile_kernel
from tiles.sass import instructions

from . import blocks, hopper, sm_80
from .problem import PIECES
from .recurrent import based, chunk, chunk_80, delta, gated, gates, hedgehog, kda, places, turned

SHOWN = ("HGMMA", "HMMA", "UTMALDG", "LDGSTS", "LDSM", "MUFU", "FFMA", "LDL", "STL")  # in the table; --json has all
ROOMS = {"sm_80": 163 * 1024, "sm_90a": sm_80.LARGE, "sm_100a": sm_80.LARGE}  # shared memory a block; others have least
BAD = ("spill_bytes", "local_bytes", "warnings")


def configurations(everything=False, arch="sm_90a"):
    """(kernel name, module, config) of what is shipped for an architecture: bf16, or `everything` with fp16 and unaligned
    arrays too."""
    for dtype in (bf16, fp16) if everything else (bf16,):
        for head_dim in hopper.SHAPES if arch == "sm_90a" else ():
            for causal in (False, True):
                for config in {hopper.config_for(head_dim, dtype, causal, hopper.SHORT * n // 2): None for n in (1, 2, 3)}:
                    yield "forward", hopper, config
        room = ROOMS.get(arch, sm_80.SHARED_BYTES)
        for head_dim, causal in itertools.product(sm_80.SHAPES, (False, True)):
            for piece in PIECES if everything else PIECES[:1]:
                yield "forward", sm_80, sm_80.config_for(head_dim, dtype, causal, room, piece)
        yield from _by_copies(dtype, PIECES if everything else PIECES[:1])
        if arch == "sm_90a":
            yield from _recurrent(dtype)


def _by_copies(dtype, pieces):
    """Linear attention on every GPU: every gate at every size, every other form at one size."""
    for key_dim in 64, 128, 256:
        for gate, piece in itertools.product((None, "token", "step"), pieces):
            yield "linear", chunk_80, chunk_80.Config(key_dim, 1, dtype, gate, piece=piece)
        for piece in pieces:
            more = {"softplus": True, "skip": True, "gated": True, "piece": piece}
            yield "mamba2", chunk_80, chunk_80.Config(key_dim, 1, dtype, "step", **more)
    for form in CHUNK_FORMS:
        yield "linear", chunk_80, chunk_80.Config(128, 1, dtype, "token", **form)


def _recurrent(dtype):
    """The family of linear attention: every gate at every size, every other form at one size."""
    sizes = (64, 1), (64, 2), (128, 1), (128, 2), (256, 1)  # padded key dim, consumers
    for size, gate in itertools.product(sizes, gates.KINDS):
        yield "linear", chunk, chunk.Config(*size, dtype, gate)
    for form in CHUNK_FORMS:
        yield "linear", chunk, chunk.Config(128, 2, dtype, "token", **form)
    for more in ({}, {"softplus": True, "skip": True, "gated": True}):
        yield "mamba2", chunk, chunk.Config(128, 2, dtype, "step", states=not more, **more)
    for size, of in itertools.product(sizes, (fp32, dtype)):
        yield "gla", gated, gated.Config(*size, of, dtype)
    for size, decays in itertools.product(sizes[:4], (False, True)):
        yield "delta", delta, delta.Config(*size, dtype, decays)
    for size, of in itertools.product(sizes[:4], (fp32, dtype)):
        yield "kda", kda, kda.Config(*size, of, dtype)
    for flag in (False, True):
        yield "gla", gated, gated.Config(128, 2, fp32, dtype, varlen=flag)
        yield "delta", delta, delta.Config(128, 2, dtype, True, varlen=flag)
        yield "kda", kda, kda.Config(128, 2, fp32, dtype, varlen=flag)
        yield "based", based, based.Config(dtype, normalize=flag)
        yield "hedgehog", hedgehog, hedgehog.Config(dtype, varlen=flag)


CHUNK_FORMS = {"states": True}, {"varlen": True}, {"ones": True}, {"divided": True}, {"varlen": True, "states": True}
SHARES = {
    chunk: (gates.gates, places.places),
    chunk_80: (gates.gates, gates.shared_gates, places.places),
    gated: (places.places,),
    **dict.fromkeys((delta, kda), (places.span, turned.turned)),
    **dict.fromkeys((based, hedgehog), (places.span,)),
}


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
    compiled = compile_kernel(kernel, module.signature(config), arch)
    return {
        "kernel": name,
        "arch": arch,
        "config": str(config),
        "registers": compiled.registers,
        "spill_bytes": compiled.spill_bytes,
        "local_bytes": compiled.local_bytes,
        "shared_bytes": smem.nbytes,
        "lines": sum(map(lines, (module.make.__wrapped__, *SHARES.get(module, (blocks.walk,))))),
        "warnings": compiled.warnings,
        "instructions": dict(instructions(compiled.cubin)),
    }


def main(arch="sm_90a", everything=False, check=False, as_json=False) -> int:
    """Print the rows; the exit code is 1 if `check` finds a spill, local memory or a warning."""
    rows = []
    for name, module, config in configurations(everything, arch):
        rows.append(found := row(name, module, config, arch))
        if not as_json:
            counts = " ".join(f"{m} {found['instructions'].get(m, 0)}" for m in SHOWN)
            print(
                f"{name:8} {arch:7} {found['config']:36} {found['registers']:4} registers {found['spill_bytes']:4} spilled "
                f"{found['local_bytes']:4} local {found['shared_bytes']:7} shared {found['lines']:4} lines   {counts}",
                *found["warnings"],
                sep="\n    ",
                flush=True,
            )
    if as_json:
        print(json.dumps(rows, indent=1))
    return int(check and any(found[key] for found in rows for key in BAD))
