"""tiles/compiling/digest.py: the key changes with whatever the machine code depends on, and with nothing else. (What it is
made of: test_digest_of_values.py.)"""

import cProfile
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from keys import ARRAY, key
from numba.cuda import types

import tiles
from attention import inspect
from attention.kernels.recurrent import chunk_ampere, linear_token_loop
from attention.kernels.softmax import forward_hopper
from attention.parts.visibility import CAUSAL
from tiles import bf16, st
from tiles.compiling import digest, sources, toolchain
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


def test_a_helper_two_imports_away(module):
    """Its code and its constants count; what else its file says, and where and when it was written, do not."""
    far = "from tiles import inlined\nSIZE = 2.0\n@inlined\ndef far(x):\n    return x * SIZE\n"
    near = "import far_module\nfrom tiles import inlined\n@inlined\ndef near(x):\n    return far_module.far(x)\n"
    kernel = "from numba import cuda\nfrom near_module import near\n@cuda.jit\ndef kernel(x):\n    x[0, 0] = near(x[0, 1])\n"

    def key_with(far):
        for text, name in ((far, "far_module"), (near, "near_module")):
            module(text, name)
        return key(module(kernel, "subject").kernel)

    first, alike = (
        key_with(far),
        [far, far.replace("return", "# said\n    return"), "NUMBER = 1\n" + far + "def other():\n    pass\n"],
    )
    assert first and {key_with(text) for text in alike} == {first}
    os.utime(sys.modules["far_module"].__file__, (0, 0))
    assert key(sys.modules["subject"].kernel) == first
    changed = {key_with(far.replace(*change)) for change in (("x * SIZE", "x + SIZE"), ("2.0", "3.0"), ("2.0", "2"))}
    assert None not in changed and first not in changed and len(changed) == 3


def test_a_kernel_s_own_path(module, tmp_path):
    first = module(KERNEL, "subject")
    place = tmp_path / "elsewhere" / "subject.py"
    place.parent.mkdir()
    place.write_text("\n\n" + Path(first.__file__).read_text())
    os.utime(place, (0, 0))
    module_globals = runpy.run_path(str(place), run_name="another")
    assert key(module_globals["kernel"]) == key(first.kernel) is not None


@pytest.fixture
def compilers(monkeypatch):
    """Digest what compilers() finds now, and again whatever changes."""
    monkeypatch.setattr(toolchain, "compilers", toolchain.compilers.__wrapped__)


def test_versions(module, monkeypatch, compilers):
    """Each counts; of NumPy's, the first two numbers."""
    kernel = module(KERNEL).kernel
    first, known = key(kernel), dict(toolchain.VERSIONED)
    monkeypatch.setattr(np, "__version__", f"{np.__version__}.post1")
    assert key(kernel) == first
    changes = [(np, "__version__", "2.999.0")]
    changes += [(toolchain, "VERSIONED", known | {name: "another"}) for name in known if name != "numpy"]
    changes += [(compiler, "version", lambda: (99, 9)) for compiler in (toolchain.nvvm, toolchain.nvjitlink)]
    keys = {first}
    for change in changes:
        with monkeypatch.context() as changed:
            changed.setattr(*change)
            keys.add(key(kernel))
    assert None not in keys and len(keys) == 1 + len(changes) == len(known) + 3


def test_the_compilers_files(module, monkeypatch, compilers, tmp_path):
    """By content, wherever they are and whenever they were written."""
    kernel, find = module(KERNEL).kernel, toolchain.load_nvidia_dynamic_lib
    device = Path(toolchain.find_libdevice())
    first, copy = key(kernel), tmp_path / "libdevice.bc"
    shutil.copyfile(device, copy)
    os.utime(copy, (0, 0))
    monkeypatch.setattr(toolchain, "find_libdevice", lambda: str(copy))
    assert key(kernel) == first is not None
    copy.write_bytes(copy.read_bytes()[:-1] + b"?")
    keys = {first, key(kernel)}
    for changed in ("nvvm", "nvJitLink"):
        fake = SimpleNamespace(abs_path=shared_library(tmp_path / f"lib{changed}.so", changed))
        monkeypatch.setattr(toolchain, "load_nvidia_dynamic_lib", lambda name: fake if name == changed else find(name))
        keys.add(key(kernel))
    assert None not in keys and len(keys) == 4


def shared_library(file, build, rest=b""):
    """The beginning of one, and its mark: 20 bytes."""
    mark = hashlib.sha1(build.encode()).digest()
    file.write_bytes(b"\x7fELF" + bytes(600) + b"\4\0\0\0\x14\0\0\0\3\0\0\0GNU\0" + mark + bytes(9000) + rest)
    return str(file)


