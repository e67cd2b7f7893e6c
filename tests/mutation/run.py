"""Plant faults in a copy of the tree, one at a time, and run the tests that should notice."""

import argparse
import concurrent.futures
import contextlib
import difflib
import hashlib
import itertools
import json
import multiprocessing
import os
import queue
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from .by_hand import by_hand, why_neutral
from .killers import LikeliestFirst, other_tests, own_tests
from .rules import mutations
from .sources import ROOT, Mutation, SourceFile, sources

KEPT = "attention fuse ops tests tiles examples docs bench".split()  # what a copy of the tree needs
SEEN = {"OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TILES_SEED": "1"}  # by all tests
SERVER = multiprocessing.get_context("forkserver")
DIED = "the process died"
IMPORTED = ["numba.cuda", "cuda.core", "ml_dtypes", "greenlet", "pytest", "hypothesis"]  # once, for all tests


class Fate(NamedTuple):
    """What became of a mutation. test: what noticed it, "" if nothing did. how: "own", "other" for a test of another file, or
    "unfinished" where the time was up before all its own tests had run. seconds: what that took."""

    test: str
    how: str
    seconds: float


class Outcome(NamedTuple):
    """Of one run of pytest. failed: the first test that failed, or the file that could not be collected. finished: did it run
    all tests, or up to the one that failed?"""

    failed: str
    finished: bool


class Workplace:
    """A copy of the tree in which one fault at a time is planted. Files keep their times, and what Python compiled of the
    faulty one is put away: so nothing that is kept by time or size can take one text for another."""

    def __init__(self, root: Path = ROOT):
        self.root, self.tree = root, Path(tempfile.mkdtemp(prefix="mutation-"))
        for name in KEPT:
            if (root / name).exists():
                shutil.copytree(root / name, self.tree / name, ignore=shutil.ignore_patterns("results", "*.svg"))
        for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
            if (root / name).exists():
                shutil.copy2(root / name, self.tree / name)

    def close(self):
        shutil.rmtree(self.tree, ignore_errors=True)

    @contextlib.contextmanager
    def planted(self, mutation: Mutation):
        """Inside, the copy has the fault; afterwards it is as before."""
        file = self.tree / mutation.path
        data = file.read_bytes()
        try:
            self._write(file, mutation.applied(data))
            yield
        finally:
            self._write(file, data)

    def _write(self, file, data):
        stat = file.stat()
        file.write_bytes(data)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        for bytecode in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            bytecode.unlink()


class FirstFailure:
    """A plugin of pytest: tests in the order of a key; what failed first goes through a pipe."""

    def __init__(self, key, pipe, avoided):
        self.key, self.pipe, self.avoided, self.sent = key, pipe, avoided, False

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid not in self.avoided and not item.get_closest_marker("gpu")]
        items.sort(key=lambda item: self.key(item.nodeid))

    def send(self, report):
        if report.failed and not self.sent:
            self.sent = True
            self.pipe.send(report.nodeid)

    pytest_runtest_logreport = pytest_collectreport = send


def _pytest(tree, arguments, environment, pipe, said, path, function, order, avoided):
    """In a process of its own, which has imported what tests need besides the library: run these tests of a tree."""
    os.setsid()  # so that it ends with all that it has started
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(tree)
    os.environ |= environment | {"PYTHONPATH": os.pathsep.join([tree, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])}
    sys.path[:] = [tree, *(place for place in sys.path if Path(place or ".").resolve() != ROOT)]
    os.environ.pop("PYTEST_ADDOPTS", None)  # of the run that asks, if a test does: what it distributes is not this
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # for processes that tests start: they may outlive the fault
    import pytest

    plugin = FirstFailure(order.key(path, function), pipe, avoided)
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments], plugins=[plugin])
    pipe.send(DIED if code not in (0, 5) else "")  # 5: there were no tests. If one failed, this is not read
    os._exit(0)  # what is not finished is not waited for


