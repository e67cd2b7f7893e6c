"""The house as docs/house.md describes it: packages and folders on floors, no circles, and what may be imported where."""

import ast
import functools
import re
from collections import defaultdict
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from types import CodeType

import pytest

import attention
import fuse

ROOT = Path(__file__).parent.parent
PACKAGES = "tiles", "ops", "attention", "fuse"  # each imports those before it
PAGE = ROOT / "docs" / "house.md"
# Imports inside functions, for outside they would close a circle: an op asks, when it is called, for what is made of ops;
# forward asks for what takes torch's tensors, where there are some.
LATE = {
    ("attention.plans.requires_grad", "attention.autograd"),
    ("attention.plans.requires_grad", "attention.recurrent_autograd"),
    ("fuse.calls.gradient_choice", "fuse.calls.gradient_function"),
    ("fuse.language.terms", "fuse.language.expression_text"),
    ("tiles.op", "tiles.dtypes"),
    ("tiles.op", "tiles.interpreter"),
    ("tiles.op", "tiles.compiling.numba_helpers"),
    ("tiles.op", "tiles.compiling.numba_types"),
    ("tiles.op", "tiles.types"),
    ("tiles.op", "tiles.values"),
    ("tiles.compiling.unsupported", "tiles.interpreter"),
    ("tiles.compiling.unsupported", "tiles.values"),
}
FILES_OF_USAGES = {"/file.py", "/FILE.py", "/my_kernels.py", "/other.py"}  # of commands, for files of the user
FACES = {"attention", "fuse"}  # packages whose __init__.py names for type checkers what it imports when it is asked for
FLOORS = {"tiles": 10, "ops": 10, "attention": 8, "attention.parallel": 11, "fuse": 8}  # the most of a folder, or its package
# The folders of fuse, each of which imports those before it, inside functions neither. Beside them are its commands.
FUSE_ROOMS = "language algebra writing templates.products templates.rows templates planning calls operators".split()


def modules(root):
    """{module: its file} of the packages; a package is the module of its __init__.py."""
    files = (file for package in PACKAGES for file in (root / package).rglob("*.py"))
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in sorted(files)}


def absolute(node, module, is_package):
    """The module that an ImportFrom names."""
    above = module.split(".") if is_package else module.split(".")[:-1]
    start = above[: len(above) - node.level + 1] if node.level else []
    return ".".join([*start, *([node.module] if node.module else [])])


def imported(node, module, is_package, known):
    """The modules among `known` that an import statement names, each as deep as it goes: `from .matmul import mma` is
    ops.matmul.mma. (That Python runs the __init__.py above it on the way makes no edge: these hold no more than re-exports.)"""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & known
    source = absolute(node, module, is_package)
    deeper = {f"{source}.{alias.name}" for alias in node.names}
    return deeper & known | ({source} & known if deeper - known else set())


@functools.cache
def house():
    """Our own edges, read once."""
    return edges(ROOT)


def edges(root):
    """What modules import when they are imported themselves, for type checkers too, and what their functions import: each
    {module: modules}."""
    files = modules(root)
    first, late = {m: set() for m in files}, {m: set() for m in files}

    def walk(node, module, into):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                is_package = files[module].name == "__init__.py"
                into[module] |= imported(child, module, is_package, files.keys()) - {module}
            elif not isinstance(child, ast.expr) and not (
                module in FACES and isinstance(child, ast.If)
            ):  # no expression imports
                walk(child, module, late if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else into)

    for module, file in files.items():
        walk(ast.parse(file.read_text()), module, first)
    return first, late


def reach(graph):
    """{node: all that it imports, directly or not}; CycleError if there is a circle."""
    actual = {}
    for node in TopologicalSorter(graph).static_order():
        actual[node] = set(graph[node]).union(*(actual[other] for other in graph[node]))
    return actual


def room_of(module):
    """A module's folder; a module that lies directly in a package is a room of its own."""
    return ".".join(module.split(".")[:-1]) if module.count(".") > 1 else module


def floors(graph):
    """{node: its floor}, one above the uppermost that it imports."""
    actual = {}
    for node in TopologicalSorter(graph).static_order():
        actual[node] = 1 + max((actual[other] for other in graph[node]), default=0)
    return actual


def between_rooms(graph, package):
    """The same graph, of the rooms of a package."""
    rooms = {}
    for module in graph:
        if module.startswith(f"{package}."):
            others = {room_of(other) for other in graph[module] if other.startswith(f"{package}.")}
            rooms.setdefault(room_of(module), set()).update(others - {room_of(module)})
    return rooms


def folders(root=ROOT):
    """The folders of all packages that have modules, as dotted names."""
    return sorted({".".join(file.relative_to(root).parts[:-1]) for file in modules(root).values()})


