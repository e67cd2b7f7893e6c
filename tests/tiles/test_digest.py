"""tiles/digest.py: the key changes with whatever the machine code depends on, and with nothing else."""

import itertools
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

import tiles
from ops import row_max
from tiles import bf16, digest, fp32, inlined, ring, rt, shared, st
from tiles.op import OPS
from tiles.plumbing import Value

ROOT = Path(__file__).parents[2]
ARRAY = types.Array(types.float32, 2, "A")


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """However young the sources are, they are what was imported."""
    monkeypatch.setattr(digest, "IMPORTED", float("inf"))


def key(kernel, signature=(ARRAY,), arch="sm_90a"):
    return digest.key(kernel, signature, arch)


numbers = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """module(source) imports this source under a fresh name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(source, name=None):
        name = name or f"written_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        sys.modules.pop(name, None)
        return __import__(name)

    return load


# ---- what must change the key ------------------------------------------------------------------------------------------
KERNEL = """
    import math
    from numba import cuda
    import numpy as np
    from ops import exp2, load, log2, store, zeros
    from tiles import fp32, inlined, op, lowers, ring, rt, shared, st, bf16
    import tiles, ops
    FACTOR = 2.0
    TABLE = np.arange(4.0)
    TILE = rt(16, 16, fp32)
    SMEM = shared(a=ring(st(64, 64, bf16), 2))

    @cuda.jit(device=True)
    def deepest(x):
        return x + 1.0

    @cuda.jit(device=True)
    def deeper(x):
        return deepest(x) * FACTOR

    @inlined
    def helper(t):
        return exp2(t)

    def make(closed):
        @cuda.jit(fastmath=False, launch_bounds=(128, 1))
        def kernel(x):
            s = SMEM.open()
            t = helper(load(x, TILE, (0, 0))) * closed
            store(x, t * deeper(TABLE[1]), (0, 0))
        return kernel

    kernel = make(3)