class Runner:
    """Tries mutations: which test notices each?"""

    def __init__(self, jobs: int = 1, limit: float = 240, test_limit: float = 60, others: bool = False, root: Path = ROOT):
        self.limit, self.test_limit, self.others, self.root = limit, test_limit, others, root
        self.order, self.fails_anyway = LikeliestFirst(), {}
        # by digests of all that kernels are made from: one folder for all trees
        self.kernel_cache = tempfile.mkdtemp(prefix="mutation-kernels-")
        self.places = queue.SimpleQueue()
        self.all_places = [Workplace(root) for _ in range(jobs)]
        for place in self.all_places:
            self.places.put(place)

    def close(self):
        for place in self.all_places:
            place.close()
        shutil.rmtree(self.kernel_cache, ignore_errors=True)

    def tested(self, place: Workplace, tests, mutation: Mutation, avoided=frozenset()) -> Outcome:
        """Run tests on a copy of the tree as it is now."""
        receiving, sending = SERVER.Pipe(duplex=False)
        environment = SEEN | {"TILES_CACHE_DIR": self.kernel_cache}
        arguments = [*tests, f"--timeout={self.test_limit:g}"]
        with tempfile.NamedTemporaryFile() as said:
            inputs = (str(place.tree), arguments, environment, sending, said.name, mutation.path, mutation.function)
            process = SERVER.Process(target=_pytest, args=(*inputs, self.order, avoided))
            process.start()
            sending.close()
            try:
                finished = receiving.poll(self.limit)
                return Outcome(receiving.recv() if finished else "", finished)
            except EOFError:
                return Outcome(DIED, True)
            finally:
                process.join(0.2)
                with contextlib.suppress(ProcessLookupError):  # with all that it has started
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()

    def noticed(self, place: Workplace, tests, mutation: Mutation) -> Outcome:
        """The first of these tests that fails with the fault, and only with it."""
        avoided: set[str] = set()
        while True:
            with place.planted(mutation):
                outcome = self.tested(place, [test for test in tests if test not in avoided], mutation, frozenset(avoided))
            failed = outcome.failed
            if failed in ("", DIED) or failed in avoided or not self._fails_anyway(place, failed, mutation):
                return outcome
            avoided.add(failed)

    def _fails_anyway(self, place, failed, mutation):
        """Does a test fail, or a file not even load, without the fault?"""
        if failed not in self.fails_anyway:
            selection = [failed] if "::" in failed else [failed, "--collect-only"]
            self.fails_anyway[failed] = bool(self.tested(place, selection, mutation).failed)
            if self.fails_anyway[failed]:
                print(f"fails without any fault, and tells nothing: {failed}", flush=True)
        return self.fails_anyway[failed]

    def fate(self, mutation: Mutation) -> Fate:
        """The tests run on a mutated tree until one of them fails."""
        begin, place = time.monotonic(), self.places.get()
        try:
            outcome, how = self.noticed(place, own_tests(mutation.path), mutation), "own"
            if outcome.failed:
                self.order.noticed(mutation.path, mutation.function, outcome.failed)
            elif self.others and (tests := other_tests(mutation.path)):
                finished = outcome.finished
                outcome, how = self.noticed(place, tests, mutation), "other"
                outcome = outcome._replace(finished=finished and outcome.finished)
            if not outcome.failed:
                how = "" if outcome.finished else "unfinished"
            return Fate(outcome.failed, how, time.monotonic() - begin)
        finally:
            self.places.put(place)


def chosen(words: list[str]) -> list[Mutation]:
    """The mutations, by hand and by rule, whose names have all these words, but for the neutral ones. A word with a slash is of
    a path, and makes none for files of other paths."""
    parts = [path for path, _, _ in (word.partition("::") for word in words) if "/" in path]
    files = [path for path in sources() if all(part in path for part in parts)]
    result = (mutation for path in files for mutation in mutations(SourceFile(path, (ROOT / path).read_bytes())))
    actual = itertools.chain(by_hand(), result)
    return [m for m in actual if all(word in m.name for word in words) and not why_neutral(m.name)]


