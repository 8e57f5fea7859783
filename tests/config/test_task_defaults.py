"""Each setting names the tasks that have it; their defaults are the same in Python, flags and help."""

import copy
import dataclasses
import inspect
import pickle
import re
from dataclasses import replace

import click
import pytest

from docs.reference.pages import settings as reference
from mlx_packs import Phase, TrainConfig
from mlx_packs.cli.main import packs
from mlx_packs.cli.options import HELP_TOPIC, SETTINGS
from mlx_packs.cli.recipe import recipe_of
from mlx_packs.cli.topics import TopicCommand
from mlx_packs.config.choices import TASKS, Table
from mlx_packs.config.common import CommonConfig
from mlx_packs.config.fields import facts_of, flags_of
from mlx_packs.config.optimizer import OptimizerConfig
from mlx_packs.config.recipe import from_configs, resolve, tiny_recipe
from mlx_packs.config.tasks import TaskSettings, tasks_of
from mlx_packs.plugins import Plugin
from mlx_packs.tasks.phases import resolve_phases
from tests.helpers.errors import raises

FIELDS = [field for field in dataclasses.fields(TrainConfig) if field.name != "task"]


def in_words(field: dataclasses.Field, value: object) -> str:
    if field.metadata["facts"].shown_default and value == field.default:
        return field.metadata["facts"].shown_default
    if value is None or value in ((), {}):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def help_of(task: str | None) -> dict[str, str]:
    """Return the defaults that `packs train -h --task TASK` shows, by setting."""
    root = click.Context(packs, info_name="packs")
    command = packs.get_command(root, "train")
    assert isinstance(command, TopicCommand)
    context = click.Context(command, root)
    context.meta[HELP_TOPIC] = task
    return {
        param.name: param.get_help_extra(context).get("default", "")
        for param in command.get_params(context)
        if param.name in SETTINGS
    }


def in_reference() -> dict[str, str]:
    """Return the defaults of the generated reference, by setting."""
    keys = re.findall(r'^- <a id="(\w+)"></a>`(\w+)`: (.*)$', reference(), re.M)
    shown = {}
    for name, _, text in keys:
        default = re.search(r"Default: (.*?)\.(?: Flag:| In files|$)", text)
        shown[name] = default.group(1).replace("`", "").replace("\\", "") if default else ""
    return shown


def of_task(text: str, task: str) -> str:
    """Return the default that a text on all tasks has for one of them."""
    default, *others = text.split("; ")
    for other in others:
        value, _, tasks = other.partition(" with --task ")
        if task in re.findall(r"\w+", tasks):
            return value
    return default


@pytest.fixture(scope="module")
def texts() -> tuple[dict[str, str], dict[str, str]]:
    return help_of(None), in_reference()


@pytest.mark.parametrize("task", TASKS)
def test_four_sources_have_the_same_default_of_every_setting(task, texts):
    help_of_all, referenced = texts
    helped = help_of(task)
    recipe = recipe_of({"task": task, "model": "a-base"})
    by_mapping = from_configs(None, TrainConfig.from_mapping({"task": task}), {"model": "a-base"})
    python = TrainConfig(task=task)

    table = []
    for field in FIELDS:
        value = getattr(python, field.name)
        words = of_task(in_words(field, value), task)
        row = [words, getattr(recipe.train, field.name), getattr(by_mapping.train, field.name)]
        if field.name in helped:
            shown = [helped[field.name], of_task(help_of_all[field.name], task)]
            if value is True:  # help names the flag
                shown = [text.replace(flags_of(field)[0][2:], "true") for text in shown]
            elif value is False:
                shown = [text or "false" for text in shown]
            row += [of_task(text, task) for text in shown]
        row.append(of_task(referenced[field.name], task))
        table.append((field.name, value, row))

    wrong = [
        (name, value, row)
        for name, value, row in table
        if row[1:3] != [value, value] or {text for text in row[3:]} != {row[0]}
    ]
    assert len(table) > 80 and not wrong


def test_defaults_of_tasks_are_those_that_are_documented():
    """The values, once: a task that trains like another one has its rate."""
    rates = {task: TrainConfig(task=task).learning_rate for task in TASKS}
    preferences = dict.fromkeys(("dpo", "orpo", "simpo", "cpo", "kto", "grpo"), 2e-5)
    heads = dict.fromkeys(("reward", "classify", "rerank"), 1e-4)
    assert rates == {**dict.fromkeys(("lm", "embedding", "distill"), 2e-4), **preferences, **heads}
    sizes = {task: TrainConfig(task=task).batch_size for task in TASKS}
    assert sizes == {**dict.fromkeys(TASKS, 4), "embedding": 32, "grpo": 1}
    assert TrainConfig(task="simpo").beta == 2.0 and TrainConfig(task="grpo").beta == 0.0


