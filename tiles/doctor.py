"""`python -m tiles doctor`: what this machine has, what runs where, and what to do about what is missing.

Only the standard library is imported at the top (and what tiles/__init__.py begins with), so that it can speak where nothing
else can be imported.
"""

import argparse
import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .importable import NEEDED, ROOT, SIMULATOR, VERSION, simulated

OF_NUMBA_CUDA = ("numba-cuda", "cuda-core", "cuda-bindings", "nvidia-nvjitlink")  # what numba-cuda[cu13] brings
PACKAGES = ("numba", "llvmlite", "numpy", "ml_dtypes", "greenlet", *OF_NUMBA_CUDA)
OPTIONAL = ("torch", "cupy-cuda13x", "jax")
TESTED = (13, 0), (13, 5)  # the oldest and the newest nvJitLink, and NVVM, whose code was looked through for spills


@dataclass(frozen=True)
class Finding:
    """One line of the report. advice: what to do about it; broken: tiles does not work like this."""

    subject: str
    text: str
    advice: str = ""
    broken: bool = False


def version(name) -> str | None:
    """The installed version of a distribution."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def packages():
    """Our own version and documentation, Python, and the packages that tiles is made with."""
    yield Finding("numba-tiles", f"{VERSION}, {ROOT}")
    pages = ROOT / "docs" / "kernel.md"  # other packages, too, may leave a folder of this name
    elsewhere = f"in the source distribution, numba_tiles-{VERSION}.tar.gz: docs/ and examples/"
    yield Finding("documentation", str(pages.parent) if pages.exists() else elsewhere)
    yield Finding("python", f"{platform.python_version()}, {sys.executable}")
    for name in PACKAGES:
        installed = version(name)
        needed = not installed and name != "nvidia-nvjitlink"  # a CUDA toolkit that was not installed by pip has its own
        advice = "pip install " + ("'numba-cuda[cu13]'" if name in OF_NUMBA_CUDA else name)
        yield Finding(name, installed or "not installed", "" if installed else advice, needed)
    for name in OPTIONAL:
        if installed := version(name):
            yield Finding(name, installed)


def compiler():
    """Whether the nvJitLink that will be loaded is one whose code was looked through for spilled registers."""
    try:
        from cuda.bindings import nvjitlink

        linker = tuple(nvjitlink.version())
    except Exception as error:  # without it nothing is compiled: kernels run in the interpreter
        yield Finding("nvJitLink", f"none that works: {str(error).splitlines()[0]}", "pip install 'numba-cuda[cu13]'")
        return
    oldest, newest = (".".join(map(str, release)) for release in TESTED)
    text = f"{'.'.join(map(str, linker))}; shipped kernels were checked for spilled registers with {oldest} to {newest}"
    advice = "python -m attention inspect --check says which kernels spill here: these are right, but may be slower"
    yield Finding("nvJitLink", text, "" if TESTED[0] <= linker <= TESTED[1] else advice)


def simulator():
    """The finding that Numba's simulator is on, which cannot run tiles."""
    if simulated():
        yield Finding("environment", SIMULATOR, "unset NUMBA_ENABLE_CUDASIM", broken=True)


def shadows():
    """Another package of the same name, found before ours or after."""
    for name in (*NEEDED, "attention", "fuse"):
        places = []
        for entry in sys.path:
            spec = importlib.machinery.PathFinder.find_spec(name, [entry or os.getcwd()])
            if spec and spec.origin and (place := Path(spec.origin).resolve()) not in places:
                places.append(place)
        ours = ROOT / name / "__init__.py"
        other_places = [place for place in places if place != ours]
        for place in other_places:
            first = places.index(place) < places.index(ours) if ours in places else True
            text = f"{place} {'shadows ours, ' + str(ours) if first else 'is shadowed by ours'}"
            yield Finding(
                f"package {name}",
                text,
                f"rename it, or put {ROOT} before it on sys.path" if first else "",
                first and name in NEEDED,
            )
        if not other_places:
            yield Finding(f"package {name}", str(ours.parent))


