"""Runs as bench/results keeps them: {"datetime", "command", "ran_on", "rows"}. ran_on: the card and versions, which older runs
lack. A row is what the benchmark says of one provider and problem, with the milliseconds of every round.

`python bench/runs.py raw.json bench/results/kept.json` makes one of what `pytest bench/... --benchmark-json=raw.json` wrote.
"""

import json
import sys
from pathlib import Path


def read(path):
    """A run, as pytest-benchmark wrote it or as it is kept."""
    run = json.loads(Path(path).read_text())
    return run if "rows" in run else condense_run(run)


def condense_run(raw):
    """What is kept of pytest-benchmark's file: of the machine what conftest.py says; no statistics that follow from rounds."""
    file = raw["benchmarks"][0]["fullname"].partition("::")[0]
    run = {"datetime": raw["datetime"], "command": f"pytest {file}"}
    if ran_on := raw["machine_info"].get("ran_on"):
        run["ran_on"] = ran_on
    return run | {"rows": [_row(b) for b in raw["benchmarks"]]}


def _row(benchmark):
    return benchmark["extra_info"] | {"milliseconds": [round(1e3 * x, 5) for x in benchmark["stats"]["data"]]}


def main(source, target):
    """`target` becomes the rows of a run that pytest-benchmark wrote to `source`."""
    Path(target).write_text(json.dumps(read(source)))


if __name__ == "__main__":
    main(*sys.argv[1:])
