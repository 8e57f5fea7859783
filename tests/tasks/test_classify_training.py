"""Runs of classifiers: they learn labels, several labels and scores, resume, and say what is bad."""

import shlex

import pytest

from mlx_packs import (
    DataConfig,
    LoRAConfig,
    Pack,
    TrainConfig,
    evaluate,
    export_pack,
    import_adapter,
    train_pack,
)
from mlx_packs.tasks.classify import ClassifyTask
from tests.helpers.bases import saved_base, small_base
from tests.helpers.errors import raises
from tests.helpers.rows import (
    chat,
    labelled,
    labelled_chat,
    scored,
    several,
    splits_of,
    starred,
    write_rows,
)
from tests.helpers.tasks import SHORT
from tests.helpers.variants import slow_except

SETTINGS = SHORT | {"task": "classify", "iters": 20, "batch_size": 8, "max_seq_length": 64}
SETTINGS |= {"learning_rate": 1e-2, "save_every": 10, "steps_per_eval": 10, "steps_per_report": 10}
LORA = LoRAConfig(rank=2)


def settings(**changes) -> TrainConfig:
    return TrainConfig(**(SETTINGS | changes))


@pytest.mark.parametrize("make", slow_except([labelled, labelled_chat], labelled_chat))
def test_a_run_learns_labels(tmp_path, make):
    base = small_base()
    data = splits_of(make)
    run = train_pack(base, data, LORA, settings(class_weights="balanced"), tmp_path / "p")
    report, manifest = run.report, Pack.open(tmp_path / "p").manifest
    words = shlex.split(ClassifyTask.report_lines(report)[-1])
    assert words[0] == "echo" and words[-3:] == ["packs", "classify", str(run.pack.path)]

    assert report["label_accuracy_after"] == 1 > report["label_accuracy_before"]
    assert report["log_loss_after"] < report["log_loss_before"] - 0.5
    assert report["trained_tokens"] > 150 * 7  # 30 examples in every 4 batches
    assert manifest["classifier"] == {
        "problem_type": "single_label_classification",
        "labels": ["blue", "green", "red"],
        "head": "score",
        "input": "chat" if make is labelled_chat else "text",
        "temperature": 1.0,
    }
    assert manifest["adapters"]["replaced"] == [{"name": "score.weight", "shape": [3, 64]}]
    lines = [line for line in run.curve if "valid_loss" in line]
    assert lines and {"valid_accuracy", "valid_macro_f1"} <= set(lines[0])

    measured = evaluate(small_base(), tmp_path / "p", data).to_json()
    assert measured["pack"]["accuracy"] == 1 and measured["rows"] == 6
    assert measured["pack"]["log_loss"] == pytest.approx(report["log_loss_after"], abs=1e-4)


def test_several_labels_have_a_fitted_temperature(tmp_path):
    train = settings(iters=10, batch_size=16, calibrate=True)
    run = train_pack(small_base(), splits_of(several, 64), LORA, train, tmp_path / "m")
    report = run.report
    assert report["log_loss_after"] < report["log_loss_before"] - 0.2
    assert report["macro_f1_after"] > report["macro_f1_before"]
    facts = Pack.open(tmp_path / "m").manifest["classifier"]
    assert facts["labels"] == ["blue", "green", "red"] and facts["temperature"] != 1
    assert report["calibrated_log_loss"] != report["log_loss_after"]

    measured = evaluate(small_base(), tmp_path / "m", splits_of(several, 64)).to_json()
    assert measured["temperature"] == facts["temperature"]
    assert measured["pack"]["log_loss"] == pytest.approx(report["calibrated_log_loss"], abs=1e-3)


@pytest.mark.slow
def test_scores(tmp_path):
    run = train_pack(small_base(), splits_of(scored), LORA, settings(), tmp_path / "s")
    report = run.report
    assert report["rmse_after"] < report["rmse_before"] / 2 and report["spearman_after"] > 0.8
    assert "label_accuracy_after" not in report
    (prediction,) = small_base().classify(["the green car number 9 is here"], tmp_path / "s")
    assert prediction.to_json().keys() == {"score"} and abs(prediction.label - 2) < 1


@pytest.mark.slow
def test_labels_on_a_scale(tmp_path):
    """The head has a row fewer than labels, and the pack knows the scale, exported and back."""
    train = settings(ordinal=True, calibrate=True, iters=30)
    run = train_pack(small_base(), splits_of(starred), LORA, train, tmp_path / "p")
    report = run.report
    pack = Pack.open(tmp_path / "p")

    assert pack.manifest["classifier"]["labels"] == ["1", "2", "3"]
    assert pack.manifest["adapters"]["replaced"] == [{"name": "score.weight", "shape": [2, 64]}]
    assert report["mae_after"] < report["mae_before"] and report["label_accuracy_after"] == 1

    measured = evaluate(small_base(), tmp_path / "p", splits_of(starred)).to_json()
    assert measured["pack"]["mae"] == report["mae_after"]
    (prediction,) = small_base().classify(["the green car number 9 is here"], tmp_path / "p")
    assert prediction.label == "3"
    assert sum(prediction.probabilities.values()) == pytest.approx(1)

    export_pack(tmp_path / "p", "peft", tmp_path / "e")
    base = saved_base(small_base(), tmp_path / "base")
    import_adapter(tmp_path / "e", tmp_path / "i", base)
    assert Pack.open(tmp_path / "i").manifest["classifier"] == pack.manifest["classifier"]


