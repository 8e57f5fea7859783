"""The files of a teacher's log-probabilities: found by the tokens of examples, checked, continued."""

import json
from pathlib import Path

import numpy as np
import pytest

from mlx_packs.data import teacher_cache
from mlx_packs.data.batches import TokenCollate
from mlx_packs.data.encoding import Example, Examples
from mlx_packs.data.sampler import Packed
from mlx_packs.data.teacher_cache import FACTS, CacheFacts, TeacherCache, split_facts
from tests.helpers.damage import flip_bit
from tests.helpers.errors import raises
from tests.helpers.steps import examples_of

TOP_K = 3
OWN = Examples(examples_of((9, 4, 12, 7, 5)), "text", "all")
DAMAGES = {
    "missing": Path.unlink,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-40]),
    "flipped": lambda file: flip_bit(file, 4 * file.stat().st_size),
}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(teacher_cache, "_SHARD_BYTES", 10 * teacher_cache.target_bytes(TOP_K, 128))


def written(folder) -> TeacherCache:
    """A cache whose values are the numbers of the targets."""
    splits = {"train": split_facts(OWN, TOP_K, 128)}
    facts = {"vocab_size": 128, "top_k": TOP_K, "max_seq_length": 32, "splits": splits}
    cache = TeacherCache(folder, CacheFacts("teacher", "w", "t", **facts))
    cache.create()
    starts = np.concatenate([[0], np.cumsum(OWN.target_counts)])
    edges = cache.facts.splits["train"]["edges"]
    for shard in cache.missing("train"):
        numbers = np.arange(starts[edges[shard]], starts[edges[shard + 1]])
        several = np.repeat(numbers, TOP_K)
        arrays = {"logprobs": -several, "rest": -numbers, "tokens": several % 128}
        cache.write("train", shard, arrays)
    return cache


def test_batches_and_their_pieces_have_what_is_cached_of_their_targets(tmp_path):
    cache = written(tmp_path)
    assert len(cache.facts.splits["train"]["edges"]) == 4
    targets = TeacherCache.at(tmp_path).of(OWN, 128)

    starts = np.concatenate([[0], np.cumsum(OWN.target_counts)])
    for collate, order in (
        (TokenCollate(4, 16), np.array([3, 0, 4])),
        (TokenCollate(2, 32), Packed([[2, 1], [4, 0, 3]])),
    ):
        batch = collate(OWN, order)
        whole = targets.having(batch)
        assert teacher_cache.without_teacher(whole).inputs.keys() == batch.inputs.keys()
        pieces = [targets.having(piece) for piece in collate.split(batch, 2)]
        for piece in (whole, *pieces):
            numbers = [n for i in piece.examples for n in range(starts[i], starts[i + 1])]
            assert len(numbers) == piece.targets
            logprobs = piece.inputs["teacher_logprobs"]
            assert logprobs.shape == (len(piece.inputs["targets"]), TOP_K)
            assert (logprobs[: piece.targets, 1] == -np.array(numbers)).all()
            assert not logprobs[piece.targets :].any()
            rest = piece.inputs["teacher_rest"][: piece.targets]
            assert (rest == logprobs[: len(numbers), 0]).all()
            assert piece.inputs["teacher_tokens"].dtype == np.int32


def test_other_examples_and_vocabularies_are_rejected(tmp_path):
    cache = written(tmp_path)
    items = list(OWN.items)
    other_target = Example(items[2].tokens, np.arange(12) > 6, "x")
    others = [items[::-1], items[:-1], [*items[:2], other_target, *items[3:]]]
    for each in others:
        with raises("mismatch", "teacher_cache", str(tmp_path)):
            cache.of(Examples(each, "text", "all"), 128)
    targets = cache.of(OWN, vocab_size=5)  # of the student, which lacks some tokens
    with raises("mismatch", "teacher_cache", "5"):
        targets.having(TokenCollate(2, 16)(OWN, np.array([2, 3])))


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_cache_is_rejected_and_can_be_continued(tmp_path, damage):
    cache = written(tmp_path)
    file = tmp_path / "train-00001.npy"
    content = file.read_bytes()
    damage(file)

    with raises("unreadable", "teacher_cache", file.name):
        cache.of(OWN, 128)
    assert cache.missing("train") == [1]
    written(tmp_path)
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("key", "value"),
    [("top_k", 0), ("splits", {}), ("format", 2), ("teacher", None), ("weights", "other")],
)
def test_a_wrong_cache_json_is_rejected(tmp_path, key, value):
    """Other weights would be those of other log-probabilities: the hashes differ."""
    written(tmp_path)
    content = json.loads((tmp_path / FACTS).read_text())
    (tmp_path / FACTS).write_text(json.dumps(content | {key: value}))
    with raises("unreadable", "teacher_cache", "train-00000" if key == "weights" else FACTS):
        TeacherCache.at(tmp_path).of(OWN, 128)
