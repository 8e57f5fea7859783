"""One frame for every architecture: which rows count, what is rejected, what people read."""

import pytest

from mlx_packs import evaluate, load_base
from mlx_packs.config.choices import ARCHITECTURES
from mlx_packs.evaluation.evaluate import EVALUATORS
from tests.helpers.encoders import all_triplets, write_pairs
from tests.helpers.errors import raises
from tests.helpers.packs import random_pack
from tests.helpers.rows import chat, write_rows


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


def test_every_architecture_has_its_evaluator():
    assert set(EVALUATORS) == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", ["decoder", "encoder"])
def test_limit_counts_examples(architecture, shared_tiny, loaded_encoder, held_out_data):
    base = {"decoder": shared_tiny, "encoder": loaded_encoder}[architecture]
    count = {"decoder": 5, "encoder": 22}[architecture]
    for limit, rows in ((3, 3), (-1, count), (100, count)):
        assert (
            evaluate(base, None, held_out_data[architecture], limit=limit, batch_size=2).rows
            == rows
        )
    for limit in (0, -2):
        with raises("invalid", "limit", str(limit)):
            evaluate(base, None, held_out_data[architecture], limit=limit)


def test_evaluate_scores_base_and_pack_on_the_same_examples(shared_tiny, held_out_data):
    pack = random_pack(shared_tiny, 0)
    alone = evaluate(shared_tiny, None, held_out_data["decoder"])
    both = evaluate(shared_tiny, pack, held_out_data["decoder"])
    assert alone.pack is None and alone.ppl_ratio is None and both.base == alone.base
    assert both.pack.targets == both.targets and both.pack.ppl != both.base.ppl
    assert both.ppl_ratio == pytest.approx(both.pack.ppl / both.base.ppl)
    assert evaluate(shared_tiny, None, held_out_data["decoder"]) == alone
    assert [line.split()[0] for line in both.lines()] == ["base", "pack", "ratio"]
    assert [line.split()[0] for line in alone.lines()] == ["base"]


@pytest.mark.parametrize(("setting", "value"), [("loss_on", "all"), ("matmul_path", "quantized")])
def test_an_encoder_has_no_targets_and_no_matmul_path(
    loaded_encoder, held_out_data, setting, value
):
    with raises("conflict", setting, loaded_encoder.name):
        evaluate(loaded_encoder, None, held_out_data["encoder"], **{setting: value})
    report = evaluate(loaded_encoder, None, held_out_data["encoder"], matmul_path="dense")
    assert report.format == "triplets" and report.pack is None
    assert [line.split()[0] for line in report.lines()] == ["base", "data"]


def test_rows_of_another_architecture_are_named(shared_tiny, loaded_encoder, held_out_data):
    with raises("conflict", "task", "test.jsonl:1", "triplets"):
        evaluate(shared_tiny, None, held_out_data["encoder"])
    with raises("data", "task", "test.jsonl:1", "['messages']"):
        evaluate(loaded_encoder, None, held_out_data["decoder"])
