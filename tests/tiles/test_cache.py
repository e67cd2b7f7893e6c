"""tiles/compiling/cache.py: what is kept is found again whole or not at all, and no folder is an error. (Whose files are read:
test_cache_files.py.)"""

import json
import os
import random
import stat
import sys
import time
from pathlib import Path

import pytest

from tiles.compiling import cache, cache_files
from tiles.compiling.compiler import Compiled

CODE = Compiled(bytes(range(256)), "_Zname", "ptxas info : Used 40 registers\n")


@pytest.fixture
def place(monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.delenv("TILES_CACHE", raising=False)
    return tmp_path / "kept"


def test_what_is_stored_is_loaded(place):
    assert cache.load("a" * 64) is None
    cache.store("a" * 64, CODE)
    assert cache.load("a" * 64) == CODE and cache.load("b" * 64) is None
    assert stat.S_IMODE(place.stat().st_mode) == 0o700 and len(cache_files.entries(place)) == 1


def test_no_key_no_file(place):
    cache.store(None, CODE)
    assert cache.load(None) is None and not place.exists()


def damaged_files(text):
    """What may be found where an entry was, by what became of it."""
    noise, deep = random.Random(1).randbytes(3000), "[" * 200_000
    head, body = text.index(b"{"), text.index(b"}") + 2
    yield from {
        "empty": b"",
        "cut": text[: len(text) // 2],
        "one byte short": text[:-1],
        "longer": text + b"\0",
        "noise": noise,
        "noise behind the head": text[:body] + noise,
        "not JSON": b"cubin",
        "a list": b"[1, 2]\n",
        "nested": deep.encode(),
        "nested in a line": deep.encode() + b"\n" + text,
        "a huge number": b'{"name": ' + b"9" * 100_000 + b"}\n",
        "a byte of the code": text.replace(bytes([7, 8, 9]), bytes([7, 8, 8])),
        "a byte of the name": text.replace(b"_Zname", b"_Zmane"),
        "not text": b"\xff" + text,
    }.items()
    bare, code = {"name": "_Zname", "log": ""}, text[body:]
    for what, said in {  # digests that are right, of heads that are not
        "no name": {"log": ""},
        "a number for a name": {**bare, "name": 7},
        "nothing for a log": {**bare, "log": None},
        "a list for a head": [bare],
        "a number for a head": 1e300,
    }.items():
        yield what, sealed("a", json.dumps(said).encode() + b"\n" + code)
    yield "a nested head", sealed("a", deep.encode() + b"\n" + code)
    yield "a head of a huge number", sealed("a", b'{"name": ' + b"9" * 100_000 + b"}\n" + code)
    yield "no head", sealed("a", text[head:body].replace(b"\n", b""))[:-1]
    yield "that of another key", sealed("b", text[head:])


def sealed(name, rest):
    return cache._digest(name, rest) + b"\n" + rest


def test_a_damaged_file_is_made_anew(place):
    cache.store("a", CODE)
    file = cache_files.entry_path(place, "a")
    assert [entry.path for entry in cache_files.entries(place)] == [str(file)]
    text = file.read_bytes()
    assert text == sealed("a", text[text.index(b"{") :])
    for damage, content in damaged_files(text):
        assert content != text
        file.write_bytes(content)
        assert cache.load("a") is None and cache.recall("a") is None, damage
        cache.store("a", CODE)
        assert cache.load("a") == CODE, damage


@pytest.mark.parametrize("what", ["[1, 2]", "7", "null", '"text"', "[" * 200_000, '{"seconds": ' + "9" * 100_000 + "}"])
def test_what_is_remembered_is_a_dictionary(what, place):
    cache.remember("a", {"seconds": [1.0, float("inf")]})
    assert cache.recall("a") == {"seconds": [1.0, float("inf")]} and cache.load("a") is None
    file = cache_files.entry_path(place, "a")
    assert [entry.path for entry in cache_files.entries(place)] == [str(file)]
    file.write_bytes(sealed("a", b'{"figures": ' + what.encode() + b"}\n"))
    assert cache.recall("a") in (None, {"seconds": int("9" * 1000)})


def test_an_entry_is_of_its_key(place):
    """A file under another's name, as of a link or a copy by hand, is not taken for it."""
    cache.store("a", CODE)
    cache.store("b", Compiled(b"other", "_Zother", ""))
    os.replace(cache_files.entry_path(place, "b"), cache_files.entry_path(place, "a"))
    assert cache.load("a") is None and cache.load("b") is None


def kernel(k, size=10_000):
    return Compiled(bytes([k]) * size, f"_Z{k}", "")


def test_it_has_a_size(place, monkeypatch):
    """Of twenty kernels of 10 kB, ten are kept."""
    monkeypatch.setenv("TILES_CACHE_BYTES", "105000")
    for k in range(20):
        cache.store(str(k), kernel(k))
        assert sum(file.stat().st_size for file in cache_files.entries(place)) <= 105_000
    surviving_keys = [k for k in range(20) if cache.load(str(k))]
    assert 19 in surviving_keys and 8 <= len(surviving_keys) <= 10
    assert all(cache.load(str(k)) == kernel(k) for k in surviving_keys)


def test_what_was_read_longest_ago_goes_first(place, monkeypatch):
    monkeypatch.setenv("TILES_CACHE_BYTES", "35000")
    for k in range(3):
        cache.store(str(k), kernel(k))
        time.sleep(0.02)
    assert cache.load("0")  # so that 1 is the oldest
    cache.store("3", kernel(3))
    assert [cache.load(str(k)) is not None for k in range(4)] == [True, False, True, True]


@pytest.mark.parametrize("value", ["0", "-1", "much", "1.5"])
def test_a_limit_that_is_none(value, place, monkeypatch):
    monkeypatch.setenv("TILES_CACHE_BYTES", value)
    with pytest.raises(ValueError, match=f"TILES_CACHE_BYTES must be a positive number of bytes, got '{value}'"):
        cache.load("a")


def test_the_limit_by_default(monkeypatch):
    monkeypatch.delenv("TILES_CACHE_BYTES", raising=False)
    assert cache.limit() == 512 * 2**20


def test_off(place, monkeypatch):
    monkeypatch.setenv("TILES_CACHE", "0")
    cache.store("a", CODE)
    assert cache.load("a") is None and cache.folder() is None and not place.exists()


def test_a_folder_that_cannot_be_made_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILES_CACHE_DIR", str(tmp_path / "file" / "kept"))
    cache.store("a", CODE)
    assert cache.load("a") is None and cache.folder() is None
    monkeypatch.setenv("TILES_CACHE_DIR", str(tmp_path / "file"))
    cache.store("a", CODE)
    assert cache.load("a") is None and cache.folder() is None


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_a_user_without_a_home(platform, monkeypatch, tmp_path):
    """As of a container that runs under any number: the cache is off, or where a variable says."""

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", homeless)
    for name in ("TILES_CACHE", "TILES_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    cache.store("a", CODE)
    assert cache.load("a") is None and cache.folder() is None
    variable = {"linux": "XDG_CACHE_HOME", "win32": "LOCALAPPDATA"}.get(platform, "TILES_CACHE_DIR")
    monkeypatch.setenv(variable, str(tmp_path))
    cache.store("a", CODE)
    assert cache.load("a") == CODE


@pytest.mark.parametrize(
    "platform, variables, end",
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/numba-tiles"),
        ("linux", {}, "/home/me/.cache/numba-tiles"),
        ("darwin", {}, "/home/me/Library/Caches/numba-tiles"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/numba-tiles/Cache"),
    ],
)
def test_platforms(platform, variables, end, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_files.platform_folder() == Path(end)


def test_a_write_that_fails_leaves_nothing(place, monkeypatch):
    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    cache.store("a", CODE)
    assert not [file for file in place.rglob("*") if file.is_file()]


def test_what_a_killed_process_left_is_removed(place):
    cache.store("a", CODE)
    old, young = place / "tmp" / "entry-old", place / "tmp" / "entry-young"
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (0, 0))
    cache.store("b", CODE)
    assert cache_files.shrink(place, 10**6) == sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    assert not old.exists() and young.exists() and cache.load("a") == cache.load("b") == CODE


def test_an_entry_larger_than_the_cache_is_not_read(place, monkeypatch):
    cache.store("a", CODE)
    monkeypatch.setenv("TILES_CACHE_BYTES", "100")
    assert cache.load("a") is None
