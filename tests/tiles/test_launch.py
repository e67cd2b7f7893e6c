"""tiles/launching/launch.py and interpreted_launch.py: what launches refuse, where they run, what compiling says."""

import contextlib
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from kernels import copies, scale
from numba import cuda
from numba.cuda import types
from numba.cuda.cudadrv.error import CudaSupportError

import tiles
from ops import warpgroup, zeros
from tiles import bf16, rt, shared, st
from tiles.compiling.compiler import Compiled
from tiles.compiling.numba_types import Value
from tiles.launching import interpreted_launch, loaded_code


# ---- what launch refuses ---------------------------------------------------------------------------------------------
@cuda.jit(launch_bounds=(128, 1))
def small(x):
    pass


WRONG = {
    "kernel": (lambda: tiles.launch(len, 1, 32), TypeError, "@cuda.jit"),
    "grid": (lambda: tiles.launch(scale, 0, 32), ValueError, "grid must be .* got 0"),
    "grid axes": (lambda: tiles.launch(scale, (1, 1, 1, 1), 32), ValueError, "up to three"),
    "grid rows": (
        lambda: tiles.launch(scale, (1, 65536), 32),
        ValueError,
        "grid must have at most 65535 blocks along its second",
    ),
    "grid planes": (lambda: tiles.launch(scale, (1, 1, 65536), 32), ValueError, "at most 65535 .* got .1, 1, 65536"),
    "block": (lambda: tiles.launch(scale, 1, 32.0), ValueError, "block must be"),
    "threads": (lambda: tiles.launch(scale, 1, (32, 33)), ValueError, "1056 threads.*up to 1024"),
    "bounds": (lambda: tiles.launch(small, 1, 160), ValueError, "small is made for up to 128"),
    "cluster": (lambda: tiles.launch(scale, 3, 32, cluster=2), ValueError, "cluster=2 must divide grid=3"),
    "a large cluster": (
        lambda: tiles.launch(scale, 32, 32, cluster=16),
        ValueError,
        "a cluster has at most 8 blocks, got cluster=16",
    ),
    "shared": (lambda: tiles.launch(scale, 1, 32, shared="1024"), TypeError, r"must be a tiles.shared\(...\), got '1024'"),
    "count": (lambda: tiles.launch(scale, 1, 32)(1), TypeError, r"scale takes 3 arguments \(source, target, factor\), got 1"),
    "names": (
        lambda: tiles.launch(small, 1, 32)(x=np.zeros(1)),
        TypeError,
        "small takes its arguments in their order",
    ),
    "dtype": (
        lambda: tiles.launch(scale, 1, 32)(*np.zeros((2, 16, 64)), 1.0),
        TypeError,
        r"convert it .*: x.astype\(np.float32",
    ),
    "block axes": (lambda: tiles.launch(small, 1, (32, 2))(np.zeros(1)), ValueError, "blocks of one axis"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses(case):
    make, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        make()


def test_numbas_own_launch_without_a_gpu(monkeypatch):
    """Names ours, once, behind what Numba says."""

    def no_driver(*_):
        raise CudaSupportError("CUDA driver library cannot be found.\n:")

    monkeypatch.setattr(cuda.dispatcher.CUDADispatcher, "_select_launch_config_dispatcher", no_driver)
    with pytest.warns(), pytest.raises(CudaSupportError, match=r"^CUDA driver .*found.\n`kernel.* tiles.launch\(.*takes none$"):
        scale[1, 32](1, 2, 3)


# ---- in the interpreter ------------------------------------------------------------------------------------------------
def test_arrays_in_host_memory_run_in_the_interpreter_and_a_log_line_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(interpreted_launch, "_announced", [])
    x = np.arange(32 * 48, dtype=np.float32).reshape(32, 48)
    y = np.full_like(x, np.nan)
    with caplog.at_level(logging.INFO):
        for factor in (2.0, 3):
            tiles.launch(scale, (2, 3), 32)(x, y, factor)
            np.testing.assert_array_equal(y, factor * x)
    (record,) = [r for r in caplog.records if r.name.startswith("tiles")]
    assert "scale runs in the interpreter" in record.getMessage()


def test_a_kernel_is_called_by_its_short_name(caplog, monkeypatch):
    """`scale`, also where a function made it: not test_...<locals>.scale."""
    monkeypatch.setattr(interpreted_launch, "_announced", [])

    @cuda.jit
    def scale(x):
        pass

    with caplog.at_level(logging.INFO):
        tiles.launch(scale, 1, 32)(np.zeros(3, np.float32))
    assert [r.getMessage().split()[0] for r in caplog.records if r.name.startswith("tiles")] == ["scale"]
    with pytest.raises(TypeError, match=r"^scale takes 1 arguments \(x\), got 0"):
        tiles.launch(scale, 1, 32)()


def test_torch_tensors_in_host_memory():
    torch = pytest.importorskip("torch")
    x, y = torch.ones(16, 16, dtype=torch.bfloat16), torch.zeros(16, 16, dtype=torch.bfloat16)
    bound = tiles.launch(scale, 1, 32).bind(x, y, 3.0)
    bound(0, x.data_ptr(), y.data_ptr())
    assert (y == 3).all()


def test_an_array_without_memory_is_refused():
    """A planner bound the kernel to a result that this call neither passes nor allocates: its address is 0."""
    x = np.zeros((16, 16), np.float32)
    bound = tiles.launch(scale, 1, 32).bind(x, x, 3.0)
    with pytest.raises(ValueError, match=r"^scale: target has no memory, but elements: shape=\(16, 16\); bind .* None if"):
        bound(0, x.ctypes.data, 0)
    empty = tiles.launch(scale, 1, 32).bind(x[:0], x[:0], 3.0)
    empty(0, 0, 0)


def test_a_kernel_without_arrays_runs_in_the_interpreter(capsys):
    @cuda.jit
    def hello(n):
        print("hello", n)

    tiles.launch(hello, 1, 32)(3)
    assert "hello 3" in capsys.readouterr().out


def test_the_seed_reaches_the_interpreter(monkeypatch):
    seen = []
    monkeypatch.setattr(
        interpreted_launch, "interpret", lambda kernel, grid, threads, args, shared, seed, *_: seen.append(seed)
    )
    x = np.zeros((16, 16), np.float32)
    for seed in ("", "7"):
        monkeypatch.setenv("TILES_SEED", seed)
        tiles.launch(scale, 1, 32)(x, x, 1.0)
    assert seen == [None, 7]


# ---- machine code ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch, lacks", [("sm_80", "cp.async.bulk"), ("sm_100a", None)])
def test_a_gpu_without_the_instructions_is_named(arch, lacks, monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_CACHE_DIR", str(tmp_path))
    kernel, _ = copies(st(64, 64, bf16), 2, 0)
    spec = tiles.tensor(np.zeros((64, 64), bf16.np), st(64, 64, bf16)).spec
    signature = Value(spec), Value(spec), types.int32, types.int32
    target = type("Target", (), {"arch": arch, "__str__": lambda self: f"GPU 0, Some Card ({arch})"})()
    expected = pytest.raises(RuntimeError, match=rf"copy uses .*, which GPU 0, Some Card \({arch}\) does not have")
    with expected if lacks else contextlib.nullcontext():
        assert loaded_code.machine_code(kernel, signature, target).cubin


@cuda.jit
def product(out):
    (b,) = plan.open()
    warpgroup.store(out, warpgroup.wait(warpgroup.mm_AB(zeros(LEFT), b)), (0, 0))


LEFT = rt(16, 64, bf16)
plan = shared(b=st(64, 64, bf16))


def test_wgmma_where_there_is_none():
    target = type("Target", (), {"arch": "sm_100a", "__str__": lambda self: "a B200"})()
    with pytest.raises(
        RuntimeError, match=r"product uses wgmma.*, which a B200 does not have:\n  mm_AB in test_launch.py:\d+ `"
    ):
        loaded_code.machine_code(product, (types.Array(types.float32, 2, "A"),), target)


@pytest.mark.parametrize("cached", [False, True])
def test_complaints_of_ptxas_are_warnings(cached, monkeypatch):
    log = "ptxas info : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
    compiled = Compiled(b"", "k", log)
    monkeypatch.setattr(loaded_code.cache, "load", lambda name: compiled if cached else None)
    monkeypatch.setattr(loaded_code.cache, "store", lambda *_: None)
    monkeypatch.setattr(loaded_code, "compile_kernel", lambda *_: compiled)
    with pytest.warns(RuntimeWarning, match="scale: .*C7512"):
        loaded_code.machine_code(scale, (), SimpleNamespace(arch="sm_90a"))
