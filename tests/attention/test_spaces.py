"""The configurations that the kernels' modules list in `space`."""

import dataclasses
import functools
from typing import Any, get_type_hints

import pytest

from attention import inspect


@functools.cache
def declared_classes(kind):
    """{field: its class} of a dataclass, as far as annotations are classes."""
    return {name: hint for name, hint in get_type_hints(kind).items() if isinstance(hint, type) and hint is not Any}


@functools.cache
def wrong_fields(config):
    """The fields, also of objects that it holds, whose values are not of the class that their dataclass declares."""
    if isinstance(config, type) or not dataclasses.is_dataclass(config):
        return []
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    classes = declared_classes(type(config))
    mine = [(config, name) for name, x in values.items() if name in classes and not isinstance(x, classes[name])]
    return [*mine, *(wrong for x in values.values() for wrong in wrong_fields(x))]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_configuration_comes_twice(arch):
    everything, some = (list(inspect.configurations(flag, arch)) for flag in (True, False))
    assert len(set(everything)) == len(everything) and set(some) <= set(everything)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_fields_are_of_the_declared_classes(arch):
    assert not [wrong for *_, config in inspect.configurations(True, arch) for wrong in wrong_fields(config)]
