"""Mutations are what they say: valid Python in one place of a file, under names that stay; and what a test notices is told from
what survives."""

import ast
import random

import pytest

from attention.inspect import MODULES
from tests.mutation import by_hand, killers, run
from tests.mutation.rules import mutations
from tests.mutation.sources import PACKAGES, ROOT, SourceFile, sources

MADE = {}  # {path: its mutations}, made once


def made(path):
    data = (ROOT / path).read_bytes()
    if path not in MADE:
        MADE[path] = list(mutations(SourceFile(path, data)))
    return data, MADE[path]


def of_text(text, path="tiles/some.py"):
    """{name without its path: what becomes of the text}."""
    data = text.encode()
    actual = {m.name.partition("::")[2]: m.applied(data).decode() for m in mutations(SourceFile(path, data))}
    for name, mutated in actual.items():
        assert mutated != text, name
        ast.parse(mutated)
    return actual


# ---- all sources -----------------------------------------------------------------------------------------------------
PARTS = [pytest.param(part, marks=[pytest.mark.release] * (part > 0)) for part in range(4)]  # of each package's sources


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("package", PACKAGES)
def test_every_source_has_mutations_that_are_python(package, part):
    rng = random.Random(0)
    for number, path in enumerate(sources()):
        if path.startswith(f"{package}/") and number % len(PARTS) == part:
            data, actual = made(path)
            assert len({m.name for m in actual}) == len(actual), path
            for mutation in rng.sample(actual, min(len(actual), 2)):
                mutated = mutation.applied(data)
                assert mutated != data and ast.parse(mutated), mutation.name
                undone = mutated
                for edit in sorted(mutation.edits):  # the bytes around the edits are as they were
                    undone = undone[: edit.start] + data[edit.start : edit.end] + undone[edit.start + len(edit.text) :]
                assert undone == data, mutation.name


def test_those_by_hand_stand_where_they_say():
    actual = list(by_hand.by_hand())
    assert len({m.name for m in actual}) == len(actual) >= 100
    for mutation in actual:
        mutated = mutation.applied((ROOT / mutation.path).read_bytes())
        if mutation.path.endswith(".py"):
            ast.parse(mutated)


def test_what_is_neutral_is_there():
    actual = [m.name for m in by_hand.by_hand()]
    for pattern, why in by_hand.neutral_names().items():
        names = [m.name for m in made(pattern.partition("::")[0])[1]] + actual
        assert why and any(by_hand.fits(name, pattern) for name in names), pattern


def test_every_source_has_tests_of_its_own():
    assert not [path for path in sources() if not killers.own_tests(path)]
    for pattern, tests in killers.table().items():
        assert any(killers.fnmatch.fnmatchcase(path, pattern.removeprefix("+")) for path in sources()), (
            f"no source is {pattern}"
        )
        for test in tests:
            assert any(killers.fnmatch.fnmatchcase(file, test) for file in killers.files_of_tests()), f"no test file is {test}"


@pytest.mark.parametrize("family", ["linear", "delta", "short_conv", "gated_norm", "based", "hedgehog", "tokens"])
def test_kernels_of_the_recurrent_family_have_tests_of_that_family(family):
    """A row for softmax's gradients fits the names of others, too, and its tests launch none of these kernels."""
    for module in MODULES[family]:
        tests = killers.own_tests(module.__name__.replace(".", "/") + ".py")
        assert not [test for test in tests if "/softmax/" in test], module


