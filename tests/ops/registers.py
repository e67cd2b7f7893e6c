"""Registers of the machine that executes lowerings (lanes.py)."""

import numpy as np
from llvmlite import ir

from tiles import bf16, fp8e4m3, fp8e5m2, fp16, tf32
from tiles.builder import f32, i1, i32, i64

TYPES = {f32: np.float32, i32: np.uint32, i64: np.uint64, i1: np.bool_, ir.DoubleType(): np.float64, ir.HalfType(): np.float16}
NUMPY = {d.ptx: d.np for d in (bf16, fp16, tf32, fp8e4m3, fp8e5m2)}


class Register:
    """One LLVM value: its type, and an array with an entry a thread."""

    def __init__(self, type, array):
        self.type, self.array = type, np.asarray(array, TYPES[type])


class Struct:
    """Several registers."""

    def __init__(self, parts):
        self.parts, self.type = list(parts), ir.LiteralStructType([p.type for p in parts])
