"""POST /v1/rerank with packs that have a head of their own, beside packs of the LM head."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import LoRAConfig, TrainConfig, load_base, train_pack
from mlx_packs.objectives.reader import rerank_rows
from mlx_packs.packs.pack import Pack
from mlx_packs.serving.embedding import EmbeddingWorker, Reranker
from tests.helpers.decoder_embedders import write_reranker
from tests.helpers.encoders import all_pairs, all_rankings, write_pairs
from tests.helpers.errors import raises

QUERY = "how do i fix a car?"
DOCUMENTS = ["steps to repair the vehicle", "a stone", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_reranker(tmp_path_factory.mktemp("reranker") / "base")


@pytest.fixture(scope="module")
def packs(folder, tmp_path_factory) -> dict[str, Pack]:
    """Two packs with heads of their own, one of the LM head, and an embedder."""
    out = tmp_path_factory.mktemp("packs")
    rankings = str(write_pairs(out / "rankings", all_rankings(1)[:24], 8))
    pairs = str(write_pairs(out / "pairs", all_pairs()[:24], 8))
    plain = {"iters": 1, "batch_size": 2, "learning_rate": 1e-2, "val_batches": 0}
    lora = LoRAConfig(rank=2)

    runs = {}
    for name, head in (("one", "score"), ("other", "score"), ("lm", "lm")):
        seed = 1 + (name == "other")
        train = TrainConfig(task="rerank", head=head, seed=seed, **plain)
        runs[name] = train_pack(folder, rankings, lora, train, out / name).pack
    train = TrainConfig(task="embedding", **plain)
    runs["vectors"] = train_pack(folder, pairs, lora, train, out / "vectors").pack
    return runs


@pytest.fixture
def worker(folder):
    worker = Reranker(load_base(folder), 16, 64)
    worker.start()
    yield worker
    worker.close(0.0)


def test_each_document_is_scored_by_the_head_of_its_pack(worker, folder, packs):
    base = load_base(folder)
    rows = rerank_rows(base, QUERY, DOCUMENTS, None, base.text_limit)
    names = ["one", "base", "other", "lm"]
    for name in names:
        if name != "base":
            worker.call(lambda name=name: worker.registry.add(name, packs[name])).result()

    ready = worker.call(lambda: [worker.submit(name, rows) for name in names])  # of one batch
    scores = [future.result(60) for future in ready.result()]

    for name, own in zip(names, scores, strict=True):
        with nullcontext() if name == "base" else base.applied(packs[name]):
            expected = base.rerank(QUERY, DOCUMENTS)
        assert np.abs(1 / (1 + np.exp(-own)) - expected).max() < 2e-5
    assert len({own.tobytes() for own in scores}) == len(names)


def test_packs_of_another_task_are_rejected(worker, folder, packs):
    with raises("unsupported", None, "embedder", "packs eval"):
        worker.call(lambda: worker.registry.add("v", packs["vectors"])).result()

    embedder = EmbeddingWorker(load_base(folder), 4, 64)
    with raises("unsupported", None, "reranker", "/v1/rerank"):
        embedder.registry.add("one", packs["one"])
