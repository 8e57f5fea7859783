"""The notebooks of examples/ as pages, with the outputs that are stored in them.

nbconvert makes Markdown of them, so that links, code and search are those of any other page.
"""

from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter
from nbconvert.filters import strip_ansi

ROOT = Path(__file__).parents[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each notebook, a page of it, and its images."""
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        page, images = convert(notebook)
        files.append(File.generated(config, f"examples/{notebook.stem}.md", content=page))
        name = f"examples/{notebook.name}"
        files.append(File.generated(config, name, abs_src_path=str(notebook)))
        for name, image in images.items():
            files.append(File.generated(config, f"examples/{name}", content=image))
    return files


def convert(file: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its images by their names."""
    notebook = nbformat.read(file, as_version=4)
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = strip_ansi(output["text"])
    name = {"unique_key": file.stem, "output_files_dir": f"{file.stem}_files"}
    page, resources = MarkdownExporter().from_notebook_node(notebook, name)
    link = f'<a href="{file.name}" download>Download this notebook</a>'
    return f"{page}\n{link}\n", resources["outputs"]
