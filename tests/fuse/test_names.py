"""Functions, arguments, results and variables may have any name that a generated module uses itself."""

import functools
import importlib
import keyword
import pkgutil
import re
import symtable

import numpy as np
import pytest
from operator_cases import A100, normal
from references import compare

import fuse
from fuse import inspect, templates
from fuse.language import expression_text, names
from fuse.language.trace import Shape
from fuse.planning.candidates import candidates
from fuse.planning.cost import H200
from fuse.planning.generated_module import generate_module
from fuse.templates import attention
from fuse.writing import lines, module_names, module_text

# ---- two modules are one but for names -------------------------------------------------------------------------------
TOKEN = re.compile(r"""(?P<quoted>"[^"\n]*")|(?P<name>(?<![\w.])[^\W\d]\w*(?P<keyword>=(?!=))?)|\w+|\S""")


@functools.lru_cache(2)  # one module is compared with many
def tokens(text):
    """(kind, token, scope of its name) of a module's tokens, without comments, docstrings and imports. A name's scope is the
    function that binds it, or the module."""
    result = []
    table = symtable.symtable(text, "module", "exec")
    functions = [one for one in table.get_children() if one.get_type() == "function"]  # since 3.14 annotations have scopes
    locals_by_function = {one.get_name(): {*one.get_locals()} for one in functions}
    place = ""
    for line in re.sub(r'"""[\s\S]*?"""|  # .*|^# .*', "", text, flags=re.MULTILINE).splitlines():
        if line[:1] not in ("", " ", ")"):
            place = line[4 : line.index("(")] if line.startswith("def ") else ""
        for found in () if line.startswith(("from ", "import ")) else TOKEN.finditer(line):
            word = found[0].rstrip("=") if found["name"] else found[0]
            kind = "keyword" if found["keyword"] else "name" if found["name"] and not keyword.iskeyword(word) else "else"
            defined = line.startswith("def ") and found.start() == 4
            scope = place if kind == "name" and word in locals_by_function.get(place, ()) and not defined else ""
            result.append((kind, word, scope))
    return result


def imported(text):
    """The names that a module imports."""
    return re.findall(r"^from \S+ import (.*)$", text, re.MULTILINE)


def first_difference(text, other):
    """The first place where two modules differ by more than a consistent renaming; None if they are equal up to names."""
    there, back = {}, {}
    for (kind, one, place), (its_kind, two, its_place) in zip(tokens(text), tokens(other), strict=True):
        if kind != its_kind or bool(place) != bool(its_place) or (kind == "else" and one != two):
            return one, two
        if kind == "name":
            place = place and (place, its_place)
            if there.setdefault((place, one), two) != two or back.setdefault((place, two), one) != one:
                return one, two
    return None if imported(text) == imported(other) else (imported(text), imported(other))


def test_what_differs():
    """first_difference sees a renaming, a hidden global, two merged names, another operation."""
    text = "from ops import exp\n\n\ndef f(x, y):\n    a = exp(x)\n    return a + y\n"
    assert first_difference(text, text.replace("x)", "u)").replace("(x", "(u")) is None
    assert first_difference(text, "from ops import exp\n\n\ndef f(x, exp):\n    a = exp(x)\n    return a + exp\n")
    assert first_difference(text, text.replace("+ y", "+ x")) == ("y", "x")
    assert first_difference(text, text.replace("def f", "def a")) is None  # it does not call itself
    assert first_difference(text, text.replace("+", "-")) == ("+", "-")


# ---- modules of all templates ----------------------------------------------------------------------------------------
SHIPPED = [  # operators in which templates occur
    ("sm_90a", "rms_norm_linear", 64),
    ("sm_90a", "lora_linear", 4096),
    ("sm_90a", "expert_mlp", 1),
    ("sm_90a", "linear_cross_entropy", 4096),
    ("sm_90a", "lora_linear_by_index", 64),
    ("sm_90a", "qk_norm_rotary_attention", 64),
    ("sm_90a", "dropout_residual_layer_norm", 64),
    ("sm_90a", "residual_layer_norm gradient", 4096),
    ("sm_90a", "int8_group_linear", 64),
    ("sm_90a", "int8_group_linear turned", 64),
    ("sm_80", "lora_linear", 64),
    ("sm_80", "linear_cross_entropy", 4096),
]


