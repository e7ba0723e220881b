"""Runs the notebooks of the documentation, and keeps in them what their cells show.

    python .ci/notebooks.py

So they can be read where nothing runs them, such as on the page of a repository.
"""

import os
import pathlib

import nbclient
import nbformat

DOCS = pathlib.Path(__file__).parents[1] / "docs"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PYTHONPATH"] = str(DOCS.parent)


def shown(outputs: list) -> list:
    """Returns what a cell shows, its text as one, and nothing that JAX logs."""
    kept: list = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        if kept and output.get("name") == "stdout" == kept[-1].get("name"):
            kept[-1]["text"] += output["text"]
        else:
            kept.append(output)
    return kept


def main() -> None:
    """Runs each notebook and writes it back."""
    for path in sorted(DOCS.glob("*.ipynb")):
        notebook = nbformat.read(path, nbformat.NO_CONVERT)
        nbclient.NotebookClient(notebook, record_timing=False, timeout=120).execute()
        notebook.metadata = {}
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = shown(cell.outputs)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
