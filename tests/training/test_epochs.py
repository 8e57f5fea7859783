"""--epochs: how many batches that is, with what it goes together, and what a resumed run does."""

import math

import pytest

from mlx_packs import TrainConfig, train_pack
from mlx_packs.config.recipe import resolve
from mlx_packs.reading import sha256
from mlx_packs.training.checkpoint import ADAPTERS
from mlx_packs.training.run_folder import read_identity
from tests.helpers.errors import raises
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, Lines

SETTINGS = {
    **{"batch_size": 2, "max_seq_length": 64, "matmul_path": "dense", "val_batches": 0},
    "test_batches": 1,
}


@pytest.fixture
def trained(small, tmp_path):
    data = write_rows(tmp_path / "d", train=CHATS, valid=CHATS[:1])

    def run(out: str, resume: bool = False, **settings):
        config, lines = TrainConfig(**{**SETTINGS, **settings}), Lines()
        result = train_pack(small, data, LORA, config, tmp_path / out, resume=resume, display=lines)
        return result, lines.lines

    return run


@pytest.mark.parametrize("epochs", [2, 0.5])
def test_batches_are_epochs_times_their_number(trained, epochs):
    result, lines = trained("p", epochs=epochs)
    each = math.ceil(len(CHATS) / 2)
    assert result.report["batches"] == max(1, round(epochs * each))
    assert any(line.startswith(f"epochs {epochs:g} of {each} batches") for line in lines)
    assert read_identity(result.run)["recipe"]["iters"] == result.report["batches"]


def test_packed_sequences_and_accumulation_are_counted(trained):
    packed, lines = trained("p", epochs=1, packing=True, grad_accumulation_steps=2)
    assert packed.report["batches"] <= math.ceil(len(CHATS) / 2)
    assert packed.report["steps"] == math.ceil(packed.report["batches"] / 2)
    assert f"{packed.report['steps']} updates" in next(x for x in lines if x.startswith("epochs"))


def test_a_run_goes_on_with_more_epochs(trained):
    first, _ = trained("p", epochs=1, lr_schedule="constant")
    more, _ = trained("p", epochs=2, resume=True, lr_schedule="constant")
    assert more.report["batches"] == 2 * first.report["batches"]
    whole, _ = trained("q", epochs=2, lr_schedule="constant")
    assert sha256(more.pack.path / ADAPTERS) == sha256(whole.pack.path / ADAPTERS)


def test_the_best_of_short_epochs_is_found_after_each(trained):
    each = math.ceil(len(CHATS) / 2)
    result, _ = trained("p", epochs=3, load_best=True, val_batches=1)
    measured = [line["batch"] for line in result.curve if "valid_loss" in line]
    assert measured == [each, 2 * each, 3 * each]


def test_a_run_that_ended_says_so_and_takes_no_batches_back(trained):
    trained("p", iters=2)
    assert any("had ended" in line for line in trained("p", iters=2, resume=True)[1])
    with raises("conflict", "iters", "2", "1"):
        trained("p", iters=1, resume=True)
    assert not any("had ended" in line for line in trained("p", iters=3, resume=True)[1])


def test_epochs_take_the_place_of_weaker_iters():
    assert resolve({"epochs": 3}, under=[{"iters": 120}]).train.epochs == 3
    assert resolve({"iters": 5}, under=[{"epochs": 3}]).train.epochs is None
    for both in ({"epochs": 3, "iters": 5}, {"epochs": 3, "phases": [{"iters": 2}]}):
        with raises("conflict", "epochs"):
            resolve(both)


@pytest.mark.parametrize("epochs", [0, -1, float("inf"), 10_001])
def test_what_is_no_number_of_epochs_is_rejected(epochs):
    with raises("invalid", "epochs"):
        TrainConfig(epochs=epochs)