# ---- the rules -------------------------------------------------------------------------------------------------------
RULES = {  # {text: {fault: what it becomes}}
    "fence(b)": {"drop-fence#1": "pass"},
    "x = wait(y, 1)": {"no-wait#1": "x = (y)"},
    "b.xor(p, b.u32(1))": {"parity#1": "p"},
    "f(b, phase)": {"parity#1": "f(b, b.xor(phase, b.u32(1)))"},
    "f(w, at.parity)": {"parity#1": "f(w, (at.parity ^ 1))"},
    "for i in s:\n    n += i": {"drop-statement#1": "for i in s:\n    pass", "-=for+=#1": "for i in s:\n    n -= i"},
    "with b.if_then(x): y": {"no-guard#1": 'with __import__("contextlib").nullcontext(): y'},
    "x = a < b": {"<=for<#1": "x = a <= b", "<-1#1": "x = a < (b - 1)"},
    "x = a <= b + c": {"<for<=#1": "x = a < b + c", "<=+1#1": "x = a <= ((b + c) + 1)"},
    "x = 0 <= a < 7": {"<=+1#1": "x = 0 <= (a + 1) < 7", "<-1#1": "x = 0 <= a < 6"},
    "x = (a  # > b\n  > b)": {">=for>#1": "x = (a  # > b\n  >= b)"},
    "x = a is not b": {"isforis_not#1": "x = a is b"},
    'b.icmp_signed("<", x, y)': {
        "emitted-<=for<#1": 'b.icmp_signed("<=", x, y)',
        "icmp_unsignedforicmp_signed#1": 'b.icmp_unsigned("<", x, y)',
    },
    "range(2, n)": {"range+1#1": "range(2, (n + 1))", "range-1#1": "range(2, (n - 1))", "range-start+1#1": "range(3, n)"},
    "f(int32(end - key))": {"int32+1#1": "f(int32(((end - key) + 1)))", "int32-1#1": "f(int32(((end - key) - 1)))"},
    "truncate(x, 1, end)": {"truncate-1#1": "truncate(x, 1, (end - 1))"},
    "x[0], x[a:b]": {"index+1#1": "x[1], x[a:b]", "slice+1#1": "x[0], x[(a + 1):b]", "slice-1#1": "x[0], x[a:(b - 1)]"},
    "b.u32(7)": {"immediate+1#1": "b.u32(8)"},
    "y = a + b * n": {"-for+#1": "y = a - b * n", "*+1#1": "y = a + b * (n + 1)"},
    "n = -(-x // 64)": {"floorforceil#1": "n = (x // 64)"},
    "x = np.maximum(a, b)": {"minimumformaximum#1": "x = np.minimum(a, b)"},
    "f(rows, cols)": {"swap-arguments#1": "f(cols, rows)"},
    "x[row, col]": {"swap-indices#1": "x[col, row]"},
    "if a:\n    b()": {"never#1": "if False:\n    b()", "always#1": "if True:\n    b()"},
    "if a:\n    raise ValueError(x + 1)": {"unchecked#1": "if False:\n    raise ValueError(x + 1)"},
    "y = [i for i in x if (n := i)]": {"never#1": "y = [i for i in x if (((n := i) and False))]"},
    "x = a and b and c": {"orforand#1": "x = a or b or c", "drop-and#2": "x = ((a) and (c))"},
    "f(x, fenced=True)": {"flip-fenced#1": "f(x, fenced=False)"},
    "f(x, fenced=flag)": {"unfenced#1": "f(x, fenced=False)"},
    "store(x, y, at, 1, 3, False)": {"pass-True#1": "store(x, y, at, 1, 3, True)"},
    "f(x, scale=s, lag=2)": {"drop-scale=#1": "f(x, lag=2)", "drop-lag=#1": "f(x, scale=s)"},
}


@pytest.mark.parametrize("text", RULES)
def test_rules(text):
    actual = of_text(text)
    assert RULES[text].items() <= {name.removeprefix("::"): mutated for name, mutated in actual.items()}.items()


UNSEEN = '''
"""a < b"""
from x import y
def f(n: "a < b" = None) -> "c + d":
    """a < b"""
    assert g, a + b
    log.debug(a + b)
    print(f"{a + b}")
    raise ValueError(a + b)
    x = load(x, 1, at, 1, 3, True)
    x = sync(False)
    x = load(x, 1, at, aligned=flag)
    x = load(x, 1, at, aligned=True)
class A:
    def __repr__(self):
        return a + b
'''


