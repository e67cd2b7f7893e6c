"""Pictures of layouts, all computed from tiles/layout.py: `python -m tiles layout rt 16 16 fp32`, `... st 64 64 bf16`.

A register tile is drawn by lanes and elements; a shared tile by its 16-byte chunks, as a kernel names them and as they lie in
the banks. `--access` shows how often the banks are hit by one of ACCESSES; `--svg FILE` and `--png FILE` draw a picture.
"""

import argparse
import colorsys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from . import layout
from .dtypes import DTYPES, tf32
from .types import rt, st

ROW, PAIR, CHUNK_WIDTH = 22, 54, 34  # heights and widths of cells
MARGIN, GAP, TOP = 24, 40, 84
CHUNK_BYTES = 16  # what a swizzle moves as one
WORD = layout.BANKS * 4  # bytes that the banks serve at once
LINES = 8  # rows after which a shared layout repeats
STYLE = """
  text { font-size: 11.5px; font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 }
  .note { fill: #59636e }
  .big, .small { text-anchor: middle }
  .big { font-weight: 600; font-size: 11px }
  .small { font-size: 9px; fill: #59636e }
  rect { stroke: #fff }
"""


# ---- accesses ------------------------------------------------------------------------------------------------------
def ldmatrix(tile):
    """ldmatrix or stmatrix (x4) of 16 rows and 32 bytes: four turns, in each of which eight lanes take 16 bytes of a row."""
    half = CHUNK_BYTES // tile.dtype.itemsize
    for matrix in range(4):
        row, col = matrix % 2 * 8, matrix // 2 * half
        yield [(tile.offset((row + k) % tile.rows, col % tile.cols), CHUNK_BYTES) for k in range(8)]


def column(tile):
    """32 lanes read the first column, a row each."""
    yield [(tile.offset(lane % tile.rows, 0), tile.dtype.itemsize) for lane in range(layout.LANES)]


def row(tile):
    """32 lanes read neighbouring words of the first row, 4 bytes each."""
    step = 4 // tile.dtype.itemsize
    yield [(tile.offset(0, lane * step % tile.cols), 4) for lane in range(layout.LANES)]


def pairs(tile):
    """Each lane stores the first neighbouring elements that it holds of a register tile, two or, of one byte, four; the banks
    serve 128 bytes a turn, so pairs of 4-byte elements take two."""
    run = tile.dtype.run
    lanes = WORD // (run * tile.dtype.itemsize)
    for first in range(0, layout.LANES, lanes):
        elements = (layout.element(lane, 0, 8 * run, run) for lane in range(first, first + lanes))
        yield [(tile.offset(*at), run * tile.dtype.itemsize) for at in elements]


ACCESSES = {"ldmatrix": ldmatrix, "column": column, "row": row, "pairs": pairs}


