"""Machine code, read back: what the compiler really made of a kernel.

Needs nvdisasm (`pip install nvidia-cuda-nvdisasm`), no GPU."""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from .line_table import SourcePlace, of_sass
from .toolchain import mark_of_content


class SassInstruction(NamedTuple):
    """One line of SASS: `@!P0 LDS.64 R2, [R4+0x10]` has the opcode LDS.64 and the mnemonic LDS. place: the line of Python it
    comes from, if the kernel was compiled with a table of lines."""

    address: int
    predicate: str
    opcode: str
    operands: str
    place: SourcePlace = SourcePlace()

    @property
    def mnemonic(self):
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]

    def __str__(self):
        return " ".join(filter(None, (self.predicate, self.opcode, self.operands)))


@lru_cache
def nvdisasm() -> Path:
    """The disassembler: of the nvidia-cuda-nvdisasm wheel, or one on the path. FileNotFoundError if there is neither."""
    package = importlib.util.find_spec("nvidia")
    for root in (package and package.submodule_search_locations) or ():
        for candidate in sorted(Path(root).glob("*/bin/nvdisasm*")):
            return candidate
    if path := shutil.which("nvdisasm"):
        return Path(path)
    raise FileNotFoundError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")


@lru_cache
def version() -> str:
    """The version of the disassembler, part of cache keys."""
    return mark_of_content(nvdisasm()).hex()


def disassemble(cubin: bytes) -> str:
    """nvdisasm's text of a cubin's code, with the lines it comes from."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([nvdisasm(), "-c", "-gi", "-ndf", file.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm: {done.stderr.strip()}")
    return done.stdout


LABEL = re.compile(r"(\.L_x_\d+):")
LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+)?\s*(\S+)\s*(.*?)\s*;")


@lru_cache(maxsize=16)
def _parse(cubin):
    code, labels = [], {}
    text = disassemble(cubin)
    for line, place in zip(text.splitlines(), of_sass(text)):
        if match := LABEL.match(line):
            labels[match[1]] = len(code)
        elif match := LINE.match(line):
            code.append(SassInstruction(int(match[1], 16), match[2] or "", match[3], match[4], place))
    return tuple(code), labels


def listing(cubin: bytes) -> tuple[SassInstruction, ...]:
    """The instructions of a cubin, in order."""
    return _parse(cubin)[0]


def labels(cubin: bytes) -> dict[str, int]:
    """What branches name: label -> the index of the instruction that it stands before."""
    return _parse(cubin)[1]


def instructions(cubin: bytes) -> Counter:
    """How many instructions of each mnemonic: Counter({"HGMMA": 32, "MUFU": 66, ...})."""
    return Counter(i.mnemonic for i in listing(cubin))


def main_loop(cubin: bytes, mnemonic: str = "HGMMA") -> tuple[SassInstruction, ...]:
    """The body of the smallest loop with at least a third of all instructions of this kind; empty if there is none.

    (Out-of-line tails of barrier waits also branch back, past a whole loop or more: hence the smallest. A third: a pipeline's
    ends hold as many as one round, and a causal kernel has one loop with its mask and one without.)"""
    code, labels = _parse(cubin)
    enough, best = max(1, -(-instructions(cubin)[mnemonic] // 3)), ()
    for end, branch in enumerate(code):
        target = re.search(r"\.L_x_\d+", branch.operands) if branch.mnemonic == "BRA" else None
        start = labels.get(target[0], end + 1) if target else end + 1
        body = code[start : end + 1]
        if sum(i.mnemonic == mnemonic for i in body) >= enough and (not best or len(body) < len(best)):
            best = body
    return best
