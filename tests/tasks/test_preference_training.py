"""Runs on preferences: they learn them, resume bit-identically, and follow a phase of completions."""

import shutil

import numpy as np
import pytest
from click.testing import CliRunner

from mlx_packs import LoRAConfig, Pack, TrainConfig, train_pack
from mlx_packs.cli.train import train as train_command
from mlx_packs.errors import PackError
from mlx_packs.nn.wrapped import NoisyEmbedding
from mlx_packs.reading import read_json
from mlx_packs.runtime import mx
from tests.helpers.bases import dense_tiny
from tests.helpers.errors import raises
from tests.helpers.preferences import preference, rated
from tests.helpers.rows import write_rows

SETTINGS = {
    "batch_size": 4,
    "max_seq_length": 96,
    "matmul_path": "dense",
    "learning_rate": 5e-3,
    "lr_schedule": "constant",
    "save_every": 2,
    "steps_per_report": 1,
    "steps_per_eval": 2,
    "task": "dpo",
}
LORA = LoRAConfig(rank=2, num_layers=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = [preference(i) for i in range(24)]
    return write_rows(tmp_path_factory.mktemp("data") / "p", train=rows[:16], valid=rows[16:])


@pytest.fixture(scope="module")
def rated_data(tmp_path_factory):
    rows = [rated(i) for i in range(24)]
    return write_rows(tmp_path_factory.mktemp("data") / "r", train=rows[:16], valid=rows[16:])


def settings(**changes) -> TrainConfig:
    return TrainConfig(**(SETTINGS | {"iters": 6} | changes))


def tensors_of(folder) -> dict[str, np.ndarray]:
    return {n: np.array(t) for n, t in mx.load(str(folder / "adapters.safetensors")).items()}


def same(one, other) -> bool:
    ours, theirs = tensors_of(one), tensors_of(other)
    return set(ours) == set(theirs) and all(np.array_equal(ours[n], theirs[n]) for n in ours)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "task", ["dpo", *(pytest.param(t, marks=SLOW) for t in ("orpo", "simpo", "cpo", "kto"))]
)
def test_a_run_learns_what_is_preferred(tmp_path, data, rated_data, task):
    chosen = rated_data if task == "kto" else data
    run = train_pack(dense_tiny(), chosen, LORA, settings(task=task), tmp_path / "p")
    report, manifest = run.report, Pack.open(tmp_path / "p").manifest
    assert report["reward_margin_after"] > report["reward_margin_before"] + 0.05
    assert report["loss_after"] < report["loss_before"]
    if task in ("dpo", "kto"):
        assert (report["preference_accuracy_before"], report["reward_margin_before"]) == (0.5, 0)
    assert manifest["objective"]["task"] == task and manifest["recipe"]["task"] == task
    assert manifest["data"]["rows"] == {"train": 16, "valid": 8}
    lines = [line for line in run.curve if "valid_loss" in line]
    assert lines and {"valid_preference_accuracy", "valid_reward_margin"} <= set(lines[0])
    assert report["tokens_per_s"] > 0 and report["trained_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("dpo", {}),
        ("kto", {}),
        ("dpo", {"packing": True}),
        ("dpo", {"recompute": "block", "grad_accumulation_steps": 2}),
        ("dpo", {"micro_batches": 2, "method": "dora"}),
    ],
)
def test_a_resumed_run_is_bit_identical(tmp_path, data, rated_data, task, changes):
    chosen = rated_data if task == "kto" else data
    whole = settings(task=task, **changes)  # 6 batches: the second epoch begins within them
    train_pack(dense_tiny(), chosen, LORA, whole, tmp_path / "whole")
    part = settings(task=task, **changes | {"iters": 4})
    train_pack(dense_tiny(), chosen, LORA, part, tmp_path / "part")
    train_pack(dense_tiny(), chosen, LORA, whole, tmp_path / "part", resume=True)
    assert same(tmp_path / "whole", tmp_path / "part")