def imports():
    """Whether `import tiles, ops` works, in a process of its own."""
    try:
        run = subprocess.run([sys.executable, "-c", "import tiles, ops"], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        yield Finding("import", "`import tiles, ops` takes more than two minutes", "look for a hanging file system", True)
        return
    words = (run.stderr.strip().splitlines() or ["no message"])[-1]
    if run.returncode:
        yield Finding("import", f"`import tiles, ops` fails: {words}", "mend what is marked above first", broken=True)
    else:
        yield Finding("interpreter", "works: kernels on arrays in host memory, and all with TILES_INTERPRET=1, run in it")


def gpus():
    """The driver and the GPUs, and what runs on each."""
    nothing = "kernels run in the interpreter; for a GPU install NVIDIA's driver, 580 or later"
    try:
        from cuda.bindings import driver

        from .launching.devices import check

        check(driver.cuInit(0))
        cuda = check(driver.cuDriverGetVersion())
        count = check(driver.cuDeviceGetCount())
    except Exception as error:  # whatever fails here fails because the driver or the package is missing
        yield Finding("driver", f"none that works: {str(error).splitlines()[0]}", nothing)
        return
    file = Path("/proc/driver/nvidia/version")
    words = file.read_text().split("Kernel Module")[-1].split()[:3] if file.exists() else []
    release = next((word for word in words if word[0].isdigit()), "")
    yield Finding("driver", f"{release} for CUDA {cuda // 1000}.{cuda % 1000 // 10}".strip())
    made_for = version("nvidia-nvjitlink")
    if made_for and int(made_for.split(".")[0]) > cuda // 1000:
        advice = f"a newer driver, or pip install 'numba-cuda[cu{cuda // 1000}]'"
        yield Finding("driver", f"too old for the compiler, which is of CUDA {made_for}", advice, broken=True)
    for ordinal in range(count):
        yield from _gpu(driver, check, ordinal)
    if not count:
        yield Finding("GPU", "none", nothing)


def runs_on(target) -> str:
    """What runs on a GPU of this architecture, a Target."""
    if not target.supported:
        return "too old: kernels run in the interpreter"
    if target.is_hopper:
        return "wgmma and TMA: every kernel"
    if target.has_tma:
        return "no wgmma: kernels of registers, ordinary memory and TMA; those with wgmma run in the interpreter"
    return "neither wgmma nor TMA: kernels of registers and global memory; the others run in the interpreter"


def _gpu(driver, check, ordinal):
    from .targets import Target

    handle, attribute = check(driver.cuDeviceGet(ordinal)), driver.CUdevice_attribute
    name = check(driver.cuDeviceGetName(128, handle)).split(b"\0")[0].decode()
    target = Target(
        *(
            check(driver.cuDeviceGetAttribute(getattr(attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}"), handle))
            for part in ("MAJOR", "MINOR")
        )
    )
    memory = check(driver.cuDeviceTotalMem(handle)) / 2**30
    text = f"{name}, compute capability {target.major}.{target.minor}, {memory:.0f} GiB"
    advice = "" if target.is_hopper else "TILES_INTERPRET=1 runs any kernel"
    yield Finding(f"GPU {ordinal}", f"{text}; {runs_on(target)}", advice)


def cache():
    """Where compiled kernels are kept, and whether all that lies there is read."""
    try:
        from .compiling.cache import limit
        from .compiling.cache_files import CacheOff, entries, find_folder, list_refused_files, trust_remedy
    except Exception:  # `imports` has told why
        return
    try:
        folder = find_folder()
    except CacheOff as off:
        yield Finding("cache", f"off: {off}", off.remedy)
        return
    sizes = [file.stat(follow_symlinks=False).st_size for file in entries(folder.path)]
    try:
        facts = ", trusted whoever wrote it" * folder.trusted
        facts += "" if os.access(folder.path, os.W_OK) else ", which this user may only read"
        text = f"on: {folder.path}{facts}, {len(sizes)} entries, {sum(sizes) / 2**20:.1f} of {limit() / 2**20:.0f} MiB"
        yield Finding("cache", text)
    except ValueError as error:
        yield Finding("cache", str(error), "set TILES_CACHE_BYTES to a number of bytes, or unset it")
    if unread := list_refused_files(folder):
        text = f"{len(unread)} of {len(sizes)} entries are not loaded: {unread[0]}"
        yield Finding("cache", text, f"remove them; or, {trust_remedy(folder.path)}")


PROBES = (packages, simulator, shadows, imports, compiler, gpus, cache)


def examine():
    """All findings. A probe that itself fails is one, too."""
    for probe in PROBES:
        try:
            yield from probe()
        except Exception as error:
            yield Finding(probe.__name__, f"could not be examined: {type(error).__name__}: {error}")


def main(arguments=()) -> int:
    """Print the report; 1 if something is broken."""
    argparse.ArgumentParser(prog="python -m tiles doctor", description=__doc__.partition(": ")[2]).parse_args(arguments)
    broken = 0
    for finding in examine():
        print(f"{'!' if finding.broken else ' '} {finding.subject:<18} {finding.text}")
        if finding.advice:
            print(f"  {'':<18} -> {finding.advice}")
        broken += finding.broken
    print("tiles does not work here as it is: see the lines marked !" if broken else "tiles works here")
    return int(broken > 0)
