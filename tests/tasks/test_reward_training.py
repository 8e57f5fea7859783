"""Runs of reward models: they learn, resume bit-identically, and follow a phase of completions."""

import shlex

import numpy as np
import pytest
from click.testing import CliRunner

from mlx_packs import LoRAConfig, Pack, TrainConfig, train_pack
from mlx_packs.cli.main import packs
from mlx_packs.runtime import mx
from mlx_packs.tasks.reward import RewardTask
from tests.helpers.bases import small_base
from tests.helpers.errors import raises
from tests.helpers.preferences import preference
from tests.helpers.rows import write_rows

SETTINGS = {
    "task": "reward",
    "iters": 6,
    "batch_size": 4,
    "max_seq_length": 96,
    "matmul_path": "dense",
    "learning_rate": 5e-3,
    "lr_schedule": "constant",
    "save_every": 2,
    "steps_per_report": 1,
    "steps_per_eval": 3,
}
LORA = LoRAConfig(rank=2, num_layers=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = [preference(i) for i in range(24)]
    return write_rows(tmp_path_factory.mktemp("data") / "p", train=rows[:16], valid=rows[16:])


def settings(**changes) -> TrainConfig:
    return TrainConfig(**(SETTINGS | changes))


def tensors_of(folder) -> dict[str, np.ndarray]:
    return {n: np.array(t) for n, t in mx.load(str(folder / "adapters.safetensors")).items()}


def test_a_run_learns_what_is_preferred(tmp_path, data):
    base = small_base()
    modules = dict(base.model.named_modules())
    run = train_pack(base, data, LORA, settings(iters=6), tmp_path / "p")
    report, manifest = run.report, Pack.open(tmp_path / "p").manifest

    assert report["preference_accuracy_after"] > max(0.8, report["preference_accuracy_before"])
    assert report["reward_margin_after"] > report["reward_margin_before"] + 0.2
    assert report["loss_after"] < report["loss_before"]

    assert manifest["objective"] == {
        "task": "reward",
        "loss_on": "last token",
        "center_rewards_coefficient": 0.0,
    }
    assert manifest["adapters"]["replaced"] == [{"name": "score.weight", "shape": [1, 64]}]
    assert report["trained_tokens"] > 24 * 2 * 15 and report["trainable_parameters"] > 64

    last = RewardTask.report_lines(report)[-1]
    assert CliRunner().invoke(packs, shlex.split(last)[1:]).exit_code == 0

    lines = [line for line in run.curve if "valid_loss" in line]
    assert lines and {"valid_preference_accuracy", "valid_reward_margin"} <= set(lines[0])
    assert dict(base.model.named_modules()) == modules  # the head was never one of them


def phases_of(data, tmp_path) -> list[dict]:
    rows = [preference(i) for i in range(12)]
    completions = [{"prompt": r["prompt"], "completion": r["chosen"]} for r in rows]
    sft = write_rows(tmp_path / "sft", train=completions[:8], valid=completions[8:])
    return [
        {"name": "sft", "task": "lm", "iters": 2, "data": str(sft)},
        {"name": "reward", "task": "reward", "iters": 3, "data": str(data)},
    ]


def test_rewards_follow_completions(tmp_path, data):
    phases = phases_of(data, tmp_path)
    shared = {**SETTINGS, "task": "lm"}
    del shared["iters"]
    run = train_pack(small_base(), None, LORA, {**shared, "phases": phases}, tmp_path / "p")
    assert [phase["task"] for phase in run.report["phases"]] == ["lm", "reward"]
    assert run.report["reward_margin_after"] > run.report["reward_margin_before"]
    sft, reward = run.report["phases"]
    assert set(reward["after"]) == {"sft"}  # its perplexity; a reward model has none
    assert reward["before"] == sft["after"] != sft["before"]
    before = mx.load(str(tmp_path / "p-run" / "step-000002" / "adapters.safetensors"))
    assert "score.weight" in before and "score.weight" in tensors_of(tmp_path / "p")


@pytest.mark.parametrize("changed", [{"chosen": " "}, {"rejected": "red."}])
def test_a_row_that_cannot_be_compared_names_its_line(tmp_path, changed):
    rows = [preference(i) for i in range(4)]
    rows[0] |= {"chosen": "red."} | changed
    folder = write_rows(tmp_path / "d", train=rows, valid=rows[1:])
    with raises("data", None, "train.jsonl:1"):
        train_pack(small_base(), folder, LORA, settings(), tmp_path / "p")


def test_no_task_follows_one_of_rewards():
    phases = [{"task": "lm"}, {"task": "reward"}, {"task": "lm"}]
    with raises("conflict", "phases", "reward"):
        train_pack("tiny", "tiny", LORA, {"phases": phases})
