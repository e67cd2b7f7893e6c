"""What edited_copies.py and edited_products.py are written with: kernels whose PTX is edited, so that they are wrong as
compiled, and their arguments."""

import inspect
import re

import numpy as np
import pytest

from tiles import barrier, bf16, fp32, rt, shared, st, tensor

S, G, R = st(16, 64, bf16), st(64, 64, bf16), rt(16, 64, fp32)
X = shared(x=S, full=barrier(1))
Y = shared(x=G, y=G)
LANE_NUMBER = ".reg .b32 lane;\nmov.u32 lane, %tid.x;\n"
CASES = []  # (name, kernel, edit, kinds, cause, guilty instruction, warps, plan, blocks)


def numbers(rows):
    return np.arange(rows * 64, dtype=np.float32).reshape(rows, 64).astype(bf16.np) / bf16.np.type(64)


def arguments(kernel):
    """What a kernel gets, by the names of its parameters."""
    known = {
        "small": lambda: tensor(numbers(16), S),
        "target": lambda: tensor(numbers(16) * 0, S),
        "source": lambda: numbers(64),
        "out": lambda: np.zeros((64, 64), np.float32),
    }
    return [known[name]() for name in inspect.signature(kernel).parameters]


def without(pattern, which=None):
    """An edit: these statements go (or only the one of this number)."""
    return instead(pattern, "", which)


def instead(pattern, other, which=None):
    """An edit: these statements, of instructions that begin so, become others."""

    def edit(text):
        actual = list(re.finditer(rf"(?m)^[ \t]*(?:@\S+\s+)?{pattern}[^;]*;", text))
        assert actual, f"{pattern} is not in {text}"
        for match in reversed(actual if which is None else [actual[which]]):
            text = text[: match.start()] + re.sub(pattern, other, match[0]) * bool(other) + text[match.end() :]
        return text

    return edit


def one_more(wait):
    """An edit: the wait leaves one group in flight."""
    return instead(f"{wait} 0", f"{wait} 1")


def broken(name, edit, kind, cause, instruction, warps=1, plan=None, blocks=1):
    """Decorator: so edited, the kernel stops with this kind (or one of several), words that match `cause`, at an instruction
    that begins so, which comes from a line marked guilty."""

    def register(kernel):
        kinds = {kind} if isinstance(kind, str) else set(kind)
        CASES.append(pytest.param(kernel, edit, kinds, cause, instruction, warps, plan, blocks, id=name.replace(" ", "-")))
        return kernel

    return register