def test_a_value_that_is_the_default_of_another_task_stays():
    for values in ({"learning_rate": 2e-4}, {"batch_size": 4}, {"beta": 0.1}):
        config = TrainConfig(task="grpo", **values)
        for same in (
            config,
            TrainConfig.from_mapping({"task": "grpo", **values}),
            replace(config, iters=5),
            replace(TrainConfig(), task="grpo", **values),
            pickle.loads(pickle.dumps(config)),
            copy.deepcopy(config),
            from_configs(None, config, {"model": "m"}).train,
            resolve({"task": "grpo", **values}).train,
            resolve({"task": "grpo"}, under=[values]).train,
        ):
            assert {name: getattr(same, name) for name in values} == values


def test_a_copy_has_the_defaults_of_its_own_task():
    dpo = pickle.loads(pickle.dumps(TrainConfig(task="dpo", iters=5)))
    assert replace(dpo, task="lm").learning_rate == 2e-4
    assert replace(replace(dpo, seed=3), task="embedding").batch_size == 32
    assert replace(TrainConfig(iters=5), task="dpo") == dpo
    assert (dpo.specified, repr(dpo)) == ({"task", "iters"}, "TrainConfig(task='dpo', iters=5)")


def test_a_phase_has_the_defaults_of_its_task_if_the_run_specifies_none():
    phases = (Phase(task="lm"), Phase(task="grpo"), Phase(task="dpo"))
    resolved = resolve_phases(TrainConfig(task="grpo", phases=phases), resolve({}).data)
    assert [each.train.learning_rate for each in resolved] == [2e-4, 2e-5, 2e-5]
    assert [each.train.beta for each in resolved] == [0.1, 0.0, 0.1]

    train = TrainConfig(learning_rate=1e-3, phases=phases)
    assert {each.train.learning_rate for each in resolve_phases(train, resolve({}).data)} == {1e-3}


@pytest.mark.parametrize("train", [{"iters": 7, "lr_schedule": "cosine"}, {"epochs": 2}, {}, None])
def test_what_is_not_specified_suits_the_bundled_base(train):
    expected = recipe_of(train or {})
    passed = [None]
    if train is not None:
        passed = [TrainConfig(**train), TrainConfig.from_mapping(train)]
    if train:
        passed.append(replace(TrainConfig(seed=0), **train))
    for each in passed:
        recipe = from_configs(None, each, {"model": "tiny"})
        assert (recipe.train, recipe.lora) == (expected.train, expected.lora)
    assert expected.train.learning_rate == tiny_recipe()["learning_rate"] == 3e-3


@pytest.mark.parametrize("values", [{"task": "dpo"}, {"task": "distill"}, {"method": "full"}])
def test_tasks_and_methods_have_the_same_defaults_on_the_bundled_base(values):
    expected, config = recipe_of(values).train, TrainConfig.from_mapping(values)
    assert from_configs(None, config, {"model": "tiny"}).train == expected
    assert (expected.warmup_steps == 10) == (not TASKS[expected.task].defaults)


@pytest.mark.parametrize(
    ("defaults", "code"), [({"rank": 8}, "dependency"), ({"iters": "many"}, "invalid")]
)
def test_a_wrong_default_of_a_package_is_an_error(monkeypatch, defaults, code):
    plugin = Plugin("tasks", "focal", "focal:FACTS", "focal-task", "1.0")
    monkeypatch.setitem(TASKS, "focal", replace(TASKS["lm"], defaults=defaults))
    monkeypatch.setattr(Table, "plugin", lambda *_: plugin)
    with raises(code, {"dependency": "task"}.get(code, "iters")):
        TrainConfig(task="focal")


def test_every_setting_with_a_default_of_a_task_is_one_of_its_settings():
    for facts in TASKS.values():
        assert facts.defaults.keys() <= {field.name for field in FIELDS}
        assert not any(facts_of(f).shown_default for f in FIELDS if f.name in facts.defaults)


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
        for field in dataclasses.fields(config)
    ]
    assert list(parameters) == expected
    assert all(tasks_of(field.name) for field in dataclasses.fields(TaskSettings))


def test_the_settings_of_a_task_are_checked_against_each_other():
    with raises("conflict", "loss", "--label-smoothing"):
        TrainConfig(task="dpo", loss="robust")
    with raises("conflict", "fim_tokens", "--fim-rate"):
        TrainConfig(fim_tokens=("a", "b", "c"))
    with raises("conflict", "fim_tokens") as error:
        TrainConfig(task="dpo", fim_tokens=("a", "b", "c"))
    assert error.value.message == "--fim-tokens: needs --task lm."


def test_settings_are_checked_where_a_phase_has_their_task_and_rejected_where_none_has():
    lm = Phase("c", task="lm")
    with raises("conflict", "label_smoothing", "--loss hinge"):
        TrainConfig(phases=(lm, Phase(task="cpo")), loss="hinge", label_smoothing=0.1)
    phases = (Phase("a", task="dpo"), Phase("b", task="orpo"))
    for name, value in (("fim_rate", 0.5), ("loss_on", "all")):
        with raises("conflict", name, "needs --task lm"):
            TrainConfig(phases=phases, **{name: value})
    assert TrainConfig(phases=(*phases, lm), loss_on="all").loss_on == "all"