PHASES = [{"name": "sft", "task": "lm", "iters": 3}, {"name": "dpo", "task": "dpo", "iters": 4}]


def phases_of(data, tmp_path) -> list[dict]:
    rows = [preference(i) for i in range(12)]
    completions = [{"prompt": r["prompt"], "completion": r["chosen"]} for r in rows]
    sft = write_rows(tmp_path / "sft", train=completions[:8], valid=completions[8:])
    return [{**PHASES[0], "data": str(sft)}, {**PHASES[1], "data": str(data)}]


@pytest.mark.slow
def test_preferences_follow_completions_with_the_reference_of_that_moment(tmp_path, data):
    shared = {**SETTINGS, "task": "lm", "beta": 0.3, "z_loss": 1e-4}
    phases = phases_of(data, tmp_path)
    run = train_pack(dense_tiny(), None, LORA, {**shared, "phases": phases}, tmp_path / "p")
    reference = mx.load(str(tmp_path / "p-run" / "reference-000003.safetensors"))
    alone = train_pack(
        "tiny", phases[0]["data"], LORA, settings(task="lm", iters=3, z_loss=1e-4), tmp_path / "a"
    )
    begun = tensors_of(alone.pack.path)
    assert all(np.array_equal(np.array(t), begun[n]) for n, t in reference.items())
    first = next(line for line in run.curve if line.get("phase") == "dpo" and "loss" in line)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-3)  # nothing was gained yet
    names = [phase["name"] for phase in run.report["phases"]]
    assert names == ["sft", "dpo"] and run.report["preference_accuracy_after"] >= 0.5
    assert [phase["task"] for phase in run.report["phases"]] == ["lm", "dpo"]
    assert run.pack.manifest["data"]["rows"]["dpo/train"] == 16
    shutil.rmtree(tmp_path / "p-run" / "step-000007")
    pack = tensors_of(tmp_path / "p")
    train_pack(dense_tiny(), None, LORA, {**shared, "phases": phases}, tmp_path / "p", resume=True)
    resumed = tensors_of(tmp_path / "p")
    assert all(np.array_equal(pack[n], resumed[n]) for n in pack)


@pytest.mark.slow
def test_each_phase_of_preferences_has_its_own_reference(tmp_path, data):
    phases = [{"name": name, "data": str(data), "iters": 3} for name in "ab"]
    train = {**SETTINGS, "phases": phases}
    run = train_pack(dense_tiny(), None, LORA, train, tmp_path / "p")
    losses = {line["batch"]: line["loss"] for line in run.curve if "loss" in line}
    assert losses[1] == pytest.approx(np.log(2), abs=1e-4)  # as the phase began: nothing gained
    assert losses[4] == pytest.approx(np.log(2), abs=1e-4) and losses[3] < losses[4]

    shutil.rmtree(tmp_path / "p-run" / "step-000006")
    shutil.copytree(tmp_path / "p", tmp_path / "whole")
    resumed = train_pack(dense_tiny(), None, LORA, train, tmp_path / "p", resume=True)
    assert same(tmp_path / "whole", tmp_path / "p")
    for key in ("phases", "preference_accuracy_after", "reward_margin_after"):
        assert run.report[key] == resumed.report[key]


def test_phases_of_several_tasks_have_the_noise_of_embeddings_once(tmp_path, data, monkeypatch):
    made = []
    init = NoisyEmbedding.__init__
    monkeypatch.setattr(
        NoisyEmbedding, "__init__", lambda self, *args: (made.append(self), init(self, *args))[1]
    )
    shared = {**SETTINGS, "task": "lm", "neftune_noise_alpha": 5.0}
    shared |= {"val_batches": 0, "test_batches": 1}
    phases = [{**phase, "iters": 1} for phase in phases_of(data, tmp_path)]
    train_pack(dense_tiny(), None, LORA, {**shared, "phases": phases}, tmp_path / "p")
    assert len(made) == 1


