# ruff: noqa: B018, F821 (kernels whose one statement is the mistake)
"""tiles/compiling/plain_errors.py, tiles/compiling/type_inference.py: Numba's refusals in plain words with the kernel's line,
launched or compiled alike."""

import math
import re
import sys

import numpy as np
import pytest
from numba import cuda
from numba.core.errors import NumbaError
from numba.cuda import types

import tiles
from ops import exp, load, mma_AB, row_max, store, warpgroup, zeros
from tiles import bf16, fp32, inlined, ring, rt, shared, st, static
from tiles.compiling.compiler import compile_kernel
from tiles.compiling.plain_errors import translate_error

T, NARROW = rt(16, 64, fp32), rt(16, 32, fp32)
TABLE, NUMBERS = {"a": 1}, [1, 2]


class Plain:
    scale = 2.0


@static
class Epilogue:
    scale: float = 2.0


class Cls:
    pass


plain, epilogue = Plain(), Epilogue()
plan, ring_plan = shared(a=st(64, 64, bf16)), shared(a=ring(st(64, 64, bf16), 2, readers=4))


def helper(t):
    return t + t


@inlined
def asks(t):
    return t.foo


@inlined
def takes_two(t, u):
    return t + u


MISTAKES = {}


def mistake(said):
    def add(body):
        MISTAKES[body] = said
        return body

    return add


@mistake("'rt' object has no attribute 'foo': it has rows, cols, dtype, col_vec, row_vec; got rt(16, 64, fp32)")
def unknown_attribute(x):
    load(x, T, (0, 0)).foo


@mistake("'rt' object has no attribute 'exp': use exp(t), which is an op; got rt(16, 64, fp32)")
def an_op_as_a_method(x):
    store(x, load(x, T, (0, 0)).exp(), (0, 0))


@mistake("'rv' object has no attribute 'height': it has length, dtype; got col_vec(16, fp32)")
def attribute_of_a_vector(x):
    row_max(load(x, T, (0, 0))).height


@mistake("'Epilogue' object has no attribute 'scal': it has scale and its @inlined methods; got Epilogue(scale=2.0)")
def attribute_of_a_static_object(x):
    store(x, load(x, T, (0, 0)) * epilogue.scal, (0, 0))


@mistake("an array in a kernel has no attribute 'foo': it has shape, strides, ndim, size, dtype, elements; got array(")
def attribute_of_an_array(x):
    x[0, 0] = x.foo


@mistake("math.comb is nothing that kernels know: import what is done to tiles from ops")
def attribute_of_a_module(x):
    x[0, 0] = math.comb(3, 2)


@mistake(
    "'a' is not read from shared storage: `a, b = smem.open()` gives a kernel its parts, in their order; got shared(a=st(64"
)
def a_part_of_a_plan(x):
    plan.a


@mistake("opened shared storage has no item 'fill': `(a,) = smem.open()` takes its one item out, smem.open().a does so by name")
def a_plan_s_parts_as_one(x):
    ring_plan.open().fill(0, x, (0, 0))


@mistake(
    "warpgroup.mm_AB: got ring(st(64, 64, bf16), 2 stages, 4 readers), st(64, 64, bf16): a is a ring, whose j-th tile is `a"
)
def a_ring_as_an_operand(x):
    (a,) = ring_plan.open()
    warpgroup.mm_AB(a, a.wait(0))


@mistake("kernels have no texts that are put together, as an f-string is: print(t) prints a tile, a vector or a number")
def a_text_that_is_put_together(x):
    print(f"t = {load(x, T, (0, 0))}")


YIELD = "use of yield in a closure, as in tuple(.. for .. in ..)"
BUILTIN = "Use of unsupported opcode LOAD_COMMON_CONSTANT"  # is it the `tuple` of builtins? Python asks since 3.14


@mistake(f"kernels cannot say this: {YIELD if sys.version_info < (3, 14) else BUILTIN}; kernels are numbers")
def a_generator(x):
    tuple(load(x, T, (16 * i, 0)) for i in range(2))


@mistake("TABLE is a dict, which kernels cannot read: take what is needed before the kernel, or make it a tuple")
def dictionary(x):
    x[0, 0] = TABLE["a"]


@mistake(
    "plain is an object of class Plain, which kernels cannot read: an array is an argument of the launch, a number is to be"
)
def object_of_a_class(x):
    store(x, load(x, T, (0, 0)) * plain.scale, (0, 0))


@mistake("Cls is a class that kernels cannot call: values made in a kernel are tuples and typing.NamedTuple's")
def class_called(x):
    Cls()


@mistake(
    "st is a type that kernels do not make: it is laid out on the host, smem = shared(name=st(...)), and opened, smem.open()"
)
def makes_a_shared_tile(x):
    zeros(st(16, 64, bf16))


@mistake("helper is a plain Python function, which a kernel cannot call: decorate it with @tiles.inlined")
def plain_function(x):
    store(x, helper(load(x, T, (0, 0))), (0, 0))


@mistake("name 'nobody' is not defined")
def undefined(x):
    x[0, 0] = nobody


