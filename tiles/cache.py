"""Compiled kernels on disk, under a key that covers all they were made from (digest.py).

An entry is one JSON file: no pickle, so that reading it runs no code; written aside and renamed, so that it is whole or not
there; with a digest of its own, so that a damaged one is made anew. TILES_CACHE_DIR moves the folder, TILES_CACHE=0 turns
the cache off.
"""

import base64
import hashlib
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

from .compiler import Compiled

log = logging.getLogger(__name__)


def folder() -> Path | None:
    """Where compiled kernels are kept, made for this user alone; None where they are not kept."""
    if os.environ.get("TILES_CACHE", "1") == "0":
        return None
    path = Path(os.environ.get("TILES_CACHE_DIR") or _platform_folder())
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.name == "posix" and (path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o022):
            log.warning("compiled kernels are not cached: others than this user may write to %s", path)
            return None
    except OSError as error:
        log.debug("compiled kernels are not cached: %s", error)
        return None
    return path


def _platform_folder():
    home = Path.home()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData/Local"), "numba-tiles", "Cache")
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "numba-tiles"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache", "numba-tiles")


def load(name: str | None) -> Compiled | None:
    """The machine code kept under this key, if there is any and it is sound."""
    if name is None or (path := folder()) is None:
        return None
    try:
        entry = json.loads((path / f"{name}.json").read_bytes())
        cubin = base64.b64decode(entry["cubin"], validate=True)
        if entry["sha256"] != hashlib.sha256(cubin).hexdigest():
            raise ValueError("its digest differs")
        return Compiled(cubin, str(entry["name"]), str(entry["log"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.debug("the cached kernel %s is damaged: %s", name, error)
        return None


def store(name: str | None, compiled: Compiled) -> None:
    """Keep machine code under this key. A folder that cannot be written is no error."""
    if name is None or (path := folder()) is None:
        return
    digest, cubin = hashlib.sha256(compiled.cubin).hexdigest(), base64.b64encode(compiled.cubin).decode()
    entry = {"name": compiled.name, "log": compiled.log, "sha256": digest, "cubin": cubin}
    try:
        handle, aside = tempfile.mkstemp(dir=path, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(entry, file)
            os.replace(aside, path / f"{name}.json")
        except BaseException:
            os.unlink(aside)
            raise
    except OSError as error:
        log.debug("the kernel %s could not be kept: %s", name, error)
