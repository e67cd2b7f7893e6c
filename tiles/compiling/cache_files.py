"""The files of the cache: what is read was written by this user, or lies in a folder that a setting names.

Machine code runs with the rights of whoever loads it. So a file is opened once, without following a symbolic link, and what is
then asked about its owner and mode is asked of the open file, so that nobody can put another in its place between the check and
the reading. It is read if it belongs to the user of this process and nobody else may write to it. Folders are made for this
user alone (0700), files too (0600), whatever the umask.

A folder that belongs to another user, or that others may write to, is used only if TILES_CACHE_TRUSTED names it. There files of
any owner and mode are read, and made by the umask, so that a group can share it. This holds for root, too: in a container whose
cache is a folder of the host's, the files belong to somebody else.

On Windows, the rights of the folder are all there is, and those of a user's own folder are what they should be.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import sys
import time
from pathlib import Path
from typing import NamedTuple

POSIX = hasattr(os, "geteuid")  # owners and modes mean something
OTHERS = stat.S_IWGRP | stat.S_IWOTH  # the rights to write that are not the owner's
# a link is refused; a pipe that somebody put there does not block; Windows does not translate line ends
READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
ABANDONED = 3600  # seconds after which an unfinished file is one that a process left when it was killed
log = logging.getLogger(__name__)


class CacheOff(Exception):
    """Compiled kernels are neither read nor kept: why, and the remedy. unsafe: the folder, if others may write to it."""

    def __init__(self, why, remedy, unsafe: Path | None = None):
        super().__init__(why)
        self.remedy, self.unsafe = remedy, unsafe


class UntrustedFile(OSError):
    """A file of the cache that is not read, because somebody else could have written it."""


class Folder(NamedTuple):
    """Where compiled kernels are kept. trusted: whoever may write there."""

    path: Path
    trusted: bool


def find_folder() -> Folder:
    """The folder that the environment names, made if it is not there. CacheOff: there is none, or others may write to it."""
    if os.environ.get("TILES_CACHE", "1") == "0":
        raise CacheOff("TILES_CACHE is 0", "unset TILES_CACHE")
    elsewhere = "let TILES_CACHE_DIR name a folder that you may write to"
    try:
        path = Path(os.environ.get("TILES_CACHE_DIR") or platform_folder())
        named = os.environ.get("TILES_CACHE_TRUSTED")
        trusted = named is not None and os.path.realpath(named) == os.path.realpath(path)
        make_folder(path, trusted)
        if not stat.S_ISDIR((status := os.stat(path)).st_mode):
            raise NotADirectoryError(f"{path} is no folder")
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        raise CacheOff(str(error), elsewhere) from None
    if not trusted and (reason := distrust_reason(status)):
        away = "let TILES_CACHE_DIR name a folder that is yours alone"
        is_owner = POSIX and status.st_uid == os.geteuid()
        first = f"chmod go-w {path}, or {away}" if is_owner else away
        raise CacheOff(f"{path} {reason}", f"{first}; or, {trust_remedy(path)}", path)
    return Folder(path, trusted)


def platform_folder() -> Path:
    """The platform's cache folder of this user."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local", "numba-tiles", "Cache")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "numba-tiles"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "numba-tiles")


def make_folder(path: Path, shared: bool = False) -> None:
    """Make a folder, and those that it lies in, where they are not there. shared: by the umask, instead of for this user."""
    if not path.is_dir():
        make_folder(path.parent, shared)
        with contextlib.suppress(FileExistsError):  # another process was faster
            path.mkdir(0o777 if shared else 0o700)


def distrust_reason(status: os.stat_result) -> str:
    """Why what has this owner and mode may have been written by somebody else; empty if it cannot."""
    if not POSIX:
        return ""
    owner, user_id, mode = status.st_uid, os.geteuid(), stat.S_IMODE(status.st_mode)
    if owner != user_id:
        return f"belongs to {user(owner)} (its mode is {mode:04o}), and this process runs as {user(user_id)}"
    return f"belongs to {user(owner)}, but its mode {mode:04o} lets others write to it" if mode & OTHERS else ""


def trust_remedy(folder: Path) -> str:
    """The remedy that lets others' files be read."""
    return f"if you trust whoever may write there, set TILES_CACHE_TRUSTED={folder}"


