"""Pictures of masks: `python -m attention show file.py:mask`, `... --causal --window 128,0`.

A mask is a function of the file, as attention.forward takes it, or one of forward's options, or both. What it indexes besides
i, j, b and h are the file's arrays of its arguments' names. Which blocks of keys are skipped, masked or taken whole the kernel
that asks it for forward says (softmax/key_block_lists.py); what they hold the formula (reference/scores.py).

The text has a block of keys as wide as `--block` is in the picture: `#` where all of a block is seen and no mask is asked for,
`o` and `:` where all or some of a part is seen, `.` where nothing is, in a block that is worked on, and blanks for blocks that
are passed by. `--svg FILE` and `--png FILE` draw the same in colours."""

import argparse
import inspect
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tiles import Hazard, draw, inlined
from tiles.arrays import Operand
from tiles.frameworks import describe
from tiles.inspect.command import module_at
from tiles.launch import kernel_for

from .reference.scores import ReferenceVariant
from .softmax import key_block_lists as lists
from .softmax.assembled import build_variant
from .softmax.call_options import ends_of
from .softmax.python_functions import evaluated

SKIPPED, PARTIAL, FULL = range(3)  # classes of blocks, as the kernel numbers them
WIDE, SIDE = 96, 384  # characters of a line, and pixels of the longer side
FINE = 64  # parts of that side whose share of pairs a picture shows
COLOURS = {SKIPPED: "#f0f2f4", PARTIAL: draw.colour(0, -1), FULL: draw.colour(0, 6)}
SEEN = draw.colour(0, 4)