@fuse.kernel
def short(x, y, g):
    doubled = x + y
    return {"first": fuse.silu(doubled) * fuse.mean(doubled * x) + g, "second": doubled}


@fuse.kernel
def normed(x, y, g):
    added = x + y * 2.0
    return added * fuse.rsqrt(fuse.mean(added * added) + 1e-3) * g


@fuse.kernel
def flat(x, y):
    rectified = fuse.relu(x)
    return rectified * rectified + y


@fuse.kernel
def deep(x, g, y):
    return fuse.concatenate([a * b for a, b in zip(fuse.halves(fuse.softmax(x * g)), fuse.halves(y))])


@fuse.kernel
def attend(q, k, v):
    scale = q.shape[-1] ** -0.5
    return fuse.attention(q, k, v, scale)


WRITTEN = [
    (short, [(5, 64), (5, 64), (64,)]),
    (normed, [(2, 136), (2, 136), (136,)]),
    (normed, [(2, 672), (2, 672), (672,)]),
    (normed, [(2, 1024), (2, 1024), (1024,)]),
    (normed, [(2, 17440), (2, 17440), (17440,)]),
    (flat, [(2, 1024), (2, 1024)]),
    (deep, [(2, 3, 19, 48), (48,), (19, 48)]),
    (attend, [(2, 8, 64), (2, 1024, 64), (2, 1024, 64)]),
]


def cases():
    """(title, name, the definition as terms, the card) of each case."""
    for arch, said, rows in SHIPPED:
        name, _, form = said.partition(" ")
        case = inspect.Case(name, rows, transposed=form == "turned", gradient=form == "gradient")
        yield f"{said} of {rows}, {arch}", case.operator.name, case.operator._trace(inspect.shapes(case)), arch
    for kernel, shapes in WRITTEN:
        said = f"{kernel.name} of {', '.join(map(str, shapes))}"
        yield said, kernel.name, kernel._trace(tuple(Shape(s, "bfloat16") for s in shapes)), "sm_90a"


CARDS = {"sm_90a": H200, "sm_80": A100}
LISTED = """relu sigmoid tanh exp rsqrt sqrt abs maximum row_sum transpose rt fp32 bf16 int32 grid cluster total shared ring
    warpgroup TILE launch tiles cuda zeros gelu self X W x run given blocks range min math hidden ops load""".split()


@pytest.fixture(scope="module")
def best_candidates():
    """{title: (name, terms, best candidate)}"""
    return {case: (name, found, candidates(found, CARDS[arch])[0]) for case, name, found, arch in cases()}


