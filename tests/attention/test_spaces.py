"""The configurations that the kernels' modules list in `space`."""

import pytest

from attention import inspect


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_configuration_comes_twice(arch):
    everything, some = (list(inspect.configurations(flag, arch)) for flag in (True, False))
    assert len(set(everything)) == len(everything) and set(some) <= set(everything)
