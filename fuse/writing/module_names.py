"""Names in generated modules.

Templates write a kernel with *marks* in place of the names that a definition gives: to the function, its arguments, results and
variables. A mark is as long as its name and consists of a letter that no kernel uses, so all other names in the text are the
module's own. `settle_names` chooses names that hide none of these, and `Renaming` puts them in place of the marks."""

from __future__ import annotations

import functools
import itertools
import re
import symtable
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from ..language.names import array, unused


@functools.lru_cache(64)
def letters(count: int) -> tuple[str, ...]:
    """So many lower-case letters that are not ASCII's, each of which has one capital."""
    characters = (chr(code) for code in range(0x430, 0x1E944))
    cased = (one for one in characters if one.islower() and len(one.upper()) == 1 and one.upper().lower() == one != one.upper())
    plain = (one for one in cased if all(unicodedata.normalize("NFKC", x) == x for x in (one, one.upper())))
    return tuple(itertools.islice(plain, count))


def make_marks(names: Sequence[str]) -> list[str]:
    """A mark for each name."""
    return [letter * len(name) for letter, name in zip(letters(len(names)), names)]


class Renaming:
    """Replaces marks by names: x for the mark of x, and X and gX for the forms that templates derive from it."""

    def __init__(self, marks: Sequence[str], names: Sequence[str]):
        self.names, self.places = list(names), {mark[0]: n for n, mark in enumerate(marks)}
        self.pattern = re.compile("|".join([f"[{one}{one.upper()}]+" for one in self.places]))

    def __call__(self, text: str) -> str:
        """The text with names in place of marks."""
        return self.pattern.sub(self._name, text)

    def _name(self, match: re.Match) -> str:
        mark, of_array = match[0], match.string[: match.start()].endswith("g")
        name = self.names[self.places[mark[0].lower()]]
        return array(name)[1:] if of_array else name.upper() if mark.isupper() else name

    def inside(self, text: str) -> frozenset[int]:
        """The places of the names whose marks the text contains."""
        return frozenset([self.places[mark[0].lower()] for mark in self.pattern.findall(text)])


def settle_names(names: Sequence[str], marks: Sequence[str], text: str) -> Renaming:
    """The renaming to names that hide no name of the module, and not each other: the given names, or these with a number
    appended. Of two that conflict, the first one stays. text: the module, with marks."""
    renaming, name_scopes = Renaming(marks, names), scopes(text)
    known = {one: renaming.inside(one) for scope in name_scopes for one in scope}
    while conflict := _clash(name_scopes, lambda one: renaming(one) if known[one] else one):
        one, other = map(known.__getitem__, conflict)
        last = max(one | other)
        name = renaming.names[last]
        same_argument = one == other and name.upper() == name  # X = st(...) beside x, of an argument that is called X
        renaming.names[last] = unused(f"{name}_array" if same_argument else name, {*known, *renaming.names})
    return renaming


def _clash(scopes: Iterable[Iterable[str]], called: Callable[[str], str]) -> tuple[str, str] | None:
    """Two identifiers of one scope that would get the same name; None if there are none."""
    for scope in scopes:
        known = dict[str, str]()
        for one in sorted(scope):
            if (other := known.setdefault(called(one), one)) != one:
                return one, other
    return None


# ---- the names in a text ---------------------------------------------------------------------------------------------
KEYWORD = re.compile(r"(?<=[(\s])\w+(?==[^=])")  # a keyword of a call


def scopes(text: str) -> list[set[str]]:
    """The sets of names that must differ from each other: those in each function of the text; those outside of functions, with
    all that the text takes from elsewhere; and the keywords of calls."""
    table = symtable.symtable(text, "", "exec")
    outside = {*table.get_identifiers(), *free_names(table)}
    return [*map(_identifiers, table.get_children()), outside, {*KEYWORD.findall(text)}]


def free_names(table: symtable.SymbolTable) -> set[str]:
    """The names that a module reads and does not assign."""
    symbols = table.get_symbols()
    read = {x.get_name() for x in symbols if x.is_referenced()}.union(*map(_globals, table.get_children()))
    return read - {x.get_name() for x in symbols if x.is_assigned() or x.is_imported() or x.is_namespace()}


def _globals(table: symtable.SymbolTable) -> set[str]:
    """The names that a function, and functions inside it, read from outside of all functions."""
    names = table.get_globals() if isinstance(table, symtable.Function) else ()
    return {*names}.union(*map(_globals, table.get_children()))


def _identifiers(table: symtable.SymbolTable) -> set[str]:
    """All names in a function, and in functions inside it."""
    return {*table.get_identifiers()}.union(*map(_identifiers, table.get_children()))


def global_names(lines: Iterable[str]) -> list[str]:
    """The names of the globals and functions of this code."""
    table = symtable.symtable("\n".join(lines), "", "exec")
    return [x.get_name() for x in table.get_symbols() if x.is_assigned() or x.is_namespace()]
