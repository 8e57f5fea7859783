"""--epochs and --learning-rate: batches of epochs, resumed runs, and what a run says of its rate."""

from dataclasses import dataclass
from types import SimpleNamespace

from mlx_packs import DataConfig, LoRAConfig, Phase, TrainConfig
from mlx_packs.config.recipe import resolve
from mlx_packs.optim import make_optimizer
from mlx_packs.tasks.phases import RunPhase, resolve_phases
from mlx_packs.training.run_folder import RunFolder
from mlx_packs.training.settings import MANY_EPOCHS, RunSettings, notes_on_rates, with_batches
from tests.helpers.errors import raises
from tests.helpers.runs import Lines

FEW = {"iters": 600, "val_batches": 0, "test_batches": 1}  # 600: the default
EACH = 3  # batches of an epoch


@dataclass(frozen=True)
class Rows:
    """Examples of a phase, as far as their number counts."""

    phase: RunPhase
    train = SimpleNamespace(batches_per_epoch=lambda: EACH)


def settled(**train) -> tuple[TrainConfig, list[str]]:
    """The settings of a run in batches, and the lines that it shows."""
    config = TrainConfig(**train)
    phases = resolve_phases(config, DataConfig())
    display = Lines()
    settings = RunSettings(LoRAConfig(), config, DataConfig(), phases)
    settings, data = with_batches(settings, [Rows(phase) for phase in phases], display)
    assert [rows.phase for rows in data] == list(settings.phases)
    return settings.train, display.lines


def test_batches_are_epochs_times_their_number():
    for epochs, accumulate, batches, updates in (
        (2, 1, 6, 6),
        (0.5, 1, 2, 2),
        (0.01, 1, 1, 1),
        (1, 2, 3, 2),
    ):
        config, (line,) = settled(epochs=epochs, grad_accumulation_steps=accumulate)
        assert (config.iters, config.epochs) == (batches, None)
        assert line.startswith(f"epochs {epochs:g} of {EACH} batches: {batches} batches")
        assert line.endswith(f"{updates} updates")


def test_a_run_says_if_it_reads_its_examples_many_times():
    for train, times in (
        ({"iters": 600}, "200"),
        ({"iters": MANY_EPOCHS * EACH}, str(MANY_EPOCHS)),
        ({"iters": MANY_EPOCHS * EACH - 1}, None),
        ({"epochs": 50}, None),
        ({"iters": 600, "time": "1h"}, None),
    ):
        notes = [line for line in settled(**train)[1] if "read each" in line]
        assert [f"example {times} times" in note for note in notes] == [True] * (times is not None)


def test_short_epochs_are_validated_if_the_best_is_sought():
    for train, steps in (
        ({"load_best": True}, EACH),  # each epoch
        ({"patience": 1}, 2),  # of six batches, three validations
        ({"patience": 1, "steps_per_eval": EACH}, EACH),
        ({}, TrainConfig().steps_per_eval),
    ):
        config, lines = settled(epochs=2, **train)
        assert config.steps_per_eval == steps
        assert not any("cannot end" in line for line in lines)


def test_a_run_goes_on_with_more_epochs(train):
    first = train(epochs=1, **FEW)
    assert RunFolder(first.run).read_identity()["recipe"]["iters"] == EACH
    assert train(epochs=2, resume=True, **FEW).report["batches"] == 2 * EACH


def test_patience_that_cannot_end_a_run_is_said():
    _, (note,) = settled(iters=4, patience=2, steps_per_eval=2)
    assert "--patience 2" in note and "4 batches are validated every 2" in note
    assert "--steps-per-eval" in note


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


def test_what_is_no_number_of_epochs_is_rejected():
    for epochs in (0, -1, float("inf"), 10_001):
        with raises("invalid", "epochs"):
            TrainConfig(epochs=epochs)


def notes(config: TrainConfig) -> list[str]:
    phases = resolve_phases(config, DataConfig())
    return list(notes_on_rates(RunSettings(LoRAConfig(), config, DataConfig(), phases)))


def test_a_warmup_longer_than_the_run_is_named():
    (note,) = notes(TrainConfig(iters=3, warmup_steps=100))
    assert note.startswith("the warm-up takes 100 of 3 updates") and "--warmup-steps" in note
    assert not notes(TrainConfig(iters=3, warmup_ratio=0.4))
    schedule = {"name": "cosine_decay", "arguments": [1e-3, 10], "warmup": 9}
    (note,) = notes(TrainConfig(iters=3, lr_schedule=schedule))
    assert "lr_schedule.warmup" in note
    (note,) = notes(TrainConfig(lr_schedule={**schedule, "warmup": 0}, learning_rate=1e-5))
    assert note.startswith("learning_rate is not used")
    phases = (Phase("one", iters=9), Phase("two", iters=2, warmup_steps=5))
    (note,) = notes(TrainConfig(phases=phases, warmup_steps=0))
    assert note.startswith("two: ") and "5 of 2 updates" in note


def test_updates_without_bias_correction_are_said():
    (note,) = notes(TrainConfig(iters=1, warmup_steps=0, bias_correction=False))
    assert "without bias correction" in note
    for settings in ({"bias_correction": True}, {"optimizer": "sgd"}):
        said = notes(TrainConfig(iters=1, warmup_steps=0, **settings))
        assert not any("without bias correction" in note for note in said)


def test_a_setting_of_its_own_wins_over_an_argument_of_the_optimizer():
    twice = {"weight_decay": 0.1, "optimizer_config": {"adamw": {"weight_decay": 0.3, "eps": 1e-6}}}
    resolved = resolve({"learning_rate": 1}, under=[twice]).train
    assert resolved.weight_decay == 0.1
    assert resolved.optimizer_config == {"adamw": {"eps": 1e-6}}
    assert make_optimizer(TrainConfig(**twice)).weight_decay == 0.1


def test_arguments_of_the_chosen_optimizer_are_settings_that_later_layers_override():
    file = {"optimizer_config": {"adam": {"betas": [0.9, 0.98]}, "lion": {"betas": [0.9, 0.9]}}}
    assert resolve({}, under=[file]).train.betas == ()
    assert resolve({"optimizer": "lion"}, under=[file]).train.betas == (0.9, 0.9)
    flags = {"optimizer": "adam", "betas": "0.8,0.9"}
    assert resolve(flags, under=[file]).train.betas == (0.8, 0.9)
    assert resolve(file, under=[flags]).train.betas == (0.9, 0.98)
