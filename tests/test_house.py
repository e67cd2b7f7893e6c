"""The house as docs/house.md draws it: which file imports which, in floors without circles: tiles, ops, attention, fuse.

After moving a file: `python tests/test_house.py` draws it anew.
"""

import ast
import functools
import textwrap
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = "tiles", "ops", "attention", "fuse"  # each imports those before it
PAGE, FENCE = ROOT / "docs" / "house.md", "```"
# Imports inside functions, for outside they would close a circle: an op asks, when it is called, for what is made of ops;
# forward asks for what takes torch's tensors, where there are some.
LATE = {
    ("attention.softmax.forward_programs", "attention.softmax.autograd"),
    ("fuse.gradient", "fuse.backward"),
    ("fuse.terms", "fuse.writing"),
    ("tiles.op", "tiles.dtypes"),
    ("tiles.op", "tiles.interpreter"),
    ("tiles.op", "tiles.numba_helpers"),
    ("tiles.op", "tiles.numba_types"),
    ("tiles.op", "tiles.types"),
    ("tiles.op", "tiles.values"),
    ("tiles.unsupported", "tiles.interpreter"),
    ("tiles.unsupported", "tiles.values"),
}


def modules(root):
    """{module: its file} of the packages; a package is the module of its __init__.py."""
    files = (file for package in PACKAGES for file in (root / package).rglob("*.py"))
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in sorted(files)}


def imported(node, module, is_package, known):
    """The modules among `known` that an import statement names, each as deep as it goes: `from .matmul import mma` is
    ops.matmul.mma. (That Python runs the __init__.py above it on the way makes no edge: these hold no more than re-exports.)"""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & known
    above = module.split(".") if is_package else module.split(".")[:-1]
    start = above[: len(above) - node.level + 1] if node.level else []
    source = ".".join([*start, *([node.module] if node.module else [])])
    deeper = {f"{source}.{alias.name}" for alias in node.names}
    return deeper & known | ({source} & known if deeper - known else set())


def for_type_checkers(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@functools.cache
def house():
    """Our own edges, read once."""
    return edges(ROOT)


def edges(root):
    """What modules import when they are imported themselves, and what their functions import: each {module: modules}."""
    files = modules(root)
    first, late = {m: set() for m in files}, {m: set() for m in files}

    def walk(node, module, into):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                is_package = files[module].name == "__init__.py"
                into[module] |= imported(child, module, is_package, files.keys()) - {module}
            elif not isinstance(child, ast.expr) and not for_type_checkers(child):  # no expression imports
                walk(child, module, late if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else into)

    for module, file in files.items():
        walk(ast.parse(file.read_text()), module, first)
    return first, late


def reach(graph):
    """{node: all that it imports, directly or not}; CycleError if there is a circle."""
    found = {}
    for node in TopologicalSorter(graph).static_order():
        found[node] = set(graph[node]).union(*(found[other] for other in graph[node]))
    return found


# ---- the drawing ---------------------------------------------------------------------------------------------------
def room_of(module):
    """What a module is drawn in: its folder, or if it lies directly in a package, itself."""
    return ".".join(module.split(".")[:-1]) if module.count(".") > 1 else module


def depths(graph):
    """{node: its floor}, one above the uppermost that it imports."""
    found = {}
    for node in TopologicalSorter(graph).static_order():
        found[node] = 1 + max((found[other] for other in graph[node]), default=-1)
    return found


def between_rooms(graph, package):
    """The same graph, of the rooms of a package."""
    rooms = {}
    for module in graph:
        if module.startswith(f"{package}."):
            others = {room_of(other) for other in graph[module] if other.startswith(f"{package}.")}
            rooms.setdefault(room_of(module), set()).update(others - {room_of(module)})
    return rooms


def drawing(root):
    """The packages, the uppermost first; in each its rooms, and in those the files, above what they import. To the right, what
    a file imports of its own package, without what that imports in turn."""
    files, (graph, _), lines = modules(root), house() if root == ROOT else edges(root), []
    reached, floor = reach(graph), depths(graph)
    for package in reversed(PACKAGES):
        lines.append(f"{package}/")
        drawn = [m for m in files if m.startswith(f"{package}.") and files[m].name != "__init__.py"]
        rooms = {room: [m for m in drawn if room_of(m) == room] for room in map(room_of, drawn)}
        try:
            height = depths(between_rooms(graph, package))
        except CycleError:
            height = {room: max(floor[m] for m in inside) for room, inside in rooms.items()}
        for room in sorted(rooms, key=lambda room: (-height[room], room)):
            inside = sorted(rooms[room], key=lambda m: (-floor[m], m))
            indent = "  "
            if inside != [room]:
                lines.append(f"  {room.removeprefix(package)[1:].replace('.', '/')}/")
                indent = "    "
            for m in inside:
                mine = {other for other in graph[m] if other.startswith(f"{package}.")}
                direct = {other for other in mine if not any(other in reached[third] for third in mine)}
                said = " ".join(sorted(other.removeprefix(f"{room}.").removeprefix(f"{package}.") for other in direct))
                name = f"{indent}{m.rpartition('.')[2]}.py"
                lines += textwrap.wrap(said, 90, initial_indent=f"{name:<30}", subsequent_indent=" " * 30) or [name]
    return "\n".join(lines)


def drawn(text):
    """What docs/house.md has drawn."""
    return text.partition(f"{FENCE}\n")[2].partition(f"\n{FENCE}")[0]


# ---- what holds ----------------------------------------------------------------------------------------------------
def test_no_circles():
    reach(house()[0])


@pytest.mark.parametrize("number", range(len(PACKAGES)), ids=PACKAGES)
def test_floors(number):
    """Nothing imports upwards, inside functions neither."""
    allowed = set(PACKAGES[: number + 1])
    for graph in house():
        up = {(m, o) for m, others in graph.items() for o in others if m.split(".")[0] == PACKAGES[number]}
        assert not {(m, o) for m, o in up if o.split(".")[0] not in allowed}


def test_rooms_of_ops():
    """The rooms of ops/ have floors, too: none imports one that imports it."""
    rooms = between_rooms(house()[0], "ops")
    reach(rooms)
    assert {"ops.elementwise", "ops.memory", "ops.matmul", "ops.warpgroup"} < rooms.keys()


def test_late_imports():
    """The imports inside functions that would close a circle are those we know of."""
    first, late = house()
    reached = reach(first)
    assert {(m, o) for m, others in late.items() for o in others if m in reached[o]} == LATE


def test_drawing():
    assert drawn(PAGE.read_text()) == drawing(ROOT), "python tests/test_house.py draws the house anew"


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
    assert first["ops.room.d"] == {"tiles.b", "ops.e"} and first["attention"] == {"ops.room.d"}
    assert late["tiles.b"] == {"tiles.c"} and "tiles.b" in reach(first)["tiles.c"]


def test_a_circle_is_found(small):
    (small / "tiles/a.py").write_text("from .c import y")
    with pytest.raises(ValueError, match="cycle"):
        reach(edges(small)[0])


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text.replace(f"{FENCE}\n{drawn(text)}\n", f"{FENCE}\n{drawing(ROOT)}\n"))
