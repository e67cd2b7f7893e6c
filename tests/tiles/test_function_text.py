"""tiles/compiling/function_text.py: a function's text is what it was compiled from, whatever its layout, its path and the
Python that runs it; and it is no other's."""

import dis
import hashlib
import itertools
import json
import linecache
import shutil
import subprocess
from types import FunctionType

import pytest
from pythons import other_pythons

from tiles.compiling import digest, function_text
from tiles.compiling.function_text import function_text as text_of

SOURCE = '''
import os.path as paths, sys  # a comment, with names
from itertools import (
    chain,  # another
    count as counted,
)


def plain(x, y=(lambda: 0), *rest: int, key=None, **others) -> int:
    """A docstring
  of two lines."""
    # a comment
    value = paths.join(x, "# no comment")  # a comment

    def inner(z):
        return sys.intern(z) + value + chain.from_iterable(counted(z))

# a comment at the left
    return (
        inner(
            y  # a comment
        )
    )


def decorated(f):
    return f


@decorated
@(lambda f: f)
def after_decorators(
    a,
    b,
):
    return plain(a) or after_decorators(b)


class Holder:
    def method(self, x):
        __private = self.__other + x
        return super().__repr__(), __private, __class__

    @staticmethod
    def decorated(x): return decorated(x)

    class Inner:
        @property
        def value(self):
            return [x for x in range(3) if x]


def make(size, step):
    class Local:
        def step(self, step):
            return step + size

    def step(x):
        text = f"""{x}
# no comment
   {size}"""
        assert x, text
        while True:
            try:
                yield step(x - 1)
            except (ValueError, TypeError) as error:
                raise RuntimeError from error

    return Local().step, step, lambda x: step(
        x,  # a comment
        size,
    )


table = {"one": lambda x: x + 1, "two": lambda x: x + 2, "nested": lambda x: (lambda y: x + y)}
table["default"] = lambda f=(lambda: 1): f
several = [
    lambda a, b: a
    if a  # a comment
    else "for",
    lambda *a: [b for b in a],
]
'''


def functions(space):
    """The functions of SOURCE, by what stands for them here."""
    holder, (method, step, closed) = space["Holder"], space["make"](1, 2)
    named = {name: space[name] for name in ("plain", "decorated", "after_decorators")}
    named |= {"method": holder.method, "static": holder.decorated, "property": holder.Inner.value.fget}
    named |= {"method in a function": method.__func__, "closure": step, "closed lambda": closed}
    named |= space["table"] | {"inner": space["table"]["nested"](1), "inner default": space["table"]["default"]()}
    return named | dict(zip(("over lines", "starred"), space["several"], strict=True))


names = itertools.count()


def loaded(source, tmp_path):
    file = tmp_path / f"source_{next(names)}.py"
    file.write_text(source)
    space = {"__name__": "written"}
    exec(compile(source, str(file), "exec"), space)
    return file, functions(space)


def test_texts(tmp_path):
    """All have one, each its own; it compiles to what runs, and what is left out of it is layout."""
    texts = {name: text_of(f) for name, f in loaded(SOURCE, tmp_path)[1].items()}
    assert None not in texts.values() and len(set(texts.values())) == len(texts)
    assert texts["one"] == "(lambda x:x+1)" and texts["closed lambda"] == "(lambda x:step(x,size,))"
    assert texts["over lines"] == '(lambda a,b:a if a else "for")' and texts["inner default"] == "(lambda:1)"
    assert texts["property"] == "def value(self):\n    return [x for x in range(3) if x]\n"
    assert texts["after_decorators"].startswith("def after_decorators(\n    a,\n")
    assert texts["method"].startswith("Holder: def method") and "# no comment" in texts["plain"] + texts["closure"]
    assert "a comment" not in "".join(texts.values()).replace("# no comment", "")


