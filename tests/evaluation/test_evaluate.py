"""One frame for every architecture: which rows count, what is rejected, what people read."""

import pytest

from mlx_packs import evaluate, evaluate_batch, load_base
from mlx_packs.data.trees import TreePlan
from mlx_packs.evaluation import perplexity
from tests.helpers.encoders import all_triplets, write_pairs
from tests.helpers.errors import raises
from tests.helpers.packs import random_pack
from tests.helpers.rows import chat, write_rows

SHORT = {"sequence_length": 64, "max_tokens": 2, "rounds": 1}


@pytest.fixture(scope="module")
def loaded_encoder(encoder):
    return load_base(encoder)


@pytest.fixture(scope="module")
def held_out_data(tmp_path_factory) -> dict:
    """Held-out rows of each architecture: five chats, 22 triplets."""
    folder = tmp_path_factory.mktemp("data")
    chats = [chat(f"Say {n}.", f"{n} it is.") for n in "one two three four five".split()]
    return {
        "decoder": write_rows(folder / "chats", train=chats, test=chats),
        "encoder": write_pairs(folder / "triplets", all_triplets()),
    }


@pytest.mark.parametrize(("architecture", "count"), [("decoder", 5), ("encoder", 22)])
def test_limit_counts_examples(architecture, count, small_base, loaded_encoder, held_out_data):
    base = {"decoder": small_base, "encoder": loaded_encoder}[architecture]
    for limit, rows in ((3, 3), (-1, count)):
        report = evaluate(base, None, held_out_data[architecture], limit=limit, batch_size=2)
        assert report.rows == rows
    with raises("invalid", "limit", "0"):
        evaluate(base, None, held_out_data[architecture], limit=0)


def test_the_base_is_loaded_or_named(held_out_data, shared_tiny):
    chats = held_out_data["decoder"]
    loaded = evaluate(shared_tiny, None, chats, limit=2)
    assert evaluate("tiny", None, chats, limit=2, progress=False) == loaded
    (named,) = evaluate_batch("tiny", data=chats, limit=2, batch_sizes=[1], **SHORT)
    assert named.ppl == pytest.approx(loaded.base.ppl)


def test_evaluate_scores_base_and_pack_on_the_same_examples(small_base, held_out_data):
    pack = random_pack(small_base, 0)
    alone = evaluate(small_base, None, held_out_data["decoder"])
    both = evaluate(small_base, pack, held_out_data["decoder"])
    assert alone.pack is None and alone.ppl_ratio is None and both.base == alone.base
    assert both.pack.targets == both.targets and both.pack.ppl != both.base.ppl
    assert both.ppl_ratio == pytest.approx(both.pack.ppl / both.base.ppl)
    assert evaluate(small_base, None, held_out_data["decoder"]) == alone
    assert [line.split()[0] for line in both.lines()] == ["base", "pack", "ratio"]
    assert [line.split()[0] for line in alone.lines()] == ["base"]


def test_an_encoder_has_no_targets_matmul_path_or_prefix(loaded_encoder, held_out_data):
    pairs = held_out_data["encoder"]
    for setting in ({"loss_on": "all"}, {"matmul_path": "quantized"}, {"share_prefix": "on"}):
        with raises("conflict", next(iter(setting)), loaded_encoder.name):
            evaluate(loaded_encoder, None, pairs, **setting)
    report = evaluate(loaded_encoder, None, pairs, matmul_path="dense", share_prefix="auto")
    assert report.format == "triplets" and report.pack is None
    assert [line.split()[0] for line in report.lines()] == ["base", "data"]


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    """Chats that begin with the same 24 tokens."""
    system = {"role": "system", "content": "Say what you are told, in as few words as there are."}
    rows = [chat(f"Say {i}.", f"{'Yes, ' * (i % 3)}{i}.") for i in range(7)]
    rows = [{"messages": [system, *row["messages"]]} for row in rows]
    return write_rows(tmp_path_factory.mktemp("data") / "alike", test=rows)


def test_what_examples_begin_with_is_computed_once_where_asked_for(small_base, alike, monkeypatch):
    planted = []
    held_out = TreePlan.held_out

    def watched(self, *rest):
        planted.append(self.prefix)
        return held_out(self, *rest)

    monkeypatch.setattr(TreePlan, "held_out", watched)
    pack = random_pack(small_base, 0)
    expected = evaluate(small_base, pack, alike, share_prefix="off")
    assert not planted
    for value in ("auto", "on"):
        report = evaluate(small_base, pack, alike, share_prefix=value)
        assert planted.pop() >= 16 and not planted
        assert report.rows == expected.rows and report.targets == expected.targets
        assert report.base.ppl == pytest.approx(expected.base.ppl, rel=1e-5)
        assert report.ppl_ratio == pytest.approx(expected.ppl_ratio, rel=1e-5)
    assert evaluate(small_base, None, alike, batch_size=1, share_prefix="on").rows == 7
    assert not planted  # nothing is saved


def test_a_model_that_computes_trees_otherwise_is_scored_on_rows(small_base, alike, monkeypatch):
    monkeypatch.setattr(perplexity, "why_not_shared", lambda *_: "its loss is off by 1")
    with raises("unsupported", "share_prefix", "off by 1"):
        evaluate(small_base, None, alike, share_prefix="on")
    expected = evaluate(small_base, None, alike, share_prefix="off")
    assert evaluate(small_base, None, alike, share_prefix="auto") == expected


def test_rows_of_another_architecture_are_named(small_base, loaded_encoder, held_out_data):
    with raises("conflict", "task", "test.jsonl:1", "triplets"):
        evaluate(small_base, None, held_out_data["encoder"])
    with raises("data", "task", "test.jsonl:1", "['messages']"):
        evaluate(loaded_encoder, None, held_out_data["decoder"])
