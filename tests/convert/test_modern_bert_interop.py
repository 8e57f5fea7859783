"""ModernBERT against transformers, sentence-transformers and PEFT on torch, of random weights."""

from pathlib import Path

import mlx.nn as nn
import numpy as np
import pytest

from mlx_packs import LoRAConfig, Pack, TrainConfig, load_base, train_pack
from mlx_packs.convert.interop import export_pack
from mlx_packs.convert.merge import merge_pack
from mlx_packs.runtime import mx
from tests.convert.conftest import adapted, torch_adapted, torch_model
from tests.helpers.encoders import VOCABULARY, all_pairs, write_pairs, write_vocabulary

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

TEXTS = ["how do i fix a car?", "a", "please tell me the ways to move a stone " * 10]


def make_modern_bert(folder: Path, pooling: str = "mean", **changes) -> Path:
    import torch
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertTokenizerFast, ModernBertConfig, ModernBertModel

    torch.manual_seed(0)
    raw = write_vocabulary(folder / "raw")
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
    ModernBertModel(config).save_pretrained(raw)
    BertTokenizerFast(str(raw / "vocab.txt")).save_pretrained(raw)
    transformer = models.Transformer(str(raw), max_seq_length=128)
    parts = [transformer, models.Pooling(64, pooling_mode=pooling), models.Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder / "model"))
    return folder / "model"


@pytest.fixture(scope="module")
def modern(tmp_path_factory) -> Path:
    return make_modern_bert(tmp_path_factory.mktemp("modern"))


@pytest.mark.parametrize(
    "changes",
    [
        {"pooling": "cls"},
        {"local_attention": 4, "layer_types": ["full_attention"] + ["sliding_attention"] * 3},
        {"attention_bias": True, "mlp_bias": True, "norm_bias": True},
    ],
    ids=["cls", "layer types", "biases"],
)
def test_embeddings_are_those_of_sentence_transformers(tmp_path, changes):
    folder = make_modern_bert(tmp_path, **changes)
    theirs = torch_model(folder).encode(TEXTS, batch_size=2)
    assert np.abs(load_base(folder).encode(TEXTS, batch_size=3) - theirs).max() < 1e-5
    assert np.abs(theirs - theirs[:1]).max() > 1e-2


def test_states_and_gradients_are_those_of_transformers_with_peft(modern):
    import torch

    base, attached, tensors = adapted(modern)
    model, theirs = torch_adapted(modern, tensors)
    rows = base.tokenizer(TEXTS[:2], padding=True)
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


def test_merge_and_export_open_in_sentence_transformers(modern, tmp_path):
    data = write_pairs(tmp_path / "pairs", all_pairs())
    train = TrainConfig(task="embedding", batch_size=8, iters=4, learning_rate=1e-3)
    pack: Pack = train_pack(modern, str(data), LoRAConfig(rank=4), train, tmp_path / "pack").pack
    base = load_base(modern)
    with base.applied(pack):
        expected = base.encode(TEXTS)

    merge_pack(pack, modern, tmp_path / "merged", data=str(data))
    assert np.abs(torch_model(tmp_path / "merged").encode(TEXTS) - expected).max() < 1e-5
    export_pack(pack, "peft", tmp_path / "peft")
    model = torch_model(modern)
    model.load_adapter(str(tmp_path / "peft"))
    assert np.abs(model.encode(TEXTS) - expected).max() < 1e-5
