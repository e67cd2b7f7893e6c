"""tiles/calls/planner_options.py: groups among a planner's options."""

from typing import NamedTuple

import pytest

from tiles.calls.planner_options import group_options, option_types


class PairOption(NamedTuple):
    left: int | None
    right: int | None = 3


def planned(problem, causal: bool, window: PairOption, scale: float, again: "PairOption"):
    return problem


def without_groups(problem, causal: bool, scale: float):
    return problem


def with_a_field(problem, left: int, window: PairOption):
    return problem


def test_types_are_flat():
    assert option_types(without_groups) == {"causal": bool, "scale": float}
    with pytest.raises(TypeError, match="with_a_field has two options of the name left"):
        option_types(with_a_field)
    with pytest.raises(TypeError, match="planned has two options of the name left"):
        option_types(planned)


def test_groups_are_made_in_order():
    assert group_options(planned)((True, 1, 2, 0.5, None, 4)) == [True, PairOption(1, 2), 0.5, PairOption(None, 4)]
    options = (True, 0.5)
    assert group_options(without_groups)(options) is options
