"""A picture of what warps do and wait for: time to the right, a row a warp, and rows for copies and for the tensor cores."""

from collections import Counter, defaultdict
from html import escape
from pathlib import Path

from .. import draw
from ..layout import WARPGROUP
from .model import Model
from .schedule import COPIES, TENSOR, Bar

NAMES, WIDTH, HEIGHT, GAP = 132, 860, 20, 6  # of the picture: for the rows' names, for time, of a row, between rows
WINDOW = 12_000  # cycles that a picture shows of more
LETTER_WIDTH = 5.4  # of a bar's name, about
COLOURS = {  # told apart by the colour-blind (Okabe and Ito)
    "product": "#e69f00",
    "special": "#cc79a7",
    "compute": "#56b4e9",
    "memory": "#35b391",
    "copy": "#9fdcc8",
    "wait": "#e4e6ea",
}
LEGEND_TEXTS = {
    "product": "matrix product",
    "special": "exp2, 1/x, ...",
    "compute": "arithmetic",
    "memory": "loads and stores",
    "copy": "asynchronous copy",
    "wait": "waiting; the arrow comes from what it waits for",
}
INK = "fill:#1f2328"  # of words on a bar
MODEL = "computed by a model (tiles/profile/model.py), not measured"
NOTE = f"{MODEL}; bars are named by op and line; of warps that do the same the first is drawn"


