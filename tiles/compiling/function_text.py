"""The text that a function was compiled from, as keys take it (digest.py): the same on every path and for every Python.

It is the function's own lines, without decorators, comments, blank lines and the indentation that they share. Of a lambda it
is what stands from `lambda` to its end, in one line. A text is taken only if it compiles to the very code that the function
has. So a file that was edited after its import is not taken for what runs, nor one lambda of a line for another; and functions
that differ in more than comments and layout have different texts.

A function that exec made has a text if linecache has its lines, or if its globals have them as `__source__`. One that was
rewritten in memory, as pytest rewrites assertions, has none; nor has, from Python 3.13 on, one that defines a class, whose
number of its line is in the code.

This module imports the standard library only.
"""

import __future__

import contextlib
import functools
import inspect
import io
import itertools
import linecache
import operator
import re
import threading
import tokenize
import warnings
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import NamedTuple

STRING = r"""\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'"""
LAYOUT = re.compile(rf"({STRING})|^[ \t\f]*(?:\#[^\n]*)?\n|[ \t]*\#[^\n]*|[ \t]+$", re.MULTILINE | re.DOTALL)
SPACES = rf"(?s)({STRING})|(?:\#[^\n]*|\\\n|\s)+"  # compiled for the first lambda
LAMBDA_ENDS = rf"(?s){STRING}|\#[^\n]*|([(\[{{])|([)\]}}])|([,;\n]|\bfor\b)"
IMPORTS = re.compile(r"^[ \t]*(?:from[ \t]+[\w.]+[ \t]+)?import[ \t]+(\([^)]*\)|[^\n(;]+)", re.MULTILINE)
NAMES = re.compile(r"#[^\n]*|([^\W\d]\w*)[\w.]*(?:[ \t]+as[ \t]+(\w+))?")
PRIVATE = re.compile(r"\b__\w*[^\W_]\b")  # names that Python spells with their class's
DEFINITION = re.compile(r"\s*(?:async\s+)?def\s+(\w+)")
TRIED = 4, 64, 200  # ends of a definition, ends of a lambda, and lines that a lambda may have
FUTURE = functools.reduce(operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names))
KIND = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
FACTS = operator.attrgetter(
    *"co_name co_argcount co_posonlyargcount co_kwonlyargcount co_code co_names co_varnames co_freevars co_cellvars".split()
)


class Excerpt(NamedTuple):
    """Lines of a source that may be a function. is_shifted: it stands in column 0, where it did not in the source."""

    text: str
    is_shifted: bool = False


class FileText:
    """The lines of a file as they were read. imported: the names that its import statements bind: Python compiles calls of
    their attributes in another way."""

    def __init__(self, file, space):
        with contextlib.suppress(OSError, SyntaxError, ValueError), tokenize.open(file) as stream:
            self.text = stream.read()
            return
        self.text = space.get("__source__") or "".join(linecache.getlines(file, space))

    @functools.cached_property
    def lines(self):
        return list(io.StringIO(self.text))

    @functools.cached_property
    def imported(self):
        return sorted({alias or name for names in IMPORTS.findall(self.text) for name, alias in NAMES.findall(names)} - {""})

    def excerpts(self, code) -> Iterator[Excerpt]:
        """The pieces of source text that may belong to this code."""
        lines = self.lines[code.co_firstlineno - 1 :]
        return _lambdas(lines) if code.co_name == "<lambda>" else _definitions(lines, code.co_name)


def function_text(function: FunctionType) -> str | None:
    """The text of a function; None if none is known that compiles to its code."""
    code = function.__code__
    known = _texts.get(id(code))
    if known is None:
        _make_room(_texts, 4096)
        known = _texts[id(code)] = code, _find_text(function, code)
    return known[1]


_texts: dict[int, tuple[CodeType, str | None]] = {}  # id: (the code, which keeps its id, and its text)
_sources: dict[str, FileText] = {}  # by file, read when a function of it was looked for that was not in the text known before


def _find_text(function, code):
    known = _sources.get(code.co_filename)
    if known and (text := _match(function, code, known)):
        return text
    source = FileText(code.co_filename, function.__globals__)
    if known and known.text == source.text:
        return None
    _make_room(_sources, 256)
    _sources[code.co_filename] = source
    return _match(function, code, source)


def _match(function, code, source):
    owner = ("." + function.__qualname__).split(".")[-2]
    owner = owner if owner.isidentifier() else "_"  # a class whose name leaves private names as they are
    for excerpt in source.excerpts(code):
        if _compiles_to(excerpt, function, owner, source.imported):
            return f"{owner}: {excerpt.text}" if owner != "_" and PRIVATE.search(excerpt.text) else excerpt.text
    return None


def _make_room(table, max_entries):
    if len(table) >= max_entries:
        table.clear()


