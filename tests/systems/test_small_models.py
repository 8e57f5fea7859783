"""docs/systems.md, section 3: small models without quantization, by the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mlx_packs import load_base
from mlx_packs.cli.main import packs
from tests.helpers.encoders import all_pairs, all_scored, all_triplets, write_pairs

pytestmark = pytest.mark.systems

TEXTS = ["how do i fix a car?", "please tell me"]


def trained(encoder: Path, folder: Path, rows: list[dict], iters: int, *more: str) -> dict:
    """The report of `packs train` on rows."""
    places = ["--model", encoder, "--data", write_pairs(folder / "data", rows), "--out"]
    how = "--task embedding --batch-size 16 --learning-rate 1e-3 --rank 16 --json --iters"
    arguments = ["train", *places, folder / "pack", *how.split(), iters, *more]
    result = CliRunner().invoke(packs, [*map(str, arguments)])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def run_of_pairs(encoder, tmp_path_factory) -> tuple[Path, dict]:
    """The folder of ``data`` and ``pack``, and the report."""
    folder = tmp_path_factory.mktemp("pairs")
    return folder, trained(encoder, folder, all_pairs(), 60)


def test_a_folder_of_sentence_transformers_makes_embeddings(encoder):
    vectors = load_base(encoder).encode(TEXTS, batch_size=2)
    assert vectors.shape == (2, 32) and np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-6


@pytest.mark.parametrize(
    ("loss", "rows"),
    [("cosine", all_scored), ("cached-mnrl", all_pairs), ("triplet", all_triplets)],
)
def test_every_loss_trains_float32_lora(encoder, tmp_path, loss, rows):
    """One loss for each kind of rows; tests/tasks/test_embedding_training.py has the others."""
    report = trained(encoder, tmp_path, rows(), 2, "--loss", loss)
    assert report["loss"] == loss and 0 < report["trainable_parameters"] < report["base_weights"]
    assert any(key.endswith("_after") for key in report)


def test_training_moves_the_metric_and_eval_finds_it_again(run, encoder, run_of_pairs):
    folder, report = run_of_pairs
    assert report["mrr_at_10_after"] > report["mrr_at_10_before"] + 0.2
    places = (folder / "pack", "--model", encoder, "--data", folder / "data")
    code, out, _ = run("eval", *places, "--json")
    assert code == 0
    assert json.loads(out)["pack"]["mrr_at_10"] == pytest.approx(report["mrr_at_10_after"])


def test_packs_leave_as_peft_and_as_a_merged_folder(run, encoder, run_of_pairs, tmp_path):
    folder, _ = run_of_pairs
    code, _, err = run("export", folder / "pack", "--to", "peft", "--out", tmp_path / "peft")
    assert code == 0, err
    assert (tmp_path / "peft" / "adapter_model.safetensors").is_file()
    places = ("--model", encoder, "--data", folder / "data", "--out", tmp_path / "merged")
    code, _, err = run("merge", folder / "pack", *places)
    assert code == 0, err
    base = load_base(encoder)
    with base.applied(folder / "pack"):
        wanted = base.encode(TEXTS)
    assert np.abs(load_base(tmp_path / "merged").encode(TEXTS) - wanted).max() < 1e-5


@pytest.mark.parametrize("memory", [8, 64])
def test_the_plan_recommends_float32_lora_and_says_why_not_qlora(run, encoder, memory):
    code, out, _ = run("plan", "--model", encoder, "--memory", memory, "--json")
    best = json.loads(out)["options"][0]
    assert code == 0 and best["method"] == "lora-fp32" and best["fits"]
    assert "not QLoRA" in best["why"]
