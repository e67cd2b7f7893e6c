"""What the site is built from: `python docs/site/pages.py FOLDER` writes it there. These are the pages of docs/, the
repository's other pages, those of the reference, and source text, a page for each file that a page links to. Links that work
where the files lie, on GitHub, are turned into links of the site."""

import ast
import json
import posixpath
import re
import shutil
import sys
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).parents[2]
# Markdown outside of docs/ that is a page; all else that is linked to is shown as text
OTHERS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md", "bench/NOTES.md"]
OTHERS += sorted(f"bench/notes/{page.name}" for page in ROOT.glob("bench/notes/*.md"))
COMPAT = "flash_attn flash_attn_interface bert_padding sdpa flex flashinfer fla huggingface".split()
HEADINGS = {"fuse.language.functions": "What definitions are written with"}
REFERENCE = {  # page: (title, modules), which show the names in __all__, or without it what they define
    "attention": ("attention", ["attention"]),
    "gates": ("attention.gates", ["attention.gates"]),
    "cache": ("attention.cache", ["attention.cache"]),
    "nn": ("attention.nn", ["attention.nn"]),
    "compat": ("attention.compat", [f"attention.compat.{name}" for name in COMPAT]),
    "parallel": ("attention.parallel", ["attention.parallel"]),
    "attention_reference": ("attention.reference", ["attention.reference"]),
    "tiles": ("tiles", ["tiles"]),
    "testing": ("tiles.testing", ["tiles.testing"]),
    "ops": ("ops", ["ops"]),
    **{scope: (f"ops.{scope}", [f"ops.{scope}"]) for scope in ("warpgroup", "block", "cluster", "grid", "complex", "raw")},
    "fuse": ("fuse", ["fuse", "fuse.language.functions"]),
    "operators": ("fuse.operators", ["fuse.operators"]),
}
CODE = r"^```.*?^```$|`[^`\n]*`"
LINK = r"\]\((?P<link>[^)\s]+)\)"
SIGN = r"(?P<sign><(?!/?[a-z]+[ />]|https?:|!--))"  # < that begins no HTML: GitHub shows it, Python-Markdown takes it for HTML
NESTED = r"(?P<nested>^ {2,3}(?=- ))"  # an item of a list in a list, which is indented by 4 for Python-Markdown
TEXT = re.compile("|".join((CODE, LINK, SIGN, NESTED)), re.M | re.S)


def address(path: str) -> str:
    """Where the site has a file of the repository."""
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return f"repository/{path.lower()}" if path in OTHERS else f"source/{path}.html"


def targets(text: str) -> list[str]:
    """Where the links of a page lead to, other sites and places in the page itself left out."""
    links = (match["link"] for match in TEXT.finditer(text) if match["link"])
    return [link for link in links if not re.match(r"[a-z]+:|#", link)]


def resolved(link: str, page: str) -> str:
    """The path in the repository that a link of a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link.partition("#")[0]))


def source_page(path: str) -> str:
    """A file's text with colours and numbers of lines, or the names in a folder."""
    place = ROOT / path
    title = f"<title>{path}</title><meta charset='utf-8'><meta name='color-scheme' content='light dark'>"
    if place.is_dir():
        names = sorted(child.name for child in place.iterdir() if child.name[0] not in "._")
        return "\n".join([f"{title}<h3>{path}/</h3><pre>", *names, "</pre>"])
    try:
        lexer = get_lexer_for_filename(path)
    except ClassNotFound:
        lexer = TextLexer()
    style = HtmlFormatter().get_style_defs(".highlight") + "body { background: white; color: black }"
    shown = highlight(place.read_text(), lexer, HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True))
    return f"{title}<style>{style}</style><h3>{path}</h3>{shown}"


def names_of(module: str) -> tuple[list[str], list[str]]:
    """The public names of a module, by its __all__, and the paths of those that a module of a package has, too, such as
    `tiles.ring.ring`: under `tiles.ring` mkdocstrings would show the module."""
    place = ROOT / module.replace(".", "/")
    tree = ast.parse((place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text())
    names, paths = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            split = isinstance(node.value, ast.Call)  # """a b c""".split()
            names = node.value.func.value.value.split() if split else [x.value for x in node.value.elts if hasattr(x, "value")]
        elif isinstance(node, ast.ImportFrom) and node.level == 1 and place.is_dir():
            paths += [f"{module}.{alias.name}.{alias.name}" for alias in node.names if alias.name == node.module]
    functions = {path.rpartition(".")[2] for path in paths}
    return [name for name in names if isinstance(name, str) and (name in functions or not (place / name).is_dir())], paths


def reference_page(title: str, modules: list[str]) -> str:
    """A page of the reference: what mkdocstrings makes of modules."""
    parts = [f"# {title}"]
    for module in modules:
        names, paths = names_of(module)
        options = {"heading_level": 2}
        if len(modules) > 1:
            parts.append(f"## {HEADINGS.get(module, module)}")
            options["heading_level"] = 3
        members = [name for name in names if f"{module}.{name}.{name}" not in paths]
        parts.append(directive(module, options | ({"members": members} if names else {})))
        parts += [directive(path, options | {"show_root_heading": True, "show_root_toc_entry": True}) for path in paths]
    return "\n\n".join(parts) + "\n"


def directive(path: str, options: dict) -> str:
    """What mkdocstrings replaces by the documentation of an object."""
    return f"::: {path}\n    options: {json.dumps(options)}"


def turned(text: str, page: str) -> str:
    """The text of a page for mkdocs: its links are links of the site, and it looks as on GitHub."""
    folder = posixpath.dirname(address(page))

    def turn(match):
        if match["sign"] or match["nested"]:
            return "&lt;" if match["sign"] else "    "
        if not targets(match[0]):
            return match[0]
        link, hash, anchor = match["link"].partition("#")
        return f"]({posixpath.relpath(address(resolved(link, page)), folder or '.')}{hash}{anchor})"

    return TEXT.sub(turn, text)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def main(folder: Path) -> None:
    """`folder` is emptied, and all pages are written to it."""
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.py", "*.md", "__pycache__"))
    pages = [*OTHERS, *(page.relative_to(ROOT).as_posix() for page in sorted(ROOT.glob("docs/**/*.md")))]
    texts = {page: (ROOT / page).read_text() for page in pages}
    for page, text in texts.items():
        write(folder / address(page), turned(text, page))
    for name, (title, modules) in REFERENCE.items():
        write(folder / "api" / f"{name}.md", reference_page(title, modules))
    linked = {resolved(link, page) for page, text in texts.items() for link in targets(text)}
    for path in sorted(linked - texts.keys()):
        if address(path).startswith("source/") and (ROOT / path).exists():  # else check_links.py finds the link
            write(folder / address(path), source_page(path))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