def test_what_nobody_can_notice_is_not_made():
    assert not of_text(UNSEEN)


BEFORE = """
@lowers(op)
def _(x):
    é = x < 1  # ü
    def emit(b):
        return x < 2
class A:
    def f(self): return a + b
    def f(self): return c + d
"""
AFTER = BEFORE.replace("\n@lowers", "\ndef new(x):\n    return x < 5\n\n@lowers").replace("x < 1", "x    <    1")
AFTER = AFTER.replace("class A:", "class A:\n    def e(self): return x + y")


def test_names_stay_when_other_lines_change():
    before, after = of_text(BEFORE), of_text(AFTER)
    assert (
        {"lowers(op)::<=for<#1", "lowers(op).emit::<=for<#1", "A.f::-for+#1", "A.f~2::-for+#1"} <= before.keys() <= after.keys()
    )
    assert "é = x <= 1  # ü" in before["lowers(op)::<=for<#1"] and "c - d" in after["A.f~2::-for+#1"]


# ---- a small project -------------------------------------------------------------------------------------------------
SMALL = {
    "tiles/some.py": "def least(x, low):\n    return low if x < low else x\n",
    "tiles/text.jinja": "{{ a }} + {{ b }}",
    "tests/tiles/test_some.py": """from tiles.some import least
def test_least():
    assert least(1, 5) == 5 and least(7, 5) == 7
def test_broken():
    assert least(1, 5) == 6
""",
}


@pytest.fixture
def small(tmp_path):
    for name, text in SMALL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_test_notices_or_does_not(small, monkeypatch, capsys):
    """Of two faults the small project's test notices one: x < low is no other than x <= low. A test that fails anyway tells
    nothing, and is said to."""
    monkeypatch.setattr(run, "own_tests", lambda path: ("tests/tiles/test_some.py",))
    data = (small / "tiles/some.py").read_bytes()
    actual = {m.name.rpartition("::")[2]: m for m in mutations(SourceFile("tiles/some.py", data))}
    runner = run.Runner(root=small)
    try:
        assert runner.fate(actual["never#1"])[:2] == ("tests/tiles/test_some.py::test_least", "own")
        assert runner.fate(actual["<=for<#1"])[:2] == ("", "")
        assert (runner.all_places[0].tree / "tiles/some.py").read_bytes() == data
    finally:
        runner.close()
    assert "test_broken" in capsys.readouterr().out


def test_by_hand(small):
    table = small / "by_hand.toml"
    table.write_text(
        """["tiles/some.py::least"]\n"the other one" = ['else x', 'else low']\n["tiles/text.jinja::"]\n"no sum" = ['+', '-']"""
    )
    one, two = by_hand.by_hand(table, small)
    assert one.name == "tiles/some.py::least::the-other-one" and two.applied(b"{{ a }} + {{ b }}") == b"{{ a }} - {{ b }}"
    assert one.applied((small / one.path).read_bytes()) == b"def least(x, low):\n    return low if x < low else low\n"
    for anchor in ("tiles/some.py::most", "tiles/other.py::least", "tiles/text.jinja::"):
        table.write_text(f"""["{anchor}"]\n"wrong" = ['else x', 'else y']""")
        with pytest.raises(LookupError, match=r"else x.*must stand once.*stands in: tiles/some.py"):
            list(by_hand.by_hand(table, small))


def test_a_sample_has_all_kinds():
    actual = [m for path in ("tiles/ring.py", "tiles/layout.py") for m in made(path)[1]]
    some = run.sampled(actual, 30, seed=1)
    assert len(set(some)) == 30 and some == run.sampled(actual, 30, seed=1) != run.sampled(actual, 30, seed=2)
    assert len({run.fault(m) for m in some}) >= 25
