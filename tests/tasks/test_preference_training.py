"""Runs on preferences, and of reward models: they learn them, and follow a phase of completions."""

import shlex

import numpy as np
import pytest

from mlx_packs import LoRAConfig, Pack, TrainConfig, train_pack
from mlx_packs.errors import PackError
from mlx_packs.runtime import mx
from mlx_packs.tasks.preference import PreferenceTask
from mlx_packs.tasks.reward import RewardTask
from tests.helpers.bases import small_base
from tests.helpers.errors import raises
from tests.helpers.preferences import preference, rated
from tests.helpers.rows import write_rows
from tests.helpers.runs import Lines
from tests.helpers.tasks import SHORT, interrupted, tensors_of

SETTINGS = SHORT | {"task": "dpo", "batch_size": 4, "max_seq_length": 96, "learning_rate": 5e-3}
LORA = LoRAConfig(rank=2, num_layers=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = [preference(i) for i in range(24)]
    return write_rows(tmp_path_factory.mktemp("data") / "p", train=rows[:16], valid=rows[16:])


def settings(**changes) -> TrainConfig:
    return TrainConfig(**(SETTINGS | {"iters": 6} | changes))


@pytest.mark.parametrize(
    ("task", "loss"),
    [
        ("dpo", "sigmoid"),
        pytest.param("orpo", None, marks=pytest.mark.slow),  # without a reference
        pytest.param("kto", None, marks=pytest.mark.slow),
    ],
)
def test_a_run_learns_what_is_preferred(tmp_path, data, task, loss):
    if task == "kto":
        rows = [rated(i) for i in range(24)]
        data = write_rows(tmp_path / "r", train=rows[:16], valid=rows[16:])
    display = Lines()
    train = settings(task=task)
    run = train_pack(small_base(), data, LORA, train, tmp_path / "p", progress=display)
    report, manifest = run.report, Pack.open(tmp_path / "p").manifest

    assert report["reward_margin_after"] > report["reward_margin_before"] + 0.05
    assert report["loss_after"] < report["loss_before"]
    if task != "orpo":
        assert (report["preference_accuracy_before"], report["reward_margin_before"]) == (0.5, 0)
        (done, *_) = PreferenceTask.report_lines(report)
        assert "held-out preference accuracy 0.5000 → " in done

    assert manifest["objective"]["task"] == manifest["recipe"]["task"] == task
    assert manifest["objective"].get("loss") == loss
    assert manifest["data"]["rows"] == {"train": 16, "valid": 8}
    kind = "rated" if task == "kto" else "preferences"
    assert any(f"16 train / 8 valid examples · {kind}" in line for line in display.lines)
    lines = [line for line in run.curve if "valid_loss" in line]
    assert lines and {"valid_preference_accuracy", "valid_reward_margin"} <= set(lines[0])
    assert report["tokens_per_s"] > 0 and report["trained_tokens"] > 0


PHASES = [{"name": "sft", "task": "lm", "iters": 3}, {"name": "dpo", "task": "dpo", "iters": 4}]


def phases_of(data, tmp_path) -> list[dict]:
    rows = [preference(i) for i in range(12)]
    completions = [{"prompt": r["prompt"], "completion": r["chosen"]} for r in rows]
    sft = write_rows(tmp_path / "sft", train=completions[:8], valid=completions[8:])
    return [{**PHASES[0], "data": str(sft)}, {**PHASES[1], "data": str(data)}]


@pytest.mark.slow
def test_preferences_follow_completions_with_the_reference_of_that_moment(tmp_path, data):
    phases = phases_of(data, tmp_path)
    train = {**SETTINGS, "task": "lm", "beta": 0.3, "z_loss": 1e-4, "phases": phases}
    run = train_pack(small_base(), None, LORA, train, tmp_path / "p")

    sft = settings(task="lm", iters=3, z_loss=1e-4)
    train_pack(small_base(), phases[0]["data"], LORA, sft, tmp_path / "a")
    begun = tensors_of(tmp_path / "a")
    reference = mx.load(str(tmp_path / "p-run" / "reference-000003.safetensors"))
    assert all(np.array_equal(np.array(t), begun[n]) for n, t in reference.items())

    first = next(line for line in run.curve if line.get("phase") == "dpo" and "loss" in line)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-3)  # nothing was gained yet

    assert [phase["name"] for phase in run.report["phases"]] == ["sft", "dpo"]
    assert [phase["task"] for phase in run.report["phases"]] == ["lm", "dpo"]
    assert run.report["preference_accuracy_after"] >= 0.5
    assert run.pack.manifest["data"]["rows"]["dpo/train"] == 16

    cut = interrupted(tmp_path / "p", tmp_path / "cut")
    train_pack(small_base(), None, LORA, train, cut, resume=True)
    ours, theirs = tensors_of(tmp_path / "p"), tensors_of(cut)
    assert set(ours) == set(theirs) and all(np.array_equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.slow
def test_adapters_that_a_run_starts_from_are_its_reference(tmp_path, data):
    first = train_pack(small_base(), data, LORA, settings(iters=3), tmp_path / "a")
    file = str(tmp_path / "a" / "adapters.safetensors")
    start = {"out": tmp_path / "b", "resume_adapter_file": file}
    run = train_pack(small_base(), data, LORA, settings(iters=4), **start)
    losses = [line["loss"] for line in run.curve if "loss" in line]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-4)
    report = run.report
    assert report["reward_margin_before"] == pytest.approx(0, abs=1e-4)
    assert report["chosen_ppl_before"] == pytest.approx(first.report["chosen_ppl_after"], rel=1e-3)
    assert report["sample"]["before"] == first.report["sample"]["after"]
    reference = tmp_path / "b-run" / "reference-000000.safetensors"
    reference.unlink()
    with raises("not-found", "resume", f"--resume: {reference} is missing"):
        train_pack(small_base(), data, LORA, settings(iters=6), tmp_path / "b", resume=True)