@pytest.mark.slow
def test_adapters_that_a_run_starts_from_are_its_reference(tmp_path, data):
    first = train_pack("tiny", data, LORA, settings(iters=3), tmp_path / "a")
    file = first.pack.path / "adapters.safetensors"
    run = train_pack(
        "tiny", data, LORA, settings(iters=4), tmp_path / "b", resume_adapter_file=str(file)
    )
    losses = [line["loss"] for line in run.curve if "loss" in line]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-4)
    reference = tmp_path / "b-run" / "reference-000000.safetensors"
    reference.unlink()
    with raises("not-found", "resume", f"--resume: {reference} is missing"):
        train_pack("tiny", data, LORA, settings(iters=6), tmp_path / "b", resume=True)


@pytest.mark.slow
def test_all_weights_learn_preferences_too(tmp_path, data):
    train = settings(method="full", iters=3, learning_rate=1e-3)
    run = train_pack("tiny", data, None, train, tmp_path / "p")
    assert run.report["reward_margin_before"] == 0 < run.report["reward_margin_after"]


def train_error(*args) -> str:
    result = CliRunner().invoke(train_command, [str(a) for a in args], standalone_mode=False)
    return result.exception.message


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--task", "dpo", "--beta", "0"], "--beta: must be above 0 with --task dpo, but is 0."),
        (["--task", "dpo", "--beta", "-1"], "--beta: must be at least 0, but is -1.0."),
        (["--beta", "0.2"], "--beta: needs --task dpo, orpo, simpo, cpo, kto or grpo."),
        (["--task", "dpo", "--loss", "mnrl"], "--loss: mnrl needs --task embedding. Take sigmoid, robust, hinge or ipo."),
        (["--task", "orpo", "--loss", "ipo"], "--loss: needs --task"),
        (["--task", "dpo", "--label-smoothing", "0.5"], "--label-smoothing: must be below 0.5 for preferences, but is 0.5."),
        (["--task", "dpo", "--loss", "ipo", "--label-smoothing", "0.1"], "--label-smoothing: does not go with --loss ipo."),
        (["--task", "dpo", "--loss", "robust"], "--loss: robust needs a --label-smoothing above 0."),
        (["--task", "dpo", "--cache-frozen", "on"], "--cache-frozen: on needs --task lm."),
        (["--task", "dpo", "--ce-last-k", "3"], "--ce-last-k: needs --task lm."),
        (["--task", "kto"], "must have the columns {prompt, completion, label}"),
        (["--task", "dpo", "--packing", "--max-seq-length", "40"], "--packing: both completions of an example share a sequence"),
    ],
)  # fmt: skip
def test_what_means_nothing_for_preferences_is_one_line(tmp_path, data, flags, error):
    message = train_error("--model", "tiny", "--data", data, "--out", tmp_path / "p", *flags)
    assert error in message and "\n" not in message
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("phases", "error"),
    [
        ([PHASES[0], {**PHASES[1], "replay": 0.5}], "replay 0.5: sft has another task"),
        ([{**PHASES[1], "task": "embedding"}], "task: must be one of lm, dpo"),
    ],
)
def test_phases_whose_tasks_do_not_go_together_are_named(phases, error):
    with pytest.raises(PackError, match=error):
        train_pack("tiny", "tiny", LORA, {"phases": phases})


def test_a_run_shows_what_it_learned(tmp_path, data):
    flags = ["--model", "tiny", "--task", "dpo", "--iters", "2", "--batch-size", "2"]
    flags += ["--matmul-path", "dense", "--num-layers", "1"]
    places = ["--data", data, "--out", tmp_path / "p", "--max-seq-length", "96"]
    result = CliRunner().invoke(train_command, [str(x) for x in flags + places])
    assert result.exit_code == 0, result.output
    assert "held-out preference accuracy 0.5000, reward margin 0.0000 → " in result.output
    assert "16 train / 8 valid examples · preferences" in result.output
    assert read_json(tmp_path / "p" / "pack.json")["objective"]["loss"] == "sigmoid"