def test_all_templates_are_among_them(best_candidates):
    known = set()
    for _, _, one in best_candidates.values():
        for kernel in one.plan.kernels:
            known |= {type(kernel).__name__, getattr(kernel, "form", type(kernel)).__name__}
    files = [importlib.import_module(one.name) for one in pkgutil.walk_packages(templates.__path__, "fuse.templates.")]
    all_of = {
        name for one in files for name, its in vars(one).items() if its.__class__ is type and its.__module__ == one.__name__
    }
    writes = {
        name for one in files for name, its in vars(one).items() if getattr(its, "text", None) or getattr(its, "write", None)
    }
    assert known >= (all_of & writes) - {"Product", "RowMapWriter"}, (all_of & writes) - known


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.release)])
def test_all_names_in_all_places(best_candidates, monkeypatch, step):
    """With each name that a module binds, and each of LISTED, as the function's, an argument's, a result's or a variable's
    name, the module is the same up to names. CI has each name in every fifth place, other ones in each module."""
    for place in (module_text, lines, attention):  # where a line ends is another matter
        monkeypatch.setattr(place, "WIDTH", 10**6)
    monkeypatch.setattr(expression_text, "LONG", 10**6)
    first = best_candidates[next(iter(best_candidates))][1]
    for number, (case, (_, found, candidate)) in enumerate(best_candidates.items()):
        places = [len(found.inputs), len(found.outs), 1, len(found.local_names)]

        def text(words):
            given = iter(words)
            inputs = tuple([(next(given), x) for _, x in found.inputs])
            outs, name = tuple([next(given) for _ in found.outs]), next(given)
            local_names = tuple([(next(given), x) for _, x in found.local_names])
            return generate_module.__wrapped__(
                name, found._replace(inputs=inputs, outs=outs, local_names=local_names), candidate
            ).text

        free = text([f"neutral{n}n" for n in range(sum(places))])
        assert first_difference(free, free) is None
        words = {word for word in re.findall(r"(?<![\w.])[A-Za-z_]\w*", free) if "eutral" not in word}
        words = sorted(word for word in words.union(LISTED if found is first else ()) if not keyword.iskeyword(word))
        for n in range(number % step, len(words), step):
            given = [words[(n + m) % len(words)] for m in range(sum(places))]
            assert not first_difference(free, text(given)), f"{case}: {given}:\n{free}\n{text(given)}"


# ---- which names change, and to what ---------------------------------------------------------------------------------
def test_a_name_that_is_free_is_kept():
    kernel = fuse.kernel(lambda x, w, y, hidden: fuse.silu(x @ w) * y + hidden)
    text = kernel.source(*(np.zeros(s, normal(1).dtype) for s in ((70, 72), (72, 40), (70, 40), (70, 40))))
    assert "def launch(x, w, y_2, hidden, z):" in text


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["x", "u"], ["x", "u"]),
        (["wg", "u"], ["wg_2", "u"]),  # a variable of a function in which it is used
        (["load", "u"], ["load_2", "u"]),  # what a function calls, from elsewhere
        (["range", "u"], ["range_2", "u"]),
        (["ring", "u"], ["ring_2", "u"]),  # RING, of which a type would have the name
        (["RING", "u"], ["RING_2_array", "u"]),
        (["X", "u"], ["X_array", "u"]),  # its type's name is its own in capitals
        (["u", "u"], ["u", "u_2"]),  # of two the first one stays
        (["x", "part"], ["x", "part_2"]),  # last_part is there
        (["x", "side"], ["x", "side_2"]),  # a keyword beside those of arguments
        (["other", "f"], ["other", "f"]),  # another function's
    ],
)
def test_what_changes(given, found):
    text = """
from ops import load, shared
RING, {X} = ring({x}), 3
smem = shared({x}=1, side=2, {y}=3)
def f(g{X}, last_{y}, last_part): wg = [load(wg, RING) for i in range({x})]
def g({y}, other): return last_{y}
"""
    marks = module_names.make_marks(given)
    capitals = marks[0][0].upper() + marks[0][1:]
    marked = text.replace("g{X}", f"g{capitals}").format(x=marks[0], X=marks[0].upper(), y=marks[1])
    put = module_names.settle_names(given, marks, marked)
    assert put.names == found
    assert [put(mark) for mark in marks] == found and put(f"g{capitals}") == names.array(found[0])


def test_keys_that_are_no_names():
    """Keys of a dictionary of results become distinct identifiers."""
    keys = ["import", "a b", "a_b", 1, "", None, (1, 2), "x", "\N{MATHEMATICAL BOLD SMALL X}", "größe", "2 ü"]
    result = names.identifiers(keys, ["x"])
    assert result == ("import_2", "a_b", "a_b_2", "out_1", "out_", "None_2", "_1__2_", "x_2", "x_3", "größe", "out_2_ü")
    x, w = normal(5, 64), normal(64, 32)
    kernel = fuse.kernel(lambda x, w: {key: fuse.relu(x @ w) * float(n + 1) for n, key in enumerate(keys[:4])})
    found = kernel.run(x, w)
    compare(kernel, [x, w], found)
    assert f"def launch(x, w, {', '.join(result[:4])}" in kernel.source(x, w)