class Drawn(NamedTuple):
    """A mask of q queries and k keys, in blocks of `rows` and `cols`: the class of each block, and of each pair whether it is
    seen."""

    name: str
    rows: int
    cols: int
    blocks: np.ndarray
    seen: np.ndarray

    @property
    def size(self) -> tuple[int, int]:
        """(q, k)"""
        queries, keys = self.seen.shape
        return queries, keys

    def share(self, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        """Of the parts between these edges, which share of the pairs is seen; NaN of parts without any."""
        summed = np.pad(self.seen.cumsum(0, dtype=np.int64).cumsum(1), ((1, 0), (1, 0)))
        rows, cols = (np.minimum(edges, end) for edges, end in zip((rows, cols), self.size))
        corners = summed[np.ix_(rows, cols)]
        with np.errstate(invalid="ignore"):
            return np.diff(np.diff(corners, axis=0), axis=1) / np.outer(np.diff(rows), np.diff(cols))


def drawn(
    name: str,
    q: int,
    k: int,
    *,
    mask: Callable | None = None,
    aux: Sequence[np.ndarray] = (),
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    rows: int = 128,
    cols: int = 128,
    batch: int = 0,
    head: int = 0,
) -> Drawn:
    """What forward makes of a mask and these options for one sequence and head. ValueError, TypeError: it refuses them, or the
    mask reads what its arrays do not have."""
    if q < 1 or k < 1 or rows % lists.ROWS or cols % lists.ROWS or min(rows, cols) < lists.ROWS:
        raise ValueError(f"blocks must be multiples of {lists.ROWS}, and lengths positive: {q=}, {k=}, {rows=}, {cols=}")
    if batch < 0 or head < 0:
        raise ValueError(f"batch and head must not be negative: {batch=}, {head=}")
    arrays, one = [describe(x, "aux") for x in aux], None
    if mask is not None:
        evaluated("mask", mask, [x.form for x in arrays])
        inner = inlined(mask)

        def one(b, h, i, j, *aux):
            return inner(batch, head, i, j, *aux)

    spec = build_variant(1.0, causal, ends_of(window), mask=one)
    tiles, keys = -(-q // rows), -(-k // cols)
    classes = np.zeros((1, 1, tiles, keys), np.int8)
    unseen = np.zeros((1, 1, tiles, lists.BOTH * keys), np.int8)
    arrays = [describe(classes, "classes"), describe(unseen, "unseen"), *arrays]
    said: dict[str, Any] = {name: x for name, x in spec.numbers.items() if name in spec.variant.params}
    for place, array in enumerate(arrays):
        said[f"aux{place - 2}" if place > 1 else ("classes", "unseen")[place]] = Operand(place, array.form)
    survey = lists.Survey(spec.variant, rows, cols, tuple(len(x.form.shape) for x in arrays[2:]))
    groups = -(-keys // lists.WARPS)
    launch = kernel_for(survey, survey, None).bind(
        tiles * groups, q_len=q, kv_len=k, blocks=tiles, heads=1, groups=groups, **said
    )
    i, j = np.arange(q)[:, None], np.arange(k)[None]
    try:
        launch.run(0, [x.pointer for x in arrays])
        seen = ReferenceVariant(causal, window, mask=mask, aux=tuple(aux)).visible(batch, head, i, j, k - q)
    except (Hazard, IndexError) as error:
        sizes = ", ".join(f"{x.shape}" for x in aux) or "none"
        told = getattr(error, "cause", error)
        raise ValueError(f"{name}: {told}, for {batch=}, {head=}, {q=}, {k=} and arrays of shapes {sizes}") from None
    return Drawn(name, rows, cols, classes[0, 0], seen)


# ---- text ----------------------------------------------------------------------------------------------------------
def summary(of: Drawn) -> tuple[str, str]:
    """Two lines about a mask: its blocks, and what is seen."""
    skipped, partial, full = (int((of.blocks == kind).sum()) for kind in (SKIPPED, PARTIAL, FULL))
    (queries, keys), work = of.size, (partial + full) / of.blocks.size
    return (
        f"{queries} queries, {keys} keys, blocks of {of.rows} x {of.cols}: {skipped} skipped, {partial} partial, {full} full",
        f"worked on: {work:.2f} of the blocks; seen: {of.seen.mean():.2f} of the pairs",
    )


def _edges(length: int, block: int, parts: int) -> np.ndarray:
    """Where the parts of every block begin, `parts` of each, and where the last ends."""
    steps = np.arange(-(-length // block) * parts + 1)
    return steps // parts * block + steps % parts * block // parts


def text(of: Drawn) -> list[str]:
    """The lines that the module describes."""
    tiles, count = of.blocks.shape
    wide = max(1, min(8, of.cols, WIDE // count))
    high = max(1, min(wide // 2, of.rows))
    share = of.share(_edges(of.size[0], of.rows, high), _edges(of.size[1], of.cols, wide))
    classes = of.blocks.repeat(high, 0).repeat(wide, 1)
    signs = np.select(
        [np.isnan(share) | (classes == SKIPPED), classes == FULL, share == 1, share > 0], [" ", "#", "o", ":"], "."
    )
    margin = len(str(of.size[0]))
    lines = [f"{of.name}: {summary(of)[0]};", summary(of)[1]]
    for at, row in enumerate(signs[~np.isnan(share).all(1)]):
        start = f"{at // high * of.rows}" if at % high == 0 else ""
        lines.append(f"{start:>{margin}} {''.join(row)}".rstrip())
    return lines


# ---- SVG -----------------------------------------------------------------------------------------------------------
def panel(of: Drawn) -> draw.Panel:
    """The picture's part for a mask."""
    unit = SIDE / max(of.size)
    high, wide = (max(1, min(block, round(FINE * block / max(of.size)))) for block in (of.rows, of.cols))
    rows, cols = _edges(of.size[0], of.rows, high), _edges(of.size[1], of.cols, wide)
    share = np.nan_to_num(of.share(rows, cols))

    def box(x, y, top, bottom, left, right, fill, style="stroke:none"):
        bottom, right = min(bottom, of.size[0]), min(right, of.size[1])
        place = f'x="{x + left * unit:g}" y="{y + top * unit:g}"'
        size = f'width="{(right - left) * unit:g}" height="{(bottom - top) * unit:g}"'
        return f'<rect {place} {size} fill="{fill}" style="{style}"/>'

    def parts(x, y):
        for (r, c), kind in np.ndenumerate(of.blocks):
            top, left = r * of.rows, c * of.cols
            yield box(x, y, top, top + of.rows, left, left + of.cols, COLOURS[int(kind)])
        partial = (of.blocks == PARTIAL).repeat(high, 0).repeat(wide, 1)
        for r, line in enumerate(np.where(partial, share, 0)):
            starts = [0, *np.flatnonzero(np.diff(line)) + 1, len(line)]
            for start, end in itertools.pairwise(starts):
                if line[start]:
                    style = f"stroke:none;fill-opacity:{line[start]:.2g}"
                    yield box(x, y, rows[r], rows[r + 1], cols[start], cols[end], SEEN, style)
        for (r, c), _ in np.ndenumerate(of.blocks):
            top, left = r * of.rows, c * of.cols
            yield box(x, y, top, top + of.rows, left, left + of.cols, "none", "stroke:#fff")

    (width, height), lines = (round(n * unit) for n in of.size[::-1]), summary(of)
    below = ("grey blocks are skipped, bright ones masked,", "dark ones whole: there no mask is asked for")
    return draw.Panel(of.name, (lines[0].partition(": ")[2], lines[1]), max(width, 250), height, parts, below)


# ---- command -------------------------------------------------------------------------------------------------------
def loaded(place: str) -> tuple[Callable, tuple]:
    """(the function, the arrays that it reads) of "file.py:function". ValueError: there is no such function or array."""
    path, _, name = place.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"{place}: must be a Python file and a function in it, such as masks.py:documents")
    module = module_at(path)
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        raise ValueError(f"{place}: {path} has no function {name}")
    missing = [x for x in [*inspect.signature(function).parameters][4:] if not hasattr(module, x)]
    if missing:
        raise ValueError(f"{place}: takes {', '.join(missing)}, and {path} has no array of that name to show it with")
    return function, tuple(np.asarray(getattr(module, x)) for x in [*inspect.signature(function).parameters][4:])


def _window(words: str) -> tuple[int | None, int | None]:
    """(left, right) of "128,0"; an end that is left out is open."""
    try:
        left, right = (int(word) if word.strip() else None for word in words.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"say left,right, such as 128,0, got {words!r}") from None
    return left, right


def _block(words: str) -> tuple[int, int]:
    """(rows, keys) of "128" or "192x128"."""
    rows, _, cols = words.partition("x")
    if not rows.isdecimal() or not (cols or rows).isdecimal():
        raise argparse.ArgumentTypeError(f"say 128 or 192x128, queries and keys, got {words!r}")
    return int(rows), int(cols or rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("mask", nargs="?", help="file.py:function, mask(b, h, i, j, *aux) as attention.forward takes it")
    parser.add_argument("--causal", action="store_true", help="as forward's")
    parser.add_argument("--window", type=_window, help="as forward's: 128,0; an end that is left out is open")
    parser.add_argument("--q", type=int, default=512, help="queries (default: %(default)s)")
    parser.add_argument("--k", type=int, help="keys (default: as many)")
    parser.add_argument("--block", type=_block, default=(128, 128), help="queries and keys of a block: 128 (default), 192x128")
    parser.add_argument("--batch", type=int, default=0, help="which sequence (default: %(default)s)")
    parser.add_argument("--head", type=int, default=0, help="which head (default: %(default)s)")
    parser.add_argument("--svg", type=Path, help="draw the picture to this file, too")
    parser.add_argument("--png", type=Path, help="the same as PNG, by CairoSVG (pip install cairosvg)")


def main(given: argparse.Namespace) -> int:
    """`python -m attention show ...`; the exit code. ValueError, TypeError, RuntimeError: what is wrong."""
    mask, aux = loaded(given.mask) if given.mask else (None, ())
    options = ["causal"] * given.causal + [f"window={given.window}"] * (given.window is not None)
    name = ", ".join([*([mask.__name__] if mask else ()), *options]) or "all"
    rows, cols = given.block
    of = drawn(
        name, given.q, given.k or given.q, mask=mask, aux=aux, causal=given.causal, window=given.window,
        rows=rows, cols=cols, batch=given.batch, head=given.head,
    )  # fmt: skip
    print(*text(of), sep="\n")
    picture = draw.svg(panel(of))
    if given.svg:
        given.svg.write_text(picture)
    if given.png:
        given.png.write_bytes(draw.png(picture))
    return 0