class Timeline:
    """When the warps of a block do what, by the model. bars: schedule.Bar, by their starts. Print it for the figures; a
    notebook shows the picture, `save(file)` writes it."""

    def __init__(self, title: str, bars: list[Bar], warps: list[tuple], model: Model):
        self.title, self.bars, self.warps, self.model = title, bars, warps, model

    @property
    def cycles(self) -> float:
        """The number of cycles until the last warp is done."""
        return max((bar.end for bar in self.bars), default=0.0)

    def busy(self, lane, *kinds) -> float:
        """The fraction of the time in which a lane has a bar, of these kinds if any are named: COPIES ("copies in flight"),
        TENSOR ("tensor cores") or a warp's number."""
        intervals = sorted((b.start, b.end) for b in self.bars if b.lane[1] == lane and (not kinds or b.kind in kinds))
        total = reach = 0.0
        for start, end in intervals:
            total += max(0.0, end - max(start, reach))
            reach = max(reach, end)
        return total / self.cycles if self.cycles else 0.0

    @property
    def waits(self) -> list[tuple[float, str, str]]:
        """(cycles, line, what for) of the waits of all warps, the longest in sum first; of warps that do the same, one."""
        sums: Counter = Counter()
        for warps, lane in self._rows():
            for bar in lane:
                if warps and bar.kind == "wait":
                    sums[bar.place.line, _kind_of(bar.name)] += bar.cycles
        return [(cycles, line, event) for (line, event), cycles in sums.most_common()]

    def _rows(self):
        """(the warps, or none of what goes on by itself, its bars) for each row. The warps of a warpgroup that do the same
        share one, with the bars of the first."""
        lanes = defaultdict(list)
        for bar in self.bars:
            lanes[bar.lane].append(bar)
        groups = defaultdict(list)
        for block, warp in self.warps:
            work = tuple((bar.name, _line(bar)) for bar in lanes[block, warp] if bar.kind != "wait")
            if lanes[block, warp]:
                groups[block, warp // WARPGROUP, work].append((block, warp))
        for block in dict.fromkeys(block for block, _ in self.warps):
            for (where, *_), group in groups.items():
                if where == block:
                    yield group, lanes[group[0]]
            for lane in (TENSOR, COPIES):
                for row in _side_by_side(lanes[block, lane]):
                    yield [], row

    def __str__(self):
        lines = [f"{self.title}: {self.cycles:.0f} cycles, {MODEL}"]
        blocks = dict.fromkeys(block for block, _ in self.warps)
        for lane in (TENSOR, COPIES):
            lines.append(f"  {self.busy(lane):>4.0%}  {lane}" + f" of one of {len(blocks)} blocks" * (len(blocks) > 1))
        for warps, bars in self._rows():
            if warps:
                waits = sum(bar.cycles for bar in bars if bar.kind == "wait") / self.cycles
                lines.append(f"  {self.busy(warps[0][1]) - waits:>4.0%}  {_names(warps)}; {waits:.0%} waiting")
        lines += [f"  {cycles:>8.0f} cycles of waiting for {event}, {line}" for cycles, line, event in self.waits[:5]]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_svg_(self):
        return self.svg()

    def save(self, file, first: float = 0, last: float | None = None) -> None:
        """Write the picture: see `svg`."""
        Path(file).write_text(self.svg(first, last))

    def svg(self, first: float = 0, last: float | None = None) -> str:
        """The picture as SVG, which stands by itself: cycles `first` to `last`, by default all, but no more than 12,000. Two
        pictures of as many cycles have one scale."""
        return draw.svg(self.panel(first, last))

    def panel(self, first: float = 0, last: float | None = None) -> draw.Panel:
        """The picture as a part of one (tiles/draw.py). ValueError: it would show nothing."""
        last = min(self.cycles, first + WINDOW) if last is None else last
        if not last > first >= 0:
            raise ValueError(f"timeline: shows cycles from {first} to {last}, of {self.cycles:.0f}")
        duration = last - first
        rows = [(warps, [b for b in bars if b.start < last and b.end > first]) for warps, bars in self._rows()]
        rows = [(warps, bars) for warps, bars in rows if warps or bars]
        idle = [lane for lane in self.warps if not any(lane in warps for warps, _ in rows)]
        row_of_lane = {lane: k for k, (warps, _) in enumerate(rows) for lane in warps}
        row_of_bar = {_key(bar): k for k, (warps, bars) in enumerate(rows) if not warps for bar in bars}

        def picture(left, top):
            def y(k):
                return top + k * (HEIGHT + GAP)

            for k, (warps, bars) in enumerate(rows):
                yield draw.text(left, y(k) + 14, _names(warps) if warps else _lane_name(bars[0], rows[k - 1][1][0]))
                for bar in bars:
                    yield _box(bar, left + NAMES, y(k), first, last)
            for k, (_, bars) in enumerate(rows):
                for bar in bars:
                    launch_origin = bar.cause and row_of_bar.get(_key(bar.cause), row_of_lane.get(bar.cause.lane))
                    if launch_origin is not None and launch_origin != k and bar.end <= last:
                        yield _arrow(left + NAMES + (bar.end - first) * WIDTH / duration, y(launch_origin), y(k))
            yield from _axis(left + NAMES, top + len(rows) * (HEIGHT + GAP), first, last)
            yield from _legend(left + NAMES, top + len(rows) * (HEIGHT + GAP) + 38)

        below = (f"{_names(idle)}: nothing to do",) if idle else ()
        range_text = f", shown: {first:.0f} to {last:.0f}" if first or last < self.cycles else ""
        notes = f"{self.cycles:.0f} cycles; tensor cores busy {self.busy(TENSOR):.0%} of them{range_text}", NOTE
        return draw.Panel(self.title, notes, NAMES + WIDTH, len(rows) * (HEIGHT + GAP) + 26, picture, below)


def _kind_of(name):
    """The event of a wait without its number: tile 3 and tile 4 of a ring count as one."""
    words = name.split()
    return " ".join("j" if word.isdigit() and words[max(0, k - 1)] == "tile" else word for k, word in enumerate(words))


def _key(bar):
    """The key of bars that are drawn as one: the parts of a product on four tensor cores."""
    return bar.lane, bar.start, bar.end, bar.name


def _side_by_side(bars):
    """Bars in as few rows as it takes that none covers another; those that are alike once."""
    rows: list[list[Bar]] = []
    for bar in bars:
        if any(_key(bar) == _key(row[-1]) for row in rows):
            continue
        row = next((row for row in rows if row[-1].end <= bar.start), None)
        if row is None:
            rows.append(row := [])
        row.append(bar)
    return rows


def _names(lanes):
    """The warps that share a row of the picture, as text: "warps 0-3"."""
    numbers = [number for _, number in lanes]
    first, last = numbers[0], numbers[-1]
    label = f"{first}–{last}" if numbers == list(range(first, last + 1)) and last > first else ", ".join(map(str, numbers))
    return f"warp{'s' * (last > first)} {label}"


def _lane_name(bar, above):
    return "" if above.lane == bar.lane else bar.lane[1]


def _box(bar, left, y, first, last):
    """A bar as SVG, clipped to the shown cycles: its name if it fits, and a tooltip."""
    start, end = ((min(max(at, first), last) - first) * WIDTH / (last - first) for at in (bar.start, bar.end))
    x, width = left + start, max(end - start, 0.5)
    label = f"{bar.name}, {bar.cycles:.0f} cycles from {bar.start:.0f} on; warp {bar.place.warp}, {bar.place.line}"
    parts = [
        f'<g><title>{escape(label)}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" '
        f'fill="{COLOURS[bar.kind]}" stroke-width="0.6"/>'
    ]
    name = bar.name.removeprefix("the ")
    short = name.split(" of ")[0].removeprefix("copy into ")
    for words in (f"{'for ' * (bar.kind == 'wait')}{name}, line {_line(bar)}", f"{name}, {_line(bar)}", short):
        if len(words) * LETTER_WIDTH < width:
            parts.append(f'<text x="{x + width / 2:.1f}" y="{y + 14}" class="small" style="{INK}">{escape(words)}</text>')
            break
    return "".join([*parts, "</g>"])


def _line(bar):
    return bar.place.frames[0][1] if bar.place.frames else "?"


def _arrow(x, launch_origin, y):
    """From the row of the bar that ends a wait to the wait's, at the end of both."""
    down = launch_origin < y
    start, end = (launch_origin + HEIGHT, y) if down else (launch_origin, y + HEIGHT)
    tip = end - 4 if down else end + 4
    return (
        f'<path d="M{x:.1f} {start}V{end}M{x - 2.5:.1f} {tip}L{x:.1f} {end}L{x + 2.5:.1f} {tip}" '
        f'fill="none" stroke="#57606a" stroke-width="0.8"/>'
    )


def _axis(left, y, first, last):
    """The axis of time with its ticks, in cycles."""
    duration = last - first
    step = next(10**power * first for power in range(12) for first in (1, 2, 5) if duration / (10**power * first) <= 10)
    begin = -(-int(first) // step) * step
    for tick in range(begin, int(last) + 1, step):
        x = round(left + (tick - first) * WIDTH / duration, 1)
        yield f'<path d="M{x} {y - 4}v6" stroke="#59636e" stroke-width="1"/>'
        yield draw.text(x, y + 13, f"{tick}{' cycles' * (tick == begin)}", "small")


def _legend(left, y):
    """The legend that says what each colour means."""
    for kind, words in LEGEND_TEXTS.items():
        yield f'<rect x="{left}" y="{y - 9}" width="11" height="11" fill="{COLOURS[kind]}"/>'
        yield draw.text(left + 15, y, words)
        left += 34 + 6 * len(words)
