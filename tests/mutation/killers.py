"""Which tests should notice a fault: those of the faulty file, the likeliest first.

`tests/` mirrors the packages: a/b/c.py has tests/a/b/test_c.py, tests/a/test_c.py or tests/a/test_b_c.py. Where it does not, a
row of own_tests.toml says which tests are a file's own.
"""

import ast
import fnmatch
import functools
import itertools
import re
from collections import Counter, defaultdict
from pathlib import Path

import tomllib

from .sources import ROOT, sources


@functools.cache
def files_of_tests(root: Path = ROOT) -> tuple[str, ...]:
    return tuple(sorted(file.relative_to(root).as_posix() for file in (root / "tests").rglob("test_*.py")))


@functools.cache
def mirrored(path: str) -> tuple[str, ...]:
    """The test files that are called as a source is."""
    *folders, stem = path.removesuffix(".py").split("/")
    if stem == "__init__" and len(folders) > 1:
        stem = folders.pop()
    names = {"_".join([*folders[k:], stem]) for k in range(1, len(folders) + 1)}
    places = {"/".join(["tests", *folders[:k]]) for k in range(1, len(folders) + 1)}
    return tuple(t for t in files_of_tests() if t.rpartition("/")[0] in places and Path(t).stem.removeprefix("test_") in names)


@functools.cache
def table() -> dict[str, list[str]]:
    """{pattern of sources: patterns of test files}."""
    rows = tomllib.loads((Path(__file__).parent / "own_tests.toml").read_text())
    places = {sources: [test.rpartition("/") for test in tests.split()] for sources, tests in rows.items()}
    return {sources: [f"tests/{folder}/test_{name}.py" for folder, _, name in tests] for sources, tests in places.items()}


@functools.cache
def own_tests(path: str) -> tuple[str, ...]:
    """The test files that must notice a fault of this source: its mirror's, and those of the table's first row for it, and of
    all rows for it that begin with +."""
    rows = (tests for pattern, tests in table().items() if fnmatch.fnmatchcase(path, pattern))
    more = (tests for pattern, tests in table().items() if pattern[0] == "+" and fnmatch.fnmatchcase(path, pattern[1:]))
    patterns = itertools.chain(next(rows, ()), *more)
    listed = [test for pattern in patterns for test in files_of_tests() if fnmatch.fnmatchcase(test, pattern)]
    return tuple(dict.fromkeys([*mirrored(path), *listed]))


@functools.cache
def other_tests(path: str) -> tuple[str, ...]:
    """The other test files of its package that speak of its module, or of what imports it."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    stems = {module.rpartition(".")[2]} | {Path(other).stem for other in sources() if _imports(other, module)}
    folder, tests_of_file = f"tests/{path.partition('/')[0]}/", own_tests(path)
    speaks = re.compile(rf"\b({'|'.join(map(re.escape, sorted(stems)))})\b")
    return tuple(
        t for t in files_of_tests() if t.startswith(folder) and t not in tests_of_file and speaks.search((ROOT / t).read_text())
    )


def _imports(path, module):
    stem = re.escape(module.rpartition(".")[2])
    return re.search(rf"^\s*from \S*(\.{stem}) import|^\s*from \S+ import .*\b{stem}\b", (ROOT / path).read_text(), re.M)


class LikeliestFirst:
    """The order in which tests are tried: those that noticed faults of this function before, then of this file; then those that
    name the function or what surrounds it; each function of tests once before any comes again with other parameters."""

    def __init__(self):
        self.kills = defaultdict(Counter)  # {file or file::function: {test: how often it noticed}}

    def noticed(self, path: str, function: str, test: str):
        for where in (path, f"{path}::{function}"):
            self.kills[where][test] += 1

    def key(self, path: str, function: str):
        """What sorts tests, by their names."""
        by_function, by_file = self.kills[f"{path}::{function}"], self.kills[path]
        rounds, words = Counter(), set(re.findall(r"[A-Za-z]\w{2,}", function)) - {"emit", "make", "lowers"}

        def key(test: str):
            function_of_tests = test.partition("[")[0]
            rounds[function_of_tests] += 1
            file, _, name = function_of_tests.partition("::")
            names = bool(words & _words(file, name.rpartition("::")[2]))
            return -by_function[test], -by_file[test], rounds[function_of_tests] - 3 * names

        return key


@functools.cache
def _words(file, function):
    """All words of a function of tests."""
    text = (ROOT / file).read_text() if (ROOT / file).exists() else ""
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return frozenset(re.findall(r"[A-Za-z]\w{2,}", ast.get_source_segment(text, node)))
    return frozenset()


@functools.lru_cache(64)
def _parsed(text):
    return ast.parse(text)
