"""tiles/launching/loaded_code.py: machine code that is asked for together is made at once, and what a program prepares
meanwhile."""

import sys
import threading
from types import SimpleNamespace

import pytest
from host_driver import on_device
from numba import cuda

from tiles.calls.plan import Plan
from tiles.calls.program import program
from tiles.calls.schema import Schema
from tiles.compiling.compiler import Compiled, CompileError
from tiles.compiling.line_table import SourcePlace
from tiles.launching import loaded_code
from tiles.launching.arguments import array

launching = sys.modules["tiles.launching.launch"]
COPIES = Schema("copies", "x (seqlen, head_dim) float32\n out (seqlen, head_dim) float32 output")


@cuda.jit
def one(gX: array(2), gOut: array(2)):
    """A kernel that does nothing."""


@cuda.jit
def two(gX: array(2), gOut: array(2)):
    """Another kernel that does nothing."""


@cuda.jit
def three(gX: array(2), gOut: array(2)):
    """A third kernel that does nothing."""


machine_code = loaded_code.machine_code  # the `gpu` of these tests makes none


def copying(*kernels, prepare_next=None):
    """A program of these kernels, one behind the other."""

    @program(COPIES, prepare_next=prepare_next)
    def copies(problem) -> Plan:
        bound = [launching.Kernel(x, 32, SimpleNamespace(nbytes=0, blocks=1), 0) for x in kernels]
        return Plan([x.bind(1, gX=problem["x"], gOut=problem["out"]) for x in bound])

    return copies


def called(copies):
    x, out = on_device(4, 8), on_device(4, 8)
    return copies(None, (x, out), ())


def test_kernels_of_a_plan_are_compiled_at_once(gpu, monkeypatch):
    """Each waits for the other; the second call finds them."""
    both, result = threading.Barrier(2, timeout=60), []

    def machine_code(kernel, *_):
        both.wait()
        result.append(kernel)
        return Compiled(b"", "k", "")

    monkeypatch.setattr(loaded_code, "machine_code", machine_code)
    gpu.count = 18
    called(copying(one, two))
    assert sorted(x.py_func.__name__ for x in result) == ["one", "two"] and len(gpu.launches) == 2
    called(copying(two, one))
    assert len(result) == 2 and len(gpu.launches) == 4


def test_numba_takes_kernels_in_the_order_they_were_asked_for(gpu, monkeypatch):
    """Also if a later one is ready before, or one that was asked for first lies on disk or is refused."""
    ready, done, order = threading.Event(), threading.Event(), []

    def key(kernel, *_):
        ready.set() if kernel is three else ready.wait(60)
        return kernel

    def compile_kernel(kernel, signature, arch, turn):
        with turn:
            order.append(kernel)
            if kernel is two:
                raise ValueError("two is refused")
            done.set()
        return Compiled(b"", "k", "")

    monkeypatch.setattr(loaded_code, "machine_code", machine_code)
    monkeypatch.setattr(loaded_code.digest, "key", key)
    monkeypatch.setattr(loaded_code.cache, "load", lambda name: Compiled(b"", "k", "") if name is one else None)
    monkeypatch.setattr(loaded_code.cache, "store", lambda *_: None)
    monkeypatch.setattr(loaded_code, "compile_kernel", compile_kernel)
    with pytest.raises(ValueError, match="two is refused"):
        called(copying(one, two, three))
    assert done.wait(60) and order == [two, three]


def test_of_a_call_kernels_with_the_most_code_are_compiled_first(gpu, monkeypatch):
    """The linker takes the longest for them. Those of the next call come behind all of them."""
    order, prepared = [], threading.Event()

    def compile_kernel(kernel, signature, arch, turn):
        with turn:
            order.append(kernel)
        return Compiled(b"", "k", "")

    def prepare_next(arrays, *_):
        copying(three).prepare({"x": arrays["x"].form, "out": arrays["out"].form}, (), "bshd")
        prepared.set()

    monkeypatch.setattr(loaded_code, "machine_code", machine_code)
    monkeypatch.setattr(loaded_code.digest, "key", lambda kernel, *_: kernel)
    monkeypatch.setattr(loaded_code.cache, "load", lambda name: None)
    monkeypatch.setattr(loaded_code.cache, "store", lambda *_: None)
    monkeypatch.setattr(loaded_code, "compile_kernel", compile_kernel)
    monkeypatch.setattr(loaded_code, "estimate_size", {one: 1000, two: 2000, three: 3000}.get)
    gpu.count = 18
    called(copying(one, two, prepare_next=prepare_next))
    assert prepared.wait(60) and order == [two, one, three]


