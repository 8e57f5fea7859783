"""packs train --task rerank: losses and metrics, packs, evaluation, and what is rejected."""

import json
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import LoRAConfig, TrainConfig, evaluate, load_base, train_pack
from mlx_packs.data.rankings import RerankPrompt
from mlx_packs.errors import PackError
from mlx_packs.evaluation.rankings import ndcg, reciprocal_rank
from mlx_packs.objectives.rerank import infonce_loss, listnet_loss, pairwise_loss
from mlx_packs.packs.manifest import check_manifest
from mlx_packs.runtime import mx
from tests.helpers.decoder_embedders import write_reranker
from tests.helpers.encoders import write_pairs
from tests.helpers.errors import raises
from tests.helpers.rankings import all_labelled, all_rankings
from tests.helpers.tasks import interrupted
from tests.helpers.variants import slow_except

LORA = LoRAConfig(rank=4)


def settings(**changes) -> TrainConfig:
    plain = {"batch_size": 4, "iters": 2, "learning_rate": 1e-3, "val_batches": 1}
    return TrainConfig(task="rerank", **{**plain, **changes})


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("data") / "rankings", all_rankings(), 16)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory) -> Path:
    return write_reranker(tmp_path_factory.mktemp("reranker") / "base")


@pytest.fixture(scope="module")
def trained(reranker, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "rerank"
    train = settings(rerank_instruction="Find the same question", save_every=1)
    return train_pack(reranker, str(data), LORA, train, out)


def test_report_and_manifest_say_what_was_done(trained):
    report, manifest = trained.report, trained.pack.manifest
    assert manifest["objective"] == {
        "task": "rerank",
        "loss": "infonce",
        "instruction": "Find the same question",
        "head": "lm",
    }
    check_manifest(manifest)
    assert {"mrr_at_10_before_se", "ndcg_at_10_after", "queries_per_s"} <= set(report)
    assert report["plan_peak_gb"] > 0


def test_evaluation_is_that_of_the_run(run, trained, reranker, data):
    report = evaluate(load_base(reranker), trained.pack, str(data))
    for when, metrics in (("before", report.base), ("after", report.pack)):
        for name, value in metrics.items():
            assert value == pytest.approx(trained.report[f"{name}_{when}"], abs=1e-6)

    pack = trained.pack.path
    code, out, _ = run("eval", pack, "--model", reranker, "--data", data, "--json")
    assert code == 0 and json.loads(out)["pack"] == report.pack


def test_pack_changes_scores_by_its_own_instruction(trained, reranker):
    base = load_base(reranker)
    texts = "how do i fix a car?", ["steps to repair the vehicle", "a stone"]
    plain = base.rerank(*texts)
    with base.applied(trained.pack):
        own = base.rerank(*texts)
        assert np.array_equal(own, base.rerank(*texts, instruction="Find the same question"))
        assert not np.array_equal(own, base.rerank(*texts, instruction="Find another one"))
    assert ((plain > 0) & (plain < 1)).all() and not np.allclose(own, plain)


@pytest.mark.slow
def test_resumed_run_equals_an_unbroken_one(trained, reranker, data, tmp_path):
    cut = interrupted(trained.pack.path, tmp_path / "cut")
    train = settings(rerank_instruction="Find the same question", save_every=1)
    again = train_pack(reranker, str(data), LORA, train, cut, resume=True)
    for name, tensor in again.pack.load_tensors().items():
        assert mx.array_equal(tensor, trained.pack.load_tensors()[name])


@pytest.mark.slow
def test_it_learns_to_rank(reranker, tmp_path):
    rows = [
        {"query": "a", "positive": f"car {i}", "negatives": [f"stone {i}", f"lamp {i}"]}
        for i in range(40)
    ]
    folder = write_pairs(tmp_path / "rows", rows, 16)
    train = settings(iters=20, learning_rate=1e-2, loss="ranknet")
    report = train_pack(reranker, str(folder), LoRAConfig(rank=8), train, tmp_path / "pack").report
    assert report["mrr_at_10_after"] > max(0.8, report["mrr_at_10_before"])


@pytest.mark.parametrize("loss", slow_except(["listnet", "ranknet", "margin", "auto"], "auto"))
def test_each_loss_trains_on_labels(reranker, tmp_path, loss):
    folder = write_pairs(tmp_path / "rows", all_labelled(), 16)
    train = settings(loss=loss, iters=1, quantize="nf4")
    result = train_pack(reranker, str(folder), LORA, train, tmp_path / "pack")
    assert result.report["loss"] == {"auto": "listnet"}.get(loss, loss)


SCORES = np.array([[0.5, -1.0, 2.0, 9.0], [1.0, 0.0, -2.0, 0.3]], np.float32)
LABELS = np.array([[1, 0, 0, -1], [2, 1, 0, 2]], np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum()


def test_losses_are_their_formulas():
    scores, labels = mx.array(SCORES), mx.array(LABELS)
    first, second = SCORES[0, :3], SCORES[1]
    infonce = [
        -np.log(softmax(first)[0]),
        -np.mean([np.log(softmax(second[[best, 1, 2]])[0]) for best in (0, 3)]),
    ]
    np.testing.assert_allclose(np.array(infonce_loss(scores, labels)), infonce, rtol=1e-5)

    listnet = [
        -(softmax(wanted) * np.log(softmax(own))).sum()
        for wanted, own in ((LABELS[0, :3], first), (LABELS[1], second))
    ]
    np.testing.assert_allclose(np.array(listnet_loss(scores, labels)), listnet, rtol=1e-5)

    pairs = [[(0, 1), (0, 2)], [(0, 1), (0, 2), (1, 2), (3, 1), (3, 2)]]
    hinge = [
        np.mean([max(0, 1 - (own[i] - own[j])) for i, j in ordered])
        for own, ordered in zip(SCORES, pairs, strict=True)
    ]
    ours = pairwise_loss(scores, labels, lambda d: mx.maximum(1 - d, 0))
    np.testing.assert_allclose(np.array(ours), hinge, rtol=1e-5)


def test_metrics_favour_no_order_of_a_row():
    labels = np.array([1.0, 0, 0], np.float32)
    assert reciprocal_rank(np.zeros(3), labels) == pytest.approx(1 / 3)
    assert reciprocal_rank(np.array([1.0, 2, 0]), labels) == 0.5
    assert ndcg(np.array([1.0, 2, 0]), labels) == pytest.approx(1 / np.log2(3))
    assert ndcg(np.array([3.0, 2, 1]), np.array([3.0, 2, 1])) == 1
    assert reciprocal_rank(-np.arange(12.0), np.eye(12)[11]) == 0


def test_long_document_is_cut_and_the_question_stays(tiny):
    short, is_cut = RerankPrompt(tiny.tokenizer, "I", 400).tokens("q", "stone")
    assert not is_cut
    limit = len(short) + 20
    tokens, is_cut = RerankPrompt(tiny.tokenizer, "I", limit).tokens("q", "stone " * 200)
    assert is_cut and len(tokens) == limit and tokens[-3:].tolist() == short[-3:].tolist()


QUERY = {"query": "a", "positive": "b", "negatives": ["c"]}
LABELLED = {"query": "a", "documents": ["b", "c"], "labels": [1, 0]}
BAD = {
    "no documents": (QUERY | {"negatives": []}, ["'negatives'", "empty"]),
    "an empty query": (QUERY | {"query": " "}, ["empty"]),
    "an empty document": (QUERY | {"negatives": [""]}, ["empty"]),
    "a text for documents": (QUERY | {"negatives": "c"}, ["'negatives'", "list"]),
    "equal labels": (LABELLED | {"labels": [1, 1]}, ["labels are equal"]),
    "a label too few": (LABELLED | {"labels": [1]}, ["2 documents", "1 labels"]),
    "a label below 0": (LABELLED | {"labels": [1, -1]}, ["'labels'"]),
    "no label": (LABELLED | {"labels": ["high", "low"]}, ["'labels'"]),
    "a pair": ({"anchor": "a", "positive": "b"}, ["{query, positive, negatives}"]),
}


@pytest.mark.parametrize(("row", "names"), BAD.values(), ids=BAD)
def test_rows_that_cannot_be_used_are_named(tiny, tmp_path, row, names):
    folder = write_pairs(tmp_path / "rows", [row] * 14, 10)
    with raises("data", None, "train.jsonl:1", *names):
        train_pack(tiny, str(folder), LORA, settings(), tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


def test_rerank_names_what_is_no_text(tiny):
    for texts, name in ((("a", []), "documents"), (("a", ["b", ""]), r"documents\[1\]")):
        with pytest.raises(PackError, match=name):
            tiny.rerank(*texts)
    with pytest.raises(PackError, match="query"):
        tiny.rerank("", ["b"])
