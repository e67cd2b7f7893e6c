"""`python -m tiles inspect FILE:KERNEL`: what a kernel compiles to, with no GPU.

    python -m tiles inspect softmax.py:softmax                      figures, and how many instructions each line became
    python -m tiles inspect softmax.py:softmax --sass               all of them, under their lines; --ptx: one step before
    python -m tiles inspect softmax.py:softmax --html page.html     all that as a page
    python -m tiles inspect softmax.py:softmax --diff other.py:softmax
    python -m tiles inspect softmax.py:softmax --diff sm_80         the same for another version, or another architecture

FILE is a file or the name of a module. KERNEL is what the file calls a kernel, or an expression that gives one, or a kernel and
its shared storage: "gemm.py:make(128, 64)". Its arguments are, whichever there is first:
    --args "array(2, bf16), tiled(TILE), 1.0"      expressions in the words of the file and of tiles.launching.arguments
    the annotations of its parameters              def kernel(x: array(2, bf16), n: INT)
    those of its first launch                      the file is run as a script up to there, which says threads and storage, too
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from .. import dtypes, launch
from ..compiling.compiler import check_arch, title
from ..launching import arguments
from ..numba_names import NumbaError
from .figures import Figures
from .report import ARCH, Inspection, inspect


class InspectedLaunch(NamedTuple):
    """A kernel, and how it would be launched: what its arguments are, its shared storage and its threads as far as is known."""

    kernel: Any
    args: tuple = ()
    shared: Any = None
    block: Any = None


class StopAtLaunch(BaseException):
    """Ends a script at the launch that it was run for. No `except Exception` of the script stops it."""


@contextlib.contextmanager
def first_launch(name):
    """Runs what is inside up to the first launch of a kernel of this name, which ends up in the list that this gives."""
    launches: list[InspectedLaunch] = []

    def watch(kernel, types, threads, shared):
        if title(kernel) == name:
            launches.append(InspectedLaunch(kernel, tuple(types), shared, threads))
            raise StopAtLaunch

    watchers = sys.modules[launch.__module__].watchers
    watchers.append(watch)
    try:
        with contextlib.suppress(StopAtLaunch), contextlib.redirect_stdout(sys.stderr):
            yield launches
    finally:
        watchers.remove(watch)


def find(target: str, args: str | None = None) -> InspectedLaunch:
    """The kernel that FILE:KERNEL names. ValueError, TypeError: there is none, or its arguments are not known."""
    file, colon, name = target.rpartition(":")
    if not colon:
        raise ValueError(f"say FILE:KERNEL, as in my_kernels.py:gemm, got {target!r}")
    with first_launch(name) as launches:
        names = vars(module_at(file))
    if launches:
        return launches[0]
    try:
        value = eval(name, names)
    except NameError:
        value = None  # a kernel that only a function of the file knows
    kernel, shared = value if isinstance(value, tuple) else (value, None)
    if kernel is not None and not hasattr(kernel, "py_func"):
        raise TypeError(f"{target} is no @cuda.jit function but {kernel!r}")
    if kernel and args is not None:
        names_in_scope = {**vars(dtypes), **vars(arguments), **names}
        return InspectedLaunch(kernel, tuple(eval(f"[{args}]", names_in_scope)), shared)
    if kernel and (shared is not None or _declares(kernel)):
        return InspectedLaunch(kernel, (), shared)
    stopped = ""
    with first_launch(title(kernel) if kernel else name) as launches:
        try:
            _run(file)
        except Exception as error:
            stopped = f"; it stops with {type(error).__name__}: {error}"
    if launches:
        return launches[0]
    if kernel:
        raise ValueError(f"{target}: annotate its parameters, say --args, or launch it: {file} as a script does not{stopped}")
    kernels = ", ".join([x for x, value in names.items() if hasattr(value, "py_func")])
    known = f"; its kernels are {kernels}" if kernels else ""
    raise ValueError(f"{file} has no kernel {name}, and launches none of that name{known}{stopped}")


def _declares(kernel):
    code = kernel.py_func.__code__
    return set(code.co_varnames[: code.co_argcount]) <= set(kernel.py_func.__annotations__)


def module_at(file: str) -> Any:
    """A file or module, imported. ValueError: there is no such file."""
    path = Path(file)
    if not path.is_file():
        if path.suffix == ".py" or len(path.parts) > 1:
            raise ValueError(f"there is no file {file}")
        return importlib.import_module(file)
    sys.path.insert(0, str(path.parent.resolve()))
    name = path.stem if path.stem not in sys.modules else f"inspected {path.resolve()}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec and spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(file):
    """A file or module, run as a script."""
    saved_argv, sys.argv = sys.argv, [file]
    try:
        with contextlib.suppress(SystemExit):
            if Path(file).is_file():
                runpy.run_path(file, run_name="__main__")
            else:
                runpy.run_module(file, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = saved_argv


def _inspect_target(target, options, arch=None) -> Inspection:
    target_kernel = find(target, options.args)
    shared = target_kernel.shared
    if options.shared is not None:
        shared = type("SharedStorage", (), {"nbytes": options.shared})
    return inspect(
        target_kernel.kernel,
        *target_kernel.args,
        arch=arch or options.arch,
        shared=shared,
        block=options.block or target_kernel.block,
    )


def _figures(inspection):
    return {one.name: getattr(inspection, one.name) for one in fields(Figures)}


def main(arguments) -> int:
    """The command line; the exit code is 1 if there is nothing to look at, and 2 if an option is wrong."""
    title_line, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m tiles inspect",
        description=title_line,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kernel", metavar="FILE:KERNEL")
    parser.add_argument("--args", help="expressions for the kernel's arguments")
    parser.add_argument("--arch", default=ARCH, help="architecture (default: %(default)s)")
    parser.add_argument("--block", type=int, help="threads of a block, for occupancy")
    parser.add_argument("--shared", type=int, help="bytes of shared memory of a block, for occupancy")
    parser.add_argument("--sass", action="store_true", help="all instructions")
    parser.add_argument("--ptx", action="store_true", help="all instructions of the PTX")
    parser.add_argument("--html", metavar="PAGE", help="write a page that shows everything")
    parser.add_argument("--json", action="store_true", help="figures for machines")
    parser.add_argument("--diff", metavar="OTHER", help="what differs from another FILE:KERNEL, or from another architecture")
    options = parser.parse_args(arguments)
    diff = re.fullmatch(r"sm_\w+", options.diff or "") and options.diff
    for option, arch in ("--arch", options.arch), ("--diff", diff):
        try:
            check_arch(arch or ARCH)
        except ValueError as error:
            parser.error(f"{option}: {error}")
    try:
        inspection: Any = _inspect_target(options.kernel, options)
        if options.diff:
            inspection = inspection - _inspect_target(options.kernel if diff else options.diff, options, diff)
    except (ValueError, TypeError, NameError, RuntimeError, ImportError, OSError, SyntaxError, NumbaError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if options.html:
        try:
            Path(options.html).write_text(inspection.html(), encoding="utf-8")
        except OSError as error:
            parser.error(f"--html: {error}")
        print(options.html)
    elif options.json:
        both = {"before": inspection.before, "after": inspection.after} if options.diff else None
        print(json.dumps({name: _figures(one) for name, one in both.items()} if both else _figures(inspection), indent=1))
    elif options.sass or options.ptx:
        print(inspection.listing("sass" if options.sass else "ptx"))
    else:
        print(inspection)
    return 0
