"""The notebooks of examples/: they run, and what is stored in them is what they print."""

import base64
import re

import nbformat
import pytest

from tests.helpers import documents, notebooks
from tests.helpers.notebooks import NOTEBOOKS, ROOT

# Up to 40 s each: runs are not shortened, since their figures are compared; one is in each CI run.
# docs/systems.md has a row for the layers; the loop needs the SDK of Tinker, and one a real model.
MARKS = {
    "requests_to_json": (pytest.mark.real, pytest.mark.nightly(seconds=400)),
    "own_layers": (pytest.mark.slow, pytest.mark.systems),
    "your_own_loop": (pytest.mark.interop, pytest.mark.nightly(seconds=40)),
}
EXECUTED = [
    pytest.param(file, id=file.stem, marks=MARKS.get(file.stem, pytest.mark.nightly(seconds=40)))
    for file in NOTEBOOKS
]
MAX_BYTES, MAX_IMAGE = 120_000, 40_000
# Figures that each prints, by name: where they stand, and how far another machine may be off.
FIGURES = {
    "error_bars": {
        "examples": (r"^(\d+) examples", 0),
        "after": (r"held-out PPL ([\d.]+) ±", 0.2),
    },
    "many_packs": {
        "rank": (r"MB +rank (\d+)", 0),
        "after": (r"PPL +[\d.]+ → ([\d.]+)", 0.5),
        "days": (r"^(?:base|day) +PPL of days +([\d.]+)", 0.5),
    },
    "own_layers": {
        "characters": (r"^([\d,]+) characters", 0),
        "held out": (r"held out (\d\.\d+)", 0.05),
        "loaded": (r"(?:fresh|loaded): +(\d\.\d+)", 0.05),
    },
    "quantized_to_merged": {
        "bits": (r"bits +([\d.]+) per weight", 0),
        "after": (r"PPL [\d.]+ -> ([\d.]+)\)", 0.5),
        "KL in NF4": (r"batches  NF4 +KL ([\d.e-]+)", 0.7),
    },
    "quick_start": {
        "before": (r"base: PPL ([\d.]+)", 0.01),
        "after": (r"pack: PPL ([\d.]+)", 0.2),
        "accuracy": (r"([\d]+)% of tokens correct", 0.1),
    },
    "requests_to_json": {
        "fits": (r"fits +yes: ([\d.]+) GB", 0.05),
        "after": (r"→ ([\d.]+) ± [\d.]+ on 40", 0.1),
    },
    "your_own_loop": {
        "examples": (r"(\d+) examples;", 0),
        "at first": (r"loss ([\d.]+) ->", 0.1),
        "correct": (r"new reminders: (\d+) of", 0.3),
    },
    "your_data": {
        "examples": (r"(\d+) examples · tokens", 0),
        "correct": (r"(\d+)% ± \d+% of the answers", 0.6),
    },
}


def figures(name: str, text: str) -> dict[str, list[float]]:
    """The figures of a notebook in what it printed."""
    return {
        figure: [float(number.replace(",", "")) for number in re.findall(pattern, text, re.M)]
        for figure, (pattern, _) in FIGURES[name].items()
    }


def faults(notebook: nbformat.NotebookNode) -> list[str]:
    """What must not be stored: errors, warnings, progress bars, and cells without their output."""
    cells = notebooks.code_cells(notebook)
    text = notebooks.printed(notebook)
    observed = {
        "an error is stored": any(o["output_type"] == "error" for o in notebooks.outputs(notebook)),
        "stderr is stored": any(o.get("name") == "stderr" for o in notebooks.outputs(notebook)),
        "something moves": re.search(r"\r(?!\n)|\x1b\[[0-9;?]*[A-KSTfhl]|it/s|[━⠋⠙⠹⠸]", text),
        "a machine's path is stored": re.search(r"/(?:home|root|tmp|work|Users)/", text),
        "a cell was not run": [c["execution_count"] for c in cells]
        != list(range(1, len(cells) + 1)),
        "the last cells show nothing": not cells[-1]["outputs"],
    }
    return [fault for fault, holds in observed.items() if holds]


def test_what_is_stored_is_whole_and_small():
    for file in NOTEBOOKS:
        notebook = notebooks.read(file)
        assert faults(notebook) == [] and file.stat().st_size < MAX_BYTES, file.stem
        assert 5 <= len(notebooks.code_cells(notebook)) <= 12, file.stem
        assert notebook["cells"][0]["source"].startswith("# "), file.stem
        page = documents.parse(f"examples/{file.name}", notebooks.prose(notebook))
        assert not documents.broken_links(page), file.stem
        assert all(figures(file.stem, notebooks.printed(notebook)).values()), file.stem

        data = [output.get("data", {}) for output in notebooks.outputs(notebook)]
        images = [base64.b64decode(entry["image/png"]) for entry in data if "image/png" in entry]
        assert bool(images) == (file.stem != "own_layers")
        assert all(image.startswith(b"\x89PNG") and len(image) < MAX_IMAGE for image in images)


def test_measured_figures_of_the_prose_are_stored():
    missing = []
    for notebook in map(notebooks.read, NOTEBOOKS):
        shown = notebooks.printed(notebook).replace(" %", "%") + " 0.02"  # a merge's default limit
        measured = re.findall(
            r"(?<![\w.-])\d+(?:\.\d+)? ?%|(?<![\w.])\d+\.\d{2,}\b", notebooks.prose(notebook)
        )
        missing += [number for number in measured if number.replace(" ", "") not in shown]
    assert not missing


def test_every_notebook_is_listed():
    for page in ("examples/README.md", "mkdocs.yml"):
        text = (ROOT / page).read_text(encoding="utf-8")
        suffix = ".ipynb" if page.endswith("README.md") else ".md"
        assert [f.stem for f in NOTEBOOKS if f"{f.stem}{suffix}" not in text] == [], page


@pytest.mark.parametrize("file", EXECUTED)
def test_a_notebook_runs_and_says_what_is_stored_in_it(file, tmp_path):
    notebook = notebooks.read(file)
    stored = figures(file.stem, notebooks.printed(notebook))
    notebooks.execute(notebook, tmp_path)
    assert faults(notebook) == []
    printed = figures(file.stem, notebooks.printed(notebook))
    for name, (_, tolerance) in FIGURES[file.stem].items():
        assert printed[name] == pytest.approx(stored[name], rel=tolerance, abs=1e-9), name
    if file.stem == "own_layers":
        losses, (fresh, loaded) = printed["held out"], printed["loaded"]
        assert len(losses) == 4 and losses == pytest.approx(stored["held out"], abs=0.1)
        assert losses[-1] == loaded < 0.6 * fresh
