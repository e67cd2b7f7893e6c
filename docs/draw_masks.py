"""Draws docs/masks.svg, docs/variants.md's picture: `python docs/draw_masks.py`. `python -m attention show` draws any mask."""

from pathlib import Path

import numpy as np

from attention import show
from tiles import draw

PICTURE = Path(__file__).with_name("masks.svg")
SIZE = 512  # queries, and keys
DOCS = np.repeat(np.arange(4), [128, 150, 42, 192])


def documents(b, h, i, j, docs):
    """A token sees the earlier ones of its document."""
    return (docs[i] == docs[j]) & (j <= i)


def prefix(b, h, i, j):
    """All see the first 140 keys."""
    return (j < 140) | (j <= i)


def global_sliding(b, h, i, j):
    """The first 16 keys see all and are seen by all; the others what is near."""
    return (j < 16) | (i < 16) | ((i - j <= 60) & (j - i <= 60))


def svg():
    pictures = (
        show.draw_mask("window=(100, 0)", SIZE, SIZE, window=(100, 0)),
        show.draw_mask("documents", SIZE, SIZE, mask=documents, aux=(DOCS,)),
        show.draw_mask("prefix", SIZE, SIZE, mask=prefix),
        show.draw_mask("global_sliding", SIZE, SIZE, mask=global_sliding),
    )
    return draw.svg(*map(show.panel, pictures))


if __name__ == "__main__":
    PICTURE.write_text(svg())
