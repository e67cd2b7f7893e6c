"""Draws masks: `python -m attention show file.py:mask`, `... --causal --window 128,0`.

A mask is a function in the file, as attention.forward takes it, or one of forward's options, or both. The arrays that it
indexes with i, j, b and h are the file's arrays with the names of its further arguments. The kernel that surveys a mask for
forward (kernels/softmax/key_block_lists.py) says which blocks of keys are skipped, masked or full; the reference formula
(reference/scores.py) says which pairs are visible.

The text picture shows a block of `--block` as several characters: `#` in a full block, where the kernel evaluates no mask; `o`
and `:` where all or some pairs of a part are visible; `.` where none is, in a block that the kernel computes; and blanks for
skipped blocks. `--svg FILE` and `--png FILE` draw the same in colours."""

import argparse
import inspect
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tiles import Hazard, draw, inlined
from tiles.inspect.command import module_at
from tiles.launching.arrays import Operand
from tiles.launching.frameworks import describe
from tiles.launching.launch import kernel_for

from .kernels.softmax import key_block_lists
from .options import ScoreOptions
from .plans.softmax.call_options import window_ends
from .plans.softmax.variant_spec import build_variant
from .reference.scores import ReferenceVariant
from .scoring.python_functions import check_function

SKIPPED, PARTIAL, FULL = range(3)  # classes of blocks, numbered as in the kernel
LINE_WIDTH, PICTURE_SIDE = 96, 384  # characters in a line; pixels of the longer side
PARTS_PER_SIDE = 64  # parts of the longer side, for each of which the picture shows the fraction of visible pairs
COLOURS = {SKIPPED: "#f0f2f4", PARTIAL: draw.colour(0, -1), FULL: draw.colour(0, 6)}
VISIBLE = draw.colour(0, 4)
LEGEND = ("grey blocks are skipped, bright ones masked,", "dark ones full: the mask is not evaluated there")