def test_marks_of_files(tmp_path):
    """A library's is that of its build; of any other file, all that it holds counts."""
    of = toolchain.mark_of_content
    one = of(shared_library(tmp_path / "one.so", "one"))
    assert one == hashlib.sha1(b"one").digest() != of(shared_library(tmp_path / "two.so", "two"))
    for head in (b"\x7fELF", b"BC"):
        marks = set()
        for content in (bytes(9000), bytes(8999) + b"1", bytes(9001)):
            (tmp_path / "file").write_bytes(head + content)
            marks.add(of(tmp_path / "file"))
        assert len(marks) == 3
    for name in ("nvvm", "nvJitLink") if sys.platform == "linux" else ():
        assert len(of(toolchain.load_nvidia_dynamic_lib(name).abs_path)) == 20  # so that it takes no time


def test_settings_of_numba(module, monkeypatch):
    kernel = module(KERNEL).kernel
    first = key(kernel)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("NUMBA_NUM_THREADS", "1")
    assert key(kernel) == first
    monkeypatch.setenv("NUMBA_OPT", "1")
    assert key(kernel) not in (first, None)


def test_the_toolchain_is_all_there():
    assert os.path.samefile(toolchain.find_libdevice(), toolchain.get_libdevice())
    versions, nvvm, nvjitlink, marks, asserts = toolchain.compilers()
    assert nvvm >= (1, 5) and nvjitlink >= (12, 0) and len(marks) == 3 and asserts is __debug__
    assert {"numba", "numba_cuda", "llvmlite", "cuda.core", "cuda.bindings", "numpy"} <= set(versions)
    assert sys.version not in repr(toolchain.compilers())


def test_the_sources_of_tiles_and_ops(module, monkeypatch, tmp_path):
    kernel, keys = module(KERNEL).kernel, []
    for name in ("tiles", "ops"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    real = list(sources.FOLDERS)

    def actual():
        monkeypatch.setattr(sources, "FOLDERS", [tmp_path / "tiles", tmp_path / "ops"])
        monkeypatch.setattr(sources, "IMPORTED", content := sources.content())
        digest._sources.cache_clear()
        assert digest._sources() == content
        monkeypatch.setattr(sources, "FOLDERS", real)
        keys.append(key(kernel))
        return content

    try:
        digests = [actual()]
        for file in ("ops/elementwise/arithmetic.py", "tiles/compiling/ptx.py", "tiles/compiling/compiler.py"):
            with open(tmp_path / file, "a") as f:
                f.write("# changed\n")
            digests.append(actual())
        (tmp_path / "ops/new.py").write_text("")
        digests.append(actual())
        for file in ("tiles/doctor.py", "tiles/interpreter/warp.py", "tiles/launching/launch.py"):  # these keep the last
            with open(tmp_path / file, "a") as f:
                f.write("# changed\n")
            digests.append(actual())
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
        kernel, *_ = result if isinstance(result := module.make(config), tuple) else (result,)
        types_of_it = signature(kernel)
        with cProfile.Profile() as profile:
            lowered = Lowered(kernel, types_of_it, arch)
            if arch == "sm_90a":  # whose machine code is looked at, too
                lowered.machine_code()
        codes = [entry.code for entry in profile.getstats() if hasattr(entry.code, "co_filename")]
        # a scope that lacks an op says where, in an error that Numba's hasattr drops
        seen |= {code.co_filename for code in codes if code.co_name != "hazard_line"}
    ours = {Path(file) for file in seen if any(folder in Path(file).parents for folder in sources.FOLDERS)}
    assert some <= {file.name for file in ours}
    assert {file for file in ours if not sources.takes_part(file)} == set()
    assert all((ROOT / name).exists() for name in sources.APART)


def test_sources_that_have_changed_since_their_import_are_not_trusted(module, monkeypatch, request):
    """Whatever their times say. One that cannot be read is not, either."""
    kernel, imported = module(KERNEL).kernel, sources.IMPORTED
    request.addfinalizer(digest._sources.cache_clear)
    for content, has_key in ((b"other", False), (None, False), (imported, True)):
        digest._sources.cache_clear()
        monkeypatch.setattr(sources, "IMPORTED", content)
        assert bool(key(kernel)) == has_key


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


def test_the_key_is_the_same_in_another_process(module, tmp_path):
    """Whose hashes of texts are other ones."""
    keys = {key(module(KERNEL, "subject").kernel)}
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\nimport subject\nfrom tiles.compiling import digest\n"
    )
    code += "from numba.cuda import types\n"
    code += "print(digest.key(subject.kernel, (types.Array(types.float32, 2, 'A'),), 'sm_90a'))"
    env = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=100)
    assert run.returncode == 0, run.stderr
    keys.add(run.stdout.strip())
    assert len(keys) == 1 and len(keys.pop()) == 64
