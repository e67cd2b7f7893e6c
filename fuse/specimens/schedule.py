"""How the specimens' schedule follows from a problem, and what of their text varies with it.

    text = printed("gated_mlp", chosen(4096, 4096, 14336, weights=2), transposed=True)

The three specimens are one kernel. A block has 128 rows of y, two consumers of 64, and one producer; what they agree on is the
width of a tile, the number of its parts, the slots of a ring, and how weights lie. What is measured stands in bench/NOTES.md.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROWS, STEP = 128, 64  # of a tile of y; along k
OVERHEAD = 16  # columns' worth of time that a tile takes besides its products
WIDTHS = 256, 192, 128  # the wider, the less is read for a product; but the last wave may be emptier
SHARED = 227 * 1024
HERE = Path(__file__).parent


class Schedule(NamedTuple):
    """columns: of a tile of accumulators, of all weights together. parts: in so many a tile of y leaves. stages: slots of a
    ring. group: rows of tiles in a band. waves: tiles that a block computes one after the other."""

    columns: int
    parts: int
    stages: int
    group: int
    waves: int


def chosen(m: int, k: int, n: int, weights: int = 1, processors: int = 132) -> Schedule:
    """The schedule for x (m, k) and `weights` matrices (k, n) that share it: that with which all waves together are narrowest.

    Tiles of (K, N) weights are cut by panels of 64 columns, so two weights share 256 or 128. Norms of rows and narrow products
    are kernels of their own whatever the shape: from 512 rows on they never paid inside. k decides nothing."""

    def waves(columns):
        return -(-(-(-m // ROWS) * -(-n * weights // columns)) // processors)

    columns = min((c for c in WIDTHS if c % (64 * weights) == 0), key=lambda c: waves(c) * (c + OVERHEAD))
    parts = columns // 64
    room = SHARED - 2 * 1024 - ROWS * 2 * (columns // weights // parts)
    stages = min(4, room // (2 * STEP * (ROWS + columns)))  # a fifth one gained nothing
    return Schedule(columns, parts, stages, min(16, -(-m // ROWS)), waves(columns))


def printed(name: str, schedule: Schedule, transposed: bool = False) -> str:
    """A specimen's text with another schedule; `transposed`: its weights are (N, K). All that varies, besides the fills of more
    operands and the expression that leaves:

    - constants: columns, parts, stages, group;
    - a line that sends for each part, in the loop with two steps between, and again at the end; 2 parts - 1 steps at least;
    - of transposed weights: mma_ABt, (col, i) for (i, col), and the tile's shape the other way round."""
    text = (HERE / f"{name}.py").read_text()
    columns, parts, stages, group, _ = schedule
    halves = "gated" in name
    text = text.replace("STAGES, GROUP = 2, 4, 16", f"STAGES, GROUP = 2, {stages}, {group}").replace("256", str(columns))
    if columns != 256:
        text = re.sub(r"^.*4 \* col.*\n|^ +acc = step\(step.*\n", _lines(parts, halves), text, flags=re.M)
        text = text.replace("j + 7", f"j + {2 * parts - 1}").replace("max(7", f"max({2 * parts - 1}")
    if transposed:
        text = text.replace("_AB(", "_ABt(").replace(f"st(64, {columns}, bf16)", f"st({columns}, 64, bf16)")
        text = text.replace("st(64, W.cols // 2, bf16)", "st(W.rows // 2, 64, bf16)").replace("rt(16, W.cols", "rt(16, W.rows")
        text = text.replace("(i, col)", "(col, i)").replace("(0, col)", "(col, 0)")
        text = text.replace("-(-n // W.cols)", "-(-n // W.rows)").replace("-(-n // W_PART.cols)", "-(-n // W_PART.rows)")
    return text


def _lines(parts, halves):
    """What becomes of each line that sends, or steps between two that do."""

    def line(found):
        step = re.search(r"j \+ (\d), me\), x", found[0])
        part = int(step[1]) // 2 + 1 if step else int((re.search(r"4 \* col \+ (\d)", found[0]) or [0, 0])[1])
        if part >= parts:
            return ""
        kept = found[0].replace("4 * col", f"{parts} * col")
        return kept.replace(f"PART, {part + 4})", f"PART, {part + parts})") if halves else kept

    return line
