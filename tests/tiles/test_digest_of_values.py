"""tiles/compiling/digest.py: keys of kernels that use ops, functions and values of a user's; which of them have none."""

import itertools
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from keys import key
from numba import cuda
from numba.cuda import types

from ops import row_max
from tiles import bf16, fp32, inlined, ring, rt, shared, st
from tiles.compiling import digest
from tiles.op import OPS

ROOT = Path(__file__).parents[2]


# ---- ops of a user's ---------------------------------------------------------------------------------------------------
USERS_OP = """
    import numpy as np
    from numba import cuda
    from tiles import lowers, op
    from ops.elementwise.arithmetic import map_rule
    from ops import load, store
    from tiles import rt, fp32
    TILE, SLOPE = rt(16, 16, fp32), 0.5

    def scaled(b, x):
        return b.fmul(x, b.real(SLOPE))

    @op
    def leaky(x):
        return np.maximum(x.array, 0)

    {registration}

    @cuda.jit
    def kernel(x):
        store(x, leaky(load(x, TILE, (0, 0))), (0, 0))
"""
REGISTRATIONS = {
    "a rule": "@lowers(leaky)\n    def _(x):\n        return x, lambda b, v: b.pack([scaled(b, e) for e in b.unpack(v)])",
    "a table's row": 'lowers(leaky)(map_rule("leaky", scaled))',
    "a lambda in a table's row": 'lowers(leaky)(map_rule("leaky", lambda b, e: b.fmul(e, b.real(SLOPE))))',
}


@pytest.mark.parametrize("registration", REGISTRATIONS)
def test_the_lowering_of_a_user_s_op(registration, module):
    known = dict(OPS)
    source = USERS_OP.format(registration=REGISTRATIONS[registration])

    def subject(source):
        for op_function in OPS.keys() - known.keys():
            del OPS[op_function]
        return key(module(source, "subject").kernel)

    try:
        first = subject(source)
        assert first and subject(source) == first
        assert subject(source.replace("SLOPE = rt(16, 16, fp32), 0.5", "SLOPE = rt(16, 16, fp32), 0.25")) not in (first, None)
        assert subject(source.replace("b.fmul", "b.fadd")) not in (first, None)
    finally:
        for op_function in OPS.keys() - known.keys():
            del OPS[op_function]


def test_ops_that_a_kernel_does_not_reach(module):
    """A user's op counts where it is used. A user's lowering of an op of ours counts everywhere: any op of ours may use it."""
    known = dict(OPS)
    kernel = "from numba import cuda\nfrom ops import exp2\n@cuda.jit\ndef kernel(x):\n    x[0, 0] = exp2(x[0, 1])\n"
    exp2 = OPS[module(kernel, "subject").exp2]
    rule, first = exp2.rule, key(module(kernel, "subject").kernel)
    try:
        module(USERS_OP.format(registration=REGISTRATIONS["a rule"]), "users_op")
        assert key(module(kernel, "subject").kernel) == first is not None
        exp2.rule = lambda x: rule(x)
        assert key(module(kernel, "subject").kernel) not in (first, None)
    finally:
        exp2.rule = rule
        for op_function in OPS.keys() - known.keys():
            del OPS[op_function]


# ---- what cannot be digested -------------------------------------------------------------------------------------------
def plain(x):
    return x


UNKNOWN = object()


class Slotted:
    __slots__ = ("a",)


def kernel_using(value):
    @cuda.jit
    def kernel(x):
        x[0, 0] = value

    return kernel