LAYOUTS = {
    "comments": lambda s: s.replace("a comment", "another comment").replace("# no another", "# no a"),
    "lines before": lambda s: "\n\n# lines\n\n" + s,
    "an unrelated function": lambda s: s.replace("def decorated(f)", "def unrelated(x): return x\n\n\ndef decorated(f)"),
    "blank lines": lambda s: s.replace("    def inner(z):\n", "\n\n    def inner(z):\n\n"),
    "spaces in lambdas": lambda s: s.replace("lambda x: x + 1", "lambda x:  x+1").replace("    if a  #", "      if a #"),
    "decorators": lambda s: s.replace("@decorated\n@(lambda f: f)\n", "@decorated\n"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_no_part_of_a_text(layout, tmp_path):
    changed = LAYOUTS[layout](SOURCE)
    assert changed != SOURCE
    before, after = (loaded(source, tmp_path)[1] for source in (SOURCE, changed))
    assert {name: text_of(f) for name, f in before.items()} == {name: text_of(f) for name, f in after.items()}


@pytest.mark.parametrize(
    "old, new, changed",
    [
        ("x + 1", "x + 3", {"one"}),
        ('"# no comment"', '"#  no comment"', {"plain"}),
        ("# no comment\n   {size}", "# no comment\n    {size}", {"closure"}),
        ("self.__other + x", "self.__other - x", {"method"}),
        ("class Holder", "class Another", {"method"}),  # its private names are others
        ("    if a  #", "    if b  #", {"over lines"}),
        ("lambda y: x + y", "lambda y: x * y", {"nested", "inner"}),
    ],
)
def test_a_change_is_seen_where_it_is(old, new, changed, tmp_path):
    assert SOURCE.count(old) == 1
    space = SOURCE.replace(old, new).replace("Another.Inner", "Holder.Inner")
    before = loaded(SOURCE, tmp_path)[1]
    after = loaded(space + ("\nHolder = Another\n" if "Another" in new else ""), tmp_path)[1]
    assert {name for name, f in before.items() if text_of(f) != text_of(after[name])} == changed
    assert None not in map(text_of, after.values())


def test_a_file_that_was_edited_after_its_import(tmp_path):
    """What runs is the old code: it is not known by the new text. Where the file says it again, it is."""
    file, before = loaded(SOURCE, tmp_path)
    file.write_text(SOURCE.replace("x + 1", "x + 9").replace("plain(a)", "plain(b)"))
    texts = {name: text_of(f) for name, f in before.items()}
    assert {name for name, text in texts.items() if text is None} == {"one", "after_decorators"}
    assert digest.Digest()(before["one"], False) != digest.Digest()(loaded(SOURCE, tmp_path)[1]["one"], False)
    file.write_text(SOURCE)
    again = before["one"]
    again = FunctionType(again.__code__.replace(co_filename=str(file)), again.__globals__)
    assert text_of(again) == "(lambda x:x+1)"


def test_code_that_was_changed_in_memory(tmp_path):
    """As pytest rewrites assertions: an equal text would say too little."""
    f = loaded(SOURCE, tmp_path)[1]["decorated"]
    for change in {"co_consts": (1.5,)}, {"co_names": ("a",)}, {"co_varnames": ("g",)}, {"co_name": "other"}:
        code = f.__code__.replace(**change)
        assert code != f.__code__ and text_of(FunctionType(code, f.__globals__)) is None


def test_what_exec_made():
    """It has no text; then the key holds for one version of Python, and tells functions apart."""
    spaces = [{}, {}, {}]
    for space, number in zip(spaces, (1, 2, 1), strict=True):
        exec(compile(f"def f(x): return x + {number}", "<made>", "exec"), space)
    one, two, again = (space["f"] for space in spaces)
    assert text_of(one) is text_of(two) is None
    assert digest.Digest()(one, False) == digest.Digest()(again, False) != digest.Digest()(two, False)


def test_what_exec_made_of_a_text_that_is_known():
    source = "def f(x): return x + 1\n"
    noted, cached = {"__source__": source}, {}
    linecache.cache["<made and cached>"] = len(source), None, source.splitlines(keepends=True), "<made and cached>"
    exec(compile(source, "<made>", "exec"), noted)
    exec(compile(source, "<made and cached>", "exec"), cached)
    assert text_of(noted["f"]) == text_of(cached["f"]) == source


def test_global_names_are_those_that_dis_finds(tmp_path):
    """In code of more than 256 names, too."""
    many = "def many():\n    return " + " + ".join(f"name_{n}.attribute_{n}" for n in range(300)) + "\n"
    space = {}
    exec(many, space)
    for f in (*loaded(SOURCE, tmp_path)[1].values(), space["many"]):
        loads = (one for code in digest._codes(f.__code__) for one in dis.get_instructions(code))
        assert digest.global_names(f.__code__) == tuple(
            sorted({one.argval for one in loads if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")})
        )


# ---- other versions of Python ------------------------------------------------------------------------------------------
DIGEST = "5ec5ba956de57925"  # of all texts of SOURCE


def digest_of_texts(texts):
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:16]


def test_texts_are_the_same_in_all_versions_of_python(tmp_path):
    """Whichever runs this test. (If the form of texts is changed, so is DIGEST.)"""
    assert digest_of_texts({name: text_of(f) for name, f in loaded(SOURCE, tmp_path)[1].items()}) == DIGEST


def test_texts_in_another_version_of_python(tmp_path):
    """The module needs the standard library alone, so any Python will do."""
    if not (pythons := other_pythons()):
        pytest.skip("there is no other version of Python here")
    shutil.copy(function_text.__file__, tmp_path / "function_text.py")
    (tmp_path / "source.py").write_text(SOURCE)
    texts = "print(json.dumps({name: function_text(f) for name, f in functions(vars(source)).items()}))"
    code = f"import json, source\nfrom function_text import function_text\n{text_of(functions)}\n{texts}"
    for python in pythons:
        run = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert run.returncode == 0 and digest_of_texts(json.loads(run.stdout)) == DIGEST, (python, run.stdout, run.stderr)
