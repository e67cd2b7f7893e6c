"""tiles/compiling/digest.py: the key changes with whatever the machine code depends on, and with nothing else. (What it is
made of: test_digest_of_values.py.)"""

import cProfile
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from keys import ARRAY, key
from numba.cuda import types

import tiles
from attention import inspect
from attention.kernels import chunk_ampere, forward_hopper, linear_token_loop
from attention.parts.visibility import CAUSAL
from tiles import bf16, st
from tiles.compiling import digest, sources
from tiles.compiling.compiler import Lowered
from tiles.compiling.numba_types import Value
from tiles.launching.arguments import signature

ROOT = Path(__file__).parents[2]
KERNEL = """
    import math
    from numba import cuda
    import numpy as np
    from ops import exp2, load, log2, store, zeros
    from tiles import fp32, inlined, op, lowers, ring, rt, shared, st, bf16
    import tiles, ops
    FACTOR = 2.0
    TABLE = np.arange(4.0)
    TILE = rt(16, 16, fp32)
    SMEM = shared(a=ring(st(64, 64, bf16), 2))

    @cuda.jit(device=True)
    def deepest(x):
        return x + 1.0

    @cuda.jit(device=True)
    def deeper(x):
        return deepest(x) * FACTOR

    @inlined
    def helper(t):
        return exp2(t)

    def make(closed):
        @cuda.jit(fastmath=False, launch_bounds=(128, 1))
        def kernel(x):
            s = SMEM.open()
            t = helper(load(x, TILE, (0, 0))) * closed
            store(x, t * deeper(TABLE[1]), (0, 0))
        return kernel

    kernel = make(3)
"""
CHANGES = {
    "a constant of the kernel": ("TABLE[1]", "TABLE[2]"),
    "an operator": ("t * deeper", "t + deeper"),
    "a global number": ("FACTOR = 2.0", "FACTOR = 2.5"),
    "the sign of a zero": ("FACTOR = 2.0", "FACTOR = -0.0"),
    "a global array": ("np.arange(4.0)", "np.arange(1, 5.0)"),
    "a global array's dtype": ("np.arange(4.0)", "np.arange(4)"),
    "a global tile": ("rt(16, 16, fp32)", "rt(16, 32, fp32)"),
    "a plan": ("64, bf16), 2)", "64, bf16), 3)"),
    "a plan's names": ("shared(a=", "shared(b="),
    "a closed-over number": ("make(3)", "make(4)"),
    "a closed-over type": ("make(3)", "make(3.0)"),
    "a device function": ("x + 1.0", "x + 2.0"),
    "another op under the same name": ("import exp2, load, log2", "import log2 as exp2, load"),
    "an inlined helper": ("return exp2(t)", "return exp2(exp2(t))"),
    "fastmath": ("fastmath=False", "fastmath=True"),
    "launch bounds": ("(128, 1)", "(256, 1)"),
    "the order of a call's arguments": ("t * deeper(TABLE[1])", "deeper(TABLE[1]) * t"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_sees(change, module):
    old, new = CHANGES[change]
    assert old in KERNEL
    before, after = key(module(KERNEL, "subject").kernel), key(module(KERNEL.replace(old, new), "subject").kernel)
    assert before and after and before != after


@pytest.mark.parametrize(
    "old, new", [("import math\n", "import math  # said\n\n\n"), ("FACTOR = 2.0", "FACTOR = 2.0; OTHER = 5")]
)
def test_what_the_code_does_not_use_leaves_the_key_alone(old, new, module):
    assert key(module(KERNEL, "subject").kernel) == key(module(KERNEL.replace(old, new), "subject").kernel) is not None


def test_argument_types_and_architecture(module):
    kernel = module(KERNEL).kernel
    spec = lambda tile: Value(tiles.tensor(np.zeros((64, 64), bf16.np), tile).spec)
    signatures = [
        (ARRAY,),
        (types.Array(types.float32, 3, "A"),),
        (types.Array(types.float16, 2, "A"),),
        (types.int32,),
        (types.int64,),
        (spec(st(64, 64, bf16)),),
        (spec(st(64, 64, bf16, 64)),),  # its str is the same
        (spec(st(32, 64, bf16)),),
    ]
    keys = [key(kernel, s) for s in signatures] + [key(kernel, (ARRAY,), "sm_80")]
    assert None not in keys and len(set(keys)) == len(keys)


def test_the_toolchain_and_the_environment(module, monkeypatch):
    kernel = module(KERNEL).kernel
    keys = [key(kernel)]
    real = digest._toolchain
    for k in range(len(real())):
        changed = [*real()[:k], "another", *real()[k + 1 :]]
        monkeypatch.setattr(digest, "_toolchain", lambda changed=changed: changed)
        keys.append(key(kernel))
    monkeypatch.setattr(digest, "_toolchain", real)
    monkeypatch.setenv("NUMBA_OPT", "1")
    keys.append(key(kernel))
    assert None not in keys and len(set(keys)) == len(keys)


def test_the_toolchain_is_all_there():
    python, _, versions, nvvm, nvjitlink, files = digest._toolchain()
    assert python == sys.version and nvvm >= (1, 5) and nvjitlink >= (12, 0) and len(files) == 3
    assert {"numba", "numba_cuda", "llvmlite", "cuda.core", "cuda.bindings", "numpy"} <= set(versions)


def test_the_sources_of_tiles_and_ops(module, monkeypatch, tmp_path):
    kernel, keys = module(KERNEL).kernel, []
    for name in ("tiles", "ops"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    real = list(sources.FOLDERS)

    def found():
        monkeypatch.setattr(sources, "FOLDERS", [tmp_path / "tiles", tmp_path / "ops"])
        monkeypatch.setattr(sources, "IMPORTED", content := sources.content())
        digest._sources.cache_clear()
        assert digest._sources() == content
        monkeypatch.setattr(sources, "FOLDERS", real)
        keys.append(key(kernel))
        return content

    try:
        digests = [found()]
        for file in ("ops/elementwise/arithmetic.py", "tiles/compiling/ptx.py", "tiles/compiling/compiler.py"):
            with open(tmp_path / file, "a") as f:
                f.write("# changed\n")
            digests.append(found())
        (tmp_path / "ops/new.py").write_text("")
        digests.append(found())
        for file in ("tiles/doctor.py", "tiles/interpreter/warp.py", "tiles/launching/launch.py"):  # these keep the last
            with open(tmp_path / file, "a") as f:
                f.write("# changed\n")
            digests.append(found())
    finally:
        digest._sources.cache_clear()
    assert len(set(digests)) == len(set(digests[:5])) == 5 and len(set(keys)) == len(set(keys[:5])) == 5 and None not in keys


def test_what_takes_part_in_compiling_is_digested():
    """Whatever file of ours runs while kernels are typed and lowered; and what is named as apart exists."""
    seen, some = set(), {"numba_types.py", "compiler.py", "constants.py", "arithmetic.py", "pipeline.py", "ring.py"}
    kernels = [
        (forward_hopper, forward_hopper.config_for(64, bf16, CAUSAL, 512), "sm_90a"),
        (linear_token_loop, linear_token_loop.Config(64, "token", True), "sm_80"),
        (chunk_ampere, next(c for n, m, c in inspect.configurations(False, "sm_80") if m is chunk_ampere), "sm_80"),
    ]
    for module, config, arch in kernels:
        kernel, *_ = made if isinstance(made := module.make(config), tuple) else (made,)
        types_of_it = signature(kernel)
        with cProfile.Profile() as profile:
            lowered = Lowered(kernel, types_of_it, arch)
            if arch == "sm_90a":  # whose machine code is looked at, too
                lowered.machine_code()
        seen |= {getattr(entry.code, "co_filename", "") for entry in profile.getstats()}
    ours = {Path(file) for file in seen if any(folder in Path(file).parents for folder in sources.FOLDERS)}
    assert some <= {file.name for file in ours}
    assert {file for file in ours if not sources.takes_part(file)} == set()
    assert all((ROOT / name).exists() for name in sources.APART)


def test_sources_that_have_changed_since_their_import_are_not_trusted(module, monkeypatch, request):
    """Whatever their times say. One that cannot be read is not, either."""
    kernel, imported = module(KERNEL).kernel, sources.IMPORTED
    request.addfinalizer(digest._sources.cache_clear)
    for content, kept in ((b"other", False), (None, False), (imported, True)):
        digest._sources.cache_clear()
        monkeypatch.setattr(sources, "IMPORTED", content)
        assert bool(key(kernel)) == kept


def test_files_of_the_future(tmp_path):
    """As of a clock that was wrong, or an archive: they are what was imported until their content changes, whatever the time of
    the edit. An editor's lock, a link to nowhere, is no source."""
    for name in ("tiles", "ops"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in tmp_path.rglob("*.py"):
        os.utime(file, (2_051_222_400, 2_051_222_400))
    (tmp_path / "tiles" / ".#ring.py").symlink_to("nowhere")
    code = """
        import os
        from numba import cuda
        from numba.cuda import types
        import tiles, ops
        from tiles.compiling import digest

        def key():
            digest._sources.cache_clear()
            return digest.key(cuda.jit(lambda x: None), (types.Array(types.float32, 1, "A"),), "sm_90a")

        def write(text):
            with open(RING, "w") as file:
                file.write(text)

        RING = os.path.join(os.path.dirname(tiles.__file__), "ring.py")
        text = open(RING).read()
        first = key()
        write(text + "# edited")
        os.utime(RING, (0, 0))
        second = key()
        write(text)
        print(first and len(first), second, key() == first)
    """
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=100
    )
    assert run.stdout.split() == ["64", "None", "True"], run.stdout + run.stderr


def test_the_key_is_the_same_in_another_process(tmp_path):
    (tmp_path / "subject.py").write_text(textwrap.dedent(KERNEL))
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\nimport subject\nfrom tiles.compiling import digest\n"
    )
    code += "from numba.cuda import types\n"
    code += "print(digest.key(subject.kernel, (types.Array(types.float32, 2, 'A'),), 'sm_90a'))"
    keys = set()
    for seed in "12":
        env = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=100)
        assert run.returncode == 0, run.stderr
        keys.add(run.stdout.strip())
    assert len(keys) == 1 and len(keys.pop()) == 64
