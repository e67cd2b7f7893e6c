"""tiles/compiling/cache_files.py: machine code of another user is never loaded, and nobody but this user can write ours."""

import importlib.util
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiles import doctor
from tiles.compiling import cache, cache_files
from tiles.compiling.compiler import Compiled

OURS, THEIRS = Compiled(b"our code", "_Zours", ""), Compiled(b"their code", "_Ztheirs", "")
STRANGER = 54321
pytestmark = pytest.mark.skipif(not cache_files.POSIX, reason="files have owners and modes")


@pytest.fixture
def place(monkeypatch, tmp_path):
    """A folder for the cache, not made yet."""
    monkeypatch.setenv("TILES_CACHE_DIR", str(tmp_path / "kept"))
    for name in ("TILES_CACHE", "TILES_CACHE_TRUSTED"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "kept"


@pytest.fixture
def umask():
    """os.umask, whose mode is restored after the test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.fixture
def give(monkeypatch):
    """give(path) makes it a stranger's: root does, others see it through os.stat and os.fstat."""
    inputs = set()

    def seen(real):
        def call(what, **options):
            actual = real(what, **options)
            if (actual.st_dev, actual.st_ino) not in inputs:
                return actual
            return SimpleNamespace(**{n: getattr(actual, n) for n in dir(actual) if n.startswith("st_")} | {"st_uid": STRANGER})

        return call

    def call(path):
        if os.geteuid() == 0:
            os.chown(path, STRANGER, -1)
        else:
            actual = os.lstat(path)
            inputs.add((actual.st_dev, actual.st_ino))

    monkeypatch.setattr(cache_files.os, "stat", seen(os.stat))
    monkeypatch.setattr(cache_files.os, "fstat", seen(os.fstat))
    return call


def store_entry(place, code=OURS, name="a"):
    """The file of an entry, made."""
    cache.store(name, code)
    assert cache.load(name) == code
    return cache_files.entry_path(place, name)


def findings():
    return [(f.text, f.advice) for f in doctor.cache()]


def modes(place):
    return {stat.S_IMODE(path.stat().st_mode) for path in place.rglob("*")}, stat.S_IMODE(place.stat().st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_files_and_folders_are_this_user_s_alone(mask, place, umask, monkeypatch):
    monkeypatch.setenv("TILES_CACHE_DIR", str(place / "deeper" / "still"))
    umask(mask)
    file = store_entry(place / "deeper" / "still")
    assert modes(place) == ({0o700, 0o600}, 0o700) and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_folder_that_the_user_has_made(place, umask):
    """0755, and then a umask that gives the group rights: what is made inside is closed to it, and so is what an older version
    left open."""
    place.mkdir(mode=0o755)
    umask(0o002)
    file = store_entry(place)
    assert modes(place) == ({0o700, 0o600}, 0o755)
    file.parent.chmod(0o775)
    store_entry(place)
    assert modes(place)[0] == {0o700, 0o600}


def unsafe_files(file, give, tmp_path):
    """What another user may put where an entry was."""
    text = file.read_bytes()

    def another(path):
        path.write_bytes(text)
        path.chmod(0o600)
        return path

    def stranger_s():
        give(another(file))

    def by_group():
        another(file).chmod(0o620)

    def by_all():
        another(file).chmod(0o602)

    def link_to_ours():
        another(tmp_path / "target")
        file.symlink_to(tmp_path / "target")

    def link_to_theirs():
        give(another(tmp_path / "target"))
        file.symlink_to(tmp_path / "target")

    def pipe():
        os.mkfifo(file, 0o600)

    def folder():
        file.mkdir()

    return locals_of(stranger_s, by_group, by_all, link_to_ours, link_to_theirs, pipe, folder)


def locals_of(*functions):
    return {function.__name__: function for function in functions}


KINDS = ["stranger_s", "by_group", "by_all", "link_to_ours", "link_to_theirs", "pipe", "folder"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_another_may_have_written_is_not_loaded(kind, place, give, tmp_path, caplog):
    file = store_entry(place)
    make = unsafe_files(file, give, tmp_path)[kind]
    file.unlink()
    make()
    for _ in range(2):
        assert cache.load("a") is None
    if kind in KINDS[:3]:  # those that somebody may have written: said once, with the owner, the mode and the remedy
        [said] = [record.message for record in caplog.records]
        assert str(file) in said and f"set TILES_CACHE_TRUSTED={place}" in said
        assert f"uid {STRANGER}" in said if kind == "stranger_s" else "its mode 06" in said
        [_, (text, advice)] = findings()
        assert text.startswith(f"1 of 1 entries are not loaded: {file} belongs to") and "TILES_CACHE_TRUSTED" in advice
    if kind != "folder":
        store_entry(place)  # compiled anew, and kept in its place
        assert not file.is_symlink() and len(findings()) == 1


def test_replaced_after_it_was_opened(place, monkeypatch):
    """What is asked about its owner is what is read."""
    file, theirs = store_entry(place), store_entry(place, THEIRS, "b")
    real = os.fstat

    def slow(descriptor):
        actual = real(descriptor)
        if theirs.exists():
            os.replace(theirs, file)
        return actual

    monkeypatch.setattr(cache_files.os, "fstat", slow)
    assert cache.load("a") == OURS
    assert not theirs.exists()


FOLDERS = {
    "stranger_s": ("belongs to uid {stranger} (its mode is 0700), and this process runs as {me}", False),
    "0775": ("belongs to {me}, but its mode 0775 lets others write to it", True),
    "0777": ("belongs to {me}, but its mode 0777 lets others write to it", True),
    "1777": ("belongs to {me}, but its mode 1777 lets others write to it", True),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_that_others_may_write_to_is_used_only_if_it_is_named(kind, place, give, caplog, monkeypatch, umask):
    place.mkdir(mode=0o700)
    give(place) if kind == "stranger_s" else place.chmod(int(kind, 8))
    for _ in range(2):
        cache.store("a", OURS)
        assert cache.load("a") is None and cache.folder() is None and not list(place.iterdir())
    text, mine = FOLDERS[kind]
    text = f"{place} {text.format(stranger=STRANGER, me=cache_files.user(os.geteuid()))}"
    [said] = [record.message for record in caplog.records]
    assert text in said and f"set TILES_CACHE_TRUSTED={place}" in said and (f"chmod go-w {place}" in said) == mine
    [(finding, advice)] = findings()
    assert finding == f"off: {text}" and f"TILES_CACHE_TRUSTED={place}" in advice and advice in said

    monkeypatch.setenv("TILES_CACHE_TRUSTED", str(place.parent))  # another one
    assert cache.folder() is None
    umask(0o002)
    monkeypatch.setenv("TILES_CACHE_TRUSTED", f"{place}/../{place.name}")
    file = store_entry(place)
    assert stat.S_IMODE(file.stat().st_mode) == 0o664 and stat.S_IMODE(file.parent.stat().st_mode) == 0o775  # for the group
    give(file)
    assert cache.load("a") == OURS
    [(finding, advice)] = findings()
    assert "trusted whoever wrote it, 1 entries" in finding and not advice


def test_the_doctor_says_where_the_cache_is_and_how_full(place, monkeypatch):
    monkeypatch.setenv("TILES_CACHE_BYTES", str(3 * 2**20))
    assert findings() == [(f"on: {place}, 0 entries, 0.0 of 3 MiB", "")]
    store_entry(place, Compiled(bytes(2**20), "_Zlarge", ""))
    assert findings() == [(f"on: {place}, 1 entries, 1.0 of 3 MiB", "")]
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (place, os.W_OK))
    assert findings() == [(f"on: {place}, which this user may only read, 1 entries, 1.0 of 3 MiB", "")]
    monkeypatch.setenv("TILES_CACHE_BYTES", "some")
    [(text, advice)] = findings()
    assert "got 'some'" in text and "TILES_CACHE_BYTES" in advice


def test_the_doctor_says_why_the_cache_is_off(place, monkeypatch):
    monkeypatch.setenv("TILES_CACHE", "0")
    assert findings() == [("off: TILES_CACHE is 0", "unset TILES_CACHE")]
    monkeypatch.setenv("TILES_CACHE", "1")
    place.write_text("")
    [(text, advice)] = findings()
    assert text.startswith("off: ") and str(place) in text and "TILES_CACHE_DIR name a folder" in advice
    for name in ("TILES_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    monkeypatch.setattr(cache_files.sys, "platform", "linux")
    assert findings() == [("off: no home", "let TILES_CACHE_DIR name a folder that you may write to")]


def test_a_folder_by_a_link(place, tmp_path, give):
    """As of a home on another disk: what it leads to counts."""
    (tmp_path / "disk").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "disk")
    store_entry(place)
    give(tmp_path / "disk")
    assert cache.load("a") is None and cache.folder() is None


def test_a_trusted_folder_that_can_only_be_read(place, monkeypatch):
    """As of an image: nothing is made in it."""
    store_entry(place)
    monkeypatch.setenv("TILES_CACHE_TRUSTED", str(place))
    monkeypatch.setattr(Path, "mkdir", lambda *_: pytest.fail("it makes a folder"))
    monkeypatch.setattr(cache_files.os, "utime", lambda *_: (_ for _ in ()).throw(PermissionError("read-only")))
    monkeypatch.setattr(cache_files.os, "supports_fd", {cache_files.os.utime})
    assert cache.load("a") == OURS


def test_a_system_without_owners(place, monkeypatch):
    """As Windows is: the module is imported and keeps what it is given."""
    for name in ("geteuid", "getuid", "O_NOFOLLOW", "O_NONBLOCK"):
        monkeypatch.delattr(os, name)
    spec = importlib.util.spec_from_file_location("cache_files_elsewhere", cache_files.__file__)
    elsewhere = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(elsewhere)
    folder = elsewhere.find_folder()
    elsewhere.write(folder, "a", b"code", 100)
    assert elsewhere.read(folder, "a", 100) == b"code" and not elsewhere.POSIX and not elsewhere.list_refused_files(folder)
