"""For griffe, which reads the docstrings for the reference: they are plain text, and become Markdown.

Arguments, `name: meaning`, become a list, whether they have lines of their own below a sentence or stand one after the other
in a paragraph. What is indented otherwise is code. In prose, signs that Markdown would take for its own are escaped."""

import inspect
import re
import textwrap
from itertools import groupby, pairwise
from typing import Any

import griffe

NAMES = r"(\*{0,2}\w+(?:, \*{0,2}\w+)*)"
ARGUMENT_LINE = re.compile(rf"    {NAMES}: ")
ERROR = re.compile(r"[A-Z]\w*(Error|Warning)$")


def escape(text: str) -> str:
    """Prose as Markdown that shows it as it is. Code between ` stays, and pages of the documentation become links."""
    pieces = re.split(r"(`[^`]*`)", text)
    pieces[::2] = (re.sub(r"([*\[])", r"\\\1", piece).replace("<", "&lt;") for piece in pieces[::2])
    return re.sub(r"\bdocs/(\w+)\.md", r"[docs/\1.md](../\1.md)", "".join(pieces))


def bullet(names: str, meaning: str) -> str:
    """An item of a list for an argument, or several with one meaning."""
    return f"- {', '.join(f'**`{name}`**' for name in names.split(', '))}: {escape(meaning)}"


def sentences(prose: str, names: set[str]) -> list[str]:
    """A paragraph: an item for each `name: meaning` with which a sentence begins, if it names arguments or errors. What stands
    before the first is a paragraph."""
    found = [
        match
        for match in re.finditer(rf"(?:^|(?<=[.;] )){NAMES}: ", prose)
        if all(name.strip("*") in names or ERROR.match(name) for name in match[1].split(", "))
    ]
    ends = [match.start() for match in found[1:]] + [len(prose)]
    first = prose[: found[0].start()] if found else prose
    parts = [bullet(match[1], prose[match.end() : end].strip()) for match, end in zip(found, ends)]
    return ([escape(first.strip())] if first else []) + parts


def chunks(lines: list[str]) -> list[str]:
    """The lines of a paragraph, joined to what belongs together: prose, an item of a list, an argument below a sentence."""
    found: list[str] = []
    for line in lines:
        begins = line.startswith("- ") or ARGUMENT_LINE.match(line)
        ends = not line.startswith(" ") and found and ARGUMENT_LINE.match(found[-1])
        if begins or ends or not found:
            found.append(line)
        else:
            found[-1] += f" {line.strip()}"
    return found


def paragraph(lines: list[str], names: set[str]) -> list[str]:
    """A paragraph without empty lines as Markdown: paragraphs and items of lists."""
    if lines[0].startswith("|"):
        return ["\n".join(lines)]
    parts = []
    for chunk in chunks(lines):
        if chunk.startswith("- "):
            parts.append(f"- {escape(chunk[2:])}")
        elif match := ARGUMENT_LINE.match(chunk):
            parts.append(bullet(match[1], chunk[match.end() :]))
        else:
            parts += sentences(chunk, names)
    return parts


def is_code(text: str) -> bool:
    """Whether a paragraph is code: indented, and no list of arguments."""
    return text.startswith("    ") and not ARGUMENT_LINE.match(text)


def as_markdown(text: str, names: set[str]) -> str:
    """A docstring in Markdown. names: what its function or class takes."""
    parts: list[str] = []
    for code, group in groupby(re.split(r"\n\s*\n", inspect.cleandoc(text)), is_code):
        if code:
            parts.append("\n".join(["```python", textwrap.dedent("\n\n".join(group)), "```"]))
        else:
            parts += (part for block in group for part in paragraph(block.splitlines(), names))
    out = parts[:1]
    for before, part in pairwise(parts):
        out.append("\n" if before.startswith("- ") and part.startswith("- ") else "\n\n")
        out.append(part)
    return "".join(out)


def unpack(thing: griffe.Object, parameter: Any) -> set[str]:
    """The names of the arguments that a parameter takes. `**arguments: Unpack[Fields]` takes the fields of a TypedDict, too."""
    fields = re.search(r"Unpack\[(\w+)\]", str(parameter.annotation))
    names, classes = {parameter.name.strip("*")}, [thing.parent[fields[1]]] if fields and thing.parent else []
    while classes:
        record = classes.pop()
        record = record.final_target if record.is_alias else record
        names |= {name for name, member in record.members.items() if member.is_attribute}
        bases = [record.parent.members.get(str(base)) for base in record.bases]
        classes += [base for base in bases if base is not None and not base.is_alias]  # not typing.TypedDict
    return names


def arguments(thing: griffe.Object) -> set[str]:
    """The names that a function or class takes; of a dataclass its fields."""
    if thing.is_function:
        return {name for parameter in thing.parameters for name in unpack(thing, parameter)}
    if not thing.is_class:
        return set()
    fields = {name for name, member in thing.members.items() if member.is_attribute}
    made = thing.members.get("__init__")
    return fields | (arguments(made) if made is not None and made.is_function else set())


class PlainDocstrings(griffe.Extension):
    """Turns every docstring into Markdown, once all is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None and obj.docstring.value.strip():
            obj.docstring.value = as_markdown(obj.docstring.value, arguments(obj))
