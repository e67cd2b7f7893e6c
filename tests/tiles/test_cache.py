"""tiles/cache.py: what is kept is found again whole or not at all, and no folder is an error."""

import json
import os
import stat
import sys
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
    assert stat.S_IMODE(place.stat().st_mode) == 0o700 and len(list(place.iterdir())) == 1


def test_no_key_no_file(place):
    cache.store(None, CODE)
    assert cache.load(None) is None and not place.exists()


DAMAGE = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "not JSON": lambda text: "cubin",
    "a list": lambda text: "[1, 2]",
    "a byte of the code": lambda text: text.replace("AAEC", "AAED"),
    "no name": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "name"}),
    "not base 64": lambda text: json.dumps({**json.loads(text), "cubin": "?"}),
    "not text": lambda text: "\udcff",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_anew(damage, place):
    cache.store("a", CODE)
    file = place / "a.json"
    text = file.read_text()
    file.write_text(DAMAGE[damage](text), errors="surrogateescape")
    assert cache.load("a") is None
    cache.store("a", CODE)
    assert cache.load("a") == CODE


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

    monkeypatch.setattr(cache.os, "replace", fails)
    cache.store("a", CODE)
    assert not list(place.iterdir())
