"""The configurations that the kernels' modules list in `space`."""

import dataclasses
import functools
import itertools
from typing import Any, get_type_hints

import pytest

import attention
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


@functools.cache
def shipped_configs(arch):
    return {config for *_, config in inspect.configurations(True, arch)}


@pytest.mark.parametrize("gpu", ["H200", "A100"])
@pytest.mark.parametrize("name", ["linear_backward", "delta_rule_backward"])
def test_what_gradients_of_recurrences_launch_is_listed(name, gpu, monkeypatch):
    """With value heads that share keys, whose dQ and dK are float32 and dV is not, and without; with packed sequences. What
    `space` does not list is looked at by nobody: `inspect --check` finds no spill in it."""
    pytest.importorskip("torch")
    from planned_launches import GPUS, made, noted

    launched = {}
    for decay, key_heads, key_dim, packed in itertools.product((None, 0, 1, 2), (1, 2), (64, 128), (False, True)):
        keys, tokens, values = (1, 200, key_heads, key_dim), (1, 200, 2), (1, 200, 2, 128)
        shapes = {"q": keys, "k": keys, "v": values, "dout": values}
        arrays = {argument: made(shape, "bfloat16") for argument, shape in shapes.items()}
        if decay is not None:  # of heads, tokens, channels
            arrays["decay"] = made(((2,), tokens, (*tokens, key_dim))[decay], "float32")
        if name == "delta_rule_backward":
            arrays["beta"] = made(tokens, "float32")
        with noted(monkeypatch, gpu) as actual:
            getattr(attention, name)(**arrays, cu_seqlens=made((4,), "int32") if packed else None)
        launched |= {step.config: arrays for step in actual}
    missing = launched.keys() - shipped_configs(GPUS[gpu]["arch"])
    assert len(launched) > 10 and not missing, sorted(f"{type(config).__module__}: {config}" for config in missing)
