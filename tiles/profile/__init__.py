"""`tiles.profile(function, *args)`: what its launches do, how long that takes, and what they wait for.

    p = tiles.profile(lambda: attention.forward(q, k, v, causal=True))      or tiles.profile(launch(kernel, ...), x, y)
    p                                   a table: a line for each launch
    p.launches[0].seconds, .counts.flop, .counts.once                       its figures as numbers
    p.timeline                          what the warps of a block do and wait for, by a model; .save("timeline.svg")

Where the figures come from:

- **time**, on a card only: events before and behind each launch, the median of some calls. Before each call 256 MB are
  written, so that inputs come from memory, as they do in a model, and the host is ahead of the card. An event costs a launch
  of few microseconds about one more.
- **FLOP, special functions, bytes**: counted by meaning as the interpreter runs the kernel (counts.py): all blocks of arrays in
  host memory; on a card four clusters of blocks, the middle ones of four equal parts, on zeros in place of floats, times what
  they stand for. So of work that depends on floats, or is unevenly spread, it is an estimate. `sample=None` runs all.
- **share of the peaks**: of the card's highest clock times its tensor cores' rate, and of its memory's clock times its width.
- **the timeline**: the interpreter's run, with times by a stated model (model.py, schedule.py). It is no measurement.
- **stalls, and bytes as the hardware counts them**: Nsight Compute's, by `python -m tiles profile file.py:function`, if `ncu`
  is there.
"""

import math
from html import escape
from typing import Any, NamedTuple

from ..interpreter import Hazard
from ..launching.devices import Device
from ..launching.interpreted_launch import InterpretedLaunch
from ..launching.launch import BoundLaunch, Launch
from .card import Code, Peaks, code, count_on_host, launch_origin, median_times, peaks, replace_methods
from .counts import SAMPLE, LaunchCounts, choose_clusters, count_clusters
from .model import Model
from .schedule import COPIES, TENSOR, Bar, schedule
from .timeline import Timeline

__all__ = ["COPIES", "TENSOR", "Bar", "LaunchCounts", "Model", "Profile", "ProfiledLaunch", "Timeline", "profile"]

REPEAT = 20  # calls that are timed


