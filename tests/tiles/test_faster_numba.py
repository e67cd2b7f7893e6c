"""tiles/compiling/faster_numba.py, faster_passes.py, faster_typing.py, faster_llvmlite.py: the code that Numba's own compiler
makes, and its words."""

import pytest
from llvmlite import ir
from numba import cuda
from numba.core import types

from attention.kernels.recurrent import linear_token_loop
from attention.kernels.softmax import forward_ampere
from attention.parts.visibility import CAUSAL
from tiles import bf16
from tiles.compiling import compiler, faster_llvmlite
from tiles.launching.arguments import INT, array, signature

OWN = [x for x in compiler.REPLACEMENTS if x[1] == "get_func_def_lineno"]  # without it Numba fails at our methods


@pytest.fixture
def both(monkeypatch):
    """What Numba makes of a kernel with the table and without, or says of it."""

    def result(kernel):
        for table in (compiler.REPLACEMENTS, OWN):
            monkeypatch.setattr(compiler, "REPLACEMENTS", table)
            try:
                actual = compiler.Lowered(kernel, signature(kernel), "sm_90a")
                yield actual.ptx().replace(actual.name, "kernel")
            except Exception as error:
                yield f"{type(error).__name__}: {error}"

    return result


@pytest.mark.parametrize(
    ("module", "config"),
    [
        pytest.param(forward_ampere, forward_ampere.config_for(64, bf16, CAUSAL), marks=pytest.mark.release),
        (linear_token_loop, linear_token_loop.Config(64, "channel", True)),
    ],
    ids=["attention", "delta rule"],
)
def test_the_same_code(both, module, config):
    ours, numba_code = both(module.make(config)[0])
    assert ours == numba_code and ".entry kernel" in ours


def test_a_function_inside_a_kernel(both):
    """Numba inlines it, in a pass that other kernels are spared."""

    @cuda.jit
    def kernel(x: array(1), n: INT):
        def shifted(i):
            return i + n

        x[shifted(1)] = x[shifted(2)]

    ours, numba_code = both(kernel)
    assert ours == numba_code and ".entry kernel" in ours


say = print


@cuda.jit
def prints(n: INT):
    print("n", n)


@cuda.jit
def says(n: INT):
    """The name of `print` is another one."""
    say(n, n + 1)


@pytest.mark.parametrize("kernel", [prints, says], ids=["print", "another name"])
def test_a_kernel_that_prints(both, kernel):
    ours, numba_code = both(kernel)
    assert ours == numba_code and "vprintf" in ours


def test_little_is_left_for_the_collector(collect, monkeypatch):
    """Of what Numba makes of a kernel most is let go at once: the collector takes a tenth of the time for what is not."""
    left = []
    for table in (compiler.REPLACEMENTS, OWN):
        monkeypatch.setattr(compiler, "REPLACEMENTS", table)
        kernel = linear_token_loop.make(linear_token_loop.Config(64, "channel", True))[0]
        compiler.Lowered(kernel, signature(kernel), "sm_90a")
        collect()
        compiler.Lowered(kernel, signature(kernel), "sm_90a")
        left.append(collect())
    assert left[0] < left[1] / 2


@cuda.jit
def wrong(x: array(1), n: INT):
    """Numba itself refuses this kernel, too."""
    x[n] = {n: n}


@cuda.jit
def enters(x: array(1), n: INT):
    """Numba has no context managers in kernels, and no words for that."""
    with n:
        x[0] = n


@cuda.jit
def has_a_long_dictionary(x: array(1), n: INT):
    """The dictionary is so long that Python makes it of parts."""
    x[0] = {**{0: 1, 1: 2, 2: 3}, n: n, 3: 1, 4: 2, 5: 3, 6: 1, 7: 2, 8: 3, 9: 1, 10: 2, 11: 3, 12: 1, 13: 2, 14: 3, 15: n}[n]


PLACE = 'test_faster_numba.py", line '


