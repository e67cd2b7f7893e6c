"""tiles/inspect: figures, instructions beside their lines, two versions compared, and what is remembered."""

import html
import inspect as python
import linecache
from html.parser import HTMLParser

import numpy as np
import pytest
from inspected import normalized, other, plain, plan, product
from kernels import copies
from numba import cuda

import tiles
from ops import load, store
from tiles import bf16, fp32, rt, st
from tiles.compiling.compiler import Compiled, CompileError, Lowered, compile_kernel
from tiles.compiling.line_table import SourcePlace
from tiles.inspect import figures as look
from tiles.inspect.code import function_at
from tiles.inspect.compare import ComparedRow, align_rows
from tiles.inspect.figures import measure_code
from tiles.inspect.occupancy import Occupancy, occupancy
from tiles.launching.arguments import INT, array, tiled
from tiles.numba_names import types

MATRIX = np.zeros((16, 16), np.float32)
FILE = python.getsourcefile(plain.py_func)


def line_of(function, text):
    """(file, number) of the line of a function that begins so."""
    lines, first = python.getsourcelines(function)
    return FILE, first + next(k for k, line in enumerate(lines) if line.strip().startswith(text))


LOAD, STORE = line_of(plain.py_func, "t = load"), line_of(plain.py_func, "store(")
HELPER = line_of(normalized, "return")


@pytest.fixture(scope="module")
def found():
    return tiles.inspect(plain, MATRIX, MATRIX, block=32, shared=plan)


@pytest.fixture(scope="module")
def changed():
    return tiles.inspect(other, array(2), array(2), block=32)


def test_figures_are_those_of_what_is_launched(found):
    compiled = compile_kernel(plain, (array(2), array(2)), "sm_90a")
    assert (found.title, found.arch, found.threads) == ("plain", "sm_90a", 32)
    assert (found.registers, found.spill_bytes, found.local_bytes) == (compiled.registers, 0, 0)
    assert found.shared_bytes == plan.nbytes == 16384 + 1024 and not found.warnings
    code = [line.text for line in found.sass if not line.text.endswith(":")]
    assert code == [str(one) for one in tiles.compiling.sass.listing(compiled.cubin)]  # the table of lines changes nothing
    assert sum(found.instructions.values()) == len(code) == sum(sum(kinds.values()) for kinds in found.counts.values())


LOADING, SUMMING, STORING = ("load", (LOAD,)), ("row_sum", (HELPER, STORE)), ("store", (STORE,))
DIVIDING = "truediv", SUMMING[1]


@pytest.mark.parametrize("kind, instruction, places", [
    ("sass", "LDG", {LOADING}), ("sass", "STG", {STORING}), ("sass", "MUFU.RCP", {DIVIDING}),
    ("sass", "SHFL", {LOADING, SUMMING, STORING}),  # lanes exchange what goes by 16 bytes
    ("ptx", "ld.global", {LOADING}), ("ptx", "st.global", {STORING}), ("ptx", "shfl.sync", {LOADING, SUMMING, STORING}),
])  # fmt: skip
def test_instructions_say_where_they_come_from(found, kind, instruction, places):
    assert {(one.place.op, one.place.lines) for one in getattr(found, kind) if instruction in one.text} == places


def test_text(found):
    text, listing = str(found), found.listing("ptx")
    assert "registers, 0 bytes spilled" in text and f"{LOAD[1]:5}" in text and "    t = load(x, T, (0, 0))" in text
    assert f"row_sum in inspected.py:{HELPER[1]} `return t / row_sum(t)`\n    " in listing
    assert "param_4" in listing and "_Z" not in listing


