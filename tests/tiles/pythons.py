"""Other versions of Python on this machine, for tests of what is the same in all of them. `python pythons.py` prints them, the
newest first."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST, NEWEST = 10, 20  # minor versions
PYENV = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"


@functools.cache
def other_pythons() -> list[str]:
    """One of each minor version but this one: on the PATH, or where pyenv has put it."""
    pythons = []
    for minor in range(OLDEST, NEWEST):
        name = f"python3.{minor}"
        places = [shutil.which(name), *sorted(map(str, PYENV.glob(f"*/bin/{name}")))] if minor != sys.version_info[1] else []
        pythons += [place for place in places if place and runs(place, "import linecache")][:1]
    return pythons


def runs(python: str, code: str) -> bool:
    """Does this Python start and run this code? A shim of pyenv's may not."""
    return not subprocess.run([python, "-c", code], capture_output=True, cwd=os.sep, timeout=100).returncode


if __name__ == "__main__":
    print(*other_pythons()[::-1], sep="\n")
