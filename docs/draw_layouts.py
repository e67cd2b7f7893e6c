"""Draws docs/layouts.svg, the README's picture: `python docs/draw_layouts.py`. `python -m tiles layout` draws any tile."""

from pathlib import Path

from tiles import bf16, draw, fp32, rt, st

PICTURE = Path(__file__).with_name("layouts.svg")
BELOW = (
    "A column of chunks, one colour, lies in eight different groups of banks:",
    "its eight rows are read or written at once, without a conflict.",
    "TMA writes this pattern, wgmma and ldmatrix read it.",
)


def svg():
    return draw.svg(draw.register_panel(rt(16, 16, fp32)), *draw.shared_panels(st(64, 64, bf16), BELOW))


if __name__ == "__main__":
    PICTURE.write_text(svg())
