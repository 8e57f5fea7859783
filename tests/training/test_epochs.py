"""--epochs: how many batches that is, with what it goes together, and what a resumed run does."""

import math

import pytest

from mlx_packs import TrainConfig
from mlx_packs.config.recipe import resolve
from mlx_packs.training.run_folder import RunFolder
from tests.helpers.errors import raises

FEW = {"iters": 600, "val_batches": 0, "test_batches": 1}  # 600: the default
EACH = 3  # batches of an epoch


@pytest.mark.parametrize("epochs", [2, 0.5])
def test_batches_are_epochs_times_their_number(train, epochs):
    run = train(epochs=epochs, **FEW)
    assert run.report["batches"] == round(epochs * EACH)
    assert any(line.startswith(f"epochs {epochs:g} of {EACH} batches") for line in train.lines)
    assert RunFolder(run.run).read_identity()["recipe"]["iters"] == run.report["batches"]


def test_packed_sequences_and_accumulation_are_counted(train):
    packed = train(epochs=1, packing=True, grad_accumulation_steps=2, **FEW).report
    assert packed["batches"] <= EACH and packed["steps"] == math.ceil(packed["batches"] / 2)
    line = next(line for line in train.lines if line.startswith("epochs"))
    assert f"{packed['steps']} updates" in line


def test_a_run_goes_on_with_more_epochs(train):
    train(epochs=1, **FEW)
    assert train(epochs=2, resume=True, **FEW).report["batches"] == 2 * EACH


def test_the_best_of_short_epochs_is_found_after_each(train):
    run = train(epochs=2, load_best=True, iters=600)
    measured = [line["batch"] for line in run.curve if "valid_loss" in line]
    assert measured == [EACH, 2 * EACH]


def test_patience_can_end_a_run_of_few_short_epochs(train):
    run = train(epochs=2, patience=1, iters=600)
    measured = [line["batch"] for line in run.curve if "valid_loss" in line]
    assert measured[:2] == [2, 4]  # of six, three validations
    assert not any("cannot end" in line for line in train.lines)

    asked = train("asked", epochs=2, patience=1, iters=600, steps_per_eval=EACH)
    assert [line["batch"] for line in asked.curve if "valid_loss" in line][0] == EACH


def test_patience_that_cannot_end_a_run_is_said(train):
    train(iters=4, patience=2, steps_per_eval=2)
    (note,) = [line for line in train.lines if "cannot end" in line]
    assert (
        "--patience 2" in note
        and "4 batches are validated every 2" in note
        and "--steps-per-eval" in note
    )


def test_a_run_that_ended_says_so_and_takes_no_batches_back(train):
    train()
    train(resume=True)
    assert any("had ended" in line for line in train.lines)
    with raises("conflict", "iters", "2", "1"):
        train(iters=1, resume=True)
    train(iters=3, resume=True)
    assert not any("had ended" in line for line in train.lines)


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