# ---- what holds ----------------------------------------------------------------------------------------------------
def test_no_circles():
    reach(house()[0])


@pytest.mark.parametrize("number", range(len(PACKAGES)), ids=PACKAGES)
def test_packages_import_one_way(number):
    """Nothing imports upwards, inside functions neither."""
    allowed = set(PACKAGES[: number + 1])
    for graph in house():
        up = {(m, o) for m, others in graph.items() for o in others if m.split(".")[0] == PACKAGES[number]}
        assert not {(m, o) for m, o in up if o.split(".")[0] not in allowed}


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_import_one_way(package):
    """A folder imports none that imports it."""
    reach(between_rooms(house()[0], package))


def test_what_the_recurrent_family_shares_knows_no_delta_rule():
    """Folders `delta` import folders `recurrent`, not the other way round, of parts, kernels and plans alike."""
    shared = {module: others for module, others in house()[0].items() if ".recurrent." in module}
    assert [(module, other) for module, others in shared.items() for other in others if ".delta." in other] == []


def test_rooms_of_fuse_have_an_order():
    """Each imports those before it. Nothing but the commands lies outside of all."""
    rooms = [f"fuse.{room}" for room in FUSE_ROOMS]
    assert {room_of(m) for m in modules(ROOT) if m.startswith("fuse.")} == {*rooms, "fuse.__main__", "fuse.inspect"}
    for graph in house():
        between = between_rooms(graph, "fuse")
        assert not {(room, o) for n, room in enumerate(rooms) for o in between[room] - {*rooms[:n]}}


@pytest.mark.parametrize("folder", folders())
def test_floors_of_a_folder(folder):
    """Nobody must climb far in one folder."""
    graph = {
        m: {o for o in others if o.rpartition(".")[0] == folder}
        for m, others in house()[0].items()
        if m.rpartition(".")[0] == folder
    }
    assert max(floors(graph).values(), default=0) <= FLOORS.get(folder, FLOORS[folder.partition(".")[0]])


def test_late_imports():
    """The imports inside functions that would close a circle are those we know of."""
    first, late = house()
    reached = reach(first)
    assert {(m, o) for m, others in late.items() for o in others if m in reached[o]} == LATE


def test_kernels_import_no_planners():
    for module, others in house()[0].items():
        if module.startswith(("attention.kernels.", "attention.parts.")):
            assert not {o for o in others if o.startswith(("attention.plans", "attention.public"))}, module


MOST_FILES = 15


def test_a_kernel_is_made_of_few_files():
    """Whoever reads a kernel opens no more files of this package than that."""
    reached, files = reach(house()[0]), modules(ROOT)
    for kernel in (module for module in reached if module.startswith("attention.kernels.")):
        ours = {kernel} | {o for o in reached[kernel] if o.startswith("attention.") and files[o].stem != "__init__"}
        assert len(ours) <= MOST_FILES, (kernel, sorted(ours))


def test_no_public_module_has_the_name_of_a_public_function():
    """`from attention import forward` must be the function, whatever was imported before."""
    names = {"attention.public": attention.__all__} | {
        package.__name__: package.__all__ for package in (fuse, fuse.language, fuse.operators)
    }
    for folder, functions in names.items():
        assert not {m.rpartition(".")[2] for m in modules(ROOT) if m.rpartition(".")[0] == folder} & set(functions)


# Participles, pronouns, adverbs, and words that nobody but this library used: a name that says nothing without its sentence.
NO_NAMES = set(
    "abroad alike alone apart asked asks bends bent brings brought computed cut draws early every everyone fetches flying "
    "following follows found from_first given handed held here how into its kept land lands learned made measures met mine "
    "more moved of opened own piece piped rehearsed rescaled rising room seen seers shown sloped some stands taken there "
    "told traced_plans weighed what when who whole within".split()
)


def short_texts(node):
    """(line, text) of the docstrings of a module, class or function and of the fields in it, if it has four words or fewer and
    is no equation."""
    body = getattr(node, "body", None)
    documented = (node,) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else ()
    for before, text in pairwise([*documented, *body] if isinstance(body, list) else []):
        match text:
            case ast.Expr(ast.Constant(str() as words)) if before is node or isinstance(before, ast.Assign | ast.AnnAssign):
                if len(words.split()) <= 4 and not set(words) & set("=+*/^"):
                    yield text.lineno, words


# How a docstring begins that has no subject, or whose subject stands in another docstring.
NO_SUBJECT = re.compile("(Of|The same|As|By|With|Its|It|See|Likewise|And|Those|Them|In|On|From now)\\b")