@pytest.mark.slow
def test_a_classifier_follows_texts_and_other_labels(tmp_path):
    """Phases of one run: completions, some labels, and others."""
    texts = [chat(f"Say {word}.", f"{word}.") for word in ("red", "blue", "green")] * 4
    sft = write_rows(tmp_path / "sft", train=texts[:9], valid=texts[9:])
    first = write_rows(tmp_path / "first", **splits_of(labelled))
    others = splits_of(lambda i: {**labelled(i), "label": "x" if i % 2 else "y"})
    second = write_rows(tmp_path / "second", **others)
    phases = [
        {"name": "sft", "task": "lm", "iters": 2, "data": str(sft)},
        {"name": "first", "task": "classify", "iters": 8, "data": str(first)},
        {"name": "second", "task": "classify", "iters": 8, "data": str(second)},
    ]
    shared = {**SETTINGS, "task": "lm", "phases": phases, "max_seq_length": 96}
    del shared["iters"]
    run = train_pack(small_base(), None, LORA, shared, tmp_path / "p")

    assert [phase["task"] for phase in run.report["phases"]] == ["lm", "classify", "classify"]
    labels = Pack.open(tmp_path / "p").manifest["classifier"]["labels"]
    assert labels == ["blue", "green", "red", "x", "y"]
    assert run.report["log_loss_after"] < run.report["log_loss_before"]


def with_row(row: dict, split: str = "train", at: int = 4) -> dict[str, list[dict]]:
    splits = splits_of(labelled)
    splits[split][at] = row
    return splits


BAD = {
    "one class": ({s: [{**r, "label": "x"} for r in rows] for s, rows in splits_of(labelled).items()}, None, "1 'label'"),
    "unknown in valid": (with_row({"text": "a", "label": "pink"}, "valid", 2), "valid.jsonl:3", "'pink' is none of the 3"),
    "empty text": (with_row({"text": " ", "label": "red"}), "train.jsonl:5", "'text' is empty"),
    "empty label": (with_row({"text": "a", "label": ""}), "train.jsonl:5", "label"),
    "boolean": (with_row({"text": "a", "label": True}), "train.jsonl:5", "must be a text or an integer"),
    "no label": (with_row({"text": "a"}), "train.jsonl:5", "'label' is missing"),
    "two columns": (with_row({"text": "a", "label": "b", "score": 1}, at=0), "train.jsonl:1", "label and score"),
    "a chat": (with_row(labelled_chat(1)), "train.jsonl:5", "is a chat"),
    "10,000 classes": ({"train": [{"text": "a", "label": i} for i in range(10_000)], "valid": [{"text": "a", "label": 1}]}, None, "10,000 different labels"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_one_line_with_its_place(tmp_path, name):
    splits, place, text = BAD[name]
    folder = write_rows(tmp_path / "d", **splits)
    with raises("data", None, place or "") as error:
        train_pack(small_base(), folder, LORA, settings(), tmp_path / "p")
    message = error.value.message
    assert text in message and "\n" not in message
    assert not (tmp_path / "p").exists()


def test_bad_rows_can_be_left_out(tmp_path):
    rows = with_row({"text": "a", "label": ""})
    rows["valid"][0] = {"text": "a", "label": "pink"}
    folder = write_rows(tmp_path / "d", **rows)
    columns = DataConfig(data=str(folder), on_bad_row="skip")
    run = train_pack(small_base(), None, LORA, settings(iters=2), tmp_path / "p", columns)
    assert run.report["bad_rows"]["valid"] == {"unknown label": 1}
    assert run.pack.manifest["classifier"]["labels"] == ["blue", "green", "red"]

    rows = [{"text": "a", "label": "red"}, {"text": "b", "label": "pink"}]
    with raises("data", None, "test.jsonl:2"):
        evaluate(small_base(), run.pack, write_rows(tmp_path / "e", train=rows, test=rows))


@pytest.mark.parametrize(
    ("make", "changes", "code", "flag"),
    [
        (labelled, {"best": "valid_spearman"}, "conflict", "best"),
        (several, {"class_weights": "balanced"}, "conflict", "class_weights"),
        (scored, {"calibrate": True}, "conflict", "calibrate"),
        (scored, {"ordinal": True}, "conflict", "ordinal"),
        (labelled, {"ordinal": True}, "data", "ordinal"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_labels_have_no_use_for_is_one_line(tmp_path, make, changes, code, flag):
    with raises(code, flag) as error:
        train_pack(small_base(), splits_of(make), LORA, settings(**changes), tmp_path / "p")
    assert "\n" not in error.value.message and not (tmp_path / "p").exists()
