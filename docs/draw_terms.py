"""Draws docs/terms.svg for docs/fuse.md: a norm and a product as expression graphs, before and after rewriting.
`python docs/draw_terms.py`."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

import fuse.operators as operators
from fuse.algebra.rules import equivalent_forms
from fuse.language.graph import walk
from fuse.language.terms import Term
from tiles import bf16

PICTURE = Path(__file__).with_name("terms.svg")
WIDTH, HEIGHT, GAP, STEP = 74, 26, 16, 52  # of a box, between boxes, from row to row
COLORS = {"matmul": "#f4c98b", "sum": "#bcd9f0", "input": "#e3ecd2", "number": "#ffffff", "length": "#ffffff"}
SIGNS = {"matmul": "@", "mul": "*", "div": "/", "add": "+", "sub": "-"}


def label(x: Term) -> str:
    """The text of a term in its box."""
    if not x.args:
        return {"input": "{0[0]}", "number": "{0:g}", "length": "columns"}[x.operation].format(x.attr)
    return SIGNS.get(x.operation, x.operation)


def depths(root: Term) -> dict[Term, int]:
    """The longest path from each term down to a leaf."""
    levels: dict[Term, int] = {}
    for x in walk(root):
        levels[x] = max((levels[y] + 1 for y in x.args), default=0)
    return levels


def columns(root: Term) -> dict[Term, int]:
    """The column of each operation: that of what uses it, or for further operands a column to the right."""
    found, most = {root: 0}, 0
    for x in reversed([*walk(root)]):
        for n, y in enumerate([y for y in dict.fromkeys(x.args) if y.args and y not in found]):
            most += n > 0
            found[y] = most if n else found[x]
    return found


def places(root: Term, left: int) -> dict[Term, tuple[int, int]]:
    """Where the box of each term lies. Operands come before what uses them; a leaf lies right of the operation that uses it, or
    above all if several do."""
    depth, column = depths(root), columns(root)
    users = {x: [y for y in walk(root) if x in y.args] for x in walk(root)}
    rows = {x: min((depth[y] - 1 for y in users[x]), default=depth[x]) for x in walk(root)}
    at = {}
    for x in walk(root):
        side = not x.args and len(users[x]) == 1
        beside = users[x][0] if side else x
        at[x] = left + (2 * column.get(beside, 0) + side) * (WIDTH + GAP), 50 + rows[beside] * STEP
    return at


def edge(source: tuple[int, int], target: tuple[int, int], shift: int, boxes: Sequence[tuple[int, int]]) -> str:
    """The arrow from a box to another: from its side to a box in the same row, around what lies between in the same column."""
    (a, b), (c, d) = source, target
    if b == d:
        line = f"M{a} {b + HEIGHT // 2} L{c + WIDTH} {d + HEIGHT // 2}"
    elif any(x == a == c and b < y < d for x, y in boxes):
        out, start, end = a - 2 * GAP, b + HEIGHT // 2, d + HEIGHT // 2
        line = (
            f"M{a} {start} C{out} {start} {out} {start} {out} {start + STEP} V{end - STEP} C{out} {end} {out} {end} {c} {end}"
        )
    else:
        line = f"M{a + WIDTH // 2 + shift} {b + HEIGHT} L{c + WIDTH // 2 + shift} {d}"
    return f'<path d="{line}" stroke="#777" fill="none" marker-end="url(#head)"/>'


def panel(title: str, root: Term, left: int, kernels: Sequence[tuple[str, list[Term]]]) -> tuple[str, int, int]:
    """(a graph with its root at the bottom, its right end, its height). kernels: a frame around what each computes."""
    at = places(root, left + 2 * GAP)
    lines = [f'<text x="{left}" y="20" font-weight="bold">{escape(title)}</text>']
    top = min(y for _, y in at.values())
    for says, inside in kernels:
        operands = [y for x in inside for y in x.args if not y.args and at[y][1] > top]
        xs, ys = zip(*(at[x] for x in (*inside, *operands)))
        x0, y0, x1, y1 = min(xs) - 3 * GAP, min(ys) - 10, max(xs) + WIDTH + 8, max(ys) + HEIGHT + 8
        frame = f'x="{x0}" y="{y0}" width="{x1 - x0}" height="{y1 - y0}" rx="8"'
        lines.append(f'<rect {frame} fill="none" stroke="#888" stroke-dasharray="4 3"/>')
        lines.append(f'<text x="{x1 + 6}" y="{y1 - 4}" font-size="10" fill="#666">{escape(says)}</text>')
    for x, target in at.items():
        for n, y in enumerate(x.args):
            shift = (2 * n - 1) * 6 if x.args.count(y) > 1 else 0
            lines.append(edge(at[y], target, shift, [*at.values()]))
    for x, (a, b) in at.items():
        color = COLORS.get(x.operation, "#eeeeee")
        lines.append(f'<rect x="{a}" y="{b}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{color}" stroke="#777"/>')
        lines.append(f'<text x="{a + WIDTH // 2}" y="{b + 17}" text-anchor="middle">{escape(label(x))}</text>')
    xs, ys = zip(*at.values())
    return "\n".join(lines), max(xs) + WIDTH + 70, max(ys) + HEIGHT + 10


def svg() -> str:
    arrays = [np.zeros(s, bf16.np) for s in ((16, 4096), (4096,), (4096, 6144))]
    traced = operators.rms_norm_linear.trace(operators.rms_norm_linear._arguments(arrays))
    (before,), (after,) = traced.roots, equivalent_forms(traced.roots, traced.table)[-1].roots
    rows, product = [x for x in walk(before) if x.args and x is not before], [before]
    one, end, high = panel("as it is written", before, 20, [("a kernel", rows), ("another", product)])
    inside = [x for x in walk(after) if x.args]
    two, width, higher = panel("the row's scale has moved", after, end + 40, [("one kernel", inside)])
    size = f'width="{width}" height="{max(high, higher) + 20}"'
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}><rect width="100%" height="100%" fill="white"/>'
    arrow = '<path d="M0 0 L8 4 L0 8 z" fill="#777"/>'
    head += f'<marker id="head" markerWidth="8" markerHeight="8" refX="8" refY="4" orient="auto">{arrow}</marker>'
    return "\n".join([head, one, two, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(svg())
