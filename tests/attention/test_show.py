"""attention/show.py: the blocks that it draws agree with the pairs of the mask."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from attention import __main__ as main
from attention import show

DOCS = np.repeat([0, 1, 2], [60, 90, 300])


def documents(b, h, i, j, docs):
    return (docs[i] == docs[j]) & (j <= i)


def of_heads(b, h, i, j):
    return (j <= i + 200) & (h == 1) | (b == 2)


CASES = {  # what is drawn: (queries, keys), and options
    "documents": (200, 200, dict(mask=documents, aux=(DOCS,), rows=64, cols=32)),
    "documents in a window": (200, 200, dict(mask=documents, aux=(DOCS,), window=(30, None), rows=32, cols=64)),
    "causal": (130, 300, dict(causal=True)),
    "more queries than keys": (300, 100, dict(causal=True, window=(40, None), rows=64, cols=64)),
    "window": (140, 140, dict(window=(30, 3), rows=16, cols=16)),
    "all": (70, 256, dict()),
    "first head": (100, 300, dict(mask=of_heads)),
    "second head": (100, 300, dict(mask=of_heads, head=1)),
    "third sequence": (100, 300, dict(mask=of_heads, batch=2)),
}


def picture(name, **more):
    q, k, options = CASES[name]
    return show.draw_mask(name, q, k, **options | more)


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_what_their_pairs_say(name):
    """The last block is masked if it is not full of keys; missing queries count as visible."""
    of = picture(name)
    for (r, c), kind in np.ndenumerate(of.blocks):
        pairs = of.visible[r * of.rows : (r + 1) * of.rows, c * of.cols : (c + 1) * of.cols]
        if pairs.shape == (of.rows, of.cols):
            assert kind == (show.FULL if pairs.all() else show.PARTIAL if pairs.any() else show.SKIPPED)
        assert not (kind == show.SKIPPED and pairs.any()) and not (kind == show.FULL and not pairs.all())
    assert of.blocks.any() == of.visible.any()


def test_text():
    assert show.text(show.draw_mask("window", 140, 140, window=(30, 3), rows=48, cols=32)) == [
        "window: 140 queries, 140 keys, blocks of 48 x 32: 6 skipped, 9 partial, 0 full;",
        "computed: 0.60 of the blocks; visible: 0.22 of the pairs",
        "  0 o:::............",
        "    oooo:::.........",
        "    ::ooooo:::......",
        "    .::::ooooo:::...",
        " 48 ....::::ooooo:::................",
        "    .......::::ooooo:::.............",
        "    ..........::::ooooo:::..........",
        "    .............::::ooooo:::.......",
        " 96                 ::::ooooo:::.......",
        "                    ...::::ooooo:::....",
        "                    ......::::ooooo:::.",
        "                    .........:::oooooo:",
    ]


def test_text_of_a_long_sequence_fits_a_line():
    lines = show.text(show.draw_mask("causal", 400, 400, causal=True, rows=16, cols=16))
    assert max(map(len, lines)) <= show.LINE_WIDTH + 4
    assert sum("#" in line for line in lines) == 24


def test_svg():
    """The SVG has the size that it states, and each block once."""
    of = picture("documents")
    root = ElementTree.fromstring(show.svg(of))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    assert sum(box.get("fill") == "none" for box in boxes) == of.blocks.size
    for kind, fill in show.COLOURS.items():
        assert sum(box.get("fill") == fill for box in boxes) == (of.blocks == kind).sum()
    for box in boxes[1:]:
        x, y, w, h = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width and 0 <= y <= y + h <= height
    words = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"keys", "queries", "200"} <= {*words} and words[-2:] == [*show.LEGEND]
    assert show.svg(of, of).count(show.LEGEND[0]) == 1


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "masks.py"
    path.write_text("""
import numpy as np

docs = np.arange(64) // 20


def documents(b, h, i, j, docs):
    return docs[i] == docs[j]


def trees(b, h, i, j, leave):
    return leave[i] < j


def numbers(b, h, i, j):
    return i - j


two = np.ones((2, 64), bool)


def of_heads(b, h, i, j, two):
    return two[h, i] & (j < 9)


def of_sequences(b, h, i, j, two):
    return two[b, j]


slopes = np.ones(2, np.float32)


def near(b, h, i, j, slopes):
    return (i - j) * slopes[h] < 9
""")
    return path


def command(*words):
    return main.main(["show", *map(str, words)])


def test_command(file, tmp_path, capsys):
    assert command(f"{file}:documents", "--q", 64, "--block", "16x32", "--causal", "--svg", tmp_path / "mask.svg") == 0
    said = capsys.readouterr().out
    assert said.startswith("documents, causal: 64 queries, 64 keys, blocks of 16 x 32: 3 skipped, 5 partial, 0 full;\n")
    assert (tmp_path / "mask.svg").read_text().startswith("<svg")
    assert command("--window", "3,", "--q", 16, "--k", 32, "--block", 16) == 0
    assert "window=(3, None): 16 queries, 32 keys" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{file}:nobody", "has no function nobody"),
        ("{file}:docs", "has no function docs"),
        ("nowhere.py:documents", "must be a Python file and a function in it, such as masks.py:documents"),
        ("{file}:trees", "takes leave, and .* has no array of that name"),
        ("{file}:numbers", "mask: must return booleans"),
        (
            "{file}:documents --q 65",
            r"documents: index 64 is out .*, for batch=0, head=0, q=65, k=65 and arrays of shapes \(64,\): draw",
        ),
        ("{file}:of_heads --q 64 --head 7", r"of_heads: index 7 is out .*head=7.* shapes \(2, 64\)"),
        ("{file}:of_sequences --q 64 --batch 2", r"of_sequences: index 2 is out .*batch=2"),
        ("{file}:near --q 64 --head 7", r"near: index 7 is out .*head=7.* shapes \(2,\)"),
        ("{file}:near --q 64 --head=-1", "batch and head must not be negative: batch=0, head=-1"),
        ("--causal --svg {file}/no/such.svg", "Not a directory"),
        ("--window=-1,0", "window: its ends must not be negative"),
        ("--window 5", "--window: must be left,right, such as 128,0: '5'"),
        ("--block 20", "blocks must be multiples of 16"),
        ("--q 0", "lengths positive"),
    ],
)
def test_what_cannot_be_drawn(words, message, file, capsys):
    with pytest.raises(SystemExit) as ended:
        command(*words.format(file=file).split())
    said = capsys.readouterr().err
    assert ended.value.code == 2 and re.search(message, " ".join(said.split())) and "Traceback" not in said
    assert said.splitlines()[-1].startswith("python -m attention show: error: ")
