"""Keys that travel: what one environment has compiled is found in another folder, with other files' times, in another virtual
environment, and in another version of Python (TILES_OTHER_PYTHON names one that has numba-cuda, as CI makes it)."""

import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import textwrap
import time
import venv
from pathlib import Path

import pytest
from pythons import other_pythons, runs

from tiles.compiling import cache_files, toolchain

ROOT = Path(__file__).parents[2]
USERS = {
    "far_helpers.py": """
        import enum
        from numba import cuda
        from tiles import inlined

        FACTOR = 2.0

        class Mode(enum.IntEnum):
            ONE, TWO = 1, 2

        @inlined
        def far(t):
            return t * FACTOR  # reached by way of another module

        @cuda.jit(device=True)
        def next_even(n, mode=Mode.TWO):
            return (n // mode + 1) * mode
    """,
    "near_helpers.py": """
        import numpy as np
        from far_helpers import far
        from ops import maximum
        from ops.elementwise.arithmetic import map_rule
        from tiles import inlined, lowers, op

        @op
        def leaky(x):
            return np.maximum(x.array, 0)

        lowers(leaky)(map_rule("leaky", lambda b, e: b.fmul(e, b.real(0.5))))

        @inlined
        def near(t):
            return maximum(far(leaky(t)), 0.25)
    """,
    "users_kernels.py": """
        from typing import Any, NamedTuple
        import near_helpers
        from far_helpers import Mode, next_even
        from numba import cuda
        from ops import load, store, warpgroup, zeros
        from tiles import bf16, fp32, inlined, ring, rt, shared, st, static

        TILE, SUM, PLAN = rt(16, 16, fp32), rt(16, 64, fp32), shared(a=ring(st(64, 64, bf16), 2), b=st(64, 64, bf16))

        class State(NamedTuple):
            first: Any
            second: Any

            @inlined
            def joined(self):
                return self.first + self.second

        @static
        class Option:
            scale: float
            function: object
            mode: Mode = Mode.ONE

            @property
            def doubled(self):
                return 2 * self.scale

        def make(option, count):
            @cuda.jit(launch_bounds=(32, 1))
            def registers(x):
                for row in range(count):
                    t = near_helpers.near(load(x, TILE, (16 * row, 0)))
                    state = State(option.function(t), t * option.doubled)
                    store(x, state.joined(), (16 * row, 0))
                x[0, 0] += next_even(3)

            return registers

        @cuda.jit
        def wgmma(x):
            _, tile = PLAN.open()
            acc = warpgroup.wait(warpgroup.mma_ABt(zeros(SUM), tile, tile))
            store(x, acc, (0, 0))

        KERNELS = {"sm_80": make(Option(0.5, lambda t: t * 3.0), 2), "sm_90a": wgmma}
    """,
}
SCRIPT = """
    import hashlib, json, os, sys, types
    import users_kernels
    from cuda.pathfinder import load_nvidia_dynamic_lib
    from numba.cuda import types as numba_types
    import tiles
    from tiles.compiling import cache_files, digest, toolchain
    from tiles.inspect import figures
    from tiles.launching import loaded_code

    def compile_kernel(*args, compile_kernel=loaded_code.compile_kernel):
        compiled.append(args)
        return compile_kernel(*args)

    compiled, codes, keys = [], {}, {}
    loaded_code.compile_kernel = compile_kernel
    signature = (numba_types.Array(numba_types.float32, 2, "A"),)
    for arch, kernel in users_kernels.KERNELS.items():
        keys[arch] = digest.key(kernel, signature, arch)
        code = loaded_code.machine_code(kernel, signature, types.SimpleNamespace(arch=arch))
        codes[arch] = hashlib.sha256(code.cubin).hexdigest()
        figures(kernel, signature, arch)
    library = load_nvidia_dynamic_lib("nvvm").abs_path
    facts = {"python": sys.version, "tiles": tiles.__file__, "library": library, "time": os.stat(library).st_mtime}
    facts |= {"toolchain": repr(toolchain.compilers()), "entries": len(cache_files.entries(cache_files.find_folder().path))}
    print(json.dumps({"compiled": len(compiled), "codes": codes, "keys": keys, **facts}))
"""


