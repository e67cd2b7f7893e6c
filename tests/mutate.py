"""Mutation testing: which small faults in the library would the tests without a GPU let pass?

    python -m tests.mutate                    every mutation of mutations.toml, in copies of the tree; prints a report
    python -m tests.mutate ring fence         those whose section or title has one of these words
    python -m tests.mutate --jobs 16 --log fates.json --out docs/mutations.md

A mutation replaces a text that occurs once in a file by another one. Its killers, the tests that should notice it, are run on a
copy of the tree until one fails. The mutation is then dead, if that test passes on the unchanged tree. What survives all
killers is a hole in the tests, or changes nothing that a test could show; then the table says why. No GPU is used.
"""

import argparse
import ast
import concurrent.futures
import functools
import hashlib
import json
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).parent.parent
KEPT = "attention fuse ops tests tiles examples docs bench".split()  # what a copy of the tree needs
SEEN = {"OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TILES_CACHE": "0", "TILES_SEED": "1"}  # by all tests
SERVER = multiprocessing.get_context("forkserver")
IMPORTED = ["numba.cuda", "cuda.core", "ml_dtypes", "greenlet", "pytest", "hypothesis"]  # once, for all tests
PATIENCE = 240  # seconds, after which a mutation is dead of a hang
HEAD = """# Mutations

Which small faults do the tests without a GPU notice? `tests/mutations.toml` lists faults of every kind: an inverted parity, a
missing fence, a wrong stride, a check of the checkers left out. Each is planted in a copy of the tree, and the tests that
should notice it run until one fails. This is the last report of

    python -m tests.mutate --out docs/mutations.md

"""


class Mutation(NamedTuple):
    """section: of the table. title: what is wrong. file, old, new: where, and how. killers: arguments of pytest, one set after
    the other until one fails; its own come before its section's. neutral: why nothing can show it, if that is so."""

    section: str
    title: str
    file: str
    old: str
    new: str
    killers: tuple[str, ...]
    neutral: str = ""

    def mutated(self) -> str:
        """The file's text with the fault. ValueError: what it replaces stands not once in it; SyntaxError: it is no Python."""
        text = (ROOT / self.file).read_text()
        count = text.count(self.old)
        if count != 1 or self.old == self.new:
            raise ValueError(f"{self.section}, {self.title}: {self.old!r} stands {count} times in {self.file}")
        text = text.replace(self.old, self.new)
        if self.file.endswith(".py"):
            ast.parse(text)
        return text

    @property
    def key(self) -> str:
        """Of what was tried: the file as it became."""
        return f"{self.file} {hashlib.sha256(self.mutated().encode()).hexdigest()[:16]}"


def table() -> list[Mutation]:
    """The mutations of mutations.toml."""
    sections = tomllib.loads((Path(__file__).parent / "mutations.toml").read_text())
    return [
        Mutation(section, **mutation | {"killers": tuple(dict.fromkeys((*mutation.get("killers", ()), *said["killers"])))})
        for section, said in sections.items()
        for mutation in said["mutations"]
    ]


def copied(tree: Path):
    """Copy what tests need of the repository."""
    for name in KEPT:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("results", "*.svg"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tree / name)


def _pytest(tree: str, arguments: tuple[str, ...], said: str):
    """In a process of its own, which has imported what tests need besides the library: run these tests of a tree."""
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": os.pathsep.join([tree, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])}
    sys.path.insert(0, tree)
    import pytest

    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments]))


def verdict(tree: Path, *arguments: str) -> str:
    """The first test that fails on a tree, of those that pytest is given by these arguments; "" if none does."""
    with tempfile.NamedTemporaryFile() as said:
        process = SERVER.Process(target=_pytest, args=(str(tree), arguments, said.name))
        process.start()
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            process.join()
            return f"a hang of {arguments[0]}"
        if process.exitcode in (0, 5):  # 5: it chose none
            return ""
        lines = (line for line in Path(said.name).read_text().splitlines() if line.startswith(("FAILED", "ERROR")))
        failed = next(lines, f"{arguments[0]}: {process.exitcode}")
        return failed.split(" - ")[0].removeprefix("FAILED ").removeprefix("ERROR ")


@functools.cache
def fails_anyway(test: str) -> bool:
    """Does a test fail on the tree as it is?"""
    fails = "::" in test and bool(verdict(ROOT, test))
    if fails:
        print(f"fails without any mutation, and tells nothing: {test}", flush=True)
    return fails


def outcome(mutation: Mutation) -> tuple[str, float]:
    """The test that notices a mutation, "" if none does, and the seconds that took."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        copied(tree := Path(place))
        (tree / mutation.file).write_text(mutation.mutated())
        found, left_out = "", []
        for killer in mutation.killers:
            while (found := verdict(tree, *shlex.split(killer), *left_out)) and fails_anyway(found):
                left_out += ["--deselect", found]
            if found:
                break
    return found, time.monotonic() - begin


def row(mutation: Mutation, found: str, seconds: float) -> str:
    """A line of the report."""
    test = " ".join(found.replace("|", "\\|").split())
    fate = f"`{test.rpartition('/')[2]}`" if found else f"**survives**{f': {mutation.neutral}' if mutation.neutral else ''}"
    return f"| {mutation.title} | `{mutation.file}` | {fate} | {seconds:.0f} |"


def report(fates: list[tuple[Mutation, str, float]]) -> str:
    """All lines, section by section, and what they come to."""
    alive = [mutation for mutation, found, _ in fates if not found]
    named, share = sum(bool(mutation.neutral) for mutation in alive), len(alive) / max(len(fates), 1)
    lines = [
        f"**{len(fates)} mutations, of which {len(alive)} ({share:.1%}) survive**. {named} of the survivors change "
        f"nothing that such a test could show; the table says why. {sum(s for *_, s in fates) / 60:.0f} minutes of one core."
    ]
    sizes, dead = Counter(m.section for m, *_ in fates), Counter(m.section for m, found, _ in fates if found)
    for section in sizes:
        lines += ["", f"## {section}: {dead[section]} of {sizes[section]}", ""]
        lines += ["| what is wrong | where | noticed by | s |", "|---|---|---|---:|"]
        lines += [row(*fate) for fate in fates if fate[0].section == section]
    return "\n".join(lines) + "\n"


def main():
    """Try the mutations that the command line names; the exit code is 1 if one survives that should not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutations whose section or title has one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--log", type=Path, help="keep fates here as they come; what is found dead here is not tried again")
    parser.add_argument("--out", type=Path, help="write the report there, too")
    given = parser.parse_args()
    chosen = [m for m in table() if not given.words or any(word in f"{m.section} {m.title}" for word in given.words)]
    os.environ |= SEEN
    SERVER.set_forkserver_preload(IMPORTED)
    known = json.loads(given.log.read_text()) if given.log and given.log.exists() else {}
    todo = [m for m in chosen if not known.get(m.key, [""])[0]]
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        running = {pool.submit(outcome, mutation): mutation for mutation in todo}
        for done in concurrent.futures.as_completed(running):
            mutation = running[done]
            known[mutation.key] = done.result()
            print(f"{mutation.section}: {row(mutation, *done.result())}", flush=True)
            if given.log:
                given.log.write_text(json.dumps(known))
    fates = [(mutation, *known[mutation.key]) for mutation in chosen]
    said = report(fates)
    print(said.partition("\n")[0])
    if given.out:
        given.out.write_text(HEAD + said)
    return int(any(not (found or mutation.neutral) for mutation, found, _ in fates))


if __name__ == "__main__":
    sys.exit(main())
