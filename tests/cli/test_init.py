"""`packs init`: a recipe that trains as it is."""

import io

import pytest
import yaml

from mlx_packs.cli import init
from tests.helpers.errors import check
from tests.helpers.rows import CHATS, write_rows


@pytest.fixture
def data(here):
    return write_rows(here / "tickets", train=CHATS * 3, valid=CHATS[:2])


def test_a_recipe_fits_says_what_each_setting_is_and_trains(data, here, run):
    code, out, err = run("init", "--model", "tiny", "--data", "tickets", "--memory", "8GB")
    assert code == 0 and err == ""
    assert "fits    yes: " in out and out.endswith("try:    packs train -c recipe.yaml\n")
    text = (here / "recipe.yaml").read_text()
    settings = yaml.safe_load(text)
    assert settings["out"] == "packs/tickets" and settings["epochs"] == 3
    assert "\n# Rank of the adapters.\nrank: 16\n" in text
    assert run("train", "-c", "recipe.yaml", "--epochs", 0.1, "-q")[0] == 0


def test_a_recipe_is_not_overwritten_unasked(data, here, run, rejected):
    (here / "recipe.yaml").write_text("mine")
    check(rejected("init", "--model", "tiny", "--data", "tickets"), "exists", "out", "recipe.yaml")
    assert (here / "recipe.yaml").read_text() == "mine"
    assert run("init", "--model", "tiny", "--data", "tickets", "--overwrite")[0] == 0


def test_what_is_missing_is_asked_for_in_a_terminal_only(data, run, rejected, monkeypatch):
    check(rejected("init", "--data", "tickets"), "invalid", "model", "nobody can be asked")
    answers = io.StringIO("tiny\ntickets\n")
    answers.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", answers)
    code, out, err = run("init")
    assert code == 0 and "Model (mlx-community/Qwen3-" in err and "your examples" in err


def test_a_model_that_does_not_fit_writes_nothing(data, here, rejected):
    rejected("init", "--model", "tiny", "--data", "tickets", "--memory", "1MB")
    assert not (here / "recipe.yaml").exists()


def test_a_family_without_a_plan_gets_the_defaults(data, here, run, monkeypatch):
    def unplanned(*args, **settings):
        raise init.PackError("no plan: of this family.", "unsupported")

    monkeypatch.setattr(init, "planned", unplanned)
    code, out, _ = run("init", "--model", "tiny", "--data", "tickets")
    assert code == 0 and "plan    no plan: of this family." in out
    assert yaml.safe_load((here / "recipe.yaml").read_text())["recompute"] == "auto"
