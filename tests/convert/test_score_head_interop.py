"""Rerankers with a score head against transformers and PEFT on torch."""

from pathlib import Path

import numpy as np
import pytest

from mlx_packs import LoRAConfig, TrainConfig, import_adapter, load_base, train_pack
from mlx_packs.convert.interop import export_pack
from mlx_packs.data.rankings import RerankPrompt
from mlx_packs.packs.pack import Pack
from mlx_packs.runtime import mx
from tests.helpers.decoder_embedders import write_decoder
from tests.helpers.encoders import all_rankings, write_pairs

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

QUERY = "how do i fix a car?"
DOCUMENTS = ["steps to repair the vehicle", "a", "please move a stone " * 20, "Xyzzy, the STORE!"]
PAIRS = [(QUERY, document) for document in DOCUMENTS]
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
