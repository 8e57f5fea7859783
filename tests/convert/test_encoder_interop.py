"""Encoders against sentence-transformers, transformers and PEFT on torch: a MiniLM and a ModernBERT of
random weights, their embeddings, losses and gradients, metrics, exports and merges."""

import json
from pathlib import Path

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, Pack, TrainConfig, load_base, train_pack
from mlx_packs.convert.interop import export_pack, import_adapter
from mlx_packs.convert.merge import merge_pack
from mlx_packs.data.formats import Row
from mlx_packs.data.pairs import PairCollate, encode_pairs
from mlx_packs.evaluation.embeddings import score_pairs
from mlx_packs.objectives.embedding import EmbeddingObjective
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.runtime import mx
from tests.convert.conftest import adapted, saved_by_torch, torch_adapted, torch_model
from tests.helpers.encoders import (
    MINILM,
    VOCABULARY,
    all_pairs,
    all_scored,
    all_triplets,
    write_pairs,
)

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

TEXTS = [
    "how do i fix a car?",
    "",
    "steps to repair the vehicle",
    "Xyzzy, the STORE!",
    "please tell me the ways to move a stone " * 60,
    "a",
]


def make_minilm(folder: Path, pooling: str = "mean", normalize: bool = True, **changes) -> Path:
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = {k: v for k, v in MINILM.items() if k not in ("model_type", "architectures")} | changes
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    result = BertModel(BertConfig(**config, **no_dropout, initializer_range=0.06))
    for name, parameter in result.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.05)
    return saved_by_torch(result, folder, pooling, normalize)


def make_modern_bert(folder: Path, pooling: str = "mean", **changes) -> Path:
    import torch
    from transformers import ModernBertConfig, ModernBertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    tokens |= {"cls_token_id": 2, "sep_token_id": 3}
    config = ModernBertConfig(
        vocab_size=len(VOCABULARY),
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.3,
        **({"local_attention": 8} | sizes | tokens | changes),
    )
    return saved_by_torch(ModernBertModel(config), folder, pooling)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory) -> Path:
    return make_minilm(tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="module")
def modern(tmp_path_factory) -> Path:
    return make_modern_bert(tmp_path_factory.mktemp("modern"))


@pytest.fixture(scope="module", params=["minilm", "modern"])
def trained(request, tmp_path_factory) -> tuple[Path, Pack]:
    """An encoder and a pack of it, trained for a few steps."""
    encoder = request.getfixturevalue(request.param)
    folder = tmp_path_factory.mktemp("trained")
    data = write_pairs(folder / "pairs", all_pairs())
    train = TrainConfig(task="embedding", batch_size=8, iters=4, learning_rate=1e-3)
    return encoder, train_pack(encoder, str(data), LoRAConfig(rank=4), train, folder / "p").pack


LAYERS = ["full_attention"] + ["sliding_attention"] * 3
BIASES = {"attention_bias": True, "mlp_bias": True, "norm_bias": True}


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (make_minilm, {}),
        (make_minilm, {"pooling": "cls"}),
        (make_minilm, {"pooling": "max", "normalize": False}),
        (make_minilm, {"hidden_act": "gelu_new"}),
        (make_modern_bert, {"pooling": "cls"}),
        (make_modern_bert, {"local_attention": 4, "layer_types": LAYERS}),
        (make_modern_bert, BIASES),
    ],
)
def test_embeddings_are_those_of_sentence_transformers(tmp_path, make, changes):
    folder = make(tmp_path, **changes)
    theirs = torch_model(folder).encode(TEXTS, batch_size=2)
    ours = load_base(folder).encode(TEXTS, batch_size=4)
    assert np.abs(ours - theirs).max() < 1e-5
    assert np.abs(theirs - theirs[:1]).max() > 1e-2  # they are not all alike