@pytest.mark.parametrize("name", LISTED)
def test_functions_of_all_names_run(name):
    """Also with arguments and variables whose names would hide what the module calls."""
    text = f"def {name}(W, tanh):\n    sigmoid = fuse.tanh(W * tanh)\n    return fuse.gelu(sigmoid) + sigmoid * W\n"
    exec(text, scope := {"fuse": fuse})
    kernel, arrays = fuse.kernel(scope[name]), (normal(5, 64), normal(64))
    compare(kernel, arrays, kernel.run(*arrays))
    printed = {}
    exec(kernel.source(*arrays), printed)
    printed["launch"](*arrays, y := np.zeros((5, 64), arrays[0].dtype))
    assert (y == kernel.run(*arrays)).all()


@pytest.mark.parametrize(
    "name", ["problem", "self", "out", "stream", "layout", "X", "_", "größe", "run", "given", "blocks", "tiles"]
)
def test_arguments_of_all_names_run(name):
    """An array and a number, first and last."""
    x, w = normal(70, 72), normal(72, 40)
    for text, arrays in (
        (f"{name}, v: fuse.silu(({name} * 2.0) @ v) * 0.5", (x, w)),
        (f"u, v, {name}: (u @ v) * {name}", (x, w, 0.5)),
    ):
        kernel = fuse.kernel(eval(f"lambda {text}", {"fuse": fuse}))
        compare(kernel, arrays, kernel.run(*arrays))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LISTED)
def test_functions_of_all_names_on_the_card(name):
    """Also as torch ops, which have the function's name."""
    torch = pytest.importorskip("torch")
    from tiles.testing.backends import to_numpy, to_torch

    exec(
        f"def {name}(W, tanh):\n    sigmoid = fuse.tanh(W * tanh)\n    return fuse.gelu(sigmoid) * W\n", scope := {"fuse": fuse}
    )
    kernel, arrays = fuse.kernel(scope[name]), (normal(5, 64), normal(64))
    there = [*map(to_torch, arrays)]
    compare(kernel, arrays, to_numpy(kernel(*there)))
    with torch.no_grad():
        assert torch.equal(torch.compile(kernel, backend="eager")(*there), kernel(*there))


IN_TWO_WAYS = {  # functions of x and w, of which one is read in two ways
    "a residual": (lambda x, w: x + x @ w, (24, 64)),
    "a residual of many rows": (lambda x, w: fuse.relu(x + x @ w), (72, 64)),
    "a weight, turned": (lambda x, w: (x @ w) * (x @ w.T), (24, 64)),
    "a weight of two arrays": (lambda x, w: x @ w + fuse.relu(x) @ w, (24, 64)),
    "both factors": (lambda x, w: (x @ x.T) @ (x @ w), (24, 64)),
}


@pytest.mark.parametrize("card", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("name", IN_TWO_WAYS)
def test_an_array_that_is_read_in_two_ways(name, card):
    """Every candidate is a valid module: the parameters of a kernel have distinct names."""
    definition, shape = IN_TWO_WAYS[name]
    kernel = fuse.kernel(definition)
    found = kernel.trace([normal(*shape), normal(64, 64)])
    for candidate in candidates(found, card):
        compile(generate_module(kernel.name, found, candidate).text, name, "exec")


def test_a_residual():
    kernel, arrays = fuse.kernel(IN_TWO_WAYS["a residual"][0]), (normal(3, 64), normal(64, 64))
    compare(kernel, arrays, kernel.run(*arrays))
