"""What a run says about its learning rate: mlx-lm's meaning, long warm-ups."""

from mlx_packs import DataConfig, LoRAConfig, Phase, TrainConfig
from mlx_packs.config.recipe import resolve
from mlx_packs.optim import make_optimizer
from mlx_packs.tasks.phases import resolve_phases
from mlx_packs.training.settings import RunSettings, notes_on_rates


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
