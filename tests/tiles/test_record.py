"""tiles/launching/arguments.py: several parameters under one name."""

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import load, store
from tiles import fp32, rt
from tiles.emulator import emulate
from tiles.launching.arguments import FLOAT, INT, array, declared, record, signature, types_of
from tiles.launching.arguments import parameters as passed
from tiles.launching.arrays import Operand, c_ordered
from tiles.launching.launch import Kernel

T = rt(16, 16, fp32)


@cuda.jit
def scaled(x: array(2), inputs: record(add=array(1), which=INT, times=FLOAT), nothing: record(), n: INT):
    store(x, load(x, T, (0, 0)) * inputs.times + inputs.add[inputs.which] + n, (0, 0))


def arguments():
    return np.ones((16, 16), np.float32), (np.arange(4, dtype=np.float32), 3, 2.0), (), 10


def test_declared_and_typed():
    """Its parts stand among the parameters, and are passed as they would be alone."""
    assert list(declared(scaled.py_func)) == ["x", "add", "which", "times", "n"]
    assert signature(scaled) == types_of(scaled, passed(scaled, arguments()))


@pytest.mark.parametrize(
    "run", [lambda *a: tiles.launch(scaled, 1, 32)(*a), lambda *a: emulate(scaled, (1, 1, 1), 32, a)], ids=["meaning", "ptx"]
)
def test_runs(run):
    inputs = arguments()
    run(*inputs)
    assert (inputs[0] == 1 * 2 + 3 + 10).all()


@pytest.mark.gpu
def test_runs_on_the_card():
    x, (add, *rest), nothing, n = arguments()
    device = cuda.to_device(x)
    tiles.launch(scaled, 1, 32)(device, (cuda.to_device(add), *rest), nothing, n)
    assert (device.copy_to_host() == 15).all()


def test_bound_by_the_names_of_its_parts():
    x, (add, which, times), _, n = arguments()
    kernel = Kernel(scaled, 32, None, None)
    forms = [Operand(place, c_ordered(a.shape, "float32", None)) for place, a in enumerate((x, add))]
    launch = kernel.bind(1, x=forms[0], add=forms[1], which=which, times=times, n=n)
    launch(0, x.ctypes.data, add.ctypes.data)
    assert (x == 15).all()
    with pytest.raises(TypeError, match="times: must be a.* times=None"):
        kernel.bind(1, x=forms[0], add=forms[1], which=which, n=n)


def test_a_record_of_another_length_is_refused():
    x, inputs, nothing, n = arguments()
    with pytest.raises(TypeError, match=r"inputs: takes 3 values \(add, which, times\), got 2"):
        tiles.launch(scaled, 1, 32)(x, inputs[:2], nothing, n)
