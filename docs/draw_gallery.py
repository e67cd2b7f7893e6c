"""Draws the pictures of docs/gallery.md: `python docs/draw_gallery.py` runs the lines of the page, and writes what they call
`picture` to the file of the image that comes next."""

import linecache
import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_name("gallery.md")


def pictures() -> Iterator[tuple[Path, str]]:
    """(file, SVG) of each picture of the page."""
    text, namespace = PAGE.read_text(), {"__name__": "gallery"}
    linecache.cache[str(PAGE)] = len(text), None, text.splitlines(keepends=True), str(PAGE)  # where a kernel's lines are found
    for part in re.finditer(r"^```python\n(?P<code>.*?)^```$|^!\[.*?\]\((?P<file>.*?)\)$", text, re.M | re.S):
        if part["file"]:
            yield PAGE.with_name(part["file"]), namespace.pop("picture")
        else:
            exec(compile("\n" * text[: part.start("code")].count("\n") + part["code"], PAGE, "exec"), namespace)


if __name__ == "__main__":
    for file, picture in pictures():
        file.write_text(picture)
