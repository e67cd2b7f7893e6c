"""`python -m fuse inspect`: the machine code of every operator of fuse.operators and of its gradient, for any GPU and without
one.

An operator's docstring gives the shapes of its arguments; here they get lengths of each kind that kernels are chosen by: few
rows and many, weights that lie as (K, N) and as (N, K). Kernels that did not change since they were last compiled are taken
from the cache."""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import multiprocessing
import re
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tiles.inspect import Figures, figures

from . import operators
from .calls.fused import Fused
from .language.trace import Shape
from .planning.cost import card_of

ARCHS = "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"
ROWS = 1, 17, 64, 4096
LENGTHS = {"K": 4096, "N": 6144, "D": 4096, "D/2": 2048, "R": 16, "E": 8, "1": 1, "K/128": 32}  # by the letters in docstrings
OF_HEADS = {"...": 8, "H": 8, "D": 128, "D/2": 64, "Dv": 128, "R": 512}  # in operators with queries, S
WITH_ROWS = "...", "M", "S", "T"
# x (..., K), gate, up (K, N) of fp8
SAYS = re.compile(r"((?:\w+, )*\w+) \(((?:\.\.\., )?{0}(?:, {0})*,?)\)(?: of (\w+))?".format(r"(?:[A-Z]v?(?:/2|/128)?|1)"))
# operators whose gradients run by parts (docs/fuse.md), or by attention's kernels
BY_PARTS = "fp8_group_linear fp8_linear int8_group_linear int8_linear lora_linear_by_index mixture_of_experts".split()
BY_PARTS += "residual_rms_norm_quantise mla_attention qk_norm_attention qk_norm_rotary_attention".split()
DTYPES = {"fp8": "float8_e4m3fn", "int8": "int8", "int64": "int64"}


class Case(NamedTuple):
    """An operator on arrays of some lengths. transposed: are its weights transposes in memory? gradient: is it the gradient
    with respect to all arguments?"""

    name: str
    rows: int
    transposed: bool = False
    dtype: str = "bfloat16"
    gradient: bool = False

    @property
    def operator(self) -> Fused:
        """The fused function that is compiled."""
        return getattr(operators, self.name).gradient if self.gradient else getattr(operators, self.name)

    def __str__(self):
        text = f"{self.name}{', gradient,' * self.gradient} of {self.rows} rows{', (N, K)' * self.transposed}"
        return text + ", fp16" * (self.dtype == "float16")


def cases(only: Sequence[str] = (), arch: str = "sm_90a") -> Iterator[Case]:
    """The cases to inspect on an architecture, which may lack fp8. only: texts, one of which an operator's name must contain;
    all operators if there are none."""
    for name in filter(has_documented_shapes, operators.__all__):
        served = card_of(arch).fp8 or "fp8" not in (getattr(operators, name).__doc__ or "")
        if served and (not only or any(one in name for one in only)):
            weights = any(map(of_weights, letters(getattr(operators, name)).values()))
            yield from itertools.starmap(functools.partial(Case, name), itertools.product(ROWS, (False, True)[: 1 + weights]))
            if name not in BY_PARTS:
                yield from (Case(name, rows, gradient=True) for rows in ROWS[1::2])


def has_documented_shapes(name: str) -> bool:
    """Does the operator's docstring give the shapes of all arrays?"""
    operator = getattr(operators, name)
    shapes_of = letters(operator)
    return all(one in shapes_of or p.default is not p.empty for one, p in operator.signature.parameters.items())


def of_weights(shape: str) -> bool:
    """Is an array of this shape, as the docstring gives it, a matrix of weights, which has no rows of the input, and is no
    matrix of scales, K/128?"""
    return shape.count(",") == 1 and "/" not in shape and not any(rows in shape for rows in WITH_ROWS)


def letters(operator: Fused) -> dict[str, str]:
    """The shapes of an operator's arguments as its docstring gives them: {"w": "K, N"}."""
    matches = reversed(SAYS.findall(operator.__doc__ or ""))
    return {name: shape.removesuffix(",") for names, shape, _ in matches for name in names.split(", ")}


