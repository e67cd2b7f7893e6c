"""Compiled kernels on disk, under a key that covers all they were made from (digest.py).

An entry begins with a digest of its key and of all that follows: a head in JSON, which says the kernel's name, and the machine
code. What is cut, damaged or was kept under another key fails its digest before anything else of it is looked at, and is
compiled anew. Reading an entry runs no code. Whose files are read, and how they are written, says cache_files.py.

TILES_CACHE_DIR moves the folder, TILES_CACHE_BYTES sets the limit, TILES_CACHE=0 turns the cache off. TILES_CACHE_TRUSTED names
the folder if it is to be used although others than this user may write to it.
"""

import hashlib
import json
import logging
import os
from pathlib import Path

from . import cache_files
from .cache_files import CacheOff, Folder, UntrustedFile
from .compiler import Compiled

LIMIT = 512 * 2**20  # bytes: some thousands of kernels
log = logging.getLogger(__name__)


def limit() -> int:
    """Bytes that the cache may take. ValueError: TILES_CACHE_BYTES is no positive integer."""
    cache_bytes = os.environ.get("TILES_CACHE_BYTES") or str(LIMIT)
    if not cache_bytes.isdecimal() or not int(cache_bytes):
        raise ValueError(f"TILES_CACHE_BYTES must be a positive number of bytes, got {cache_bytes!r}")
    return int(cache_bytes)


def folder() -> Path | None:
    """Where compiled kernels are kept; None where they are not kept."""
    path = _folder()
    return path and path.path


def _folder() -> Folder | None:
    try:
        return cache_files.find_folder()
    except CacheOff as off:
        text = f"compiled kernels are not cached: {off}; {off.remedy}"
        if off.unsafe:
            cache_files.warn(off.unsafe, text)
        else:  # as somebody asked for, or as it must be
            log.debug("%s", text)
        return None


def load(name: str | None) -> Compiled | None:
    """The machine code kept under this key, if there is any and it is sound. ValueError: see `limit`."""
    head, cubin = _read(name)
    match head:
        case {"name": str(entry), "log": str(text)}:
            return Compiled(cubin, entry, text)
    return None


def store(name: str | None, compiled: Compiled) -> None:
    """Keep machine code under this key. A folder that cannot be written is no error."""
    _write(name, {"name": compiled.name, "log": compiled.log}, compiled.cubin)


def recall(name: str | None) -> dict | None:
    """The value that `remember` stored under this key."""
    match _read(name)[0]:
        case {"figures": dict(row)}:
            return row
    return None


def remember(name: str | None, value: dict) -> None:
    """Keep what JSON can say, made from a kernel, under a key of its own."""
    _write(name, {"figures": value}, b"")


def _digest(name, rest):
    return hashlib.sha256(name.encode() + b"\n" + rest).hexdigest().encode()


def _read(name):
    """The head and the body of an entry, or (None, b"") if there is none or it is damaged."""
    if name is None or (place := _folder()) is None:
        return None, b""
    nbytes = limit()
    try:
        header, _, rest = cache_files.read(place, name, nbytes).partition(b"\n")
        if header != _digest(name, rest):
            raise ValueError("its digest differs")
        head, _, body = rest.partition(b"\n")
        return json.loads(head), body
    except UntrustedFile as error:
        remedy = f"remove it; or, {cache_files.trust_remedy(place.path)}"
        cache_files.warn(place.path, f"a cached kernel is not loaded, but compiled anew: {error}; {remedy}")
    except (OSError, ValueError, RecursionError) as error:
        log.debug("nothing is cached as %s: %r", name, error)
    return None, b""


def _write(name, head, body):
    if name is None or (place := _folder()) is None:
        return
    rest = json.dumps(head).encode() + b"\n" + body
    try:
        cache_files.write(place, name, _digest(name, rest) + b"\n" + rest, limit())
    except OSError as error:
        log.debug("%s could not be kept: %s", name, error)