def user(number: int) -> str:
    """A user by name and number."""
    with contextlib.suppress(ImportError, KeyError):
        import pwd

        return f"{pwd.getpwuid(number).pw_name} (uid {number})"
    return f"uid {number}"


def warn(place: Path, text: str) -> None:
    """Say on the log, once in this process for each place, that something is not used because others could have written it."""
    if place not in _warned:
        _warned.add(place)
        log.warning("%s", text)


_warned: set[Path] = set()


def entry_path(folder: Path, name: str) -> Path:
    """The file that an entry is kept in."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    return folder / "entries" / digest[:2] / digest[2:]


def entries(folder: Path) -> list[os.DirEntry]:
    """The files that are kept in this folder."""
    return [
        file for part in _listed(folder / "entries") for file in _listed(part.path) if not file.is_dir(follow_symlinks=False)
    ]


def _listed(folder) -> list[os.DirEntry]:
    """What lies in a folder; nothing, if it is none."""
    try:
        with os.scandir(folder) as scan:
            return list(scan)
    except OSError:
        return []


def list_refused_files(folder: Folder) -> list[str]:
    """Which files of the cache are not read, and why."""
    names = []
    for file in entries(folder.path):
        try:
            with open_checked(file, folder.trusted):
                pass
        except OSError as error:
            names.append(str(error))
    return names


@contextlib.contextmanager
def open_checked(file: "Path | os.DirEntry", trusted: bool):
    """(descriptor, status) of a file that is safe to read. OSError: it is not there, or is none; Refused: it is not safe."""
    descriptor = os.open(file, READ)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{os.fspath(file)} is no file")
        if not trusted and (reason := distrust_reason(status)):
            raise UntrustedFile(f"{os.fspath(file)} {reason}")
        yield descriptor, status
    finally:
        os.close(descriptor)


def read(folder: Folder, name: str, max_bytes: int) -> bytes:
    """An entry's bytes, and note that it was read just now. OSError: it is not there or has more bytes than `max_bytes`;
    Refused: somebody else could have written it."""
    file = entry_path(folder.path, name)
    with open_checked(file, folder.trusted) as (descriptor, status):
        if status.st_size > max_bytes:
            raise OSError(f"{file} has {status.st_size} bytes, and the whole cache may have {max_bytes}")
        with open(descriptor, "rb", closefd=False) as stream:
            content = stream.read(max_bytes)
        with contextlib.suppress(OSError):  # a folder that is only read
            os.utime(descriptor if os.utime in os.supports_fd else file)
        return content


def write(folder: Folder, name: str, content: bytes, max_bytes: int) -> None:
    """Keep an entry: whole or not at all, whatever other processes do. If there are then more bytes than `max_bytes`, those
    entries go that were read or written longest ago. OSError: it cannot be written."""
    file, aside = entry_path(folder.path, name), folder.path / "tmp"
    for place in (file.parent.parent, file.parent, aside):
        make_folder(place, folder.trusted)
        if not folder.trusted and POSIX and place.stat().st_mode & OTHERS:  # made by an older version, by the umask
            place.chmod(0o700)
    unfinished = aside / f"entry-{secrets.token_hex(8)}"
    try:
        with open(os.open(unfinished, CREATE, 0o666 if folder.trusted else 0o600), "wb") as stream:
            stream.write(content)
        os.replace(unfinished, file)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    cached_bytes = _folder_bytes.get(folder.path, max_bytes) + len(content)  # where nobody has looked yet, as if it were full
    _folder_bytes[folder.path] = cached_bytes if cached_bytes <= max_bytes else shrink(folder.path, max_bytes)


_folder_bytes: dict[Path, int] = {}  # of a folder: what this process read last, and has written since


def shrink(folder: Path, max_bytes: int) -> int:
    """Remove what was read or written longest ago, until what is left has no more than so many bytes; and unfinished files that
    nobody will finish. Gives what is left."""
    files, total = [], 0
    for file in _listed(folder / "tmp"):
        with contextlib.suppress(OSError):  # another process removed it
            if file.stat().st_mtime < time.time() - ABANDONED:
                os.unlink(file)
            else:
                total += file.stat().st_size
    for file in entries(folder):
        with contextlib.suppress(OSError):
            status = file.stat(follow_symlinks=False)
            files.append((status.st_mtime_ns, status.st_size, file.path))
    total += sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= max_bytes:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
            total -= size
    return total
