"""Packs and runs of every format version open, apply and resume; those of a newer one say so."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_packs import train_pack
from mlx_packs.packs.manifest import FORMAT_VERSION
from mlx_packs.packs.pack import Pack
from mlx_packs.runtime import mx
from mlx_packs.training.run_folder import (
    RUN_FORMAT_VERSION,
    is_run,
    logged_metrics,
    read_identity,
    resume_point,
)
from tests.formats.write import LORA, TRAIN
from tests.helpers.errors import check, raises

FORMATS = Path(__file__).parent / "formats"
UNCORRECTED = ["first", "unsealed", "sealed"]  # of Adam without bias correction
NAMES = [*UNCORRECTED, "corrected"]


@pytest.fixture
def copy_of(here):
    """Copy a fixture to where a user would have it."""

    def copy(name: str) -> None:
        shutil.copytree(FORMATS / "d", "d")
        for part, place in (("pack", "o"), ("run", "o-run")):
            shutil.copytree(FORMATS / name / part, place)

    return copy


def versions_of(part: str, file: str, key: str) -> set:
    return {json.loads((FORMATS / name / part / file).read_text())[key] for name in NAMES}


def test_every_version_has_a_fixture_and_every_fixture_is_tested():
    packs = versions_of("pack", "pack.json", "format_version")
    runs = versions_of("run", "config.json", "format")
    assert packs == set(range(1, FORMAT_VERSION + 1))
    assert runs == {f"mlx_packs run {n}" for n in range(1, RUN_FORMAT_VERSION + 1)}
    listed = {folder.parent.name for folder in FORMATS.glob("*/pack")}
    assert listed == set(NAMES)
    table = (FORMATS / "README.md").read_text()
    assert all(f"| `{name}` |" in table for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_pack_of_an_earlier_program_opens_and_applies(copy_of, run, name):
    copy_of(name)
    code, out, _ = run("apply", "o", "--json")
    assert code == 0 and json.loads(out)["largest_logit_change"] > 0
    pack = Pack.open("o")
    recipe = pack._part("recipe")
    assert (recipe["rank"], recipe["iters"], recipe["matmul_path"]) == (1, 2, "dense")


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_an_earlier_program_resumes(copy_of, run, name):
    copy_of(name)
    before = logged_metrics(Path("o-run"))
    assert [line["batch"] for line in before] == [1, 2]
    assert resume_point(Path("o-run")).has_hashes == (name in ("sealed", "corrected"))
    code, _, err = run("train", "--resume", "--out", "o", "--iters", 3)
    assert code == 0, err
    after = logged_metrics(Path("o-run"))
    assert after[:2] == before and after[2]["batch"] == 3
    assert Pack.open("o")._part("recipe")["iters"] == 3
    assert resume_point(Path("o-run")).has_hashes


@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumes_with_the_learning_rate_and_the_optimizer_that_it_began_with(
    copy_of, run, name
):
    copy_of(name)
    recorded = json.loads((FORMATS / name / "run" / "config.json").read_text())["recipe"]
    code, _, err = run("train", "--resume", "--out", "o", "--iters", 3)
    assert code == 0, err
    recipe = Pack.open("o")._part("recipe")
    began_before = name in UNCORRECTED
    assert ("bias_correction" in recorded) != began_before
    assert recipe["bias_correction"] != began_before and recipe["warmup_from_zero"] != began_before
    assert ("without bias correction" in err) == began_before
    warmup = recorded["warmup_steps"]
    rate = 1e-3 * (3 / (warmup + 1) if began_before and warmup else 1)
    assert logged_metrics(Path("o-run"))[2]["learning_rate"] == pytest.approx(rate)


@pytest.mark.parametrize("name", UNCORRECTED)
def test_from_python_a_run_resumes_as_it_began_too(copy_of, run, name):
    copy_of(name)
    assert run("train", "--resume", "--out", "o", "--iters", 3)[0] == 0
    expected = mx.load("o/adapters.safetensors")
    for folder in ("o", "o-run"):
        shutil.rmtree(folder)
    for part, place in (("pack", "o"), ("run", "o-run")):
        shutil.copytree(FORMATS / name / part, place)
    recorded = json.loads((FORMATS / name / "run" / "config.json").read_text())["recipe"]
    changes = {"iters": 3, "warmup_steps": recorded["warmup_steps"]}
    train_pack("tiny", "d", LORA, replace(TRAIN, **changes), "o", resume=True)
    resumed = mx.load("o/adapters.safetensors")
    assert all(mx.array_equal(resumed[key], expected[key]) for key in expected)


@pytest.mark.parametrize("version", [RUN_FORMAT_VERSION + 1, 987654321])
def test_a_run_of_a_newer_format_says_so_whatever_else_it_holds(copy_of, run, version):
    copy_of("sealed")
    (Path("o-run") / "config.json").write_text(json.dumps({"format": f"mlx_packs run {version}"}))
    with raises("unsupported", None, "config.json", str(version), "Upgrade"):
        read_identity(Path("o-run"))
    run("train", "--resume", "--out", "o")
    check(run.error, "unsupported", None, str(version))
    assert "\n" not in run.error.message and not is_run(Path("o-run"))
    run("train", "--data", "d", "--out", "o", "--overwrite")
    check(run.error, "exists", None, "o-run")
    assert len(list(Path("o-run").glob("step-*"))) == 1


@pytest.mark.parametrize("text", ["mlx_packs run 0", "mlx_packs run", "mlx_packs run 1x", 1, None])
def test_what_is_no_format_of_a_run_is_not_called_newer(copy_of, text):
    copy_of("sealed")
    file = Path("o-run") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": text}))
    with raises("unreadable", None, "config.json"):
        read_identity(Path("o-run"))
