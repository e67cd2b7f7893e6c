"""What a kernel compiles to, with no GPU: figures, and PTX and SASS with the line of Python beside each.

    found = tiles.inspect(kernel, x, y, 0.5, block=128, shared=smem)     the arguments of a launch
    found = tiles.inspect(kernel, array(2, bf16), array(2), FLOAT)       or what stands for them (tiles.launching.arguments)
    found = tiles.inspect(kernel)                                        or nothing, if the kernel declares what it takes

    print(found)                       registers, spills, occupancy, and how many instructions each line became
    print(found.listing("sass"))       each of them, under its line; "ptx": one step before
    print(found - other)               what another version has more or less
    Path("page.html").write_text(found.html())

`python -m tiles inspect` does that from the command line (command.py). What is listed is compiled with a table of lines, what
is launched without: of few kernels the instructions are then others, or in another order.
"""

import dis
import itertools
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from os.path import basename
from typing import Any

from ..compiling.compiler import Lowered
from ..compiling.numba_types import Value
from ..launching.arguments import find_common_device, parameter, parameters, signature, types_of
from ..launching.devices import device
from ..numba_names import types
from ..shared import shared as SharedStorage
from ..types import gl
from .code import SassLine, Source, function_at, mnemonic, of_cubin, of_ptx
from .compare import Difference
from .figures import Figures, count_threads, measure_code
from .page import embed_page, page

ARCH = "sm_90a"
TYPE_ARGUMENTS = types.Type, gl  # types that may be passed in place of arguments
TOP = 4  # mnemonics shown of a line


@dataclass(frozen=True, repr=False)
class Inspection(Figures):
    """What `tiles.inspect` finds: the figures, and every instruction of the machine code (sass) and of the PTX that it is
    assembled from (ptx), with its place."""

    sass: tuple[SassLine, ...] = field(repr=False, default=())
    ptx: tuple[SassLine, ...] = field(repr=False, default=())

    @cached_property
    def counts(self) -> dict[tuple[str, int], Counter]:
        """{(file, line of Python): how many instructions of each mnemonic it became}."""
        counters: dict[tuple[str, int], Counter] = {}
        for text, place in self.sass:
            if place.lines and not text.endswith(":"):
                counters.setdefault(place.lines[0], Counter())[mnemonic(text)] += 1
        return counters

    @cached_property
    def sources(self) -> list[Source]:
        """The kernel and the helpers that instructions come from, the kernel first."""
        outer = Counter(line.place.lines[-1] for line in self.sass if line.place.lines)
        ordered: dict[Source, None] = {}
        for file, line in (*outer, *self.counts):
            if not any(file == one.file and one.first <= line < one.first + len(one.lines) for one in ordered):
                ordered[function_at(file, line)] = None
        return list(ordered)

    def __str__(self):
        parts = [self.text]
        for file, first, lines in self.sources:
            parts.append(f"\n{basename(file)}")
            width = max((len(line) for number, line in enumerate(lines, first) if (file, number) in self.counts), default=0)
            for number, line in enumerate(lines, first):
                kinds = self.counts.get((file, number), Counter())
                top = "  ".join(f"{name} {count}" for name, count in kinds.most_common(TOP))
                parts.append(f"{number:5} {sum(kinds.values()) or '':5}  {f'{line:{width}}  {top}' if top else line}".rstrip())
        return "\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self):
        return embed_page(self.html())

    def listing(self, kind: str = "sass") -> str:
        """All instructions, "sass" or "ptx", under their lines of Python."""
        parts, last = [], None
        for text, place in getattr(self, kind):
            if place != last:
                parts.append(str(place))
            parts.append(f"    {text}")
            last = place
        return "\n".join(parts)

    def html(self) -> str:
        """A page that holds all that, the source on the left and its instructions on the right; it needs no other file."""
        return page(self)

    def __sub__(self, other: "Inspection") -> Difference:
        """The compare.Difference from another version."""
        return Difference(other, self)


def inspect(kernel, *args: Any, arch: str | None = None, shared: Any = None, block: Any = None) -> Inspection:
    """Compile a `@cuda.jit` kernel as a launch with these arguments would, and report the result. No GPU is needed.

    args: as `tiles.launch` takes them, or types from tiles.launching.arguments instead (`array(2, bf16)`, `tiled(tile)`, INT,
    FLOAT); none, if the kernel's own parameters are annotated with them. arch: by default that of the GPU that holds the
    arrays, else sm_90a. shared: the storage, block: the threads, as the launch has them; both matter for occupancy only.
    Without shared the storage is what the kernel opens by a name, smem.open(); without block the threads are those of the
    kernel's launch_bounds, if it has any.

    TypeError, ValueError: an argument is wrong. CompileError: ptxas or the linker refuse the kernel."""
    if not hasattr(kernel, "py_func"):
        raise TypeError(f"inspect: kernel must be a @cuda.jit function, got {kernel!r}")
    types_of_arguments, ordinal = _types_of_arguments(kernel, args)
    bounds = kernel.targetoptions.get("launch_bounds")
    block = block or (bounds[0] if isinstance(bounds, tuple) else bounds)
    arch = arch or (ARCH if ordinal is None else device(ordinal).arch)
    lowered = Lowered(kernel, types_of_arguments, arch, lines=True)
    compiled = lowered.machine_code()
    code = measure_code(kernel, arch, compiled, find_opened_storage(kernel.py_func) if shared is None else shared)
    ptx = of_ptx(lowered.ptx(), lowered.name)
    return Inspection(**code, threads=count_threads(block), sass=of_cubin(compiled.cubin), ptx=ptx)


def find_opened_storage(function) -> SharedStorage | None:
    """The storage that a kernel's function opens, where its code says `smem.open()` of a global or of a name of the function
    round it; None if it opens none so."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    for name, method in itertools.pairwise(dis.get_instructions(function)):
        with suppress(ValueError):  # a cell without a value yet
            smem = cells[name.argval].cell_contents if name.argval in cells else function.__globals__.get(name.argval)
            if method.argval == "open" and isinstance(smem, SharedStorage):
                return smem
    return None


def _types_of_arguments(kernel, args) -> tuple[tuple[types.Type, ...], int | None]:
    """The Numba types of a kernel's arguments, and the GPU that arrays among them lie on, if any."""
    code = kernel.py_func.__code__
    names = code.co_varnames[: code.co_argcount]
    if names and not args:
        return signature(kernel), None
    if not any(isinstance(arg, TYPE_ARGUMENTS) for arg in args) or len(args) != len(names):
        parameter_types = parameters(kernel, args)
        return types_of(kernel, parameter_types), find_common_device(parameter_types)
    kinds = (arg if isinstance(arg, TYPE_ARGUMENTS) else parameter(name, arg).type for name, arg in zip(names, args))
    return tuple(Value(kind) if isinstance(kind, gl) else kind for kind in kinds), None
