"""`python -m fuse show file.py:function --shapes 16x4096 4096 4096x6144` prints, for arrays of these shapes, the candidates,
the best one in words and as the text of its kernels, and its proof. `python -m fuse tune ...` measures the candidates on the
GPU and remembers the fastest. `python -m fuse inspect` compiles every operator of fuse.operators for every architecture,
without a GPU (inspect.py)."""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

import numpy as np

from tiles.dtypes import bf16, fp16, fp32
from tiles.inspect.command import module_at
from tiles.pipes import leave

from . import inspect
from .calls.fused import Fused

SHOWN = 5  # candidates that show lists
DTYPES = {"bf16": bf16.np, "fp16": fp16.np, "fp32": fp32.np}


def main(arguments: list[str]) -> int:
    """Run a command of the command line; returns the exit code."""
    if arguments[:1] == ["inspect"]:
        return inspect.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m fuse", description=__doc__)
    parser.add_argument("command", choices=("show", "tune", "inspect"), help="inspect has options of its own: inspect --help")
    parser.add_argument("function", help="FILE:FUNCTION or MODULE:FUNCTION, a function decorated with fuse.kernel")
    parser.add_argument(
        "--shapes",
        nargs="+",
        required=True,
        help="the shape of each argument, 16x4096; 4096x6144.T is the transpose of an array in memory",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--seed", type=int, help="seed of the proof that show prints; random by default")
    options = parser.parse_args(arguments)
    file, _, name = options.function.rpartition(":")
    try:
        function = getattr(module_at(file), name, None) if file else None
    except (ImportError, ValueError) as error:
        print(f"{options.function}: {error}", file=sys.stderr)
        return 2
    if not isinstance(function, Fused):
        print(f"{options.function} is not a function decorated with fuse.kernel; pass FILE:FUNCTION", file=sys.stderr)
        return 2
    try:
        run = functools.partial(show, seed=options.seed) if options.command == "show" else tune
        return run(function, [_extents(one) for one in options.shapes], options.dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1


def show(function: Fused, shapes: list[tuple[tuple[int, ...], bool]], dtype: str, seed: int | None = None) -> int:
    """Print the candidates for arrays of these shapes, the best one in words and as text, and its proof by this seed. It needs
    no GPU. Returns 0 if the proof holds, else 1."""
    arrays = [_transpose_if(np.zeros(shape, DTYPES[dtype]), transposed) for shape, transposed in shapes]
    candidates = function.candidates(*arrays)
    print(f"# The best of {len(candidates)} candidates, the fastest by the roofline first\n")
    for n, candidate in enumerate(candidates[:SHOWN], 1):
        print(f"{n}. {candidate.summary}: {1e6 * candidate.plan.seconds:.1f} us")
    print(f"\n# The first, in words\n\n{function.explain(*arrays)}\n\n# Its text\n\n{function.source(*arrays)}\n")
    proof = function.proof(*arrays, seed=seed)
    print(f"# Its proof\n\n{proof}")
    return 0 if proof.holds else 1


def tune(function: Fused, shapes: list[tuple[tuple[int, ...], bool]], dtype: str) -> int:
    """Measure the candidates on the GPU with torch's random numbers, and print them, the fastest first. Returns 0.
    RuntimeError: torch is not installed, or it has no GPU."""
    try:
        import torch
    except ImportError:
        raise RuntimeError("tune: needs torch, whose tensors it measures with; install torch") from None

    if not torch.cuda.is_available():
        raise RuntimeError("tune: needs a GPU, and torch.cuda.is_available() is False; `show` and `inspect` need none")
    kind = getattr(torch, np.dtype(DTYPES[dtype]).name)
    arrays = [_transpose_if(torch.randn(shape, device="cuda", dtype=kind), transposed) for shape, transposed in shapes]
    ranked = function.tune(*arrays, say=lambda text: print(f"\r{text:<60}", end="", file=sys.stderr, flush=True))
    print(file=sys.stderr)
    for candidate in ranked:
        print(candidate)
    return 0


def _extents(text: str) -> tuple[tuple[int, ...], bool]:
    """(the shape in memory, whether the array is its transpose) of a text such as 4096x6144.T. ValueError: the text is not of
    this form."""
    try:
        extents = tuple(map(int, text.removesuffix(".T").split("x")))
    except ValueError:
        raise ValueError(f"--shapes: must be such as 16x4096, 4096 or 4096x6144.T, got {text!r}") from None
    return (extents[::-1], True) if text.endswith(".T") else (extents, False)


def _transpose_if(x: Any, transposed: bool) -> Any:
    return x.T if transposed else x


if __name__ == "__main__":
    leave(main, sys.argv[1:])
