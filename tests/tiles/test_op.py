"""Ops: one name with two meanings. A user's own op; and mistakes, refused in the same words without a GPU and for one."""

import pathlib
import re

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from ops import causal, exp2, finish_sum, full, lane_sum, load, maximum, right_fill, row_max, store, warpgroup, zeros
from tiles import bf16, fp16, fp32, gl, inlined, lowers, op, ring, rt, shared, st, tensor
from tiles.compiling.builder import f32
from tiles.compiling.compiler import compile_kernel
from tiles.compiling.numba_types import Value
from tiles.interpreter import interpret

X, Y = rt(16, 32, fp32), rt(16, 64, fp32)
A, B = st(64, 64, bf16), st(64, 64, fp16)
smem = shared(a=A, b=B, r=ring(A, 2))
fp32_ring = ring(st(64, 64, fp32), 2)


# ---- an op of one's own: a dozen lines -------------------------------------------------------------------------------
@op
def soft_cap(tile, limit):
    """limit * x / (limit + |x|), element by element."""
    return limit * tile.array / (limit + np.abs(tile.array))


@lowers(soft_cap)
def _(tile, limit):
    if not isinstance(tile, rt):
        raise TypeError(f"soft_cap: takes a register tile, got {tile}")

    def cap(b, x, limit):
        return b.fdiv(b.fmul(limit, x), b.fadd(limit, b.llvm("llvm.nvvm.fabs.f", x)))

    return tile, lambda b, v, limit: b.from_elements(tile, [cap(b, x, b.real(limit)) for x in b.elements(tile, v)])


@cuda.jit
def capped(source, target, limit):
    store(target, soft_cap(load(source, X, (0, 0)), limit), (0, 0))


def test_an_own_op_in_the_interpreter():
    x = np.random.default_rng(0).standard_normal((16, 32), np.float32)
    out = np.zeros_like(x)
    interpret(capped, (1, 1, 1), 32, [x, out, 2.0])
    np.testing.assert_allclose(out, 2 * x / (2 + abs(x)), rtol=1e-6)


def test_an_own_op_compiled():
    array = types.Array(types.float32, 2, "A")
    compiled = compile_kernel(capped, (array, array, types.float32), "sm_90a")
    assert compiled.cubin and compiled.local_bytes == compiled.spill_bytes == 0


@pytest.mark.gpu
def test_an_own_op_on_the_card():
    x = np.random.default_rng(0).standard_normal((16, 32), np.float32)
    out = cuda.to_device(np.zeros_like(x))
    capped[1, 32](cuda.to_device(x), out, 2.0)
    np.testing.assert_allclose(out.copy_to_host(), 2 * x / (2 + abs(x)), rtol=1e-6)


# ---- mistakes --------------------------------------------------------------------------------------------------------
def interpreted(kernel):
    array = np.zeros((64, 64), np.float32)
    interpret(kernel, (1, 1, 1), 128, [array, tensor(array, st(64, 64, fp32)), 2.5], smem)


def compiled(kernel):
    source = Value(gl(st(64, 64, fp32), 2, 0, 1))
    compile_kernel(kernel, (types.Array(types.float32, 2, "A"), source, types.float32), "sm_90a")


MISTAKES = []


def mistake(words):
    """Registers a kernel body with a typing mistake, and what must be said of it."""

    def register(body):
        MISTAKES.append(pytest.param(body, words, id=body.__name__))
        return body

    return register


@mistake("add: rt(16, 32, fp32) and rt(16, 64, fp32) do not broadcast")
def shapes(array, source, x):
    zeros(X) + zeros(Y)  # here


@mistake("mul: rt(16, 32, fp32) and row_vec(64, fp32) do not broadcast")
def vector_of_another_tile(array, source, x):
    zeros(X) * zeros(Y.row_vec)  # here


@mistake("sub: rt(16, 32, fp32) and rt(16, 32, bf16) do not broadcast")
def dtypes(array, source, x):
    zeros(X) - bf16(zeros(X))  # here


@mistake("take finish_sum(...) of the partial sum first")
def unfinished_sum(array, source, x):
    zeros(X) / lane_sum(zeros(X))  # here


@mistake("exp2: x must be a value, got the type rt(16, 32, fp32)")
def type_for_a_tile(array, source, x):
    exp2(X)  # here


@mistake("row_max: takes a register tile or a shared one, got col_vec(16, fp32)")
def reduction_of_a_vector(array, source, x):
    row_max(zeros(X.col_vec))  # here


@mistake("finish_sum: takes a partial sum (from lane_sum), got col_vec(16, fp32)")
def total_of_what_is_whole(array, source, x):
    finish_sum(zeros(X.col_vec))  # here


@mistake("full: shape must be a register tile or vector type such as rt(16, 64, fp32), got st(64, 64, bf16)")
def shared_tile_in_registers(array, source, x):
    full(A, 1.0)  # here


@mistake("right_fill: takes a register tile, an integer and a number, got rt(16, 32, fp32), float32 and ")
def column_that_is_no_integer(array, source, x):
    right_fill(zeros(X), x, 0.0)  # here


@mistake("this tile is still in flight: pending rt(16, 64, fp32); take it with warpgroup.wait(...) first")
def pending_tile_added(array, source, x):
    a, b, r = smem.open()
    warpgroup.store(a, zeros(Y))
    warpgroup.sync()
    s = warpgroup.mm_AB(a, a)
    s + 1.0  # here


@mistake("maximum: this tile is still in flight: pending rt(16, 64, fp32)")
def pending_tile_in_an_op(array, source, x):
    a, b, r = smem.open()
    warpgroup.store(a, zeros(Y))
    warpgroup.sync()
    s = warpgroup.mm_AB(a, a)
    maximum(s, 0.0)  # here


