"""What a run says about its learning rate: mlx-lm's meaning, long warm-ups."""

import json
from pathlib import Path

import pytest

from mlx_packs.training.run_folder import RunFolder
from tests.helpers.errors import check
from tests.helpers.rows import write_rows

OPTIONS = (
    *("--data", "d", "--out", "o", "--rank", 1, "--num-layers", 1, "--target-modules", "q_proj"),
    *("--batch-size", 2, "--max-seq-length", 64, "--val-batches", 0, "--steps-per-report", 1),
    *("--metric", "none", "--matmul-path", "dense", "--warmup-steps", 0, "--learning-rate", 2e-4),
)


@pytest.fixture
def train(here, run, small_folder):
    """Train on four rows, with options; what the run says on stderr."""
    write_rows(here / "d", train=[{"text": f"row number {i} of a few"} for i in range(4)])

    def trained(*options) -> str:
        code, _, err = run("train", "--model", small_folder, *OPTIONS, *options)
        assert code == 0, err
        return " ".join(err.split())

    return trained


def rates() -> list[float]:
    lines = RunFolder(Path("o-run")).metrics()
    return [line["learning_rate"] for line in lines if "learning_rate" in line]


def test_a_warmup_longer_than_the_run_is_named(train):
    err = train("--iters", 3, "--warmup-steps", 100)
    assert "the warm-up takes 100 updates" in err and "2 % of its peak" in err
    assert rates() == pytest.approx([0, 2e-6, 4e-6])
    assert "warm-up" not in train("--iters", 3, "--warmup-ratio", 0.4, "--overwrite")
    assert rates()[0] == 0 and rates()[2] == pytest.approx(2e-4)


def test_a_recipe_in_the_form_of_mlx_lm_keeps_its_optimizer_and_says_so(train):
    Path("theirs.yaml").write_text("lora_parameters: {rank: 1, scale: 2.0}\n")
    note = "without bias correction"
    assert note in train("--iters", 1, "-c", "theirs.yaml")
    assert note not in train("--iters", 1, "-c", "theirs.yaml", "--bias-correction", "--overwrite")
    assert note not in train("--iters", 1, "-c", "theirs.yaml", "--optimizer", "sgd", "--overwrite")
    assert note not in train("--iters", 1, "--overwrite")


def test_a_flag_overrides_the_same_argument_in_a_recipe(train, run):
    Path("r.yaml").write_text("optimizer_config: {adamw: {weight_decay: 0.3, eps: 1.0e-6}}\n")
    train("--iters", 1, "-c", "r.yaml", "--weight-decay", 0.1)
    recipe = json.loads(Path("o/pack.json").read_text())["recipe"]
    assert recipe["weight_decay"] == 0.1 and recipe["optimizer_config"] == {"adamw": {"eps": 1e-6}}
    Path("r.yaml").write_text("weight_decay: 0.1\noptimizer_config: {adamw: {weight_decay: 0.3}}\n")
    run("train", "--data", "d", "-c", "r.yaml")
    check(run.error, "conflict", "weight_decay", "r.yaml", "0.3")
