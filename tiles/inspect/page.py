"""What tiles.inspect found, as a page that needs no other file: Python on the left, its instructions on the right.

A line has one of eight colours that readers of every kind of sight tell apart (Okabe and Ito, 2008), and its instructions have
the same, besides its number. Pointing at one side shows the other, a click keeps it.
"""

from collections import Counter
from html import escape
from os.path import basename
from typing import Any

from .figures import Figures

TOP = 5  # mnemonics shown of a line
COLOURS = "#e69f00 #56b4e9 #009e73 #f0e442 #0072b2 #d55e00 #cc79a7 #999999".split()

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --dim: #68707a; --edge: #d9dee4; --card: #f5f7f9; --tint: 16% }
@media (prefers-color-scheme: dark) {
  :root { --back: #14181d; --text: #e6e9ed; --dim: #98a1ab; --edge: #2d343c; --card: #1c2229; --tint: 22% }
}
* { box-sizing: border-box }
body { margin: 0; height: 100vh; display: flex; flex-direction: column; background: var(--back); color: var(--text);
       font: 14px/1.5 system-ui, sans-serif }
header { padding: 14px 20px 10px; border-bottom: 1px solid var(--edge) }
h1 { margin: 0 0 8px; font-size: 19px; font-weight: 650 } h1 small { color: var(--dim); font-weight: 400 }
h2 { margin: 18px 0 4px 12px; font-size: 13px; color: var(--dim); font-weight: 600 }
dl { display: flex; flex-wrap: wrap; gap: 8px; margin: 0 }
dl div { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 4px 12px }
dt { color: var(--dim); font-size: 12px } dd { margin: 0; font-size: 16px; font-variant-numeric: tabular-nums }
dd small { color: var(--dim) } .bad dd, .warning { color: #d55e00; font-weight: 650 }
.warning { margin: 8px 0 0 }
main { flex: 1; min-height: 0; display: grid; grid-template: minmax(0, 1fr) / minmax(0, 1fr) minmax(0, 1fr) }
section { overflow: auto; padding-bottom: 40px } section + section { border-left: 1px solid var(--edge) }
nav { position: sticky; top: 0; z-index: 1; background: var(--back); padding: 8px 12px; border-bottom: 1px solid var(--edge) }
button { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--edge); border-radius: 6px;
         padding: 1px 12px; cursor: pointer }
button[aria-pressed=true] { border-color: #0072b2; box-shadow: inset 0 0 0 1px #0072b2 }
table { border-collapse: collapse; width: 100%; font: 12.5px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, monospace }
td { padding: 0 8px; white-space: pre; vertical-align: top }
td.n { color: var(--dim); text-align: right; width: 1%; user-select: none }
td.bar { width: 74px; padding-right: 0 }
td.bar i { display: block; height: 9px; margin: 5px 0; border-radius: 2px; background: var(--c) }
td.top { color: var(--dim); width: 99% } td.op { color: var(--dim); text-align: right }
tr[data-l] { cursor: pointer } td:first-child { border-left: 4px solid var(--c, transparent) }
tr.on { background: color-mix(in srgb, var(--c) var(--tint), transparent) }
tr.begin td { border-top: 1px solid var(--edge) }
tr.plus td:first-child, tr.minus td:first-child { font-weight: 700 }
tr.plus { background: color-mix(in srgb, #0072b2 var(--tint), transparent) }
tr.minus { background: color-mix(in srgb, #e69f00 var(--tint), transparent) }
"""
STYLE += "\n".join(f".c{n} {{ --c: {colour} }}" for n, colour in enumerate(COLOURS))

SCRIPT = """
const rows = [...document.querySelectorAll('tr[data-l]')]; let kept = null;
const show = l => rows.forEach(r => r.classList.toggle('on', l !== null && r.dataset.l === l));
const reveal = (l, from) => document.querySelectorAll('section').forEach(s => {
  const row = s.contains(from) ? null : s.querySelector(`table:not([hidden]) tr[data-l="${l}"]`);
  row?.scrollIntoView({block: 'center', behavior: 'smooth'});
});
rows.forEach(r => {
  r.onmouseenter = () => kept === null && show(r.dataset.l);
  r.onmouseleave = () => kept === null && show(null);
  r.onclick = () => { kept = kept === r.dataset.l ? null : r.dataset.l; show(kept); if (kept !== null) reveal(kept, r); };
});
document.querySelectorAll('button').forEach(b => b.onclick = () => {
  document.querySelectorAll('button').forEach(o => o.setAttribute('aria-pressed', o === b));
  document.querySelectorAll('table.code').forEach(t => t.hidden = t.id !== b.dataset.of);
  if (kept !== null) reveal(kept, document.querySelector('section'));
});
"""


def page(inspection: Any) -> str:
    """The HTML page of an Inspection (report.py)."""
    lines = {line.place.lines[0] for line in (*inspection.sass, *inspection.ptx) if line.place.lines}
    numbers = {at: number for number, at in enumerate(sorted(lines))}
    left = "".join(_source(one, inspection, numbers) for one in inspection.sources)
    right = "".join(
        f'<table class="code" id="{kind}"{" hidden" if kind == "ptx" else ""}>{_code(listing, numbers)}</table>'
        for kind, listing in (("sass", inspection.sass), ("ptx", inspection.ptx))
    )
    buttons = "".join(
        f'<button data-of="{kind}" aria-pressed="{pressed}">{kind.upper()}</button> '
        for kind, pressed in (("sass", "true"), ("ptx", "false"))
    )
    title = f"{escape(inspection.title)} <small>{escape(inspection.arch)}</small>"
    head = f"<dl>{_cards(inspection)}</dl>" + "".join(f'<p class="warning">{escape(line)}</p>' for line in inspection.warnings)
    return _document(f"{inspection.title}, {inspection.arch}", title, head, left, f"<nav>{buttons}</nav>{right}")


def page_of_difference(difference: Any) -> str:
    """The HTML page of a Difference (compare.py): two inspections side by side."""
    kinds = [row for row in difference.figures if row[0].startswith(" ")]
    cards = "".join(_card(name, f"{a} → {b}" if a != b else a) for name, a, b in difference.figures if not name.startswith(" "))
    left = []
    for row in difference.lines:
        counts = [one[2] or "" if one else "" for one in row]
        text = (row.before or row.after)[1]
        left.append(f'<tr class="{_changed(row)}">{"".join(_cell(x, "n") for x in (_sign(row), *counts))}{_cell(text)}</tr>')
    for name, before, after in kinds:
        left.append(f"<tr>{''.join(_cell(x, 'n') for x in (' ', before, after))}{_cell(f'{name} {after - before:+}')}</tr>")
    right = []
    for row in difference.instructions():
        texts = "".join(_cell(one.text if one else "") for one in row)
        place = (row.after or row.before).place
        line = place.lines[0][1] if place.lines else ""
        cells = f"{_cell(_sign(row), 'n')}{_cell(line, 'n')}{texts}{_cell(place.op, 'op')}"
        right.append(f'<tr class="{_changed(row)}">{cells}</tr>')
    title = " <small>and</small> ".join(map(escape, difference.titles))
    tables = (f"<table>{''.join(rows)}</table>" for rows in (left, right))
    return _document(" and ".join(difference.titles), title, f"<dl>{cards}</dl>", *tables)


def embed_page(document: str) -> str:
    """A page as a part of another, such as the output of a notebook's cell."""
    return f'<iframe srcdoc="{escape(document)}" style="width: 100%; height: 40em; border: 0"></iframe>'


def _document(name, title, head, left, right):
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(name)}</title><style>{STYLE}</style>\n'
        f"<header><h1>{title}</h1>{head}</header>\n<main><section>{left}</section>\n<section>{right}</section></main>\n"
        f"<script>{SCRIPT}</script></html>\n"
    )


def _cards(figures: Figures):
    occupancy = figures.occupancy
    cards = [
        _card("registers a thread", figures.registers),
        _card("bytes spilled", figures.spill_bytes, bad=figures.spill_bytes),
        _card("bytes of local memory", figures.local_bytes, bad=figures.local_bytes),
        _card("bytes of shared memory", figures.shared_bytes),
        _card("instructions", sum(figures.instructions.values())),
    ]
    if occupancy:
        detail = f"{occupancy.blocks} x {figures.threads} threads; {' and '.join(occupancy.limiters)}"
        cards.append(_card("occupancy", f"{occupancy.warps} of {occupancy.most} warps <small>{detail}</small>"))
    return "".join(cards)


def _card(name, value, bad=False):
    return f"<div{' class=bad' if bad else ''}><dt>{escape(name)}</dt><dd>{value}</dd></div>"


def _source(one, inspection: Any, numbers):
    maximum = max((sum(kinds.values()) for kinds in inspection.counts.values()), default=1)
    rows = []
    for number, text in enumerate(one.lines, one.first):
        at = one.file, number
        kinds = inspection.counts.get(at, Counter())
        count = sum(kinds.values())
        top = "  ".join(f"{name} {n}" for name, n in kinds.most_common(TOP))
        bar = f'<i style="width:{max(2, round(70 * count / maximum))}px" title="{count} instructions"></i>' if count else ""
        cells = f'{_cell(number, "n")}{_cell(text)}<td class="bar">{bar}</td>{_cell(count or "", "n")}{_cell(top, "top")}'
        rows.append(f"<tr{_tag(numbers.get(at))}>{cells}</tr>")
    return f"<h2>{escape(basename(one.file))}</h2><table>{''.join(rows)}</table>"


def _code(lines, numbers):
    rows, last = [], None
    for text, place in lines:
        number = numbers.get(place.lines[0]) if place.lines else None
        at, op, kind = (place.lines[0][1] if place.lines else "", place.op, "begin") if place != last else ("", "", "")
        rows.append(f"<tr{_tag(number, kind)}>{_cell(at, 'n')}{_cell(text)}{_cell(op, 'op')}</tr>")
        last = place
    return "".join(rows)


def _tag(number, css_class=""):
    """The HTML attributes of a table row that belongs to the source line with this number, None for none."""
    if number is None:
        return f' class="{css_class}"' if css_class else ""
    return f' class="c{number % len(COLOURS)} {css_class}" data-l="{number}"'


def _cell(value, kind=""):
    return f"<td{f' class={kind}' if kind else ''}>{escape(str(value))}</td>"


def _sign(row):
    return row.mark if None in row else " "


def _changed(row):
    return {"+": "plus", "-": "minus"}.get(_sign(row), "")