@mistake("t is rt(16, 64, fp32) on one way to this line and rt(16, 32, fp32) on another, through a loop or an `if`: ")
def two_types(x):
    t = load(x, T, (0, 0))
    if x[0, 0] > 0:
        t = load(x, NARROW, (0, 0))
    store(x, t, (0, 0))


@mistake("a kernel returns nothing, and this one returns float32: store what it finds to an array that it is given")
def returns(x):
    return x[0, 0]


@mistake("there are 3 names on the left of =, and 2 values on the right")
def too_many_names(x):
    r, c, d = x.shape


@mistake("kernels make no arrays: numpy.zeros is for the host; ops.zeros(tile) makes a tile of registers")
def makes_an_array(x):
    a = np.zeros(4)
    x[0, 0] = a[0]


@mistake("a tile is not assigned to elements of an array: store(array, tile, (row, col)) does that; got array(")
def tile_to_elements(x):
    x[0:16, 0:64] = zeros(T)


@mistake("cannot be indexed so, or not with such a value: setitem of array(")
def text_to_an_element(x):
    x[0, 0] = "a"


@mistake("a tuple of several types is indexed by numbers that are known when the kernel is compiled; got Tuple(")
def tuple_by_a_number_of_the_run(x):
    store(x, (1.0, zeros(T))[cuda.blockIdx.x], (0, 0))


@mistake("enumerate is not for rt(16, 64, fp32); kernels are numbers, tuples, named tuples, tiles, ops, `if`, ")
def enumerates_a_tile(x):
    for i, _ in enumerate(zeros(T)):
        x[0, 0] = i


@mistake("kernels catch no exceptions by class: kernels are numbers, ")
def catches(x):
    try:
        x[0, 0] = 1
    except ValueError:
        x[0, 0] = 2


@mistake(
    "kernels cannot say this: The 'with (context manager) as (variable):' construct is not supported; kernels are numbers,"
)
def with_statement(x):
    with open("file") as file:
        file.read()


@mistake(
    "kernels cannot say this: Use of unsupported opcode (IMPORT_NAME); import it outside of the function; kernels are numbers,"
)
def imports(x):
    from ops import exp

    store(x, exp(load(x, T, (0, 0))), (0, 0))


@mistake("kernels have no lists that change: use a tuple, or tiles in a loop (asked for 'append')")
def grows_a_list(x):
    x[0, 0] = sum([i for i in range(3)])


@mistake("kernels do not know numpy.ndarray: kernels are numbers, ")
def asks_for_a_class(x):
    if isinstance(x, np.ndarray):
        x[0, 0] = 1


@mistake("takes_two(t, u): missing a required argument: 'u'")
def too_few_arguments(x):
    store(x, takes_two(zeros(T)), (0, 0))


@mistake("Literal[int](3) is called with (rt(16, 64, fp32)), and is no function")
def calls_a_number(x):
    n = 3
    n(zeros(T))


ELEMENTWISE = (
    "an array in a kernel is not copied or computed with as a whole: load tiles of it, or take its elements one by one"
)


@mistake("kernels have no lists: use a tuple")
def reads_a_list(x):
    x[0, 0] = NUMBERS[0]


@mistake("kernels have no lists: use a tuple")
def makes_a_list(x):
    a = [zeros(T)]
    store(x, a[0], (0, 0))


@mistake("kernels have no sets: use a tuple")
def looks_into_a_set(x):
    x[0, 0] = 3 in {x.shape[0], 2}


@mistake("kernels make no text: print(...) takes literal text and numbers, one after the other")
def makes_text(x):
    print(f"{x[0, 0]}")


@mistake("a kernel raises exceptions with constant arguments only")
def raises(x):
    if x.shape[0] > 99:
        raise ValueError(x.shape[0])


@mistake(ELEMENTWISE)
def adds_arrays(x):
    y = x + x
    x[0, 0] = y[0, 0]


@mistake(ELEMENTWISE)
def copies_an_array(x):
    y = x.copy()
    x[0, 0] = y[0, 0]


@mistake(ELEMENTWISE)
def assigns_a_row(x):
    x[0] = x[1]


LOST = "is lost here: an op makes a new tile and changes none that it is given; write"


@mistake(f"mma_AB: its result, rt(16, 64, fp32), {LOST} c = mma_AB(c, ...)")
def drops_a_product(x):
    c, a = zeros(T), bf16(zeros(T))
    for _ in range(3):
        mma_AB(c, a, load(x, rt(64, 64, bf16, "col"), (0, 0)))
    store(x, c, (0, 0))


@mistake(f"mma_AB: its result, pending rt(16, 64, fp32), {LOST} c = mma_AB(c, ...)")
def drops_what_is_pending(x):
    (a,) = plan.open()
    c = zeros(T)
    warpgroup.mma_AB(c, a, a)
    warpgroup.wait(newer=0)
    store(x, c, (0, 0))


@mistake(f"exp: its result, rt(16, 64, fp32), {LOST} t = exp(...)")
def drops_what_nobody_named(x):
    exp(load(x, T, (0, 0)))


