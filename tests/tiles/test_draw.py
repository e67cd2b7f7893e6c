"""tiles/draw.py: what the pictures and the tables say is what the layouts do."""

import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from tiles import bf16, draw, fp8e4m3, fp16, fp32, rt, st
from tiles.__main__ import main

SHARED = [st(64, 64, bf16), st(64, 32, bf16), st(8, 16, fp16), st(64, 64, fp32), st(32, 96, fp32), st(64, 128, fp8e4m3)]


def layout(capsys, *words):
    """The lines that the command prints."""
    assert main(["layout", *map(str, words)]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("way", ["row", "col"])
def test_register_table(capsys, way):
    """As the PTX ISA has it: lane 4 g + t holds columns 2 t and 2 t + 1 of rows g and g + 8 (or the transpose)."""
    _, _, *rows = layout(capsys, "rt", 32, 32, "bf16", "--layout", way)
    table = [[tuple(map(int, x.split(":"))) for x in line.split()[1:]] for line in rows]
    assert [len(row) for row in table] == [16] * 16
    for r, line in enumerate(table):
        for c, (lane, index) in enumerate(line):
            row, col = (r, c) if way == "row" else (c, r)
            assert (lane, index) == (row % 8 * 4 + col % 8 // 2, row // 8 * 2 + col // 8 * 4 + col % 2)


@pytest.mark.parametrize("way", ["row", "col"])
def test_register_table_of_bytes(capsys, way):
    """Lane 4 g + t holds columns 4 t to 4 t + 3 of rows g and g + 8, and those 16 further on: base tiles of 16 x 32."""
    first, _, *rows = layout(capsys, "rt", 32, 32, "fp8e5m2", "--layout", way)
    assert f"of the first {'16 x 32' if way == 'row' else '32 x 16'};" in first
    table = [[tuple(map(int, x.split(":"))) for x in line.split()[1:]] for line in rows]
    assert (len(table), len(table[0])) == ((16, 32) if way == "row" else (32, 16))
    for r, line in enumerate(table):
        for c, (lane, index) in enumerate(line):
            row, col = (r, c) if way == "row" else (c, r)
            assert (lane, index) == (row % 8 * 4 + col % 16 // 4, row // 8 * 4 + col // 16 * 8 + col % 4)


@pytest.mark.parametrize("tile", SHARED, ids=str)
def test_shared_table(capsys, tile):
    """A chunk's banks are those of its address, with the chunk's number XORed by the row bits that the swizzle takes."""
    _, _, _, *rows = layout(capsys, "st", *tile.shape, tile.dtype, "--width", tile.width)
    for r, line in enumerate(rows):
        for c, banks in enumerate(line.split()[1:]):
            address = r * tile.width + 16 * c
            group = (address // 16 ^ address // 128 % (tile.width // 16)) % 8
            assert banks == f"{4 * group}-{4 * group + 3}"


@pytest.mark.parametrize("tile", SHARED, ids=str)
def test_what_swizzles_are_for(tile):
    """ldmatrix and rows never conflict, nor do pairs of 2 or 4 bytes. Pairs of fp32 do: the 32 bytes of a row are two chunks,
    which change places from one row to the next."""
    for name in ("ldmatrix", "row", "pairs"):
        for turn in draw.ACCESSES[name](tile):
            cycles, least = draw.cost(turn)
            assert cycles == least * (2 if name == "pairs" and tile.dtype is fp32 else 1)


def test_a_column_conflicts(capsys):
    """Rows 8 apart share their banks: 32 rows take four cycles, words in between none."""
    line = layout(capsys, "st", 64, 64, "bf16", "--access", "column")[-1]
    assert line.endswith("4 0 0 0 " * 7 + "4 0 0 0   4 cycles where 1 would do")


def test_loads_of_banks():
    assert draw.cost([(128 * k, 16) for k in range(8)]) == (8, 1)  # a column of chunks without a swizzle
    assert draw.cost([(0, 4)] * 32) == (1, 1)  # one word for all is a broadcast
    assert draw.cost([(8 * k, 8) for k in range(32)]) == (2, 2)
    assert draw.bank_loads([(2, 2), (0, 2), (132, 4)]) == [1, 1] + [0] * 30


@pytest.mark.parametrize(
    "tile", [rt(16, 16, fp32), rt(32, 16, bf16, "col"), rt(32, 64, fp8e4m3), rt(32, 16, fp8e4m3, "col"), *SHARED], ids=str
)
def test_picture(tile, tmp_path, capsys):
    """Well-formed, each cell once, in the picture and on no other cell; the pairs of a register tile, or the chunks twice."""
    kind, file = type(tile).__name__, tmp_path / "tile.svg"
    extra = ["--layout", tile.layout] if kind == "rt" else ["--width", tile.width]
    layout(capsys, kind, *tile.shape, tile.dtype, *extra, "--svg", file)
    root = ElementTree.fromstring(file.read_text())
    _, _, width, height = map(float, root.get("viewBox").split())
    boxes = [tuple(float(r.get(k)) for k in ("x", "y", "width", "height")) for r in root.findall(".//{*}rect")[1:]]
    assert len(boxes) == (128 if kind == "rt" else 2 * 8 * tile.width // 16)
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in boxes)
    for k, (x, y, w, h) in enumerate(boxes):
        assert not any(x < u + a and u < x + w and y < v + b and v < y + h for u, v, a, b in boxes[:k])
    words = [t.text for t in root.findall(".//{*}text")]
    assert re.match(r"[rs]t\(", words[0]) and "None" not in words


@pytest.mark.parametrize(
    "words, why",
    [
        ("rt 8 16 fp32", "rt: rows and cols must be positive multiples of 16"),
        ("st 8 8 fp8e4m3", "a shared tile's row must be a multiple of 32 bytes"),
        ("rt 16 16 fp32 --access column", "--width and --access are for st"),
        ("st 64 64 bf16 --layout col", "--layout is for rt"),
        ("st 64 64 int32", "invalid choice: 'int32'"),
        ("st 64 64 bf16 --svg /dev/null/tile.svg", "Not a directory"),
    ],
)
def test_mistakes(capsys, words, why):
    with pytest.raises(SystemExit) as caught:
        main(["layout", *words.split()])
    assert caught.value.code == 2 and why in capsys.readouterr().err


def test_png(tmp_path, capsys):
    """Two pixels for each unit of the SVG picture, and not of one colour."""
    pytest.importorskip("cairosvg", exc_type=(ImportError, OSError), reason="no CairoSVG, or no cairo")
    from PIL import Image

    file = tmp_path / "tile.png"
    layout(capsys, "rt", 16, 16, "fp32", "--png", file)
    width, height = re.search(r'viewBox="0 0 (\d+) (\d+)"', draw.svg(draw.register_panel(rt(16, 16, fp32)))).groups()
    with Image.open(file) as picture:
        assert picture.size == (2 * int(width), 2 * int(height))
        assert len(picture.convert("RGB").getcolors(1 << 16)) > 32  # a colour for each lane, and its letters


def test_png_without_cairosvg(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(SystemExit) as caught:
        main(["layout", "rt", "16", "16", "fp32", "--png", str(tmp_path / "tile.png")])
    assert caught.value.code == 2 and "pip install cairosvg" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
