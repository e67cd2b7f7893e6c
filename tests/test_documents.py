"""What the documents show is true: their code runs and prints what they say, the README's kernel is the example's, its error is
the one you get, and whatever they name exists."""

import contextlib
import importlib.util
import inspect
import io
import itertools
import linecache
import re
from pathlib import Path

import pytest

import attention
import ops
import tiles
from tiles import Hazard, ring, shared
from tiles.compiling.compiler import compile_kernel
from tiles.emulator import table
from tiles.launching.arguments import parameters
from tiles.op import OPS

ROOT = Path(__file__).parents[1]
GALLERY = "docs/gallery.md"  # has a test of its own
PAGES = sorted(page.relative_to(ROOT).as_posix() for page in [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/start/*.md")])
PAGES.remove(GALLERY)
WITH_KERNELS = [page for page in PAGES if all(word in (ROOT / page).read_text() for word in ("@cuda.jit", "tiles.launch("))]
NOTES = ["bench/NOTES.md", *sorted(f"bench/notes/{page.name}" for page in ROOT.glob("bench/notes/*.md"))]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md", GALLERY, *PAGES, *NOTES]
EXAMPLE = ROOT / "examples" / "gemm.py"


def blocks(document, language):
    """[(line, block)]: the fenced blocks of a document in a language, and the lines before each."""
    text = (ROOT / document).read_text()
    actual = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    return [(text[: block.start(1)].count("\n"), block[1]) for block in actual]


def run(document, line, code, namespace):
    """Run a block as lines of its document, whose blocks are the source that is found for a function. What needs a framework
    that is not installed is skipped from there on."""
    lines = []
    for first, block in blocks(document, "python"):
        lines += ["\n"] * (first - len(lines)) + block.splitlines(keepends=True)
    linecache.cache[str(ROOT / document)] = sum(map(len, lines)), None, lines, str(ROOT / document)
    try:
        exec(compile("\n" * line + code, ROOT / document, "exec"), namespace)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "jax", "transformers"):
            raise
        pytest.skip(f"{document}, from line {line}: needs {error.name}")


def words(line):
    """A line of a report without numbers and instructions; empty if nothing is left."""
    left = " ".join(re.sub(r"limited by .*|^[-+~]|[A-Z0-9][A-Z0-9_.]*|[%$]\S+|[-+]\d+$", " ", line).split())
    return left if re.search("[a-z]{3}", left) else ""


@pytest.fixture
def no_new_ops():
    """Forgets the ops that a test defines, and the instructions to which it gives a meaning."""
    before, known = set(OPS), len(table.TABLE)
    yield
    for op_function in set(OPS) - before:
        del OPS[op_function]
    del table.TABLE[known:]
    table._find.cache_clear()


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_code_runs(document, no_new_ops, monkeypatch):
    if document == "README.md":  # its kernel is examples/gemm.py, which test_examples.py compiles
        monkeypatch.setenv("TILES_CHECK", "0")
    namespace = {"__name__": Path(document).stem}
    for line, code in blocks(document, "python"):
        run(document, line, code, namespace)


@pytest.fixture
def launched_kernels(monkeypatch):
    """{kernel: the types of its arguments} of what `tiles.launch` launches, which runs all the same."""
    launch, ran = tiles.launch, {}

    def recording(kernel, *grid, **options):
        launched = launch(kernel, *grid, **options)

        def run(*args):
            launched(*args)
            ran[kernel] = [parameter.type for parameter in parameters(kernel, args)]

        return run

    monkeypatch.setattr(tiles, "launch", recording)
    return ran


@pytest.mark.parametrize("page", PAGES)
def test_output_is_what_follows(page, no_new_ops, monkeypatch):
    """In the pages of docs/, a text block is what the Python block before it printed. A report is so but for what each version
    of the compiler does in its own way."""
    if page not in WITH_KERNELS:  # attention's own are typed in tests/attention/test_inspect.py
        monkeypatch.setenv("TILES_CHECK", "0")
    namespace, printed = {"__name__": Path(page).stem}, None
    languages = "python", "text", "report"
    for line, language, block in sorted((line, name, b) for name in languages for line, b in blocks(page, name)):
        if language != "python":
            actual, said = [x.rstrip() for x in printed.getvalue().splitlines()], block.splitlines()
            if language == "report":
                actual, said = ([*filter(None, map(words, lines))] for lines in (actual, said))
            assert actual == said
            continue
        with contextlib.redirect_stdout(printed := io.StringIO()):
            run(page, line, block, namespace)


@pytest.mark.release  # CI has typed them, where they were launched
@pytest.mark.parametrize("page", WITH_KERNELS)
def test_kernels_are_machine_code(page, no_new_ops, monkeypatch, launched_kernels):
    """The pages' own kernels, for Hopper, without spills and local memory."""
    monkeypatch.setenv("TILES_CHECK", "0")
    namespace = {"__name__": Path(page).stem}
    for line, block in blocks(page, "python"):
        run(page, line, block, namespace)
    for kernel, signature in launched_kernels.items():
        actual = compile_kernel(kernel, signature, "sm_90a")
        prints = "print" in kernel.py_func.__code__.co_names  # printf takes its arguments from memory
        assert actual.spill_bytes == 0 and (actual.local_bytes == 0 or prints) and not actual.warnings, actual.log


def test_kernel_is_the_example():
    (_, types), (_, kernel) = blocks("README.md", "python")[:2]
    example = EXAMPLE.read_text()
    assert kernel in example
    assert types[types.index("CONSUMERS, STAGES") :] in example


def test_error_message(tmp_path, monkeypatch):
    [(_, diff)], [(_, message)] = blocks("README.md", "diff"), blocks("README.md", "text")
    old, new = ("".join(line[1:] + "\n" for line in diff.splitlines() if line[0] in kind) for kind in (" -", " +"))
    example = EXAMPLE.read_text()
    assert example.count(old) == 1
    broken = tmp_path / "gemm.py"
    broken.write_text(example.replace(old, new))
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    spec = importlib.util.spec_from_file_location("broken_gemm", broken)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(Hazard) as caught:
        module.main(lambda array: array)
    assert str(caught.value) == message.strip()
    for seed, steps in itertools.product("1234", (1, 2, 9)):  # every time, whatever order the warps take
        monkeypatch.setenv("TILES_SEED", seed)
        with pytest.raises(Hazard, match="^" + re.escape(message.strip().splitlines()[0])):
            module.main(lambda array: array, m=70, n=64, k=64 * steps)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_names_exist(document):
    text = (ROOT / document).read_text()
    links = re.findall(r"\]\(([^)#]+)\)", re.sub(r"`[^`\n]*`", "", text))
    paths = re.findall(r"`((?:tiles|ops|attention|examples|tests|bench|docs|\.ci)/[\w./]*)`", text)
    for link in links:
        assert link.startswith("https://") or (ROOT / document).parent.joinpath(link).exists(), link
    for name in paths:
        assert (ROOT / name).exists(), name


def anchors(document):
    """The anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", text, re.M)}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_anchors_exist(document):
    text = re.sub(r"`[^`\n]*`", "", (ROOT / document).read_text())
    for link, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text):
        page = (ROOT / document).parent / link if link else ROOT / document
        assert anchor in anchors(page), f"{link}#{anchor}"


def test_signatures_of_the_readme_are_those_of_the_functions():
    """The arguments that it shows have these defaults, and are positional or not, as there."""
    rows = re.findall(r"^\| `(\w+)\((.+?)\)` \|", (ROOT / "README.md").read_text(), re.M)
    assert len(rows) >= 8
    for name, shown in rows:
        scope = {}
        exec(f"def {name}({shown.removesuffix(', ...')}): pass", scope)
        actual = inspect.signature(getattr(attention, name)).parameters
        for parameter in inspect.signature(scope[name]).parameters.values():
            assert (parameter.kind, parameter.default) == (actual[parameter.name].kind, actual[parameter.name].default), name


def test_equivalents_exist():
    """Whatever is called in the right column of the tables of equivalents."""
    names = {**vars(tiles), **vars(ops), "attention": attention, "r": ring, "smem": shared, "print": print}
    rows = re.findall(r"^\|.*\| (.*) \|$", (ROOT / "docs" / "coming_from.md").read_text(), re.M)
    code = [piece for row in rows for piece in re.findall(r"`([^`]*)`", row)]
    calls = {call for piece in code for call in re.findall(r"(?<![\w.])([A-Za-z_][\w.]*)\(", piece)}
    assert len(calls) > 50
    if importlib.util.find_spec("torch"):
        importlib.import_module("attention.nn")
    else:
        calls = {call for call in calls if not call.startswith("attention.nn.")}
    for call in calls - {"cuda.jit"}:
        first, *rest = call.removeprefix("tiles.").split(".")
        actual = names[first]
        for name in rest:
            actual = getattr(actual, name)


def test_pictures_of_the_gallery_are_what_its_lines_draw(monkeypatch):
    """`python docs/draw_gallery.py` draws them anew."""
    monkeypatch.setenv("TILES_CHECK", "0")
    monkeypatch.syspath_prepend(ROOT / "docs")
    drawn = importlib.import_module("draw_gallery")
    assert [file.name for file, picture in drawn.pictures() if file.read_text() != picture] == []


def test_picture_of_terms_is_what_the_rules_find(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    drawn = importlib.import_module("draw_terms")
    assert drawn.PICTURE.read_text() == drawn.svg()


def test_timelines_are_the_model_s(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    drawn = importlib.import_module("draw_pipelines")
    assert drawn.pictures() == {stages: picture.read_text() for stages, picture in drawn.PICTURES.items()}


def test_kernel_of_the_timelines_is_the_document_s():
    text = (ROOT / "docs" / "draw_pipelines.py").read_text()
    kernel = text[text.index("def make_weigh") : text.index("TILES = ")].strip()
    assert any(kernel in block for _, block in blocks("docs/pipelines.md", "python"))


def test_vocabulary_is_complete():
    """Every op of every scope is in the tables of docs/kernel.md, and nothing else is."""
    text = (ROOT / "docs" / "kernel.md").read_text().partition("## The vocabulary")[2]
    said = {name for name in re.findall(r"`([^`]*)`", text) if name.isidentifier()} - {
        "ping_pong",
        "send",
        "finish",
        "step_AB",
        "step_ABt",
        "issue_AB",
        "issue_ABt",
        "steps_AB",
        "steps_ABt",
        "give_back",
        "follow",
    }  # no ops themselves
    there = set(ops.__all__)
    for scope in (ops.warpgroup, ops.block, ops.cluster, ops.grid):
        there |= {name for name, f in vars(scope).items() if inspect.isfunction(f) and f in OPS and name[0] != "_"}
    assert not there - said, f"docs/kernel.md lacks {sorted(there - said)}"
    assert not said - there, f"there are no {sorted(said - there)}"
