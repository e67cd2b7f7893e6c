"""Two versions of a kernel, or one for two architectures, side by side."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from os.path import basename
from typing import Any, NamedTuple

from .code import SassLine, mnemonic
from .page import embed_page, page_of_difference


class ComparedRow(NamedTuple):
    """Two entries side by side, of the version before and of that after; None: that version has none."""

    before: Any
    after: Any

    @property
    def mark(self) -> str:
        """The mark of a diff: "-" for what is gone, "+" for what is new, "~" where both have something else."""
        return " " if self.before == self.after else "+" if self.before is None else "-" if self.after is None else "~"


def align_rows(before: list, after: list, key) -> Iterator[ComparedRow]:
    """Two lists, with entries of equal keys beside each other."""
    for kind, i, j, k, m in SequenceMatcher(None, [*map(key, before)], [*map(key, after)], autojunk=False).get_opcodes():
        if kind == "equal":
            yield from map(ComparedRow, before[i:j], after[k:m])
        else:
            yield from (ComparedRow(one, None) for one in before[i:j])
            yield from (ComparedRow(None, one) for one in after[k:m])


@dataclass(frozen=True, repr=False)
class Difference:
    """The difference of two inspections, `after - before`."""

    before: Any  # Inspections (report.py)
    after: Any

    @property
    def titles(self) -> tuple[str, str]:
        """The titles of the two inspections."""
        return tuple(f"{one.title} for {one.arch}" for one in (self.before, self.after))  # type: ignore[return-value]

    @property
    def figures(self) -> list[tuple[str, int, int]]:
        """(name, before, after) of each figure, then of each mnemonic of which there are not as many as before."""
        a, b = self.before, self.after
        names = "registers", "spill_bytes", "local_bytes", "shared_bytes"
        rows = [(name.replace("_", " "), getattr(a, name), getattr(b, name)) for name in names]
        if a.occupancy and b.occupancy:
            rows.append(("warps at once", a.occupancy.warps, b.occupancy.warps))
        rows.append(("instructions", sum(a.instructions.values()), sum(b.instructions.values())))
        kinds = sorted(a.instructions.keys() | b.instructions.keys())
        counts = [(f"  {kind}", a.instructions.get(kind, 0), b.instructions.get(kind, 0)) for kind in kinds]
        changed = [row for row in counts if row[1] != row[2]]
        return rows + sorted(changed, key=lambda row: -abs(row[2] - row[1]))

    @property
    def lines(self) -> list[ComparedRow]:
        """Lines of Python beside each other: (file, text, how many instructions it became)."""
        return list(align_rows(_lines(self.before), _lines(self.after), lambda line: line[:2]))

    def instructions(self, kind: str = "sass") -> list[ComparedRow]:
        """Instructions beside each other, "sass" or "ptx": those of one mnemonic, in whatever registers."""
        before, after = (list(getattr(one, kind)) for one in (self.before, self.after))
        return list(align_rows(before, after, lambda line: line.text if line.text.endswith(":") else mnemonic(line.text)))

    def __str__(self):
        width = max(24, *map(len, self.titles)) + 2
        parts = [" " * 24 + "".join(f"{name:>{width}}" for name in self.titles)]
        for name, a, b in self.figures:
            parts.append(f"{name:24}{a:{width}}{b:{width}}  {f'{b - a:+}' if a != b else ''}".rstrip())
        parts.append("")
        for row in self.lines:
            counts = [one[2] or "" if one else "" for one in row]
            mark = row.mark if None in row else "~" if counts[0] != counts[1] else " "
            parts.append(f"{mark} {counts[0]:>6} {counts[1]:>6}  {(row.before or row.after)[1]}".rstrip())
        return "\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self):
        return embed_page(self.html())

    def listing(self, kind: str = "sass") -> str:
        """All instructions as a diff, under the lines of Python that they come from."""
        parts, last = [], None
        for row in self.instructions(kind):
            line: SassLine = row.after or row.before
            if line.place != last:
                parts.append(f"  {line.place}")
            parts.append(f"{row.mark if None in row else ' '}     {line.text}")
            last = line.place
        return "\n".join(parts)

    def html(self) -> str:
        """An HTML page that shows both versions side by side."""
        return page_of_difference(self)


def _lines(one: Any) -> list[tuple[str, str, int]]:
    rows = []
    for file, first, lines in one.sources:
        name = basename(file) if len(one.sources) > 1 else ""
        rows += [
            (name, text, sum(one.counts.get((file, number), Counter()).values())) for number, text in enumerate(lines, first)
        ]
    return rows
