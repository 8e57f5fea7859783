"""The notebooks of examples/: they are executed by a Jupyter kernel of this Python."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from benchmarks.real import files
from tests.helpers.documents import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
TIMEOUT = 1200  # seconds for one cell
MODEL = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"  # as the Hub names it


def read(file: Path) -> NotebookNode:
    """Read a notebook; raise an error if it is not valid."""
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    return notebook


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Execute the cells with a folder as the current one, and replace their outputs.

    The folder gets what notebooks read beside them: a data set, and a real model if it is here.
    Commands such as ``packs`` are those that are installed beside this Python. Raises a
    ``CellExecutionError`` where a cell does.
    """
    beside = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([beside, os.environ.get("PATH", "")]),
        "PYTHONWARNINGS": "ignore:IProgress not found",  # of tqdm, where ipywidgets is missing
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }

    (folder / "requests").symlink_to(ROOT / "examples" / "requests")
    with suppress(files.Missing):
        (folder / MODEL).symlink_to(files.qwen())

    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=environment)


def outputs(notebook: NotebookNode) -> Iterator[NotebookNode]:
    """The outputs of all cells, in their order."""
    for cell in code_cells(notebook):
        yield from cell["outputs"]


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells with code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def prose(notebook: NotebookNode) -> str:
    """The Markdown of all cells."""
    cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    return "\n\n".join(cell["source"] for cell in cells)


def printed(notebook: NotebookNode) -> str:
    """What the cells printed, and the text of the values that they showed."""
    return "".join(
        output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"] + "\n"
        for output in outputs(notebook)
        if output["output_type"] != "error"
    )
