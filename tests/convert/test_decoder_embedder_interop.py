"""Decoders as embedders against sentence-transformers on torch: a Qwen3 of random weights."""

from pathlib import Path

import numpy as np
import pytest

from mlx_packs import load_base
from tests.helpers.decoder_embedders import PROMPT, write_embedder

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

TEXTS = [
    "how do i fix a car?",
    "steps to repair the vehicle",
    "Xyzzy, the STORE!",
    "please tell me the ways to move a stone " * 30,
    "a",
]


def torch_model(folder: Path):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


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
