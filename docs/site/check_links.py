"""`python docs/site/check_links.py FOLDER`: do all links and pictures of a finished site lead somewhere?"""

import re
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

LINK = re.compile(r"""\s(?:href|src)=["']?([^"'\s>]+)""")
ANCHOR = re.compile(r"""\s(?:id|name)=["']?([^"'\s>]+)""")


def broken(site: Path) -> list[str]:
    """A line for each link that leads nowhere. Other sites are not asked."""
    pages = (page for page in site.rglob("*.html") if page.name != "404.html")  # that one is served from any folder
    texts = {page: page.read_text() for page in pages}
    anchors = {page: set(ANCHOR.findall(text)) for page, text in texts.items()}
    found = []
    for page, text in texts.items():
        for link in sorted(set(LINK.findall(text))):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{page.relative_to(site)}: {link}: there is no such file")
            elif parts.fragment and target in anchors and unquote(parts.fragment) not in anchors[target]:
                found.append(f"{page.relative_to(site)}: {link}: there is no such place in the page")
    return found


if __name__ == "__main__":
    lines = broken(Path(sys.argv[1]).resolve())
    print(*lines, sep="\n")
    sys.exit(bool(lines))
