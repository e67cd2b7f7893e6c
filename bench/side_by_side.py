"""Our kernels of two trees, or as two toolchains compile them, by turns in one run.

    python -m bench.side_by_side new old:PYTHONPATH=/path/to/old/tree
    python -m bench.side_by_side pip:LD_PRELOAD=/path/to/libnvJitLink.so.13 here --only backward --rounds 9

A side is a name and environment variables, `name[:VARIABLE=value[,VARIABLE=value...]]`. Its process imports `attention` with
them, and keeps compiled kernels in a cache of its own. The processes hold the same inputs; for each problem they take turns,
round by round, on an otherwise idle card; a round replays a CUDA graph of calls whose inputs rotate past L2 (measure.py). A row
is a problem: each side's median in microseconds, and the median of the rounds' ratios of the first side's time to each other's:
a card that slows down within a problem does so for both. Only public functions are called, so that an older tree serves, too;
a problem that a side cannot run says why. No result is judged here: the tests do that. Before anything is timed, `--jobs`
processes a side compile what is missing. `--json FILE` keeps all rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import side_by_side_problems


class Side:
    """One side's environment and process."""

    def __init__(self, text: str, caches: Path):
        self.name, _, variables = text.partition(":")
        settings = dict(one.split("=", 1) for one in variables.split(",") if one)
        self.environment = {**os.environ, "TILES_CACHE_DIR": str(caches / self.name), **settings}
        self.environment.setdefault("PYTHONPATH", str(Path(__file__).parent.parent))
        Path(self.environment["TILES_CACHE_DIR"]).mkdir(parents=True, exist_ok=True, mode=0o700)
        self.process: subprocess.Popen | None = None

    def start(self, *more: str, **options) -> subprocess.Popen:
        """A process of side_by_side_problems.py with the side's environment."""
        return subprocess.Popen(
            [sys.executable, side_by_side_problems.__file__, *more], env=self.environment, text=True, **options
        )

    def ask(self, order: str) -> float | str | None:
        """What the side's process answers."""
        if self.process is None:
            self.process = self.start(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def measured(sides: list[Side], name: str, rounds: int) -> dict[str, list[float] | str]:
    """{side: microseconds of a call in every round, or why it cannot run}"""
    refused = {side.name: answer for side in sides if isinstance(answer := side.ask(f"prepare {name}"), str)}
    able = [side for side in sides if side.name not in refused]
    times: dict[str, list[float] | str] = {side.name: [] for side in able}
    for n in range(rounds):
        for side in able[:: 1 if n % 2 else -1]:
            times[side.name].append(side.ask("time"))  # type: ignore[union-attr, arg-type]
    for side in sides:
        side.ask("drop")
    return {**times, **refused}


def row(name: str, times: list[list[float] | str]) -> str:
    """A problem's line of the table."""
    medians = (f"{'-' if isinstance(rounds, str) else format(statistics.median(rounds), '.1f'):>12}" for rounds in times)
    ratios = ("-" if isinstance(x, str) else f"{statistics.median(a / b for a, b in zip(times[0], x)):.3f}" for x in times[1:])
    return " ".join([f"{name:44}", *medians, "  ", *(ratios if not isinstance(times[0], str) else ())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs="*", help="name[:VARIABLE=value[,...]]")
    parser.add_argument("--only", default="", help="problems whose name contains this text, or one of several with | between")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2 - 1), help="processes a side that compile"
    )
    parser.add_argument("--json", help="a file for all rounds")
    asked = parser.parse_args()
    names = [name for name in side_by_side_problems.PROBLEMS if any(text in name for text in asked.only.split("|"))]
    with tempfile.TemporaryDirectory() as caches:
        sides = [Side(text, Path(caches)) for text in asked.sides]
        parts = [json.dumps([[n, asked.jobs], names]) for n in range(asked.jobs)]
        for process in [side.start(part) for side in sides for part in parts]:
            process.wait()
        rows = {}
        print(f"{'microseconds':44}", *(f"{side.name:>12}" for side in sides), "  first over each other")
        for name in names:
            rows[name] = times = measured(sides, name, asked.rounds)
            print(row(name, [times[side.name] for side in sides]), flush=True)
            for side, said in times.items():
                if isinstance(said, str):
                    print(f"    {side}: {said}")
        if asked.json:
            Path(asked.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
