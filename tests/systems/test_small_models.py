"""docs/systems.md, section 3: small models without quantization, by the command line."""

import json
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import load_base
from tests.helpers.encoders import all_pairs, all_scored, all_triplets, write_pairs

pytestmark = pytest.mark.systems

QUICK = "--batch-size 16 --learning-rate 1e-3 --rank 8 --json".split()


def train_report(run, encoder: Path, folder: Path, rows: list[dict], *more) -> dict:
    data = write_pairs(folder / "data", rows)
    code, out, err = run(
        "train",
        "--model",
        encoder,
        "--task",
        "embedding",
        "--data",
        data,
        "--out",
        folder / "pack",
        *QUICK,
        *more,
    )
    assert code == 0, err
    return json.loads(out)


def test_a_folder_of_sentence_transformers_makes_embeddings(encoder):
    vectors = load_base(encoder).encode(["how do i fix a car?", "please tell me"], batch_size=2)
    assert vectors.shape == (2, 32) and np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-6


@pytest.mark.parametrize("loss", ["cosine", "cosent", "mnrl", "cached-mnrl", "triplet"])
def test_every_loss_trains_float32_lora(run, encoder, tmp_path, loss):
    scored = loss in ("cosine", "cosent")
    rows = all_scored() if scored else all_triplets() if loss == "triplet" else all_pairs()
    report = train_report(run, encoder, tmp_path, rows, "--loss", loss, "--iters", 4)
    assert report["loss"] == loss and 0 < report["learned_weights"] < report["base_weights"]
    assert any(key.endswith("_after") for key in report)


def test_training_moves_the_metric_and_eval_finds_it_again(run, encoder, tmp_path):
    report = train_report(run, encoder, tmp_path, all_pairs(), "--iters", 60, "--rank", 16)
    assert report["mrr_at_10_after"] > report["mrr_at_10_before"] + 0.2
    code, out, _ = run(
        "eval", report["pack"], "--model", encoder, "--data", tmp_path / "data", "--json"
    )
    assert code == 0
    assert json.loads(out)["pack"]["mrr_at_10"] == pytest.approx(report["mrr_at_10_after"])


def test_packs_leave_as_peft_and_as_a_merged_folder(run, encoder, tmp_path):
    report = train_report(run, encoder, tmp_path, all_pairs(), "--iters", 4)
    code, _, err = run("export", report["pack"], "--to", "peft", "--out", tmp_path / "peft")
    assert code == 0, err
    assert (tmp_path / "peft" / "adapter_model.safetensors").is_file()
    code, _, err = run(
        "merge",
        report["pack"],
        "--model",
        encoder,
        "--out",
        tmp_path / "merged",
        "--data",
        tmp_path / "data",
    )
    assert code == 0, err
    base = load_base(encoder)
    with base.applied(report["pack"]):
        wanted = base.encode(["how do i fix a car?"])
    assert (
        np.abs(load_base(tmp_path / "merged").encode(["how do i fix a car?"]) - wanted).max() < 1e-5
    )


def test_the_plan_recommends_float32_lora_and_says_why_not_qlora(run, encoder):
    for memory in (8, 16, 24, 64):
        code, out, _ = run("plan", "--model", encoder, "--memory", memory, "--json")
        best = json.loads(out)[0]
        assert code == 0 and best["method"] == "lora-fp32" and best["fits"]
        assert "not QLoRA" in best["why"]
