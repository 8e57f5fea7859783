"""packs train --task rerank --head score: a reranker with a head of its own."""

import json
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import LoRAConfig, TrainConfig, evaluate, load_base, train_pack
from mlx_packs.adapters.spec import SCORE_WEIGHT
from mlx_packs.packs.manifest import check_manifest, replaced_of
from mlx_packs.runtime import mx
from tests.helpers.decoder_embedders import write_decoder
from tests.helpers.encoders import write_pairs
from tests.helpers.errors import check, raises
from tests.helpers.rankings import all_labelled, all_rankings
from tests.helpers.tasks import interrupted
from tests.helpers.variants import slow_except

LORA = LoRAConfig(rank=4)
TEXTS = "how do i fix a car?", ["steps to repair the vehicle", "a stone"]


def settings(**changes) -> TrainConfig:
    plain = {"batch_size": 4, "iters": 2, "learning_rate": 1e-3, "save_every": 1, "val_batches": 1}
    plain["head"] = "score"
    return TrainConfig(task="rerank", **{**plain, **changes})


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("data") / "rankings", all_rankings(), 16)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    """A base whose tokenizer has no token for yes."""
    return write_decoder(tmp_path_factory.mktemp("decoder") / "base")


@pytest.fixture(scope="module")
def trained(decoder, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "rerank"
    train = settings(rerank_instruction="Find the same question")
    return train_pack(decoder, str(data), LORA, train, out)


def test_pack_has_a_head_of_one_row(trained):
    manifest = trained.pack.manifest
    check_manifest(manifest)
    assert manifest["objective"]["head"] == "score"
    assert replaced_of(manifest) == {SCORE_WEIGHT: (1, 64)}
    assert not trained.pack.is_reward_model and trained.report["plan_peak_gb"] > 0


def test_default_head_is_the_base_s_own(run, decoder, data, tmp_path):
    train = ["train", "--model", decoder, "--data", data, "--task", "rerank", "--rank", "2"]
    train += ["--iters", "1", "--batch-size", "2", "--val-batches", "0", "--test-batches", "1"]
    assert run(*train, "--out", tmp_path / "lm")[0] == 0
    assert run(*train, "--out", tmp_path / "score", "--head", "score")[0] == 0
    replaced = [
        json.loads((tmp_path / head / "pack.json").read_text())["adapters"].get("replaced")
        for head in ("lm", "score")
    ]
    assert replaced[0] is None and replaced[1][0]["name"] == SCORE_WEIGHT


def test_evaluation_is_that_of_the_run(run, trained, decoder, data):
    report = evaluate(load_base(decoder), trained.pack, str(data))
    assert report.base is None
    for name, value in report.pack.items():
        assert value == pytest.approx(trained.report[f"{name}_after"], abs=1e-6)

    pack = trained.pack.path
    code, out, _ = run("eval", pack, "--model", decoder, "--data", data, "--json")
    assert code == 0 and json.loads(out)["pack"] == report.pack


def test_head_scores_while_its_pack_is_active_alone(trained, decoder, data, tmp_path):
    other = train_pack(
        decoder, str(data), LORA, settings(head="lm", iters=1), tmp_path / "other"
    ).pack
    base = load_base(decoder)
    plain = base.rerank(*TEXTS)
    with base.applied(other):
        by_lm = base.rerank(*TEXTS)
        with base.applied(trained.pack):
            own = base.rerank(*TEXTS)
            assert np.array_equal(own, base.rerank(*TEXTS, instruction="Find the same question"))
            assert not np.array_equal(own, base.rerank(*TEXTS, instruction="Find another one"))
        assert np.array_equal(base.rerank(*TEXTS), by_lm)
    assert np.array_equal(base.rerank(*TEXTS), plain)
    assert ((own > 0) & (own < 1)).all() and not np.allclose(own, by_lm)


def test_resumed_run_equals_an_unbroken_one(trained, decoder, data, tmp_path):
    cut = interrupted(trained.pack.path, tmp_path / "cut")
    train = settings(rerank_instruction="Find the same question")
    again = train_pack(decoder, str(data), LORA, train, cut, resume=True)
    for name, tensor in again.pack.load_tensors().items():
        assert mx.array_equal(tensor, trained.pack.load_tensors()[name])


def test_it_learns_to_rank(decoder, tmp_path):
    rows = [
        {"query": "a", "positive": f"car {i}", "negatives": [f"stone {i}", f"lamp {i}"]}
        for i in range(40)
    ]
    folder = write_pairs(tmp_path / "rows", rows, 16)
    train = settings(iters=20, learning_rate=1e-2, loss="ranknet")
    report = train_pack(decoder, str(folder), LoRAConfig(rank=8), train, tmp_path / "pack").report
    assert report["mrr_at_10_after"] > max(0.8, report["mrr_at_10_before"])


@pytest.mark.parametrize("loss", slow_except(["listnet", "margin", "auto"], "margin"))
def test_each_loss_trains_on_labels_and_quantized_bases(decoder, tmp_path, loss):
    folder = write_pairs(tmp_path / "rows", all_labelled(), 16)
    train = settings(loss=loss, iters=1, quantize="nf4")
    result = train_pack(decoder, str(folder), LORA, train, tmp_path / "pack")
    assert result.report["loss"] == {"auto": "listnet"}.get(loss, loss)


def test_what_does_not_go_with_it_is_one_line(tiny, data, tmp_path, run):
    with raises("conflict", "method", "full"):
        settings(method="full")
    code, _, _ = run("train", "--data", data, "--task", "lm", "--head", "score")
    assert code == 2
    check(run.error, "conflict", "head", "--task classify", "rerank")
