"""attention.forward's variants as compiled, in the emulator."""

import numpy as np
import pytest
from forward_checks import agree, inputs
from places import OnInterpreter
from test_variants import CASES, HEADS, numbers

COMPILED = [("sm_90", "sm_90a"), pytest.param("sm_80", "sm_80", marks=pytest.mark.release)]
pytestmark = pytest.mark.parametrize(("family", "arch"), COMPILED)


def test_as_compiled(family, arch, as_compiled):
    """What the kernels' PTX computes: of Hopper's lists, functions and their arrays, of sm_80's what is built in."""
    as_compiled(arch)
    options = CASES["everything"] | {"bias": numbers(1, HEADS, 1, 140)}
    functions = {"mask", "score", "aux", "sink"}
    options = {name: x for name, x in options.items() if (name in functions) == (family == "sm_90")}
    agree(OnInterpreter(), *inputs(1, 40, 140, HEADS, 1, 64), family=family, **options)


def test_packed_as_compiled(family, arch, as_compiled):
    as_compiled(arch)
    ends, ends_k, in_use = (np.array(x, np.int32) for x in ([0, 9, 9, 60], [0, 40, 45, 150], [40, 5, 90]))
    options = dict(cu_seqlens=ends, cu_seqlens_k=ends_k, lengths_k=in_use, window=(30, 5))
    agree(OnInterpreter(), *inputs(1, 60, 150, 1, 1, 64), family=family, **options)
