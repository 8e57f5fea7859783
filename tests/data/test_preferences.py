"""Preferences as tokens: two examples for each row, which stay together in every batch."""

import numpy as np
import pytest

from mlx_packs.config.schema import DataConfig
from mlx_packs.data.encoding import EncodingOptions, Examples, encode
from mlx_packs.data.formats import PREFERENCE, Row
from mlx_packs.data.preferences import RATED, encode_preferences, preference_set
from mlx_packs.data.sampler import Draw, GroupedSampler
from tests.helpers.errors import raises
from tests.helpers.preferences import preference, rated
from tests.helpers.rows import chat

NAMES, OPTIONS = DataConfig(), EncodingOptions(max_seq_length=64)
MESSAGES, OTHERS = (chat(question, "Red.")["messages"] for question in ("Which?", "Who?"))


def rows_of(*values) -> list[Row]:
    return [Row(f"f:{i + 1}", value) for i, value in enumerate(values)]


def encoded(tokenizer, *values, row_format=PREFERENCE, names=NAMES, options=OPTIONS):
    return encode_preferences(rows_of(*values), tokenizer, names, options, row_format)


def test_sides_are_the_completions_that_lm_would_train_on(tokenizer):
    values = [preference(i) for i in range(5)]
    examples = encoded(tokenizer, *values)

    completions = [
        {"prompt": value["prompt"], "completion": value[side]}
        for value in values
        for side in ("chosen", "rejected")
    ]
    expected = encode(rows_of(*completions), tokenizer, NAMES, OPTIONS)

    assert len(examples.items) == 10 and examples.labels.tolist() == [1.0] * 5
    for ours, theirs in zip(examples.items, expected.items, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.target.tolist() == theirs.target.tolist()
    assert examples.items[7].where == "f:4"
    assert examples.lengths.tolist() == [len(e.tokens) for e in examples.items]

    long = {"prompt": "word " * 80, "chosen": "a", "rejected": "b"}  # without a target of b
    examples = encoded(tokenizer, values[0], long, values[1])
    assert len(examples.items) == 4 and examples.dropped == 1
    assert [e.where for e in examples.items] == ["f:1", "f:1", "f:3", "f:3"]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are the same."),
        ({"prompt": "a", "chosen": " ", "rejected": "b"}, "'chosen' is empty."),
        ({"prompt": "a", "chosen": "b"}, "must have the columns {chosen, rejected}, but has"),
        ({"chosen": MESSAGES, "rejected": OTHERS}, "the prompts of"),
        ({"chosen": "a", "rejected": "b"}, "'chosen' must be a list of messages that ends"),
    ],
)
def test_a_row_that_says_no_preference_is_named(tokenizer, row, fault):
    with raises("data", None, "f:2: ", fault):
        encoded(tokenizer, preference(0), row)
    skipping = DataConfig(on_bad_row="skip")
    examples = encoded(tokenizer, preference(0), row, preference(1), names=skipping)
    assert len(examples.items) == 4 and [i for i, _ in examples.bad.errors] == [1]


def test_a_row_without_a_rating_is_named(tokenizer):
    for row, fault in (
        ({**rated(0), "label": "good"}, "'label' must be true or false, but is 'good'."),
        (preference(0), "must have the columns {prompt, completion, label}"),
    ):
        with raises("data", None, "f:2: ", fault):
            encoded(tokenizer, rated(0), row, row_format=RATED)


def test_a_rated_row_is_followed_by_its_prompt_with_the_completion_before_it(tokenizer):
    values = [rated(i) for i in range(4)]
    examples = encoded(tokenizer, *values, row_format=RATED)
    assert examples.labels.tolist() == [1, 0, 1, 0]
    for i in range(4):
        own, mixed = examples.items[2 * i], examples.items[2 * i + 1]
        before = examples.items[2 * ((i - 1) % 4)]
        prompt = own.tokens[: int(np.argmax(own.target))].tolist()
        assert mixed.tokens.tolist() == prompt + before.tokens[before.target].tolist()
        assert mixed.target.tolist() == [False] * len(prompt) + [True] * int(before.target.sum())
    counted = [(len(e.tokens), int(e.target.sum())) for e in examples.items]
    assert list(zip(examples.lengths, examples.target_counts, strict=True)) == counted


@pytest.mark.parametrize("replay", [0.0, 0.5])
def test_both_examples_of_a_row_are_in_one_batch(tokenizer, replay):
    parts = [encoded(tokenizer, *(preference(i) for i in range(n))) for n in (9, 14)]
    examples = Examples.joined(parts)
    sampler = GroupedSampler(examples.lengths, 6, 63, 3, draw=Draw(18, 46, replay))
    data = preference_set(examples, sampler)

    seen = []
    for number, order in zip(range(20), sampler.batches(), strict=False):
        batch = data.collate(examples, order)
        rows = [i // 2 for i in batch.examples[::2]]
        assert batch.examples == tuple(i for row in rows for i in (2 * row, 2 * row + 1))
        assert batch.denominator == len(rows)
        assert batch.targets == (batch.inputs["owners"] >= 0).sum()

        labels = batch.inputs["labels"]
        assert len(labels) >= len(rows) and labels.sum() == len(rows)
        seen += rows
        pieces = data.collate.split(batch, 3)
        assert sum((piece.examples for piece in pieces), ()) == batch.examples
        assert sum(piece.targets for piece in pieces) == batch.targets
        for piece in pieces:
            assert piece.inputs["labels"].sum() == piece.denominator == len(piece.examples) // 2
        assert next(data.batches(number)).examples == batch.examples

    assert set(range(9, 23)) <= set(seen)
    assert bool(set(range(9)) & set(seen)) == bool(replay)