@pytest.mark.slow
def test_all_weights_learn_preferences_too(tmp_path, data):
    train = settings(method="full", iters=3, learning_rate=1e-3)
    run = train_pack(small_base(), data, None, train, tmp_path / "p")
    assert run.report["reward_margin_before"] == 0 < run.report["reward_margin_after"]


@pytest.mark.parametrize(
    ("phases", "error"),
    [
        ([PHASES[0], {**PHASES[1], "replay": 0.5}], "replay 0.5: sft has another task"),
        ([{**PHASES[1], "task": "embedding"}], "task: must be one of lm, dpo"),
        ([{"task": "lm"}, {"task": "reward"}, {"task": "lm"}], "phases.*reward"),
    ],
)
def test_phases_whose_tasks_do_not_go_together_are_named(phases, error):
    with pytest.raises(PackError, match=error):
        train_pack("tiny", "tiny", LORA, {"phases": phases})


def test_a_reward_model_learns_what_is_preferred(tmp_path, data, run):
    base = small_base()
    modules = dict(base.model.named_modules())
    trained = train_pack(base, data, LORA, settings(task="reward"), tmp_path / "p")
    report, manifest = trained.report, Pack.open(tmp_path / "p").manifest

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
    assert run(*shlex.split(last)[1:])[0] == 0

    lines = [line for line in trained.curve if "valid_loss" in line]
    assert lines and {"valid_preference_accuracy", "valid_reward_margin"} <= set(lines[0])
    assert dict(base.model.named_modules()) == modules  # the head was never one of them


def test_rewards_follow_completions(tmp_path, data):
    sft, dpo = phases_of(data, tmp_path)
    phases = [{**sft, "iters": 2}, {**dpo, "name": "reward", "task": "reward", "iters": 3}]
    shared = {**SETTINGS, "task": "lm", "phases": phases}
    run = train_pack(small_base(), None, LORA, shared, tmp_path / "p")
    assert [phase["task"] for phase in run.report["phases"]] == ["lm", "reward"]
    assert run.report["reward_margin_after"] > run.report["reward_margin_before"]
    sft, reward = run.report["phases"]
    assert set(reward["after"]) == {"sft"}  # its perplexity; a reward model has none
    assert reward["before"] == sft["after"] != sft["before"]
    before = mx.load(str(tmp_path / "p-run" / "step-000002" / "adapters.safetensors"))
    assert "score.weight" in before and "score.weight" in run.pack.tensors
