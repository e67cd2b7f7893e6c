"""`python .ci/notebooks.py FILE..`: run notebooks in Jupyter's kernel, as a reader does, and say which pages and
pictures each shows. A cell that fails ends the run. Needs nbclient and ipykernel."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

for file in map(Path, sys.argv[1:]):
    notebook = nbformat.read(file, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": file.parent}}).execute()
    outputs = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [kind for data in outputs for kind in ("text/html", "image/svg+xml") if kind in data]
    print(f"{file.name}: {len(notebook.cells)} cells, shows {', '.join(shown)}")
    assert shown, f"{file}: shows no page and no picture"