class Page(HTMLParser):
    """Which lines are shown where; all tags are closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.lines, self.text = [], [set(), set()], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag not in ("link", "img") and not {"src", "href"} & dict(attrs).keys()  # it needs no other file
        if tag != "meta":
            self.open.append((tag, dict(attrs)))
        if line := dict(attrs).get("data-l"):
            tables = {a["id"] for t, a in self.open if t == "table" and "id" in a}
            self.lines["sass" in tables or "ptx" in tables].add(line)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text += data


def test_page(found):
    page = Page(found.html())
    assert page.lines[0] and page.lines[0] <= page.lines[1]
    assert "t = load(x, T, (0, 0))" in page.text and "warps" in page.text and "st.global" in page.text


def test_difference(found, changed):
    difference = changed - found
    name, before, after = next(row for row in difference.figures if row[0].strip() == "MUFU")
    assert after - before == 8  # one exp for each of a lane's elements
    gone = next(row for row in difference.lines if row.mark == "-" and "def" not in row.before[1])
    assert gone.before[1].strip() == "t = load(x, T, (0, 0))"
    assert "plain for sm_90a" in str(difference) and "+8" in str(difference)
    assert sum(line.startswith("+     MUFU.EX2") for line in difference.listing().splitlines()) == 8
    assert "MUFU.EX2" in Page(difference.html()).text
    assert html.unescape(difference._repr_html_()).count(difference.html()) == 1  # in a notebook


def test_rows_are_aligned():
    assert list(align_rows("abd", "acd", str)) == [
        ComparedRow("a", "a"),
        ComparedRow("b", None),
        ComparedRow(None, "c"),
        ComparedRow("d", "d"),
    ]
    assert [row.mark for row in align_rows("abd", "acd", str)] == [" ", "-", "+", " "]
    often = "ab" * 150  # what comes up often is aligned, too
    assert [row.mark for row in align_rows(f"x{often}", f"{often}y", str)] == ["-", *" " * 300, "+"]


def test_functions_are_found_by_their_lines(tmp_path):
    file = tmp_path / "odd.py"
    inner = "    @decorated\n    def inner(x):\n        return (\n            x\n        )\n"
    file.write_text(f"def outer():\n{inner}\n    y = 1\nz = f(lambda x:\n")
    assert function_at(str(file), 5) == (str(file), 2, ("@decorated", "def inner(x):", "    return (", "        x", "    )"))
    assert function_at(str(file), 8).first == 1 and function_at(str(file), 9).lines == ("z = f(lambda x:",)
    assert function_at("nowhere.py", 7) == ("nowhere.py", 7, ("",))


# ---- arguments -----------------------------------------------------------------------------------------------------
@pytest.fixture
def types_seen(monkeypatch):
    """A function of arguments of tiles.inspect: the types that are compiled."""

    class Stop(Exception):
        pass

    def stop(kernel, types, arch, lines):
        raise Stop(types, arch)

    monkeypatch.setattr(python.getmodule(tiles.inspect), "Lowered", stop)

    def seen(*args, **options):
        with pytest.raises(Stop) as caught:
            tiles.inspect(*args, **options)
        return caught.value.args

    return seen


def test_arguments_are_those_of_a_launch(types_seen):
    copy, _ = copies(st(64, 64, bf16), 2, 0)
    source = np.zeros((64, 64), bf16.np)
    tile, matrix = st(64, 64, bf16), array(2)
    inputs, arch = types_seen(copy, tiles.tensor(source, tile), tiles.tensor(source, tile), 1, 2)
    assert types_seen(copy, tiled(tile, 2, 0, 1), tiles.tensor(source, tile), INT, 2) == (inputs, arch) and arch == "sm_90a"
    assert types_seen(plain, MATRIX, matrix, arch="sm_80") == ((matrix, matrix), "sm_80")
    assert types_seen(product) == ((matrix,), "sm_90a")


def test_wrong_arguments():
    with pytest.raises(TypeError, match="plain takes 2 arguments .x, y., got 1"):
        tiles.inspect(plain, array(2))
    with pytest.raises(TypeError, match="plain: x, y must be annotated"):
        tiles.inspect(plain)
    with pytest.raises(TypeError, match="inspect: kernel must be a @cuda.jit function, got <built-in"):
        tiles.inspect(len)
    with pytest.raises(ValueError, match="arch must look like"):
        tiles.inspect(plain, MATRIX, MATRIX, arch="hopper")


@pytest.mark.parametrize("name", ["<ipython-input-3-abc>", "/tmp/ipykernel_12/345.py"])
def test_a_notebook_s_cell(name, monkeypatch):
    """Its lines are Python's to know, under a name that is no file; a notebook shows what print does."""
    source = "@cuda.jit\ndef scaled(x: array(2)):\n    store(x, load(x, T, (0, 0)) * 2.0, (0, 0))\n"
    monkeypatch.setitem(linecache.cache, name, (len(source), None, source.splitlines(True), name))
    names = {"cuda": cuda, "array": array, "store": store, "load": load, "T": rt(16, 16, fp32)}
    exec(compile(source, name, "exec"), names)
    found = tiles.inspect(names["scaled"])
    assert (name, 3) in found.counts and [one.first for one in found.sources] == [1]
    assert "store(x, load(x, T, (0, 0)) * 2.0, (0, 0))" in str(found) == repr(found)
    assert f"load in {name.rpartition('/')[2]}:3 `store(x" in found.listing("sass")


# ---- occupancy -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch, threads, registers, shared, expected", [  # as NVIDIA's calculator has it
    ("sm_90a", 128, 32, 0, Occupancy(16, 64, 64, ("registers", "warps"))),
    ("sm_90a", 384, 168, 200_000, Occupancy(1, 12, 64, ("registers", "shared memory"))),
    ("sm_90a", 128, 255, 0, Occupancy(2, 8, 64, ("registers",))),
    ("sm_90a", 32, 16, 0, Occupancy(32, 32, 64, ("blocks",))),
    ("sm_80", 256, 40, 41984, Occupancy(3, 24, 64, ("shared memory",))),
    ("sm_89", 1024, 32, 0, Occupancy(1, 32, 48, ("warps",))),
    ("sm_90a", 1024, 65, 0, Occupancy(0, 0, 64, ("registers",))),
])  # fmt: skip
def test_occupancy(arch, threads, registers, shared, expected):
    assert occupancy(arch, threads, registers, shared) == expected


