"""A pack reads as many tokens of a text in use as in training, within the context of its base."""

import json

import numpy as np
import pytest

from mlx_packs.convert.task_fidelity import embedder_files
from mlx_packs.packs.compatibility import text_limit
from mlx_packs.packs.pack import Pack
from tests.helpers.packs import random_pack
from tests.helpers.variants import slow_except

LONG = "filler " * 200


@pytest.mark.parametrize(
    ("recorded", "context", "limit"), [(64, 512, 64), (2048, 512, 512), (None, 512, 512)]
)
def test_the_limit_is_the_smaller_of_training_and_context(recorded, context, limit):
    manifest = {"recipe": {"max_seq_length": recorded}}
    assert text_limit(manifest, {"max_position_embeddings": context}) == limit
    assert text_limit({}, {"n_positions": context}) == context
    assert text_limit({}, {}) == 1 << 15


@pytest.mark.parametrize(
    ("task", "recorded"),
    slow_except([("rerank", 160), ("embedding", 160), ("embedding", None)], ("rerank", 160)),
)
def test_a_text_is_read_as_far_as_in_training(small_tiny, task, recorded):
    facts = {"objective": {"task": task}}
    if recorded:
        facts["recipe"] = {"max_seq_length": recorded}
    texts = [LONG + "red", LONG + "the sky is blue today"]
    with small_tiny.applied(random_pack(small_tiny, size=0.3, facts=facts)) as base:
        first, second = base.rerank("q", texts) if task == "rerank" else base.encode(texts)
    assert np.array_equal(first, second) == bool(recorded)


def test_a_mix_reads_as_much_as_its_shorter_pack(small_tiny):
    objective = {"task": "embedding"}
    packs = [
        random_pack(small_tiny, n, facts={"recipe": {"max_seq_length": n}, "objective": objective})
        for n in (160, 200)
    ]
    for order in (packs, packs[::-1]):
        with small_tiny.applied([(pack, 0.5) for pack in order]):
            assert small_tiny.text_limit == 160


def test_sentence_transformers_is_given_the_length(shared_tiny):
    manifest = {"recipe": {"max_seq_length": 64}, "objective": {"task": "embedding"}}
    source, config = shared_tiny.path, shared_tiny.config
    files = embedder_files(Pack(manifest), source, config, shared_tiny.tokenizer)
    assert json.loads(files["sentence_bert_config.json"])["max_seq_length"] == 64