class ProfiledLaunch(NamedTuple):
    """A launch of the function. seconds: None in the interpreter. counts: None if `uncounted` says why. code: registers and the
    like, on a card."""

    title: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    seconds: float | None
    counts: LaunchCounts | None
    timeline: Timeline | None
    code: Code | None = None
    uncounted: str = ""

    @property
    def flop_rate(self) -> float | None:
        """The FLOP/s of its matrix products."""
        return self.counts.flop / self.seconds if self.counts and self.seconds else None

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second, of those that come from memory if the caches are good."""
        return self.counts.once / self.seconds if self.counts and self.seconds else None


class Profile:
    """What `profile` returns; print it for a table. launches: a ProfiledLaunch each, in their order. peaks: of the card, or
    None."""

    def __init__(self, where: str, launches: list[ProfiledLaunch], limits: Peaks | None = None):
        self.where, self.launches, self.peaks = where, launches, limits

    @property
    def seconds(self) -> float | None:
        """The time of all launches; None in the interpreter."""
        times = [launch.seconds for launch in self.launches]
        return None if None in times else sum(filter(None, times))

    @property
    def timeline(self) -> Timeline | None:
        """The Timeline of the launch that takes longest: by measured time if there is one, else by the model."""
        having = [launch for launch in self.launches if launch.timeline]
        longest = max(
            having, key=lambda launch: launch.seconds or (launch.timeline and launch.timeline.cycles) or 0, default=None
        )
        return longest.timeline if longest else None

    def share_of_peaks(self, launch: ProfiledLaunch) -> tuple[float | None, float | None]:
        """How much of the tensor cores' rate, and of the memory's bandwidth, a launch attains."""
        if not (self.peaks and launch.counts and launch.seconds):
            return None, None
        flop = self.peaks.flop and launch.counts.halves / launch.seconds / self.peaks.flop
        return flop, launch.counts.once / launch.seconds / self.peaks.bandwidth

    @property
    def table(self) -> list[list[str]]:
        """The names of columns, then a row for each launch."""
        rows = [self._row(launch) for launch in self.launches]
        columns = [name for name in dict.fromkeys(name for row in rows for name in row)]
        return [columns, *[[row.get(name, "") for name in columns] for row in rows]]

    def __str__(self):
        table = self.table
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in table]
        parts = {launch.counts.counted / launch.counts.clusters for launch in self.launches if launch.counts}
        said = "all blocks" if parts <= {1.0} else "a few blocks, and multiplied"
        footnote = f"FLOP and bytes: counted by the interpreter, of {said}; once: each array no more than once"
        why = [f"{launch.title} was not counted: {launch.uncounted}" for launch in self.launches if launch.uncounted]
        total = f", {_time(self.seconds)} in all" if self.seconds and len(self.launches) > 1 else ""
        return "\n".join([f"{self.where}{total}", *[f"  {line}" for line in lines], f"  ({footnote})", *why])

    __repr__ = __str__

    def _repr_html_(self):
        """The table, and the timeline of the launch that takes longest, in a notebook."""
        rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self.table]
        picture = self.timeline.svg() if self.timeline else ""
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>{picture}"

    def _row(self, launch):
        counts, row = launch.counts, {"kernel": launch.title, "blocks": "x".join(str(n) for n in launch.grid if n > 1) or "1"}
        flop_fraction, memory_fraction = self.share_of_peaks(launch)
        if launch.seconds is not None:
            row["time"] = _time(launch.seconds)
        if counts:
            row["FLOP"] = _unit(counts.flop)
            if launch.flop_rate is not None:
                row["FLOP/s"] = _unit(launch.flop_rate)
                row["of peak"] = "" if flop_fraction is None else f"{flop_fraction:.0%}"
            row |= {
                "exp2 &c": _unit(counts.special),
                "asked": _unit(counts.read + counts.written, "B"),
                "once": _unit(counts.once, "B"),
            }
            if launch.bandwidth is not None:
                row["once/s"] = _unit(launch.bandwidth, "B")
                row["of bandwidth"] = f"{memory_fraction:.0%}"
        if launch.code:
            spills = f" + {launch.code.local} B" * bool(launch.code.local)
            row |= {"registers": f"{launch.code.registers}{spills}", "blocks an SM": str(launch.code.ctas_per_sm)}
        elif launch.timeline:
            row["a block, by the model"] = f"{launch.timeline.cycles:.0f} cycles"
        return row


def _time(seconds):
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3f} ms"


def _unit(x, unit=""):
    """A number in few characters: 12.3 G."""
    power = 0
    while abs(x) >= 1000 and power < 5:
        x, power = x / 1000, power + 1
    return f"{x:.3g} {' kMGTP'[power].strip()}{unit}".strip()


class _LaunchWatcher:
    """Watches the launches of a call. calls: (BoundLaunch, stream, addresses) of those on a card, or a ProfiledLaunch of those
    interpreted."""

    def __init__(self, block, model):
        self.block, self.model, self.calls, self.origins = block, model, [], {}
        self.bind, self.run, self.interpret = Launch._bind, BoundLaunch.run, InterpretedLaunch.run

    def profile_calls(self, function):
        """Call the function, and profile its launches."""
        watch = self

        def bind(launch, arguments):
            bound = watch.bind(launch, arguments)
            if isinstance(bound, BoundLaunch):
                watch.origins[id(bound)] = bound, launch, arguments
            return bound

        def run(bound, stream, addresses):
            watch.calls.append((bound, stream, tuple(addresses)))
            watch.run(bound, stream, addresses)

        def interpret(step, stream, addresses, execute=None):
            watch.interpret(
                step, stream, addresses, lambda *arguments: watch.calls.append(watch.count_interpreted(step.launch, *arguments))
            )

        self.calls.clear()
        with (
            replace_methods(Launch, _bind=bind),
            replace_methods(BoundLaunch, run=run),
            replace_methods(InterpretedLaunch, run=interpret),
        ):
            function()
        return self.calls

    def count_interpreted(self, launch, kernel, grid, threads, args, shared, seed, cluster):
        """The ProfiledLaunch of a launch, which is interpreted meanwhile."""
        counts, record = count_clusters(
            kernel, grid, threads, args, shared, cluster, choose_clusters(grid, cluster), self.block
        )
        timeline = self.timeline(launch.title, record)
        return ProfiledLaunch(launch.title, grid, threads, shared.nbytes if shared else 0, None, counts, timeline)

    def timeline(self, title, record):
        """The Timeline of a record; None if the requested block is not in it."""
        if record is None:
            return None
        blocks = list(dict.fromkeys(block for block, _ in record))
        name = f"{title}, block{'s' * (len(blocks) > 1)} {', '.join(map(str, blocks))}"
        return Timeline(name, schedule(record, self.model), list(record), self.model)

    def on_card(self, bound, addresses, seconds, sample):
        """The ProfiledLaunch of a launch on a card."""
        counts, timeline, why = None, None, ""
        try:
            _, launch, arguments = self.origins.get(id(bound), (None, None, None))
            counts, record = count_on_host(bound, launch and launch_origin(launch, arguments), addresses, sample, self.block)
            timeline = self.timeline(bound.kernel.title, record)
        except (Hazard, LookupError, ValueError) as error:
            why = str(error)
        kernel = bound.kernel
        measured = seconds, counts, timeline, code(bound), why
        return ProfiledLaunch(kernel.title, bound.grid, math.prod(kernel.threads), kernel.nbytes, *measured)


def profile(
    function,
    *args: Any,
    block: tuple | None = None,
    sample: int | None = SAMPLE,
    repeat: int = REPEAT,
    model: Model | None = None,
) -> Profile:
    """A Profile of what function(*args) launches through this library, on a GPU or in the interpreter: see this module.

    function: called several times on a GPU, so it must do the same each time; once in the interpreter. block: whose timeline
    to keep, (x, y, z), by default that of the first block that is counted. sample: how many clusters of blocks of a launch
    on a GPU are counted, None for all. repeat: calls that are timed. model: that of the timeline. What kernels write is
    written. Other threads should launch nothing meanwhile.

    ValueError: the function launches nothing. RuntimeError: its launches differ from call to call. Hazard: the
    interpreter's."""
    watch = _LaunchWatcher(block and (*block, 0, 0)[:3] if isinstance(block, tuple) else block, model or Model())

    def call():
        function(*args)

    calls = watch.profile_calls(call)
    if not calls:
        raise ValueError("profile: the function launches no kernel of this library")
    if isinstance(calls[0], ProfiledLaunch):
        return Profile("in the interpreter", calls)
    calls = list(watch.profile_calls(call))  # once more: of the first some were compiled
    gpu: Device = calls[0][0].kernel.code.gpu
    times = median_times(call, watch.run, gpu, repeat)
    if len(times) != len(calls):
        raise RuntimeError("profile: the function does not make the same launches each time it is called")
    measured = [watch.on_card(bound, addresses, time, sample) for (bound, _, addresses), time in zip(calls, times)]
    return Profile(str(gpu), measured, peaks(gpu))
