"""What things are called in the module that a fused function becomes.

Templates write a kernel with *marks* where a definition gives the names: to the function, its arguments, results and variables.
A mark is as long as its name and has a letter that no kernel has. So whatever else stands in the text is the module's own, and
`settle_names` finds names that hide nothing of it. Then `Renaming` puts them in."""

from __future__ import annotations

import functools
import itertools
import keyword
import re
import symtable
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def unused(name: str, taken: Iterable[str]) -> str:
    """The name, with a number behind it if it is taken."""
    number, found, taken = 1, name, set(taken)
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def identifiers(keys: Iterable[Any], taken: Iterable[str]) -> tuple[str, ...]:
    """Names for what a dictionary calls by these keys: the keys, made Python's names where they are none, and with a number
    behind them where Python or `taken` has the name."""
    found = list[str]()
    for key in keys:
        word = unicodedata.normalize("NFKC", str(key))  # as Python reads it
        word = "".join([one if f"a{one}".isidentifier() else "_" for one in word])
        found.append(unused(word if word.isidentifier() else f"out_{word}", (*taken, *found, *keyword.kwlist)))
    return tuple(found)


def array(name: str) -> str:
    """What a kernel calls the array that a variable is read from: gX for x."""
    return f"g{name[0].upper()}{name[1:]}"


# ---- marks -----------------------------------------------------------------------------------------------------------
@functools.lru_cache(64)
def letters(count: int) -> tuple[str, ...]:
    """So many small letters that are not ASCII's, each of which has one capital."""
    every = (chr(code) for code in range(0x430, 0x1E944))
    cased = (one for one in every if one.islower() and len(one.upper()) == 1 and one.upper().lower() == one != one.upper())
    plain = (one for one in cased if all(unicodedata.normalize("NFKC", x) == x for x in (one, one.upper())))
    return tuple(itertools.islice(plain, count))


def marks(names: Sequence[str]) -> list[str]:
    """A mark for each name."""
    return [letter * len(name) for letter, name in zip(letters(len(names)), names)]


class Renaming:
    """Puts names in the place of marks: x for the mark of x, and X and gX for what templates make of it."""

    def __init__(self, marks: Sequence[str], names: Sequence[str]):
        self.names, self.places = list(names), {mark[0]: n for n, mark in enumerate(marks)}
        self.pattern = re.compile("|".join([f"[{one}{one.upper()}]+" for one in self.places]))

    def __call__(self, text: str) -> str:
        """The text with names."""
        return self.pattern.sub(self._name, text)

    def _name(self, found: re.Match) -> str:
        mark, of_array = found[0], found.string[: found.start()].endswith("g")
        name = self.names[self.places[mark[0].lower()]]
        return array(name)[1:] if of_array else name.upper() if mark.isupper() else name

    def inside(self, text: str) -> frozenset[int]:
        """The places of the names that the text has marks of."""
        return frozenset([self.places[mark[0].lower()] for mark in self.pattern.findall(text)])


def settle_names(names: Sequence[str], marks: Sequence[str], text: str) -> Renaming:
    """The renaming to names that hide nothing that the module has for itself, and not each other: to those given, or those
    with a number behind them. Of two that cannot both stay as they are, the first one does. text: the module, with marks."""
    put, every = Renaming(marks, names), scopes(text)
    known = {one: put.inside(one) for scope in every for one in scope}
    while clash := _clash(every, lambda one: put(one) if known[one] else one):
        one, other = map(known.__getitem__, clash)
        last = max(one | other)
        name = put.names[last]
        alone = one == other and name.upper() == name  # X = st(...) beside x, of an argument that is called X
        put.names[last] = unused(f"{name}_array" if alone else name, {*known, *put.names})
    return put


def _clash(scopes: Iterable[Iterable[str]], called: Callable[[str], str]) -> tuple[str, str] | None:
    """Two identifiers of one scope that would be called the same; None if there are none."""
    for scope in scopes:
        known = dict[str, str]()
        for one in sorted(scope):
            if (other := known.setdefault(called(one), one)) != one:
                return one, other
    return None


# ---- the names in a text ---------------------------------------------------------------------------------------------
KEYWORD = re.compile(r"(?<=[(\s])\w+(?==[^=])")  # of a call


def scopes(text: str) -> list[set[str]]:
    """The names that must differ from each other: those in each function of the text; those outside of functions, with what
    all of it takes from elsewhere; and the keywords of calls."""
    table = symtable.symtable(text, "", "exec")
    outside = {*table.get_identifiers(), *free_names(table)}
    return [*map(_identifiers, table.get_children()), outside, {*KEYWORD.findall(text)}]


def free_names(table: symtable.SymbolTable) -> set[str]:
    """The names that a module reads and does not assign."""
    symbols = table.get_symbols()
    read = {x.get_name() for x in symbols if x.is_referenced()}.union(*map(_globals, table.get_children()))
    return read - {x.get_name() for x in symbols if x.is_assigned() or x.is_imported() or x.is_namespace()}


def _globals(table: symtable.SymbolTable) -> set[str]:
    """The names that a function, and what is in it, takes from outside of all functions."""
    own = table.get_globals() if isinstance(table, symtable.Function) else ()
    return {*own}.union(*map(_globals, table.get_children()))


def _identifiers(table: symtable.SymbolTable) -> set[str]:
    """All names in a function, and in what is in it."""
    return {*table.get_identifiers()}.union(*map(_identifiers, table.get_children()))


def global_names(lines: Iterable[str]) -> list[str]:
    """The names of the globals and functions of this code."""
    table = symtable.symtable("\n".join(lines), "", "exec")
    return [x.get_name() for x in table.get_symbols() if x.is_assigned() or x.is_namespace()]
