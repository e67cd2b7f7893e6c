# ruff: noqa: B018 (kernels whose one statement is the mistake)
"""tiles/compiling/unsupported.py: what Python and NumPy would do with a tile is refused with the same words on both
backends."""

import math
import operator

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from ops import exp, lane_sum, load, store, warpgroup, where, zeros
from tiles import bf16, fp32, interpreter, ring, rt, shared, st
from tiles.compiling.compiler import compile_kernel
from tiles.compiling.unsupported import REFUSED

T = rt(16, 32, fp32)
W, S = rt(16, 64, bf16), st(64, 64, bf16)
SMEM = shared(s=S)


def interpreted(body):
    interpreter.interpret(cuda.jit(body), (1, 1, 1), 128, [np.zeros((64, 64), np.float32)], SMEM)


def compiled(body):
    compile_kernel(cuda.jit(body), [types.Array(types.float32, 2, "A")], "sm_90a")


BACKENDS = pytest.mark.parametrize("backend", [interpreted, compiled])


def said(backend, body):
    """The TypeError's message, without the line that it names."""
    with pytest.raises(TypeError) as error:
        backend(body)
    message, _, line = str(error.value).partition("\n")
    assert "test_unsupported.py" in line
    return message


def applied(op_function, tiles):
    """A kernel body that calls a function with a tile, and another argument if it takes two."""
    if tiles == 1:
        return lambda x: op_function(zeros(T))
    return lambda x: op_function(zeros(T), 2.0)


def arity(op_function):
    if isinstance(op_function, np.ufunc):
        return op_function.nin
    takes_two = op_function.__module__ == "_operator" or op_function in (max, min, divmod, math.pow, math.fmod)
    return 2 if takes_two and op_function is not operator.abs else 1


FACES = [(row, op_function) for row in REFUSED for op_function in row.op_functions if op_function is not operator.setitem]


@BACKENDS
@pytest.mark.parametrize(("row", "op_function"), FACES, ids=lambda v: getattr(v, "__name__", ""))
def test_every_face(backend, row, op_function):
    assert (
        said(backend, applied(op_function, arity(op_function)))
        == f"a tile cannot be {row.action}: {row.instead}; got rt(16, 32, fp32)"
    )


def indexing(x):
    zeros(T)[3, 5]


def indexing_at_run_time(x):
    zeros(T)[x.shape[0], 0]


def assigning(x):
    t = zeros(T)
    t[3, 5] = 1.0


def assigning_at_run_time(x):
    t = zeros(T)
    t[x.shape[0]] = 1.0


def powers(x):
    zeros(T) ** 2


def powers_in_place(x):
    t = zeros(T)
    t **= 2.0


def powers_of_two(x):
    2.0 ** zeros(T)


def matrix_product(x):
    (s,) = SMEM.open()
    s @ s


def shared_in_math(x):
    (s,) = SMEM.open()
    math.exp(s)


def tile_in_flight(x):
    (s,) = SMEM.open()
    warpgroup.store(s, zeros(W))
    warpgroup.sync()
    max(warpgroup.mm_AB(s, s), 1.0)


def shared_arithmetic(x):
    (s,) = SMEM.open()
    s * 2.0


def negated_shared(x):
    (s,) = SMEM.open()
    -s


def branch(x):
    if zeros(T):
        x[0, 0] = 1


def negated(x):
    store(x, where(not zeros(T), zeros(T), 1.0), (0, 0))


def printed_with_words(x):
    print("tile", zeros(T))


def printed_partial(x):
    print(lane_sum(zeros(T)))


def printed_shared(x):
    (s,) = SMEM.open()
    print(s)


MISTAKES = {
    indexing: "a tile cannot be indexed: its elements are spread over the lanes; store it to an array, or",
    indexing_at_run_time: "a tile cannot be indexed: ",
    assigning: "a tile cannot be indexed: ",
    assigning_at_run_time: "a tile cannot be indexed: ",
    powers: "a tile cannot be raised to a power: multiply, or use exp2(y * log2(x)); got rt(16, 32, fp32)",
    powers_in_place: "a tile cannot be raised to a power: ",
    powers_of_two: "a tile cannot be raised to a power: ",
    matrix_product: "a tile cannot be multiplied with @: use mma_AB(acc, a, b), or in a warpgroup mm_AB(a, b); got st(64",
    shared_in_math: "a tile cannot be given to math or NumPy: import the function from ops (exp, log, sqrt, tanh, ...); got st",
    tile_in_flight: "a tile cannot be compared by these functions: use <, <=, ==, ... and where, or maximum and minimum",
    shared_arithmetic: "mul: st(64, 64, bf16) lies in shared memory: load(...) it first",
    negated_shared: "neg: st(64, 64, bf16) lies in shared memory: load(...) it first",
    branch: "a branch cannot depend on a tile: rt(16, 32, fp32); use where, or ask tile_any or tile_all of it; conditions are "
    "joined by & and |, and turned round by ==, as mask == 0.0",
    negated: "a branch cannot depend on a tile: rt(16, 32, fp32)",
}


@BACKENDS
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_mistakes(backend, mistake):
    assert said(backend, mistake).startswith(MISTAKES[mistake])


def summed(x):
    zeros(T).sum()


def exp_of_two(x):
    exp(zeros(T), 1)


def test_methods_of_arrays_are_told_the_op():
    assert said(compiled, summed).startswith("'rt' object has no attribute 'sum': use row_sum(t), col_sum(t) or tile_sum(t)")


@BACKENDS
def test_too_many_arguments(backend):
    assert said(backend, exp_of_two) == "exp: too many positional arguments; it takes (x)"


PRINTED = {
    printed_with_words: "print: a tile is printed by itself, print(tile), got rt(16, 32, fp32) among other arguments",
    printed_partial: "print: takes a register tile or vector, got partial col_vec(16, fp32)",
    printed_shared: "print: takes a register tile or vector, got st(64, 64, bf16)",
}


@BACKENDS
@pytest.mark.parametrize("mistake", PRINTED, ids=lambda f: f.__name__)
def test_what_cannot_be_printed(backend, mistake):
    with pytest.raises(TypeError) as error:
        backend(mistake)
    assert str(error.value).partition("\n")[0] == PRINTED[mistake]


def test_numbers_are_left_alone():
    """The same functions of numbers mean what they always did, in the interpreter and compiled."""

    def body(x):
        x[0, 0] = max(x[0, 1], min(3.0, 2.0)) + math.exp(x[0, 2]) + abs(-5.0) + np.sin(x[0, 2]) + len(x.shape) + x[0, 3] ** 2

    x = np.zeros((64, 64), np.float32)
    x[0, 3] = 3
    interpreter.interpret(cuda.jit(body), (1, 1, 1), 32, [x])
    assert x[0, 0] == 2 + 1 + 5 + 0 + 2 + 9
    compiled(body)


def test_numpy_numbers_from_the_left():
    tile = np.zeros((16, 16), np.float32)

    def body(x):
        assert (np.float32(2) * load(x, rt(16, 16, fp32), (0, 0)) - 1.0).spec == rt(16, 16, fp32)

    interpreter.interpret(cuda.jit(body), (1, 1, 1), 32, [tile])


def test_a_part_cannot_be_laid_out():
    part = st(64, 64, bf16, parent_rows=128)
    words = r"st\(64, 64, bf16\) of 128 rows is a part; lay out the whole"
    with pytest.raises(ValueError, match="shared: " + words):
        shared(a=part)
    with pytest.raises(ValueError, match="ring: " + words):
        ring(part, 2)
