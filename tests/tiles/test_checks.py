"""tiles/launching/checks.py: what TILES_CHECK asks for, and values that an argument must not have, wherever it lies."""

import ctypes

import ml_dtypes
import numpy as np
import pytest
from cuda.bindings import driver

from tiles.calls import program as programs
from tiles.calls.plan import LruTable, Plan
from tiles.calls.program import program
from tiles.calls.schema import Schema
from tiles.launching.arrays import Array
from tiles.launching.checks import CheckOptions, check_options
from tiles.launching.frameworks import KIND_OF, Framework, describe

RUNS = []
SCHEMA = Schema(
    "kept",
    """
    x             (seqlen_q, head_dim)             real
    y             (seqlen_k, head_dim)             real         optional
    decay         (seqlen_q)|(seqlen_q, head_dim)  log          optional
    A             (head_dim)                       rate         optional
    cu_seqlens    (ends)                           ends_q       optional
    cu_seqlens_k  (ends)                           ends_k       optional
    lengths_k     (batch)                          key_lengths  optional
    b             (batch)                          real         optional
    out           (seqlen_q, head_dim)             real         output
    """,
)


class NotedStep:
    of_lengths = True

    def run(self, stream, addresses):
        RUNS.append(addresses)


@pytest.fixture
def launch_nothing(monkeypatch):
    """launch_nothing(x, decay=, A=, cu_seqlens=): a launch of nothing."""
    for table in ("GUARDED_CALLS", "REMEMBERED"):
        monkeypatch.setattr(programs, table, LruTable(programs.ENTRIES))
    monkeypatch.setattr(programs, "WATCHED_PLANS", LruTable(programs.PLAN_KINDS))
    monkeypatch.delenv("TILES_CHECK", raising=False)
    RUNS.clear()
    function = program(SCHEMA)(lambda problem: Plan([NotedStep()]))

    def call(**given):
        given.setdefault("x", np.zeros((5, 3), np.float32))
        if "cu_seqlens" in given:
            given["b"] = given["x"][:1, 0]
        if "cu_seqlens_k" in given or "lengths_k" in given:
            given["y"] = np.zeros((4, 3), np.float32)
        return function(None, tuple(given.get(name) for name in SCHEMA.names), ())

    return call


def decays(dtype=np.float32, at=(3, 1), value=0.25):
    x = np.full((5, 3), -1, dtype)
    x[at] = value
    return x


