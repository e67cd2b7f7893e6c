"""`python -m fuse show file.py:function --shapes 16x4096 4096 4096x6144`: what was found for arrays of these shapes, in words,
the kernels' text, and the proof. `python -m fuse tune ...` measures the candidates on the card, and remembers the fastest.
`python -m fuse inspect` compiles every shipped operator for every target, with no card (inspect.py)."""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

import numpy as np

from tiles.dtypes import bf16, fp16, fp32
from tiles.inspect.command import module_at
from tiles.piped import leave

from . import inspect
from .fused import Fused

DTYPES = {"bf16": bf16.np, "fp16": fp16.np, "fp32": fp32.np}


def main(arguments: list[str]) -> int:
    """Run a command of the command line; returns the exit code."""
    if arguments[:1] == ["inspect"]:
        return inspect.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m fuse", description=__doc__)
    parser.add_argument("command", choices=("show", "tune", "inspect"), help="inspect has options of its own: inspect --help")
    parser.add_argument("function", help="FILE:FUNCTION or MODULE:FUNCTION, a function that fuse.kernel made")
    parser.add_argument("--shapes", nargs="+", required=True, help="of each array, 16x4096; 4096x6144.T lies as its transpose")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--seed", type=int, help="of show's proof, which prints it; a random one if there is none")
    asked = parser.parse_args(arguments)
    file, _, name = asked.function.rpartition(":")
    try:
        function = getattr(module_at(file), name, None) if file else None
    except (ImportError, ValueError) as error:
        print(f"{asked.function}: {error}", file=sys.stderr)
        return 2
    if not isinstance(function, Fused):
        print(f"{asked.function} is no function that fuse.kernel made; say FILE:FUNCTION", file=sys.stderr)
        return 2
    try:
        run = functools.partial(show, seed=asked.seed) if asked.command == "show" else tune
        return run(function, [_extents(one) for one in asked.shapes], asked.dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1


def show(function: Fused, shapes: list[tuple[tuple[int, ...], bool]], dtype: str, seed: int | None = None) -> int:
    """Print what was found for arrays of these shapes: the candidates, the best one in words and as text, and its proof, by
    this seed. It needs no card. Returns 0 if the proof holds."""
    arrays = [_turned(np.zeros(shape, DTYPES[dtype]), transposed) for shape, transposed in shapes]
    for line in ("\n".join(map(str, function.candidates(*arrays))), function.explain(*arrays), function.source(*arrays)):
        print(f"{line}\n")
    proof = function.proof(*arrays, seed=seed)
    print(proof)
    return 0 if proof.holds else 1


def tune(function: Fused, shapes: list[tuple[tuple[int, ...], bool]], dtype: str) -> int:
    """Measure the candidates on the card, on torch's random numbers, and print them, the fastest first."""
    try:
        import torch
    except ImportError:
        raise RuntimeError("tune: measures on torch's tensors, and torch is not installed here") from None

    if not torch.cuda.is_available():
        raise RuntimeError("tune: measures on a GPU, and torch finds none here; `show` and `inspect` need none")
    kind = getattr(torch, np.dtype(DTYPES[dtype]).name)
    arrays = [_turned(torch.randn(shape, device="cuda", dtype=kind), transposed) for shape, transposed in shapes]
    found = function.tune(*arrays, say=lambda text: print(f"\r{text:<60}", end="", file=sys.stderr, flush=True))
    print(file=sys.stderr)
    for candidate in found:
        print(candidate)
    return 0


def _extents(text: str) -> tuple[tuple[int, ...], bool]:
    """The shape in memory, and whether it is meant as its transpose."""
    try:
        extents = tuple(map(int, text.removesuffix(".T").split("x")))
    except ValueError:
        raise ValueError(f"--shapes: must be such as 16x4096, 4096 or 4096x6144.T, got {text!r}") from None
    return (extents[::-1], True) if text.endswith(".T") else (extents, False)


def _turned(x: Any, transposed: bool) -> Any:
    return x.T if transposed else x


if __name__ == "__main__":
    leave(main, sys.argv[1:])
