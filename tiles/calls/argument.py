"""Rows of a table of arguments, parsed. schema.py explains the table."""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

from .axes import along_sequence

REAL, INDEX = ("float32", "bfloat16", "float16"), ("int32", "int64")
HOLDS = {
    "tile": ("bfloat16", "float16"),
    "real": REAL,
    "index": INDEX,
    "any": ("bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)), *REAL),
    "float32": ("float32",),
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
    "fp8": ("float8_e4m3fn",),
    "int8": ("int8",),
    "tile8": ("float8_e4m3fn",),
    "half": ("bfloat16", "float16"),
    "byte": ("float8_e4m3fn", "int8"),
    "cache": ("bfloat16", "float16", "float8_e4m3fn", "int8"),
    "log": REAL,
    "rate": REAL,
    "ends": INDEX,
    "ends_q": INDEX,
    "ends_k": INDEX,
    "ends_new": INDEX,
    "key_lengths": INDEX,
    "key_starts": INDEX,
}
ROLES = "", "optional", "output", "in_place", "updated", "updated?"
Axes = tuple[str, ...]
FREE: tuple[Axes, ...] = tuple(("*",) * rank for rank in range(1, 6))  # axes of any extents
ROW = re.compile(r"(\w+)\s+(=\w+|\*|\([\w\s,]*\)(?:\s*\|\s*\([\w\s,]*\))*)\s+(\S.*)")


class Argument(NamedTuple):
    """A row of the table."""

    name: str
    axes: tuple[Axes, ...]  # the choices
    holds: str
    role: str
    flags: tuple[str, ...] = ()  # the options that ask for it
    like: str = ""  # the argument whose shape it has

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that its elements may have."""
        return HOLDS[self.holds]

    @property
    def needed(self) -> bool:
        """Must the caller pass it?"""
        return self.role in ("", "updated")

    @property
    def written(self) -> bool:
        """Does a kernel write it, so that it must not overlap any other argument?"""
        return self.role in ("output", "in_place", "updated", "updated?")

    @property
    def result(self) -> bool:
        """Is it returned, and allocated where the caller leaves it out?"""
        return self.role in ("output", "in_place")

    def choices(self, layout: str) -> dict[int, Axes]:
        """{number of axes: the axes in the caller's order}"""
        return {len(axes): _swap_heads(axes) if layout == "bhsd" else axes for axes in self.axes}

    def orders(self, layout: str) -> dict[int, tuple[Axes, tuple[int, ...]]]:
        """{number of axes: (the axes in the caller's order, where the canonical ones stand among them; () where they do)}"""
        canonical = {len(axes): axes for axes in self.axes}
        pairs = {rank: (axes, canonical[rank]) for rank, axes in self.choices(layout).items()}
        return {
            rank: (axes, () if axes == canonical_axes else tuple(axes.index(axis) for axis in canonical_axes))
            for rank, (axes, canonical_axes) in pairs.items()
        }


def _swap_heads(axes: Axes) -> Axes:
    """These axes with the heads before the sequence, if both follow the batch."""
    swaps = len(axes) > 2 and along_sequence(axes[1])
    return (axes[0], axes[2], axes[1], *axes[3:]) if swaps else axes


def parse_row(line: str) -> Argument:
    """The Argument that a row of a table describes. ValueError: the row has a wrong syntax, or an unknown word."""
    match = ROW.fullmatch(line.strip())
    if match is None:
        raise ValueError(f"a row must have a name, axes such as (batch, heads), and what it holds: {line.strip()!r}")
    name, axes, words = match.groups()
    holds, *options = words.split()
    role, flags = (options or [""])[0], tuple(options[1:])
    if holds not in HOLDS or role not in ROLES:
        raise ValueError(f"{name}: must hold one of {tuple(HOLDS)} and have a role of {ROLES}, got {holds!r}, {role!r}")
    if axes[0] in "=*":
        return Argument(name, FREE, holds, role, flags, axes[1:])
    choices = [re.findall(r"\w+", choice) for choice in axes.split("|")]
    return Argument(name, tuple([tuple(map(sys.intern, choice)) for choice in choices]), holds, role, flags)
