"""Launches that overlap the previous one (PDL), unless that one writes their weights."""

import pytest

from fuse.calls import early_launch
from fuse.calls.early_launch import EarlyLaunch, memory_of
from tiles.launching.arrays import Operand, c_ordered
from tiles.launching.recording import RecordedStep


class BoundName:
    """A stand-in for a launch, which notes that it ran, early or late."""

    def __init__(self, name, ran):
        self.name, self.ran = name, ran

    def without_overlap(self):
        return BoundName("late", self.ran)

    def run(self, stream, addresses):
        self.ran.append((self.name, stream, tuple(addresses)))


@pytest.fixture
def step(monkeypatch):
    """A step on x, w and y of 64 bytes each, at the places 0, 1 and 2, and a list of what it ran."""
    monkeypatch.setattr(early_launch, "WRITTEN", {})
    ran = []
    x, w, y = (Operand(n, c_ordered((16,), "float32", None)) for n in range(3))
    return EarlyLaunch(RecordedStep.from_places(BoundName("early", ran), (0, 1, 2), True), [memory_of(w)], [memory_of(y)]), ran


LATE, EARLY = [1000, 1060, 940], [2000, 1064, 936]  # where weights lie, beside what was written from 1000 to 1064


@pytest.mark.parametrize(
    ("weights", "stream", "how"),
    [*((w, 5, "late") for w in LATE), *((w, 5, "early") for w in EARLY), (1000, 6, "early")],
)
def test_weights_that_were_just_written(step, weights, stream, how):
    run, ran = step
    run.run(5, [100, 200, 1000])
    run.run(stream, [1000, weights, 3000])  # its rows may be what was written: they are waited for
    assert ran == [("early", 5, (100, 200, 1000)), (how, stream, (1000, weights, 3000))]


def test_two_launches_before_is_done(step):
    run, ran = step
    for weights, result in ((200, 1000), (200, 2000), (1000, 3000)):
        run.run(5, [100, weights, result])
    assert [name for name, *_ in ran] == ["early"] * 3
