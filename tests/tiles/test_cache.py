"""tiles/cache.py: what is kept is found again whole or not at all, and no folder is an error."""

import json
import os
import stat
import sys
import time
from pathlib import Path

import pytest
from numba.cuda import types

from tiles import cache
from tiles.compiler import Compiled

ROOT = Path(__file__).parents[2]
ARRAY = types.Array(types.float32, 2, "A")


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
    assert stat.S_IMODE(place.stat().st_mode) == 0o700 and len(cache.entries(place)) == 1


def test_no_key_no_file(place):
    cache.store(None, CODE)
    assert cache.load(None) is None and not place.exists()


def _without(text, key):
    head, _, cubin = text.partition(b"\n")
    return json.dumps({k: v for k, v in json.loads(head).items() if k != key}).encode() + b"\n" + cubin


DAMAGE = {
    "empty": lambda text: b"",
    "cut": lambda text: text[: len(text) // 2],
    "one byte short": lambda text: text[:-1],
    "not JSON": lambda text: b"cubin",
    "a list": lambda text: b"[1, 2]\n",
    "a byte of the code": lambda text: text.replace(bytes([7, 8, 9]), bytes([7, 8, 8])),
    "no name": lambda text: _without(text, "name"),
    "not text": lambda text: b"\xff" + text,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_anew(damage, place):
    cache.store("a", CODE)
    [file] = cache.entries(place)
    changed = DAMAGE[damage](file.read_bytes())
    assert changed != file.read_bytes()
    file.write_bytes(changed)
    assert cache.load("a") is None
    cache.store("a", CODE)
    assert cache.load("a") == CODE


def kernel(k, size=10_000):
    return Compiled(bytes([k]) * size, f"_Z{k}", "")


def test_it_has_a_size(place, monkeypatch):
    """Of twenty kernels of 10 kB, ten are kept."""
    monkeypatch.setenv("TILES_CACHE_BYTES", "105000")
    for k in range(20):
        cache.store(str(k), kernel(k))
        assert sum(file.stat().st_size for file in cache.entries(place)) <= 105_000
    kept = [k for k in range(20) if cache.load(str(k))]
    assert 19 in kept and 8 <= len(kept) <= 10
    assert all(cache.load(str(k)) == kernel(k) for k in kept)


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


@pytest.mark.skipif(os.name != "posix", reason="rights of files")
def test_a_folder_that_others_may_write_is_not_used(place, caplog):
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    cache.store("a", CODE)
    assert cache.load("a") is None and not list(place.iterdir())
    assert "others than this user may write" in caplog.text


def test_a_folder_that_cannot_be_made_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILES_CACHE_DIR", str(tmp_path / "file" / "kept"))
    cache.store("a", CODE)
    assert cache.load("a") is None


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
    assert cache._platform_folder() == Path(end)


def test_a_write_that_fails_leaves_nothing(place, monkeypatch):
    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    cache.store("a", CODE)
    assert not [file for file in place.rglob("*") if file.is_file()]
