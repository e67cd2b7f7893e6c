"""The sources of tiles/ and ops/ that decide what kernels compile to, and whether they are still what was imported.

tiles/__init__.py imports this module before any other of them, and IMPORTED is their content at that time. A file that is
edited later, say beside a notebook, makes another digest, and then nothing is cached: the process runs the old code. Times of
files play no part, for clocks differ and archives keep times of their own.

It imports the standard library only.
"""

import functools
import hashlib
import os
from pathlib import Path

FOLDERS = [Path(__file__).parents[1], Path(__file__).parents[2] / "ops"]  # digested file by file, except for those of APART,
# which say how kernels are launched, interpreted, kept and looked at, and not what they compile to
APART = {f"tiles/{folder}" for folder in "calls emulator inspect interpreter launching profile testing".split()}
APART |= {
    f"tiles/{file}.py"
    for file in "__main__ doctor draw values compiling/cache compiling/cache_files compiling/code_size compiling/sass".split()
}


def takes_part(file) -> bool:
    """Is this a file of tiles/ or ops/ whose code decides what kernels compile to?"""
    return _part_of(tuple(FOLDERS), os.fspath(file))


@functools.cache  # asked a thousand times for each key
def _part_of(folders, name):
    file = Path(name)
    for folder in folders:
        if folder in file.parents:
            name = Path(folder.name, file.relative_to(folder))
            return not {name.as_posix(), *(parent.as_posix() for parent in name.parents)} & APART
    return False


def content() -> bytes | None:
    """A digest of what the files hold that take part in compiling; None if one cannot be read."""
    combined = hashlib.sha256()
    try:
        for folder in FOLDERS:
            for file in sorted(folder.rglob("*.py")):
                if takes_part(file) and file.is_file():
                    name, text = f"{folder.name}/{file.relative_to(folder)}".encode(), file.read_bytes()
                    combined.update(b"%d %d " % (len(name), len(text)) + name + text)
    except OSError:
        return None
    return combined.digest()


IMPORTED = content()
