"""What all parts of kernels have in common."""

from typing import Any

from tiles import static


@static
class KernelPart:
    """A part that kernels are made of: an object whose methods they call. A part that is not there (no bias, no norm) has the
    same methods, which do nothing. Kernels declare the parameters of all their parts as one record, `params`."""

    def __str__(self):
        return ""

    @property
    def params(self) -> dict[str, Any]:
        """{parameter: its type} of the kernel's parameters that the part's methods read."""
        return {}