def launched(body):
    tiles.launch(cuda.jit(body), 1, 32)(np.zeros((16, 64), np.float32))


def compiled(body):
    compile_kernel(cuda.jit(body), [types.Array(types.float32, 2, "A")], "sm_90a")


def refused(backend, body):
    with pytest.raises((TypeError, NameError)) as error:
        backend(body)
    return error.value


@pytest.mark.parametrize("body", MISTAKES, ids=lambda body: body.__name__)
def test_words_and_line(body):
    """The words, the file, the kernel; and not what Numba calls its passes."""
    error = refused(launched, body)
    message, _, line = str(error).partition("\n")
    assert message.startswith(MISTAKES[body])
    assert (
        "test_plain_errors.py" in line and f"def {body.__name__}(" in line and "pipeline" not in line and "During" not in line
    )
    assert type(error) is (NameError if body is undefined else TypeError)


@pytest.mark.parametrize(
    "body", [unknown_attribute, dictionary, two_types, makes_an_array, undefined, with_statement, makes_a_list, drops_a_product]
)
def test_compiling_says_the_same(body):
    assert str(refused(compiled, body)) == str(refused(launched, body))


def in_a_helper(x):
    store(x, asks(load(x, T, (0, 0))), (0, 0))


def helper_of_a_helper(x):
    store(x, passes_on(load(x, T, (0, 0))), (0, 0))


@inlined
def passes_on(t):
    return stores_text(t)


@inlined
def stores_text(t):
    return TABLE["a"]


def test_the_lines_that_call_a_helper_are_named():
    said = str(refused(launched, helper_of_a_helper))
    assert said.startswith("TABLE is a dict") and "def stores_text(t):" in said
    called = [line.strip() for line in said.splitlines() if "called at" in line]
    assert [line.partition("`")[2] for line in called] == [
        "return stores_text(t)`",
        "store(x, passes_on(load(x, T, (0, 0))), (0, 0))`",
    ]


def waits(x):
    """For a product that nobody needs, by name and by the way."""
    (a,) = plan.open()
    warpgroup.store(a, warpgroup.load(x, rt(16, 64, bf16), (0, 0)))
    warpgroup.sync()
    warpgroup.wait(warpgroup.mm_AB(a, a))
    _ = warpgroup.mm_AB(a, a)
    warpgroup.wait(newer=0)


def test_a_wait_s_tile_may_be_left():
    x = np.zeros((64, 64), np.float32)
    tiles.launch(cuda.jit(waits), 1, 128, shared=plan)(x)


def written(tmp_path, source):
    """The names of a module with this source."""
    (tmp_path / "written_here.py").write_text("from numba import cuda\nfrom ops import load, store\n" + source)
    names = {"T": T, "inlined": inlined}
    exec(compile((tmp_path / "written_here.py").read_text(), str(tmp_path / "written_here.py"), "exec"), names)
    return names


@pytest.mark.parametrize("backend", [launched, compiled])
@pytest.mark.parametrize("mistake", ["load(x, T, (0, 0)) + 'text'", "load(x, T, (0, 0)).foo", "twice(load(x, T, (0, 0)))"])
def test_a_lambda_s_line_stands_alone(mistake, backend, tmp_path):
    """Not under the head of a function whose body has ended before."""
    source = f"""
twice = inlined(lambda t: t.nothing)

def unrelated(y):
    return y

kernel = lambda x: store(
    x, {mistake}, (0, 0)
)
"""
    said = str(refused(backend, written(tmp_path, source)["kernel"]))
    line, indent = ("twice = inlined(lambda t: t.nothing)", "") if "twice" in mistake else (f"    x, {mistake}, (0, 0)", "    ")
    assert re.search(r'\n\nFile ".*written_here.py", line \d+:\n' + re.escape(f"{line}\n{indent}^"), said), said


def test_the_head_is_that_of_the_function_round_it(tmp_path):
    """Not of one inside it that comes before the line."""
    source = """
def kernel(x):
    def inner(t):
        return t

    t = load(x, T, (0, 0))
    store(x, t.foo, (0, 0))
"""
    said = str(refused(launched, written(tmp_path, source)["kernel"]))
    assert "\ndef kernel(x):\n    <source elided>\n    t = load(x, T, (0, 0))\n    store(x, t.foo, (0, 0))\n    ^" in said, said


def doubles(x):
    twice = lambda t: t + t
    store(x, twice(load(x, T, (0, 0))), (0, 0))


def test_a_closure_in_a_kernel_is_none_of_these():
    """Numba takes its body into the kernel; FoldConstants looked there for arguments that have no types yet."""
    x = np.ones((16, 64), np.float32)
    tiles.launch(cuda.jit(doubles), 1, 32)(x)
    assert (x == 2).all()


def test_what_no_row_knows_stays_numbas():
    assert translate_error(NumbaError("something new"), helper) is None


def test_an_error_without_words_that_read_no_instruction_stays():
    """As that of a property which a class leaves to others."""
    assert translate_error(NotImplementedError(), dictionary) is None
