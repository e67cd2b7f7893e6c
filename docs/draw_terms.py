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


def panel(title: str, root: Term, left: int, kernels: Sequence[tuple[str, list[Term]]]) -> tuple[str, int, int]:
    """(a graph with its root at the bottom, its width, its height). kernels: a frame around what each computes."""
    rows: dict[int, list[Term]] = {}
    depth = depths(root)
    for x in walk(root):
        level = max(0, min((depth[y] for y in walk(root) if x in y.args), default=depth[x] + 1) - 1)
        rows.setdefault(level, []).append(x)
    wide = max(map(len, rows.values()))
    at = {}
    for level, row in rows.items():
        start = left + (wide - len(row)) * (WIDTH + GAP) // 2
        at |= {x: (start + n * (WIDTH + GAP), 50 + level * STEP) for n, x in enumerate(row)}
    lines = [f'<text x="{left}" y="20" font-weight="bold">{escape(title)}</text>']
    for says, inside in kernels:
        xs, ys = zip(*(at[x] for x in inside))
        x0, y0, x1, y1 = min(xs) - 8, min(ys) - 8, max(xs) + WIDTH + 8, max(ys) + HEIGHT + 8
        frame = f'x="{x0}" y="{y0}" width="{x1 - x0}" height="{y1 - y0}" rx="8"'
        lines.append(f'<rect {frame} fill="none" stroke="#888" stroke-dasharray="4 3"/>')
        lines.append(f'<text x="{x1 - 4}" y="{y1 - 5}" font-size="10" text-anchor="end" fill="#666">{escape(says)}</text>')
    for x, (a, b) in at.items():
        for y in x.args:
            c, d = at[y]
            lines.append(f'<path d="M{c + WIDTH // 2} {d + HEIGHT} L{a + WIDTH // 2} {b}" stroke="#999" fill="none"/>')
    for x, (a, b) in at.items():
        color = COLORS.get(x.operation, "#eeeeee")
        lines.append(f'<rect x="{a}" y="{b}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{color}" stroke="#777"/>')
        lines.append(f'<text x="{a + WIDTH // 2}" y="{b + 17}" text-anchor="middle">{escape(label(x))}</text>')
    return "\n".join(lines), wide * (WIDTH + GAP), 50 + (max(rows) + 1) * STEP


def svg() -> str:
    arrays = [np.zeros(s, bf16.np) for s in ((16, 4096), (4096,), (4096, 6144))]
    traced = operators.rms_norm_linear.trace(operators.rms_norm_linear._arguments(arrays))
    (before,), (after,) = traced.roots, equivalent_forms(traced.roots, traced.table)[-1].roots
    rows, product = [x for x in walk(before) if x.args and x is not before], [before]
    one, wide, high = panel("as it is written", before, 20, [("a kernel", rows), ("another", product)])
    inside = [x for x in walk(after) if x.args]
    two, wider, higher = panel("the row's scale has moved", after, 90 + wide, [("one kernel", inside)])
    size = f'width="{130 + wide + wider}" height="{max(high, higher) + 20}"'
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}><rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, one, two, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(svg())
