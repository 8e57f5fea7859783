"""pairs.py: rows of sentence pairs as tokens and batches."""

import numpy as np
import pytest

from mlx_packs import load_base, runtime
from mlx_packs.data.formats import Row
from mlx_packs.data.pairs import PairCollate, PairSampler, choose_loss, encode_pairs
from mlx_packs.data.texts import TextGroups
from tests.helpers.encoders import all_pairs, all_scored, all_triplets
from tests.helpers.errors import raises


@pytest.fixture(scope="module")
def encoder_tokenizer(encoder):
    return load_base(encoder).tokenizer


def encoded(tokenizer, rows: list[dict], limit: int = 48) -> TextGroups:
    return encode_pairs([Row(f"d.jsonl:{i + 1}", r) for i, r in enumerate(rows)], tokenizer, limit)


def test_columns_become_tokens(encoder_tokenizer):
    rows = [
        {"sentence1": "fix a car", "sentence2": "a", "score": 0.5, "note": "kept out"},
        {"sentence1": "a", "sentence2": "please " * 90, "score": -1},
    ]
    pairs = encoded(encoder_tokenizer, rows, 8)
    assert pairs.format.name == "scored pairs" and len(pairs) == 2 and pairs.cut == 1
    assert pairs.tokens(0)[0].tolist() == encoder_tokenizer.encode("fix a car")
    assert pairs.text_lengths[:, 1].tolist() == [3, 8]
    end = pairs.tokens(1)[1][-1]
    assert end == encoder_tokenizer.sep_token_id  # it stays when a text is cut
    assert pairs.labels.tolist() == [0.5, -1] and pairs.lengths.tolist() == [5, 8]
    assert pairs.groups[0][1] == pairs.groups[1][0] != pairs.groups[0][0]
    assert encoded(encoder_tokenizer, all_triplets()[:3]).format.name == "triplets"
    assert encoded(encoder_tokenizer, [SCORED | {"label": "1"}]).labels.tolist() == [1]


SCORED = {"sentence1": "a", "sentence2": "b"}
BAD = {
    "no pair": ([{"text": "a"}], ["d.jsonl:1", "{anchor, positive}", "['text']"]),
    "mixed": ([all_scored()[0], all_pairs()[0]], ["d.jsonl:2", "scored pairs", "d.jsonl:1 is"]),
    "a number for a text": ([{"anchor": "a", "positive": 3}], ["d.jsonl:1", "'positive'", "3"]),
    "nothing in a text": ([{"anchor": "a", "positive": " "}], ["d.jsonl:1", "'positive'", "empty"]),
    "half a surrogate": ([{"anchor": "\ud800", "positive": "b"}], ["d.jsonl:1", "surrogate"]),
    "true for a score": ([SCORED | {"score": True}], ["d.jsonl:1", "'score'"]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("fault", BAD)
def test_examples_that_cannot_be_used_are_named(encoder_tokenizer, fault):
    rows, names = BAD[fault]
    with raises("data", None, *names):
        encoded(encoder_tokenizer, rows)

    good = [SCORED | {"score": i / 4} for i in range(4)]
    rows = [Row(f"x:{i}", row) for i, row in enumerate([*good[:1], *rows[-1:], *good[1:]])]
    pairs = encode_pairs(rows, encoder_tokenizer, 16, "skip")
    wanted = encoded(encoder_tokenizer, good, 16)
    assert pairs.groups.tolist() == wanted.groups.tolist()
    assert len(pairs.bad) == len(rows) - 4 and pairs.fingerprint == wanted.fingerprint


def test_a_loss_must_fit_the_examples(encoder_tokenizer):
    kinds = (all_scored(), all_pairs(), all_triplets())
    scored, pairs, triplets = (encoded(encoder_tokenizer, rows) for rows in kinds)
    losses = [choose_loss("auto", p, "x") for p in (scored, pairs, triplets)]
    assert losses == ["cosine", "mnrl", "mnrl"]
    assert choose_loss("triplet", triplets, "x") == "triplet"
    with raises("conflict", "loss", "triplet", "{anchor, positive, negative}"):
        choose_loss("triplet", pairs, "x")
    with raises("conflict", "loss", "mnrl", "{anchor, positive}", "cosine", "cosent"):
        choose_loss("mnrl", scored, "x")
    scored.labels[3] = 4.5
    with raises("data", "loss", "x:", "4.5"):
        choose_loss("auto", scored, "x")
    assert choose_loss("cosent", scored, "x") == "cosent"


@pytest.mark.parametrize(("compiles", "least"), [(True, 32), (False, 8)])
def test_a_batch_is_padded_by_column_and_to_its_size(
    encoder_tokenizer, monkeypatch, compiles, least
):
    monkeypatch.setattr(runtime, "COMPILES", compiles)
    rows = [{"anchor": "a", "positive": "please " * 40}, {"anchor": "fix", "positive": "fix"}]
    pairs = encoded(encoder_tokenizer, rows)
    batch = PairCollate(4, 48)(pairs, [1, 0])
    inputs = batch.inputs

    assert [inputs[name].shape for name in ("first", "second")] == [(4, least), (4, 48)]
    assert inputs["weights"].tolist() == [1, 1, 0, 0]
    assert batch.targets == batch.denominator == 2 and batch.examples == (1, 0)
    assert inputs["lengths"].T.tolist() == [[3, 3, 1, 1], [3, 42, 1, 1]]
    assert inputs["first"][0, :4].tolist() == [*encoder_tokenizer.encode("fix"), 0]

    for collate in (PairCollate(4, 48), PairCollate(2, 100, (32, 64, 100))):
        for order in ([0], [1], [1, 0]):
            inputs = collate(pairs, order).inputs
            widths = tuple(inputs[name].shape[1] for name in ("first", "second"))
            assert collate.shapes(pairs, iter([order])) == {(max(widths), 2, widths)}

    powers = PairCollate(2, 100, (32, 64, 100))(pairs, [1, 0]).inputs
    assert [powers[name].shape[1] for name in ("first", "second")] == [32, 64]


def test_no_text_stands_twice_in_a_batch_of_in_batch_negatives(encoder_tokenizer):
    rows = all_pairs()[:30]
    rows += [{"anchor": rows[0]["anchor"], "positive": f"please {i}"} for i in range(5)]
    rows += [{"anchor": rows[1]["positive"], "positive": "paint a house"}]  # across columns, too
    pairs = encoded(encoder_tokenizer, rows)
    batches = PairSampler.of(pairs, 8, 48, seed=0, distinct=True).epoch(0)
    for batch in batches:
        texts = pairs.groups[batch]
        assert len(np.unique(texts)) == texts.size
    assert all(2 <= len(batch) <= 8 for batch in batches)
    seen = np.concatenate(batches)
    assert len(np.unique(seen)) == len(seen) >= len(rows) - 5
    mixed = PairSampler.of(pairs, len(rows), 48, seed=0, distinct=False).epoch(0)
    assert any(len(np.unique(pairs.groups[b])) < pairs.groups[b].size for b in mixed)
