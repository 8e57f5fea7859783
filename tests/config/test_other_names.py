"""Flags and keys of other trainers are answered with ours."""

import pytest

from mlx_packs.cli.main import packs
from mlx_packs.cli.options import SETTINGS
from mlx_packs.config.fields import facts_of
from mlx_packs.config.other_names import _VALUES, OTHER_NAMES, without_removed
from mlx_packs.config.recipe import _OWNERS, resolve
from mlx_packs.errors import flag_of
from tests.helpers.errors import raises


def test_all_are_answered_with_a_setting_and_are_none():
    assert set(OTHER_NAMES.values()) <= set(_OWNERS)
    assert not set(OTHER_NAMES) & set(_OWNERS)


@pytest.mark.parametrize("name", ["num-train-epochs", "lora-r", "output-dir", "max-length"])
def test_a_flag_is_answered_with_ours(name):
    ours = OTHER_NAMES[name.replace("-", "_")].replace("_", "-")
    with raises("unknown", None, f"--{name}", f"--{ours}"):
        packs(["train", f"--{name}", "1"], standalone_mode=False)


@pytest.mark.parametrize("key", ["num_train_epochs", "lora_r", "adam_beta2"])
def test_a_key_is_answered_with_ours(key):
    with raises("unknown", None, key, OTHER_NAMES[key]):
        resolve({key: 1}, "recipe.yaml")


@pytest.mark.parametrize(
    ("setting", "value", "ours"),
    [
        ("task", "sft", "Use lm."),
        ("method", "qlora", "Use lora, and add --quantize nf4."),
        ("compute_dtype", "bf16", "Use bfloat16."),
        ("optimizer", "adamw_torch", "Use adamw."),
        ("report_to", "none", "Leave it out."),
    ],
)
def test_a_value_is_answered_with_ours(setting, value, ours):
    with raises("unknown", setting, value, ours):
        packs(["train", flag_of(setting), value], standalone_mode=False)


def test_values_that_are_suggested_are_no_other_setting():
    for setting in SETTINGS.keys() & _VALUES.keys():
        values = _VALUES[setting]
        choices = set(facts_of(SETTINGS[setting]).choices)
        theirs = {value for names in values.values() for value in names.split()}
        assert {ours.partition(",")[0] for ours in values} <= choices
        assert not theirs & choices


def test_lr_is_the_learning_rate(monkeypatch):
    with raises("invalid", "learning_rate"):
        packs(["train", "--lr", "-1"], standalone_mode=False)


def test_removed_settings_of_a_file_are_left_out_unless_they_were_used():
    assert without_removed({"for_merge": "none", "rank": 4}) == {"rank": 4}
    assert without_removed({"for_merge": "affine4"}) == {"for_merge": "affine4"}