def place_sources(folder):
    """Tiles, ops and a user's files there, younger than all others."""
    for name in ("tiles", "ops"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copyfile)
    for name, text in USERS.items():
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def run(python, folder, cache_folder):
    """What the script says there."""
    env = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "TILES_CACHE": "1",
        "TILES_CACHE_DIR": str(cache_folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [python, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, env=env, cwd=folder, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """(what the first environment says, its cache)"""
    folder = tmp_path_factory.mktemp("first")
    said = run(sys.executable, place_sources(folder), folder / "kept")
    assert (
        said["entries"] == 4
        and said["compiled"] == len(said["keys"]) == len(set(said["keys"].values())) == 2
        and None not in said["keys"].values()
    )
    return said, folder / "kept"


def all_is_found(said, other):
    """The machine code, and the figures made of it, which are entries of their own."""
    return other["compiled"] == 0 and all(other[what] == said[what] for what in ("keys", "codes", "entries"))


def copied(cache_folder, place):
    """A copy of the cache, as of `cp -r`: with times of its own."""
    shutil.copytree(cache_folder, place, copy_function=shutil.copy)
    for folder in (place, *place.rglob("*")):  # what is copied from one's own folder keeps its mode
        assert not cache_files.distrust_reason(folder.stat())
    return place


def other_environment(folder):
    """The Python of a virtual environment that has this one's packages by links, and copies of the compilers of another
    time."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    python = folder / "bin" / "python"
    process = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    )
    packages = Path(process.stdout.strip())
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if "tiles" not in package.name:
            place_package(package, packages / package.name)
    return python


def place_package(source, target):
    """A link, and of what keys look at a copy."""
    if source.is_dir() and source.name in ("nvidia", "cu13", "cu12", "lib", "nvvm", "libdevice"):
        target.mkdir()
        for part in source.iterdir():
            place_package(part, target / part.name)
    elif source.name.startswith(("libnvvm.", "libnvJitLink.", "libdevice.")):
        shutil.copyfile(source, target)
        os.utime(target, (1_000_000_000, 1_000_000_000))
    else:
        target.symlink_to(source)


@pytest.mark.release  # another version of Python, as CI has it, lies elsewhere, too, with other times
@pytest.mark.skipif(sys.prefix == sys.base_prefix or os.name == "nt", reason="no virtual environment, or no links")
def test_another_path_and_other_times(first, tmp_path):
    said, cache_folder = first
    python = other_environment(tmp_path / "environment")
    place = place_sources(tmp_path / "in another" / "place")
    other = run(python, place, copied(cache_folder, tmp_path / "copied"))
    assert other["tiles"] != said["tiles"] and str(place) in other["tiles"]
    if any(Path(folder) in Path(said["library"]).parents for folder in site.getsitepackages()):  # and not of a CUDA toolkit
        assert other["time"] != said["time"] and str(tmp_path) in other["library"]
    shutil.rmtree(tmp_path / "environment")  # the libraries are large
    assert all_is_found(said, other)


def test_a_changed_source_is_compiled_anew(first, tmp_path):
    """Two imports away from the kernel; the other kernel is found."""
    said, cache_folder = first
    place = place_sources(tmp_path / "changed")
    file = place / "far_helpers.py"
    file.write_text(file.read_text().replace("t * FACTOR", "t + FACTOR"))
    other = run(sys.executable, place, copied(cache_folder, tmp_path / "copied"))
    assert other["compiled"] == 1 and other["keys"]["sm_90a"] == said["keys"]["sm_90a"]
    assert other["keys"]["sm_80"] != said["keys"]["sm_80"] and other["codes"]["sm_80"] != said["codes"]["sm_80"]


def test_another_version_of_python(first, tmp_path):
    said, cache_folder = first
    named = os.environ.get("TILES_OTHER_PYTHON")
    deadline = time.monotonic() + 120
    while named and not Path(named).parents[1].exists() and time.monotonic() < deadline:
        time.sleep(1)  # CI installs it while the tests run
    if named and not Path(named).exists():
        pytest.skip(f"no other version of Python could be installed as {named}")
    pythons = (
        [named] if named else [python for python in other_pythons() if runs(python, "import numba_cuda, ml_dtypes, greenlet")]
    )
    if not pythons:
        pytest.skip("no other version of Python here has numba-cuda; TILES_OTHER_PYTHON may name one")
    other = run(pythons[0], place_sources(tmp_path / "other"), copied(cache_folder, tmp_path / "copied"))
    assert other["python"] != said["python"]
    if not named and other["toolchain"] != repr(toolchain.compilers()):
        pytest.skip(f"{pythons[0]} has other versions of packages")
    assert all_is_found(said, other)