@pytest.mark.parametrize(
    "value",
    [plain, UNKNOWN, Slotted(), np.array([UNKNOWN]), itertools.count(), {1: UNKNOWN}, (1, [UNKNOWN]), sys.modules[__name__]],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_be_digested_is_not_cached(value, caplog):
    with caplog.at_level(logging.DEBUG, "tiles.compiling.digest"):
        assert key(kernel_using(value)) is None
    assert "is not cached" in caplog.text


def test_what_could_not_be_digested_once_cannot_be_digested_again():
    """A property is left out if its value cannot be digested. Where the same value is met again, it is no less unknown."""
    one = digest.Digest()
    with pytest.raises(digest.Undigestible):
        one(UNKNOWN)
    with pytest.raises(digest.Undigestible):
        one(UNKNOWN)
    assert one.depth == 0


def test_a_type_that_is_an_address():
    """Numba writes a function's type with the function's address: no other process has it."""
    assert key(kernel_using(1), (types.Dispatcher(cuda.jit(lambda x: None)),)) is None


@pytest.mark.parametrize("option", [{"debug": True, "opt": False}, {"lineinfo": True}, {"link": ["some.cu"]}])
def test_options_that_name_more_than_the_code_are_not_cached(option):
    assert key(cuda.jit(**option)(lambda x: None)) is None
    assert key(cuda.jit(lambda x: None))


def test_values_that_differ_in_no_more_than_type_differ():
    values = [
        0,
        0.0,
        -0.0,
        False,
        "0",
        b"0",
        None,
        (),
        (0,),
        ((0,),),
        [0],
        np.float32(0),
        np.float64(0),
        np.int64(0),
        float("nan"),
    ]
    values += [rt(16, 16, fp32), rt(16, 16, bf16), rt(16, 16, fp32).col_vec, rt(16, 16, fp32).row_vec]
    values += [st(64, 64, bf16), st(64, 64, bf16, 64), shared(a=st(64, 64, bf16)), ring(st(64, 64, bf16), 2), fp32, bf16]
    values += [types.float32, types.float64, row_max, np.add, np.dtype("f4"), {1: 2}, {2: 1}, {1, 2}, frozenset((1, 2))]
    digests = [digest.Digest()(value) for value in values]
    assert len(set(digests)) == len(values)
    assert digests == [digest.Digest()(value) for value in values]


def test_members_of_an_enumeration(module):
    """By name and value, and not by what Python keeps beside them, which changes from version to version."""
    source = """
        import enum
        class Mode(enum.{base}):
            ONE = {one}
            TWO = 2
        VALUE = Mode.{member}
    """
    forms = [("Enum", 1, "ONE"), ("Enum", 1, "TWO"), ("Enum", 3, "TWO"), ("IntEnum", 1, "ONE"), ("Enum", 1.5, "ONE")]
    digests = [digest.Digest()(module(source.format(base=b, one=o, member=m), "modes").VALUE) for b, o, m in (*forms, forms[0])]
    assert digests.pop() == digests[0] and len(set(digests)) == len(forms)


def test_helpers_that_call_each_other(module):
    source = """
        from numba import cuda
        @cuda.jit(device=True)
        def even(n):
            return 1 if n == 0 else odd(n - 1)
        @cuda.jit(device=True)
        def odd(n):
            return {} if n == 0 else even(n - 1)
        @cuda.jit
        def kernel(x):
            x[0, 0] = even(3)
    """
    zero, two, again = (key(module(source.format(n), "subject").kernel) for n in (0, 2, 0))
    assert zero == again != two


def test_helpers_in_a_user_s_module(module, monkeypatch):
    source = "from numba import cuda\nSIZE = {}\n@cuda.jit(device=True)\ndef f(x):\n    return x * SIZE\n"
    kernel = "from numba import cuda\nimport lib_of_user as lib\n@cuda.jit\ndef kernel(x):\n    x[0, 0] = lib.f(2) + lib.SIZE\n"
    keys = []
    for size in (1, 2, 1):
        module(source.format(size), "lib_of_user")
        keys.append(key(module(kernel, "subject").kernel))
    assert keys[0] == keys[2] != keys[1] and None not in keys


def test_an_inlined_function_of_the_tests_own():
    @inlined
    def twice(x):
        return x + x

    assert key(kernel_using(twice))


def test_a_function_of_no_module():
    """What exec makes may say that its module is None: it is a function like any other then, and digested by its code."""
    space = {}
    exec("def twice(x): return x + x", space)
    space["twice"].__module__ = None
    assert not digest.is_covered(None)
    assert key(kernel_using(inlined(space["twice"])))


def test_another_package_named_ops_is_not_taken_for_ours(monkeypatch, tmp_path):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops/__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tiles.compiling import digest; "
    code += f"sys.modules.pop('ops', None); sys.path.insert(0, {str(tmp_path)!r}); import ops; "
    code += "print(digest.is_covered('ops'), digest.is_covered('tiles.shared'), digest.is_covered('math'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.stdout.split() == ["False", "True", "True"], run.stderr
