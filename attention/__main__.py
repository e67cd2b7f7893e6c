"""`python -m attention`: runs attention on this machine and reports its accuracy and speed. `python -m attention inspect` and
`... show`: see inspect.py and show.py."""

import argparse
import importlib.util
import time

import ml_dtypes
import numpy as np

from tiles.compiling.compiler import check_arch
from tiles.launching.devices import device
from tiles.pipes import leave

from . import forward, reference
from . import show as drawing

REAL_SIZE = (4, 4096, 16, 128)  # batch, sequence, heads, head dim: on a GPU
SMALL_SIZE = (1, 256, 2, 128)  # in the interpreter
REPEATS = 20


def has_gpu() -> bool:
    """Is there a GPU that attention.forward runs on?"""
    try:
        return device(0).target.supported
    except Exception:  # no driver, no GPU, or a broken one: cuda.bindings has an exception class for each
        return False


def run_and_check(size, to_device, to_host, seed=0):
    """Run a causal forward pass and compare its last head with float64. Returns (device inputs, seconds of the first call)."""
    rng = np.random.default_rng(seed)
    host = [rng.standard_normal(size, np.float32).astype(ml_dtypes.bfloat16) for _ in range(3)]
    arrays = [to_device(x) for x in host]
    start = time.perf_counter()
    out = to_host(forward(*arrays, causal=True))
    seconds = time.perf_counter() - start
    one = [x[-1:, :, -1:] for x in host]
    ref, low = reference.forward(*one, causal=True)[0], reference.forward_low(*one, causal=True)[0]
    got = out[-1:, :, -1:]
    reference.assert_close(got, ref, low)
    error = np.abs(got.astype(float) - ref).max()
    print(f"forward  (B, S, H, D) = {size}, bf16, causal: largest error {error:.1e} against float64,")
    lost = np.abs(low.astype(float) - ref).max()
    print(f"         {lost:.1e} is the error of the formula itself in bf16. First call {seconds:.2f} s.")
    return arrays


def on_torch() -> None:
    """Check the real size on the GPU, and time it beside torch's scaled_dot_product_attention."""
    import torch
    import torch.nn.functional as F

    def to_device(x):
        return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)

    def to_host(x):
        return x.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)

    q, k, v = run_and_check(REAL_SIZE, to_device, to_host)
    batch, length, heads, dim = REAL_SIZE
    flops = 2 * batch * heads * length * length * dim
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    calls = {
        "attention.forward": lambda: forward(q, k, v, causal=True),
        "torch SDPA": lambda: F.scaled_dot_product_attention(*heads_first, is_causal=True),
    }
    for name, call in calls.items():
        times = []
        for _ in range(REPEATS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        ms = sorted(times)[REPEATS // 2]
        print(f"speed    {name:18} {ms:6.3f} ms  {flops / ms / 1e9:5.0f} TFLOPS")


def on_numba() -> None:
    """Check the real size on the GPU with Numba's own arrays."""
    from numba import cuda

    run_and_check(REAL_SIZE, cuda.to_device, lambda x: x.copy_to_host())


def on_interpreter() -> None:
    """Check a small size without a GPU: the interpreter also detects races and deadlocks."""
    run_and_check(SMALL_SIZE, lambda x: x, lambda x: x)


def show() -> None:
    """Report this machine's devices and libraries, and run attention on it."""
    from tiles import doctor

    doctor.main()
    if not has_gpu():
        on_interpreter()
    elif importlib.util.find_spec("torch"):
        on_torch()
    else:
        on_numba()


def main(arguments=None) -> int:
    """Run `python -m attention` with these arguments, by default the command line's, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m attention", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    look = commands.add_parser(
        "inspect", help="compile every shipped kernel, without a GPU, and print registers, spills and instruction counts"
    )
    look.add_argument("--arch", default="sm_90a", help="architecture (default: %(default)s)")
    look.add_argument("--all", action="store_true", help="every configuration at every size, every dtype, unaligned arrays")
    look.add_argument("--check", action="store_true", help="exit with 1 on a spill, local memory or a warning of ptxas")
    look.add_argument("--only", action="append", default=[], help="only rows with this text in their name")
    look.add_argument("--json", action="store_true", help="print the rows as JSON")
    look.add_argument("--jobs", type=int, help="processes that compile (default: one for each core)")
    picture = commands.add_parser("show", help="draw a mask, and which blocks of keys are skipped, masked or full")
    drawing.add_arguments(picture)
    options = parser.parse_args(arguments)
    if options.command == "inspect":
        from . import inspect

        try:
            check_arch(options.arch)
        except ValueError as error:
            look.error(f"--arch: {error}")
        return inspect.main(options.arch, options.all, options.check, options.json, options.jobs, options.only)
    if options.command == "show":
        try:
            return drawing.main(options)
        except BrokenPipeError:  # the reader of a pipe closed it early
            raise
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            picture.exit(2, f"{picture.prog}: error: {error}\n")
    show()
    return 0


if __name__ == "__main__":
    leave(main)