def _definitions(lines, name) -> Iterator[Excerpt]:
    """The definition of this name that begins in these lines, to where it seems to end."""
    heads = ((number, DEFINITION.match(line)) for number, line in enumerate(lines))
    start = next((number for number, head in heads if head and head[1] == name), len(lines))
    lines = lines[start:]
    for end in itertools.islice(_ends(lines), TRIED[0]):
        yield _without_layout("".join(lines[:end]))


def _ends(lines) -> Iterator[int]:
    """The numbers of lines that may follow the definition in the first one."""
    if not lines:
        return
    indent = len(lines[0]) - len(lines[0].lstrip())
    for number, line in enumerate(lines):
        rest = line.lstrip()
        if number and rest and rest[0] not in "#)]}" and len(line) - len(rest) <= indent:
            yield number
    yield len(lines)


def _without_layout(text) -> Excerpt:
    is_multiline = False

    def replace(match):
        nonlocal is_multiline
        string = match[1] or ""
        is_multiline |= "\n" in string
        return string

    text = LAYOUT.sub(replace, text)
    indent = len(text) - len(text.lstrip())
    if not indent or is_multiline:  # a line may belong to a string, with its spaces
        return Excerpt(text)
    return Excerpt("".join(line[indent:] for line in text.splitlines(keepends=True)), True)


def _lambdas(lines) -> Iterator[Excerpt]:
    """The lambdas of the first line, each to wherever it may end."""
    text = "".join(lines[: TRIED[2]])
    for begin in re.finditer(r"\blambda\b", lines[0] if lines else ""):
        for end in itertools.islice(_lambda_ends(text, begin.end()), TRIED[1]):
            yield Excerpt(f"({re.sub(SPACES, _space, text[begin.start() : end])})")


def _lambda_ends(text, start) -> Iterator[int]:
    depth = 0
    for match in re.compile(LAMBDA_ENDS).finditer(text, start):
        opens, closes, ends = match.groups()
        if depth == 0 and (closes or ends):
            yield match.start()
        depth += bool(opens) - bool(closes)
        if depth < 0:
            return
    yield len(text)


def _space(match):
    """One space between two words or strings, and none elsewhere."""
    if match[1]:
        return match[1]
    before, after = match.string[match.start() - 1 : match.start()], match.string[match.end() : match.end() + 1]
    return " " * all(one.isalnum() or (one and one in "_\"'") for one in (before, after))


def _compiles_to(excerpt, function, owner, imported) -> bool:
    """Does this text, among the names that its file imports and those that the function closes over, and in a class named
    `owner`, compile to the function's code?"""
    code, (text, is_shifted) = function.__code__, excerpt
    closed = [name for name in code.co_freevars if name != "__class__"]
    heads = [f"def _({', '.join(closed)}):\n"] * bool(closed)
    if closed or is_shifted or text[0] in " \t(" or owner != "_":
        heads += [f"{' ' * len(heads)}class {owner}:\n"]  # names of a class's body are hidden from its functions
    if heads and (is_shifted or text[0] == "("):
        text = "".join(f"  {line}" for line in text.splitlines(keepends=True))
    imports = [f"import {name}\n" for name in imported if name in text and name in function.__globals__]
    text = "".join([*imports, *heads, text])
    quiet = _quietly() if "\\" in text else contextlib.nullcontext()  # escapes of no meaning
    try:
        with quiet:
            outer = compile(text, "<text>", "exec", code.co_flags & FUTURE, True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for _ in heads:
        outer = _last_code(outer, None)
    return _equal(_last_code(outer, code.co_name), code)


@contextlib.contextmanager
def _quietly():
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_filters = threading.Lock()  # filters of warnings are the process's


def _last_code(outer, name):
    """The last code of this name among a code's constants: those of defaults stand before. None if there is none."""
    constants = outer.co_consts if outer else ()
    return next((one for one in constants[::-1] if isinstance(one, CodeType) and name in (None, one.co_name)), None)


def _equal(a, b) -> bool:
    """Do two constants, or codes, mean the same, wherever they stand?"""
    if type(a) is not type(b):
        return False
    if isinstance(a, CodeType):
        facts = FACTS(a) == FACTS(b) and not (a.co_flags ^ b.co_flags) & KIND
        handlers = getattr(a, "co_exceptiontable", b"") == getattr(b, "co_exceptiontable", b"")
        return facts and handlers and _equal(a.co_consts, b.co_consts)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, str):  # the qualified name of a function inside
        return a == b or (".<locals>." in a and a.rpartition(".<locals>.")[2] == b.rpartition(".<locals>.")[2])
    if isinstance(a, frozenset):
        return {(type(one), repr(one)) for one in a} == {(type(one), repr(one)) for one in b}
    return repr(a) == repr(b)