"""
CHANGES = {
    "a constant of the kernel": ("TABLE[1]", "TABLE[2]"),
    "an operator": ("t * deeper", "t + deeper"),
    "a global number": ("FACTOR = 2.0", "FACTOR = 2.5"),
    "the sign of a zero": ("FACTOR = 2.0", "FACTOR = -0.0"),
    "a global array": ("np.arange(4.0)", "np.arange(1, 5.0)"),
    "a global array's dtype": ("np.arange(4.0)", "np.arange(4)"),
    "a global tile": ("rt(16, 16, fp32)", "rt(16, 32, fp32)"),
    "a plan": ("64, bf16), 2)", "64, bf16), 3)"),
    "a plan's names": ("shared(a=", "shared(b="),
    "a closed-over number": ("make(3)", "make(4)"),
    "a closed-over type": ("make(3)", "make(3.0)"),
    "a device function": ("x + 1.0", "x + 2.0"),
    "another op under the same name": ("import exp2, load, log2", "import log2 as exp2, load"),
    "an inlined helper": ("return exp2(t)", "return exp2(exp2(t))"),
    "fastmath": ("fastmath=False", "fastmath=True"),
    "launch bounds": ("(128, 1)", "(256, 1)"),
    "the order of a call's arguments": ("t * deeper(TABLE[1])", "deeper(TABLE[1]) * t"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_sees(change, module):
    old, new = CHANGES[change]
    assert old in KERNEL
    before, after = key(module(KERNEL, "subject").kernel), key(module(KERNEL.replace(old, new), "subject").kernel)
    assert before and after and before != after


@pytest.mark.parametrize(
    "old, new", [("import math\n", "import math  # said\n\n\n"), ("FACTOR = 2.0", "FACTOR = 2.0; OTHER = 5")]
)
def test_what_the_code_does_not_use_leaves_the_key_alone(old, new, module):
    assert key(module(KERNEL, "subject").kernel) == key(module(KERNEL.replace(old, new), "subject").kernel) is not None


def test_argument_types_and_architecture(module):
    kernel = module(KERNEL).kernel
    spec = lambda tile: Value(tiles.tensor(np.zeros((64, 64), bf16.np), tile).spec)
    signatures = [
        (ARRAY,),
        (types.Array(types.float32, 3, "A"),),
        (types.Array(types.float16, 2, "A"),),
        (types.int32,),
        (types.int64,),
        (spec(st(64, 64, bf16)),),
        (spec(st(64, 64, bf16, 64)),),  # its str is the same
        (spec(st(32, 64, bf16)),),
    ]
    keys = [key(kernel, s) for s in signatures] + [key(kernel, (ARRAY,), "sm_80")]
    assert None not in keys and len(set(keys)) == len(keys)


def test_the_toolchain_and_the_environment(module, monkeypatch):
    kernel = module(KERNEL).kernel
    keys = [key(kernel)]
    real = digest._toolchain
    for k in range(len(real())):
        changed = [*real()[:k], "another", *real()[k + 1 :]]
        monkeypatch.setattr(digest, "_toolchain", lambda changed=changed: changed)
        keys.append(key(kernel))
    monkeypatch.setattr(digest, "_toolchain", real)
    monkeypatch.setenv("NUMBA_OPT", "1")
    keys.append(key(kernel))
    assert None not in keys and len(set(keys)) == len(keys)


def test_the_toolchain_is_all_there():
    python, _, versions, nvvm, nvjitlink, files = digest._toolchain()
    assert python == sys.version and nvvm >= (1, 5) and nvjitlink >= (12, 0) and len(files) == 3
    assert {"numba", "numba_cuda", "llvmlite", "cuda.core", "cuda.bindings", "numpy"} <= set(versions)


def test_the_sources_of_tiles_and_ops(module, monkeypatch, tmp_path):
    kernel, keys = module(KERNEL).kernel, []
    for name in ("tiles", "ops"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    real = list(digest.HOUSE)

    def sources():
        monkeypatch.setattr(digest, "HOUSE", [tmp_path / "tiles", tmp_path / "ops"])
        digest._sources.cache_clear()
        found = digest._sources()
        monkeypatch.setattr(digest, "HOUSE", real)
        keys.append(key(kernel))
        return found[0]

    try:
        digests = [sources()]
        for file in ("ops/maps.py", "tiles/ptx.py", "tiles/interpreter/__init__.py"):
            with open(tmp_path / file, "a") as f:
                f.write("# changed\n")
            digests.append(sources())
        (tmp_path / "ops/new.py").write_text("")
        digests.append(sources())
    finally:
        digest._sources.cache_clear()
    assert len(set(digests)) == 5 and len(set(keys)) == 5 and None not in keys


def test_sources_that_may_have_changed_after_their_import_are_not_trusted(module, monkeypatch):
    kernel = module(KERNEL).kernel
    youngest = digest._sources()[1]
    monkeypatch.setattr(digest, "IMPORTED", youngest + 1)
    assert key(kernel)
    monkeypatch.setattr(digest, "IMPORTED", youngest - 1)
    assert key(kernel) is None


# ---- ops of a user's ---------------------------------------------------------------------------------------------------
USERS_OP = """
    import numpy as np
    from numba import cuda
    from tiles import lowers, op
    from ops.maps import map_rule
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
        for face in OPS.keys() - known.keys():
            del OPS[face]
        return key(module(source, "subject").kernel)

    try:
        first = subject(source)
        assert first and subject(source) == first
        assert subject(source.replace("SLOPE = rt(16, 16, fp32), 0.5", "SLOPE = rt(16, 16, fp32), 0.25")) not in (first, None)
        assert subject(source.replace("b.fmul", "b.fadd")) not in (first, None)
    finally:
        for face in OPS.keys() - known.keys():
            del OPS[face]


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
    with caplog.at_level(logging.DEBUG, "tiles.digest"):
        assert key(kernel_using(value)) is None
    assert "is not cached" in caplog.text


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
    assert not digest.covered(None)
    assert key(kernel_using(inlined(space["twice"])))


def test_another_package_named_ops_is_not_taken_for_ours(monkeypatch, tmp_path):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops/__init__.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import ops; from tiles import digest; "
    code += "print(digest.covered('ops'), digest.covered('tiles.shared'), digest.covered('math'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.stdout.split() == ["False", "True", "True"], run.stderr


def test_the_key_is_the_same_in_another_process(tmp_path):
    (tmp_path / "subject.py").write_text(textwrap.dedent(KERNEL))
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\nimport subject\nfrom tiles import digest\n"
    code += "from numba.cuda import types\ndigest.IMPORTED = float('inf')\n"
    code += "print(digest.key(subject.kernel, (types.Array(types.float32, 2, 'A'),), 'sm_90a'))"
    keys = set()
    for seed in "12":
        env = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=100)
        assert run.returncode == 0, run.stderr
        keys.add(run.stdout.strip())
    assert len(keys) == 1 and len(keys.pop()) == 64
