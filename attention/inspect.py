"""`python -m attention inspect`: what every shipped kernel compiles to, with no GPU.

A row: {kernel, arch, config, registers, spill_bytes, local_bytes, shared_bytes, lines, warnings, instructions}. `lines`
counts the kernel and its helpers without blanks, comments and docstrings; `instructions` counts SASS mnemonics.
"""

import ast
import inspect
import json

from tiles import bf16, fp16
from tiles.compiler import compile_kernel
from tiles.sass import instructions

from . import hopper

SHOWN = ("HGMMA", "UTMALDG", "UTMASTG", "STSM", "MUFU", "FFMA", "LDL", "STL")  # in the table; --json has all
BAD = ("spill_bytes", "local_bytes", "warnings")


def configurations(everything=False):
    """(kernel name, module, config) of what is shipped: bf16, or `everything` with fp16 too."""
    for dtype in (bf16, fp16) if everything else (bf16,):
        for head_dim in hopper.SHAPES:
            for causal in (False, True):
                yield "forward", hopper, hopper.config_for(head_dim, dtype, causal)


def lines(function) -> int:
    """Lines of a function's source, without blanks, comments and docstrings."""
    tree = ast.parse(inspect.getsource(function))
    used: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass(lineno=node.lineno, end_lineno=node.lineno)]
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.keyword, ast.arg)):
            used.update((node.lineno, node.end_lineno or node.lineno))
        elif isinstance(node, ast.stmt):
            used.add(node.lineno)
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
        "lines": lines(module.make.__wrapped__),
        "warnings": compiled.warnings,
        "instructions": dict(instructions(compiled.cubin)),
    }


def main(arch="sm_90a", everything=False, check=False, as_json=False) -> int:
    """Print the rows; the exit code is 1 if `check` finds a spill, local memory or a warning."""
    rows = []
    for name, module, config in configurations(everything):
        rows.append(found := row(name, module, config, arch))
        if not as_json:
            counts = " ".join(f"{m} {found['instructions'].get(m, 0)}" for m in SHOWN)
            print(
                f"{name:8} {arch:7} {found['config']:34} {found['registers']:4} registers {found['spill_bytes']:4} spilled "
                f"{found['local_bytes']:4} local {found['shared_bytes']:7} shared {found['lines']:4} lines   {counts}",
                *found["warnings"],
                sep="\n    ",
                flush=True,
            )
    if as_json:
        print(json.dumps(rows, indent=1))
    return int(check and any(found[key] for found in rows for key in BAD))