def fault(mutation: Mutation) -> str:
    """What is wrong, without which of several it is."""
    return mutation.name.rpartition("::")[2].partition("#")[0]


def sampled(actual: list[Mutation], count: int, seed: int) -> list[Mutation]:
    """So many at random, of each kind of fault as many as of the others as long as there are some."""
    rng, kinds = random.Random(seed), defaultdict(list)
    for mutation in rng.sample(actual, len(actual)):
        kinds[fault(mutation) if "#" in mutation.name else "by hand"].append(mutation)
    deals = itertools.zip_longest(*rng.sample(list(kinds.values()), len(kinds)))
    return list(itertools.islice((mutation for deal in deals for mutation in deal if mutation), count))


def key(mutation: Mutation) -> str:
    """Of what is tried: the name, and the file as it becomes."""
    return f"{mutation.name} {hashlib.sha256(mutation.applied((ROOT / mutation.path).read_bytes())).hexdigest()[:16]}"


def difference(mutation: Mutation) -> str:
    """The mutation as a diff."""
    data = (ROOT / mutation.path).read_bytes()
    before, after = (text.decode().splitlines(keepends=True) for text in (data, mutation.applied(data)))
    return "".join(difflib.unified_diff(before, after, mutation.path, mutation.path, n=2))


def main() -> int:
    """Try the mutations that the command line names; the exit code is 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutations whose names (path::function::fault#ordinal) have all of these")
    parser.add_argument("--list", action="store_true", help="print names, and the difference of a single one; try nothing")
    parser.add_argument("--sample", type=int, metavar="N", help="N at random, all kinds of faults alike")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=240, help="seconds of tests for each mutation")
    parser.add_argument("--others", action="store_true", help="what its own tests let pass is shown to other files' tests")
    parser.add_argument("--log", type=Path, help="keep fates here as they come; what is found dead here is not tried again")
    inputs = parser.parse_args()
    actual = chosen(inputs.words)
    actual = actual if inputs.sample is None else sampled(actual, inputs.sample, inputs.seed)
    if inputs.list:
        print(*(mutation.name for mutation in actual), sep="\n")
        if len(actual) == 1:
            print(difference(actual[0]))
        return 0
    return tried(actual, inputs)


def tried(actual: list[Mutation], inputs) -> int:
    """Try these, say what becomes of each, and show what survives."""
    fates = {}
    if inputs.log and inputs.log.exists():
        fates = {name: Fate(*fate) for name, fate in json.loads(inputs.log.read_text()).items()}
    SERVER.set_forkserver_preload(IMPORTED)
    runner = Runner(inputs.jobs, inputs.limit, others=inputs.others)
    for known, fate in fates.items():
        if fate.how == "own":
            path, function, _ = known.split("::", 2)
            runner.order.noticed(path, function, fate.test)
    try:
        with concurrent.futures.ThreadPoolExecutor(inputs.jobs) as pool:
            todo = [m for m in actual if not fates.get(key(m), Fate("", "", 0)).test]
            running = {pool.submit(runner.fate, mutation): mutation for mutation in todo}
            for number, done in enumerate(concurrent.futures.as_completed(running), 1):
                mutation, fate = running[done], done.result()
                fates[key(mutation)] = fate
                what = f"{fate.how} {fate.test}" if fate.test else "SURVIVES " + fate.how
                print(f"{number}/{len(todo)} {mutation.name}: {what} ({fate.seconds:.0f} s)", flush=True)
                if inputs.log:
                    inputs.log.write_text(json.dumps(fates))
    finally:
        runner.close()
    alive = [m for m in actual if not fates[key(m)].test]
    weak = [m for m in actual if fates[key(m)].how == "other"]
    for mutation in alive:
        print(f"\n{mutation.name} survives {', '.join(own_tests(mutation.path))}\n{difference(mutation)}")
    for mutation in weak:
        print(f"found by a test of another file alone: {mutation.name}: {fates[key(mutation)].test}")
    print(f"{len(actual)} mutations: {len(alive)} survive, {len(weak)} are found by tests of other files alone")
    return int(bool(alive))