@pytest.mark.parametrize(("kernel", "words"), [(wrong, PLACE), (enters, "terminator_types"), (has_a_long_dictionary, PLACE)])
def test_the_same_words(both, kernel, words):
    ours, numba_code = both(kernel)
    assert ours == numba_code and "Error: " in ours and words in ours


def test_a_type_that_was_pickled_has_the_hash_of_its_process():
    """Python's hashes of texts differ from process to process."""
    hash_of = next(ours for owner, name, ours in compiler.REPLACEMENTS if name == "__hash__")
    ty = types.Array(types.float32, 2, "A")
    kept = ty._hash = object(), hash(ty) + 1  # as it would come from another process
    assert hash_of(ty) == hash(ty) and ty._hash != kept and hash_of(ty) == hash(ty)


def some_of_each_instruction():
    """LLVM's text of a function with instructions of many kinds."""
    module, number, word = ir.Module("some"), ir.FloatType(), ir.IntType(32)
    pair = ir.LiteralStructType([number] * 2)
    many = ir.LiteralStructType([number] * 9)
    function = ir.Function(module, ir.FunctionType(number, [pair, word, number.as_pointer(), many]), "f")
    values, n, address, nine = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    parts = [builder.extract_value(values, k) for k in (0, 1)]
    total = builder.fadd(*parts, flags=["fast"], name="sum")
    total = builder.fmul(total, number(2), name="sum")
    odd = builder.add(n, word(1), name='an "odd" name')
    place = builder.alloca(number, name="place")
    builder.store(total, place).align = 4
    loaded = builder.load(place)
    loaded.set_metadata("invariant.load", module.add_metadata([]))
    builder.load(address).align = 8
    packed = builder.insert_value(ir.Constant(pair, ir.Undefined), loaded, 0)
    nested = builder.insert_value(ir.Constant(ir.LiteralStructType([pair]), ir.Undefined), packed, 0)
    builder.extract_value(nested, (0, 1))
    builder.extract_value(builder.insert_value(nine, total, 8), 0)
    smaller = builder.and_(builder.icmp_signed("<", odd, n), builder.fcmp_unordered("<", total, loaded, flags=["nnan"]))
    with builder.if_then(smaller):
        builder.call(ir.InlineAsm(ir.FunctionType(word, [word]), "mov $0, $1;", "=r,r"), [builder.neg(n)])
    chosen = builder.select(smaller, total, builder.sitofp(builder.zext(smaller, word), number))
    builder.ret(builder.fneg(chosen))
    return str(module)


def test_the_same_text(monkeypatch):
    """Instructions are made and printed as llvmlite does it, letter by letter, but for the names of long structs."""
    theirs = faster_llvmlite.name_structs(some_of_each_instruction())
    for owner, name, ours in faster_llvmlite.REPLACEMENTS:
        monkeypatch.setattr(owner, name, ours)
    ours = some_of_each_instruction()
    assert faster_llvmlite.name_structs(ours) == theirs and theirs.count("value {") == 5
    assert ours.count('value %"9 float"') == 2 and ours.count("{float, float, float") == 1  # the function's argument


@pytest.mark.parametrize("part", [("a", 2), ("a", (0, 5)), ("b", 0)])
def test_a_wrong_index_is_refused(monkeypatch, part):
    """Of a struct of two, or of a number."""
    for owner, name, ours in faster_llvmlite.REPLACEMENTS:
        monkeypatch.setattr(owner, name, ours)
    number = ir.FloatType()
    function = ir.Function(ir.Module(), ir.FunctionType(number, [ir.LiteralStructType([number] * 2), number]), "f")
    builder = ir.IRBuilder(function.append_basic_block())
    arguments, (which, index) = dict(zip("ab", function.args)), part
    with pytest.raises(TypeError, match="index"):
        builder.extract_value(arguments[which], index)
    with pytest.raises(TypeError, match=r"index|insert"):
        builder.insert_value(arguments[which], ir.IntType(32)(1), index)
