"""Commands whose output others read: `python -m tiles inspect kernels.py:softmax --sass | head`."""

import os
import sys
from collections.abc import Callable

STOPPED = 141  # what shells say of a program that SIGPIPE ended


def leave(main: Callable[..., int], *arguments) -> None:
    """End the process with main's exit code; without a word if the reader has left before the end."""
    try:
        code = main(*arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python flushes what is left, at its end
        code = STOPPED
    sys.exit(code)
