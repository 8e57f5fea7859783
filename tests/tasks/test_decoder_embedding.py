"""packs train --task embedding on a decoder: prompts, packs, evaluation, and what is rejected."""

import json
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import LoRAConfig, TrainConfig, load_base, train_pack
from mlx_packs.bases.encoder import pooled
from mlx_packs.bases.sentence_config import SentenceConfig
from mlx_packs.errors import PackError
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.read import read_headers
from mlx_packs.packs.manifest import check_manifest
from mlx_packs.runtime import mx
from tests.helpers.decoder_embedders import PROMPT, write_decoder, write_embedder
from tests.helpers.encoders import all_pairs, all_scored, all_triplets, write_pairs
from tests.helpers.errors import check, raises
from tests.helpers.memory import active_bytes
from tests.helpers.models import base_of

LORA = LoRAConfig(rank=4)


def settings(**changes) -> TrainConfig:
    plain = {"batch_size": 8, "iters": 2, "learning_rate": 1e-3}
    return TrainConfig(task="embedding", **{**plain, **changes})


@pytest.fixture(scope="module")
def pair_data(tmp_path_factory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs", all_pairs())


@pytest.fixture(scope="module")
def embedder(tmp_path_factory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("embedder") / "base")


@pytest.fixture(scope="module")
def run_of_pairs(embedder, pair_data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "pairs"
    train = settings(iters=40, batch_size=16, learning_rate=1e-2)
    held = active_bytes() / 1e9  # by earlier tests
    run = train_pack(embedder, str(pair_data), LoRAConfig(rank=16), train, out)
    run.report["own_peak_gb"] = run.report["peak_gb"] - held
    return run


def test_it_learns_what_belongs_together(run_of_pairs):
    report = run_of_pairs.report
    assert report["mrr_at_10_after"] > report["mrr_at_10_before"] + 0.2
    assert 0.5 * report["own_peak_gb"] < report["plan_peak_gb"] < 2 * report["own_peak_gb"]


def test_prompt_goes_before_anchors_alone_and_into_the_pack(run_of_pairs, embedder):
    objective = run_of_pairs.pack.manifest["objective"]
    assert objective["query_prompt"] == PROMPT and objective["pooling"] == "lasttoken"
    check_manifest(run_of_pairs.pack.manifest)

    base = load_base(embedder)
    texts = [row["anchor"] for row in all_pairs()[-22:]]
    with base.applied(run_of_pairs.pack):
        anchors = base.encode(texts, prompt_name="query")
        positives = base.encode([row["positive"] for row in all_pairs()[-22:]])
    ranks = (anchors @ positives.T > np.diag(anchors @ positives.T)[:, None]).sum(axis=1)
    reciprocal = np.where(ranks < 10, 1 / (ranks + 1), 0).mean()
    assert reciprocal == pytest.approx(run_of_pairs.report["mrr_at_10_after"], abs=1e-6)


def test_plain_decoder_gets_an_end_token_and_learns_quantized(tmp_path, pair_data):
    folder = write_decoder(tmp_path / "base")
    base = load_base(folder)
    tokens = base.embedder.tokenizer("a car")["input_ids"]
    assert tokens == [*base.tokenizer.encode("a car"), base.tokenizer.eos_token_id]
    assert base.embedder.tokenizer("car " * 99, truncation=True, max_length=9)["input_ids"][-1] == (
        base.tokenizer.eos_token_id
    )
    assert np.linalg.norm(base.encode(["a car"])) == pytest.approx(1, abs=1e-5)

    train = settings(quantize="nf4", query_prompt="Q: ")
    pack = train_pack(folder, str(pair_data), LORA, train, tmp_path / "pack").pack
    assert pack.manifest["objective"]["query_prompt"] == "Q: "
    assert pack.manifest["base"]["quantization"]


@pytest.mark.parametrize("rows", [all_scored(), all_triplets()], ids=["scored", "triplets"])
def test_rows_of_each_format_train(embedder, tmp_path, rows):
    data = write_pairs(tmp_path / "rows", rows)
    result = train_pack(embedder, str(data), LORA, settings(), tmp_path / "pack")
    has_anchors = "anchor" in rows[0]
    assert ("query_prompt" in result.pack.manifest["objective"]) is has_anchors


def test_padding_changes_no_vector(embedder):
    base = load_base(embedder)
    texts = ["a", "how do i fix a car?", "steps to repair the vehicle " * 5]
    together = base.encode(texts)
    alone = np.concatenate([base.encode([text]) for text in texts])
    assert np.abs(together - alone).max() < 1e-5


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "lasttoken"])
def test_pooling_reads_no_padding(pooling):
    states = mx.random.normal((2, 5, 3))
    ours = np.array(pooled(states, mx.array([5, 3]), SentenceConfig(pooling)))
    x = np.array(states)
    expected = {
        "mean": [x[0].mean(0), x[1, :3].mean(0)],
        "cls": x[:, 0],
        "max": [x[0].max(0), x[1, :3].max(0)],
        "lasttoken": [x[0, 4], x[1, 2]],
    }
    np.testing.assert_allclose(ours, np.array(expected[pooling]), rtol=1e-5)


def test_plan_counts_a_sequence_for_each_text(embedder):
    headers = read_headers(embedder)
    two, three = (estimate(headers, LORA, settings(), [(64, n)]) for n in (2, 3))
    assert 1.2 < three.parts()["activations"] / two.parts()["activations"] < 1.6


def test_tokenizer_without_an_end_token_is_rejected(tmp_path, run, pair_data):
    folder = write_decoder(tmp_path / "base")
    file = folder / "tokenizer_config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k != "eos_token"}
    file.write_text(json.dumps(config))

    arguments = ("--task", "embedding", "--model", folder, "--data", pair_data)
    assert run("train", *arguments, "--out", tmp_path / "pack")[0] == 2
    check(run.error, "unsupported", None, str(folder), "eos_token")
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize(
    ("rows", "changes", "code", "names"),
    [
        ([{"anchor": " ", "positive": "b"}] * 14, {}, "data", ["train.jsonl:1", "'anchor'"]),
        ([{"anchor": "a", "positive": ""}] * 14, {}, "data", ["train.jsonl:1", "'positive'"]),
        (all_scored(), {"query_prompt": "Q: "}, "conflict", ["train.jsonl:1", "scored pairs"]),
    ],
    ids=["no anchor", "no positive", "no query"],
)
def test_rows_that_cannot_be_used_are_named(embedder, tmp_path, rows, changes, code, names):
    data = write_pairs(tmp_path / "rows", rows, 10)
    with raises(code, None, *names):
        train_pack(embedder, str(data), LORA, settings(**changes), tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


def test_base_that_scales_its_logits_is_rejected():
    with pytest.raises(PackError, match="embedding: gemma2"):
        from mlx_packs.objectives.embedding import DecoderVectors

        DecoderVectors(base_of("gemma2"))


def test_prompt_that_the_base_lacks_is_named(embedder):
    base = load_base(embedder)
    with pytest.raises(PackError, match="'passage'.*query, document"):
        base.encode(["a"], prompt_name="passage")
