"""`python -m tiles profile file.py:function`: the function's profile, on a card with what ncu counts, or in the interpreter."""

import argparse
from pathlib import Path

from cuda.bindings import driver

from ..inspect.command import module_at
from ..launching.devices import check
from . import ncu, profile
from .counts import SAMPLE


def main(arguments) -> int:
    """`python -m tiles profile ...`; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tiles profile", description="What a function launches, and what it costs.")
    parser.add_argument("target", metavar="FILE.py:FUNCTION", help="a function that takes no arguments, and launches kernels")
    parser.add_argument("--svg", type=Path, help="draw the timeline of a block to this file")
    parser.add_argument("--cycles", metavar="FIRST:LAST", default="0:", help="which to draw, by default the first 12,000")
    parser.add_argument("--block", type=int, help="which block's, by default the first that is counted")
    parser.add_argument("--all", action="store_true", help="on a card: count all blocks, not four")
    parser.add_argument("--no-ncu", action="store_true", help="on a card: do without ncu, even if it is there")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)  # what ncu runs
    options = parser.parse_args(arguments)
    try:
        function = find(options.target)
        bounds = [float(cycle) for cycle in options.cycles.split(":") if cycle]
    except (AttributeError, FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    if options.once:
        return _once(function)
    block = None if options.block is None else (options.block, 0, 0)
    result = profile(function, block=block, sample=None if options.all else SAMPLE)
    print(result)
    if timeline := result.timeline:
        print(timeline)
        if options.svg:
            try:
                timeline.save(options.svg, *bounds)
            except (OSError, ValueError) as error:
                parser.error(str(error))
            print(f"  drawn: {options.svg}")
    elif block:
        parser.error(f"--block: no launch has a block {options.block} that is counted: grids are {_grids(result)}")
    if result.peaks and not options.no_ncu:
        _ncu(options.target)
    return 0


def _grids(result):
    return ", ".join(dict.fromkeys(str(launched.grid) for launched in result.launches))


def find(target: str):
    """The function that "file.py:function" names. ValueError, FileNotFoundError, AttributeError: there is none."""
    file, colon, name = target.rpartition(":")
    if not colon or not file:
        raise ValueError(f"say file.py:function, got {target}")
    if not Path(file).is_file():
        raise FileNotFoundError(f"there is no file {file}")
    module = module_at(file)
    if not callable(getattr(module, name, None)):
        raise AttributeError(f"{file} has no function {name}")
    return getattr(module, name)


def _once(function):
    """Call the function twice: to compile it, and for ncu."""
    function()
    check(driver.cuCtxSynchronize())
    check(driver.cuProfilerStart())
    function()
    check(driver.cuCtxSynchronize())
    check(driver.cuProfilerStop())
    return 0


def _ncu(target):
    program = ncu.available()
    if not program:
        print("ncu (Nsight Compute) is not on PATH: no stalls, no bytes as the hardware counts them")
        return
    try:
        report = ncu.run(target, program)
    except RuntimeError as error:
        print(error)
        return
    print("counted by the hardware (ncu, of one call; it runs a kernel several times, which changes clocks and caches):")
    print(*report, sep="\n")
