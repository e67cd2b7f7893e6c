"""Mutation testing: which small faults in the library would the tests without a GPU let pass?

    python -m tests.mutate                    every mutation of mutations.toml, in copies of the tree; prints a report
    python -m tests.mutate ring fence         those whose section or title has one of these words
    python -m tests.mutate --jobs 4 --out docs/mutations.md

A mutation replaces a text that stands once in a file by another one. The tests of its section are run on a copy of the tree
until one fails: then the mutation is dead. What survives them all is a hole in the tests, or changes nothing that a kernel
could show, and then the table says why.
"""

import argparse
import concurrent.futures
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).parent.parent
KEPT = "attention ops tests tiles examples docs bench".split()  # what a copy of the tree needs
PATIENCE = 420  # seconds, after which a mutation is dead of a hang


class Mutation(NamedTuple):
    """section: of the table. title: what is wrong. file, old, new: where, and how. killers: arguments of pytest, one set after
    the other until one fails. neutral: why nothing can show it, if that is so."""

    section: str
    title: str
    file: str
    old: str
    new: str
    killers: tuple[str, ...]
    neutral: str = ""

    def check(self):
        """ValueError unless the text that it replaces stands once in its file."""
        count = (ROOT / self.file).read_text().count(self.old)
        if count != 1:
            raise ValueError(f"{self.section}, {self.title}: {self.old!r} stands {count} times in {self.file}")


def table() -> list[Mutation]:
    """The mutations of mutations.toml."""
    sections = tomllib.loads((Path(__file__).parent / "mutations.toml").read_text())
    return [
        Mutation(section, killers=tuple(said["killers"]), **mutation)
        for section, said in sections.items()
        for mutation in said["mutations"]
    ]


def outcome(mutation: Mutation) -> tuple[str, float]:
    """What became of a mutation, "killed by ..." or "survived", and the seconds that took."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place)
        for name in KEPT:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
            shutil.copy(ROOT / name, tree / name)
        file = tree / mutation.file
        file.write_text(file.read_text().replace(mutation.old, mutation.new))
        for killer in mutation.killers:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(killer)]
            environment = os.environ | {"PYTHONPATH": str(tree), "OPENBLAS_NUM_THREADS": "1", "TILES_SEED": "1"}
            try:
                ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                return f"killed by a hang of {killer}", time.monotonic() - begin
            if ran.returncode == 1 or (ran.returncode == 2 and "ERROR" in ran.stdout):
                failed = next((line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), killer)
                return f"killed by {failed.split(' - ')[0].split(' ', 1)[-1]}", time.monotonic() - begin
            if ran.returncode != 0:
                raise RuntimeError(
                    f"{mutation.title}: pytest ended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-500:]}"
                )
    return "survived", time.monotonic() - begin


def main():
    """Try the mutations that the command line names; the exit code is 1 if one survives that should not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutations whose section or title has one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", help="write the report there, too")
    given = parser.parse_args()
    chosen = [m for m in table() if not given.words or any(word in f"{m.section} {m.title}" for word in given.words)]
    for mutation in chosen:
        mutation.check()
    rows, survivors, begin = [], [], time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for mutation, (fate, seconds) in zip(chosen, pool.map(outcome, chosen), strict=True):
            if fate == "survived":
                survivors.append(mutation)
                fate = f"**survived**{f': {mutation.neutral}' if mutation.neutral else ''}"
            rows.append(f"| {mutation.section} | {mutation.title} | {fate} | {seconds:.0f} |")
            print(rows[-1], flush=True)
    said = (
        f"{len(chosen)} mutations, {len(survivors)} survive, of which {sum(bool(m.neutral) for m in survivors)} change nothing "
        f"that a kernel could show; {time.monotonic() - begin:.0f} s with {given.jobs} jobs."
    )
    print(said)
    if given.out:
        head = "| section | what is wrong | fate | s |\n|---|---|---|---:|\n"
        Path(given.out).write_text(f"# Mutations\n\n`python -m tests.mutate`: {said}\n\n{head}" + "\n".join(rows) + "\n")
    return int(any(not m.neutral for m in survivors))


if __name__ == "__main__":
    sys.exit(main())