WRONG = [
    (dict(decay=decays()), r"decay: must not be above 0: decay\[3, 1\]=0.25, .*; .* pass log\(a\) .* attention.gates"),
    (dict(decay=decays(ml_dtypes.bfloat16)), r"decay: must not be above 0: decay\[3, 1\]=0.25"),
    (dict(decay=decays(value=np.inf)[:, 1]), r"decay: must not be above 0: decay\[3\]=inf"),
    (dict(A=decays(at=(2, 0))[2]), r"A: must not be above 0: A\[0\]=0.25, .* pass -exp\(A_log\)"),
    (dict(cu_seqlens=np.array([1, 5])), r"cu_seqlens: must begin at 0: cu_seqlens\[0\]=1, cu_seqlens.shape=\(2,\); .* 0 and"),
    (dict(cu_seqlens=np.array([0, 4, 3, 5])), r"cu_seqlens: must ascend, and this comes after 4: cu_seqlens\[2\]=3"),
    (dict(cu_seqlens=np.array([0, 3], np.int32)), r"cu_seqlens: must end at 5, .*: cu_seqlens\[1\]=3"),
    (dict(cu_seqlens=np.array([0, 5]), cu_seqlens_k=np.array([0, 5])), r"cu_seqlens_k: must end at 4, .*: cu_seqlens_k\[1\]=5"),
    (dict(lengths_k=np.array([0, 4, -1])), r"lengths_k: must be from 0 to 4: lengths_k\[2\]=-1"),
    (dict(lengths_k=np.array([5])), r"lengths_k: must be from 0 to 4: lengths_k\[0\]=5"),
    (dict(cu_seqlens=np.array([0, 7])), r"cu_seqlens: must end at 5, .*: cu_seqlens\[1\]=7"),
]  # fmt: skip
RIGHT = [
    dict(decay=decays(value=0)),
    dict(decay=decays(value=-np.inf)),
    dict(decay=decays(value=np.nan)),  # which shows in the result
    dict(A=np.zeros(3, np.float32)),
    dict(cu_seqlens=np.array([0, 0, 2, 2, 5, 5])),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
@pytest.mark.parametrize("check", [None, "0", "1"])
def test_values_in_host_memory_are_always_checked(launch_nothing, given, said, check, monkeypatch):
    if check:
        monkeypatch.setenv("TILES_CHECK", check)
    for _ in range(2):  # planned, and known
        with pytest.raises(ValueError, match="^" + said):
            launch_nothing(**given)
    assert not RUNS
    launch_nothing(**{name: np.zeros_like(x) for name, x in given.items() if "cu_seqlens" not in name})
    assert len(RUNS) == 1


@pytest.mark.parametrize("given", RIGHT)
def test_right_values(launch_nothing, given):
    launch_nothing(**given)
    assert len(RUNS) == 1


def test_a_known_form_is_checked_anew(launch_nothing):
    decay = decays(value=-1)
    launch_nothing(decay=decay)
    decay[4, 2] = 1e-30
    with pytest.raises(ValueError, match=r"^decay: must not be above 0: decay\[4, 2\]=1"):
        launch_nothing(decay=decay)
    assert len(RUNS) == 1


# ---- on a GPU ----------------------------------------------------------------------------------------------------------
class LentArray:
    """An array that says it lies on device 3."""

    def __init__(self, array):
        self.array = array


class LentKind(Framework):
    def describe(self, x, name):
        array = describe(x.array, name)
        return Array(array.pointer, array.form._replace(device=3), x, self)

    def allocator(self, owner, shape, dtype):
        return lambda: LentArray(np.empty(shape, dtype))


@pytest.fixture
def card(fake_cuda, monkeypatch):
    """lent(array), as if in device memory; how often it was read; what cuStreamIsCapturing says."""
    copies, status = [], driver.CUstreamCaptureStatus
    state = {"copies": copies, "now": status.CU_STREAM_CAPTURE_STATUS_NONE}

    def copy(host, pointer, nbytes):
        copies.append(nbytes)
        ctypes.memmove(host, pointer, nbytes)
        return (driver.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(driver, "cuMemcpyDtoH", copy)
    monkeypatch.setattr(driver, "cuStreamIsCapturing", lambda stream: (driver.CUresult.CUDA_SUCCESS, state["now"]))
    monkeypatch.setitem(KIND_OF, LentArray, LentKind())
    return state


def lent(given):
    return {name: LentArray(x) for name, x in given.items()} | {"x": LentArray(np.zeros((5, 3), np.float32))}


@pytest.mark.parametrize("check", ["", "0", "sm_80"])
def test_device_memory_is_not_read_unless_asked(launch_nothing, card, monkeypatch, check):
    monkeypatch.setenv("TILES_CHECK", check)
    launch_nothing(**lent(dict(decay=decays())))
    assert len(RUNS) == 1 and not card["copies"]


@pytest.mark.parametrize(("given", "said"), [row for row in WRONG if not row[0].keys() & {"cu_seqlens", "lengths_k"}])
def test_device_memory_is_read_when_asked(launch_nothing, card, monkeypatch, fake_cuda, given, said):
    monkeypatch.setenv("TILES_CHECK", "1")
    with pytest.raises(ValueError, match="^" + said):
        launch_nothing(**lent(given))
    assert not RUNS and card["copies"] and fake_cuda


def test_views_are_copied_as_they_lie(launch_nothing, card, monkeypatch):
    monkeypatch.setenv("TILES_CHECK", "1")
    wide = np.full((5, 8), 9, np.float32)
    wide[:, 1:7:2] = -1
    launch_nothing(**lent(dict(decay=wide[:, 1:7:2])))
    wide[4, 5] = 2
    with pytest.raises(ValueError, match=r"^decay: must not be above 0: decay\[4, 2\]=2.0"):
        launch_nothing(**lent(dict(decay=wide[:, 1:7:2])))
    assert card["copies"] == [4 * (4 * 8 + 5)] * 2


def test_what_is_captured_has_no_values_yet(launch_nothing, card, monkeypatch):
    monkeypatch.setenv("TILES_CHECK", "1")
    card["now"] = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    launch_nothing(**lent(dict(decay=decays())))
    assert len(RUNS) == 1 and not card["copies"]


# ---- TILES_CHECK ---------------------------------------------------------------------------------------------------
def test_what_is_asked(monkeypatch):
    said = {"": ("sm_90a", False), "0": (None, False), "1": ("sm_90a", True), "sm_80": ("sm_80", False)}
    for value, meaning in said.items():
        monkeypatch.setenv("TILES_CHECK", value)
        assert check_options() == CheckOptions(*meaning)
    monkeypatch.setenv("TILES_CHECK", "yes")
    with pytest.raises(ValueError, match="^TILES_CHECK must be 0, 1 or an architecture such as sm_80, got 'yes'"):
        check_options()
    monkeypatch.delenv("TILES_CHECK")
    assert check_options() == CheckOptions("sm_90a", False)
