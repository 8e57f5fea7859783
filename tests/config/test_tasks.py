"""Each setting names the tasks that have it."""

import inspect
from dataclasses import fields

from mlx_packs import Phase, TrainConfig
from mlx_packs.config.choices import TASKS
from mlx_packs.config.common import CommonConfig
from mlx_packs.config.optimizer import OptimizerConfig
from mlx_packs.config.tasks import TaskSettings, tasks_of
from tests.helpers.errors import raises


def test_a_setting_belongs_to_the_tasks_that_it_names():
    assert tasks_of("cpo_alpha") == ("cpo",)
    assert tasks_of("loss") == ("embedding", "dpo", "cpo", "rerank", "distill")
    assert tasks_of("beta") == ("dpo", "orpo", "simpo", "cpo", "kto", "grpo")
    without_texts = ("embedding", "rerank")
    assert tasks_of("text_feature") == tuple(t for t in TASKS if t not in without_texts)
    assert tasks_of("iters") == tasks_of("learning_rate") == tasks_of("rank") == ()
    assert tasks_of("packing") == ("lm", "distill")
    assert tasks_of("num_proc") == tuple(t for t in TASKS if t not in (*without_texts, "grpo"))
    assert tasks_of("label_smoothing") == ("lm", "dpo", "cpo")


def test_a_signature_begins_with_the_common_settings_and_ends_with_those_of_tasks():
    parameters = inspect.signature(TrainConfig).parameters
    assert {each.kind for each in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    expected = [
        field.name
        for config in (CommonConfig, OptimizerConfig, TaskSettings)
        for field in fields(config)
    ]
    assert list(parameters) == expected
    assert all(tasks_of(field.name) for field in fields(TaskSettings))


def test_the_settings_of_a_task_are_checked_against_each_other():
    with raises("conflict", "loss", "--label-smoothing"):
        TrainConfig(task="dpo", loss="robust")
    with raises("conflict", "fim_tokens", "--fim-rate"):
        TrainConfig(fim_tokens=("a", "b", "c"))


def test_settings_of_other_tasks_have_one_fault_each():
    with raises("conflict", "fim_tokens") as error:
        TrainConfig(task="dpo", fim_tokens=("a", "b", "c"))
    assert error.value.message == "--fim-tokens: needs --task lm."


def test_settings_are_checked_where_one_phase_has_their_task():
    phases = (Phase(task="lm"), Phase(task="cpo"))
    with raises("conflict", "label_smoothing", "--loss hinge"):
        TrainConfig(phases=phases, loss="hinge", label_smoothing=0.1)


def test_a_setting_of_no_task_of_the_phases_is_rejected():
    phases = (Phase("a", task="dpo"), Phase("b", task="orpo"))
    for name, value in (("fim_rate", 0.5), ("loss_on", "all")):
        with raises("conflict", name, "needs --task lm"):
            TrainConfig(phases=phases, **{name: value})
    assert TrainConfig(phases=(*phases, Phase("c", task="lm")), loss_on="all").loss_on == "all"