def test_what_does_not_fit_is_said():
    assert f"{occupancy('sm_90a', 128, 32, 400_000)}" == "no block fits, for its shared memory"
    assert f"{occupancy('sm_90a', 1024, 32, 0)}".startswith("2 blocks at once, 64 of 64 warps")


def test_occupancy_of_an_unknown_gpu():
    assert occupancy("sm_130", 128, 32, 0) is None


# ---- what ptxas refuses --------------------------------------------------------------------------------------------
def test_complaints_come_once_with_op_and_line():
    with pytest.raises(CompileError) as caught:
        compile_kernel(product, (array(2),), "sm_80")
    text = str(caught.value)
    source = "store(x, warpgroup.wait(warpgroup.mm_AB(a, b)), (0, 0))"
    number = line_of(product.py_func, "store(")[1]
    assert text.splitlines() == [
        "product cannot be compiled for sm_80:",
        f"  mm_AB in inspected.py:{number} `{source}`",
        "      Instruction 'wgmma.fence' not supported on .target 'sm_80'",
        "      Instruction 'wgmma.mma_async with floating point types' not supported on .target 'sm_80'",
        "      Instruction 'wgmma.commit_group' not supported on .target 'sm_80'",
        f"  wait in inspected.py:{number} `{source}`",
        "      Instruction 'wgmma.wait_group' not supported on .target 'sm_80'",
    ]
    assert (
        caught.value.missing_features[0] == "wgmma.fence"
        and caught.value.__cause__ is None
        and caught.value.__suppress_context__
    )


@pytest.mark.parametrize("log, said", [
    ("nvJitLink error log: the moon is full\n", ["nvJitLink error log: the moon is full"]),
    ("ptxas fatal   : Unresolved extern function 'f'\n" * 2, ["Unresolved extern function 'f'"]),
    ("error   : Entry function '_Zk' uses too much shared data\nERROR NVJITLINK_ERROR_PTX_COMPILE: JIT the PTX\n",
     ["Entry function 'product' uses too much shared data"]),
])  # fmt: skip
def test_complaints_about_no_line(log, said):
    lowered = object.__new__(Lowered)
    lowered.kernel, lowered.arch, lowered.name, lowered.lines = product, "sm_80", "_Zk", True
    assert lowered._refused(log).complaints == [(text, SourcePlace()) for text in said]


def test_many_places_are_not_all_shown():
    places = [SourcePlace((("k.py", n),)) for n in range(20)]
    text = str(CompileError("k", "sm_80", [("never", place) for place in places]))
    assert text.count("never") == 8 and text.endswith("and 12 more places")


def test_warnings_come_once_and_speak_of_the_kernel():
    line = "ptxas info : (C7510) Potential Performance Loss: wgmma is serialized in function '_Z1k'\n"
    assert Compiled(b"", "_Z1k", line * 3).warnings == [line.strip().replace("'_Z1k'", "the kernel")]


# ---- what is remembered --------------------------------------------------------------------------------------------
def test_figures_are_remembered(monkeypatch, tmp_path, request):
    monkeypatch.setenv("TILES_CACHE_DIR", str(tmp_path))
    compiled = []

    def counting(kernel, types, arch):
        compiled.append(arch)
        return Compiled(
            b"", "k", "Used 7 registers\n0 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads\n9 bytes smem"
        )

    module = python.getmodule(look)
    request.addfinalizer(module.reader_digest.cache_clear)
    monkeypatch.setattr(module, "compile_kernel", counting)
    monkeypatch.setattr(module.sass, "listing", lambda cubin: ())
    monkeypatch.setattr(module.sass, "instructions", lambda cubin: {"NOP": 1})

    def make(factor):
        @cuda.jit
        def scaled(x):
            x[0] *= factor

        return scaled

    first, again = look(make(2), (array(1),), "sm_90a", plan, (4, 32)), look(make(2), (array(1),), "sm_90a", None, 64)
    assert compiled == ["sm_90a"] and (first.registers, first.spill_bytes, first.instructions) == (7, 4, {"NOP": 1})
    assert (first.shared_bytes, first.threads, again.shared_bytes, again.threads) == (9 + plan.nbytes, 128, 9, 64)
    look(make(3), (array(1),), "sm_90a")  # other code,
    look(make(2), (array(1),), "sm_80")  # another architecture,
    monkeypatch.setattr(module.sass, "version", lambda: "another")
    look(make(2), (array(1),), "sm_90a")  # another disassembler,
    monkeypatch.setattr(module, "__file__", __file__)
    module.reader_digest.cache_clear()
    look(make(2), (array(1),), "sm_90a")  # or another way to read it is another key
    assert compiled == ["sm_90a", "sm_90a", "sm_80", "sm_90a", "sm_90a"]


def test_digest_does_not_depend_on_what_was_compiled_before():
    """A division of 64 bits is a call, whose name in the machine code has a number of Numba's."""

    def digest():
        @cuda.jit
        def kernel(x):
            x[0] = x[1] // x[2]

        arguments = (types.Array(types.int64, 1, "A"),)
        return measure_code(kernel, "sm_90a", compile_kernel(kernel, arguments, "sm_90a"))["digest"]

    assert digest() == digest()
