"""A kernel as text: the lines of it and of its launch, as a template writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

DTYPES = {"bfloat16": "bf16", "float16": "fp16"}  # dtypes of the operands of products


@dataclass
class KernelText:
    """The lines of a kernel and of its launch. globals: assignments in the module. helpers: functions that the kernel calls.
    kernel: its body. before: lines of the launching function, ahead of the launch. counts: (name, expression) of what that
    function computes after them. launch: what follows the kernel in tiles.launch(kernel, ...). bounds: threads and blocks, for
    launch_bounds. arguments: (parameter of the kernel, expression that is passed for it).

    A KernelText without a kernel calls functions that have kernels of their own; the calls are in `before`."""

    globals: list[str] = field(default_factory=list)
    helpers: list[str] = field(default_factory=list)
    kernel: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    counts: list[tuple[str, str]] = field(default_factory=list)
    launch: str = ""
    bounds: str = ""
    arguments: list[tuple[str, str]] = field(default_factory=list)

    @property
    def code(self) -> str:
        """All that decides the kernel's machine code."""
        parameters = [one for one, _ in self.arguments]
        return "\n".join([self.bounds, *self.globals, *self.helpers, *parameters, *self.kernel])

    def with_names(self, put: Callable[[str], str]) -> KernelText:
        """This text with other names. put: renames a part of the code."""
        counts, arguments = ([(put(one), put(other)) for one, other in texts] for texts in (self.counts, self.arguments))
        code, helpers, kernel, before = ([*map(put, texts)] for texts in (self.globals, self.helpers, self.kernel, self.before))
        return KernelText(code, helpers, kernel, before, counts, put(self.launch), put(self.bounds), arguments)


def scalar_load(name: str, at: str, dtype: str) -> str:
    """The expression that reads one number from an array of this dtype."""
    if dtype == "float32" or "int" in dtype:
        return f"{name}[{at}]"
    return f"load_number({name}, ({at}{',' * (',' not in at)}))"