class MaskDrawing(NamedTuple):
    """A mask of q queries and k keys, in blocks of rows x cols. blocks: the class of each block; visible (q, k): whether each
    query sees each key."""

    name: str
    rows: int
    cols: int
    blocks: np.ndarray
    visible: np.ndarray

    @property
    def size(self) -> tuple[int, int]:
        """(q, k): how many queries and keys the mask has."""
        queries, keys = self.visible.shape
        return queries, keys

    def _repr_svg_(self):  # what a notebook shows
        return svg(self)

    def visible_fraction(self, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        """For each part between these edges, the fraction of its pairs that are visible; NaN for parts without pairs."""
        summed = np.pad(self.visible.cumsum(0, dtype=np.int64).cumsum(1), ((1, 0), (1, 0)))
        rows, cols = (np.minimum(edges, end) for edges, end in zip((rows, cols), self.size))
        corners = summed[np.ix_(rows, cols)]
        with np.errstate(invalid="ignore"):
            return np.diff(np.diff(corners, axis=0), axis=1) / np.outer(np.diff(rows), np.diff(cols))


def draw_mask(
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
) -> MaskDrawing:
    """The mask of one sequence and head as forward's kernels see it. ValueError, TypeError: forward refuses the options, or the
    mask reads outside its arrays."""
    if q < 1 or k < 1 or rows % key_block_lists.ROWS or cols % key_block_lists.ROWS or min(rows, cols) < key_block_lists.ROWS:
        raise ValueError(
            f"blocks must be multiples of {key_block_lists.ROWS}, and lengths positive: {q=}, {k=}, {rows=}, {cols=}"
        )
    if batch < 0 or head < 0:
        raise ValueError(f"batch and head must not be negative: {batch=}, {head=}")
    arrays, mask_of_head = [describe(x, "aux") for x in aux], None
    if mask is not None:
        check_function("mask", mask, [x.form for x in arrays])
        inner = inlined(mask)

        def mask_of_head(b, h, i, j, *aux):
            return inner(batch, head, i, j, *aux)

    spec = build_variant(1.0, ScoreOptions(causal, *window_ends(window)), mask=mask_of_head)
    q_tiles, kv_blocks = -(-q // rows), -(-k // cols)
    classes = np.zeros((1, 1, q_tiles, kv_blocks), np.int8)
    unseen = np.zeros((1, 1, q_tiles, key_block_lists.COUNTS * kv_blocks), np.int8)
    arrays = [describe(classes, "classes"), describe(unseen, "unseen"), *arrays]
    params: dict[str, Any] = {name: x for name, x in spec.numbers.items() if name in spec.variant.params}
    for argument, array in enumerate(arrays):
        params[f"aux{argument - 2}" if argument > 1 else ("classes", "unseen")[argument]] = Operand(argument, array.form)
    survey = key_block_lists.ClassifyBlocks(spec.variant, rows, cols, tuple(len(x.form.shape) for x in arrays[2:]))
    groups = -(-kv_blocks // key_block_lists.WARPS)
    launch = kernel_for(survey, survey, None).bind(
        q_tiles * groups, q_len=q, kv_len=k, blocks=q_tiles, heads=1, groups=groups, **params
    )
    i, j = np.arange(q)[:, None], np.arange(k)[None]
    try:
        launch.run(0, [x.pointer for x in arrays])
        visible = ReferenceVariant(causal, window, mask=mask, aux=tuple(aux)).visible(batch, head, i, j, k - q)
    except (Hazard, IndexError) as error:
        sizes = ", ".join(f"{x.shape}" for x in aux) or "none"
        cause = getattr(error, "cause", error)
        where = f"for {batch=}, {head=}, {q=}, {k=} and arrays of shapes {sizes}"
        raise ValueError(f"{name}: {cause}, {where}: draw as many as they are for, by --q and --k") from None
    return MaskDrawing(name, rows, cols, classes[0, 0], visible)


# ---- text ----------------------------------------------------------------------------------------------------------
def summary(drawing: MaskDrawing) -> tuple[str, str]:
    """Two lines about a mask: its blocks, and how much is computed and visible."""
    skipped, partial, full = (int((drawing.blocks == kind).sum()) for kind in (SKIPPED, PARTIAL, FULL))
    (queries, keys), work = drawing.size, (partial + full) / drawing.blocks.size
    return (
        f"{queries} queries, {keys} keys, blocks of {drawing.rows} x {drawing.cols}: "
        f"{skipped} skipped, {partial} partial, {full} full",
        f"computed: {work:.2f} of the blocks; visible: {drawing.visible.mean():.2f} of the pairs",
    )


def _edges(length: int, block: int, parts: int) -> np.ndarray:
    """Where the parts of every block begin, `parts` to a block, and where the last one ends."""
    steps = np.arange(-(-length // block) * parts + 1)
    return steps // parts * block + steps % parts * block // parts


def text(drawing: MaskDrawing) -> list[str]:
    """The lines of the text picture that the module's docstring describes."""
    q_tiles, count = drawing.blocks.shape
    columns_per_block = max(1, min(8, drawing.cols, LINE_WIDTH // count))
    rows_per_block = max(1, min(columns_per_block // 2, drawing.rows))
    fraction = drawing.visible_fraction(
        _edges(drawing.size[0], drawing.rows, rows_per_block), _edges(drawing.size[1], drawing.cols, columns_per_block)
    )
    classes = drawing.blocks.repeat(rows_per_block, 0).repeat(columns_per_block, 1)
    signs = np.select(
        [np.isnan(fraction) | (classes == SKIPPED), classes == FULL, fraction == 1, fraction > 0], [" ", "#", "o", ":"], "."
    )
    margin = len(str(drawing.size[0]))
    lines = [f"{drawing.name}: {summary(drawing)[0]};", summary(drawing)[1]]
    for at, row in enumerate(signs[~np.isnan(fraction).all(1)]):
        start = f"{at // rows_per_block * drawing.rows}" if at % rows_per_block == 0 else ""
        lines.append(f"{start:>{margin}} {''.join(row)}".rstrip())
    return lines


# ---- SVG -----------------------------------------------------------------------------------------------------------
def panel(drawing: MaskDrawing) -> draw.Panel:
    """The panel of the SVG picture for a mask."""
    unit = PICTURE_SIDE / max(drawing.size)
    rows_per_block, columns_per_block = (
        max(1, min(block, round(PARTS_PER_SIDE * block / max(drawing.size)))) for block in (drawing.rows, drawing.cols)
    )
    rows, cols = _edges(drawing.size[0], drawing.rows, rows_per_block), _edges(drawing.size[1], drawing.cols, columns_per_block)
    fraction = np.nan_to_num(drawing.visible_fraction(rows, cols))

    def box(x, y, top, bottom, left, right, fill, style="stroke:none"):
        bottom, right = min(bottom, drawing.size[0]), min(right, drawing.size[1])
        position = f'x="{x + left * unit:g}" y="{y + top * unit:g}"'
        size = f'width="{(right - left) * unit:g}" height="{(bottom - top) * unit:g}"'
        return f'<rect {position} {size} fill="{fill}" style="{style}"/>'

    def parts(x, y):
        for (r, c), kind in np.ndenumerate(drawing.blocks):
            top, left = r * drawing.rows, c * drawing.cols
            yield box(x, y, top, top + drawing.rows, left, left + drawing.cols, COLOURS[int(kind)])
        partial = (drawing.blocks == PARTIAL).repeat(rows_per_block, 0).repeat(columns_per_block, 1)
        for r, line in enumerate(np.where(partial, fraction, 0)):
            starts = [0, *np.flatnonzero(np.diff(line)) + 1, len(line)]
            for start, end in itertools.pairwise(starts):
                if line[start]:
                    style = f"stroke:none;fill-opacity:{line[start]:.2g}"
                    yield box(x, y, rows[r], rows[r + 1], cols[start], cols[end], VISIBLE, style)
        for (r, c), _ in np.ndenumerate(drawing.blocks):
            top, left = r * drawing.rows, c * drawing.cols
            yield box(x, y, top, top + drawing.rows, left, left + drawing.cols, "none", "stroke:#fff")
        for at, words in ((0, "0"), (width / 2, "keys"), (width, str(drawing.size[1]))):
            yield draw.text(x + at, y + height + 13, words, "small")
        yield draw.text_upwards(x - 6, y + height / 2, "queries")

    (width, height), lines = (round(n * unit) for n in drawing.size[::-1]), summary(drawing)
    return draw.Panel(drawing.name, (lines[0].partition(": ")[2], lines[1]), max(width, 250), height, parts)


def svg(*drawings: MaskDrawing) -> str:
    """Masks side by side as one SVG picture, with one legend."""
    first, *others = map(panel, drawings)
    return draw.svg(first._replace(below=LEGEND), *others)


# ---- command -------------------------------------------------------------------------------------------------------
def load_mask(location: str) -> tuple[Callable, tuple]:
    """(the function, the arrays that it reads) of "file.py:function". ValueError: the file has no such function or array."""
    path, _, name = location.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"{location}: must be a Python file and a function in it, such as masks.py:documents")
    module = module_at(path)
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        raise ValueError(f"{location}: {path} has no function {name}")
    missing = [x for x in [*inspect.signature(function).parameters][4:] if not hasattr(module, x)]
    if missing:
        raise ValueError(f"{location}: takes {', '.join(missing)}, and {path} has no array of that name to show it with")
    return function, tuple(np.asarray(getattr(module, x)) for x in [*inspect.signature(function).parameters][4:])


def _window(words: str) -> tuple[int | None, int | None]:
    """(left, right) of the text "128,0"; an end that is left out is open."""
    try:
        left, right = (int(word) if word.strip() else None for word in words.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be left,right, such as 128,0: {words!r}") from None
    return left, right


def _block(words: str) -> tuple[int, int]:
    """(rows, keys) of the text "128" or "192x128"."""
    rows, _, cols = words.partition("x")
    if not rows.isdecimal() or not (cols or rows).isdecimal():
        raise argparse.ArgumentTypeError(f"must be queries x keys, such as 128 or 192x128: {words!r}")
    return int(rows), int(cols or rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m attention show` to a parser."""
    parser.add_argument("mask", nargs="?", help="file.py:function, mask(b, h, i, j, *aux) as attention.forward takes it")
    parser.add_argument("--causal", action="store_true", help="attention.forward's")
    parser.add_argument(
        "--window", type=_window, help="attention.forward's, as left,right: 128,0; an end that is left out is open"
    )
    parser.add_argument("--q", type=int, default=512, help="queries (default: %(default)s)")
    parser.add_argument("--k", type=int, help="keys (default: as many)")
    parser.add_argument("--block", type=_block, default=(128, 128), help="queries and keys of a block: 128 (default), 192x128")
    parser.add_argument("--batch", type=int, default=0, help="which sequence (default: %(default)s)")
    parser.add_argument("--head", type=int, default=0, help="which head (default: %(default)s)")
    parser.add_argument("--svg", type=Path, help="also write the picture to this SVG file")
    parser.add_argument("--png", type=Path, help="also write it as PNG, by CairoSVG (pip install cairosvg)")


def main(arguments: argparse.Namespace) -> int:
    """Run `python -m attention show ...` and return the exit code. ValueError, TypeError, RuntimeError: the arguments are
    wrong."""
    mask, aux = load_mask(arguments.mask) if arguments.mask else (None, ())
    options = ["causal"] * arguments.causal + [f"window={arguments.window}"] * (arguments.window is not None)
    name = ", ".join([*([mask.__name__] if mask else ()), *options]) or "all"
    rows, cols = arguments.block
    drawing = draw_mask(
        name, arguments.q, arguments.k or arguments.q, mask=mask, aux=aux, causal=arguments.causal, window=arguments.window,
        rows=rows, cols=cols, batch=arguments.batch, head=arguments.head,
    )  # fmt: skip
    print(*text(drawing), sep="\n")
    picture = svg(drawing)
    if arguments.svg:
        arguments.svg.write_text(picture)
    if arguments.png:
        arguments.png.write_bytes(draw.png(picture))
    return 0
