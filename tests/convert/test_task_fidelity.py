"""packs merge of decoders that embed or rerank: compared by vectors and scores, and what passes."""

import json

import numpy as np
import pytest

from mlx_packs import LoRAConfig, TrainConfig, train_pack
from mlx_packs.convert.task_fidelity import score_divergence
from tests.helpers.decoder_embedders import write_decoder
from tests.helpers.encoders import all_pairs, all_rankings, write_pairs
from tests.helpers.variants import slow_except


@pytest.mark.slow
@pytest.mark.parametrize("task", slow_except(["embedding", "rerank"], "embedding"))
def test_merge_reports_the_drift_of_what_the_pack_is_for(tmp_path, run, task):
    base = write_decoder(tmp_path / "base", tie_word_embeddings=False)
    rows = all_pairs() if task == "embedding" else all_rankings(2)
    data = str(write_pairs(tmp_path / "rows", rows[:48], 16))
    train = TrainConfig(task=task, iters=4, batch_size=4, learning_rate=1e-2, val_batches=0)
    pack = train_pack(base, data, LoRAConfig(rank=4), train, tmp_path / "pack").pack

    arguments = [pack.path, "--model", base, "--out", tmp_path / "m", "--rows", "6"]
    code, out, _ = run("merge", *arguments, "--data", data, "--json")
    report = json.loads(out)
    counted, count = ("texts", 12) if task == "embedding" else ("documents", 18)
    assert code == 0 and report["passed"] and "kl_mean" not in report
    assert report[counted] == count
    measure = "1 - cosine" if task == "embedding" else "KL in nats per document"
    assert report["verified"]["measure"] == measure
    assert report["drift_mean"] < 1e-6 < 1e-4 < report["drift_of_pack"]

    code, out, _ = run("merge", *arguments, "--overwrite")  # on texts of chats
    unit = "texts" if task == "embedding" else "nats per document"
    assert code == 0 and "drift" in out and unit in out


def test_divergence_of_scores_is_its_formula():
    one, other = np.array([0.3, -2.0, 40.0]), np.array([1.0, -2.0, 39.0])
    p, q = (1 / (1 + np.exp(-x[:1])) for x in (one, other))
    expected = (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).item()
    assert score_divergence(one[:1], other[:1]) == pytest.approx(expected)
    assert score_divergence(one[1:2], other[1:2]) == 0
    assert 0 <= score_divergence(one[2:], other[2:]) < 1e-16
