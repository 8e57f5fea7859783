"""packs train --task rerank, by either head: losses, packs, evaluation, and what is rejected."""

import json
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import LoRAConfig, TrainConfig, evaluate, load_base, train_pack
from mlx_packs.adapters.spec import SCORE_WEIGHT
from mlx_packs.data.rankings import RerankPrompt
from mlx_packs.errors import PackError
from mlx_packs.evaluation.rankings import ndcg, reciprocal_rank
from mlx_packs.packs.manifest import check_manifest, replaced_of
from mlx_packs.runtime import mx
from tests.helpers.decoder_embedders import write_decoder, write_reranker
from tests.helpers.encoders import all_labelled, all_rankings, write_pairs
from tests.helpers.errors import raises
from tests.helpers.tasks import interrupted
from tests.helpers.variants import slow_except

LORA = LoRAConfig(rank=4)
OWN = {"rerank_instruction": "Find the same question"}
TEXTS = "how do i fix a car?", ["steps to repair the vehicle", "a stone"]


def settings(**changes) -> TrainConfig:
    plain = {"batch_size": 4, "iters": 2, "learning_rate": 1e-3, "save_every": 1, "val_batches": 1}
    return TrainConfig(task="rerank", **{**plain, **changes})


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("data") / "rankings", all_rankings(), 16)


@pytest.fixture(scope="module", params=slow_except(["lm", "score"], "lm"))
def head(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(head, tmp_path_factory) -> Path:
    """A base; the one of the new head has no token for yes."""
    write = write_reranker if head == "lm" else write_decoder
    return write(tmp_path_factory.mktemp(head) / "base")


@pytest.fixture(scope="module")
def trained(head, folder, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "rerank"
    changes = OWN if head == "lm" else OWN | {"head": head}
    return train_pack(folder, str(data), LORA, settings(**changes), out)


def test_report_and_manifest_say_what_was_done(head, trained):
    report, manifest = trained.report, trained.pack.manifest
    assert manifest["objective"] == {
        "task": "rerank",
        "loss": "infonce",
        "instruction": "Find the same question",
        "head": head,
    }
    check_manifest(manifest)
    assert replaced_of(manifest) == ({SCORE_WEIGHT: (1, 64)} if head == "score" else {})
    assert {"mrr_at_10_before_se", "ndcg_at_10_after", "queries_per_s"} <= set(report)
    assert report["plan_peak_gb"] > 0 and not trained.pack.is_reward_model


def test_evaluation_is_that_of_the_run(run, head, trained, folder, data):
    report = evaluate(load_base(folder), trained.pack, str(data))
    assert (report.base is None) is (head == "score")
    for when, metrics in (("before", report.base), ("after", report.pack)):
        for name, value in (metrics or {}).items():
            if not name.endswith("_se"):
                assert value == pytest.approx(trained.report[f"{name}_{when}"], abs=1e-6)

    pack = trained.pack.path
    code, out, _ = run("eval", pack, "--model", folder, "--data", data, "--json")
    assert code == 0 and json.loads(out)["pack"] == report.pack


@pytest.mark.slow
def test_pack_scores_by_its_own_instruction_while_it_is_active(trained, folder, data, tmp_path):
    train = settings(head="lm", iters=1, test_batches=1)
    other = train_pack(folder, str(data), LORA, train, tmp_path / "other").pack
    base = load_base(folder)
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


@pytest.mark.slow
def test_resumed_run_equals_an_unbroken_one(head, trained, folder, data, tmp_path):
    cut = interrupted(trained.pack.path, tmp_path / "cut")
    train = settings(head=head, **OWN)
    again = train_pack(folder, str(data), LORA, train, cut, resume=True)
    for name, tensor in again.pack.load_tensors().items():
        assert mx.array_equal(tensor, trained.pack.load_tensors()[name])


@pytest.mark.slow
def test_it_learns_to_rank(head, folder, tmp_path):
    rows = [
        {"query": "a", "positive": f"car {i}", "negatives": [f"stone {i}", f"lamp {i}"]}
        for i in range(40)
    ]
    data = write_pairs(tmp_path / "rows", rows, 16)
    train = settings(head=head, iters=20, learning_rate=1e-2, loss="ranknet")
    report = train_pack(folder, str(data), LoRAConfig(rank=8), train, tmp_path / "pack").report
    assert report["mrr_at_10_after"] > max(0.8, report["mrr_at_10_before"])


@pytest.mark.slow
@pytest.mark.parametrize("loss", slow_except(["listnet", "ranknet", "margin", "auto"], "auto"))
def test_each_loss_trains_on_labels_and_quantized_bases(head, folder, tmp_path, loss):
    data = write_pairs(tmp_path / "rows", all_labelled(), 16)
    train = settings(head=head, loss=loss, iters=1, quantize="nf4")
    result = train_pack(folder, str(data), LORA, train, tmp_path / "pack")
    assert result.report["loss"] == {"auto": "listnet"}.get(loss, loss)


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
    "a label too few": (LABELLED | {"labels": [1]}, ["2 documents", "1 labels"]),
    "a label below 0": (LABELLED | {"labels": [1, -1]}, ["'labels'"]),
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