@mistake("wait: takes a tile in flight (from mm_* or mma_*), got rt(16, 64, fp32)")
def wait_for_what_is_here(array, source, x):
    warpgroup.wait(zeros(Y))  # here


@mistake("mm_AB: got st(64, 64, bf16), st(64, 64, fp16): bf16 and fp16 are not multiplied with each other by this op; takes a")
def mma_of_two_dtypes(array, source, x):
    a, b, r = smem.open()
    warpgroup.mm_AB(a, b)  # here


@mistake("mma_ABt: got rt(16, 32, fp32), st(64, 64, bf16), st(64, 64, bf16); takes acc")
def accumulator_of_another_shape(array, source, x):
    a, b, r = smem.open()
    warpgroup.mma_ABt(zeros(X), a, a)  # here


@mistake("fill: the ring holds st(64, 64, bf16), the source gives st(64, 64, fp32)")
def source_of_another_tile(array, source, x):
    a, b, r = smem.open()
    r.fill(0, source, (0, 0))  # here


@mistake("fill: `at` must be a tuple of up to 2 integers, got")
def too_many_indices(array, source, x):
    fp32_ring.fill(0, source, (0, 0, 0))  # here


@mistake("wait: the tile's number j must be an integer, got float32")
def number_of_a_tile(array, source, x):
    a, b, r = smem.open()
    r.wait(x)  # here


@mistake("store: `at` must be 2 integers for an array of 2 axes, got (int)")
def index_of_another_rank(array, source, x):
    store(array, zeros(X), (0,))  # here


@mistake("warpgroup.store: st(64, 64, bf16) does not take 4 x rt(16, 32, fp32)")
def store_of_another_shape(array, source, x):
    a, b, r = smem.open()
    warpgroup.store(a, zeros(X))  # here


@mistake("claim_registers: a multiple of 8 from 24 to 256, got 100")
def odd_register_count(array, source, x):
    warpgroup.claim_registers(100)  # here


@inlined
def helper(tile):
    return causal(tile, 0.5, 0.0)  # here


@mistake("causal: takes a register tile, an integer and a number, got rt(16, 32, fp32), float")
def mistake_in_a_helper(array, source, x):
    helper(zeros(X))


def marked(body):
    """The line marked `# here`, of the body or of the helper it calls."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    code = helper.__code__ if "helper" in body.__code__.co_names else body.__code__
    return next(k for k in range(code.co_firstlineno, len(lines) + 1) if lines[k - 1].endswith("# here"))


@pytest.mark.parametrize("run", [interpreted, compiled])
@pytest.mark.parametrize("body, words", MISTAKES)
def test_mistakes_are_refused_alike(run, body, words):
    """The same words on both backends, a plain TypeError (a TypingError drowns in candidates), and the kernel's line."""
    with pytest.raises(TypeError, match=re.escape(words)) as caught:
        run(cuda.jit(body))
    text = str(caught.value)
    assert type(caught.value) is TypeError
    assert len(text.splitlines()) <= 10, text
    assert re.search(rf"test_op\.py(:|\", line ){marked(body)}\b", text), text


def test_what_must_be_known_when_a_kernel_is_compiled():
    """Without a GPU every integer is known; so the compiler alone can say this."""

    @cuda.jit
    def kernel():
        a, b, r = smem.open()
        warpgroup.store(a, zeros(Y))
        warpgroup.sync()
        s = warpgroup.mm_AB(a, a)
        warpgroup.wait(s, cuda.gridDim.x)

    with pytest.raises(TypeError, match="wait: newer must be known when the kernel is compiled, got int"):
        compile_kernel(kernel, (), "sm_90a")


def mine(rule, meaning=lambda tile: tile.array):
    """An op of somebody's, with this rule and meaning, in a kernel."""

    @op
    def halved(tile):
        return meaning(tile)

    if rule:
        lowers(halved)(rule)

    @cuda.jit
    def kernel(x):
        store(x, halved(load(x, X, (0, 0))), (0, 0))

    return kernel


OWN = {
    "halved: has no rule: write one under @lowers(halved)": (None,),
    "halved: its rule must return (result, emit), or None where it has no meaning, got rt(16, 32, fp32)": (lambda tile: tile,),
    "halved: no meaning for rt(16, 32, fp32)": (lambda tile: None,),
    "halved: its rule must have the op's parameters, (tile), and has (tile, by)": (lambda tile, by: (tile, None),),
    "halved: its meaning must give the elements of rt(16, 32, fp32), and gives None": (lambda t: (t, None), lambda tile: None),
    "halved: its meaning must give the elements of rt(16, 32, fp32), and gives an array of shape (3, 32)": (
        lambda tile: (tile, None),
        lambda tile: tile.array[:3],
    ),
}


@pytest.mark.parametrize("words", OWN)
def test_mistakes_in_an_own_op(words):
    with pytest.raises(TypeError) as caught:
        interpret(mine(*OWN[words]), (1, 1, 1), 32, [np.zeros((16, 32), np.float32)])
    assert words in str(caught.value) and "test_op.py" in str(caught.value)


@pytest.mark.parametrize(
    ("emit", "words"),
    [
        (lambda b, v: None, "halved: emit must return the value of rt(16, 32, fp32), and returned None"),
        (lambda b, v: b.asm(f32, "neg.f32 $0, $1;", "=f", v), "asm: '=f' has 0 inputs, and 1 are given to 'neg.f32 $0, $1;'"),
    ],
)
def test_mistakes_in_what_an_own_op_emits(emit, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        compile_kernel(mine(lambda tile: (tile, emit)), [types.Array(types.float32, 2, "A")], "sm_90a")
