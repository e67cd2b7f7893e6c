"""Runs the clusters of a large grid in several processes, with the same hazards, results and output as one after the other.

The first clusters run in this process. If the rest would take more than MIN_SECONDS, and no array is both read and written,
processes are forked that take clusters in order. They work on copies of the arrays, in memory that they share (accesses.py), so
that nothing counts until it is known to be right:

- If an array turns out to be read by one cluster and written by another, or an element to be stored to by two, the copies are
  thrown away, and all remaining clusters run in this process.
- If a cluster fails, for whatever reason, those before it are waited for, and it runs once more in this process. Here its
  Hazard is raised, breakpoints stop and debuggers work. A cluster's random order follows from the seed and its number alone, so
it
  fails in the same way again.
- What kernels print is kept, and printed in the order of clusters.
"""

import contextlib
import copy
import gc
import io
import os
import signal
import sys
import threading
import time
import warnings
from multiprocessing import Pipe, connection

import numpy as np
from greenlet import getcurrent

from .accesses import Accesses

MIN_SECONDS = 2.0  # seconds of remaining work that make it worth while to fork processes
POLL_SECONDS = 0.25  # seconds between two looks at accesses and the time
TOKEN_BYTES = 4  # bytes of a cluster's number


def jobs():
    """How many processes may run at once: TILES_JOBS, by default one for each core. One only, where forking might do harm (a
    thread may hold a lock, which nobody would release in the child) or hide something (from a debugger)."""
    if not hasattr(os, "fork") or not hasattr(os, "sched_getaffinity") or getcurrent().parent is not None:
        return 1
    setting = os.environ.get("TILES_JOBS", "")
    if setting:
        if not setting.isdecimal() or int(setting) < 1:
            raise ValueError(f"TILES_JOBS must be a number of processes, got {setting!r}")
        return int(setting)
    can_fork = threading.active_count() == 1 and sys.gettrace() is None and "jax" not in sys.modules
    return len(os.sched_getaffinity(0)) if can_fork else 1


def run_all(count, run, args, progress, clock=time.monotonic):
    """run(n, args, accesses) for n from 0 to count - 1, in order or as if in order."""
    arrays = arrays_of(args)
    accesses, outputs, considered = Accesses(arrays), {}, False
    for n in range(count):
        if n in outputs:
            sys.stdout.write(outputs[n])
            continue
        start = clock()
        run(n, args, accesses)
        progress.done(n + 1)
        left = count - n - 1
        if not considered and left > 1 and left * (clock() - start) > MIN_SECONDS:
            processes = min(jobs(), left)
            considered = processes == 1 or accesses.clash
            if not considered:
                outputs, considered = _run_forked(range(n + 1, count), run, args, arrays, accesses, progress, processes), True


def _run_forked(numbers, run, args, arrays, accesses, progress, max_processes):
    """{number: what it printed} of the clusters that could be run in processes."""
    copies, shared_accesses = accesses.shared(arrays)
    replaced = dict(zip(map(id, arrays), copies))
    process_args = [_replace_arrays(arg, replaced) for arg in args]
    with contextlib.closing(shared_accesses.stores):
        outputs = _run_in_children(numbers, lambda n: run(n, process_args, shared_accesses), accesses, progress, max_processes)
    if accesses.clash:
        return {}
    for array, copied in zip(arrays, copies):
        if array.flags.writeable and accesses.written(array):
            array[...] = copied
    return outputs


def arrays_of(args):
    """The global arrays that arguments are, or hold."""
    nested = [arrays_of(arg) if isinstance(arg, tuple) else [getattr(arg, "array", arg)] for arg in args]
    return [array for arrays in nested for array in arrays if isinstance(array, np.ndarray)]


def _replace_arrays(arg, replaced):
    """An argument with its arrays replaced."""
    if isinstance(arg, tuple):
        parts = [_replace_arrays(part, replaced) for part in arg]
        return type(arg)(*parts) if hasattr(arg, "_fields") else tuple(parts)
    if isinstance(arg, np.ndarray):
        return replaced[id(arg)].view(type(arg))
    if id(getattr(arg, "array", None)) in replaced:
        arg = copy.copy(arg)
        arg.array = replaced[id(arg.array)]
    return arg


def _run_in_children(numbers, run, accesses, progress, max_processes):
    """{number: what it printed} of the clusters that ended well; all that come before the first failure are among them."""
    tokens, feed = os.pipe()
    os.set_blocking(feed, False)
    waiting = memoryview(b"".join(n.to_bytes(TOKEN_BYTES, "little") for n in numbers))
    children, outputs, failed = {}, {}, numbers.stop
    try:
        for _ in range(max_processes):
            receiver, sender = Pipe(duplex=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns that there are threads; `jobs` has checked them
                child = os.fork()
            if not child:
                receiver.close()
                progress.mute()
                _serve_clusters(tokens, feed, sender, run)
            sender.close()
            children[receiver] = child
        reading = set(children)
        while reading and not accesses.clash and len(outputs) < failed - numbers.start:
            if waiting:
                with contextlib.suppress(BlockingIOError):
                    waiting = waiting[os.write(feed, waiting) :]
                if not waiting:
                    os.close(feed)
            for one in connection.wait(list(reading), POLL_SECONDS):
                try:
                    n, text = one.recv()
                except (EOFError, OSError):
                    reading.discard(one)
                    continue
                if text is None:
                    failed = min(failed, n)
                    outputs = {k: output for k, output in outputs.items() if k < failed}
                elif n < failed:
                    outputs[n] = text
            progress.done(numbers.start + len(outputs))
    finally:
        if waiting:
            os.close(feed)
        os.close(tokens)
        for receiver, child in children.items():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            receiver.close()
    return outputs


def _serve_clusters(tokens, feed, results, run):
    """Run clusters in a child process as they come, until one fails or there are no more. Never returns."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent will end this process
        gc.freeze()  # whatever was there belongs to the parent
        os.close(feed)
        sys.breakpointhook = _no_terminal
        while token := os.read(tokens, TOKEN_BYTES):
            n, sys.stdout = int.from_bytes(token, "little"), io.StringIO()
            try:
                run(n)
            except BaseException:
                results.send((n, None))
                break
            results.send((n, sys.stdout.getvalue()))
    finally:
        os._exit(0)


def _no_terminal(*args, **kwargs):
    raise RuntimeError("a breakpoint, which stops where there is a terminal")
