"""What is true of a setting stands at its field, and is complete."""

import dataclasses
import re
import typing

import pytest

from mlx_packs.config.choices import LOSSES
from mlx_packs.config.fields import (
    SECTIONS,
    Settings,
    _field_faults,
    facts_of,
    fields_where,
    option,
)
from mlx_packs.config.recipe import RunOptions
from mlx_packs.config.schema import DataConfig, LoRAConfig, Phase, TrainConfig
from mlx_packs.config.tasks import tasks_of
from mlx_packs.config.values import typed_value
from tests.helpers.errors import raises
from tests.helpers.interpreter import run_python

CONFIGS = (DataConfig, LoRAConfig, TrainConfig, RunOptions)
FIELDS = {field.name: field for config in CONFIGS for field in dataclasses.fields(config)}


@dataclasses.dataclass(frozen=True)
class Bounded(Settings):
    """Settings with every kind of bound."""

    share: float = option(0.5, "A.", section="Output", at_least=0, below=1)
    rate: float | None = option(None, "B.", section="Output", above=0)
    norm: float = option(1.0, "C.", section="Output", at_least=0, at_most=float("inf"))
    ranks: dict = option({}, "D.", section="Output", at_least=1, flags=())


@pytest.mark.parametrize("field", [*FIELDS.values(), *dataclasses.fields(Phase)])
def test_every_setting_has_sentences_and_a_section(field):
    facts = facts_of(field)
    assert re.fullmatch(r"[A-Z].*[.)]", facts.help) and facts.section in SECTIONS
    assert "[default" not in facts.help
    assert not facts.choices or field.default in (*facts.choices, None)


@pytest.mark.parametrize("field", FIELDS.values())
def test_a_setting_of_a_task_or_method_names_one_that_exists(field):
    facts = facts_of(field)
    assert set(tasks_of(field.name)) <= set(facts_of(FIELDS["task"]).choices)
    assert facts.method in (None, *facts_of(FIELDS["method"]).choices)
    assert not facts.dense or field.default in facts.dense


@pytest.mark.parametrize("config", [DataConfig, LoRAConfig, Phase, TrainConfig, RunOptions])
def test_defaults_have_their_types_and_no_faults(config):
    """They are not checked where they are used."""
    settings = config()
    names = [field.name for field in dataclasses.fields(config)]
    kinds = typing.get_type_hints(config)
    for name in names:
        value = getattr(settings, name)
        typed = typed_value(value, kinds[name], name)
        assert typed == value and type(typed) is type(value), name
    assert not list(_field_faults(settings, names))


def test_names_are_unique_and_settings_of_losses_are_settings_of_embeddings():
    assert len(FIELDS) == sum(len(dataclasses.fields(config)) for config in CONFIGS)
    named = {name for facts in LOSSES.values() for name in facts.settings}
    others = {"query_prompt"}
    assert named == {name for name in FIELDS if tasks_of(name) == ("embedding",)} - others


def test_settings_of_a_phase_are_those_that_a_phase_has():
    own = {*fields_where(TrainConfig, DataConfig, phase=True)} - {"hf_dataset"}
    others = {"name", "replay", "optimizer_state"}
    assert own == {field.name for field in dataclasses.fields(Phase)} - others


def test_settings_out_of_bounds_are_errors_and_those_without_a_flag_named_by_their_key():
    Bounded(share=0.0, rate=1e-9, norm=float("inf"), ranks={"a": 1})
    outside = {"share": 1.0, "rate": 0.0, "norm": -1.0, "ranks": {"a": 1, "b": 0}}
    for setting, value in outside.items():
        with raises("invalid", setting) as error:
            Bounded(**{setting: value})
    assert error.value.message.startswith("ranks: ")


def test_every_wrong_value_is_reported_whatever_is_wrong_before_it():
    wrong = {"optimizer": "adamm", "task": "sft_", "seed": -1, "batch_size": 0, "betas": (2,)}
    with raises("unknown", "task") as error:
        TrainConfig(**wrong)
    for flag in ("--task:", "--optimizer:", "--seed:", "--batch-size:", "--betas:"):
        assert error.value.message.count(flag) == (flag != "--betas:"), flag  # of an optimizer


def test_configuration_is_read_without_mlx():
    code = "import sys; from mlx_packs.config import external, recipe\n"
    code += "recipe.resolve({'lr_schedule': 'wsd', 'phases': [{}]}, 'c.yaml')\n"
    assert run_python(code + "print('mlx.core' in sys.modules)").split() == ["False"]


def test_the_docstring_of_a_configuration_has_the_meaning_and_default_of_each_setting():
    for config in (TrainConfig, LoRAConfig, DataConfig):
        shown = re.findall(r"(?m)^    (\w+): [A-Z]", config.__doc__)
        assert sorted(shown) == sorted(field.name for field in dataclasses.fields(config))
    assert "rank: Rank of the adapters. [16]" in LoRAConfig.__doc__
    batch_size = TrainConfig.__doc__.split("    batch_size: ")[1].split("\n    m")[0]
    assert "1 with --task grpo" in " ".join(batch_size.split())
