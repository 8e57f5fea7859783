"""Rerankers of random weights on torch: CrossEncoders of sentence-transformers, score heads of PEFT."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import LoRAConfig, Pack, TrainConfig, import_adapter, load_base, train_pack
from mlx_packs.convert.interop import export_pack
from mlx_packs.convert.merge import merge_pack
from mlx_packs.data.formats import Row
from mlx_packs.data.rankings import (
    INSTRUCTION,
    RankingCollate,
    RerankPrompt,
    encode_rankings,
)
from mlx_packs.data.texts import TextGroups, texts_once
from mlx_packs.evaluation.rankings import score_rankings
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.objectives.reader import Reader, ranking_reader
from mlx_packs.objectives.text_loss import TextLoss, infonce_loss, ranking_losses
from mlx_packs.runtime import mx
from tests.helpers.decoder_embedders import write_decoder, write_reranker
from tests.helpers.encoders import all_labelled, all_rankings, write_pairs

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

QUERY = "how do i fix a car?"
DOCUMENTS = ["steps to repair the vehicle", "a", "please move a stone " * 20, "Xyzzy, the STORE!"]
PAIRS = [(QUERY, document) for document in DOCUMENTS]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory) -> Path:
    return write_reranker(tmp_path_factory.mktemp("reranker") / "base")


@pytest.fixture(scope="module")
def torch_model(reranker):
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(reranker), device="cpu")


def test_scores_and_ranks_are_those_of_sentence_transformers(reranker, torch_model):
    import torch

    base = load_base(reranker)
    ours = base.rerank(QUERY, DOCUMENTS, batch_size=3)
    theirs = torch_model.predict(PAIRS, activation_fn=torch.nn.Sigmoid(), batch_size=2)
    assert np.abs(ours - theirs).max() < 1e-5 and np.ptp(theirs) > 1e-2

    logits = torch_model.predict(PAIRS, activation_fn=torch.nn.Identity())
    prompt = RerankPrompt(base.tokenizer, INSTRUCTION, 512)
    rows = [prompt.tokens(*pair)[0] for pair in PAIRS]
    assert np.abs(ranking_reader(base, None).of_rows(rows, 2) - logits).max() < 1e-5

    ranked = [each["corpus_id"] for each in torch_model.rank(QUERY, DOCUMENTS)]
    assert ranked == np.argsort(-ours).tolist()


def encoded(reranker: Path, rows: list[dict]) -> tuple[Reader, TextGroups]:
    base = load_base(reranker)
    prompt = RerankPrompt(base.tokenizer, INSTRUCTION, 512)
    rows = [Row(f"d.jsonl:{i + 1}", row) for i, row in enumerate(rows)]
    return ranking_reader(base, None), encode_rankings(rows, prompt)


def loss_of(reranker: Path, rows: list[dict], name: str) -> float:
    reader, rankings = encoded(reranker, rows)
    batch = RankingCollate(len(rows), 512)(rankings, np.arange(len(rows)))
    objective = TextLoss(reader, partial(ranking_losses, loss=name, margin=1.0))
    total, count = objective.loss(arrays_of(batch))
    return total.item() / count.item()


@pytest.mark.parametrize(
    ("loss", "name", "options"),
    [("listnet", "ListNetLoss", {}), ("ranknet", "RankNetLoss", {"reduction_log": "natural"})],
)
def test_a_list_loss_is_that_of_sentence_transformers(reranker, torch_model, loss, name, options):
    import torch
    from sentence_transformers.cross_encoder import losses

    rows = all_labelled()[:5]
    columns = [[row["query"] for row in rows], [row["documents"] for row in rows]]
    labels = [torch.tensor(row["labels"]).float() for row in rows]
    theirs = getattr(losses, name)(torch_model, **options)(columns, labels).item()
    assert loss_of(reranker, rows, loss) == pytest.approx(theirs, abs=1e-5)


def test_infonce_is_that_of_sentence_transformers(reranker, torch_model):
    from sentence_transformers.cross_encoder.losses import MultipleNegativesRankingLoss
    from torch import nn

    rows = all_rankings(2)[:5]
    # each alone, since theirs takes the documents of other queries as negatives, too
    columns = [
        [[row["query"]], [row["positive"]], *([n] for n in row["negatives"])] for row in rows
    ]
    loss = MultipleNegativesRankingLoss(
        torch_model, num_negatives=None, scale=1, activation_fn=nn.Identity()
    )
    theirs = np.mean([loss(each, None).item() for each in columns])
    assert loss_of(reranker, rows, "infonce") == pytest.approx(theirs, abs=1e-5)


def test_metrics_are_those_of_sentence_transformers(reranker, torch_model):
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    rows = all_rankings(5)[:12]
    samples = [
        {"query": row["query"], "positive": [row["positive"]], "negative": row["negatives"]}
        for row in rows
    ]
    theirs = CrossEncoderRerankingEvaluator(samples, at_k=10, show_progress_bar=False)(torch_model)
    reader, rankings = encoded(reranker, rows)
    batches = texts_once(rankings, RankingCollate(2, 512), np.arange(len(rankings))).once()
    ours = score_rankings(TextLoss(reader, infonce_loss), batches).metrics
    assert ours["mrr_at_10"] == pytest.approx(theirs["mrr@10"], abs=1e-6)
    assert ours["ndcg_at_10"] == pytest.approx(theirs["ndcg@10"], abs=1e-6)
    assert 0 < ours["mrr_at_10_se"] < 0.2


def test_merge_opens_as_a_cross_encoder(tmp_path):
    from sentence_transformers import CrossEncoder

    folder = write_decoder(tmp_path / "base")  # whose tokenizer has no token for yes
    data = write_pairs(tmp_path / "rankings", all_rankings(1))
    train = TrainConfig(
        task="rerank", iters=4, learning_rate=1e-2, rerank_instruction='Find "the" same'
    )
    pack = train_pack(folder, str(data), LoRAConfig(rank=4), train, tmp_path / "pack").pack
    base = load_base(folder)
    with base.applied(pack):
        expected = base.rerank(QUERY, DOCUMENTS)

    assert merge_pack(pack, folder, tmp_path / "merged")["passed"]
    model = CrossEncoder(str(tmp_path / "merged"), device="cpu")
    theirs = model.predict(PAIRS)
    assert np.abs(theirs - expected).max() < 1e-5 and np.ptp(theirs) > 1e-3
    again = load_base(tmp_path / "merged")
    prompt = [{"role": "user", "content": "a"}]
    assert again.tokenizer.apply_chat_template(prompt) == base.tokenizer.apply_chat_template(prompt)


TIED = {"tied": {}, "untied": {"tie_word_embeddings": False}}


@pytest.fixture(scope="module", params=TIED)
def trained(request, tmp_path_factory):
    """A base and a pack of it that has learned something."""
    folder = tmp_path_factory.mktemp("rerank")
    base = write_decoder(folder / "base", **TIED[request.param])
    data = write_pairs(folder / "rankings", all_rankings(1))
    train = TrainConfig(
        task="rerank", head="score", iters=4, learning_rate=1e-2, rerank_instruction='Find "the"'
    )
    return base, train_pack(base, str(data), LoRAConfig(rank=4), train, folder / "pack").pack


def scores_of(folder: Path, pack: Pack) -> np.ndarray:
    base = load_base(folder)
    with base.applied(pack):
        return base.rerank(QUERY, DOCUMENTS, batch_size=3)


def peft_model(folder: Path, adapter: Path):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    base.config.pad_token_id = 4089
    return PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()


def test_peft_scores_as_the_pack_and_it_comes_back(trained, tmp_path):
    import torch

    folder, pack = trained
    report = export_pack(pack, "peft", tmp_path / "adapter")
    assert "num_labels=1" in " ".join(report["notes"])
    model = peft_model(folder, tmp_path / "adapter")

    tokenizer = load_base(folder).tokenizer
    prompt = RerankPrompt(tokenizer, 'Find "the"', 512)
    rows = [torch.tensor(prompt.tokens(*pair)[0])[None].long() for pair in PAIRS]
    with torch.no_grad():
        logits = np.array([model(row).logits.item() for row in rows])
    assert np.abs(1 / (1 + np.exp(-logits)) - scores_of(folder, pack)).max() < 1e-5

    import_adapter(tmp_path / "adapter", tmp_path / "again", base=folder)
    again = Pack.open(tmp_path / "again")
    assert again.manifest["objective"] == pack.manifest["objective"]
    for name, tensor in again.load_tensors().items():
        assert mx.array_equal(tensor, pack.load_tensors()[name])


def test_adapter_that_peft_changed_stays_a_reranker(trained, tmp_path):
    folder, pack = trained
    export_pack(pack, "peft", tmp_path / "adapter")
    model = peft_model(folder, tmp_path / "adapter")
    names = [name for name, _ in model.named_parameters()]
    head = next(name for name in names if "score" in name and "default" in name)
    model.get_parameter(head).data *= 2
    model.save_pretrained(tmp_path / "adapter")

    import_adapter(tmp_path / "adapter", tmp_path / "again", base=folder)
    again = Pack.open(tmp_path / "again")
    assert again.manifest["objective"]["task"] == "rerank"
    assert not np.allclose(scores_of(folder, again), scores_of(folder, pack))
