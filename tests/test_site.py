"""What docs/site/ adds to the generator of the documentation: links, docstrings, a reference that leaves no public name out."""

import importlib
import runpy
import sys
import types
from pathlib import Path

import pytest

SITE = Path(__file__).parents[1] / "docs" / "site"
PAGES = runpy.run_path(str(SITE / "pages.py"))


@pytest.fixture
def as_markdown(monkeypatch):
    """The function, without the package that reads docstrings."""
    monkeypatch.setitem(sys.modules, "griffe", types.SimpleNamespace(Extension=object, Object=object))
    return runpy.run_path(str(SITE / "docstrings.py"))["as_markdown"]


@pytest.mark.parametrize("page", PAGES["REFERENCE"])
def test_the_reference_shows_all_public_names(page):
    """What the text of modules says is public is what Python finds. (Modules among the names have pages of their own.)"""
    _, modules = PAGES["REFERENCE"][page]
    if page in ("nn", "parallel", "compat"):
        pytest.importorskip("torch")
    there = {module: importlib.import_module(module) for module in modules if module != "attention.compat.huggingface"}
    public = {f"{module}.{name}": getattr(x, name) for module, x in there.items() for name in getattr(x, "__all__", ())}
    shown = {id(getattr(there[module], name)) for module in there for name in PAGES["names_of"](module)[0]}
    lacking = {name for name, x in public.items() if not isinstance(x, types.ModuleType) and id(x) not in shown}
    assert not lacking and shown <= {id(x) for x in public.values()}
    for home, name in (path.rsplit(".", 1) for module in there for path in PAGES["names_of"](module)[1]):
        assert id(getattr(sys.modules[home], name)) in shown


def test_packages_with_public_names_have_a_page():
    """A package of attention that says what is public is in the reference."""
    packages = (file for file in (SITE.parents[1] / "attention").glob("*/__init__.py") if "__all__ = " in file.read_text())
    assert {f"attention.{file.parent.name}" for file in packages} <= {m for _, x in PAGES["REFERENCE"].values() for m in x}


def test_links_of_a_page():
    text = (
        "[a](../ops/grid.py#L3) [b](serving.md#pages) [c](../README.md) `[d](e.md)` x < y [f](https://g)\n\n- h\n  - <S, dS>\n"
    )
    expected = (
        "[a](source/ops/grid.py.html#L3) [b](serving.md#pages) [c](repository/readme.md) `[d](e.md)` x &lt; y [f](https://g)\n\n"
        "- h\n    - &lt;S, dS>\n"
    )
    assert PAGES["turned"](text, "docs/variants.md") == expected
    assert PAGES["turned"]("[a](docs/speed.md) [b](docs/README.md)", "README.md") == "[a](../speed.md) [b](../README.md)"


def test_arguments_become_a_list(as_markdown):
    text = """O = P V of `q[0]` * 2. Options:
        causal: query i sees key j
            if j <= i.
        window: (left, right).

    q: (B, S). k, v: (B, H): as q. H: any.

        out = forward(q)

        again

    ValueError: names [the] argument; docs/fp8.md says more."""
    expected = """O = P V of `q[0]` \\* 2. Options:

- **`causal`**: query i sees key j if j &lt;= i.
- **`window`**: (left, right).
- **`q`**: (B, S).
- **`k`**, **`v`**: (B, H): as q. H: any.

```python
out = forward(q)

again
```

- **`ValueError`**: names \\[the] argument; [docs/fp8.md](../fp8.md) says more."""
    assert as_markdown(text, {"q", "k", "v"}) == expected


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<h1 id="here"></h1><a href="#here"></a><a href="b.html#x"></a><img src="c.svg">')
    (tmp_path / "b.html").write_text('<a href="a.html#here"></a><a href="https://d"></a>')
    actual = runpy.run_path(str(SITE / "check_links.py"))["broken"](tmp_path)
    assert actual == ["a.html: b.html#x: there is no such place in the page", "a.html: c.svg: there is no such file"]
