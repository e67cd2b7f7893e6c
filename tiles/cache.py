"""Compiled kernels on disk, under a key that covers all they were made from (digest.py).

The files are those of cuda.core's FileStreamProgramCache. It writes a file aside and renames it, so that an entry is whole or
not there, whatever other processes do. It uses no pickles, so reading an entry runs no code. When there are more bytes than the
limit, the entry that was read longest ago goes first. This module adds what it leaves to its users: a folder that others cannot
write to, and the kernel's name and a digest before the machine code, so that a damaged entry is compiled anew.

TILES_CACHE_DIR moves the folder, TILES_CACHE_BYTES sets the limit, TILES_CACHE=0 turns the cache off.
"""

import functools
import hashlib
import json
import logging
import os
import sys
from pathlib import Path

from cuda.core.utils import FileStreamProgramCache

from .compiler import Compiled

LIMIT = 512 * 2**20  # bytes: some thousands of kernels
log = logging.getLogger(__name__)


def folder() -> Path | None:
    """Where compiled kernels are kept, made for this user alone; None where they are not kept."""
    if os.environ.get("TILES_CACHE", "1") == "0":
        return None
    try:
        path = Path(os.environ.get("TILES_CACHE_DIR") or _platform_folder())
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.name == "posix" and (path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o022):
            log.warning("compiled kernels are not cached: others than this user may write to %s", path)
            return None
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        log.debug("compiled kernels are not cached: %s", error)
        return None
    return path


def _platform_folder():
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local", "numba-tiles", "Cache")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "numba-tiles"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "numba-tiles")


def limit() -> int:
    """Bytes that the cache may take. ValueError: TILES_CACHE_BYTES is no positive integer."""
    given = os.environ.get("TILES_CACHE_BYTES") or str(LIMIT)
    if not given.isdecimal() or not int(given):
        raise ValueError(f"TILES_CACHE_BYTES must be a positive number of bytes, got {given!r}")
    return int(given)


def entries(path: Path) -> list[Path]:
    """The files that are kept in this folder: of kernels, and of their figures."""
    return [file for file in path.glob("entries/*/*") if file.is_file()]


@functools.lru_cache(4)
def _files(path, nbytes):
    return FileStreamProgramCache(path, max_size_bytes=nbytes)


def load(name: str | None) -> Compiled | None:
    """The machine code kept under this key, if there is any and it is sound. ValueError: see `limit`."""
    head, cubin = _read(name)
    try:
        return head and Compiled(cubin, str(head["name"]), str(head["log"]))
    except (KeyError, TypeError) as error:
        log.debug("no cached kernel %s: %r", name, error)
        return None


def store(name: str | None, compiled: Compiled) -> None:
    """Keep machine code under this key. A folder that cannot be written is no error."""
    _write(name, {"name": compiled.name, "log": compiled.log}, compiled.cubin)


def recall(name: str | None) -> dict | None:
    """What `remember` keeps under this key."""
    head, body = _read(name)
    return head and json.loads(body)


def remember(name: str | None, what: dict) -> None:
    """Keep what JSON can say, made from a kernel, under a key of its own."""
    _write(name, {}, json.dumps(what).encode())


def _read(name):
    """The head and the body of an entry, or (None, b"") if there is none or it is damaged."""
    if name is None or (path := folder()) is None:
        return None, b""
    nbytes = limit()
    try:
        head, _, body = _files(path, nbytes)[name].partition(b"\n")
        entry = json.loads(head)
        if entry["sha256"] != hashlib.sha256(body).hexdigest():
            raise ValueError("its digest differs")
        return entry, body
    except (OSError, KeyError, TypeError, ValueError) as error:
        log.debug("nothing is cached as %s: %r", name, error)
        return None, b""


def _write(name, head, body):
    if name is None or (path := folder()) is None:
        return
    try:
        _files(path, limit())[name] = json.dumps({**head, "sha256": hashlib.sha256(body).hexdigest()}).encode() + b"\n" + body
    except OSError as error:
        log.debug("%s could not be kept: %s", name, error)
