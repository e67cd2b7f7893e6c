"""`python docs/site/open_pages.py FOLDER`: opens every page of a finished site in headless Chromium, as wide as a desk's screen
and as a telephone's. A page that is wider than its window, and a picture that does not load, are failures. Without Chromium it
says so."""

import functools
import html
import http.server
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

WIDTHS = 1400, 420
FRAME = "measured_pages.html"
SCRIPT = """<pre id="found"></pre><script>
const found = document.getElementById("found");
async function open_all(pages, widths) {
  for (const width of widths) for (const page of pages) {
    const frame = document.createElement("iframe");
    [frame.width, frame.height, frame.src] = [width, 900, page];
    document.body.append(frame);
    await new Promise(loaded => frame.onload = loaded);
    await new Promise(laid_out => setTimeout(laid_out, 50));
    const root = frame.contentDocument.documentElement, pictures = [...frame.contentDocument.images];
    const blank = pictures.filter(picture => picture.complete && !picture.naturalWidth).map(picture => picture.src);
    if (root.scrollWidth > root.clientWidth + 1) found.textContent += `${page}: ${root.scrollWidth} wide in ${width}\\n`;
    for (const name of blank) found.textContent += `${page}: ${name} does not load\\n`;
    frame.remove();
  }
  found.textContent += "opened " + pages.length;
}
open_all(PAGES, WIDTHS);
</script>"""


class SilentHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and does not say so."""

    def log_message(self, *_):
        pass


def opened(site: Path, browser: str) -> list[str]:
    """What a browser finds wrong, a line each, and at the end that it has opened all pages."""
    pages = [page.relative_to(site).as_posix() for page in sorted(site.rglob("*.html")) if "source" not in page.parts]
    (site / FRAME).write_text(SCRIPT.replace("PAGES", repr(pages)).replace("WIDTHS", repr([*WIDTHS])))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(SilentHandler, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=200000", "--dump-dom"]
    try:
        address = f"http://127.0.0.1:{server.server_port}/{FRAME}"
        done = subprocess.run([browser, *options, address], capture_output=True, text=True, timeout=500, check=True)
    finally:
        server.shutdown()
        (site / FRAME).unlink()
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    return html.unescape(text[1]).splitlines() if text else ["the browser shows nothing"]


if __name__ == "__main__":
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser:
        print("! no Chromium here: pages were not opened")
        sys.exit(0)
    lines = opened(Path(sys.argv[1]).resolve(), browser)
    print(*lines, sep="\n")
    sys.exit(not lines[-1].startswith("opened") or len(lines) > 1)
