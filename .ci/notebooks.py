"""Execute notebooks of examples/ and store what their cells put out.

    .venv/bin/python .ci/notebooks.py examples/quick_start.ipynb

Without arguments all are executed. They run in empty folders, so that nothing stays beside them.
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.helpers.notebooks import NOTEBOOKS, code_cells, execute  # noqa: E402

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def store(file: Path) -> None:
    """Execute a notebook in an empty folder and replace its file."""
    notebook = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    normalize(notebook)
    file.write_text(nbformat.writes(notebook, indent=1) + "\n", encoding="utf-8")


def normalize(notebook: NotebookNode) -> None:
    """Give it the ids, counts and metadata that every execution gives it."""
    notebook["metadata"] = METADATA
    for number, cell in enumerate(notebook["cells"]):
        cell["id"], cell["metadata"] = f"cell-{number}", {}
    for number, cell in enumerate(code_cells(notebook), 1):
        cell["execution_count"] = number


def main() -> None:
    """Store the notebooks that are named."""
    for file in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        store(file)
        print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