def test_what_cannot_be_compiled_is_said_and_tried_again(gpu, monkeypatch):
    tries = []

    def machine_code(kernel, *_):
        tries.append(kernel)
        if kernel is two and tries.count(two) == 1:
            raise RuntimeError("two uses what is not there")
        return Compiled(b"", "k", "")

    monkeypatch.setattr(loaded_code, "machine_code", machine_code)
    copies, gpu.count = copying(one, two), 18
    with pytest.raises(RuntimeError, match="two uses what is not there"):
        called(copies)
    assert not gpu.launches
    called(copies)
    assert (tries.count(one), tries.count(two), len(gpu.launches)) == (1, 2, 2)


def test_what_is_prepared_meanwhile_is_waited_for(gpu, monkeypatch):
    """The second program's kernel is being made when the first one is launched, and is made once, whoever asks first. It is
    prepared when Numba is done with the first one, before that is linked."""
    begun, go_on, result, turns = threading.Event(), threading.Event(), [], []

    def machine_code(kernel, signature, gpu, turn):
        with turn:
            turns.append(kernel)
        if kernel is two:
            begun.set()
            assert go_on.wait(60)
        else:
            assert begun.wait(60)
        result.append(kernel)
        return Compiled(b"", "k", "")

    monkeypatch.setattr(loaded_code, "machine_code", machine_code)
    second, gpu.count = copying(two), 18
    heard = []

    def prepare_next(arrays, result, options, layout):
        heard.append(([*arrays], arrays["x"].shape, result["out"].shape, options, layout))
        assert turns == [one]
        second.prepare({"x": arrays["x"].form}, (), layout)
        raise ValueError("of which nobody hears")

    called(copying(one, prepare_next=prepare_next))
    assert result == [one] and len(gpu.launches) == 1
    threading.Timer(0.05, go_on.set).start()
    called(second)
    assert result == [one, two] and len(gpu.launches) == 2 and heard == [(["x", "out"], (4, 8), (4, 8), {}, "bshd")]
    called(copying(one, prepare_next=prepare_next))
    assert len(heard) == 1, "all was there"


def test_shared_memory_is_allowed_once(gpu):
    """The driver hears of more than it has allowed before, up to what the GPU has."""
    device = loaded_code.Device(0)
    code, most = loaded_code.LoadedKernel(Compiled(b"", "k", ""), device), device.shared_bytes
    for nbytes in 0, 1000, 1000, 1001, 900, most:
        code.allow(nbytes)
    assert gpu.attributes == [1000, 1001, most]
    with pytest.raises(ValueError, match=rf"^shared: {most + 1} bytes a block, but .* has {most}"):
        code.allow(most + 1)


def test_what_was_compiled_is_stored(gpu, monkeypatch):
    """Under its name; what lies there is not compiled. A kernel is refused by the instructions that the GPU lacks, and any
    other error of the compiler is its own."""
    stored, complaints = {}, []

    def compile_kernel(kernel, signature, arch, turn):
        if complaints:
            raise CompileError("one", arch, complaints)
        return Compiled(b"", "k", "")

    monkeypatch.setattr(loaded_code.digest, "key", lambda *_: "name")
    monkeypatch.setattr(loaded_code.cache, "load", stored.get)
    monkeypatch.setattr(loaded_code.cache, "store", stored.__setitem__)
    monkeypatch.setattr(loaded_code, "compile_kernel", compile_kernel)
    compiled = machine_code(one, (), loaded_code.Device(0))
    complaints.append(("Instruction 'wgmma.fence' not supported on .target 'sm_80'", SourcePlace()))
    assert stored == {"name": compiled} and machine_code(one, (), loaded_code.Device(0)) is compiled
    stored["name"] = Compiled(b"", "k", "ptxas warning : (C7510) wgmma is serialised")
    with pytest.warns(RuntimeWarning, match=r"^one: .*\(C7510\)"):
        machine_code(one, (), loaded_code.Device(0))
    stored.clear()
    with pytest.raises(RuntimeError, match="^one uses wgmma.fence, which .*Fake.* does not have"):
        machine_code(one, (), loaded_code.Device(0))
    complaints[:] = [("too many registers", SourcePlace())]
    with pytest.raises(CompileError, match="too many registers"):
        machine_code(one, (), loaded_code.Device(0))


def test_kernels_that_nobody_compiles_later(gpu, monkeypatch):
    """Outside of a batch `later` changes nothing, and inside one a kernel that must be there now is, whoever asked for it
    before."""
    device, kernels = loaded_code.Device(0), []
    monkeypatch.setattr(loaded_code, "machine_code", lambda kernel, *_: kernels.append(kernel) or Compiled(b"", "k", ""))
    assert isinstance(loaded_code.load(one, (), device, later=True), loaded_code.LoadedKernel)
    with loaded_code.compile_together() as batch:
        assert isinstance(loaded_code.load(two, (), device), loaded_code.LoadedKernel) and not batch
        for count in 1, 2:
            assert loaded_code.load(three, (), device, later=True) is None and len(batch.futures) == count
        assert isinstance(loaded_code.load(three, (), device), loaded_code.LoadedKernel)
    assert kernels == [one, two, three] and gpu.loaded == 3
