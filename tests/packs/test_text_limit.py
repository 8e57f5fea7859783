"""A pack reads as many tokens of a text in use as in training, within the context of its base."""

import json

import numpy as np
import pytest

from mlx_packs.convert.task_fidelity import embedder_files
from mlx_packs.packs.compatibility import text_limit
from mlx_packs.packs.pack import Pack
from tests.helpers.packs import random_pack

SHORT = {"recipe": {"max_seq_length": 64}}
LONG = "filler " * 200


@pytest.mark.parametrize(
    ("recorded", "context", "limit"), [(64, 512, 64), (2048, 512, 512), (None, 512, 512)]
)
def test_the_limit_is_the_smaller_of_training_and_context(recorded, context, limit):
    manifest = {"recipe": {"max_seq_length": recorded}}
    assert text_limit(manifest, {"max_position_embeddings": context}) == limit
    assert text_limit({}, {"n_positions": context}) == context
    assert text_limit({}, {}) == 1 << 15


def test_a_reranker_and_an_embedder_read_as_much_as_in_training(shared_tiny):
    base = shared_tiny
    limit = text_limit({"recipe": {"max_seq_length": 160}}, base.config)
    facts = {"recipe": {"max_seq_length": limit}}
    texts = [LONG + "red", LONG + "the sky is blue today"]
    pack = random_pack(base, size=0.3, facts={**facts, "objective": {"task": "rerank"}})
    with base.applied(pack):
        scores = base.rerank("q", texts)
    assert scores[0] == scores[1]

    pack = random_pack(base, size=0.3, facts={**facts, "objective": {"task": "embedding"}})
    with base.applied(pack):
        vectors = base.encode(texts)
    assert np.array_equal(vectors[0], vectors[1])

    whole = random_pack(base, size=0.3, facts={"objective": {"task": "embedding"}})
    with base.applied(whole):
        vectors = base.encode(texts)
    assert not np.array_equal(vectors[0], vectors[1])


def test_a_mix_reads_as_much_as_its_shorter_pack(shared_tiny):
    base = shared_tiny
    lengths = (160, 200)
    objective = {"task": "embedding"}
    packs = [
        random_pack(base, n, facts={"recipe": {"max_seq_length": n}, "objective": objective})
        for n in lengths
    ]
    with base.applied([(pack, 0.5) for pack in packs]):
        assert base.text_limit == 160
    with base.applied([(pack, 0.5) for pack in packs[::-1]]):
        assert base.text_limit == 160


def test_sentence_transformers_is_given_the_length(shared_tiny):
    manifest = {**SHORT, "objective": {"task": "embedding"}}
    source, config = shared_tiny.path, shared_tiny.config
    files = embedder_files(Pack(manifest), source, config, shared_tiny.tokenizer)
    assert json.loads(files["sentence_bert_config.json"])["max_seq_length"] == 64
