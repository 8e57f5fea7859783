"""packs merge of decoders that embed or rerank: compared by vectors and scores, and what passes."""

import json
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import LoRAConfig, TrainConfig, load_base, merge_pack, train_pack
from mlx_packs.convert.task_fidelity import score_divergence
from mlx_packs.packs.pack import Pack
from tests.helpers.decoder_embedders import write_decoder
from tests.helpers.encoders import all_pairs, all_rankings, write_pairs
from tests.helpers.variants import slow_except

PLAIN = {"iters": 4, "batch_size": 4, "learning_rate": 1e-2, "val_batches": 0}
KINDS = {
    "embedding": TrainConfig(task="embedding", **PLAIN),
    "lm head": TrainConfig(task="rerank", **PLAIN),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("decoder") / "base", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    rankings = str(write_pairs(folder / "rankings", all_rankings(2)[:48], 16))
    pairs = str(write_pairs(folder / "pairs", all_pairs()[:48], 16))
    return {"embedding": pairs, "lm head": rankings}


@pytest.fixture(scope="module")
def packs(folder, data, tmp_path_factory) -> dict[str, Pack]:
    out = tmp_path_factory.mktemp("packs")
    return {
        kind: train_pack(folder, data[kind], LoRAConfig(rank=4), train, out / kind).pack
        for kind, train in KINDS.items()
    }


@pytest.mark.parametrize("kind", slow_except(KINDS, "embedding"))
def test_merge_reports_the_drift_of_what_the_pack_is_for(packs, folder, data, tmp_path, run, kind):
    arguments = [packs[kind].path, "--model", folder, "--out", tmp_path / "m", "--rows", "6"]
    code, out, _ = run("merge", *arguments, "--data", data[kind], "--json")
    report = json.loads(out)
    counted = "texts" if kind == "embedding" else "documents"
    assert code == 0 and report["passed"] and "kl_mean" not in report
    assert report[counted] == (12 if kind == "embedding" else 18)
    assert report["drift_mean"] < 1e-6 < 1e-4 < report["drift_of_pack"]

    code, out, _ = run("merge", *arguments, "--overwrite")  # on texts of chats
    unit = "texts" if kind == "embedding" else "nats per document"
    assert code == 0 and "drift" in out and unit in out


@pytest.mark.parametrize("kind", slow_except(KINDS, "embedding"))
def test_merge_that_moves_results_is_rejected(packs, folder, data, tmp_path, kind):
    settings = {"requantize": "affine4", "data": data[kind], "rows": 4}
    report = merge_pack(packs[kind], folder, tmp_path / "merged", max_drift=1e-7, **settings)
    assert not report["passed"] and report["tried"]["affine4"] > 1e-7
    assert report["passes"] == "none" and not (tmp_path / "merged").exists()


def test_merged_embedder_has_the_vectors_of_the_pack(packs, folder, tmp_path):
    texts = ["how do i fix a car?", "a stone"]
    base = load_base(folder)
    with base.applied(packs["embedding"]):
        expected = base.encode(texts)
    merge_pack(packs["embedding"], folder, tmp_path / "merged")
    assert np.abs(load_base(tmp_path / "merged").encode(texts) - expected).max() < 1e-5


def test_divergence_of_scores_is_its_formula():
    one, other = np.array([0.3, -2.0, 40.0]), np.array([1.0, -2.0, 39.0])
    p, q = (1 / (1 + np.exp(-x[:1])) for x in (one, other))
    expected = (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).item()
    assert score_divergence(one[:1], other[:1]) == pytest.approx(expected)
    assert score_divergence(one[1:2], other[1:2]) == 0
    assert 0 <= score_divergence(one[2:], other[2:]) < 1e-16