def bank_loads(turn):
    """How many different words each bank must serve for [(byte offset, bytes)]; the access takes the greatest of them in
    cycles."""
    words = {offset // 4 + k for offset, size in turn for k in range(max(1, size // 4))}
    counts = Counter(word % layout.BANKS for word in words)
    return [counts[bank] for bank in range(layout.BANKS)]


def cost(turn):
    """(cycles that the banks take, cycles that as many words would take without a conflict)"""
    loads = bank_loads(turn)
    return max(loads), -(-sum(loads) // layout.BANKS)


# ---- text ----------------------------------------------------------------------------------------------------------
def base_tile(tile):
    """(rows, cols) after which the layout of a register tile repeats."""
    return (16, 8 * tile.dtype.run)[:: 1 if tile.layout == "row" else -1]


def lanes_of_elements(tile):
    """{(row, col): (lane, index)} of the first base tile of a register tile."""
    lanes, (rows, cols) = {}, base_tile(tile)
    for lane in range(layout.LANES):
        for index in range(tile.elements):
            row, col = tile.element(lane, index)
            if row < rows and col < cols:
                lanes[row, col] = lane, index
    return lanes


def register_text(tile):
    """The first base tile as text, `lane:element` for each place; the layout repeats after it."""
    lanes, (rows, cols) = lanes_of_elements(tile), base_tile(tile)
    yield f"{tile}: lane:element of the first {rows} x {cols}; a lane holds {tile.elements} elements in all"
    yield "      " + "".join(f"{col:>7}" for col in range(cols))
    for r in range(rows):
        yield f"{r:>5} " + "".join(f"{lane:>4}:{index:<2}" for lane, index in (lanes[r, c] for c in range(cols)))


def in_memory(tile):
    """position(row, chunk) -> (line of 128 bytes, group of four banks) of a 16-byte chunk of the tile's first panel."""

    def position(row, chunk):
        offset = tile.offset(row, chunk * CHUNK_BYTES // tile.dtype.itemsize)
        return offset // WORD, layout.bank(offset) // (CHUNK_BYTES // 4)

    return position


def shared_text(tile):
    """Which banks hold each chunk of the first rows of the first panel."""
    chunks = tile.width // CHUNK_BYTES
    across = CHUNK_BYTES // tile.dtype.itemsize
    yield f"{tile}: banks of each {CHUNK_BYTES}-byte chunk ({across} columns), rows 0 to {LINES - 1}"
    yield f"panels of {tile.width} bytes ({tile.panel_cols} columns), {tile.panels} of them, {tile.panel_bytes} bytes apart"
    yield "  row " + "".join(f"{f'chunk {c}':>9}" for c in range(chunks))
    position = in_memory(tile)
    for r in range(LINES):
        groups = [position(r, c)[1] for c in range(chunks)]
        yield f"{r:>5} " + "".join(f"{f'{4 * g}-{4 * g + 3}':>9}" for g in groups)


def access_text(tile, name):
    """What an access costs: for each turn how many words every bank serves."""
    yield f"{name}: {' '.join((ACCESSES[name].__doc__ or '').split())}"
    for k, turn in enumerate(ACCESSES[name](tile)):
        cycles, least = cost(turn)
        verdict = "no conflict" if cycles == least else f"{cycles} cycles where {least} would do"
        yield f"  turn {k}: words a bank, banks 0 to {layout.BANKS - 1}: {' '.join(map(str, bank_loads(turn)))}   {verdict}"


# ---- SVG -----------------------------------------------------------------------------------------------------------
class Panel(NamedTuple):
    """A part of a picture: its title and notes, its size, the parts that `draw(x, y)` yields, words below."""

    title: str
    notes: tuple
    width: int
    height: int
    draw: object
    below: tuple = ()


def colour(hue, shade=0):
    """One of eight hues, in one of four shades."""
    rgb = colorsys.hls_to_rgb((hue / 8 + 0.56) % 1, 0.87 - 0.055 * shade, 0.62)
    return "#" + "".join(f"{round(255 * x):02x}" for x in rgb)


def text(x, y, words, kind="note"):
    """A line of text; `kind` is one of STYLE's."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def text_upwards(x, y, words):
    """A line of small text that runs from bottom to top, as the name of a vertical axis."""
    return f'<g transform="rotate(-90 {x:g} {y:g})">{text(x, y, words, "small")}</g>'


def cell(x, y, width, height, fill):
    """A rectangle, the box of one cell, as SVG."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"/>'


def register_panel(tile):
    """The first base tile: for each run of elements that a lane holds side by side, or one below the other, that lane."""
    down, run, (rows, cols) = tile.layout == "col", tile.dtype.run, base_tile(tile)
    wide = PAIR if down else PAIR * run // 2

    def draw(x, y):
        for (r, c), (lane, index) in lanes_of_elements(tile).items():
            along, across = (r, c) if down else (c, r)
            if along % run:
                continue
            left, top = (x + c * PAIR // 2, y + r * ROW) if not down else (x + c * PAIR, y + r // run * ROW)
            yield cell(left, top, wide, ROW, colour(lane // 4, lane % 4))
            yield text(left + 13, top + 15, lane, "big")
            label = f"e{index} e{index + 1}" if run == 2 else f"e{index}–{index + run - 1}"
            yield text(left + wide // 2 + 10, top + 15, label, "small")

    notes = "which of a warp's 32 lanes has an element,", f"and which of its {tile.elements} it is"
    width, height = (cols * PAIR, rows * ROW // run) if down else (cols * PAIR // 2, rows * ROW)
    return Panel(f"{tile}: registers", notes, width, height, draw)


def chunks(tile, position):
    """draw(x, y) for the chunks of the first rows; `position(row, chunk)` is where one is drawn, its colour says which it
    is."""

    def draw(x, y):
        for r in range(LINES):
            for chunk in range(tile.width // CHUNK_BYTES):
                line, group = position(r, chunk)
                left, top = x + group * CHUNK_WIDTH, y + line * CHUNK_WIDTH
                yield cell(left, top, CHUNK_WIDTH, CHUNK_WIDTH, colour(chunk, 1))
                yield text(left + CHUNK_WIDTH / 2, top + 13, f"row {r}", "small")
                yield text(left + CHUNK_WIDTH / 2, top + 27, chunk, "big")

    return draw


def shared_panels(tile, below=()):
    """The first rows of a shared tile as a kernel names them, and as they lie in memory."""
    groups, lines = WORD // CHUNK_BYTES, LINES * tile.width // WORD

    def memory(x, y):
        yield from chunks(tile, in_memory(tile))(x, y)
        for g in range(groups):
            yield text(x + (g + 0.5) * CHUNK_WIDTH, y + lines * CHUNK_WIDTH + 15, f"{4 * g}–{4 * g + 3}", "small")
        yield text(x - 20, y + lines * CHUNK_WIDTH + 15, "banks", "small")

    named = (
        "its first eight rows as a kernel names them,",
        f"in chunks of 16 bytes, {CHUNK_BYTES // tile.dtype.itemsize} columns each",
    )
    caption = f"{tile.width}-byte swizzle: chunk XOR row;", "128 bytes a line, all 32 banks"
    drawn = chunks(tile, lambda r, chunk: (r, chunk))
    yield Panel(f"{tile}: a shared tile", named, tile.width // CHUNK_BYTES * CHUNK_WIDTH, LINES * CHUNK_WIDTH, drawn, below)
    yield Panel("the same, as it lies in memory", caption, groups * CHUNK_WIDTH, lines * CHUNK_WIDTH + 24, memory)


def svg(*panels):
    """An SVG of panels side by side."""
    x, parts = MARGIN, []
    height = TOP + max(p.height + (32 + 16 * len(p.below) if p.below else 0) for p in panels) + MARGIN
    for panel in panels:
        for y, line, kind in zip((30, 49, 64), (panel.title, *panel.notes), ("title", "note", "note")):
            parts.append(text(x, y, line, kind))
        parts += panel.draw(x, TOP)
        parts += [text(x, TOP + panel.height + 48 + 16 * k, line) for k, line in enumerate(panel.below)]
        x += panel.width + GAP
    width = x - GAP + MARGIN
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="10" fill="#fff"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def png(picture):
    """An SVG picture as PNG, two pixels a unit. RuntimeError: what is missing."""
    try:
        from cairosvg import svg2png
    except (ImportError, OSError) as error:  # OSError: without the library cairo
        raise RuntimeError(f"PNG pictures take CairoSVG (pip install cairosvg) and the system's cairo: {error}") from None
    return svg2png(picture.encode(), scale=2)


# ---- command -------------------------------------------------------------------------------------------------------
def main(arguments) -> int:
    """`python -m tiles layout ...`; the exit code."""
    names = {str(d): d for d in (*DTYPES.values(), tf32)}
    parser = argparse.ArgumentParser(prog="python -m tiles layout", description="Draw where the elements of a tile lie.")
    parser.add_argument("kind", choices=("rt", "st"), help="a register tile, or one in shared memory")
    parser.add_argument("rows", type=int)
    parser.add_argument("cols", type=int)
    parser.add_argument("dtype", choices=names)
    parser.add_argument("--layout", choices=("row", "col"), default="row", help="of a register tile")
    parser.add_argument("--width", type=int, default=0, help="bytes of a shared tile's panels: 128, 64 or 32")
    parser.add_argument("--access", choices=ACCESSES, help="of a shared tile: what the banks do")
    parser.add_argument("--svg", type=Path, help="draw the picture to this file, too")
    parser.add_argument("--png", type=Path, help="the same as PNG, by CairoSVG (pip install cairosvg)")
    options = parser.parse_args(arguments)
    misplaced = (options.width or options.access) if options.kind == "rt" else options.layout != "row"
    if misplaced:
        parser.error("--width and --access are for st, --layout is for rt")
    try:
        shape = options.rows, options.cols, names[options.dtype]
        tile = rt(*shape, options.layout) if options.kind == "rt" else st(*shape, options.width)
    except ValueError as error:
        parser.error(str(error))
    if isinstance(tile, rt):
        lines, panels = register_text(tile), [register_panel(tile)]
    else:
        lines, panels = shared_text(tile), shared_panels(tile)
    print(*lines, *(access_text(tile, options.access) if options.access else ()), sep="\n")
    picture = svg(*panels)
    try:
        if options.svg:
            options.svg.write_text(picture)
        if options.png:
            options.png.write_bytes(png(picture))
    except (OSError, RuntimeError) as error:
        parser.error(str(error))
    return 0
