"""A kernel's machine code in numbers, remembered on disk until what it is made from changes."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as memoize
from pathlib import Path
from typing import Any

from ..compiling import cache, digest, sass
from ..compiling.compiler import Compiled, compile_kernel, title
from ..numba_names import types
from .occupancy import Occupancy, occupancy

MANGLED = re.compile(r"_Z\w+")  # a function's name, which has a number of Numba's: how many it had compiled before


@dataclass(frozen=True)
class Figures:
    """A kernel's machine code in numbers. shared_bytes: of the shared storage, and of what the kernel itself declares. threads:
    of a block, or None. instructions: how many there are of each mnemonic. digest: that of them all."""

    title: str
    arch: str
    registers: int
    spill_bytes: int
    local_bytes: int
    shared_bytes: int
    threads: int | None
    warnings: list[str]
    instructions: dict[str, int]
    digest: str

    @property
    def occupancy(self) -> Occupancy | None:
        """How many blocks a multiprocessor holds at once; None if it is not said how many threads they have."""
        return occupancy(self.arch, self.threads, self.registers, self.shared_bytes) if self.threads else None

    @property
    def text(self) -> str:
        """The figures in a few lines."""
        total = sum(self.instructions.values())
        kinds = "  ".join(f"{name} {count}" for name, count in Counter(self.instructions).most_common(12))
        lines = [
            f"{self.title} for {self.arch}: {self.registers} registers, {self.spill_bytes} bytes spilled, "
            f"{self.local_bytes} of local memory, {self.shared_bytes} of shared memory",
            f"occupancy: {self.occupancy}" if self.occupancy else "occupancy: say how many threads a block has",
            f"{total} instructions: {kinds}",
            *(f"warning: {line}" for line in self.warnings),
        ]
        return "\n".join(lines)


def figures(kernel, types: Sequence[types.Type], arch: str, shared: Any = None, block: Any = None) -> Figures:
    """The figures alone, for Numba types of arguments. They are remembered on disk beside compiled kernels, under a key of all
    that the code is made from, and of what reads it: what did not change is not compiled again."""
    name = digest.key(kernel, types, arch)
    known = name and f"{name} in figures {reader_digest()} of nvdisasm {sass.version()}"
    row = cache.recall(known)
    if row is None:
        compiled = cache.load(name) or compile_kernel(kernel, types, arch)
        row = {**measure_code(kernel, arch, compiled), "threads": None}
        cache.remember(known, row)
    if shared is not None:
        row["shared_bytes"] += shared.nbytes
    return Figures(**{**row, "threads": count_threads(block)})


@memoize
def reader_digest() -> str:
    """A digest of the sources that compute Figures from machine code, which the key of the code does not cover."""
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in (__file__, sass.__file__))).hexdigest()[:16]


def measure_code(kernel, arch: str, compiled: Compiled, shared: Any = None) -> dict[str, Any]:
    """All fields of Figures but `threads`, as a dict."""
    code = sass.listing(compiled.cubin)
    return {
        "title": title(kernel),
        "arch": arch,
        "registers": compiled.registers,
        "spill_bytes": compiled.spill_bytes,
        "local_bytes": compiled.local_bytes,
        "shared_bytes": compiled.shared_bytes + (shared.nbytes if shared else 0),
        "warnings": compiled.warnings,
        "instructions": dict(sass.instructions(compiled.cubin)),
        "digest": hashlib.sha256(MANGLED.sub("", "\n".join(map(str, code))).encode()).hexdigest()[:16],
    }


def count_threads(block: Any) -> int | None:
    """The number of threads of a block; block: as tiles.launch takes it, None if it is not known."""
    if block is None:
        return None
    return math.prod(block if isinstance(block, tuple) else (block,))