def dtypes(operator: Fused) -> dict[str, str]:
    """{argument: dtype} of the arguments whose dtype, by the docstring, differs from the first one's."""
    matches = SAYS.findall(operator.__doc__ or "")
    return {name: DTYPES[dtype] for names, _, dtype in matches for name in names.split(", ") if dtype in DTYPES}


def shapes(case: Case) -> tuple[Shape, ...]:
    """The shapes of a case's arguments. An argument that the docstring does not mention is a number."""
    operator = getattr(operators, case.name)
    shapes_of, dtypes_of, result = letters(operator), dtypes(operator), []
    lengths = LENGTHS | (OF_HEADS if any("S" in shape.split(", ") for shape in shapes_of.values()) else {})
    for name in operator.names:
        extents = tuple(lengths.get(one, case.rows) for one in shapes_of[name].split(", ")) if name in shapes_of else ()
        weight = name in shapes_of and of_weights(shapes_of[name])
        result.append(Shape(extents, dtypes_of.get(name, case.dtype) if extents else "float32", case.transposed and weight))
    if case.gradient:
        result += [Shape(x.extents, x.stored_dtype(case.dtype)) for x in operator._trace(tuple(result)).roots]
    return tuple(result)


def compile_case(case: Case, arch: str) -> list[Figures]:
    """The figures of a case's kernels on an architecture, in the order of their launches. Attention's own are left out: `python
    -m attention inspect` has them."""
    launches = case.operator.launches(shapes(case), card_of(arch))
    own_launches = [one for one in launches if not one[0].py_func.__module__.startswith("attention.")]
    return [figures(kernel, types, arch, shared, threads) for kernel, types, threads, shared in own_launches]


def is_bad(one: Figures) -> bool:
    """Does the kernel spill, use local memory, warn, or not fit a multiprocessor?"""
    return bool(one.spill_bytes or one.local_bytes or one.warnings or not (one.occupancy and one.occupancy.blocks))


def report_case(arch: str, case: Case) -> tuple[str, bool]:
    """(a line for each kernel of a case, whether one of them is bad)"""
    kernels = compile_case(case, arch)
    lines = [
        f"{arch:8} {case!s:42} {one.title:32} {one.registers:4} registers {one.spill_bytes:4} spilled "
        f"{one.local_bytes:4} local {one.shared_bytes:7} shared {'; '.join(one.warnings)}{'  BAD' * is_bad(one)}"
        for one in kernels
    ]
    return "\n".join(line.rstrip() for line in lines), any(map(is_bad, kernels))


def _report_or_error(arch_and_case: tuple[str, Case]) -> tuple[str, bool]:
    try:
        return report_case(*arch_and_case)
    except Exception as error:  # the other cases are still inspected
        return f"{arch_and_case[0]:8} {arch_and_case[1]!s:42} {type(error).__name__}: {error}  BAD", True


def _selectable(archs: Sequence[str]) -> str:
    """The names of the operators that can be selected, for an error message."""
    names = dict.fromkeys(case.name for arch in archs for case in cases((), arch))
    return f"there are {', '.join(names)}"


def main(arguments: Sequence[str]) -> int:
    """Print the rows. The exit code is 1 if a kernel is bad, and 2 if a text of --only selects nothing."""
    parser = argparse.ArgumentParser(prog="python -m fuse inspect", description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("--arch", nargs="+", default=ARCHS, help=f"by default {' '.join(ARCHS)}")
    parser.add_argument("--only", nargs="+", default=(), help="texts, one of which is in an operator's name")
    parser.add_argument("--jobs", type=int, help="processes, by default one a core")
    options = parser.parse_args(arguments)
    for text in options.only:
        if not any(True for arch in options.arch for _ in cases([text], arch)):
            print(
                f"--only: selects nothing on {' '.join(options.arch)}: {text!r}; {_selectable(options.arch)}", file=sys.stderr
            )
            return 2
    wrong = 0
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        pairs = ((arch, case) for arch in options.arch for case in cases(options.only, arch))
        for text, spills in pool.imap(_report_or_error, pairs):
            print(text, flush=True)
            wrong += spills
    return int(wrong > 0)
