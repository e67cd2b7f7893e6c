"""Every guard of the correct kernels is needed: take one away, and the sanitizer says so, in every order. Change a count, an
index or a phase a little, and it says so, too. What it cannot object to is listed here, with the reason."""

import pathlib
import re
import types

import correct
import pytest

from tiles import Hazard

SOURCE = pathlib.Path(correct.__file__).read_text().splitlines()
ORDERS = [None, 0, 1, 2]

GUARD = re.compile(r" +\w+\.((claim|release)_registers|release|sync|store_wait|take|give|begin|expect|arrive|wait)\(")
CHANGES = [  # pattern, what it becomes
    (r"release\(j\)", "release(j + 1)"),
    (r"release\(j - 1\)", "release(j)"),
    (r"\bwait\(j\)", "wait(j + 1)"),
    (r"\bwait\(j - 1\)", "wait(j)"),
    (r"warpgroup\.wait\(s, 1\)", "warpgroup.wait(s, 2)"),
    (r"wait\(newer=1\)", "wait(newer=2)"),
    (r"(full, )j \+ 1", r"\1j + 2"),
    (r"(empty, )j\b", r"\1j + 1"),
    (r"2 \* S\.nbytes", "S.nbytes"),
    (r"2 \* S\.nbytes", "3 * S.nbytes"),
    (r"barrier\(2\)", "barrier(1)"),
    (r"barrier\(2\)", "barrier(3)"),
    (r"barrier\(1\)", "barrier(2)"),
    (r"\bK, 2, 8\)", "K, 2, 7)"),
    (r"\bK, 2, 8\)", "K, 2, 4)"),
    (r"\bK, 2, 8\)", "K, 2, 9)"),
    (r"readers=4", "readers=3"),
    (r"readers=4", "readers=5"),
    (r"readers=4, blocks", "readers=3, blocks"),
    (r"readers=4, blocks", "readers=5, blocks"),
    (r"turn\.give\(wg\)", "turn.give(wg + 1)"),
    (r"begin\(wg\)", "begin(0)"),
    (r"fill\(j,", "fill(j + 1,"),
]

HARMLESS = {
    "            warpgroup.claim_registers(240)": "more registers make a kernel faster, not right",
    "        warpgroup.sync()  # for the next round": "an mma ends for its four warps at once; each overwrites its own rows",
}


def mutants():
    """(line number, what stands there, what instead)"""
    for number, line in enumerate(SOURCE, 1):
        if line not in HARMLESS and GUARD.match(line):
            yield number, line, re.match(r" *", line)[0] + "pass"
        for old, new in CHANGES:
            if re.search(old, line) and not line.startswith("def "):
                yield number, line, re.sub(old, new, line, count=1)


def kernel_of(number):
    """The check of the kernel around a line: the next one below."""
    return next(re.match(r"def (check_\w+)", line)[1] for line in SOURCE[number:] if line.startswith("def check_"))


@pytest.mark.parametrize("number, old, new", [pytest.param(*m, id=f"{m[0]}-{m[2].strip()}") for m in mutants()])
def test_is_stopped(number, old, new):
    mutant = types.ModuleType("mutant")
    exec(compile("\n".join([*SOURCE[: number - 1], new, *SOURCE[number:]]), "mutant.py", "exec"), vars(mutant))
    for seed in ORDERS:
        with pytest.raises(Hazard):
            getattr(mutant, kernel_of(number))(seed)
