"""Facts that stand in several documents are those of the code: counts, codes, names, defaults."""

import itertools
import json
import re

import pytest

from benchmarks.plan_table import (
    CALCULATED,
    CHIPS,
    CHOSEN,
    FITTED,
    OFFERED,
    RECIPE_FILES,
    RECIPES,
    about,
    calculated,
    fits,
    largest_batches,
    recipe_row,
    tokens_per_s,
)
from mlx_packs.cli.main import COMMANDS
from mlx_packs.config import choices
from mlx_packs.distributed.link import GONE
from mlx_packs.errors import CRASHED
from tests.fuzz.kinds import KINDS
from tests.helpers.documents import ROOT
from tests.helpers.variants import nightly_except


def text(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a line that contains ``heading``."""
    below = text(page).split(heading, 1)[1]
    lines = re.search(r"(?:^ *\|.*\n)+", below, re.M).group(0).splitlines()
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[2:]]


def test_exit_codes_are_those_of_the_program():
    codes = {row[0] for row in table("docs/cli.md", "## Exit codes")}
    assert codes == {"0", "1", "2", str(CRASHED), str(GONE), "128 + n"}


def test_security_counts_the_kinds_of_input_that_are_fuzzed():
    assert f"Mutants of {len(KINDS)} kinds of input" in text("SECURITY.md")


def test_methods_and_kernels_are_named():
    for page in ("docs/methods.md", "docs/formats.md"):
        assert not [name for name in choices.METHODS if f"`{name}`" not in text(page)], page
    methods = text("docs/methods.md")
    assert not [name for name in choices.OPTIMIZERS if f"`{name}`" not in methods]
    folders = {path.parent.name for path in (ROOT / "kernels").glob("*/*.metal")}
    for page in ("kernels/README.md", "docs/kernels.md", "CHANGELOG.md"):
        assert not [name for name in folders if name not in text(page)], page


def test_the_page_on_commands_has_them_in_their_groups():
    page = table("docs/cli.md", "## Commands")
    rows = {row[0]: re.findall(r"`([a-z-]+)`", row[1]) for row in page}
    assert rows == {group: list(names) for group, names in COMMANDS.items()}


def test_readme_lists_the_extras_that_users_install():
    section = text("pyproject.toml").split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^([a-z-]+) = \[", section, re.M))
    assert len(extras) > 5
    assert (
        not extras - {"test", "interop", "dev"} - set(re.findall(r"`([a-z-]+)`", text("README.md")))
    )


def test_the_comparison_counts_the_architectures():
    counts = re.search(r"works on (\d+), \d+ cannot", text("docs/families.md")).group(1)
    total = re.search(r"The (\d+) architectures", text("docs/families.md")).group(1)
    assert f"| {counts} of mlx-lm's {total} |" in text("docs/comparison.md")


def test_the_first_page_shows_sections_that_the_readme_has():
    """They are written once, in the README (docs/hooks/readme.py)."""
    shown = re.findall(r"^<!-- generated: README, (.+) -->$", text("docs/index.md"), re.M)
    assert len(shown) == 4
    assert not [heading for heading in shown if f"\n## {heading}\n" not in text("README.md")]
    assert "\nexact  " in text("docs/index.md")  # lines of a run


def test_readme_says_what_fits_as_the_plan_does():
    rows = table("README.md", "## Memory and speed on Macs")
    assert [row[0] for row in rows] == list(FITTED)
    assert [row[1 : -len(CHIPS) - 1] for row in rows] == [fits(name) for name in FITTED], (
        "run python -m benchmarks.plan_table --fits"
    )


@pytest.mark.parametrize("name", ["Qwen3-4B", "Llama-3.2-3B"])
def test_the_calculator_shows_what_packs_plan_says(name, tmp_path, run):
    """Every tenth of its figures is the plan's; one is what the command prints."""
    data = {
        line.split()[1]: json.loads(line.partition(" = ")[2].rstrip(";"))
        for line in text("docs/calculator_data.js").splitlines()[1:]
    }
    assert data["OFFERED"] == {key: list(values) for key, values in OFFERED.items()}
    choices = list(itertools.product(*OFFERED.values()))
    peaks = dict(zip(choices, data["PEAKS"][name], strict=True))
    assert set(data["PEAKS"]) == set(CALCULATED)
    for choice in choices[::10]:
        assert peaks[choice] == calculated(name, *choice), (
            "run python -m benchmarks.plan_table --calculator"
        )

    config = CALCULATED[name] | {"torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = "--batch-size 4 --max-seq-length 2048 --rank 16 --recompute block --quantize affine4"
    where = "--matmul-path quantized --memory 64 --device gpu --json"
    code, out, _ = run("plan", "--model", tmp_path, *sizes.split(), *where.split())
    best = json.loads(out)["options"][0]
    assert code == 0 and round(1000 * best["peak_gb"]) == peaks[4, 2048, 16, "block"]


def test_recipes_fit_the_macs_of_their_table():
    """Every file is planned, with its settings, at the size of its model."""
    assert {file.stem for file in RECIPE_FILES.glob("*.yaml")} == set(RECIPES)
    rows = table("examples/recipes/README.md", "# Recipes by model")
    assert rows == [recipe_row(name) for name in RECIPES], (
        "run python -m benchmarks.plan_table --recipes"
    )


@pytest.mark.parametrize("name", nightly_except(FITTED, "Qwen3-4B"))
def test_readme_says_the_speeds_that_captured_graphs_give(name):
    rows = {row[0]: row for row in table("README.md", "## Memory and speed on Macs")}
    assert rows[name][-len(CHIPS) - 1 : -1] == tokens_per_s(FITTED[name]), (
        "run python -m benchmarks.plan_table --fits"
    )


def test_the_page_on_models_says_what_fits_as_the_plan_does():
    rows = table("docs/choose.md", "## Memory")
    expected = [[name, *largest_batches(name)] for name in CHOSEN]
    assert rows == expected, "run python -m benchmarks.plan_table --batches"


def test_the_times_of_the_page_on_models_follow_from_the_readme():
    rows = table("README.md", "## Memory and speed on Macs")
    times = {row[0]: row[1:] for row in table("docs/choose.md", "## Time")}
    speeds = {row[0]: row[-len(CHIPS) - 1 : -1] for row in rows}
    assert times == {
        name: [about(1e6 / float(cell.strip("≈ ").replace(",", "")) / 60) for cell in cells]
        for name, cells in speeds.items()
    }