def texts_without_subject(tree):
    """(line, docstring) of each module, class and function in a tree whose docstring begins as NO_SUBJECT says."""
    for node in statements(tree):
        text = ast.get_docstring(node, clean=False) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else None
        if text and NO_SUBJECT.match(text):
            yield getattr(node, "lineno", 1), text


def statements(node):
    """All statements inside a statement or a module, and itself. They are a tenth of the nodes."""
    yield node
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield from statements(child)


def names_in(code):
    """The names in compiled code: of variables, parameters, attributes, modules and functions."""
    yield from (*code.co_varnames, *code.co_names, *code.co_cellvars, code.co_name)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


@functools.cache
def read_words():
    """({class name: the files that define it}, the files that have names in NO_NAMES, the places of docstrings that are short
    or, outside tests, where their names are the subject, have no subject)"""
    classes, names, docstrings = defaultdict(list), [], []
    for folder in (*PACKAGES, "tests", "bench", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            path = str(file.relative_to(ROOT))
            tree = ast.parse(file.read_text())
            for node in statements(tree):
                if isinstance(node, ast.ClassDef) and node.name != "Config":
                    classes[node.name].append(path)
                docstrings += [f"{path}:{line} {words!r}" for line, words in short_texts(node)]
            if folder != "tests":
                docstrings += [f"{path}:{line} {words[:60]!r}" for line, words in texts_without_subject(tree)]
            if folder in PACKAGES:
                names += [f"{path} {x}" for x in {*names_in(compile(tree, path, "exec"))} if x.strip("_") in NO_NAMES]
    return classes, names, docstrings


def test_a_class_name_occurs_once():
    """In the whole repository, but for Config, which every kernel module has."""
    classes, _, _ = read_words()
    assert {name: files for name, files in classes.items() if len(files) > 1} == {}


def test_names_say_what_they_name():
    """CONTRIBUTING: a function is a verb and its object; a participle, a pronoun or an adverb is no name."""
    _, names, _ = read_words()
    assert names == []


def test_docstrings_are_sentences():
    """A docstring of four words or fewer says no more than the name, or it is an equation. One that begins with "Of" or "The
    same" has its subject elsewhere."""
    _, _, docstrings = read_words()
    assert docstrings == []


EXPLAINED = re.compile(r"(?:^|(?<=\w[.;)] ))((?:[a-z]\w*, )*[a-z]\w*): ")  # `name: meaning` at the beginning of a sentence
NO_ARGUMENTS = {"float16", "float32"}  # also stand before a colon, with what holds for them
EXPLAIN_RESULTS = "attention/compat/", "attention/reference/"  # these explain other libraries' results, and papers'


def explained_without_being_there(path, tree):
    """(line, name) of each name that a function's docstring explains and the module has nowhere: a renaming has taken it."""
    names = {*names_in(compile(tree, path, "exec"))} | {x.arg for x in ast.walk(tree) if isinstance(x, ast.arg | ast.keyword)}
    names |= {x.value for x in ast.walk(tree) if isinstance(x, ast.Constant) and isinstance(x.value, str)}
    for function in ast.walk(tree):
        text = ast.get_docstring(function) if isinstance(function, ast.FunctionDef) and not function.args.kwarg else None
        for match in EXPLAINED.finditer(" ".join((text or "").split())):
            yield from ((function.lineno, x) for x in match[1].split(", ") if x not in names | NO_ARGUMENTS)


def test_docstrings_explain_arguments_that_there_are():
    """Twelve explained an argument by the name that it had before a renaming."""
    stale = []
    for folder in PACKAGES:
        for file in (ROOT / folder).rglob("*.py"):
            path = str(file.relative_to(ROOT))
            if not path.startswith(EXPLAIN_RESULTS):
                stale += [f"{path}:{line} {x}" for line, x in explained_without_being_there(path, ast.parse(file.read_text()))]
    assert stale == []


# Class attributes that others read: Numba, torch, users' kernels, and users of FlashInfer's names.
READ_ELSEWHERE = {"update_variable", "prefer_literal", "generate_vmap_rule", "laneid", "blockDim", "begin_forward"}


def test_class_attributes_are_read():
    """A flag that a subclass sets and nothing reads has lost its name in a renaming: what it decided is decided otherwise now,
    and no test of results notices."""
    assigned, read = {}, set(READ_ELSEWHERE)
    for folder in PACKAGES:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    read.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    read.update(node.value.split())  # names of fields in a text
                elif isinstance(node, ast.ClassDef):
                    targets = [target for one in node.body if isinstance(one, ast.Assign) for target in one.targets]
                    names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
                    assigned |= {name: f"{file.relative_to(ROOT)}: {node.name}.{name}" for name in names}
    assert [place for name, place in assigned.items() if name not in read and not name.startswith("__")] == []


def test_numba_is_named_where_kernels_are_compiled():
    """Elsewhere only `from numba import cuda`, and what tiles/numba_names.py gives."""
    for module, file in modules(ROOT).items():
        if module.startswith("tiles.compiling.") or module == "tiles.numba_names":
            continue
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if re.search(r"^\s*(from|import) .*(numba|llvmlite)", text, re.M) else ():
            names = {a.name for a in node.names} if isinstance(node, ast.Import) else set()
            source = node.module or "" if isinstance(node, ast.ImportFrom) and not node.level else ""
            theirs = {x.partition(".")[0] for x in (*names, source)} & {"numba", "numba_cuda", "llvmlite"}
            kernels = source == "numba" and {a.name for a in node.names} == {"cuda"} if theirs and source else False
            assert not theirs or kernels, f"{file}:{node.lineno}"


def test_the_picture_names_the_modules_of_packages_and_of_calls():
    """Those that lie directly in a package, and those that a call goes through."""
    picture = re.findall(r"\w+", PAGE.read_text().split("```")[1])
    rooms = {*PACKAGES, "tiles.calls"}
    names = {m.rpartition(".")[2] for m in modules(ROOT) if m.rpartition(".")[0] in rooms} - {"__main__"}
    assert names - {folder.rpartition(".")[2] for folder in folders()} - {*picture} == set()


def test_files_that_sources_name_exist():
    """A docstring that sends its reader to a file must not send him to one that has moved, or never was."""
    folders_of_files = (*PACKAGES, "tests", "docs", "bench", "examples")
    paths = [f"/{file.relative_to(ROOT)}" for folder in folders_of_files for file in (ROOT / folder).rglob("*.py")]
    known = {path[i:] for path in paths for i, letter in enumerate(path) if letter == "/"}
    for file in modules(ROOT).values():
        named = {f"/{name}" for name in re.findall(r"\w[\w/]*\.py\b", file.read_text())}
        assert named - known <= FILES_OF_USAGES, file


def test_the_page_names_every_folder():
    text = PAGE.read_text()
    assert [folder for folder in folders() if f"{folder.rpartition('.')[2]}/" not in text] == []


def cited_results():
    """The files of bench/results that README, docs and the notes link to."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench/notes").glob("*.md")]
    names = (name for page in pages for name in re.findall(r"results/(20[\w.-]+)", page.read_text()))
    return {ROOT / "bench/results" / name for name in names}


def test_results_are_cited():
    """A measurement that no page links to is one that nobody looks at."""
    assert {*(ROOT / "bench" / "results").iterdir()} - cited_results() == set()


# ---- the checks themselves -----------------------------------------------------------------------------------------
SMALL = {
    "tiles/__init__.py": "from .a import x",
    "tiles/a.py": "",
    "tiles/b.py": "from . import a\ndef f():\n    from .c import y",
    "tiles/c.py": "import tiles.b",
    "ops/__init__.py": "",
    "ops/room/__init__.py": "",
    "ops/room/d.py": "from tiles import b\nfrom ..e import z\nif TYPE_CHECKING:\n    import attention",
    "ops/e.py": "from tiles.c import y",
    "attention/__init__.py": "from ops.room import d",
}


@pytest.fixture
def small(tmp_path):
    for name, text in SMALL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_edges_of_a_small_house(small):
    first, late = edges(small)
    assert first["tiles"] == {"tiles.a"} and first["tiles.b"] == {"tiles.a"} and first["tiles.c"] == {"tiles.b"}
    assert first["ops.room.d"] == {"tiles.b", "ops.e", "attention"}  # for type checkers, too
    assert late["tiles.b"] == {"tiles.c"}


def test_a_circle_is_found(small):
    (small / "tiles/a.py").write_text("from .c import y")
    with pytest.raises(ValueError, match="cycle"):
        reach(edges(small)[0])


def test_a_circle_of_rooms_is_found(small):
    (small / "ops/room/d.py").write_text("from ..other import g")
    (small / "ops/other").mkdir()
    (small / "ops/other/__init__.py").write_text("")
    (small / "ops/other/g.py").write_text("from ..room import h")
    (small / "ops/room/h.py").write_text("")
    reach(edges(small)[0])
    with pytest.raises(ValueError, match="cycle"):
        reach(between_rooms(edges(small)[0], "ops"))


def test_ci_finds_the_command_of_the_tests():
    """.ci/run takes it from README, by its end."""
    end = re.search(r"grep -m1 '(.*)\$' README.md", (ROOT / ".ci/run").read_text()).group(1)
    commands = [line for line in (ROOT / "README.md").read_text().splitlines() if line.endswith(end)]
    assert commands and commands[0].startswith("python3 -m venv .venv && ")
