"""Conversions: a dtype called on a tile or vector, `p = bf16(p)`."""

from dataclasses import replace

from tiles.dtypes import bf16, fp16, fp32
from tiles.op import lowers
from tiles.types import rt, rv


def _conversion(to):
    def meaning(x):
        return x.array.astype(to.np)

    def rule(x):
        if not isinstance(x, (rt, rv)):
            raise TypeError(f"{to}: converts a register tile or vector, got {x}")
        out = replace(x, dtype=to)
        return out, lambda b, v: v if out == x else b.from_elements(out, b.elements(x, v))

    lowers(to, meaning)(rule)


for _dtype in (fp32, fp16, bf16):
    _conversion(_dtype)
