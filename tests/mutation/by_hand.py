"""Faults that no rule makes (by_hand.toml), and those that nothing can show (neutral.toml)."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import tomllib

from .sources import PACKAGES, ROOT, Edit, Mutation, SourceFile

HERE = Path(__file__).parent


def by_hand(path: Path = HERE / "by_hand.toml", root: Path = ROOT) -> Iterator[Mutation]:
    """The faults of a table {"file::function": {what is wrong: [old, new]}}: within the function, `old` stands once, and
    becomes `new`. A file that is not Python has no functions: "file::".

    LookupError: there is no such function, or `old` stands there not once; it says where else the text stands."""
    for anchor, faults in tomllib.loads(path.read_text()).items():
        file, _, function = anchor.partition("::")
        data, start, end = _extent(root / file, function)
        for fault, (old, new) in faults.items():
            name = f"{anchor}::{fault.replace(' ', '-')}"
            if start is None or (count := data[start:end].count(old.encode())) != 1:
                how = "has no such function" if start is None else f"has it {count} times there"
                raise LookupError(
                    f"{name}: {old!r} must stand once in the function; {file} {how}. It stands in: {_stands(old, root)}"
                )
            at = start + data[start:end].index(old.encode())
            yield Mutation(name, file, (Edit(at, at + len(old.encode()), new.encode()),))


def _extent(file, function):
    """The bytes of a file, and where in them a function begins and ends: None if there is no such function."""
    if not file.exists():
        return b"", None, None
    data = file.read_bytes()
    if not function:
        return data, 0, len(data)
    source = SourceFile(file.name, data)
    node = source.functions.get(function)
    return data, *(source.span(node) if node else (None, None))


def _stands(text, root):
    files = (file for package in PACKAGES for file in sorted((root / package).rglob("*.*")) if file.suffix in (".py", ".jinja"))
    return ", ".join(file.relative_to(root).as_posix() for file in files if text in file.read_text()) or "no file"


@functools.cache
def neutral_names() -> dict[str, str]:
    """{pattern of names: why nothing that a test could show is wrong with these}."""
    return tomllib.loads((HERE / "neutral.toml").read_text())


def why_neutral(name: str) -> str:
    """Why a mutation changes nothing that a test could show; empty if it should be noticed."""
    return next((why for pattern, why in neutral_names().items() if fits(name, pattern)), "")


def fits(name: str, pattern: str) -> bool:
    """Is this the name? In patterns * is any text."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None
