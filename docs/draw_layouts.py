"""Draws docs/layouts.svg, the README's picture, from tiles/layout.py: `python docs/draw_layouts.py`."""

import colorsys
from pathlib import Path

from tiles import layout

PICTURE = Path(__file__).with_name("layouts.svg")
ROW, PAIR, CHUNK = 22, 54, 34  # heights and widths of cells
CHUNK_BYTES, WIDTH, ITEMSIZE = 16, 128, 2  # a shared tile of bf16 in panels of 128 bytes
GROUPS = WIDTH // CHUNK_BYTES
STYLE = """
  text { font-size: 11.5px; font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 }
  .note { fill: #59636e }
  .big, .small { text-anchor: middle }
  .big { font-weight: 600; font-size: 11px }
  .small { font-size: 9px; fill: #59636e }
  rect { stroke: #fff }
"""


def colour(hue, shade=0):
    """One of eight hues, in one of four shades."""
    rgb = colorsys.hls_to_rgb((hue / 8 + 0.56) % 1, 0.87 - 0.055 * shade, 0.62)
    return "#" + "".join(f"{round(255 * x):02x}" for x in rgb)


def text(x, y, words, kind="note"):
    """A line of text; `kind` is one of STYLE's."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def cell(x, y, width, height, fill):
    """A box."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"/>'


def heading(x, *lines):
    """A panel's title and what it shows."""
    for k, line in enumerate(lines):
        yield text(x, (30, 49, 64)[k], line, "note" if k else "title")


def registers(x, y):
    """The 16 x 16 base tile: for each pair of neighbouring elements, the lane that holds it and as which of its eight."""
    for lane in range(layout.LANES):
        for index in range(0, 8, 2):
            row, col = layout.element(lane, index, 16)
            left, top = x + col // 2 * PAIR, y + row * ROW
            yield cell(left, top, PAIR, ROW, colour(lane // 4, lane % 4))
            yield text(left + 13, top + 15, lane, "big")
            yield text(left + 37, top + 15, f"e{index} e{index + 1}", "small")


def shared(x, y, place):
    """Eight rows of a shared tile; `place(row, chunk)` is where a 16-byte chunk is drawn, its colour says which it is."""
    for row in range(8):
        for chunk in range(GROUPS):
            line, group = place(row, chunk)
            left, top = x + group * CHUNK, y + line * CHUNK
            yield cell(left, top, CHUNK, CHUNK, colour(chunk, 1))
            yield text(left + CHUNK / 2, top + 13, f"row {row}", "small")
            yield text(left + CHUNK / 2, top + 27, chunk, "big")


def in_memory(row, chunk):
    """(line of 128 bytes, group of four banks) of a chunk."""
    offset = layout.shared_offset(row, chunk * CHUNK_BYTES // ITEMSIZE, 8, ITEMSIZE, WIDTH)
    return offset // WIDTH, layout.bank(offset) // (layout.BANKS // GROUPS)


def svg():
    """The whole picture."""
    a, b, c, top = 24, 24 + 8 * PAIR + 40, 24 + 8 * (PAIR + CHUNK) + 80, 84
    width, height = c + 8 * CHUNK + 24, top + 16 * ROW + 24
    banks = [text(c + (g + 0.5) * CHUNK, top + 8 * CHUNK + 15, f"{4 * g}–{4 * g + 3}", "small") for g in range(GROUPS)]
    below = top + 8 * CHUNK + 48
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="10" fill="#fff"/>',
        *heading(
            a, "rt(16, 16, fp32): registers", "which of a warp's 32 lanes has an element,", "and which of its eight it is"
        ),
        *registers(a, top),
        *heading(
            b,
            "st(64, 64, bf16): a shared tile",
            "its first eight rows as a kernel names them,",
            "in chunks of 16 bytes, 8 columns each",
        ),
        *shared(b, top, lambda row, chunk: (row, chunk)),
        *heading(c, "the same, as it lies in memory", "128-byte swizzle: chunk XOR row;", "128 bytes a line, all 32 banks"),
        *shared(c, top, in_memory),
        *banks,
        text(c - 20, top + 8 * CHUNK + 15, "banks", "small"),
        text(b, below, "A column of chunks, one colour, lies in eight different groups of banks:"),
        text(b, below + 16, "its eight rows are read or written at once, without a conflict."),
        text(b, below + 32, "TMA writes this pattern, wgmma and ldmatrix read it."),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(svg())
