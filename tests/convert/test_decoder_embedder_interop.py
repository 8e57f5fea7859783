"""Decoders as embedders against sentence-transformers on torch: a Qwen3 of random weights."""

import numpy as np
import pytest

from mlx_packs import LoRAConfig, TrainConfig, load_base, train_pack
from mlx_packs.convert.interop import export_pack
from mlx_packs.convert.merge import merge_pack
from tests.convert.conftest import torch_model
from tests.helpers.decoder_embedders import PROMPT, write_decoder, write_embedder
from tests.helpers.encoders import all_pairs, write_pairs

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

TEXTS = [
    "how do i fix a car?",
    "steps to repair the vehicle",
    "Xyzzy, the STORE!",
    "please tell me the ways to move a stone " * 30,
    "a",
]


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
@pytest.mark.parametrize("is_bare", [True, False], ids=["without a head", "with names of an LM"])
def test_embeddings_are_those_of_sentence_transformers(tmp_path, pooling, is_bare):
    folder = write_embedder(tmp_path / "base", pooling, is_bare)
    base = load_base(folder)
    model = torch_model(folder)
    assert model.tokenizer.padding_side == "left"

    theirs = model.encode(TEXTS, batch_size=2)
    assert np.abs(base.encode(TEXTS, batch_size=4) - theirs).max() < 1e-5
    assert np.abs(theirs - theirs[:1]).max() > 1e-2  # they are not all alike

    queries = model.encode(TEXTS, prompt_name="query")
    assert np.abs(base.encode(TEXTS, prompt_name="query") - queries).max() < 1e-5
    assert np.abs(base.encode([PROMPT + text for text in TEXTS]) - queries).max() < 1e-5
    assert np.abs(queries - theirs).max() > 1e-2


@pytest.mark.parametrize("write", [write_embedder, write_decoder])
def test_merge_and_export_open_in_sentence_transformers(tmp_path, write):
    folder = write(tmp_path / "base")
    data = write_pairs(tmp_path / "pairs", all_pairs())
    train = TrainConfig(
        task="embedding", batch_size=8, iters=8, learning_rate=1e-2, query_prompt="Q: "
    )
    pack = train_pack(folder, str(data), LoRAConfig(rank=4), train, tmp_path / "pack").pack
    base = load_base(folder)
    with base.applied(pack):
        plain, queries = base.encode(TEXTS), base.encode(TEXTS, prompt_name="query")

    assert merge_pack(pack, folder, tmp_path / "merged")["passed"]
    model = torch_model(tmp_path / "merged")
    assert np.abs(model.encode(TEXTS) - plain).max() < 1e-5
    assert np.abs(model.encode_query(TEXTS) - queries).max() < 1e-5
    again = load_base(tmp_path / "merged")
    assert np.abs(again.encode(TEXTS, prompt_name="query") - queries).max() < 1e-5

    export_pack(pack, "peft", tmp_path / "peft")
    if write is write_embedder:
        model = torch_model(folder)
        model.load_adapter(str(tmp_path / "peft"))
        assert np.abs(model.encode(TEXTS) - plain).max() < 1e-5