SCORED = [{**row, "score": i % 5 / 4} for i, row in enumerate(all_scored()[:40])]
LOSSES = {  # rows, and the loss of sentence-transformers
    "cosine": (all_scored(), "CosineSimilarityLoss", {}),
    "cosent": (SCORED, "CoSENTLoss", {}),
    "mnrl": (all_pairs(), "MultipleNegativesRankingLoss", {}),
    "mnrl with negatives": (all_triplets(), "MultipleNegativesRankingLoss", {}),
    "cached-mnrl": (all_triplets(), "CachedMultipleNegativesRankingLoss", {"mini_batch_size": 5}),
    "triplet": (all_triplets(), "TripletLoss", {}),
    "triplet cosine": (all_triplets(), "TripletLoss", {"triplet_margin": 0.5}),
    "triplet manhattan": (all_triplets(), "TripletLoss", {}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_has_the_loss_and_gradients_of_sentence_transformers(minilm, name):
    import torch
    from sentence_transformers import losses

    base, attached, tensors = adapted(minilm)
    model, parameters = torch_adapted(minilm, tensors)
    rows, class_name, options = LOSSES[name]
    rows = rows[:12]
    kind, _, distance = name.partition(" ")
    settings = {}
    if kind == "triplet" and distance:
        settings = {"triplet_distance": distance, **options}
        metric = getattr(losses.TripletDistanceMetric, distance.upper())
        options = {**options, "distance_metric": metric}

    columns = [key for key in rows[0] if key != "score"]
    model.train()
    features = [model.preprocess([row[key] for row in rows]) for key in columns]
    labels = torch.tensor([row.get("score", 0.0) for row in rows])
    theirs = getattr(losses, class_name)(model, **options)(features, labels)
    theirs.backward()

    train = TrainConfig(task="embedding", mini_batch_size=5, **settings)
    pairs = encode_pairs([Row("test", row) for row in rows], base.tokenizer, 128)
    batch = PairCollate(len(rows) + 3, 128)(pairs, range(len(rows)))  # three rows of padding
    objective = EmbeddingObjective(base.model, kind, train)
    base.model.train()
    (total, _), gradients = nn.value_and_grad(base.model, objective.loss)(arrays_of(batch))
    assert total.item() / len(rows) == pytest.approx(theirs.item(), rel=1e-4)

    # gradients by name on disk: those of the adapters stand where the adapters do
    own = attached.tensors()
    base.model.update(gradients)
    result = {name: np.array(g).T / len(rows) for name, g in attached.tensors().items()}
    attached.load(own, "test")
    worst = 0.0
    for name, parameter in parameters.items():
        wanted = parameter.grad.numpy()
        worst = max(worst, np.abs(result[name] - wanted).max() / (np.abs(wanted).max() + 1e-12))
    assert worst < 1e-4
    assert len(dict(tree_flatten(gradients))) == len(parameters)
    attached.detach()


def test_states_and_gradients_of_modern_bert_are_those_of_transformers_with_peft(modern):
    import torch

    base, attached, tensors = adapted(modern)
    model, theirs = torch_adapted(modern, tensors)
    rows = base.tokenizer(TEXTS[::4], padding=True)
    tokens, mask = np.array(rows["input_ids"]), np.array(rows["attention_mask"])
    batch = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask)}
    expected = model(batch)["sentence_embedding"]
    (expected**3).sum().backward()

    def loss(inputs: dict) -> mx.array:
        return (base.model(inputs["tokens"], inputs["lengths"]) ** 3).sum()

    inputs = {"tokens": mx.array(tokens), "lengths": mx.array(mask.sum(axis=1))}
    own = np.array(base.model(inputs["tokens"], inputs["lengths"]))
    np.testing.assert_allclose(own, expected.detach().numpy(), atol=1e-5)

    # gradients by name on disk: those of the adapters stand where the adapters do
    base.model.update(nn.value_and_grad(base.model, loss)(inputs)[1])
    for name, gradient in attached.tensors().items():
        wanted = theirs[name].grad.numpy().T
        assert np.abs(np.array(gradient) - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_metrics_are_those_of_its_evaluators(minilm):
    from sentence_transformers.sentence_transformer import evaluation as theirs

    base, model = load_base(minilm), torch_model(minilm)

    def ours(rows: list[dict]) -> dict:
        pairs = encode_pairs([Row("test", row) for row in rows], base.tokenizer, 128)
        return score_pairs(base.model, pairs, 16)

    texts = [[row[key] for row in SCORED] for key in ("sentence1", "sentence2")]
    evaluator = theirs.EmbeddingSimilarityEvaluator(*texts, [row["score"] for row in SCORED])
    wanted, result = evaluator(model), ours(SCORED)
    assert result["spearman"] == pytest.approx(wanted["spearman_cosine"], abs=1e-5)
    assert result["pearson"] == pytest.approx(wanted["pearson_cosine"], abs=1e-5)

    rows = all_pairs()[:40] + [{**all_pairs()[0], "positive": "ways to move the house"}]
    corpus = {text: text for text in {row["positive"] for row in rows}}
    queries = {text: text for text in {row["anchor"] for row in rows}}
    relevant: dict = {}
    for row in rows:
        relevant.setdefault(row["anchor"], set()).add(row["positive"])
    tens, ones = dict.fromkeys(("mrr_at_k", "ndcg_at_k", "map_at_k"), [10]), [1]
    evaluator = theirs.InformationRetrievalEvaluator(
        queries, corpus, relevant, **tens, precision_recall_at_k=ones, accuracy_at_k=ones
    )
    wanted, result = evaluator(model), ours(rows)
    for name in ("mrr_at_10", "ndcg_at_10", "recall_at_1"):
        theirs_of = wanted[f"cosine_{name.replace('_at_', '@')}"]
        assert result[name] == pytest.approx(theirs_of, abs=1e-6)

    rows = all_triplets()[:40]
    columns = [[row[key] for row in rows] for key in ("anchor", "positive", "negative")]
    wanted, result = theirs.TripletEvaluator(*columns)(model), ours(rows)
    assert result["triplet_accuracy"] == pytest.approx(wanted["cosine_accuracy"])


def embeddings_with(base, pack: Pack) -> np.ndarray:
    with base.applied(pack):
        return base.encode(TEXTS)


@pytest.mark.systems
def test_a_merged_folder_opens_in_sentence_transformers(trained, tmp_path):
    encoder, pack = trained
    report = merge_pack(pack, encoder, tmp_path / "merged")
    assert report["passed"] and report["changed"] == len(pack.specs)
    base = load_base(encoder)
    wanted = embeddings_with(base, pack)
    theirs = torch_model(tmp_path / "merged").encode(TEXTS)
    assert np.abs(theirs - wanted).max() < 1e-5
    assert np.abs(theirs - base.encode(TEXTS)).max() > 1e-3


@pytest.mark.systems
def test_an_export_opens_in_peft_and_sentence_transformers(trained, tmp_path):
    import torch
    from peft import PeftModel
    from transformers import AutoModel

    encoder, pack = trained
    export_pack(pack, "peft", tmp_path / "peft")
    wanted = embeddings_with(load_base(encoder), pack)
    model = torch_model(encoder)
    model.load_adapter(str(tmp_path / "peft"))
    assert np.abs(model.encode(TEXTS) - wanted).max() < 1e-5
    wrapped = PeftModel.from_pretrained(AutoModel.from_pretrained(encoder), tmp_path / "peft")
    inputs = model.preprocess(TEXTS[:1])
    with torch.no_grad():
        states = wrapped(inputs["input_ids"], inputs["attention_mask"])[0]
        vector = torch.nn.functional.normalize(states.mean(dim=1)).numpy()[0]
    assert np.abs(vector - wanted[0]).max() < 1e-5


def test_an_adapter_that_peft_trained_comes_in(minilm, tmp_path):
    import torch
    from peft import LoraConfig

    model = torch_model(minilm)
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"]))
    torch.manual_seed(1)
    for name, parameter in model[0].auto_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    wanted = model.encode(TEXTS)
    model[0].auto_model.save_pretrained(tmp_path / "theirs")
    import_adapter(tmp_path / "theirs", tmp_path / "pack", minilm)
    pack = Pack.open(tmp_path / "pack")
    assert len(pack.specs) == 12
    assert np.abs(embeddings_with(load_base(minilm), pack) - wanted).max() < 1e-5


def test_a_checkpoint_of_masked_language_modelling_is_read(minilm, tmp_path):
    from transformers import AutoModel, BertForMaskedLM

    inner = AutoModel.from_pretrained(minilm)
    model = BertForMaskedLM(inner.config)
    model.bert.load_state_dict(inner.state_dict(), strict=False)
    model.save_pretrained(tmp_path / "mlm")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "mlm" / name).write_bytes((minilm / name).read_bytes())
    settings = json.loads((tmp_path / "mlm" / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 128
    theirs = torch_model(tmp_path / "mlm").encode(TEXTS)  # mean pooling by default
    ours = load_base(tmp_path / "mlm").encode(TEXTS)
    assert np.abs(ours - theirs).max() < 1e-4
