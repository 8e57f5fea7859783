"""Packs and runs of this commit open for ever; older and newer ones say so in one line."""

import json
import shutil
from pathlib import Path

import pytest

from mlx_packs.packs.manifest import FORMAT_VERSION
from mlx_packs.packs.pack import Pack
from mlx_packs.runtime import mx
from mlx_packs.training.run_folder import RUN_FORMAT_VERSION, RunFolder
from tests.helpers.errors import check, raises

FORMATS = Path(__file__).parent / "formats"
NAME = "settled"  # the fixture of the one version of each format


@pytest.fixture
def copy_of(here):
    """Copy a fixture to where a user would have it, in the place of an earlier copy."""

    def copy(name: str) -> None:
        for source, place in (("d", "d"), (f"{name}/pack", "o"), (f"{name}/run", "o-run")):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(FORMATS / source, place)

    return copy


def test_every_version_has_a_fixture_and_every_fixture_is_tested():
    """A version more needs a fixture more, and the tests below are then for each."""
    pack = json.loads((FORMATS / NAME / "pack" / "pack.json").read_text())
    run = json.loads((FORMATS / NAME / "run" / "config.json").read_text())
    assert pack["format_version"] == FORMAT_VERSION == 1
    assert run["format"] == f"mlx_packs run {RUN_FORMAT_VERSION}" and RUN_FORMAT_VERSION == 1
    assert {folder.parent.name for folder in FORMATS.glob("*/pack")} == {NAME, "older"}
    assert f"| `{NAME}` |" in (FORMATS / "README.md").read_text()


def test_a_pack_of_an_earlier_program_opens_and_applies(dense_tiny):
    pack = Pack.open(FORMATS / NAME / "pack")
    recipe = pack._part("recipe")
    assert (recipe["rank"], recipe["iters"], recipe["matmul_path"]) == (1, 2, "dense")
    tokens = mx.array([[1, 2, 3]])
    before = dense_tiny.model(tokens)
    with dense_tiny.applied(pack):
        assert mx.abs(dense_tiny.model(tokens) - before).max().item() > 0


def test_a_run_of_an_earlier_program_resumes_as_it_began(copy_of, run):
    copy_of(NAME)
    before = RunFolder(Path("o-run")).metrics()
    assert [line["batch"] for line in before] == [1, 2]
    code, _, err = run("train", "--resume", "--out", "o", "--iters", 3)
    assert code == 0, err
    after = RunFolder(Path("o-run")).metrics()
    assert after[:2] == before and after[2]["batch"] == 3
    assert after[2]["learning_rate"] == pytest.approx(1e-3 * 2 / 10)  # of a warm-up of 10 updates


OLDER = "written by an older version of mlx-packs"


def test_a_pack_of_an_older_version_is_one_line(copy_of, rejected):
    copy_of("older")
    for command in ("inspect o", "generate --pack o --prompt a", "export o --to peft --out x"):
        check(rejected(*command.split()), "unsupported", None, "o/pack.json", OLDER, "Train")


def test_a_run_of_an_older_version_is_one_line_and_can_be_replaced(copy_of, run, rejected):
    copy_of("older")
    error = rejected("train", "--resume", "--out", "o")
    check(error, "unsupported", None, "o-run", OLDER, "--overwrite")
    check(rejected("report", "o-run"), "unsupported", None, OLDER)
    check(rejected("train", "--data", "d", "--out", "o"), "exists", None)
    shutil.rmtree("o")
    assert run("train", "--data", "d", "--out", "o", "--iters", 1, "--overwrite")[0] == 0


def test_a_run_of_a_newer_format_says_so_whatever_else_it_holds(copy_of, run):
    copy_of(NAME)
    version = RUN_FORMAT_VERSION + 1
    (Path("o-run") / "config.json").write_text(json.dumps({"format": f"mlx_packs run {version}"}))
    with raises("unsupported", None, "config.json", str(version), "Upgrade"):
        RunFolder(Path("o-run")).read_identity()
    run("train", "--resume", "--out", "o")
    check(run.error, "unsupported", None, str(version))
    assert "\n" not in run.error.message and not RunFolder(Path("o-run")).is_run()
    run("train", "--data", "d", "--out", "o", "--overwrite")
    check(run.error, "exists", None, "o-run")
    assert len(list(Path("o-run").glob("step-*"))) == 1


@pytest.mark.parametrize("text", ["mlx_packs run 0", "mlx_packs run 1x", None])
def test_what_is_no_format_of_a_run_is_not_called_newer(copy_of, text):
    copy_of(NAME)
    file = Path("o-run") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": text}))
    with raises("unreadable", None, "config.json"):
        RunFolder(Path("o-run")).read_identity()
